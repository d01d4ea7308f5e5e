"""How a slot is called, and what of its machine the name means. Pure.

- `cuda:3` is the GPU that the driver numbers 3, and `cuda:GPU-8f6d…` (or `MIG-…`) the one with that name of the driver's;
- `cpu:0-3`, or `cpu:0-3,8-11`, is a set of cores: its workers run on those alone, with a thread for each;
- `cpu:0` is one core, whichever the system gives; no worker is bound to it. That is a laptop's kind. (`cpu:5-5` is the core 5.)
- `emulated:0` is no device (`gcore.emulated`), and has no place in a cluster that trains.

Names only: whether the machine has what is named is asked of the machine, by others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MOST_CORES = 4096
"""A core's number is below it."""

MOST_SLOTS = 4096
"""Of one node."""

_NUMBERED = re.compile(r"(cpu|cuda|emulated):(0|[1-9][0-9]{0,5})")
_NAMED_GPU = re.compile(r"cuda:(GPU|MIG)-[A-Za-z0-9/-]{1,100}")
_CORES = re.compile(r"cpu:([0-9]+-[0-9]+)(,[0-9]+(-[0-9]+)?)*")
HOW = "Write cuda:0, cpu:0-3 (a set of cores), or cpu:0 (one core, whichever is free)"


def is_cuda(slot: str) -> bool:
    """Whether a slot is a GPU."""
    return slot.startswith("cuda:")


def is_cpu(slot: str) -> bool:
    """Whether a slot is one of cores."""
    return slot.startswith("cpu:")


def bound_cores(slot: str) -> frozenset[int]:
    """The cores that a slot names; none where it is no set of cores."""
    if not _CORES.fullmatch(slot) or slot_problem(slot):
        return frozenset()
    return frozenset(core for part in slot.removeprefix("cpu:").split(",") for core in _range(part))


def worker_cores(slots: Iterable[str]) -> tuple[int, ...]:
    """The cores on which a worker of these slots runs, in order; none: wherever the system lets it."""
    return tuple(sorted(frozenset[int]().union(*(bound_cores(slot) for slot in slots))))


def count_threads(slots: Iterable[str]) -> int:
    """How many threads a worker of these slots may compute with: one for each core, and one beside GPUs."""
    return max(1, sum(len(bound_cores(slot)) or 1 for slot in slots if not is_cuda(slot)))


def slot_problem(slot: str) -> str:
    """What is wrong with a slot's name, or nothing."""
    if _NUMBERED.fullmatch(slot) or _NAMED_GPU.fullmatch(slot):
        return ""
    if not _CORES.fullmatch(slot):
        return f"{slot[:80]!r} is no slot. {HOW}"
    parts = slot.removeprefix("cpu:").split(",")
    for part in parts:
        first, _, last = part.partition("-")
        if max(len(first), len(last)) > 6 or int(last or first) >= MOST_CORES:
            return f"{slot[:80]!r} names a core beyond {MOST_CORES - 1}"
        if int(last or first) < int(first):
            return f"{slot[:80]!r} counts down: write {last}-{first}"
    if sum(len(_range(part)) for part in parts) > len({core for part in parts for core in _range(part)}):
        return f"{slot[:80]!r} names a core twice"
    return ""


def slots_problem(slots: Sequence[str]) -> str:
    """What is wrong with the slots of a node, one by one and together, or nothing."""
    if len(slots) > MOST_SLOTS:
        return f"{len(slots)} slots are more than one node may have ({MOST_SLOTS})"
    for slot in slots:
        if problem := slot_problem(slot):
            return problem
    if len(set(slots)) < len(slots):
        twice = next(slot for place, slot in enumerate(slots) if slot in slots[:place])
        return f"slot {twice!r} stands there twice"
    cpus = [slot for slot in slots if is_cpu(slot)]
    bound = [slot for slot in cpus if bound_cores(slot)]
    if bound and len(bound) < len(cpus):
        loose = next(slot for slot in cpus if slot not in bound)
        return f"{bound[0]!r} names its cores and {loose!r} does not; name them for every slot of cores, or for none"
    owner: dict[int, str] = {}
    for slot in bound:
        for core in sorted(bound_cores(slot)):
            if core in owner:
                return f"{owner[core]!r} and {slot!r} both have the core {core}"
            owner[core] = slot
    return ""


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
