"""Names of slots (a GPU, or CPU cores), and the devices or cores that each name stands for. Pure.

- `cuda:3` is the GPU with the driver's number 3; `cuda:GPU-8f6d…` (or `MIG-…`) is the GPU with that driver name.
- `cpu:0-3`, or `cpu:0-3,8-11`, is a set of cores: its workers run only on these, with one thread per core.
- `cpu:0` is any one core; no worker is bound to it. Laptops use this kind. (`cpu:5-5` is core 5.)
- `emulated:0` is a slot without a device (`gcore.emulated`); a cluster that trains cannot have it.

This module checks names only; other modules check whether the machine has what a slot names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MOST_CORES = 4096
"""Upper bound of core numbers."""

MOST_SLOTS = 4096
"""Most slots of one node."""

_NUMBERED = re.compile(r"(cpu|cuda|emulated):(0|[1-9][0-9]{0,5})")
_NAMED_GPU = re.compile(r"cuda:(GPU|MIG)-[A-Za-z0-9/-]{1,100}")
_CORES = re.compile(r"cpu:([0-9]+-[0-9]+)(,[0-9]+(-[0-9]+)?)*")
HOW = "Write cuda:0, cpu:0-3 (a set of cores), or cpu:0 (one core, whichever is free)"


def is_cuda(slot: str) -> bool:
    """Return whether a slot is a GPU."""
    return slot.startswith("cuda:")


def is_cpu(slot: str) -> bool:
    """Return whether a slot consists of CPU cores."""
    return slot.startswith("cpu:")


def bound_cores(slot: str) -> frozenset[int]:
    """Return the CPU cores that a slot name lists (`cpu:0-3`); empty for other slots and for an invalid name."""
    if not _CORES.fullmatch(slot) or slot_problem(slot):
        return frozenset()
    return frozenset(core for part in slot.removeprefix("cpu:").split(",") for core in _range(part))


def worker_cores(slots: Iterable[str]) -> tuple[int, ...]:
    """Return the cores to which a worker on these slots is bound, ascending; empty if it is bound to none."""
    return tuple(sorted(frozenset[int]().union(*(bound_cores(slot) for slot in slots))))


def count_threads(slots: Iterable[str]) -> int:
    """Return the number of compute threads for a worker on these slots: one per core; one if all slots are GPUs."""
    return max(1, sum(len(bound_cores(slot)) or 1 for slot in slots if not is_cuda(slot)))


def slot_problem(slot: str) -> str:
    """Return what is wrong with a slot's name; empty if it is valid."""
    if _NUMBERED.fullmatch(slot) or _NAMED_GPU.fullmatch(slot):
        return ""
    if not _CORES.fullmatch(slot):
        return f"{slot[:80]!r} is not a slot. {HOW}"
    parts = slot.removeprefix("cpu:").split(",")
    for part in parts:
        first, _, last = part.partition("-")
        if max(len(first), len(last)) > 6 or int(last or first) >= MOST_CORES:
            return f"{slot[:80]!r} names a core above {MOST_CORES - 1}"
        if int(last or first) < int(first):
            return f"{slot[:80]!r} is a descending range: write {last}-{first}"
    if sum(len(_range(part)) for part in parts) > len({core for part in parts for core in _range(part)}):
        return f"{slot[:80]!r} names a core twice"
    return ""


def slots_problem(slots: Sequence[str]) -> str:
    """Return what is wrong with the slots of a node, individually or together; empty if they are valid."""
    if len(slots) > MOST_SLOTS:
        return f"there are {len(slots)} slots, but a node may have at most {MOST_SLOTS}"
    for slot in slots:
        if problem := slot_problem(slot):
            return problem
    if len(set(slots)) < len(slots):
        twice = next(slot for place, slot in enumerate(slots) if slot in slots[:place])
        return f"slot {twice!r} is listed twice"
    cpus = [slot for slot in slots if is_cpu(slot)]
    bound = [slot for slot in cpus if bound_cores(slot)]
    if bound and len(bound) < len(cpus):
        loose = next(slot for slot in cpus if slot not in bound)
        return f"{bound[0]!r} names its cores and {loose!r} does not; name cores for all CPU slots, or for none"
    owner: dict[int, str] = {}
    for slot in bound:
        for core in sorted(bound_cores(slot)):
            if core in owner:
                return f"{owner[core]!r} and {slot!r} both contain core {core}"
            owner[core] = slot
    return ""


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
