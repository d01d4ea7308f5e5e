"""What policies are shown of a committed step.

Sources: the step's log entry has its seconds, as the controller that committed it measured them; its seal has the lengths of its
responses; the accounts of the nodes have what their engines did. A number that was not measured is None or missing, never a guess.

**Where batches are made ahead** (staleness > 0), a commit waits only for what is left of the batch's production by then. If the ranks had
to wait, production took the whole step. If not, engines become idle once they may begin nothing more, so it took as long as they had
requests. Where they share slots with ranks that work, or an account is missing, the step's own length is a bound. Weight sync goes on
meanwhile.

**Co-located**, engines of several pools may compute on one slot at once, and each takes longer. That they share the slot's pace evenly is
an assumption, by which their times are converted to those of an engine that has its slot for itself. Otherwise slots of their own would
look as slow as shared ones, and a job that began co-located would stay so.

**Filtered groups** were generated and judged like the rest. Their number and mean length are known; one by one they are taken to be like
those that were kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gcore.ledger.records.chain import LogEntry, Seal
from gcore.ledger.records.slot_accounting import EngineSums, StepAccount, sum_engines
from placement.slots import SINGLE, ReplicaSizes, Split


def load_class(running: float) -> int:
    """What is told apart of an engine's load: 0 is 1 request at a time, 1 is 2 and 3, 2 is 4 to 7 and so on."""
    return max(int(running), 1).bit_length() - 1


def least_requests(load: int) -> int:
    """Requests that make it that load, at least."""
    return 1 << load


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Of a pool's engines: requests that one ran at a time, and seconds that a token of each took then."""

    pool: str
    running: float
    token_s: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step. Times are None where nobody measured them. `lengths`, `judged`: tokens of each response and of its judgement, those of
    filtered groups too.

    `produce_s`: what a batch takes to be made; `train_s`: of the ranks; `other_s`: what holds the ranks up and is neither. `busy`:
    slot-seconds, by pool. `speed`: of a pool at as many loads as were seen. `step_s`: from commit to commit, where the next batch is made
    meanwhile, so that it is no sum of the others; no batch takes longer to be made. `asked_per_response`: requests to the judges' engines.
    """

    step: int
    split: Split
    lengths: tuple[float, ...]
    judged: tuple[float, ...]
    train_tokens: float
    produce_s: float | None
    train_s: float | None
    other_s: float | None
    speed: tuple[EngineSpeed, ...]
    busy: Mapping[str, float]
    step_s: float | None = None
    asked_per_response: float = 1.0

    @property
    def seconds(self) -> float | None:
        """From commit to commit; None where that was not measured."""
        if self.step_s is not None:
            return self.step_s
        if self.produce_s is None or self.train_s is None or self.other_s is None:
            return None
        return self.produce_s + self.train_s + self.other_s


BUSY = "busy "
"""How states of work begin in a step's books; the pool follows."""

LEAST_TOKENS = 16
"""Of fewer it is not said how fast they were made."""

WAITED = 0.1
"""Share of a step that its ranks waited for the batch, from which on it was production that the step took so long for; below, that is
what it takes to seal a batch that is there."""

MOST_REPEATED = 16.0
"""Responses that were made for each one that was kept, at most: a step that was nearly all filtered is no measure of the next."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of a step, as `MeasuredStep` has them."""

    produce_s: float | None
    other_s: float | None
    step_s: float | None = None


def measure_step(
    books: Iterable[StepAccount],
    entry: LogEntry,
    sealed: tuple[float, ...] | None,
    split: Split,
    sizes: ReplicaSizes = SINGLE,
    *,
    least: int = 0,
) -> MeasuredStep:
    """One committed step. `books`: of each node that has booked it (`gcore.ledger.records.slot_accounting.group_by_version`), those that are late may lack.

    `sealed`: what the step's seal says of its lengths (`trained_lengths`); None if nobody has it any more: every response then counts as long as
    their mean. `split`: that which the step ran with, with engines of so many slots. Of judgements the mean is known once all of its slots
    are booked, and `least` of them (a part of the judges' tokens beside all of the responses would be a guess): every response's counts as
    long.
    """
    found = list(books)
    stats, sums = entry.stats, sum_engines(found)
    lengths = tuple(_with_filtered(_means(entry) if sealed is None else sealed, stats))
    reward = sums.get("reward") if lengths and _is_whole(found, split, least) else None
    times = _ahead(stats, split, found, sizes) if "staleness" in stats else _in_turn(stats)
    return MeasuredStep(
        step=entry.step,
        split=split,
        lengths=lengths,
        judged=(reward.tokens / len(lengths),) * len(lengths) if reward is not None else (),
        train_tokens=stats.get("tokens", 0.0),
        produce_s=times.produce_s,
        train_s=stats.get("train_s"),
        other_s=times.other_s,
        speed=tuple(_speeds(found, _at_once(found, split, stats.get("collect_s"), sizes))),
        busy=_busy(found),
        step_s=times.step_s,
        asked_per_response=reward.requests / len(lengths) if reward is not None and reward.requests else 1.0,
    )


