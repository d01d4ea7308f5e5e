"""Samples with media in a rank: held once their blobs are there, fetching before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.records.chain import Seal, SealedGroup, SealState
from gcore.train.rank import feed as feed_state
from gcore.train.rank.feed import Begin, FeedState, FeedTaken, RankRefusal, TrainGroup, TrainSample, WorldName
from gcore.types import Medium, PromptRef, Token, Version

ME = WorldName("job", "world", 3)
GROUPS, SAMPLES = 2, 2
TOKEN = Token(3, 5, 1)


def medium(number: int) -> Medium:
    return Medium("picture", f"{number:064x}", 100 + number, (16, 16, 3), "uint8")


def media_of(group: int, sample: int) -> tuple[Medium, ...]:
    """A picture of its own for each sample, and for sample 1 one that both groups share."""
    return (medium(10 + 2 * group + sample), *((medium(99),) if sample else ()))


def part(group: int, samples: tuple[int, ...], holders: tuple[str, ...] = ("a",)) -> dict[str, TrainGroup]:
    made = {
        i: TrainSample(np.zeros(4, np.int32), np.zeros(4, np.float32), 1.0, media=media_of(group, i)) for i in samples
    }
    prompt = np.zeros(5, np.int32)
    whole = TrainGroup(
        PromptRef(0, 0, group), f"{group:032x}", prompt, made, media=(medium(group),), holders=frozenset(holders)
    )
    return {whole.digest: whole}


def fed(state: FeedState, group: int, samples: tuple[int, ...], token: Token = TOKEN, *holders: str) -> FeedState:
    answer = feed_state.feed_samples(state, ME, token, part(group, samples, holders or ("a",)))
    assert isinstance(answer, FeedTaken)
    return answer.state


def whole_seal() -> Seal:
    groups = tuple(
        SealedGroup(
            ref=PromptRef(0, 0, number),
            digest=f"{number:032x}",
            prompt_tokens=5,
            response_tokens=(4,) * SAMPLES,
            versions=(Version(3, 4),),
            holder="h",
        )
        for number in range(GROUPS)
    )
    return Seal(
        lineage=3, step=5, attempt=1, state=SealState.READY, world="world", world_size=1, mini_batches=1, groups=groups
    )


def all_fed() -> FeedState:
    state = FeedState(ME, 0, 1, 4)
    for group in range(GROUPS):
        state = fed(state, group, tuple(range(SAMPLES)))
    return state


def test_a_sample_is_held_when_the_blobs_of_its_prompt_and_of_itself_are_there() -> None:
    state = fed(FeedState(ME, 0, 1, 4), 0, (0, 1))
    assert state.held == {}
    assert state.fetching[f"{0:032x}"].samples == {0, 1}
    state = feed_state.add_blobs(state, [medium(0).sha256, medium(10).sha256])
    assert state.held == {f"{0:032x}": {0}}
    assert state.fetching[f"{0:032x}"].samples == {1}
    assert (state.fetching[f"{0:032x}"].fetched, state.fetching[f"{0:032x}"].total) == (100, 100 + 111 + 199)
    state = feed_state.add_blobs(state, [medium(11).sha256, medium(99).sha256])
    assert state.held == {f"{0:032x}": {0, 1}}
    assert state.fetching == state.wanted == {}


def test_blobs_stay_for_a_new_attempt_and_go_when_the_step_is_trained() -> None:
    state = feed_state.add_blobs(all_fed(), all_fed().wanted)
    again = fed(state, 0, (0,), Token(3, 5, 2))
    assert again.held == {f"{0:032x}": {0}}
    answer = feed_state.apply_step(state, ME, TOKEN, whole_seal())
    assert isinstance(answer, Begin)
    assert answer.state.blobs == state.blobs
    done = feed_state.finish_step(answer.state)
    assert done.blobs == frozenset()


def test_a_blob_that_no_store_has_is_reported_until_the_group_is_fed_again() -> None:
    lost = medium(0).sha256
    state = feed_state.miss_blobs(all_fed(), [lost, "f" * 64])
    assert state.unavailable == {lost}
    assert state.fetching[f"{0:032x}"].unavailable == {lost}
    assert not state.fetching[f"{1:032x}"].unavailable
    state = fed(state, 0, (0,), TOKEN, "b")
    assert state.unavailable == frozenset()
    assert state.wanted[lost].holders == {"a", "b"}
    assert feed_state.add_blobs(feed_state.miss_blobs(state, [lost]), [lost]).unavailable == frozenset()


actions = st.one_of(
    st.tuples(st.just("feed"), st.integers(0, GROUPS - 1), st.sets(st.integers(0, SAMPLES - 1), min_size=1)),
    st.tuples(st.just("add"), st.integers(0, 5), st.just({0})),
    st.tuples(st.just("miss"), st.integers(0, 5), st.just({0})),
    st.tuples(st.just("attempt"), st.just(0), st.just({0})),
)


@given(st.lists(actions, max_size=24))
def test_held_and_fetching_divide_what_was_received_and_nothing_is_trained_without_its_blobs(
    history: list[tuple[str, int, set[int]]],
) -> None:
    state, token = FeedState(ME, 0, 1, 4), TOKEN
    received: dict[int, set[int]] = {}
    every = sorted(all_fed().wanted)
    for kind, number, samples in history:
        if kind == "feed":
            state = fed(state, number, tuple(sorted(samples)), token)
            received.setdefault(number, set()).update(samples)
        elif kind == "attempt":
            token = replace_attempt(token)
            state = fed(state, 0, (0,), token)
            received = {0: {0}}
        elif kind == "add":
            state = feed_state.add_blobs(state, [every[number]])
        else:
            state = feed_state.miss_blobs(state, [every[number]])
        for group, of_group in received.items():
            digest = f"{group:032x}"
            held = state.held.get(digest, frozenset())
            fetching = state.fetching[digest].samples if digest in state.fetching else frozenset()
            assert held | fetching == of_group
            assert not held & fetching
            for sample in held:
                needed = {one.sha256 for one in (medium(group), *media_of(group, sample))}
                assert needed <= state.blobs
        assert not state.unavailable & state.blobs
        seal = whole_seal().model_copy(update={"attempt": token.attempt})
        answer = feed_state.apply_step(state, ME, token, seal)
        complete = all(state.held.get(f"{group:032x}") == {0, 1} for group in range(GROUPS))
        assert isinstance(answer, Begin if complete else RankRefusal)


def replace_attempt(token: Token) -> Token:
    return token._replace(attempt=token.attempt + 1)


def test_a_group_of_text_is_held_at_once() -> None:
    state = FeedState(ME, 0, 1, 4)
    (digest, group), *_ = part(0, (0,)).items()
    text = replace(group, media=(), samples={0: replace(group.samples[0], media=())})
    answer = feed_state.feed_samples(state, ME, TOKEN, {digest: text})
    assert isinstance(answer, FeedTaken)
    assert answer.state.held == {digest: {0}}
    assert answer.state.fetching == answer.state.wanted == {}
