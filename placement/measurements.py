"""Measurements of a committed step, as input of placement policies.

They come from three records: the log entry of the step (seconds, measured by the controller that committed it), its
seal (the list of trained groups, with the lengths of their responses), and the slot accounts of the nodes (what their
engines did). A value that was not measured is None or missing, never a guess.

**If batches are generated ahead** (staleness > 0), production overlaps with the training of the previous batch. If the
train ranks had to wait for the batch, its production took the whole step. If not, the engines became idle at the limit
of staleness, so production took as long as they had requests. If the engines share slots with working train ranks, or
an account is missing, production is only known to take no longer than the step. Weight sync runs concurrently.

**In a co-located split** engines of several pools may compute on one slot at once, and slow each other down. Their
measured speed is converted to that of an engine with a slot of its own, assuming that they share the slot evenly.
Without the conversion, co-existing splits would look as slow as the co-located one, and a job that started co-located
would stay so.

**Filtered groups** were generated and judged like the others. Their number and mean length are known; their individual
lengths are assumed to be distributed like those of the kept groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gcore.ledger.records.chain import LogEntry, Seal
from gcore.ledger.records.slot_accounting import EngineSums, StepAccount, sum_engines
from placement.slots import SINGLE, ReplicaSizes, Split


def load_class(running: float) -> int:
    """Return the load class of `running` concurrent requests: class 0 is 1 request, 1 is 2 to 3, 2 is 4 to 7 and so
    on."""
    return max(int(running), 1).bit_length() - 1


def least_requests(load: int) -> int:
    """Return the smallest number of requests of a load class."""
    return 1 << load


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Measured speed of a pool's engines. `running`: mean concurrent requests per engine. `token_s`: seconds per token
    of each of these requests."""

    pool: str
    running: float
    token_s: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Measurements of one step. Times are None if not measured.

    `lengths`, `judged`: tokens of each response and of its judgement, including filtered groups. `produce_s`: seconds
    to generate and judge the batch. `train_s`: seconds of training. `other_s`: other seconds that delay the ranks.
    `busy`: slot-seconds of work by pool. `speed`: of each pool's engines at each observed load. `step_s`: seconds from
    commit to commit, set only if the next batch is generated while this one trains; then it is an upper bound of
    `produce_s`, and not the sum of the parts. `asked_per_response`: requests to judge engines per response.
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
        """Seconds from commit to commit; None if not measured."""
        if self.step_s is not None:
            return self.step_s
        if self.produce_s is None or self.train_s is None or self.other_s is None:
            return None
        return self.produce_s + self.train_s + self.other_s


BUSY = "busy "
"""Prefix of the states in which a slot works, in a slot account; the name of the pool follows."""

LEAST_TOKENS = 16
"""Minimum number of tokens from which a speed is computed."""

WAITED = 0.1
"""If the ranks waited for the batch for more than this share of the step, production determined the length of the step.
A shorter wait is the time to seal a finished batch."""

MOST_REPEATED = 16.0
"""Maximum of generated responses per kept response. A step that was filtered almost completely does not predict the
next."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of a step; fields as in `MeasuredStep`."""

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
    """Collect the measurements of one committed step.

    `books`: the slot accounts of the nodes (`gcore.ledger.records.slot_accounting.group_by_version`); those that arrive
    late may be missing. `sealed`: response lengths from the step's seal (`trained_lengths`); None if the seal is
    deleted, so that every response counts with the mean length. `split`, `sizes`: slots per pool and per engine in the
    step. `least`: number of slots that the accounts must cover at least before the mean judgement length is computed;
    with an account missing, the mean would be too low. Every judgement counts with the mean length.
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
    """Return the times of a step whose batch was started after the previous commit. `stats`: of its log entry."""
    exchange, publish = stats.get("exchange_s"), stats.get("publish_s")
    return _Times(stats.get("collect_s"), None if exchange is None or publish is None else exchange + publish)


def _ahead(stats: Mapping[str, float], split: Split, books: Sequence[StepAccount], sizes: ReplicaSizes) -> _Times:
    """Return the times of a step whose batch was generated while ranks trained on the previous one."""
    seconds, waited = stats.get("seconds"), stats.get("collect_s")
    if seconds is None or waited is None:
        return _Times(None, None)
    produce_s = seconds if waited > WAITED * seconds else _at_work_s(books, split, sizes)
    if split.mode == "colocated" or produce_s is None:
        return _Times(None, stats.get("exchange_s"), seconds)
    return _Times(min(produce_s, seconds), stats.get("exchange_s"), seconds)


def _at_work_s(books: Sequence[StepAccount], split: Split, sizes: ReplicaSizes) -> float | None:
    """Return for how many seconds of a step an engine had requests: the mean over the engines of a pool, of the pool
    where it is longest. None if accounts are missing."""
    if not _is_whole(books, split):
        return None
    sums = sum_engines(books)
    engines = {"rollout": split.rollout // sizes.rollout, "reward": split.reward // sizes.reward}
    return max((sums[pool].active_s / engines[pool] for pool in sums if engines.get(pool)), default=None)


def _is_whole(books: Iterable[StepAccount], split: Split, least: int = 0) -> bool:
    """Whether the accounts cover all slots of the split, and at least `least` slots. A node that was lost within the
    step never sends its account."""
    pools = split.rollout, split.reward, split.train
    had = max(pools) if split.mode == "colocated" else sum(pools)
    return sum(book.slots for book in books) >= max(had, least)


def _at_once(books: Sequence[StepAccount], split: Split, produce_s: float | None, sizes: ReplicaSizes) -> float:
    """Return how many engines worked on a slot at once during production, on average; 1 if each has its own slot."""
    slots = sum(book.slots for book in books)
    if split.mode != "colocated" or not produce_s or not slots:
        return 1.0
    size = {"rollout": sizes.rollout, "reward": sizes.reward}
    active = sum(sums.active_s * size[pool] for pool, sums in sum_engines(books).items() if pool in size)
    return max(active / (slots * produce_s), 1.0)


def _speeds(books: Iterable[StepAccount], at_once: float) -> Iterator[EngineSpeed]:
    """Yield the speed of each pool at each load with enough tokens, converted to engines with a slot of their own."""
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
    """Return the tokens of each trained response of a step, from its READY seal."""
    return tuple(float(tokens) for group in seal.groups for tokens in group.own_tokens)


def _means(entry: LogEntry) -> tuple[float, ...]:
    """Return the mean response length of a step once for each of its trained responses."""
    return (entry.stats.get("response_length", 0.0),) * int(entry.stats.get("samples", 0.0))


def _with_filtered(kept: tuple[float, ...], stats: Mapping[str, float]) -> Iterator[float]:
    """Yield the `kept` lengths, then assumed lengths of the filtered responses: distributed like the kept ones and
    scaled to the reported mean."""
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
