"""A draining controller: its reports, the work that it stops, and the time of its exit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stored_job import RULES, SHARDS, StoredJob

from controllers.rules.actions import AssignShards, FeedRank, JoinJob, LeaveJob, PutOffer
from controllers.rules.decide import decide, has_handed_over, shard_assignment, undelivered_refs
from controllers.rules.view import JobView, RankView
from controllers.telemetry.events import EventLog
from gcore.config import parse_spec
from gcore.ledger import transactions
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import EndedRef, Member, NodeCopies
from gcore.ledger.records.job import ModelFetch, NodeRecord
from gcore.ledger.transactions import Versioned
from gcore.store.types import KeyValue, Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.worker.records import WorkerRecord

ME, PEER = "n0.me", "n1.peer"
SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": SHARDS, "window": 8},
        "flow": {"steps": 9, "groups_per_step": 2, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
    }
)


class Pair:
    """A job of two controllers, seen by the one that may be asked to end."""

    def __init__(self) -> None:
        self.job = StoredJob(MemoryStore(MemoryCluster(FakeClock())), "u", ME)

    async def begin(self) -> None:
        """Both are members, each with a share of the shards."""
        await self.job.create()
        for name in (ME, PEER):
            await self.say(name, leaving=False)
        await self.assign(ME, PEER)

    async def say(self, name: str, *, leaving: bool) -> None:
        """A controller's membership."""
        member = Member(incarnation=name, node=name.split(".")[0], address="a:1", leaving=leaving)
        await self.job.store.transact((), (Put(self.job.keys.member(name), member.encode()),))
        await self.job.look()

    async def assign(self, *names: str) -> None:
        """The shards are theirs."""
        await self.job.won(
            transactions.assign(self.job.keys, self.job.mirror.assign, shard_assignment(names, SHARDS, None))
        )

    def view(self, *, leaving: bool = True, **changes: Any) -> JobView:
        """What ME sees."""
        nodes = {
            n: NodeRecord(name=n, incarnation=f"{n}.x", address="a:1", slots=("cpu:0",), pid=1) for n in ("n0", "n1")
        }
        workers: dict[str, WorkerRecord] = {}
        view = JobView(SPEC, RULES, self.job.mirror, ME, "n0", nodes, workers, leaving=leaving)
        return replace(view, **{"ranks": {0: RankView(0), 1: RankView(1)}} | changes)

    def held(self, **changes: Any) -> JobView:
        """With a finished group of the first prompt."""
        ref = self.job.due()[0]
        return self.view(holdings={ref: self.job.group(ref)}, **changes)


@pytest.fixture
async def pair() -> Pair:
    pair = Pair()
    await pair.begin()
    return pair


def actions(view: JobView) -> list[Any]:
    return [intent.action for intent in decide(view)]


def kinds(view: JobView) -> set[type]:
    return {type(action) for action in actions(view)}


async def test_it_says_first_that_it_leaves_and_once(pair: Pair) -> None:
    assert LeaveJob not in kinds(pair.view(leaving=False))
    assert LeaveJob in kinds(pair.view())
    await pair.say(ME, leaving=True)
    assert LeaveJob not in kinds(pair.view())


async def test_its_shards_are_the_others_at_once_and_not_when_its_lease_is_over(pair: Pair) -> None:
    assert AssignShards not in kinds(pair.view(leaving=False))
    await pair.say(PEER, leaving=True)
    view = pair.view(leaving=False)
    intent = next(intent for intent in decide(view) if isinstance(intent.action, AssignShards))
    assert isinstance(intent.action, AssignShards)
    assert intent.action.assignment.members == (ME,)
    assert None not in intent.action.assignment.owners


async def test_when_all_are_leaving_shards_stay_where_they_are(pair: Pair) -> None:
    await pair.say(ME, leaving=True)
    await pair.say(PEER, leaving=True)
    assert AssignShards not in kinds(pair.view())
    assert has_handed_over(pair.view())


async def test_it_joins_no_job_any_more(pair: Pair) -> None:
    members: dict[str, Versioned[Member]] = {PEER: pair.job.mirror.members[PEER]}
    alone = replace(pair.job.mirror, members=members)
    assert actions(pair.view(mirror=alone)) == []
    assert JoinJob() in actions(pair.view(mirror=alone, leaving=False))
    assert has_handed_over(pair.view(mirror=alone))


async def test_it_stays_until_its_word_is_heard_and_its_shards_are_the_others(pair: Pair) -> None:
    assert not has_handed_over(pair.view())
    await pair.say(ME, leaving=True)
    assert not has_handed_over(pair.view())
    await pair.assign(PEER)
    assert has_handed_over(pair.view())


async def test_draining_controller_offers_and_feeds_its_groups_until_no_rank_needs_them(pair: Pair) -> None:
    await pair.say(ME, leaving=True)
    await pair.assign(PEER)
    held = pair.held()
    assert PutOffer in kinds(held)
    assert not has_handed_over(held)
    assert undelivered_refs(held) == set(held.holdings)
    await pair.job.won(pair.job.sealing())
    seal = pair.job.mirror.seals[1].record
    holdings = {group.ref: group for group in seal.groups}
    given = pair.view(holdings=holdings)
    assert FeedRank in kinds(given)
    assert not has_handed_over(given)  # it may be given up yet, if another's groups are lost
    await pair.job.won(transactions.ready(pair.job.keys, pair.job.slots, 1))
    assert has_handed_over(pair.view(holdings=holdings))


async def test_outcomes_are_waited_for_like_groups_until_they_are_written_down(pair: Pair) -> None:
    await pair.say(ME, leaving=True)
    await pair.assign(PEER)
    ref = pair.job.due()[0]
    outcomes = {ref: EndedRef(ref=ref, kind="failed", reason="why", holder=ME)}
    assert not has_handed_over(pair.view(outcomes=outcomes))
    await pair.job.won(pair.job.accounting())
    assert has_handed_over(pair.view(outcomes=outcomes))


async def test_withdrawn_controller_leaves_no_records_in_the_job(pair: Pair) -> None:
    job = pair.job
    await job.won(job.offering(0))
    node = ME.split(".")[0]
    said = ModelFetch(node=node, path="m", done=1, total=9), NodeCopies(node=node, by=ME, seq=0)
    for key, record in zip((job.keys.fetch(node), job.keys.copies(node)), said, strict=True):
        await job.store.transact((), (Put(key, record.encode()),))
    await job.look()
    assert job.mirror.fetches.keys() == job.mirror.copies.keys() == {node}
    await job.won(transactions.withdraw(job.keys, ME, node))
    assert set(job.mirror.members) == {PEER}
    assert job.mirror.offers == {}
    assert (job.mirror.fetches, job.mirror.copies) == ({}, {})  # or others would wait for its model for ever
    await job.won(transactions.withdraw(job.keys, ME, node))  # twice is once


async def test_followers_are_told_that_it_leaves_before_it_is_gone(pair: Pair) -> None:
    keys = pair.job.keys
    log = EventLog(keys)
    member = Member(incarnation=ME, node="n0", address="a:1", leaving=True)
    put = WatchEvent("put", KeyValue(keys.member(ME), member.encode(), 1, 90))
    gone = WatchEvent("delete", KeyValue(keys.member(ME), b"", 0, 91))
    empty = JobMirror(keys)
    log.note(empty, WatchBatch((put, gone), 91), empty, 0.0)
    assert [event.message for event in log.events] == [
        "n0 is leaving: its daemon shuts down; its shards move to other nodes",
        "n0 has left",
    ]
