"""Nodes that report their facts, and the stored facts of a model's configuration."""

from __future__ import annotations

from gcore.ledger.records.cluster import ConfigValue, NodeFacts, SlotFacts
from placement.slots import NodeSlots

QWEN: dict[str, ConfigValue] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
H100 = "NVIDIA H100 80GB HBM3"


def node(name: str, *memory: float | None, device: str = H100, host: float = 500.0) -> NodeSlots:
    """A slot for each `memory`: a GPU with so many GiB, or a core."""
    names = tuple(f"{'cpu' if one is None else 'cuda'}:{i}" for i, one in enumerate(memory))
    slots = tuple(
        SlotFacts(slot=slot, memory_gib=one, device="" if one is None else device)
        for slot, one in zip(names, memory, strict=True)
    )
    return NodeSlots(name, names, NodeFacts(host_memory_gib=host, slots=slots))
