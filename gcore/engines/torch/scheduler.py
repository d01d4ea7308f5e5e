"""Scheduler: which sequences run, wait or are preempted, and how much of the waiting prompts is prefilled now.

All rules are pure functions of sizes. Memory is counted in cells: one cell is the keys and values of one token. A model
runner's `footprint` returns the cells of rows with given lengths; admission never exceeds the budget (`cache_tokens`).

- Requests are admitted in order of arrival. One that does not fit yet blocks those behind it, so smaller ones cannot
  overtake it forever.
- A request is admitted with `RESERVE` tokens of growth, or all that it may still generate if that is less, so that it
  is not preempted again at once.
- If the running rows outgrow the budget, the youngest are preempted. They wait before all others and keep their tokens,
  so the queue stays in order of arrival. The oldest is never preempted, and every accepted request fits alone, so each
  request finishes.
- While rows decode, a cycle prefills at most `prefill_chunk_tokens` of waiting prompts, which limits the delay of other
  requests' next token. If no row decodes, it prefills up to `IDLE_TOKENS`.

`RunningBatch` keeps the data of running sequences in arrays, so that a decode step does no work per sequence in Python.
Imports numpy, not torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from gcore.engines.request import GenerationRequest, SequenceState


@dataclass(frozen=True, slots=True)
class Compaction:
    """How the remaining rows are made contiguous after some have left: row `sources[i]` is copied to `holes[i]`.

    Afterwards the remaining rows are the first `active`.
    """

    holes: tuple[int, ...]
    sources: tuple[int, ...]
    active: int


def plan_compaction(leaving: Sequence[int], active: int) -> Compaction:
    """Choose which of `active` rows move into the places of the `leaving` ones, with the fewest copies."""
    gone = set(leaving)
    stay = active - len(gone)
    holes = tuple(sorted(row for row in gone if row < stay))
    sources = tuple(row for row in range(stay, active) if row not in gone)
    return Compaction(holes, sources, stay)


class WaitingQueue:
    """Sequences that wait to run, in the order in which they will be admitted."""

    def __init__(self) -> None:
        self._queue: deque[SequenceState] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, works: Iterable[SequenceState]) -> None:
        """Append sequences at the end."""
        self._queue.extend(works)

    def put_back(self, works: Sequence[SequenceState]) -> None:
        """Insert preempted sequences before all others, in this order."""
        self._queue.extendleft(reversed(works))

    def peek(self, count: int) -> list[SequenceState]:
        """Return the first `count` sequences without removing them."""
        return list(islice(self._queue, max(0, count)))

    def take(self, count: int) -> list[SequenceState]:
        """Remove and return the first `count` sequences, or as many as there are."""
        return [self._queue.popleft() for _ in range(min(count, len(self._queue)))]

    def drop(self, unwanted: Callable[[GenerationRequest], bool]) -> list[SequenceState]:
        """Remove and return the sequences for whose request `unwanted` is true."""
        dropped = [work for work in self._queue if unwanted(work.task)]
        if dropped:
            gone = {work.task.number for work in dropped}
            self._queue = deque(work for work in self._queue if work.task.number not in gone)
        return dropped


RESERVE = 64
"""Maximum number of tokens that a request is assumed to generate when it is admitted."""

IDLE_TOKENS = 8192
"""Maximum prompt tokens in one cycle if no row decodes, and padded tokens in one forward pass of several prompts."""

SMALLEST_PIECE = 32
"""If fewer tokens than this are left of a cycle's budget, the prefill of a further prompt is not started."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Size of a set of rows: their number, the longest, and the sum of their tokens."""

    rows: int = 0
    longest: int = 0
    tokens: int = 0

    def plus(self, length: int) -> BatchSize:
        """Return the size with one more row of `length` tokens."""
        return BatchSize(self.rows + 1, max(self.longest, length), self.tokens + length)

    @classmethod
    def of(cls, lengths: Sequence[int]) -> BatchSize:
        """Return the size of rows with these lengths."""
        return cls(len(lengths), max(lengths, default=0), sum(lengths))


