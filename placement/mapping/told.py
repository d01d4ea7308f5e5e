"""From what nodes and jobs tell of themselves (`gcore.ledger.facts`) to what placements are searched with. Pure.

What nobody tells is not guessed: then there is a sentence in its place. How fast accelerators are that `placement.mapping.devices`
does not know is not known either, and then memory alone is planned with. Networks and the shared folder are taken as a cluster's file
takes them where it says nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcore.config import JobSpec
from gcore.errors import DataError, UsageError
from gcore.ledger.facts import ModelConfigs, SlotFacts
from placement.mapping.cluster import Cluster, cluster_of
from placement.mapping.shapes import shape_of
from placement.mapping.workload import Lengths, Shapes, Workload, workload_of
from placement.plan import NodeSlots

CALLED: Mapping[str, str] = {
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
}
"""By what the driver calls an accelerator, its name in `placement.mapping.devices`."""
CORE = "cpu-core"
NO_FIGURES: dict[str, Any] = {"tflops": 1.0, "bandwidth_gb_s": 1.0, "link_gb_s": 1.0}
"""In the place of what is not known: times that follow from it are not looked at."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The nodes that are there. `untimed`: why no time can be predicted; empty where it can."""

    cluster: Cluster
    untimed: str = ""


def seen(nodes: Sequence[NodeSlots]) -> Seen | str:
    """What the nodes are, or why that is not known."""
    there = [node for node in nodes if node.slots]
    silent = sorted(node.node for node in there if node.facts is None)
    if silent or not there:
        return _silent(silent)
    kinds: dict[tuple[int, str, bool], dict[str, Any]] = {}
    for node in there:
        assert node.facts is not None
        known = {slot.slot: slot for slot in node.facts.slots}
        slots = [known[name] for name in node.slots if name in known]
        memories = {slot.memory_gib for slot in slots}
        if len(slots) < len(node.slots) or (None in memories and len(memories) > 1):
            return f"{node.node} does not tell alike of all its slots"
        device = _device(slots)
        kind = kinds.setdefault((len(slots), device, None in memories), {"count": 0})
        kind["count"] += 1
        _keep_least(kind, "host_memory_gib", node.facts.host_memory_gib)
        if None not in memories:
            _keep_least(kind, "memory_gib", min(memory for memory in memories if memory is not None))
    unknown = sorted({device for _, device, is_core in kinds if not is_core and device not in CALLED})
    tree = [_tree(*key) | kind for key, kind in kinds.items()]
    try:
        cluster = cluster_of({"nodes": tree}, where="the nodes that are there")
    except UsageError as error:
        return error.what
    return Seen(cluster, f"how fast {unknown[0] or 'a GPU'} is is not known" if unknown else "")


def work_of(spec: JobSpec, models: ModelConfigs | None) -> Workload | str:
    """What a step of the job is, or why that is not known."""
    if models is None:
        return "what the job's models are was not kept"
    served = [judge.name for judge in spec.served_judges]
    try:
        shapes = Shapes(
            policy=shape_of(models.policy, where="model.path"),
            critic=None if models.critic is None else shape_of(models.critic, where="train.critic.path"),
            judges={name: shape_of(models.judges.get(name, {}), where=f"judge {name}") for name in served},
        )
    except DataError as error:
        return f"{error.where}: {error.what}"
    return workload_of(spec, shapes, Lengths.guessed(spec, shapes.policy))


def _silent(nodes: Sequence[str]) -> str:
    if len(nodes) < 2:
        return f"{nodes[0]} tells no memory" if nodes else "no node is there"
    more = f" and {len(nodes) - 2} more" if len(nodes) > 2 else ""
    return f"{nodes[0]}{',' if more else ' and'} {nodes[1]}{more} tell no memory"


def _device(slots: Sequence[SlotFacts]) -> str:
    """What they are called, if all are called alike."""
    names = {slot.device for slot in slots}
    return names.pop() if len(names) == 1 else ""


def _keep_least(kind: dict[str, Any], name: str, value: float) -> None:
    kind[name] = min(kind.get(name, value), value)


def _tree(accelerators: int, device: str, is_core: bool) -> dict[str, Any]:
    base: dict[str, Any] = {"accelerators": accelerators}
    if is_core:
        return base | {"device": CORE}
    return base | ({"device": CALLED[device]} if device in CALLED else NO_FIGURES)
