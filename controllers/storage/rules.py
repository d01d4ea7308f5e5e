"""Decide which files on a node are no longer needed, by the policy of its configuration (`gcore.config.node`).

Files that an unfinished job uses are kept regardless of the policy. Unknown files are kept too: a folder whose job is
not in this store belongs to somebody else. This module reads and deletes nothing (`controllers.storage.garbage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore.config.node import GarbageSection, KeepPolicy

Kind = Literal["run", "cache", "log", "scratch"]
DAY_S, GIB = 86400.0, 1 << 30


@dataclass(frozen=True, slots=True)
class GarbageCandidate:
    """A file or folder on this node that may be deleted. `used`: last use, in seconds since the epoch. `needed_by`: why
    it must be kept, or empty."""

    kind: Kind
    path: Path
    bytes: int
    used: float
    needed_by: str = ""


@dataclass(frozen=True, slots=True)
class GarbageDecision:
    """Whether a candidate is deleted, and why, or why it is kept."""

    found: GarbageCandidate
    goes: bool
    why: str


def retention_policies(section: GarbageSection) -> Mapping[Kind, KeepPolicy]:
    """Return the policy of each kind. Files of an ended job's processes are deleted at once."""
    return {"run": section.runs, "cache": section.caches, "log": section.logs, "scratch": KeepPolicy(newest=0)}


def decide_garbage(
    found: Iterable[GarbageCandidate], section: GarbageSection, now: float
) -> tuple[GarbageDecision, ...]:
    """Decide on each candidate, the newest of each kind first."""
    everything = sorted(found, key=lambda one: (one.kind, -one.used, str(one.path)))
    verdicts: list[GarbageDecision] = []
    for kind, keep in retention_policies(section).items():
        verdicts += _of_kind([one for one in everything if one.kind == kind], keep, now)
    return tuple(verdicts)


def _of_kind(found: list[GarbageCandidate], keep: KeepPolicy, now: float) -> list[GarbageDecision]:
    total = sum(one.bytes for one in found if one.needed_by)  # files that must be kept count first
    verdicts, place = [], 0
    for one in found:
        if one.needed_by:
            verdicts.append(GarbageDecision(one, False, one.needed_by))
            continue
        place += 1
        why = _why_it_goes(one, keep, place, total + one.bytes, now)
        if not why:
            total += one.bytes
        verdicts.append(GarbageDecision(one, bool(why), why or "the policy keeps it"))
    return verdicts


def _why_it_goes(one: GarbageCandidate, keep: KeepPolicy, place: int, total: int, now: float) -> str:
    """Return why an unneeded candidate is deleted: the `place`-th newest, with `total` bytes of kept files including
    it."""
    if keep.everything or place <= (keep.newest or 0):
        return ""
    if keep.days is not None and now - one.used > keep.days * DAY_S:
        return f"older than {keep.days:g} days"
    if keep.total_gib is not None and total > keep.total_gib * GIB:
        return f"newer files use {keep.total_gib:g} GiB"
    if keep.days is None and keep.total_gib is None:
        return f"not among the newest {keep.newest}" if keep.newest else "its job has ended"
    return ""
