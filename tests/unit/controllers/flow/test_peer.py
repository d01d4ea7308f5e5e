"""Generation and evaluation run side by side: when one part fails, the others are cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peer_bench import RealBench

from controllers.changes import ChangeSignal
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.peer import JobPeer
from controllers.flow.step import JobStep
from gcore.data.order import shard_lengths
from gcore.errors import EngineError
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Head, Member
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.ledger.selection import StreamRules
from gcore.ledger.transactions import Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.system.concurrency import gather_or_cancel
from gcore.testing.flows import Asked
from gcore.types import Group, Outcome, PromptRef, Sample, Version, VersionSpan


async def test_the_results_come_in_order() -> None:
    async def one(value: int) -> int:
        for _ in range(3 - value):
            await asyncio.sleep(0)
        return value

    assert await gather_or_cancel(one(value) for value in range(3)) == [0, 1, 2]


async def test_when_one_answer_fails_the_others_have_ended_before_it_is_raised() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        await gather_or_cancel([waits(), fails(), waits()])
    assert ended == ["waits", "waits"]


RULES = StreamRules(shard_lengths(8, 2), 4, 2)
REF = PromptRef(0, 0, 0)
ENTRIES = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(6)]


def right(asked: Asked) -> str:
    return str(asked.prompt.fields["answer"])


class Present:
    """A peer of which only the look and the buffer matter; `head` may be moved."""

    def __init__(self) -> None:
        self.head = chain.base_entry(2, "w", ChainWriter("a", "n")).head
        self.buffer = GroupBuffer()
        self.faults = SimpleNamespace(note=lambda reason, trace: None)

    def look(self) -> Any:
        return SimpleNamespace(
            me="a",
            rules=RULES,
            head=self.head,
            mirror=SimpleNamespace(head=SimpleNamespace(record=self.head), has_ended=False),
        )


def group_of(version: Version) -> Group:
    return Group(REF, (1,), (Sample((1,), (0.0,), "a", "stop", (VersionSpan(version, 0, 1),)),))


def rolled_back(head: Head) -> Head:
    base = chain.base_entry(len(head.cursors.shards), "w", ChainWriter("a", "n")).entry
    kept = base.model_copy(update={"cursors": head.cursors, "tally": head.tally})
    return chain.rollback_entry(head, kept, "w2", ChainWriter("a", "m"), "a rank died").head


def test_group_of_the_current_weights_is_held() -> None:
    peer = Present()
    JobStep(peer, Version(0, 0)).keep_group(group_of(Version(0, 0)))  # type: ignore[arg-type]
    assert peer.buffer.knows(REF)


def test_a_group_that_is_finished_after_its_step_was_committed_is_not_held() -> None:
    peer = Present()
    step = JobStep(peer, Version(0, 0))  # type: ignore[arg-type]
    peer.head = peer.head.model_copy(update={"step": 1})
    step.keep_group(group_of(Version(0, 0)))
    assert not peer.buffer.knows(REF)


def test_group_finished_after_a_rollback_is_discarded() -> None:
    peer = Present()
    peer.head = peer.head.model_copy(update={"step": 3})
    step = JobStep(peer, Version(0, 3))  # type: ignore[arg-type]
    peer.head = rolled_back(peer.head)
    step.keep_group(group_of(Version(0, 3)))
    step.record_outcome(REF, Outcome("failed", "the reward raised"), "data")
    assert not peer.buffer.knows(REF)


def test_a_group_made_by_other_weights_is_the_engines_fault() -> None:
    peer = Present()
    peer.head = peer.head.model_copy(update={"step": 3})
    step = JobStep(peer, Version(0, 3))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"weights 0\.2, not 0\.3"):
        step.keep_group(group_of(Version(0, 2)))
    assert not peer.buffer.knows(REF)


def test_due_refs_stay_due_until_they_are_held(tmp_path: Path) -> None:
    """The flow may have abandoned the prompt before it started."""
    bench = RealBench(ENTRIES, right, tmp_path, flow={"groups_per_step": 4})
    first = bench.peer._due_refs()
    assert len(first) == 4
    assert bench.peer._due_refs() == first


def test_owner_of_all_shards_is_due_the_whole_quota(tmp_path: Path) -> None:
    bench = RealBench(ENTRIES, right, tmp_path, flow={"groups_per_step": 4})
    for name in ("other", "third"):
        member = Member(incarnation=name, node=name, address="h:1")
        bench.store_side.transact((), (Put(bench.keys.member(name), member.encode()),))
    assert len(bench.look().mirror.members) == 3
    assert len(bench.peer._due_refs()) == 4


async def test_an_ended_job_has_no_more_steps() -> None:
    """Nothing of it is waited for any more, so a flow that went on would never let anything else run."""
    peer: Any = Present()
    status = Versioned(JobStatus(phase=JobPhase.CANCELLED, reason="", changed=0.0), 1)
    mirror = JobMirror(JobKeys("u"), head=Versioned(peer.head, 1), status=status)
    peer.look = lambda: SimpleNamespace(mirror=mirror, head=peer.head, is_over=False)
    peer.changes = ChangeSignal()
    peer.collectives = SimpleNamespace(begin=lambda at: None)
    assert [step async for step in JobPeer.steps(peer)] == []
