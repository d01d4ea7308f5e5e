"""An evaluation on a user's request: of the current step, by all peers, and never counted as the best."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from eval_crew import KEYS, Crew
from stored_job import StoredJob

from controllers.api.edge.errors import Conflict, JobEnded
from controllers.api.jobs import request_evaluation
from gcore.config import parse_spec
from gcore.errors import StoreUnavailable
from gcore.ledger.evaluation import ask, best_evaluation
from gcore.ledger.records.chain import Head
from gcore.ledger.records.job import EvalAsked, Evaluation, JobPhase, JobStatus
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Version

HELD_OUT = {"path": "e", "every": 5}


async def a_job(evaluation: dict[str, Any] | None = None) -> StoredJob:
    """At step 0 of nine."""
    job = StoredJob(MemoryStore(MemoryCluster(FakeClock())), "u", "n0.me")
    await job.create()
    assert job.mirror.job is not None
    tree: dict[str, Any] = {
        "name": "u",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 16},
        "flow": {"steps": 9},
        "rollout": {"max_new_tokens": 4},
    }
    spec = parse_spec(tree | ({} if evaluation is None else {"eval": evaluation}))
    record = job.mirror.job.record.model_copy(update={"spec": spec.model_dump(mode="json")})
    await job.store.transact((), (Put(job.keys.job, record.encode()),))
    return job


async def asked(job: StoredJob) -> Version:
    return await request_evaluation(job.ledger, job.look, "ada", 1.0)


async def move_head(job: StoredJob, step: int) -> None:
    mirror = await job.look()
    assert mirror.head is not None
    head = mirror.head.record.model_copy(update={"step": step, "seq": step})
    await job.store.transact((), (Put(job.keys.head, head.encode()),))


async def test_the_step_that_is_under_way_is_asked_for_once() -> None:
    job = await a_job(HELD_OUT)
    await move_head(job, 2)
    assert await asked(job) == Version(0, 3)
    first = (await job.look()).askings[""]
    assert (first.record.step, first.record.by) == (3, "ada")
    assert await asked(job) == Version(0, 3)
    assert (await job.look()).askings[""] == first, "it was asked for already"
    await move_head(job, 3)
    assert await asked(job) == Version(0, 3), "it is being evaluated"
    await move_head(job, 4)
    assert await asked(job) == Version(0, 5)


async def test_scheduled_evaluation_needs_no_request() -> None:
    job = await a_job(HELD_OUT)
    await move_head(job, 5)
    assert await asked(job) == Version(0, 5)
    assert (await job.look()).asked is None


async def test_a_job_that_cannot_be_evaluated_says_why() -> None:
    with pytest.raises(Conflict, match="no held-out prompts"):
        await asked(await a_job())
    job = await a_job(HELD_OUT)
    await job.store.transact((), (Put(job.keys.state, JobStatus(phase=JobPhase.FAILED).encode()),))
    with pytest.raises(JobEnded, match="has ended"):
        await asked(job)


async def test_request_that_loses_against_a_commit_moves_to_the_next_step() -> None:
    job = await a_job(HELD_OUT)
    await move_head(job, 1)

    class Late(TransactionExecutor):
        races = 1

        async def run(self, txn: Any) -> Any:
            if self.races:
                self.races -= 1
                await move_head(job, 2)
            return await super().run(txn)

    version = await request_evaluation(Late(job.store, job.keys), job.look, "", 1.0)
    assert version == Version(0, 3)


async def test_an_answer_that_never_came_is_told_as_such() -> None:
    job = await a_job(HELD_OUT)
    await move_head(job, 1)

    class Silent(MemoryStore):
        async def transact(self, compares: Any, writes: Any) -> Any:
            raise StoreUnavailable("no answer")

    silent = TransactionExecutor(Silent(job.store.cluster), job.keys)  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match="unknown whether the evaluation was requested"):
        await request_evaluation(silent, job.look, "", 1.0)


async def test_only_the_step_after_head_can_be_asked_for() -> None:
    job = await a_job(HELD_OUT)
    mirror = await job.look()
    assert mirror.head is not None
    with pytest.raises(ValueError, match="does not follow"):
        ask(job.keys, mirror.head, None, EvalAsked(step=7))
    txn = ask(job.keys, mirror.head, None, EvalAsked(step=1))
    await move_head(job, 1)
    assert (await job.ledger.run(txn)).outcome is TxnOutcome.STALE


async def test_peers_evaluate_what_was_asked_for_though_it_is_not_its_turn() -> None:
    crew = Crew({"sums": 30}, {"every": 1000, "at_start": False})
    one = Version(0, 1)
    crew.put({KEYS.asked: EvalAsked(step=1).encode()})
    crew.to_version(one)
    crew.start()
    for _ in range(50):
        await crew.settle(1.0)
    made = crew.evaluations[str(one)]
    assert all(task.done() for task in crew.tasks.values())
    assert (made.version, made.asked) == (one, True)


def test_an_evaluation_that_was_asked_for_is_never_the_best(head_at: Head) -> None:
    made = [Evaluation(version=Version(0, step), accuracy=step / 10, count=1) for step in (1, 2)]
    assert getattr(best_evaluation(head_at, made, "accuracy"), "version", None) == Version(0, 2)
    made[1] = made[1].model_copy(update={"asked": True})
    assert getattr(best_evaluation(head_at, made, "accuracy"), "version", None) == Version(0, 1)


@pytest.fixture
def head_at() -> Head:
    """At step 2 of the first lineage."""

    async def made() -> Versioned[Head]:
        job = await a_job(HELD_OUT)
        await move_head(job, 2)
        head = (await job.look()).head
        assert head is not None
        return head

    return asyncio.run(made()).record
