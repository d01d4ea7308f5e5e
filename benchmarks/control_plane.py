"""The cost of the control plane: seal and commit beside the step, the store's writes, and jobs submitted by many clients at once.

**Steps** (`control-plane`): many controllers with emulated engines. The control plane is real (etcd, daemons, gRPC, HTTP,
supervisors, the audit at the end); compute is simulated: engines and ranks take the time of a timing model. So no figure says how fast
a model is. All processes share this machine's cores, while on a cluster each node has its own: these latencies are upper bounds.

The measurements are external: the store is watched and each record timed on arrival, ranks are watched over their own stream, writes
are etcd's own counters, processor time the kernel's. Of a step:

- `seal`: from the offer that completes the quota to the SEALED record; `ready`: from the last group's arrival at its rank to
  the READY record; `commit`: from the last rank's report that it has applied the step to the new head. Their sum is
  the time of agreement, and the goal is on its share of the step's time.
- `exchange` is the rest between SEALED and READY: transfer of samples. It is data, not agreement.
- with `--puts`, guarded puts into the same etcd after each commit, and the time of agreement in units of a put. Both use the
  lower quartiles over the steps, since other load on the machine makes all of them longer, never shorter.

**Submissions** (`submit`): calls of CreateJob, a tenth of them repeated request ids, against three daemons and an etcd of three
members; and as many bare guarded puts into the same etcd from as many clients, half of them before and half after the calls. The jobs
request more slots than exist, so all of them wait and nothing else runs. It fails if a job is missing or doubled, or if
CreateJob's 99th percentile is over 20 times a put's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
from three_nodes import CLOCK, Nodes, three_nodes

from benchmarks.harness import (
    GCORE,
    PREPARED,
    Benchmark,
    Result,
    own_home,
    read_process,
    spread,
    write_spec,
    write_sums,
)
from controllers.cli import local
from controllers.cli.local import home_processes
from gcore.api.v1 import jobs_pb2, train_pb2_grpc
from gcore.api.v1 import train_pb2 as pb
from gcore.config.local_cluster import LocalClusterState
from gcore.engines.emulated.launch import LAW_FILE
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import SealState
from gcore.ledger.records.job import JobStatus
from gcore.store import keys
from gcore.store.client import EtcdStore
from gcore.store.types import Compare, Put
from gcore.system.clock import SystemClock
from gcore.testing.models import make_tiny_model
from gcore.worker.records import WorkerRecord

MODEL = PREPARED / "arithmetic" / "model"
LAW = {
    "load_s": 0.0,
    "decode_s": 0.15,
    "decode_per_sequence_s": 0.005,
    "prefill_tokens_per_s": 200.0,
    "response_tokens": 24,
    "response_spread": 0.4,
    "train_s": 2.2,
    "train_tokens_per_s": 50_000.0,
    "publish_s": 0.2,
}
"""A step of about 10 s on 8 sequences an engine: short responses by a slow model, so that there are few bytes and much time."""
MOST_TOKENS = 40
WARM = 2
"""Steps that are not counted: everything is loaded, imported and published for the first time."""
GOAL_SHARE, STEP_S, GOAL_WRITES = 0.02, 10.0, 10.0
"""Of a step of so many seconds. This machine's cores may make it longer: then the seconds count, not the share."""

SLOWER_STORE = """
import sys

if "controllers.daemon" in sys.orig_argv:
    import asyncio
    from gcore.store.client import EtcdStore
    from gcore.store.types import Put

    transact = EtcdStore.transact

    async def slower(self, compares, writes):
        await asyncio.sleep(0.05)
        return await transact(self, compares, (*writes, Put("/bench/slower", b"")))

    EtcdStore.transact = slower
"""
"""A daemon of `--slowed` begins with it."""


