"""Running a flow: failures that end the job, their messages, and restarts."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from plug_in_package import installer

from controllers.changes import ChangeSignal
from controllers.job.session import FlowRunner
from controllers.job.supervision import NodeNotReady
from controllers.telemetry.events import EventLog
from controllers.telemetry.notices import PluginErrorLog
from gcore.data.dataset import DataChanged
from gcore.errors import SpecError
from gcore.flows import find_flow
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import FaultRecord, JobPhase, JobStatus
from gcore.store.keys import JobKeys
from gcore.store.types import WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

KEYS = JobKeys("u")
CODE = """
def deep():
    return {}["nothing"]

async def raises(peer):
    deep()
"""


class Job:
    """A job that remembers why it ended."""

    def __init__(self) -> None:
        self.uid, self.changes, self.clock = "u", ChangeSignal(), FakeClock()
        self.reasons: list[str] = []
        self.left = 0
        self.cluster = MemoryCluster(self.clock)
        self.faults = PluginErrorLog(MemoryStore(self.cluster), KEYS, "node-0")
        self.producing = FlowRunner(self, self.faults, self.clock)

    def has_more(self) -> bool:
        self.left -= 1
        return self.left >= 0

    async def fail(self, reason: str) -> None:
        self.reasons.append(reason)

    async def run(self, flow: Any) -> None:
        """Until it waits for more to do."""
        task = asyncio.ensure_future(self.producing.run(flow, None))  # type: ignore[arg-type]
        await self.clock.advance(10.0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def events(self) -> list[Any]:
        listing = self.cluster.listing(KEYS.prefix)
        batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
        told = EventLog(KEYS)
        told.note(JobMirror(KEYS), batch, JobMirror(KEYS).fold(batch), 0.0)
        return told.events


async def test_a_flow_that_raises_ends_the_job_and_its_own_traceback_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer(tmp_path, monkeypatch, "gcore.flows")("flow_raises", "raises = flow_raises:raises", CODE)
    job = Job()
    await job.run(find_flow("raises"))
    (reason,) = job.reasons
    assert reason.startswith("the flow raised KeyError('nothing') at ")
    assert reason.endswith("flow_raises.py:3")
    (event,) = job.events()
    trace = json.loads(event.data_json)["trace"]
    assert "in deep" in trace
    assert "producing.py" not in trace


async def test_data_that_changed_under_a_running_job_do_not_end_it() -> None:
    """The whole training would be lost for a file that can be restored: the node leaves the job, and waits for the file."""

    async def reads(peer: Any) -> None:
        raise DataChanged("the file was changed", where="prompts.jsonl, entry 7", fix="Put it back")

    job = Job()
    with pytest.raises(NodeNotReady, match=r"prompts\.jsonl, entry 7: the file was changed\. Put it back"):
        await job.run(reads)
    assert job.reasons == []


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_a_flow_that_leaves_python_or_awaits_what_it_cancelled_ends_the_job_and_not_the_controller(
    raised: BaseException,
) -> None:
    async def leaves(peer: Any) -> None:
        raise raised

    job = Job()
    await job.run(leaves)
    (reason,) = job.reasons
    assert reason.startswith(f"the flow raised {raised!r} at ")


async def test_a_flow_that_keeps_its_cancellation_to_itself_is_not_waited_for() -> None:
    async def swallows(peer: Any) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    job = Job()
    await job.run(swallows)
    assert job.reasons == []


async def test_gcore_errors_need_no_traceback() -> None:
    async def refuses(peer: Any) -> None:
        raise SpecError("no", where="flow.filters")

    job = Job()
    await job.run(refuses)
    assert job.reasons == ["flow.filters: no"]
    assert not job.events()


async def test_a_flow_is_begun_anew_when_there_are_steps_to_make_again() -> None:
    begun = []

    async def ends_at_once(peer: Any) -> None:
        begun.append(1)

    job = Job()
    job.left = 2
    await job.run(ends_at_once)
    assert len(begun) == 3


async def test_any_message_of_a_raising_flow_is_storable_and_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'async def raises(peer):\n    raise RuntimeError("<" * 2_000_000 + "\\udcff")\n'
    installer(tmp_path, monkeypatch, "gcore.flows")("flow_shouts", "shouts = flow_shouts:raises", code)
    job = Job()
    await job.run(find_flow("shouts"))
    (reason,) = job.reasons
    assert reason.startswith("the flow raised RuntimeError(")
    assert len(JobStatus(phase=JobPhase.FAILED, reason=reason).encode()) < 20_000
    (event,) = job.events()
    assert json.loads(event.data_json)["trace"].endswith("<\\udcff")


def test_half_a_surrogate_pair_in_a_record_is_spelt_out_because_nobody_could_read_it() -> None:
    fault = FaultRecord(node="n", what="no file \udcff", trace="\U0001f600 \\ud83d \ud83d")
    read = FaultRecord.decode(fault.encode())
    assert read.what == "no file \\udcff"
    assert read.trace == "\U0001f600 \\ud83d \\ud83d"