def _in_turn(stats: Mapping[str, float]) -> _Times:
    """Of a step whose batch was begun after the commit before."""
    exchange, publish = stats.get("exchange_s"), stats.get("publish_s")
    return _Times(stats.get("collect_s"), None if exchange is None or publish is None else exchange + publish)


def _ahead(stats: Mapping[str, float], split: Split, books: Sequence[StepAccount], sizes: ReplicaSizes) -> _Times:
    """Of a step whose batch was made while ranks trained on the one before."""
    seconds, waited = stats.get("seconds"), stats.get("collect_s")
    if seconds is None or waited is None:
        return _Times(None, None)
    produce_s = seconds if waited > WAITED * seconds else _at_work_s(books, split, sizes)
    if split.mode == "colocated" or produce_s is None:
        return _Times(None, stats.get("exchange_s"), seconds)
    return _Times(min(produce_s, seconds), stats.get("exchange_s"), seconds)


def _at_work_s(books: Sequence[StepAccount], split: Split, sizes: ReplicaSizes) -> float | None:
    """How long an engine had anything to do, of the pool that had longest; None: not all of them are booked."""
    if not _is_whole(books, split):
        return None
    sums = sum_engines(books)
    engines = {"rollout": split.rollout // sizes.rollout, "reward": split.reward // sizes.reward}
    return max((sums[pool].active_s / engines[pool] for pool in sums if engines.get(pool)), default=None)


def _is_whole(books: Iterable[StepAccount], split: Split, least: int = 0) -> bool:
    """Whether all slots that the step had are booked, and so many. Of a node that was lost within it they never are."""
    pools = split.rollout, split.reward, split.train
    had = max(pools) if split.mode == "colocated" else sum(pools)
    return sum(book.slots for book in books) >= max(had, least)


def _at_once(books: Sequence[StepAccount], split: Split, produce_s: float | None, sizes: ReplicaSizes) -> float:
    """Engines that had anything to do at once on a slot, on average over the production: 1, where each has its own."""
    slots = sum(book.slots for book in books)
    if split.mode != "colocated" or not produce_s or not slots:
        return 1.0
    size = {"rollout": sizes.rollout, "reward": sizes.reward}
    active = sum(sums.active_s * size[pool] for pool, sums in sum_engines(books).items() if pool in size)
    return max(active / (slots * produce_s), 1.0)


def _speeds(books: Iterable[StepAccount], at_once: float) -> Iterator[EngineSpeed]:
    """Of each pool at each load that its engines had for long enough to say how fast they were, alone on their slots."""
    found: dict[tuple[str, int], list[EngineSums]] = {}
    for book in books:
        for pool, loads in book.loads.items():
            for one in loads:
                key = pool, load_class(one.running_s / one.active_s) if one.active_s > 0 else 0
                found.setdefault(key, []).append(one)
    for (pool, _), parts in sorted(found.items()):
        one = EngineSums.together(parts)
        if one.active_s > 0 and one.tokens >= LEAST_TOKENS:
            yield EngineSpeed(pool, one.running_s / one.active_s, one.running_s / one.tokens / at_once)


def _busy(books: Iterable[StepAccount]) -> dict[str, float]:
    busy: dict[str, float] = {}
    for book in books:
        for state, seconds in book.booked.items():
            if state.startswith(BUSY):
                pool = state.removeprefix(BUSY)
                busy[pool] = busy.get(pool, 0.0) + seconds
    return busy


def trained_lengths(seal: Seal) -> tuple[float, ...]:
    """Tokens of each response of a step that is trained on, from its seal as it was READY."""
    return tuple(float(tokens) for group in seal.groups for tokens in group.own_tokens)


def _means(entry: LogEntry) -> tuple[float, ...]:
    """The same where only their mean is known."""
    return (entry.stats.get("response_length", 0.0),) * int(entry.stats.get("samples", 0.0))


def _with_filtered(kept: tuple[float, ...], stats: Mapping[str, float]) -> Iterator[float]:
    """Those of filtered groups too: as long on average as what was told says, and apart from that like those that were kept."""
    yield from kept
    times = min(stats.get("prompts_per_group", 1.0), MOST_REPEATED)
    count = round(len(kept) * (times - 1.0))
    if count <= 0:
        return
    mean = fmean(kept)
    filtered = (stats.get("response_length_before_filter", mean) * times - mean) / (times - 1.0)
    alike = tuple(tokens * filtered / mean for tokens in kept) if mean > 0 and filtered > 0 else kept
    whole, rest = divmod(count, len(kept))
    for _ in range(whole):
        yield from alike
    yield from (alike[place * len(kept) // rest] for place in range(rest))
