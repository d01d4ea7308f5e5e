"""A daemon reports the same GPU facts as torch."""

from __future__ import annotations

import pytest
import torch

from controllers.cluster.registration import node_facts
from placement.mapping.search import KnownNodes, describe_nodes
from placement.slots import NodeSlots

pytestmark = pytest.mark.gpu


async def test_a_gpu_is_told_with_the_memory_that_torch_finds_and_can_be_planned_for() -> None:
    slots = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    facts = await node_facts(slots)
    assert facts is not None, "nvidia-smi answers, and no GPU is divided up"
    found = min(torch.cuda.get_device_properties(number).total_memory for number in range(len(slots))) / 2**30
    # The driver keeps a little for itself.
    assert all(slot.memory_gib is not None and found <= slot.memory_gib < 1.03 * found for slot in facts.slots)
    assert isinstance(describe_nodes([NodeSlots("n", slots, facts)]), KnownNodes)