@dataclass
class StepTimes:
    """Of one step, on this process's clock."""

    offered: float = 0.0
    """The last offer before the seal came."""
    sealed: float = 0.0
    held: float = 0.0
    """A rank last reported more groups of the sealed token."""
    ready: float = 0.0
    applied: float = 0.0
    """The last rank reported that it is done."""
    committed: float = 0.0
    writes: float = 0.0
    """etcd's counter of puts and deletes, at the commit."""
    revision: int = 0
    put_s: float = 0.0
    """Median of the guarded puts that were made after the commit."""
    processors: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time so far, by kind of process."""


class Watcher:
    """Times records and reports as they come."""

    def __init__(self, home: Path, uid: str, puts: int) -> None:
        cluster = LocalClusterState.load(home)
        assert cluster is not None
        self._home = home
        self._etcd = cluster.etcd.endpoint
        self._puts = puts
        self._mirror = JobMirror(keys.JobKeys(uid))
        self.steps: dict[int, StepTimes] = {}
        self.status: JobStatus | None = None
        self._ranks: dict[str, asyncio.Task[None]] = {}
        self._held: dict[int, int] = {}
        self._readings: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the job has ended."""
        store = await EtcdStore.connect((self._etcd,), clock=SystemClock())
        workers = asyncio.create_task(self._watch_workers(store))
        try:
            async for batch in store.watch(self._mirror.keys.prefix):
                now = monotonic()
                before, self._mirror = self._mirror, self._mirror.fold(batch)
                self._note(before, now)
                if self.status is not None and self.status.phase.ended:
                    return
        finally:
            for task in (workers, *self._ranks.values()):
                task.cancel()
            await store.close()

    def _note(self, before: JobMirror, now: float) -> None:
        after = self._mirror
        self.status = after.status.record if after.status else None
        if after.head is None:
            return
        step = after.head.record.step
        if before.head is not None and step > before.head.record.step:
            times = self._of(step)
            times.committed, times.revision = now, after.revision
            self._readings.add(asyncio.create_task(self._measure_store(times)))
        at_work = self._of(step + 1)
        if after.offers != before.offers and not at_work.sealed:
            at_work.offered = now
        slot = after.seals.get(step + 1)
        if slot is not None and slot.record.state is not SealState.OPEN and not at_work.sealed:
            at_work.sealed = now
        if slot is not None and slot.record.state is SealState.READY and not at_work.ready:
            at_work.ready = now

    def _of(self, step: int) -> StepTimes:
        return self.steps.setdefault(step, StepTimes())

    async def _measure_store(self, times: StepTimes) -> None:
        await asyncio.to_thread(self._read_counters, times)
        if self._puts:
            times.put_s = statistics.median(await put_all([self._etcd], 1, self._puts))

    def _read_counters(self, times: StepTimes) -> None:
        with urllib.request.urlopen(f"http://{self._etcd}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        wanted = ("etcd_mvcc_put_total", "etcd_mvcc_delete_total")
        lines = [line.split() for line in text.splitlines() if line.startswith(wanted)]
        times.writes = sum(float(value) for _, value in lines)
        times.processors = processor_seconds(self._home)

    async def _watch_workers(self, store: EtcdStore) -> None:
        async for batch in store.watch(keys.WORKERS):
            for event in batch.events:
                if event.kind == "put":
                    worker = WorkerRecord.decode(event.kv.value, event.kv.key)
                    if worker.role == "train" and worker.state == "serving" and worker.address not in self._ranks:
                        self._ranks[worker.address] = asyncio.create_task(self._watch_rank(worker))

    async def _watch_rank(self, worker: WorkerRecord) -> None:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            head = self._mirror.head
            while head is None:
                await asyncio.sleep(0.1)
                head = self._mirror.head
            world = pb.WorldId(job_uid=worker.job_uid, world=worker.world or "", lineage=head.record.lineage)
            async for state in train_pb2_grpc.TrainRankStub(channel).Watch(pb.WatchRequest(world=world)):
                now = monotonic()
                if state.HasField("applied"):
                    times = self._of(state.applied.step)
                    times.applied = times.applied if times.committed else now
                count = sum(len(group.samples) for group in state.held)
                if state.HasField("holding") and count != self._held.get(state.rank):
                    self._held[state.rank] = count
                    times = self._of(state.holding.step)
                    times.held = times.held if times.ready else now


def processor_seconds(home: Path) -> dict[str, float]:
    """Of the home's living processes, by kind."""
    found: dict[str, float] = {}
    for one in home_processes(home):
        pid = one.process.pid
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            kind = "emulated engines" if b"gcore.emulated.host" in words else str(one.kind)
            kind = "emulated ranks" if b"gcore.emulated.rank" in words else kind
            kind = "supervisors" if kind == "worker" else kind
            found[kind] = found.get(kind, 0.0) + read_process(pid).processor_s
        except OSError:
            continue
    return found


def write_job(folder: Path, controllers: int, engines: int, samples: int, steps: int) -> Path:
    """A spec with data of its own."""
    write_sums(folder / "train.jsonl", range(100, 300), range(100, 250))
    spec = {
        "name": "control-plane",
        "model": {"path": str(MODEL)},
        "data": {"path": str(folder / "train.jsonl"), "shards": 16 * controllers},
        "flow": {"name": "grpo", "steps": steps, "groups_per_step": engines, "samples_per_prompt": samples},
        "rollout": {"max_new_tokens": MOST_TOKENS, "batch_slots": 8},
        "reward": {"name": "exact"},
        "checkpoint": {"every": 1000},
    }
    return write_spec(folder / "job.yaml", spec)


def step_figures(steps: dict[int, StepTimes], controllers: int, puts: int) -> dict[str, Any]:
    """What the counted steps came to. Raises SystemExit if there are none."""

    def is_whole(n: int) -> bool:
        one = steps[n]
        times = (one.offered, one.sealed, one.held, one.ready, one.applied, one.committed)
        return all(times) and n - 1 in steps and steps[n - 1].committed > 0 and (one.put_s > 0 or not puts)

    whole = [n for n in sorted(steps) if n > WARM and is_whole(n)]
    if len(whole) < 2:
        raise SystemExit(f"too few whole steps: {sorted(steps)}")
    rows = []
    for n in whole:
        one, seconds = steps[n], steps[n].committed - steps[n - 1].committed
        seal, ready, commit = one.sealed - one.offered, one.ready - one.held, one.committed - one.applied
        rows.append(
            {
                "seconds": seconds,
                "seal_s": seal,
                "ready_s": ready,
                "commit_s": commit,
                "exchange_s": one.held - one.sealed,
                "agreeing_s": seal + ready + commit,
                "share": (seal + ready + commit) / seconds,
                "writes": (one.writes - steps[n - 1].writes - puts) / controllers,
                "transactions": (one.revision - steps[n - 1].revision) / controllers,
            }
        )
    # Not to the last step: when that is read, workers are ending.
    first, last = steps[whole[0] - 1], steps[whole[-2]]
    counted = whole[-2] - whole[0] + 1
    processor = {
        kind: round((seconds - first.processors.get(kind, 0.0)) / counted, 3)
        for kind, seconds in sorted(last.processors.items())
    }
    found: dict[str, Any] = {name: spread([row[name] for row in rows]) for name in rows[0]}
    if puts:
        put_s = [steps[n].put_s for n in whole]
        agreeing_s = sum(lower_quartile([row[part] for row in rows]) for part in ("seal_s", "ready_s", "commit_s"))
        found["put_s"] = spread(put_s, 5)
        found["agreeing_by_put"] = round(agreeing_s / lower_quartile(put_s), 2)
    found["processor_s_per_step"] = processor
    return found


def lower_quartile(values: list[float]) -> float:
    """A quarter of them is below."""
    return statistics.quantiles(values, method="inclusive")[0]


def gcore(home: Path, *words: str) -> str:
    """One command; what it said. Raises SystemExit with its words."""
    command = [*GCORE, *words, "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home.parent)
    if done.returncode:
        raise SystemExit(f"gcore {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


def play_job(arguments: argparse.Namespace) -> dict[str, Any]:
    """A cluster, a job, its figures."""
    with own_home() as home:
        law = home.parent / "law.json"
        law.write_text(json.dumps(LAW | {"speedup": arguments.speedup}))
        spec = write_job(home.parent, arguments.controllers, arguments.engines, arguments.samples, arguments.steps)
        os.environ[LAW_FILE] = str(law)  # daemons and workers inherit it
        if arguments.slowed:
            (home.parent / "sitecustomize.py").write_text(SLOWER_STORE)
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [str(home.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        began = monotonic()
        slots, ttl = f"emulated:{arguments.engines}", arguments.lease_ttl
        request = local.UpRequest(home, arguments.controllers, slots, lease_ttl_s=ttl)
        asyncio.run(local.start_cluster(request, clock=SystemClock()))
        up_s = monotonic() - began
        uid = json.loads(gcore(home, "submit", str(spec), "-o", "json"))["uid"]
        watcher = Watcher(home, uid, arguments.puts)
        asyncio.run(asyncio.wait_for(watcher.run(), arguments.limit))
        audit = json.loads(gcore(home, "audit", uid, "-o", "json"))
    if watcher.status is None or watcher.status.phase != "SUCCEEDED":
        raise SystemExit(f"the job: {watcher.status}")
    return {
        "up_s": round(up_s, 1),
        "audit": audit,
        **step_figures(watcher.steps, arguments.controllers, arguments.puts),
    }


def measure_steps(arguments: argparse.Namespace, taken: Result) -> Result:
    """Of one job, beside its goals."""
    result = taken | {
        "what": "What peers cost: seal and commit beside the step, and the store's writes, with many controllers and emulated engines.",
        "emulated": "engines and ranks compute nothing and take the time of a law; only the control plane is measured",
        "controllers": arguments.controllers,
        "engines": arguments.engines,
        "samples_per_prompt": arguments.samples,
        "speedup": arguments.speedup,
        "lease_ttl_s": arguments.lease_ttl,
        "law": LAW,
    }
    result |= play_job(arguments)
    result["load_after"] = round(os.getloadavg()[0], 2)
    result["goals"] = {
        "share_of_step": GOAL_SHARE,
        "share_met": result["share"]["median"] < GOAL_SHARE,
        "agreeing_s": GOAL_SHARE * STEP_S,
        "agreeing_met": result["agreeing_s"]["median"] < GOAL_SHARE * STEP_S,
        "writes_per_controller_and_step": GOAL_WRITES,
        "writes_met": result["writes"]["median"] < GOAL_WRITES,
    }
    return result


def step_options(parser: argparse.ArgumentParser) -> None:
    """Sizes of the cluster and its job."""
    parser.add_argument("--controllers", type=int, default=16)
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=4, help="responses to each prompt; one prompt an engine")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--speedup", type=float, default=1.0, help="emulated seconds in a real one")
    parser.add_argument(
        "--lease-ttl", type=int, default=20, help="of the daemons; the default of 5 s wants a core each"
    )
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which the job is given up")
    parser.add_argument(
        "--puts", type=int, default=0, help="guarded puts after each commit, beside what agreeing takes"
    )
    parser.add_argument(
        "--slowed", action="store_true", help="transactions take 50 ms more and a write more, to see that bounds notice"
    )


# Submissions ----------------------------------------------------------------------------------------------------------

MOST_TIMES = 20.0
PUT_BYTES = 4096
"""About what a job's record takes."""


def spec_of(folder: Path, name: str) -> str:
    """A job that waits forever."""
    return json.dumps(
        {
            "name": name,
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "train.jsonl")},
            "flow": {"steps": 10},
            "rollout": {"max_new_tokens": 8},
            "scheduling": {"slots_min": 1000},
        }
    )


async def put_all(endpoints: list[str], clients: int, calls: int) -> list[float]:
    """Seconds of each guarded put of a new key."""
    took: list[float] = []

    async def one(count: int) -> None:
        store = await EtcdStore.connect(endpoints, clock=CLOCK)
        for _ in range(count):
            key = f"/bench/{uuid.uuid4().hex}"
            begun = time.perf_counter()
            result = await store.transact((Compare(key, 0),), (Put(key, b"x" * PUT_BYTES),))
            took.append(time.perf_counter() - begun)
            assert result.won
        await store.close()

    await asyncio.gather(*(one(calls // clients) for _ in range(clients)))
    return took


async def create_all(nodes: Nodes, folder: Path, clients: int, calls: int) -> tuple[list[float], dict[str, set[str]]]:
    """Seconds of each call, and by request id the uids that it was answered with."""
    took: list[float] = []
    answered: dict[str, set[str]] = {}
    names = list(nodes.addresses)

    async def one(number: int, count: int) -> None:
        mine = names[number % len(names) :] + names[: number % len(names)]
        async with nodes.client(*mine) as client:
            for call in range(count):
                # Each tenth is the one before it once more.
                at = call - 1 if call % 10 == 9 else call
                request = f"bench-{number}-{at}"
                begun = time.perf_counter()
                spec = spec_of(folder, request)
                job = await client.create_job(spec, request_id=request, mode=jobs_pb2.START_MODE_RESUME)
                took.append(time.perf_counter() - begun)
                answered.setdefault(request, set()).add(job.uid)

    await asyncio.gather(*(one(number, calls // clients) for number in range(clients)))
    return took, answered


def quantile(values: list[float], share: float) -> float:
    """The value below which so much of them lies, in milliseconds."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def latencies(values: list[float]) -> dict[str, float]:
    """For the result."""
    return {name: quantile(values, share) for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))}


async def submit(folder: Path, clients: int, calls: int) -> dict[str, Any]:
    """All of it."""
    make_tiny_model(folder / "model", seed=1)
    write_sums(folder / "train.jsonl", range(20), range(20))
    async with three_nodes(folder / "cluster", slots=1) as nodes:
        await create_all(nodes, folder, 3, 3)  # what only the first job of a daemon costs
        puts = await put_all(nodes.endpoints, clients, calls // 2)
        begun = time.perf_counter()
        took, answered = await create_all(nodes, folder, clients, calls)
        seconds = time.perf_counter() - begun
        puts += await put_all(nodes.endpoints, clients, calls // 2)
        async with nodes.client() as client:
            listed = [job.uid for job in await client.list_jobs(name_prefix="bench-")]
    distinct = {uid for uids in answered.values() for uid in uids}
    missing, doubled = len(distinct - set(listed)), sum(len(uids) > 1 for uids in answered.values())
    create, put = latencies(took), latencies(puts)
    return {
        "calls": len(took),
        "clients": clients,
        "distinct_request_ids": len(answered),
        "jobs": len(distinct),
        "missing": missing,
        "doubled": doubled,
        "calls_per_second": round(len(took) / seconds, 1),
        "create_job": create,
        "guarded_put": put,
        "p99_times_a_put": round(create["p99_ms"] / put["p99_ms"], 2),
        "limit": MOST_TIMES,
    }


def measure_submissions(arguments: argparse.Namespace, taken: Result) -> Result:
    """On a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="gcore-submit-") as folder:
        return taken | asyncio.run(submit(Path(folder), arguments.clients, arguments.calls))


def submission_verdict(result: Result) -> str:
    """Jobs that are missing or doubled, and calls that took too long."""
    if result["missing"] or result["doubled"] or result["jobs"] != result["distinct_request_ids"]:
        return "jobs are missing or doubled"
    slow = result["p99_times_a_put"] > MOST_TIMES
    return f"CreateJob's 99th percentile is over {MOST_TIMES:g} times a put's" if slow else ""


def submission_options(parser: argparse.ArgumentParser) -> None:
    """How many."""
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--calls", type=int, default=1000)


BENCHMARKS = (
    Benchmark(
        "control-plane",
        "control_plane",
        measure_steps,
        ("grpcio", "pydantic", "uvicorn", "aetcd"),
        options=step_options,
    ),
    Benchmark(
        "submit",
        "submit",
        measure_submissions,
        ("grpcio",),
        options=submission_options,
        verdict=submission_verdict,
    ),
)
