"""Which engine a request goes to. Pure.

The one that owes least of those that serve the wanted weights or are being brought to them at this moment. What they owe is
counted in responses, or in the tokens that are expected of them (`rollout.balance`). When a step begins, one
engine is ready a little before the others, and would be given the whole step. A request that was given to an engine on its
way waits for it there; as soon as one that serves is no busier, it goes there instead, so that an engine which does not
come up holds nothing back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gcore.types import Version


@dataclass(frozen=True, slots=True)
class Following:
    """How a request lives through changes of weights: it begins with the version `wanted` now, of which `began` is told."""

    wanted: Callable[[], Version]
    began: Callable[[Version], None]


@dataclass(slots=True)
class Seat:
    """Where a response of several turns is made: its next turn goes to the engine that made the last one, which has all that is
    before it in its cache, for as long as that serves."""

    instance: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """An engine as a request of `version` sees it. `owed`: what it has to answer, with what waits for it."""

    instance: str
    owed: float
    serving: bool
    """Whether it serves the version; if not, it is on its way there."""


def route(loads: Sequence[Load], size: float, held: str | None = None, last: str | None = None) -> str | None:
    """Where a request goes that is as much as `size`; None while there is nobody.

    `held`: where it waits already, counted there. `last`: the engine of the turn before, however busy it is.
    """
    by_name = {load.instance: load for load in loads}
    if last is not None and last in by_name and by_name[last].serving:
        return last
    own = by_name.get(held) if held is not None else None
    if own is not None:
        if own.serving:
            return own.instance
        others = [load for load in loads if load.serving and load.owed + size <= own.owed]
        return min(others, key=_busy).instance if others else own.instance
    return min(loads, key=_busy).instance if loads else None


def _busy(load: Load) -> tuple[float, bool, str]:
    return (load.owed, not load.serving, load.instance)
