"""What rewards are made of, part by part, as a step's numbers. For people; nothing is decided by it. Pure.

A group carries the means of its samples' parts; a step's number is the mean over the groups of the sources whose rewards have
that part. A part that a sample does not have (nothing was taken off for its length, say) counts as 0 there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gcore.ledger.records import SealedGroup
from gcore.types import Group

PREFIX = "reward_part/"
MOST, LONGEST = 6, 32
"""Parts that a group carries, in the order in which its samples name them, and characters of a name: they go through the store."""


def group_parts(group: Group) -> dict[str, float]:
    """The mean of each part over the group's samples."""
    names = dict.fromkeys(name for sample in group.samples for name, _ in sample.reward_parts)
    shown = list(names)[:MOST]
    count = len(group.samples)
    totals = {name: math.fsum(dict(sample.reward_parts).get(name, 0.0) for sample in group.samples) for name in shown}
    # Six digits: it is for people, and each takes room in every offer and seal.
    return {name[:LONGEST]: float(f"{total / count:.6g}") for name, total in totals.items()}


def part_stats(groups: Sequence[SealedGroup]) -> dict[str, float]:
    """The numbers of a sealed step: `reward_part/NAME`."""
    having: dict[str, set[str]] = {}
    for group in groups:
        for name in group.parts:
            having.setdefault(name, set()).add(group.source)
    stats = {}
    for name, sources in having.items():
        of_it = [group.parts.get(name, 0.0) for group in groups if group.source in sources]
        stats[PREFIX + name] = math.fsum(of_it) / len(of_it)
    return stats


def named_parts(stats: Mapping[str, float]) -> dict[str, float]:
    """The parts among a step's numbers, by name."""
    return {key.removeprefix(PREFIX): value for key, value in stats.items() if key.startswith(PREFIX)}
