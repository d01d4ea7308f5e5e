"""What the engines of a node did in a step, in sums: by pool, and of each pool by load; and what of their own sums is kept."""

from __future__ import annotations

from dataclasses import asdict, fields

from gcore.ledger.books import EngineSums
from gcore.ledger.books_file import Kept
from gcore.rollout.metered import Sums
from gcore.rollout.readings import ALMOST_S, EngineReading, EngineTime
from placement.books import Pool
from placement.measured import load_of


class EngineWork:
    """What engines did in a step, as much of it as is known. Mutable; however long the step is, it takes no more room."""

    def __init__(self) -> None:
        self.sums: dict[str, EngineSums] = {}
        """By pool."""
        self._loads: dict[str, dict[int, EngineSums]] = {}

    @property
    def loads(self) -> dict[str, tuple[EngineSums, ...]]:
        """Of each pool by load: of 1 request, of 2 and 3, of 4 to 7 and so on."""
        return {pool: tuple(found for _, found in sorted(by_load.items())) for pool, by_load in self._loads.items()}

    def add(self, pool: Pool, passed: EngineTime, begin: float, end: float) -> None:
        """What is of an engine's time between two moments, as if it had been even throughout."""
        share = (min(passed.end, end) - max(passed.begin, begin)) / (passed.end - passed.begin)
        if share <= 0:
            return
        part = EngineSums(
            active_s=passed.active_s * share,
            running_s=passed.running_s * share,
            tokens=round(passed.tokens * share),
            requests=round(passed.requests * share),
        )
        self.sums[pool] = self.sums[pool].plus(part) if pool in self.sums else part
        if part.active_s > 0:
            load = load_of(passed.running_s / passed.active_s)
            by_load = self._loads.setdefault(pool, {})
            by_load[load] = by_load[load].plus(part) if load in by_load else part


def beginning_of(reading: EngineReading, since: float, came: float | None = None) -> EngineReading | None:
    """What would have been read when the engine began; None if that was before `since`, or nobody knows.

    One that began before that, while it loaded, and was seen to begin to serve at `came`: what would have been read then. Nobody has asked it
    for anything before, so it rested."""
    sums = reading.sums
    if sums is None:
        return None
    life = sums.busy_s + sums.idle_s + sums.paused_s + sums.asleep_s
    if reading.at - life >= since:
        return EngineReading(reading.at - life, type(sums)(sums.at - life), 0.0, 0.0, 0, 0)
    begin = None if came is None else max(since, came)
    if begin is None or begin >= reading.at:
        return None
    rested = life - (reading.at - begin)
    idle_s = min(sums.idle_s, rested)
    asleep_s = rested - idle_s
    if asleep_s > sums.asleep_s + ALMOST_S:
        return None
    return EngineReading(begin, type(sums)(sums.at - life + rested, idle_s=idle_s, asleep_s=asleep_s), 0.0, 0.0, 0, 0)


COUNTED = ("tokens", "requests")


def kept_of(slot: str, reading: EngineReading) -> Kept:
    """What an engine had summed up when it was read, to be written down."""
    assert reading.sums is not None
    counted = {name: float(getattr(reading, name)) for name in COUNTED}
    return Kept(slot, reading.at, {**asdict(reading.sums), **counted})


def reading_of(kept: Kept) -> EngineReading | None:
    """Inverse of `kept_of`; None for what is no engine's."""
    try:
        sums = Sums(**{one.name: kept.sums[one.name] for one in fields(Sums)})
        return EngineReading(kept.at, sums, 0.0, 0.0, *(int(kept.sums[name]) for name in COUNTED))
    except KeyError:
        return None
