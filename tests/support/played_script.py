"""A scripted job at its second step for `fake_jobs`, with everything that commands display of a job."""

from __future__ import annotations

import json

from fake_jobs import Script

from gcore.api.v1 import jobs_pb2 as pb
from gcore.observability.events import JobEvent

SPEC = {
    "name": "sums",
    "model": {"path": "m"},
    "data": {"path": "d"},
    "flow": {"steps": 9},
    "rollout": {"max_new_tokens": 4},
}


def played_script() -> Script:
    """One node with two slots, two workers, two shards, eight events."""
    job = pb.Job(
        uid="u1",
        name="sums",
        namespace="research",
        owner="ada",
        state=pb.JOB_STATE_RUNNING,
        reason="training",
        spec_json=json.dumps(SPEC),
        step=2,
        steps=9,
        priority=5,
        slots=2,
        slots_min=1,
        run_dir="/r/sums-u1",
    )
    job.waiting.add(who="node-0", what="the batch of step 3", since=1.0)
    made = Script(job)
    made.events = [JobEvent(n, 1.7e9 + n, "step" if n % 2 else "member", f"event {n}", {"n": n}) for n in range(1, 9)]
    made.lines = [
        pb.LogLine(instance="train-n-1", node="n", role="train", rank=0, text="one \x1b[31mred"),
        pb.LogLine(instance="rollout-n-1", node="n", role="rollout", text="two", time=5.0),
    ]
    made.shards = [pb.Shard(shard=0, node="node-0", seq=3, length=10, ahead=2), pb.Shard(shard=1, length=9)]
    made.usages = [
        pb.Usage(by={"namespace": "research"}, slot_seconds=7200, busy_seconds=3600),
        pb.Usage(by={"namespace": "default"}, slot_seconds=3600, busy_seconds=0),
    ]
    node = made.nodes.nodes.add(name="node-0", incarnation="node-0.a", address="h:1", slots=["cuda:0", "cuda:1"])
    node.uses.add(slot="cuda:0", job_uid="u1")
    made.nodes.workers.add(
        instance="train-n-1", node="node-0", role="train", job_uid="u1", state="serving", slot="cuda:0"
    )
    return made
