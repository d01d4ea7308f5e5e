"""A recorded job (`recorded_job`) behind the real job API, in a thread, with everything that commands display of it: nodes, workers, shares,
usage, slot times, moves, samples, logs, tokens, warnings. Times are those of a stopped clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from recorded_job import HOLDERS, KEYS, UID, RecordedJob, a_job_under_way

from controllers.api.edge.access import AccessService
from controllers.api.jobs import JobsService
from controllers.api.store_reader import StoreReader
from controllers.api.submission.submit import Submitter
from gcore.api.tokens import TokenRecord
from gcore.api.v1 import access_pb2_grpc, jobs_pb2_grpc
from gcore.ledger import archive as store_copy
from gcore.ledger.records.chain import Assignment
from gcore.ledger.records.cluster import Claim, Drained, Quotas, Share, Shares, SickSlots
from gcore.ledger.records.job import (
    Evaluation,
    ForecastAccuracy,
    HoldPeriod,
    JobPhase,
    JobRecord,
    Leader,
    Move,
    MoveKind,
    MoveOutcome,
    Moves,
    NodeRecord,
    Pin,
    SplitPart,
    Trouble,
)
from gcore.ledger.records.slot_accounting import (
    AccountLine,
    EngineSums,
    NodeAccounts,
    Span,
    StepAccount,
    append_line,
)
from gcore.ledger.usage import DAY_S, NodeUsage, PoolSeconds
from gcore.observability import samples as samples_folder
from gcore.observability.samples import KeptAdvantage, KeptGroup, KeptSample, KeptText
from gcore.store import keys
from gcore.store.types import Put
from gcore.system.clock import SystemClock
from gcore.testing import MemoryStore
from gcore.types import PromptRef, Version
from gcore.worker.records import WorkerRecord

NOW = 1_700_000_000.0
NODES = ("node-0", "node-1")
STEP = 5
"""The newest that was committed."""
STEPS_IN_FILES = 9
"""Of which the folder tells: what reads it wants several."""


class StandingClock(SystemClock):
    """It is always the same time of day; waits are real."""

    def wall(self) -> float:
        return NOW


@dataclass
class ServedJob:
    """`home`: a command's `--home` under which the run lies; no cluster is up there."""

    home: Path
    address: str
    job: RecordedJob
    run_dir: Path

    def end(self) -> None:
        """The job ends, and leaves its copy in the run's folder."""
        self.job.end(JobPhase.SUCCEEDED)
        store_copy.write_copy(self.run_dir, HOLDERS[0], UID, self.job.listing)