Footprint = Callable[[BatchSize], int]
"""Function that returns the number of cells that rows of this size take."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Size of a waiting sequence: its tokens (prompt and generated ones), and the maximum it may still generate."""

    length: int
    growth: int

    @property
    def reserved(self) -> int:
        """Length in tokens for which room must exist when the sequence is admitted."""
        return self.length + min(self.growth, RESERVE)


def longest_request(most: int, *, budget: int, footprint: Footprint) -> int:
    """Return the length of the longest request, at most `most` tokens, that can be served alone; 0: none."""
    return bisect_right(range(1, most + 1), budget, key=lambda length: footprint(BatchSize().plus(length)))


def num_admissible(
    waiting: Sequence[Admission], held: BatchSize, *, free: int, budget: int, footprint: Footprint
) -> int:
    """Return how many of the first waiting sequences may be admitted. See the module docstring for the rules.

    `waiting`: in order. `held`: size of the rows that run or are being prefilled. `free`: number of free rows.
    `budget`: maximum number of cells. The first is admitted in any case if nothing is held.
    """
    count, size = 0, held
    for want in waiting[: max(0, free)]:
        size = size.plus(want.reserved)
        if footprint(size) > budget and (held.rows or count):
            break
        count += 1
    return count


def rows_to_preempt(lengths: Sequence[int], ages: Sequence[int], *, budget: int, footprint: Footprint) -> list[int]:
    """Return the indexes of the rows to preempt, youngest first, so that the others fit; the oldest always stays.

    `lengths`: tokens by row. `ages`: request numbers by row, which increase with arrival.
    """
    if footprint(BatchSize.of(lengths)) <= budget:
        return []
    stay = sorted(range(len(lengths)), key=lambda i: ages[i])
    gone = []
    while len(stay) > 1 and footprint(BatchSize.of([lengths[i] for i in stay])) > budget:
        gone.append(stay.pop())
    return gone


def prefill_lengths(
    remaining: Sequence[int], *, budget: int, grid: int | None = None, done: Sequence[int] = ()
) -> list[int]:
    """Return how many tokens of each prompt a cycle prefills, in order; 0 after the budget is used up.

    `remaining`: tokens still to prefill, by prompt. `budget`: maximum tokens in the cycle. `grid`: cut prompts only at
    multiples of this many tokens from their beginning, so that the chunks are the same however busy the engine is; the
    first chunk is then prefilled even if it exceeds the budget. `done`: tokens already prefilled, by prompt.
    """
    left = budget
    taken: list[int] = []
    for index, rest in enumerate(remaining):
        begun = bool(taken)
        if grid is None:
            portion = rest if rest <= left else left if not begun or left >= SMALLEST_PIECE else 0
        else:
            begin = done[index] if done else 0
            portion = _whole_pieces(begin, begin + rest, left, grid, at_least_one=not begun)
        taken.append(portion)
        left -= portion
        if portion < rest:
            break
    return taken + [0] * (len(remaining) - len(taken))


