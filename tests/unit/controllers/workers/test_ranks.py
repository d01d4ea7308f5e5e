"""The calls into which a rank's feed is cut.

Controllers' knowledge of ranks and engines under reordered messages.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.changes import ChangeSignal
from controllers.inference.pool import EnginePool
from controllers.rules.step import EXCHANGE_LIMIT_S
from controllers.workers.ranks import (
    LEAST_S,
    PART_BYTES,
    RankConnections,
    RankNotConnected,
    feed_timeout_s,
    share_bytes,
    split_shares,
)
from gcore.api.v1 import train_pb2 as pb
from gcore.errors import EngineUnreachable
from gcore.ledger.records.chain import Seal, SealState
from gcore.testing import FakeClock
from gcore.train.rank.feed import WorldName
from gcore.train.rank.messages import write_payload
from gcore.types import Group, PromptRef, Sample, Token, Version, VersionSpan

Share = tuple[Group, frozenset[int]]


def share(number: int, tokens: int) -> Share:
    span = (VersionSpan(Version(0, 0), 0, tokens),)
    sample = Sample((1,) * tokens, (-0.5,) * tokens, "", "stop", span)
    return Group(PromptRef(0, 0, number), (1, 2, 3), (sample, sample)), frozenset({0, 1})


sizes = st.lists(st.integers(1, 60), max_size=30)


@given(sizes, st.integers(1, 2000))
def test_every_share_is_in_one_part_in_order_and_no_part_is_empty(tokens: list[int], limit: int) -> None:
    shares = [share(number, count) for number, count in enumerate(tokens)]
    parts = list(split_shares(shares, limit))
    assert [one for part in parts for one in part] == shares
    assert all(parts)


@given(sizes, st.integers(1, 2000))
def test_a_part_is_within_the_limit_unless_it_is_one_large_group(tokens: list[int], limit: int) -> None:
    for part in split_shares([share(number, count) for number, count in enumerate(tokens)], limit):
        assert len(part) == 1 or sum(map(share_bytes, part)) <= limit


@given(sizes.filter(bool), st.integers(1, 2000))
def test_no_two_parts_would_fit_into_one(tokens: list[int], limit: int) -> None:
    parts = list(split_shares([share(number, count) for number, count in enumerate(tokens)], limit))
    for before, after in itertools.pairwise(parts):
        assert sum(map(share_bytes, before)) + share_bytes(after[0]) > limit


def test_the_size_is_that_of_the_payload_nearly() -> None:
    one = share(1, 5000)
    assert 0.95 < share_bytes(one) / len(write_payload([one])) <= 1.0


def test_empty_share_makes_no_call() -> None:
    assert list(split_shares([])) == []


def test_a_part_over_the_slowest_line_is_there_before_the_batch_is_given_up() -> None:
    assert feed_timeout_s(0) == LEAST_S
    assert feed_timeout_s(PART_BYTES) < EXCHANGE_LIMIT_S
    assert feed_timeout_s(2 * PART_BYTES) > feed_timeout_s(PART_BYTES)


SEAL = Seal(lineage=0, step=1, attempt=1, state=SealState.SEALED, world="w", world_size=2, mini_batches=1)


def held(**samples: list[int]) -> list[pb.HeldGroup]:
    return [pb.HeldGroup(digest=digest, samples=indexes) for digest, indexes in samples.items()]


def state(token: Token, **samples: list[int]) -> pb.RankState:
    spelled = pb.StepToken(lineage=token.lineage, step=token.step, attempt=token.attempt)
    return pb.RankState(rank=0, holding=spelled, held=held(**samples))


@pytest.mark.parametrize("late", ["answer", "stream"])
def test_an_older_word_that_comes_later_takes_nothing_away(late: str) -> None:
    changed: list[int] = []
    links = RankConnections(FakeClock(), lambda: changed.append(1))
    token = Token(0, 1, 1)
    if late == "answer":
        links._note(0, state(token, mine=[0, 1], others=[0]))
        links._note_received(0, token, pb.FeedReply(held=held(mine=[0, 1])))
    else:
        links._note_received(0, token, pb.FeedReply(held=held(mine=[0, 1], others=[0])))
        links._note(0, state(token, mine=[0, 1]))
    assert links.views[0].held == {"mine": frozenset({0, 1}), "others": frozenset({0})}
    assert len(changed) == 2


def test_a_new_attempt_begins_empty() -> None:
    links = RankConnections(FakeClock(), lambda: None)
    links._note(0, state(Token(0, 1, 1), mine=[0, 1]))
    links._note(0, state(Token(0, 1, 3), mine=[0]))
    assert links.views[0].held == {"mine": frozenset({0})}


def test_an_answer_about_an_old_attempt_is_not_believed() -> None:
    links = RankConnections(FakeClock(), lambda: None)
    links._note(0, state(Token(0, 1, 3), mine=[0]))
    links._note_received(0, Token(0, 1, 1), pb.FeedReply(held=held(mine=[0, 1])))
    assert links.views[0].held == {"mine": frozenset({0})}


async def test_a_rank_that_is_gone_by_now_is_not_connected() -> None:
    links = RankConnections(FakeClock(), lambda: None)
    links.aim(WorldName("u", "w", 0), {})
    with pytest.raises(RankNotConnected, match="rank 1 is not connected"):
        await links.apply(1, SEAL, b"")
    with pytest.raises(RankNotConnected, match="rank 1 is not connected"):
        await links.feed(1, SEAL, [], 0, "a")


async def test_feed_is_hashed_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def sha256(data: bytes) -> Any:
        threads.append(threading.get_ident())
        return hashlib.sha256(data)

    monkeypatch.setattr("controllers.workers.ranks.hashlib", SimpleNamespace(sha256=sha256))
    links = RankConnections(FakeClock(), lambda: None)
    links.aim(WorldName("u", "w", 0), {0: "127.0.0.1:1"})  # nobody listens there
    group = Group(PromptRef(0, 0, 0), (1, 2), (Sample((3,), (-0.5,), "", "stop", ()),))
    with pytest.raises(grpc.aio.AioRpcError):
        await links.feed(0, SEAL, [(group, frozenset({0}))], 1, "a")
    await links.close()
    assert threads
    assert threading.get_ident() not in threads


async def test_an_engine_that_is_gone_by_now_cannot_be_published_to() -> None:
    engines = EnginePool(ChangeSignal(), timeout_s=1.0)
    with pytest.raises(EngineUnreachable, match="e is not connected"):
        await engines.publish("e", Version(0, 1), Path("weights"))


async def test_a_line_that_ends_by_a_defect_is_not_left_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rank would continue without reports, and the step would wait for it forever."""
    changes = ChangeSignal()
    links = RankConnections(FakeClock(), changes.notify)

    async def listen(*_: Any) -> None:
        raise AssertionError("what the rank said cannot be read")

    monkeypatch.setattr(links, "_listen", listen)
    links.aim(WorldName("u", "w", 0), {0: "127.0.0.1:1"})
    links.raise_defect()
    await changes.wait()
    with pytest.raises(AssertionError, match="cannot be read"):
        links.raise_defect()
    await links.close()


