"""A rank's received samples and their application: properties of the pure state machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import samples_by_group
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import Seal, SealedGroup, SealState
from gcore.train.rank import feed as feed_state
from gcore.train.rank.feed import (
    AlreadyApplied,
    Begin,
    FeedState,
    FeedTaken,
    RankRefusal,
    TrainGroup,
    TrainSample,
    WorldName,
)
from gcore.types import PromptRef, Token, Version

ME = WorldName("job", "world", 3)
GROUPS, SAMPLES, RANKS = 2, 3, 2


def fresh(done: int = 4, rank: int = 0) -> FeedState:
    return FeedState(ME, rank, RANKS, done)


def digest(number: int, attempt: int = 1) -> str:
    return f"{attempt:016x}{number:016x}"


def held(number: int, samples: tuple[int, ...], attempt: int = 1) -> dict[str, TrainGroup]:
    name = digest(number, attempt)
    made = {i: TrainSample(np.zeros(4 + i, np.int32), np.zeros(4 + i, np.float32), 1.0) for i in samples}
    return {name: TrainGroup(PromptRef(0, 0, number), name, np.zeros(5, np.int32), made)}


def make_seal(attempt: int = 1, step: int = 5) -> Seal:
    groups = tuple(
        SealedGroup(
            ref=PromptRef(0, 0, number),
            digest=digest(number, attempt),
            prompt_tokens=5,
            response_tokens=tuple(4 + i for i in range(SAMPLES)),
            versions=(Version(3, step - 1),),
            holder="h",
        )
        for number in range(GROUPS)
    )
    return Seal(
        lineage=3,
        step=step,
        attempt=attempt,
        state=SealState.READY,
        world="world",
        world_size=RANKS,
        mini_batches=1,
        groups=groups,
    )


def fed(state: FeedState, seal: Seal) -> FeedState:
    """With this rank's share of the seal."""
    layout = balance_samples(seal)
    for number, samples in samples_by_group(layout, state.rank).items():
        answer = feed_state.feed_samples(state, ME, seal.token, held(number, samples, seal.attempt))
        assert isinstance(answer, FeedTaken)
        state = answer.state
    return state


others = st.builds(WorldName, st.sampled_from(["job", "other"]), st.sampled_from(["world", "old"]), st.integers(2, 4))
names = st.one_of(st.just(ME), st.just(ME), others)  # or hardly ever would two feeds of a history be taken
tokens = st.one_of(
    st.builds(Token, st.just(3), st.just(5), st.integers(1, 3)),
    st.builds(Token, st.integers(2, 4), st.integers(3, 7), st.integers(1, 3)),
)
parts = st.lists(st.tuples(st.integers(0, GROUPS - 1), st.sets(st.integers(0, SAMPLES - 1), min_size=1)), max_size=4)
feeds = st.tuples(names, tokens, parts)


@given(st.lists(feeds, max_size=12))
def test_only_the_next_step_of_the_own_world_is_ever_held_and_attempts_never_go_back(
    history: list[tuple[WorldName, Token, list[tuple[int, set[int]]]]],
) -> None:
    state = fresh()
    for name, token, groups in history:
        content: dict[str, TrainGroup] = {}
        for number, samples in groups:
            content |= held(number, tuple(sorted(samples)), token.attempt)
        before = state
        answer = feed_state.feed_samples(state, name, token, content)
        if name != ME or token.lineage != ME.lineage or token.step > 5:
            assert isinstance(answer, RankRefusal)
            continue
        assert isinstance(answer, FeedTaken)
        state = answer.state
        if token.step < 5:
            assert state == before
        if before.holding is not None:
            assert state.holding is not None
            assert state.holding >= before.holding
        if state.holding is not None:
            assert state.holding.step == 5
            prefix = f"{state.holding.attempt:016x}"
            assert all(name.startswith(prefix) for name in state.held), "nothing of another attempt"
        assert state.held == {name: frozenset(group.samples) for name, group in state.groups.items()}


@given(st.lists(st.tuples(st.integers(0, GROUPS - 1), st.sets(st.integers(0, SAMPLES - 1), min_size=1)), max_size=8))
def test_feeds_of_one_token_add_up_in_any_order(pieces: list[tuple[int, set[int]]]) -> None:
    state = fresh()
    expected: dict[str, frozenset[int]] = {}
    for number, samples in pieces:
        answer = feed_state.feed_samples(state, ME, Token(3, 5, 1), held(number, tuple(sorted(samples))))
        assert isinstance(answer, FeedTaken)
        state = answer.state
        name = digest(number)
        expected[name] = expected.get(name, frozenset()) | samples
    assert state.held == expected


@given(st.integers(0, RANKS - 1), st.sets(st.tuples(st.integers(0, GROUPS - 1), st.integers(0, SAMPLES - 1))))
def test_apply_begins_exactly_when_the_whole_share_is_held(rank: int, slots: set[tuple[int, int]]) -> None:
    seal = make_seal()
    state = fresh(rank=rank)
    for number, sample in sorted(slots):
        answer = feed_state.feed_samples(state, ME, seal.token, held(number, (sample,)))
        assert isinstance(answer, FeedTaken)
        state = answer.state
    share = {(slot.group, slot.sample) for slot in balance_samples(seal).of_rank(rank)}
    begun = feed_state.apply_step(state, ME, seal.token, seal)
    assert isinstance(begun, Begin) == (share <= slots)
    if isinstance(begun, Begin):
        assert begun.work.seal == seal
        assert set(begun.work.groups) == {digest(number) for number, _ in share}
        assert begun.state.applying == seal.token


