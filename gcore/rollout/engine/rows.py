"""What is known of each running sequence, as arrays over rows, so that a decode step does no work per row in Python.

Row `i` of every array belongs to `works[i]`. Padding cells of `stops` hold -1, which is no token's id. Imports numpy, not
torch. Decides nothing: it answers which rows have ended by count or by token, and which may have met a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gcore.rollout.engine.columns import Refill
from gcore.rollout.engine.tasks import Work

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NO_TOKEN = -1
BELOW_ONE = 1.0 - 2.0**-40
"""Largest uniform number, so that times a total it stays below that total."""


class Uniforms:
    """Uniform numbers in [0, 1) from Philox streams. One generator, set to the key each time: four times as fast."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._fresh = self._bits.state

    def draw(self, key: int, count: int) -> Doubles:
        """The first `count` numbers of the stream with this key (its low 128 bits)."""
        state = self._fresh
        state["state"]["key"][:] = (key & (2**64 - 1), (key >> 64) & (2**64 - 1))
        self._bits.state = state
        return np.minimum(self._generator.random(count), BELOW_ONE)


@dataclass(frozen=True, slots=True)
class Ended:
    """Rows that ended with the token just recorded: at their limit, or at a stop token; `suspects` may have met a string."""

    by_count: Ints
    by_token: Ints
    suspects: Ints


