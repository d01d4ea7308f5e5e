"""A rank's work on a streamed step: each READY part once, in order, for any sender and any later state."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from builders import samples_by_group
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.balance import balance_samples, part_digests, part_layout, parts_sha256
from gcore.ledger.records.chain import Seal, SealedGroup, SealState
from gcore.train.rank import feed as feed_state
from gcore.train.rank.feed import (
    AlreadyApplied,
    Begin,
    BeginParts,
    FeedState,
    FeedTaken,
    RankRefusal,
    StepPartInput,
    TrainGroup,
    TrainSample,
    WorldName,
    remaining_parts,
)
from gcore.train.rank.messages import write_state
from gcore.types import PromptRef, Token, Version

ME = WorldName("job", "world", 3)
RANKS, SAMPLES = 2, 3
PARTS = (2, 1, 2)


def fresh(rank: int = 0) -> FeedState:
    return FeedState(ME, rank, RANKS, 4, streams=True)


def slot(ready: int, *, attempt: int | None = None, state: SealState = SealState.OPEN, kind: str = "g") -> Seal:
    """The slot with so many READY parts; PARTIAL, SEALED and READY ones hold what comes next, too."""
    there = ready if state is SealState.OPEN else min(ready + (state is not SealState.READY), len(PARTS))
    groups = tuple(
        SealedGroup(
            ref=PromptRef(0, 0, number),
            digest=f"{kind}{number}",
            prompt_tokens=5,
            response_tokens=tuple(4 + i for i in range(SAMPLES)),
            versions=(Version(3, 4),),
            holder="h",
        )
        for number in range(sum(PARTS[:there]))
    )
    return Seal(
        lineage=3,
        step=5,
        attempt=attempt or there,
        state=state,
        world="world",
        world_size=RANKS,
        mini_batches=1,
        groups=groups,
        parts=PARTS[:there],
        ready_parts=ready,
    )


def fed(state: FeedState, seal: Seal, parts: range | None = None) -> FeedState:
    """With this rank's share of some parts of the seal."""
    for part in parts if parts is not None else range(len(seal.parts)):
        layout = part_layout(seal, part)
        for number, taken in samples_by_group(layout, state.rank).items():
            group = seal.groups[number]
            samples = {i: TrainSample(np.zeros(4 + i, np.int32), np.zeros(4 + i, np.float32), 1.0) for i in taken}
            held = {group.digest: TrainGroup(group.ref, group.digest, np.zeros(5, np.int32), samples)}
            answer = feed_state.feed_samples(state, ME, seal.token, held)
            assert isinstance(answer, FeedTaken)
            state = answer.state
    return state


def told(state: FeedState, seal: Seal) -> tuple[FeedState, tuple[StepPartInput, ...]]:
    answer = feed_state.accumulate_parts(state, ME, seal.token, seal)
    if isinstance(answer, BeginParts):
        return answer.state, answer.parts
    assert isinstance(answer, AlreadyApplied), answer
    return state, ()


STATES = (SealState.OPEN, SealState.PARTIAL, SealState.SEALED)


@given(st.lists(st.tuples(st.integers(1, 2), st.sampled_from(STATES)), max_size=8), st.integers(0, RANKS - 1))
def test_each_ready_part_is_begun_once_and_in_order_whatever_is_told_when(
    history: list[tuple[int, SealState]], rank: int
) -> None:
    state = fed(fresh(rank), slot(3))
    seen: list[StepPartInput] = []
    for ready, now in history:
        state, parts = told(state, slot(ready, state=now))
        seen += parts
    whole = slot(3, state=SealState.READY)
    begun = feed_state.apply_step(state, ME, whole.token, whole)
    assert isinstance(begun, Begin)
    assert begun.work.begun == len(seen)
    seen += remaining_parts(begun.work)
    assert [part.number for part in seen] == [0, 1, 2]
    for part in seen:
        work = part.work
        assert work.layout == part_layout(whole, part.number)
        assert set(work.groups) == {work.seal.groups[n].digest for n in samples_by_group(work.layout, rank)}
        assert work.seal.encode() == told_alone(rank, part.number).work.seal.encode(), "all ranks compare the same"


def told_alone(rank: int, number: int) -> StepPartInput:
    """The part as a rank begins it that was notified of all parts at the end."""
    whole = slot(3, state=SealState.READY)
    begun = feed_state.apply_step(fed(fresh(rank), whole), ME, whole.token, whole)
    assert isinstance(begun, Begin)
    return list(remaining_parts(begun.work))[number]