def test_a_token_is_applied_once_however_often_it_is_asked_for() -> None:
    seal = make_seal()
    begun = feed_state.apply_step(fed(fresh(), seal), ME, seal.token, seal)
    assert isinstance(begun, Begin)
    assert isinstance(feed_state.apply_step(begun.state, ME, seal.token, seal), AlreadyApplied)
    after = feed_state.finish_step(begun.state)
    assert after.applied == seal.token
    assert after.done == 5
    assert isinstance(feed_state.apply_step(after, ME, seal.token, seal), AlreadyApplied)


def test_feeds_do_not_change_the_step_being_applied() -> None:
    seal = make_seal()
    begun = feed_state.apply_step(fed(fresh(), seal), ME, seal.token, seal)
    assert isinstance(begun, Begin)
    again = feed_state.feed_samples(begun.state, ME, Token(3, 5, 2), held(0, (0,), 2))
    assert isinstance(again, FeedTaken)
    assert again.state == begun.state


def test_after_a_step_only_the_next_one_is_taken() -> None:
    seal = make_seal()
    begun = feed_state.apply_step(fed(fresh(), seal), ME, seal.token, seal)
    assert isinstance(begun, Begin)
    state = feed_state.finish_step(begun.state)
    following = make_seal(step=6)
    assert isinstance(feed_state.apply_step(fed(state, following), ME, following.token, following), Begin)
    assert isinstance(feed_state.feed_samples(state, ME, Token(3, 7, 1), {}), RankRefusal)


def test_a_higher_attempt_replaces_everything_of_a_lower_one() -> None:
    state = fed(fresh(), make_seal(attempt=1))
    answer = feed_state.feed_samples(state, ME, Token(3, 5, 2), held(0, (1,), 2))
    assert isinstance(answer, FeedTaken)
    assert answer.state.held == {digest(0, 2): frozenset({1})}


SEAL = make_seal()
WRONG = {
    "not READY": SEAL.model_copy(update={"state": SealState.SEALED}),
    "of another attempt": SEAL.model_copy(update={"attempt": 2}),
    "of another world": SEAL.model_copy(update={"world": "old"}),
    "for larger sequence groups": SEAL.model_copy(update={"sequence_parallel": 2}),
    "for more ranks": SEAL.model_copy(update={"world_size": 3}),
    "with another digest": SEAL.model_copy(
        update={"groups": tuple(g.model_copy(update={"digest": digest(7)}) for g in SEAL.groups)}
    ),
    "with other lengths": SEAL.model_copy(
        update={"groups": tuple(g.model_copy(update={"response_tokens": (9, 9, 9)}) for g in SEAL.groups)}
    ),
    "of other prompts": SEAL.model_copy(
        update={"groups": tuple(g.model_copy(update={"ref": PromptRef(1, 1, 1)}) for g in SEAL.groups)}
    ),
}


@pytest.mark.parametrize("wrong", [pytest.param(seal, id=name) for name, seal in WRONG.items()])
def test_a_seal_that_does_not_fit_is_refused(wrong: Seal) -> None:
    state = fed(fresh(), SEAL)
    assert isinstance(feed_state.apply_step(state, ME, SEAL.token, wrong), RankRefusal)
    assert isinstance(feed_state.apply_step(state, ME, SEAL.token, SEAL), Begin)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(replace(ME, job_uid="other"), id="job"),
        pytest.param(replace(ME, world="old"), id="world"),
        pytest.param(replace(ME, lineage=2), id="lineage"),
    ],
)
def test_another_world_can_neither_feed_nor_apply(name: WorldName) -> None:
    state = fed(fresh(), SEAL)
    assert isinstance(feed_state.feed_samples(state, name, SEAL.token, {}), RankRefusal)
    assert isinstance(feed_state.apply_step(state, name, SEAL.token, SEAL), RankRefusal)


def test_a_rank_without_a_share_applies_without_having_been_fed() -> None:
    few = SEAL.model_copy(
        update={"groups": tuple(g.model_copy(update={"response_tokens": (4,)}) for g in SEAL.groups[:1])}
    )
    idle = next(rank for rank in range(RANKS) if not balance_samples(few).of_rank(rank))
    assert isinstance(feed_state.apply_step(fresh(rank=idle), ME, few.token, few), Begin)


@pytest.mark.parametrize("sealed", [(), (0, 1)], ids=["the seal says unmasked", "the seal says masked"])
def test_samples_must_be_masked_exactly_as_the_seal_says(sealed: tuple[int, ...]) -> None:
    seal = make_seal()
    seal = seal.model_copy(update={"groups": tuple(g.model_copy(update={"masked": sealed}) for g in seal.groups)})
    state = fed(fresh(), seal)
    if not sealed:
        mask = next(iter(state.groups))
        samples = {i: replace(one, masked=True) for i, one in state.groups[mask].samples.items()}
        state = replace(state, groups={**state.groups, mask: replace(state.groups[mask], samples=samples)})
    answer = feed_state.apply_step(state, ME, seal.token, seal)
    assert isinstance(answer, RankRefusal)
    assert "unlike in the seal" in answer.reason
