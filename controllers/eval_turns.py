"""Which parts of an evaluation a controller answers, and when it takes those of others. Pure.

The members that have engines stand in an order that depends on the version; part after part goes to one after the other, so
that all get as many. When nothing has come for a while from whoever owns a part, the next in the order takes it over, and goes
from the end, because its owner goes from the beginning. When a member is gone, the order is another at once. Two that answer
one part do no harm: the first to write it down wins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from controllers import turns
from gcore.ledger.guarded import Stored
from gcore.ledger.job import Plan
from gcore.ledger.records import Member
from gcore.types import Version

TAKEOVER_S = 20.0
"""So long nothing must have come from a part's owner before the next peer takes it; twice as long, and from both, before
the one after it does, and so on."""


def order(version: Version, members: Collection[str]) -> tuple[str, ...]:
    """The members in the order of the version's evaluation."""
    return turns.order(members, f"eval {version}")


def equipped(members: Mapping[str, Stored[Member]], plan: Plan | None) -> tuple[str, ...]:
    """The members on whose nodes the plan has rollout engines; all of them if that is none."""
    nodes = plan.rollout_nodes if plan is not None else frozenset()
    return tuple(sorted(name for name, member in members.items() if member.record.node in nodes)) or tuple(
        sorted(members)
    )


def place_of(me: str, number: int, members: tuple[str, ...]) -> int:
    """My place in the order of part `number`: 0 answers it. Whoever is not among the `members` comes last."""
    return (members.index(me) - number) % len(members) if me in members else len(members)


def to_take(
    me: str, open_parts: Collection[int], members: tuple[str, ...], quiet_s: Mapping[str, float]
) -> tuple[int, ...]:
    """Which of the parts that nobody has delivered are for me now, the most urgent first.

    `members` in the version's order; `quiet_s`: since when each of them has delivered nothing.
    """

    def is_mine(number: int, place: int) -> bool:
        ahead = (members[(number + before) % len(members)] for before in range(place))
        return all(quiet_s[name] >= place * TAKEOVER_S for name in ahead)

    places = {number: place_of(me, number, members) for number in open_parts}
    mine = [number for number, place in places.items() if is_mine(number, place)]
    return tuple(sorted(mine, key=lambda number: (places[number], -number if places[number] else number)))
