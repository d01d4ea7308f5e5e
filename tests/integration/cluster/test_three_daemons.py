"""Three daemons and a real etcd of three members: any daemon accepts and reports a job, and the others replace one that dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from emulated_job import write_emulated_job
from three_nodes import Nodes, three_nodes

from gcore.api.v1 import jobs_pb2 as pb
from gcore.config import dump_explicit, load_spec
from gcore.observability.events import JobEvent

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]
STEPS = 8


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job whose model is only read for its vocabulary."""
    file = write_emulated_job(
        tmp_path,
        monkeypatch,
        "followed",
        data={"path": "train.jsonl", "shards": 48},
        flow={"steps": STEPS, "groups_per_step": 12, "samples_per_prompt": 2},
        checkpoint={"every": 1},
    )
    return dump_explicit(load_spec(file))


async def followed(nodes: Nodes, names: tuple[str, ...], kill_at: int | None = None) -> list[JobEvent]:
    """All events of the job, from the first of the daemons that answers; it is killed when a step is committed."""
    found = []
    async with nodes.client(*names) as client:
        async for event in client.follow("followed"):
            found.append(event)
            if event.kind == "step" and event.data["step"] == kill_at:
                nodes.kill(names[0])
    return found


async def test_a_follower_of_a_daemon_that_is_killed_misses_no_event_and_hears_none_twice(
    spec: str, tmp_path: Path
) -> None:
    async with three_nodes(tmp_path / "cluster") as nodes:
        async with nodes.client("node-0") as client:
            job = await client.create_job(spec, request_id="r1", mode=pb.START_MODE_RESUME)
        async with nodes.client("node-2") as client:
            assert (await client.create_job(spec, request_id="r1", mode=pb.START_MODE_RESUME)).uid == job.uid
            steps: list[tuple[int, int]] = []

            async def numbers() -> None:
                async with nodes.client("node-1", "node-2") as reader:
                    async for one in reader.follow_metrics("followed"):
                        steps.append((one.lineage, one.step))

            through_the_killed, of_a_survivor, _ = await asyncio.gather(
                followed(nodes, ("node-1", "node-2"), kill_at=3), followed(nodes, ("node-2",)), numbers()
            )
            ended = await client.get_job(job.uid)
            audit = await client.audit_job(job.uid)
            lines = [line async for line in client.stream_logs(pb.StreamLogsRequest(job=job.uid, tail=1))]
            usage = await client.get_usage(by=["job"])
    assert ended.state == pb.JOB_STATE_SUCCEEDED, ended.reason
    assert audit.clean, list(audit.violations)
    numbered = [event.sequence for event in through_the_killed]
    assert numbered == sorted(set(numbered)), "none twice, and in order"
    # Who hears of a job later may not have seen its first state, which was written over.
    known = max(through_the_killed[0].sequence, of_a_survivor[0].sequence)
    heard, reference = (
        [(event.sequence, event.kind, event.message) for event in events if event.sequence >= known]
        for events in (through_the_killed, of_a_survivor)
    )
    assert heard == reference, "none is missing"
    committed = [event.data["step"] for event in through_the_killed if event.kind == "step"]
    assert set(committed) == set(range(1, STEPS + 1))
    assert steps == [(e.data["lineage"], e.data["step"]) for e in through_the_killed if e.kind == "step"]
    assert all(line.instance for line in lines)
    assert [dict(one.by) for one in usage] == [{"job": "followed"}]
    assert usage[0].slot_seconds > usage[0].busy_seconds > 0
