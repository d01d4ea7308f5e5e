"""Cuts a step into micro-batches, for every rank alike: a pure function of the seal.

A rank's samples of a mini-batch are sorted by length, longest first, and laid out in rectangles: rows of like lengths,
padded to the longest. A row joins the rectangle before it while at most one token in 25 of that rectangle is padding. A
packed micro-batch is any number of rectangles, end to end; a bucketed one is a single rectangle, for models that know
nothing but rows. Either holds at most the budget of tokens, padding included; a longer sample gets one of its own.

Under ZeRO every forward and backward is a collective, so all ranks must run equally many. As each computes the cut of
all from the seal, they agree on the largest number without talking. A rank that could do with fewer cuts its samples
into that many all the same, evenly by cost (attention is quadratic in the length), so that ranks which wait for each
other in every micro-batch have about as much to do; with fewer samples than that it runs empty micro-batches.

What is cut are units: samples that must be in one micro-batch, because a loss compares them. A unit of a policy's loss is one
sample. A unit that alone exceeds the budget gets a micro-batch of its own.

Masked samples are not computed: their rewards count, their tokens do not. Only where the KL stands in the reward they
are, because their reward needs it; they train nothing even then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from gcore.ledger.balance import SampleSlot, StepLayout, Unit, sample_cost, single_units
from gcore.ledger.records.chain import Seal

Packing = Literal["packed", "bucketed"]

PADDING = 25
"""At most one token in so many of a rectangle is padding."""


COST_STEPS = 16
"""The cost that micro-batches stay below is found to one part in so many."""


def sample_length(seal: Seal, slot: SampleSlot) -> int:
    """Prompt and response of a sample, in tokens."""
    group = seal.groups[slot.group]
    return group.prompt_tokens + group.response_tokens[slot.sample]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """`rows` sequences side by side, each `length` tokens with its padding."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Padding included."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class MicroPlan:
    """A micro-batch: its samples in the order of its rectangles' rows. Without samples it is a dummy."""

    slots: tuple[SampleSlot, ...] = ()
    rectangles: tuple[Rectangle, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return sum(one.tokens for one in self.rectangles)


@dataclass(frozen=True, slots=True)
class MiniBatchPlan:
    """One update, as one rank runs it.

    `micro_batches` are equally many on all ranks. `tokens` and `sequences` count what is trained on in the whole update,
    over all ranks: response tokens of samples that are not masked, as far as the policy made them, and those samples'
    responses with at least one.
    """

    micro_batches: tuple[MicroPlan, ...]
    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class CutSettings:
    """How a step is cut. `budget`: tokens of a micro-batch. `masked`: whether masked samples are computed, too."""

    budget: int
    packing: Packing
    masked: bool = False


def plan_step(
    seal: Seal,
    layout: StepLayout,
    rank: int,
    cutting: CutSettings,
    units_of: Callable[[Iterable[SampleSlot]], list[Unit]] = single_units,
) -> tuple[MiniBatchPlan, ...]:
    """The mini-batches of a step as `rank` runs them. `units_of`: the units of a rank's samples, the same on every rank."""
    plans = []
    for number in range(layout.mini_batches):
        shares = [layout.share(number, other) for other in range(layout.world_size)]
        computed = [units_of(slot for slot in share if cutting.masked or not is_masked(seal, slot)) for share in shares]
        count = max(sum(1 for _ in _cut(_sorted(seal, units), cutting, None)) for units in computed)
        # One rank waits for nobody.
        own = cut_evenly(seal, computed[rank], cutting, count if layout.world_size > 1 else 1)
        responses = [
            seal.groups[slot.group].own_tokens[slot.sample]
            for share in shares
            for slot in share
            if not is_masked(seal, slot)
        ]
        plans.append(
            MiniBatchPlan(
                own + (MicroPlan(),) * (count - len(own)),
                tokens=sum(responses),
                sequences=sum(1 for tokens in responses if tokens),
            )
        )
    return tuple(plans)


def cut_evenly(seal: Seal, units: list[Unit], cutting: CutSettings, count: int) -> tuple[MicroPlan, ...]:
    """Micro-batches within the budget: the fewest, or `count` of them, the costliest about as cheap as can be.

    `count` is 1, or at least as many as the budget alone asks for.
    """
    ordered = _sorted(seal, units)
    found = tuple(_cut(ordered, cutting, None))
    if count <= 1 or not ordered:
        return found
    costs = [one.cost for one in ordered]
    low, high = max(max(costs), sum(costs) // count), sum(costs)
    while high - low > high // COST_STEPS:
        cap = (low + high) // 2
        tried = tuple(_cut(ordered, cutting, cap))
        if len(tried) <= count:
            found, high = tried, cap
        else:
            low = cap + 1
    return found


def is_masked(seal: Seal, slot: SampleSlot) -> bool:
    """Whether the tokens of a sample are left out of the loss."""
    return slot.sample in seal.groups[slot.group].masked


_Row = tuple[int, SampleSlot]
"""A sample's length, negative, and its place: so the longest is first in order, and of equal ones the lower slot."""


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A unit: its samples in order, and what they cost together."""

    rows: tuple[_Row, ...]
    cost: int


def _sorted(seal: Seal, units: Iterable[Unit]) -> list[_Weighed]:
    """By their longest sample."""
    rows = sorted(tuple(sorted((-sample_length(seal, slot), slot) for slot in unit)) for unit in units)
    return [_Weighed(one, sum(sample_cost(-n, seal.attention_equals_at) for n, _ in one)) for one in rows]


class _Draft:
    """A micro-batch that is being filled, longest samples first."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.cost = 0
        self._closed: list[Rectangle] = []
        self._area = 0  # of closed rectangles
        self._rows = 0  # the open rectangle
        self._length = 0
        self._real = 0

    def with_unit(self, one: _Weighed, cutting: CutSettings) -> _Draft | None:
        """The draft with a unit in it, which the first one always is; None if it does not fit by tokens."""
        first = not self.rows
        if len(one.rows) == 1 and (first or self.rows[-1] < one.rows[0]):
            if not self._add(one.rows[0], cutting, first=first):
                return None
            self.cost += one.cost
            return self
        # Its rows have places among those that are there, so the draft is filled anew.
        anew = _Draft()
        anew.cost = self.cost + one.cost
        if not all(anew._add(row, cutting, first=first) for row in sorted([*self.rows, *one.rows])):
            return None
        return anew

    def _add(self, row: _Row, cutting: CutSettings, *, first: bool) -> bool:
        """`first`: it is of the draft's first unit, which has to fit."""
        length, area = -row[0], (self._rows + 1) * self._length
        fits = PADDING * (area - self._real - length) <= area and self._area + area <= cutting.budget
        if self._rows and (fits or (first and cutting.packing == "bucketed")):
            self._rows += 1
            self._real += length
        elif (
            self.rows
            and not first
            and (cutting.packing == "bucketed" or self._area + self._rows * self._length + length > cutting.budget)
        ):
            return False
        else:
            self._close()
            self._rows, self._length, self._real = 1, length, length
        self.rows.append(row)
        return True

    def done(self) -> MicroPlan:
        self._close()
        return MicroPlan(tuple(slot for _, slot in self.rows), tuple(self._closed))

    def _close(self) -> None:
        if self._rows:
            self._closed.append(Rectangle(self._rows, self._length))
            self._area += self._rows * self._length
            self._rows = 0


def _cut(ordered: list[_Weighed], cutting: CutSettings, cap: int | None) -> Iterator[MicroPlan]:
    """In order, each as full as budget and `cap` on the cost allow."""
    draft = _Draft()
    for one in ordered:
        too_costly = bool(draft.rows) and cap is not None and draft.cost + one.cost > cap
        grown = None if too_costly else draft.with_unit(one, cutting)
        if grown is None:
            yield draft.done()
            grown = _Draft().with_unit(one, cutting)
            assert grown is not None
        draft = grown
    if draft.rows:
        yield draft.done()