def fetching(digest: str, samples: list[int], fetched: int, *unavailable: bytes) -> pb.FetchingGroup:
    return pb.FetchingGroup(digest=digest, samples=samples, total=100, fetched=fetched, unavailable=unavailable)


def test_samples_without_their_blobs_are_known_from_both_reports() -> None:
    links, token = RankConnections(FakeClock(), lambda: None), Token(0, 1, 1)
    links._note_received(0, token, pb.FeedReply(fetching=[fetching("mine", [0, 1], 0)]))
    assert links.views[0].fetching["mine"].samples == {0, 1}
    seen = state(token, mine=[0])
    seen.fetching.append(fetching("other", [2], 40, b"\xab" * 32))
    seen.fetched_bytes = 70
    links._note(0, seen)
    view = links.views[0]
    assert {digest: one.samples for digest, one in view.fetching.items()} == {"mine": {1}, "other": {2}}
    assert view.fetching["other"].unavailable == {"ab" * 32}
    assert view.fetched_bytes == 70
    links._note(0, state(token, mine=[0, 1], other=[2]))
    assert links.views[0].fetching == {}


def test_fetching_samples_of_another_batch_do_not_count() -> None:
    links, token = RankConnections(FakeClock(), lambda: None), Token(0, 1, 1)
    links._note_received(0, token, pb.FeedReply(fetching=[fetching("mine", [0], 0)]))
    links._note(0, state(Token(0, 1, 2)))
    assert links.views[0].fetching == {}