def test_no_part_is_begun_before_it_is_ready() -> None:
    seal = slot(1, state=SealState.PARTIAL)
    _, parts = told(fed(fresh(), seal), seal)
    assert [part.number for part in parts] == [0]
    nothing = slot(0, state=SealState.PARTIAL)
    assert isinstance(feed_state.accumulate_parts(fed(fresh(), nothing), ME, nothing.token, nothing), AlreadyApplied)
    refused = feed_state.apply_step(fed(fresh(), seal), ME, seal.token, seal)
    assert isinstance(refused, RankRefusal)
    assert "not READY" in refused.reason


def test_samples_of_a_streamed_step_outlive_the_attempt() -> None:
    first = slot(1)
    state = fed(fresh(), first)
    again = slot(1, attempt=7, state=SealState.PARTIAL)
    state = fed(state, again, range(1, 2))
    assert state.holding == again.token
    state, parts = told(state, again)
    assert len(parts) == 1
    assert set(state.held) == {"g0", "g2"}, "the list of what was brought stays when it is trained"
    plain = fed(replace(fresh(), streams=False), first)
    assert set(fed(plain, again, range(1, 2)).held) == {"g2"}


def test_samples_of_a_begun_part_are_not_held_again() -> None:
    state, _ = told(fed(fresh(), slot(1)), slot(1))
    again = fed(state, slot(2, attempt=9))
    assert set(again.groups) == {"g2"}
    assert set(again.held) == {"g0", "g2"}


def test_a_slot_that_names_other_parts_than_those_begun_is_refused() -> None:
    """A restored store seals other parts than those that ranks have begun."""
    state, _ = told(fed(fresh(), slot(1)), slot(1))
    other = slot(2, kind="x")
    answer = feed_state.accumulate_parts(fed(state, other), ME, other.token, other)
    assert isinstance(answer, RankRefusal)
    assert "the parts of step 5 that this rank has begun differ" in answer.reason
    whole = slot(3, state=SealState.READY, kind="x")
    assert isinstance(feed_state.apply_step(fed(state, whole), ME, whole.token, whole), RankRefusal)
    unparted = whole.model_copy(update={"parts": (), "ready_parts": 0})
    answer_ = feed_state.apply_step(fed(state, whole), ME, unparted.token, unparted)
    assert isinstance(answer_, RankRefusal)
    assert "this rank has begun 1 parts of step 5" in answer_.reason


def test_a_part_of_which_a_share_is_missing_is_refused_and_nothing_of_it_is_begun() -> None:
    answer = feed_state.accumulate_parts(fed(fresh(), slot(2), range(1)), ME, slot(2).token, slot(2))
    assert isinstance(answer, RankRefusal)
    assert "is missing: prompt" in answer.reason


@pytest.mark.parametrize(
    "name", [replace(ME, job_uid="other"), replace(ME, world="old"), replace(ME, lineage=2)], ids=str
)
def test_another_world_begins_no_part(name: WorldName) -> None:
    assert isinstance(feed_state.accumulate_parts(fed(fresh(), slot(1)), name, slot(1).token, slot(1)), RankRefusal)


def test_after_the_step_late_words_of_its_parts_change_nothing_and_the_next_begins_with_none() -> None:
    whole = slot(3, state=SealState.READY)
    state, _ = told(fed(fresh(), whole), slot(1))
    begun = feed_state.apply_step(state, ME, whole.token, whole)
    assert isinstance(begun, Begin)
    assert isinstance(feed_state.accumulate_parts(begun.state, ME, slot(2).token, slot(2)), AlreadyApplied)
    after = feed_state.finish_step(begun.state)
    assert after.begun == ()
    assert isinstance(feed_state.accumulate_parts(after, ME, slot(2).token, slot(2)), AlreadyApplied)


def test_a_rank_says_which_parts_it_has_begun_and_of_which_step() -> None:
    assert not write_state(fresh()).HasField("streaming")
    state, _ = told(fed(fresh(), slot(2)), slot(2))
    message = write_state(state)
    assert (message.streaming.lineage, message.streaming.step, message.begun) == (3, 5, 2)
    assert message.begun_sha256 == parts_sha256(part_digests(slot(2), 2))


def test_a_rank_without_a_share_in_a_part_begins_it_all_the_same() -> None:
    one = slot(1)
    few = one.model_copy(
        update={
            "groups": tuple(g.model_copy(update={"response_tokens": (4,)}) for g in one.groups[:1]),
            "parts": (1,),
        }
    )
    idle = next(rank for rank in range(RANKS) if not balance_samples(few).of_rank(rank))
    _, parts = told(fresh(idle), few)
    assert len(parts) == 1


def test_the_order_of_feeds_does_not_matter() -> None:
    chance = random.Random(1)
    seal = slot(3)
    order = list(range(3))
    chance.shuffle(order)
    state = fresh()
    for part in order:
        state = fed(state, seal, range(part, part + 1))
    assert state.held == fed(fresh(), seal).held
    assert Token(3, 5, 3) == state.holding