@contextlib.contextmanager
def served_job(folder: Path) -> Iterator[ServedJob]:
    """Below `folder` lie the home and the run."""
    home = folder / "home"
    run_dir = home / "runs" / f"sums-{UID}"
    run_dir.mkdir(parents=True)
    job = a_job_under_way(run_dir)
    more = {"eval": {"path": "held.jsonl"}, "placement": {"policy": "dynamic"}}
    record = JobRecord.decode(job.cluster.listing(KEYS.job).kvs[0].value)
    changed = record.model_copy(update={"spec": record.spec | more})
    others = [Put(key, value) for key, value in records().items()]
    job.cluster.transact((), [Put(KEYS.job, changed.encode()), *others])
    write_files(run_dir)
    clock = StandingClock()
    store = MemoryStore(job.cluster)
    jobs = StoreReader(store)
    submissions = Submitter(store, jobs, home / "runs", folder / "cache", clock)

    async def ready() -> Submitter:
        return submissions

    async def start() -> tuple[Any, int]:
        server = grpc.aio.server()
        jobs_pb2_grpc.add_JobsServicer_to_server(JobsService(jobs, ready, lambda uid: None, clock), server)
        access_pb2_grpc.add_AccessServicer_to_server(AccessService(store, clock), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield ServedJob(home, f"127.0.0.1:{port}", job, run_dir)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(grace=None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def records() -> dict[str, bytes]:
    """What stands in the store beside the job's own chain."""
    share = {"node-0": ("cpu:0", "cpu:1"), "node-1": ("cpu:0",)}
    found: dict[str, Any] = {
        keys.request("first"): UID,
        keys.SHARES: Shares(jobs={UID: Share(granted=share, held=share)}),
        KEYS.active: Claim(namespace="default", name="sums", owner="ada", priority=3, created=1.0, paused=True),
        keys.QUOTAS: Quotas(slots={"default": 8, "research": 0}),
        keys.drained_node("node-1"): Drained(by="ada", since=NOW),
        keys.sick_slots("node-0"): SickSlots(slots={"cpu:1": "three starts failed"}),
        keys.token("t1"): TokenRecord(
            id="t1", name="bob", role="viewer", namespaces=("default",), sha256="0" * 64, created=1.0, expires=NOW * 2,
            created_by="ada",
        ),
        KEYS.leader: Leader(node="node-0", incarnation=HOLDERS[0]),
        KEYS.pin: Pin(reward=1, by="node-0", time=NOW),
        KEYS.moves: moves(),
        KEYS.trouble("disk"): Trouble(topic="disk", node="node-1", sentence="the disk is full", time=NOW),
        KEYS.assign: Assignment(members=HOLDERS, owners=(0, 1, 0, 1)),
        KEYS.evaluation("1.4"): Evaluation(version=Version(1, 4), accuracy=0.75, count=8),
    }  # fmt: skip
    for number, node in enumerate(NODES):
        found[keys.node(node)] = NodeRecord(
            name=node, incarnation=HOLDERS[number], address=f"{node}:7700", slots=("cpu:0", "cpu:1"), pid=100 + number,
            started=NOW,
        )  # fmt: skip
        found[keys.usage(node, int(NOW // DAY_S), UID)] = NodeUsage(
            day=int(NOW // DAY_S), uid=UID, job="sums", namespace="default", owner="ada",
            pools={"rollout": PoolSeconds(slot_s=60, busy_s=40), "train": PoolSeconds(slot_s=30, busy_s=20 + number)},
        )  # fmt: skip
        found[KEYS.books(node)] = NodeAccounts(node=node, steps=(step_book(STEP - 1), step_book(STEP)))
        for role, rank in (("rollout", None), ("train", number)):
            instance = f"{role}-{node}-1"
            found[keys.worker(instance)] = WorkerRecord(
                instance=instance, node=node, role=role, job_uid=UID, slot="cpu:0", pid=200 + number, pid_started=7,
                state="serving", address=f"{node}:9000", world="world-1" if role == "train" else None, rank=rank,
            )  # fmt: skip
    return {key: record.encode() for key, record in found.items()}  # a record, or a text


def step_book(step: int) -> StepAccount:
    """Of a node with two slots."""
    return StepAccount(
        version=Version(1, step),
        began=NOW + step,
        seconds=4.0,
        slots=2,
        booked={"busy rollout": 3.0, "idle rollout tail": 1.0, "busy train": 2.5, "idle train barrier": 1.0},
        unbooked=0.5,
        engines={"rollout": EngineSums(active_s=3.0, running_s=9.0, tokens=300, requests=8)},
        switches={"rollout>train": (0.5,)},
    )


def moves() -> Moves:
    """One that is done, one that is only wanted, and a stretch without any."""
    before = SplitPart(mode="coexisting", rollout=2, reward=0, train=1)
    after = SplitPart(mode="coexisting", rollout=1, reward=1, train=1)
    done = Move(
        generation=2, step=2, seq=3, kind=MoveKind.SPLIT, before=before, after=after,
        slots=("node-0/cpu:1 rollout -> reward",), reason="the judge is slow", idle={"rollout": 0.4}, gain_s=1.5,
        cost_s=0.5, expected_s=3.0, before_s=4.0, by="node-0", time=NOW,
        outcome=MoveOutcome(took_s=0.5, steps=2, step_s=3.1, before_s=4.1, tokens=80.0, before_tokens=79.0),
    )  # fmt: skip
    wanted = done.model_copy(
        update={"generation": 3, "step": 4, "kind": MoveKind.WORLD, "state": "wanted", "outcome": None}
    )
    foretold = ForecastAccuracy(steps=2, newest=5, expected_s=6.0, took_s=6.2, off_s=0.3)
    stay = HoldPeriod(
        since=4, step=5, seq=7, reason="no split would be shorter by 5%", by="node-0", began=NOW + 4, time=NOW + 5,
        expected_s=3.0, foretold=foretold,
    )  # fmt: skip
    return Moves(moves=(done, wanted), total=2, stays=(stay,))


def write_files(run_dir: Path) -> None:
    """What lies in the run's folder: metrics, slot times, logs, samples."""
    lines: list[dict[str, Any]] = [{"kind": "start", "seq": 0}]
    for step in range(1, STEPS_IN_FILES + 1):
        metrics = {"seconds": 4.0, "tokens": 1600.0, "response_length": 80.0, "samples": 16.0, "train_s": 1.0}
        metrics |= {"exchange_s": 0.1, "publish_s": 0.2, "reward": 0.1 * step, "loss": 1.0 / step}
        lines.append({"kind": "step", "seq": step, "lineage": 1, "step": step, "metrics": metrics})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for node in NODES:
        for step in range(1, STEPS_IN_FILES + 1):
            spans = {
                "cpu:0": [Span(0.0, 4.0, {"busy rollout": 3.0, "idle rollout tail": 1.0})],
                "cpu:1": [Span(0.0, 3.5, {"busy train": 2.5, "idle train barrier": 1.0}), Span(3.5, 4.0, {})],
            }
            append_line(run_dir, AccountLine(node, step_book(step), (Span(0.0, 4.0, {"collect": 4.0}),), spans))
    logs = run_dir / "logs"
    logs.mkdir()
    (logs / "rollout-node-0-1.log").write_text("one\ntwo\n")
    (logs / "train-node-1-1.log").write_text('{"time": 5.0, "level": "INFO", "message": "loss 0.5"}\nplain\n')
    told = moves()
    changes: list[dict[str, Any]] = [
        {"number": number, "move": move.model_dump(mode="json")} for number, move in enumerate(told.moves)
    ]
    changes += [{"stay": stay.model_dump(mode="json")} for stay in told.stays]
    (run_dir / "moves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changes))
    write_samples(run_dir)


def write_samples(run_dir: Path) -> None:
    """Two groups of the newest step, and their advantages."""
    version = Version(1, STEP)
    groups = []
    for shard, source in enumerate(("sums", "words")):
        samples = tuple(
            KeptSample(
                response=KeptText(text=f"answer {number}", more=number), tokens=3 + number, reward=float(number),
                parts=(("right", float(number)),), finish_reason="stop", versions=("1.4",),
                observed=((1, 2),), observed_tokens=1,
            )
            for number in range(2)
        )  # fmt: skip
        groups.append(
            KeptGroup(
                ref=PromptRef(0, shard, 3), digest=f"d{shard}", source=source, prompt=KeptText(text="1+1="),
                prompt_tokens=4, answer="2", holder=HOLDERS[shard], samples=samples,
            )
        )  # fmt: skip
    samples_folder.write_samples(run_dir, version, HOLDERS[0], groups)
    known = [KeptAdvantage(digest="d0", sample=0, mean=-0.5), KeptAdvantage(digest="d0", sample=1, mean=0.5)]
    samples_folder.write_samples(run_dir, version, samples_folder.advantages_name(0), known)