class Rows:
    """The running sequences."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._streaming = 0
        self._uniform_source = Uniforms()
        self._stop_sets: dict[tuple[str, ...], int] = {}
        self._suspect_tokens: Flags = np.zeros((1, 1), dtype=np.bool_)
        self.starts: Ints = np.zeros(0, np.int64)
        """The first column of each row's window."""
        self.counts: Ints = np.zeros(0, np.int64)
        """Tokens made so far."""
        self.temperature: Doubles = np.zeros(0)
        self.top_p: Doubles = np.zeros(0)
        self.top_k: Ints = np.zeros(0, np.int64)
        """0: no limit."""
        self._limits: Ints = np.zeros(0, np.int64)
        self._minimums: Ints = np.zeros(0, np.int64)
        self._sets: Ints = np.zeros(0, np.int64)
        self._stops: Ints = np.zeros((0, 1), np.int64)
        self._uniforms: Doubles = np.zeros((0, 0))
        self._tokens: Ints = np.zeros((0, 0), np.int64)
        self._logprobs: npt.NDArray[np.float32] = np.zeros((0, 0), np.float32)

    @property
    def active(self) -> int:
        """How many run."""
        return len(self.works)

    @property
    def streaming(self) -> bool:
        """Whether any of them delivers token by token."""
        return self._streaming > 0

    def know_stop_strings(self, stop: tuple[str, ...], suspects: Flags) -> None:
        """`suspects[t]`: whether a sequence may meet one of `stop` with token `t`. Needed before such a row joins."""
        if stop in self._stop_sets:
            return
        if self._suspect_tokens.shape[1] != len(suspects):
            self._suspect_tokens = np.zeros((1, len(suspects)), dtype=np.bool_)
        self._stop_sets[stop] = len(self._suspect_tokens)
        self._suspect_tokens = np.vstack([self._suspect_tokens, suspects])

    def knows_stop_strings(self, stop: tuple[str, ...]) -> bool:
        """Whether `know_stop_strings` was told of them, or there are none."""
        return not stop or stop in self._stop_sets

    def join(self, works: Sequence[Work], starts: Sequence[int]) -> None:
        """New rows at the end."""
        sampling = [work.task.sampling for work in works]
        before, after = self.active, self.active + len(works)
        self._reserve(
            after,
            length=max(s.max_new_tokens for s in sampling),
            stops=max(len(s.stop_token_ids) for s in sampling),
        )
        new = slice(before, after)
        self.works.extend(works)
        self._streaming += sum(work.task.streams for work in works)
        self.starts[new] = starts
        self.counts[new] = [len(work.tokens) for work in works]
        self.temperature[new] = [s.temperature for s in sampling]
        self.top_p[new] = [s.top_p for s in sampling]
        self.top_k[new] = [s.top_k or 0 for s in sampling]
        self._limits[new] = [s.max_new_tokens for s in sampling]
        self._minimums[new] = [s.min_new_tokens for s in sampling]
        self._sets[new] = [self._stop_sets[s.stop] if s.stop else 0 for s in sampling]
        self._stops[new] = NO_TOKEN
        for row, (work, s) in enumerate(zip(works, sampling, strict=True), before):
            self._stops[row, : len(s.stop_token_ids)] = s.stop_token_ids
            if s.temperature > 0:
                self._uniforms[row, : s.max_new_tokens] = self._uniform_source.draw(s.seed, s.max_new_tokens)
            if work.tokens:
                self._tokens[row, : len(work.tokens)] = work.tokens
                self._logprobs[row, : len(work.tokens)] = work.logprobs

    def _reserve(self, rows: int, *, length: int, stops: int) -> None:
        have, (_, long), (_, wide) = len(self.starts), self._tokens.shape, self._stops.shape
        if rows > have:
            rows = max(rows, 2 * have)
            for name in ("starts", "counts", "temperature", "top_p", "top_k", "_limits", "_minimums", "_sets"):
                setattr(self, name, _grown(getattr(self, name), (rows,)))
        rows = len(self.starts)
        if rows > have or length > long:
            long = max(length, long)
            for name in ("_uniforms", "_tokens", "_logprobs"):
                setattr(self, name, _grown(getattr(self, name), (rows, long)))
        if rows > have or stops > wide:
            old = self._stops
            self._stops = np.full((rows, max(stops, wide)), NO_TOKEN, np.int64)
            self._stops[: old.shape[0], : old.shape[1]] = old

    def refill(self, refill: Refill) -> None:
        """Rows left; the last ones move into the holes."""
        holes, sources = list(refill.holes), list(refill.sources)
        if holes:
            for array in (self.starts, self.counts, self.temperature, self.top_p, self.top_k):
                array[holes] = array[sources]
            for array in (self._limits, self._minimums, self._sets, self._stops):
                array[holes] = array[sources]
            for table in (self._uniforms, self._tokens, self._logprobs):
                table[holes] = table[sources]
            for hole, source in zip(holes, sources, strict=True):
                self.works[hole] = self.works[source]
        del self.works[refill.active :]
        self._streaming = sum(work.task.streams for work in self.works) if self._streaming else 0

    def shift(self, columns: int) -> None:
        """All windows moved right by `columns`."""
        self.starts[: self.active] += columns

    def first_column(self) -> int:
        """The leftmost live column; there must be a row."""
        return int(self.starts[: self.active].min())

    def pending(self) -> Ints:
        """Each row's last token: the next one to go through the model."""
        rows = np.arange(self.active)
        return self._tokens[rows, self.counts[: self.active] - 1]

    def uniforms(self, first: int) -> Doubles:
        """The numbers with which rows from `first` on draw their next token."""
        rows = np.arange(first, self.active)
        return self._uniforms[rows, self.counts[first : self.active]]

    def forbidden(self, first: int) -> list[tuple[int, int]]:
        """Cells (row - first, token) that may not be drawn, because the row is shorter than its minimum."""
        short = np.flatnonzero(self.counts[first : self.active] < self._minimums[first : self.active])
        return [(int(r), int(t)) for r in short for t in self._stops[first + r] if t != NO_TOKEN]

    def record(self, first: int, tokens: Ints, logprobs: npt.NDArray[np.float32]) -> Ended:
        """Rows from `first` on made these tokens. Which of them ended?"""
        rows = np.arange(first, self.active)
        counts = self.counts[first : self.active]
        self._tokens[rows, counts] = tokens
        self._logprobs[rows, counts] = logprobs
        counts += 1
        by_token = (tokens[:, None] == self._stops[first : self.active]).any(axis=1)
        by_count = counts >= self._limits[first : self.active]
        sets = self._sets[first : self.active]
        if self._stop_sets and sets.any():
            suspects = np.flatnonzero(self._suspect_tokens[sets, tokens]) + first
        else:
            suspects = np.zeros(0, np.int64)
        return Ended(np.flatnonzero(by_count) + first, np.flatnonzero(by_token) + first, suspects)

    def tail(self, row: int, count: int) -> list[int]:
        """The last `count` tokens that the row has made, or all."""
        made = int(self.counts[row])
        tail: list[int] = self._tokens[row, max(0, made - count) : made].tolist()
        return tail

    def save(self, row: int) -> Work:
        """The row's work, with all that it has made."""
        work, made = self.works[row], int(self.counts[row])
        work.tokens = self._tokens[row, :made].tolist()
        work.logprobs = self._logprobs[row, :made].tolist()
        return work


def _grown(array: npt.NDArray[np.generic], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    bigger = np.zeros(shape, array.dtype)
    bigger[tuple(slice(0, n) for n in array.shape)] = array
    return bigger
