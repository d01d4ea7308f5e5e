"""From what a committed step left behind to what policies are shown of it. Pure.

Three sources: the step's log entry has its seconds, as the controller that committed it saw them; its seal has the lengths of its
responses; the books of the nodes have what their engines did. Whoever plans calls this once a step, with what there is: a number that
nobody measured is None or missing, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log2

from gcore.ledger.books import EngineSums, StepBook
from gcore.ledger.records import LogEntry, Seal
from placement.measured import EngineSpeed, Measured
from placement.split import Split

BUSY = "busy "
"""How states of work begin in a step's books; the pool follows."""
LEAST_TOKENS = 16
"""Of fewer it is not said how fast they were made."""


def measured(books: Iterable[StepBook], entry: LogEntry, seal: Seal | None, split: Split) -> Measured:
    """One committed step. `books`: of each node that has booked it (`gcore.ledger.books.of_version`), those that are late may lack.

    `seal`: the step's, as it was READY; None if nobody has it any more: every response then counts as long as their mean. `split`:
    that which the step ran with. Of judgements the mean is known: every response's counts as long.
    """
    found = list(books)
    stats, sums = entry.stats, _sums(found)
    lengths = _lengths(entry, seal)
    reward = sums.get("reward")
    judged = reward.tokens / _judged(entry, len(lengths)) if reward is not None and lengths else 0.0
    exchange = stats.get("exchange_s")
    publish = stats.get("publish_s")
    return Measured(
        step=entry.step,
        split=split,
        lengths=lengths,
        judged=(judged,) * len(lengths) if reward is not None else (),
        train_tokens=stats.get("tokens", 0.0),
        produce_s=stats.get("collect_s"),
        train_s=stats.get("train_s"),
        other_s=None if exchange is None or publish is None else exchange + publish,
        speed=tuple(_speeds(found)),
        busy=_busy(found),
    )


def _sums(books: Iterable[StepBook]) -> dict[str, EngineSums]:
    sums: dict[str, EngineSums] = {}
    for book in books:
        for pool, total in book.engines.items():
            sums[pool] = sums[pool].plus(total) if pool in sums else total
    return sums


def _speeds(books: Iterable[StepBook]) -> Iterator[EngineSpeed]:
    """Of each pool at each load that its engines had for long enough to say how fast they were."""
    found: dict[tuple[str, int], EngineSums] = {}
    for book in books:
        for pool, loads in book.loads.items():
            for one in loads:
                key = pool, round(log2(max(one.running_s / one.active_s, 1.0))) if one.active_s > 0 else 0
                found[key] = found[key].plus(one) if key in found else one
    for (pool, _), one in sorted(found.items()):
        if one.active_s > 0 and one.tokens >= LEAST_TOKENS:
            yield EngineSpeed(pool, one.running_s / one.active_s, one.running_s / one.tokens)


def _busy(books: Iterable[StepBook]) -> dict[str, float]:
    busy: dict[str, float] = {}
    for book in books:
        for state, seconds in book.booked.items():
            if state.startswith(BUSY):
                pool = state.removeprefix(BUSY)
                busy[pool] = busy.get(pool, 0.0) + seconds
    return busy


def _lengths(entry: LogEntry, seal: Seal | None) -> tuple[float, ...]:
    if seal is not None:
        return tuple(float(tokens) for group in seal.groups for tokens in group.own_tokens)
    return (entry.stats.get("response_length", 0.0),) * int(entry.stats.get("samples", 0.0))


def _judged(entry: LogEntry, samples: int) -> float:
    """Responses that were judged in the step: those of filtered groups too."""
    return samples * max(entry.stats.get("prompts_per_group", 1.0), 1.0)
