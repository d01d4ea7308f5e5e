"""A store that refuses writes: the state in a job's session, and the command's output."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import SPEC
from job_session import make_session
from rich.console import Console
from stored_job import StoredJob

from controllers.cli.commands.run import _ask
from controllers.cli.view.screens import PlainScreen
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import StoreUnavailable
from gcore.ledger import transactions
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.ledger.transactions import TxnOutcome
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

FULL = "the store's database is full. Compact and defragment it"


class FullStore(MemoryStore):
    """Answers reads, and refuses writes while `full`."""

    full = False

    async def transact(self, *arguments: Any) -> Any:
        if self.full:
            raise StoreUnavailable(FULL)
        return await super().transact(*arguments)


async def test_a_refused_write_is_in_the_view_until_one_is_taken_or_a_change_is_heard(tmp_path: Path) -> None:
    clock = FakeClock()
    store = FullStore(MemoryCluster(clock))
    job = StoredJob(store, "u", "a")
    await job.create()
    session = make_session(tmp_path, store, clock, SPEC)
    ledger = session.dependencies.ledger
    session._records.mirror = job.mirror
    assert job.mirror.status is not None
    paused = transactions.set_status(
        JobKeys("u"), job.mirror.status, JobStatus(phase=JobPhase.FAILED, reason="why"), None
    )
    assert session._find_store_trouble() == ""
    store.full = True
    assert (await ledger.run(paused)).outcome is TxnOutcome.UNKNOWN
    assert session._find_store_trouble() == FULL
    assert session._find_store_trouble() == FULL
    # Another controller's write was heard: the store takes them.
    store.full = False
    await job.won(job.sealing())
    session._records.mirror = await job.look()
    assert session._find_store_trouble() == ""
    store.full = True
    assert (await ledger.run(paused)).outcome is TxnOutcome.UNKNOWN
    assert session._find_store_trouble() == FULL
    store.full = False
    assert (await ledger.run(paused)).outcome is TxnOutcome.WON
    assert session._find_store_trouble() == ""


async def test_the_command_prints_which_node_cannot_write_and_when_it_can_again() -> None:
    printed = StringIO()
    console = Console(file=printed, width=200)
    wait = pb.Waiting(who="node-0", what=f"node-0 cannot write to the store: {FULL}", since=1.0, cause="store")
    other = pb.Waiting(who="node-1", what="step 3 needs 2 more prompts", since=1.0, cause="groups")
    answers = [
        pb.Job(uid="u", waiting=[wait, other]),
        pb.Job(uid="u", waiting=[wait]),
        pb.Job(uid="u", waiting=[other]),
    ]

    async def get_job(uid: str) -> pb.Job:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    clock = FakeClock()
    asking = asyncio.create_task(_ask(SimpleNamespace(get_job=get_job), "u", PlainScreen(console), clock))  # type: ignore[arg-type]
    await clock.advance(5.0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    lines = printed.getvalue().splitlines()
    assert len(lines) == 2, lines
    assert lines[0] == f"waiting: node-0: node-0 cannot write to the store: {FULL}"
    assert lines[1].startswith("waiting: node-0 recovered after")