def _whole_pieces(begin: int, end: int, left: int, grid: int, *, at_least_one: bool) -> int:
    if end - begin <= left:
        return end - begin
    last = (begin + max(0, left)) // grid * grid
    if last <= begin and at_least_one:
        last = min(end, (begin // grid + 1) * grid)
    return max(0, last - begin)


Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
NO_TOKEN = -1

BELOW_ONE = 1.0 - 2.0**-40
"""Largest uniform number, so that its product with a total stays below the total."""


class PhiloxStreams:
    """Generates uniform numbers in [0, 1) from Philox random streams, each identified by a key.

    Reuses one generator and sets its key, which is four times as fast as a new generator.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._fresh = self._bits.state

    def draw(self, key: int, count: int) -> Doubles:
        """Return the first `count` numbers of the stream whose key is the low 128 bits of `key`."""
        state = self._fresh
        state["state"]["key"][:] = (key & (2**64 - 1), (key >> 64) & (2**64 - 1))
        self._bits.state = state
        return np.minimum(self._generator.random(count), BELOW_ONE)


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Which rows ended with the newest token, as row numbers.

    `by_count`: at their maximum length. `by_token`: with a stop token. `suspects`: may have completed a stop string,
    which only the text shows. `replayed`: number of rows whose newest token was generated before a preemption.
    """

    by_count: Ints
    by_token: Ints
    suspects: Ints
    replayed: int = 0


FEW = 256
"""Initial number of tokens for which a row's arrays have room."""

MOST_STOP_SETS = 64
"""Maximum number of cached sets of stop strings, in addition to those in use."""

PER_ROW = (
    "counts",
    "prompts",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "adapters",
    "shifts",
    "_known",
    "_limits",
    "_minimums",
    "_sets",
)


class RunningBatch:
    """The running sequences (rows) as arrays: sampling parameters, generated tokens, and when each row ends.

    Row `i` of every array belongs to `works[i]`. Determines which rows have ended by length or by a stop token, and
    which may have completed a stop string.

    A row may be replayed after a preemption: its earlier tokens pass through the model again, one by one, and are kept
    instead of sampled ones.
    """

    def __init__(self) -> None:
        self.works: list[SequenceState] = []
        self._streaming = 0
        self._replaying = False
        self._uniform_source = PhiloxStreams()
        self._stop_sets: dict[tuple[str, ...], int] = {}
        self._suspect_tokens: Flags = np.zeros((1, 1), dtype=np.bool_)
        self.counts: Ints = np.zeros(0, np.int64)
        """Number of generated tokens by row; for a replayed row, of those that passed through the model again."""
        self.prompts: Ints = np.zeros(0, np.int64)
        """Number of prompt tokens by row."""
        self.temperature: Doubles = np.zeros(0)
        self.top_p: Doubles = np.zeros(0)
        self.top_k: Ints = np.zeros(0, np.int64)
        """0: no limit."""
        self.min_p: Doubles = np.zeros(0)
        self.adapters: Ints = np.zeros(0, np.int64)
        """Number of each row's adapter."""
        self.shifts: Ints = np.zeros(0, np.int64)
        """By how much the pictures of each row's prompt shift the positions of its tokens."""
        self._known: Ints = np.zeros(0, np.int64)
        """Number of tokens generated before a preemption, by row, if the row is replayed; else 0."""
        self._limits: Ints = np.zeros(0, np.int64)
        self._minimums: Ints = np.zeros(0, np.int64)
        self._sets: Ints = np.zeros(0, np.int64)
        self._stops: Ints = np.zeros((0, 1), np.int64)
        self._uniforms: Doubles = np.zeros((0, 0))
        self._tokens: Ints = np.zeros((0, 0), np.int64)
        self._logprobs: npt.NDArray[np.float32] = np.zeros((0, 0), np.float32)

    @property
    def active(self) -> int:
        """Number of running sequences."""
        return len(self.works)

    @property
    def streaming(self) -> bool:
        """Whether the client of any row wants its tokens as a stream."""
        return self._streaming > 0

    @property
    def lengths(self) -> Ints:
        """Number of tokens of each row, prompt and generated ones, [row]."""
        return self.prompts[: self.active] + self.counts[: self.active]

    def made(self, row: int) -> int:
        """Return the number of tokens that the row has generated in total, including before preemptions."""
        return max(int(self.counts[row]), int(self._known[row]))

    def replays(self, row: int) -> bool:
        """Whether the newest token of `row` was generated before a preemption and is only replayed."""
        return bool(self.counts[row] <= self._known[row])

    def know_stop_strings(self, stop: tuple[str, ...], suspects: Flags) -> None:
        """Register a set of stop strings. Call it before a row with these stop strings joins.

        `suspects` [vocabulary]: whether a token may complete one of `stop`.
        """
        if stop in self._stop_sets:
            return
        if self._suspect_tokens.shape[1] != len(suspects):
            self._suspect_tokens = np.zeros((1, len(suspects)), dtype=np.bool_)
        self._stop_sets[stop] = len(self._suspect_tokens)
        self._suspect_tokens = np.vstack([self._suspect_tokens, suspects])

    def forget_stop_strings(self) -> None:
        """Drop the sets of stop strings that no running row uses, if `MOST_STOP_SETS` are registered."""
        if len(self._stop_sets) < MOST_STOP_SETS:
            return
        used = sorted({work.task.sampling.stop for work in self.works} & self._stop_sets.keys())
        self._suspect_tokens = self._suspect_tokens[[0, *(self._stop_sets[stop] for stop in used)]]
        self._stop_sets = {stop: number for number, stop in enumerate(used, 1)}
        self._sets[: self.active] = [self._stop_sets.get(work.task.sampling.stop, 0) for work in self.works]

    def knows_stop_strings(self, stop: tuple[str, ...]) -> bool:
        """Whether this set of stop strings is registered or empty."""
        return not stop or stop in self._stop_sets

    def join(self, works: Sequence[SequenceState], *, replay: bool = False) -> None:
        """Add rows at the end. `replay`: their earlier tokens will pass through the model again, one by one."""
        sampling = [work.task.sampling for work in works]
        before, after = self.active, self.active + len(works)
        self._reserve(
            after,
            length=max(
                min(s.max_new_tokens, max(FEW, len(w.tokens) + 1)) for s, w in zip(sampling, works, strict=True)
            ),
            stops=max(len(s.stop_token_ids) for s in sampling),
        )
        new = slice(before, after)
        self.works.extend(works)
        self._streaming += sum(work.task.streams for work in works)
        known = [len(work.tokens) for work in works]
        self._known[new] = known if replay else 0
        self.counts[new] = 0 if replay else known
        self._replaying |= replay and any(known)
        self.prompts[new] = [len(work.task.prompt) for work in works]
        self.temperature[new] = [s.temperature for s in sampling]
        self.top_p[new] = [s.top_p for s in sampling]
        self.top_k[new] = [s.top_k or 0 for s in sampling]
        self.adapters[new] = [work.task.adapter for work in works]
        self.shifts[new] = [0 if (own := work.task.pictures) is None else own.shift for work in works]
        self.min_p[new] = [s.min_p for s in sampling]
        self._limits[new] = [s.max_new_tokens for s in sampling]
        self._minimums[new] = [s.min_new_tokens for s in sampling]
        self._sets[new] = [self._stop_sets[s.stop] if s.stop else 0 for s in sampling]
        self._stops[new] = NO_TOKEN
        for row, (work, s) in enumerate(zip(works, sampling, strict=True), before):
            self._stops[row, : len(s.stop_token_ids)] = s.stop_token_ids
            if work.tokens:
                self._tokens[row, : len(work.tokens)] = work.tokens
                self._logprobs[row, : len(work.tokens)] = work.logprobs
        self._draw_uniforms(range(before, after))

    def _draw_uniforms(self, rows: Sequence[int]) -> None:
        """Generate the uniform numbers for all tokens for which these rows have room.

        A row's stream begins with the same numbers however many are generated.
        """
        width = self._uniforms.shape[1]
        for row in rows:
            s = self.works[row].task.sampling
            if s.temperature > 0:
                count = min(width, s.max_new_tokens)
                self._uniforms[row, :count] = self._uniform_source.draw(s.seed, count)

    def _reserve(self, rows: int, *, length: int, stops: int) -> None:
        have, (_, long), (_, wide) = len(self.counts), self._tokens.shape, self._stops.shape
        if rows > have:
            rows = max(rows, 2 * have)
            for name in PER_ROW:
                setattr(self, name, _grown(getattr(self, name), (rows,)))
        rows = len(self.counts)
        if rows > have or length > long:
            for name in ("_uniforms", "_tokens", "_logprobs"):
                setattr(self, name, _grown(getattr(self, name), (rows, max(length, long))))
        if length > long:
            self._draw_uniforms(range(self.active))
        if rows > have or stops > wide:
            old = self._stops
            self._stops = np.full((rows, max(stops, wide)), NO_TOKEN, np.int64)
            self._stops[: old.shape[0], : old.shape[1]] = old

    def refill(self, refill: Compaction) -> None:
        """Move rows into the places of rows that have left, and drop the rows beyond `refill.active`."""
        holes, sources = list(refill.holes), list(refill.sources)
        if holes:
            for name in (*PER_ROW, "_stops", "_uniforms", "_tokens", "_logprobs"):
                array = getattr(self, name)
                array[holes] = array[sources]
            for hole, source in zip(holes, sources, strict=True):
                self.works[hole] = self.works[source]
        del self.works[refill.active :]
        self._streaming = sum(work.task.streams for work in self.works) if self._streaming else 0

    def pending(self) -> Ints:
        """Return each row's last token [row], which passes through the model next."""
        rows = np.arange(self.active)
        return self._tokens[rows, self.counts[: self.active] - 1]

    def uniforms(self, first: int) -> Doubles:
        """Return the uniform numbers with which the rows from `first` on sample their next token."""
        rows = np.arange(first, self.active)
        return self._uniforms[rows, self.counts[first : self.active]]

    def forbidden(self, first: int) -> list[tuple[int, int]]:
        """Return the stop tokens that rows below their minimum length must not sample now, as (row - `first`, token)."""
        short = np.flatnonzero(self.counts[first : self.active] < self._minimums[first : self.active])
        return [(int(r), int(t)) for r in short for t in self._stops[first + r] if t != NO_TOKEN]

    def record(self, first: int, tokens: Ints, logprobs: npt.NDArray[np.float32]) -> FinishedRows:
        """Store a new token and its log-probability for each row from `first` on. Returns which rows ended.

        For replayed rows the tokens from before the preemption are kept.
        """
        rows = np.arange(first, self.active)
        counts = self.counts[first : self.active]
        replayed = counts < self._known[first : self.active] if self._replaying else None
        if replayed is not None:
            tokens = np.where(replayed, self._tokens[rows, counts], tokens)
            logprobs = np.where(replayed, self._logprobs[rows, counts], logprobs)
        self._tokens[rows, counts] = tokens
        self._logprobs[rows, counts] = logprobs
        counts += 1
        by_token = (tokens[:, None] == self._stops[first : self.active]).any(axis=1)
        by_count = counts >= self._limits[first : self.active]
        sets = self._sets[first : self.active]
        suspected = self._suspect_tokens[sets, tokens] if self._stop_sets and sets.any() else np.zeros_like(by_count)
        again = 0
        if replayed is not None:
            # Replayed rows did not end there before.
            by_token, by_count, suspected = by_token & ~replayed, by_count & ~replayed, suspected & ~replayed
            again = int(replayed.sum())
            self._replaying = bool((self.counts[: self.active] < self._known[: self.active]).any())
        if ((counts >= self._tokens.shape[1]) & ~by_count).any():
            self._reserve(self.active, length=2 * self._tokens.shape[1], stops=0)
        return FinishedRows(
            np.flatnonzero(by_count) + first, np.flatnonzero(by_token) + first, np.flatnonzero(suspected) + first, again
        )

    def tail(self, row: int, count: int) -> list[int]:
        """Return the last `count` generated tokens of a row, or all if there are fewer."""
        made = int(self.counts[row])
        tail: list[int] = self._tokens[row, max(0, made - count) : made].tolist()
        return tail

    def save(self, row: int) -> SequenceState:
        """Copy a row's generated tokens and log-probabilities into its sequence, and return the sequence."""
        work, made = self.works[row], self.made(row)
        work.tokens = self._tokens[row, :made].tolist()
        work.logprobs = self._logprobs[row, :made].tolist()
        return work


def _grown(array: npt.NDArray[np.generic], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    bigger = np.zeros(shape, array.dtype)
    bigger[tuple(slice(0, n) for n in array.shape)] = array
    return bigger
