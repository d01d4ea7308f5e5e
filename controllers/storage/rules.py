"""Decide which unneeded files on a node are deleted, by the retention policies of its configuration
(`gcore.config.node`).

Files that an unfinished job uses are kept regardless of the policy. Unknown files are kept too: a folder whose job is
not in this store belongs to somebody else. `controllers.storage.garbage` finds the files and carries out the decisions.
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
    """Decision on a candidate. `goes`: it is deleted. `why`: the reason for that, or for keeping it."""

    found: GarbageCandidate
    goes: bool
    why: str


def retention_policies(section: GarbageSection) -> Mapping[Kind, KeepPolicy]:
    """Return the retention policy of each kind of file. Scratch files are not kept at all after their job has
    ended."""
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
    """Return why the policy deletes an unneeded candidate; empty: it keeps it. `place`: its position among the unneeded
    ones of its kind, 1 is the newest. `total`: bytes of the kept files of its kind, including it."""
    if keep.everything or place <= (keep.newest or 0):
        return ""
    if keep.days is not None and now - one.used > keep.days * DAY_S:
        return f"older than {keep.days:g} days"
    if keep.total_gib is not None and total > keep.total_gib * GIB:
        return f"newer files use {keep.total_gib:g} GiB"
    if keep.days is None and keep.total_gib is None:
        return f"not among the newest {keep.newest}" if keep.newest else "its job has ended"
    return ""
