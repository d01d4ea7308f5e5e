"""Rows of the batch: acquisition, release, and prefill progress; single decisions, and whole runs of requests."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.engines.torch import kv_cache as columns
from gcore.engines.torch.scheduler import (
    RESERVE,
    SMALLEST_PIECE,
    Admission,
    BatchSize,
    Footprint,
    longest_request,
    num_admissible,
    prefill_lengths,
    rows_to_preempt,
)


def rectangle(size: BatchSize) -> int:
    return columns.table_footprint(size.rows, size.longest)


def tiles(size: BatchSize) -> int:
    return -(-size.rows // 4) * 4 * -(-size.longest // 16) * 16


def tokens(size: BatchSize) -> int:
    return size.tokens


footprints = st.sampled_from([rectangle, tiles, tokens])
wants = st.builds(Admission, st.integers(1, 200), st.integers(1, 300))


@given(st.lists(wants, max_size=20), st.lists(st.integers(1, 300), max_size=5), st.integers(0, 9), footprints)
def test_admitted_requests_fit_with_their_reserve_in_order(
    waiting: list[Admission], held: list[int], free: int, footprint: Footprint
) -> None:
    budget = 4000
    count = num_admissible(waiting, BatchSize.of(held), free=free, budget=budget, footprint=footprint)
    assert count <= min(free, len(waiting))
    size = BatchSize.of([*held, *(want.reserved for want in waiting[:count])])
    assert footprint(size) <= budget or (not held and count == 1) or count == 0
    if count < min(free, len(waiting)):
        assert footprint(size.plus(waiting[count].reserved)) > budget


@given(st.integers(0, 3000), st.integers(1, 2000), footprints)
def test_the_longest_request_is_the_longest_that_fits(budget: int, most: int, footprint: Footprint) -> None:
    longest = longest_request(most, budget=budget, footprint=footprint)
    assert longest == 0 or footprint(BatchSize().plus(longest)) <= budget
    assert longest == most or footprint(BatchSize().plus(longest + 1)) > budget


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), st.data(), st.integers(100, 6000), footprints)
def test_the_youngest_give_their_rows_back_and_no_more_of_them_than_must(
    lengths: list[int], data: st.DataObject, budget: int, footprint: Footprint
) -> None:
    ages = data.draw(st.permutations(range(len(lengths))))
    gone = rows_to_preempt(lengths, ages, budget=budget, footprint=footprint)
    stay = [i for i in range(len(lengths)) if i not in gone]
    assert len(set(gone)) == len(gone)
    assert ages.index(0) in stay
    assert all(ages[i] > ages[j] for i in gone for j in stay)
    assert footprint(BatchSize.of([lengths[i] for i in stay])) <= budget or len(stay) == 1
    if gone:
        assert footprint(BatchSize.of([lengths[i] for i in [*stay, gone[-1]]])) > budget


@given(st.lists(st.integers(1, 2000), max_size=12), st.integers(1, 2000))
def test_portions_are_in_order_and_within_the_budget_and_only_the_last_is_a_part(rest: list[int], budget: int) -> None:
    taken = prefill_lengths(rest, budget=budget)
    assert len(taken) == len(rest)
    assert sum(taken) <= budget
    assert not rest or taken[0] > 0
    whole = [t == r for t, r in zip(taken, rest, strict=True)]
    if False in whole:
        cut = whole.index(False)
        left = budget - sum(taken[:cut])
        assert all(t == 0 for t in taken[cut + 1 :])
        assert taken[cut] == (left if cut == 0 or left >= SMALLEST_PIECE else 0)


@given(st.integers(1, 3000), st.lists(st.integers(1, 900), min_size=1), st.integers(1, 500))
def test_on_a_grid_a_prompt_is_cut_at_the_same_places_however_busy_it_is(
    length: int, budgets: list[int], grid: int
) -> None:
    done, cuts, turn = 0, [], 0
    while done < length:
        (count,) = prefill_lengths([length - done], budget=budgets[turn % len(budgets)], grid=grid, done=[done])
        assert count > 0
        done += count
        cuts.append(done)
        turn += 1
    assert all(cut % grid == 0 or cut == length for cut in cuts)


@dataclass
class Sample:
    number: int
    prompt: int
    limit: int
    made: int = 0
    read: int = 0
    lives: int = 0
    finished: int | None = None

    @property
    def length(self) -> int:
        return self.prompt + self.made


@dataclass
class Engine:
    """The core's cycle, on lengths alone."""

    budget: int
    slots: int
    footprint: Footprint
    chunk: int = 32
    waiting: list[Sample] = field(default_factory=list)
    reading: list[Sample] = field(default_factory=list)
    running: list[Sample] = field(default_factory=list)
    cycle: int = 0
    first_tokens: list[int] = field(default_factory=list)

    def turn(self) -> None:
        self.cycle += 1
        held = [*self.running, *self.reading]
        gone = rows_to_preempt(
            [s.length + (s in self.reading) for s in held],
            [s.number for s in held],
            budget=self.budget,
            footprint=self.footprint,
        )
        leaving = [held[i] for i in gone]
        for sample in leaving:
            sample.read = 0
            sample.lives += 1
        self.running = [s for s in self.running if s not in leaving]
        self.reading = [s for s in self.reading if s not in leaving]
        self.waiting = sorted(leaving, key=lambda s: s.number) + self.waiting
        assert [s.number for s in self.waiting] == sorted(s.number for s in self.waiting)
        self.admit()
        assert len(self.running) + len(self.reading) <= self.slots
        # The last token of each is written by the step that follows.
        assert self.footprint(BatchSize.of([s.length for s in self.running])) <= self.budget
        for sample in self.running:
            sample.made += 1
        for sample in [s for s in self.running if s.made >= s.limit]:
            sample.finished = self.cycle
            self.running.remove(sample)

    def admit(self) -> None:
        held = BatchSize.of([*(s.length for s in self.running), *(s.length + 1 for s in self.reading)])
        free = self.slots - len(self.running) - len(self.reading)
        count = num_admissible(
            [Admission(s.length, s.limit - s.made) for s in self.waiting],
            held,
            free=free,
            budget=self.budget,
            footprint=self.footprint,
        )
        works = [*self.reading, *self.waiting[:count]]
        taken = prefill_lengths([s.length - s.read for s in works], budget=self.chunk)
        for sample, tokens_read in zip(works, taken, strict=True):
            sample.read += tokens_read
        begun = [s for s, t in zip(works, taken, strict=True) if t]
        self.waiting = [s for s in self.waiting if s not in begun]
        self.reading = [s for s in begun if s.read < s.length]
        for sample in [s for s in begun if s.read == s.length]:
            if sample.made == 0:
                self.first_tokens.append(sample.number)
            sample.made += 1
            self.running.append(sample)
        for sample in [s for s in self.running if s.made >= s.limit]:
            sample.finished = self.cycle
            self.running.remove(sample)


arrivals = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 120), st.integers(1, 150)), min_size=1, max_size=30)


@given(arrivals, st.integers(1, 6), st.sampled_from([330, 700, 1500]), footprints)
def test_every_request_comes_to_its_end_in_whatever_order_and_size_they_arrive(
    lives: list[tuple[int, int, int]], slots: int, budget: int, footprint: Footprint
) -> None:
    engine = Engine(budget * (4 if footprint is tiles else 1), slots, footprint)
    samples, work = [], 0
    for number, (pause, length, limit) in enumerate(lives):
        sample = Sample(number, length, limit)
        if length + limit > longest_request(1000, budget=engine.budget, footprint=footprint):
            continue
        samples.append(sample)
        engine.waiting.append(sample)
        work += length + limit
        for _ in range(pause):
            engine.turn()
    # A sample may be read again each time it comes back; without progress this would never end.
    for _ in range(20 * work + 100):
        if not (engine.waiting or engine.reading or engine.running):
            break
        engine.turn()
    assert all(sample.finished is not None for sample in samples)
    assert all(sample.made == sample.limit for sample in samples)
    # None overtakes another to its first token.
    assert engine.first_tokens == sorted(engine.first_tokens)


@given(arrivals)
def test_the_oldest_is_never_sent_back(lives: list[tuple[int, int, int]]) -> None:
    engine = Engine(700, 6, rectangle)
    samples = [Sample(n, length, limit) for n, (_, length, limit) in enumerate(lives)]
    longest = longest_request(1000, budget=700, footprint=rectangle)
    engine.waiting = [s for s in samples if s.prompt + s.limit <= longest]
    while engine.waiting or engine.reading or engine.running:
        oldest = min((s.number for s in (*engine.waiting, *engine.reading, *engine.running)), default=None)
        lives_before = {s.number: s.lives for s in samples}
        engine.turn()
        if oldest is not None:
            assert samples[oldest].lives == lives_before[oldest]


@pytest.mark.parametrize(
    ("want", "reserved"),
    [
        pytest.param(Admission(10, 5), 15, id="all that it may make, where that is little"),
        pytest.param(Admission(10, 9999), 10 + RESERVE, id="a part of it otherwise"),
    ],
)
def test_an_admission_sets_room_for_growth_aside(want: Admission, reserved: int) -> None:
    assert want.reserved == reserved
