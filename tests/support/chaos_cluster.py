"""A real cluster that a test may break anywhere: etcd members, daemons with their workers, and a loop that restarts dead processes.

Everything is the product's own: Debian's etcd (or another one on PATH), `gcore-controller` daemons as a deployment starts
them (not `gcore up`), torch engines, DeepSpeed ranks. `_keep` does the work of systemd on a cluster: it restarts each wanted process
that does not run after a while. With `network` each node and each member has a namespace of its own.

`History` is an observer of the store: it records when each entry of the chain came. It writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
from aetcd import rpc
from blob_stores import store_processes
from chaos_network import Machine, Network
from stopping import stop_process

from controllers.cli.local import home_processes
from gcore.api.v1 import jobs_pb2 as pb
from gcore.client import JobsClient, WaitPolicy
from gcore.config import dump_explicit, load_spec
from gcore.config.node import NodeConfig
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry
from gcore.store import keys
from gcore.store.client import EtcdStore
from gcore.store.etcd import EtcdBinary, find_etcd
from gcore.store.keys import JobKeys
from gcore.store.reference import StoreRef
from gcore.store.types import WatchBatch
from gcore.system.clock import SystemClock
from gcore.system.fault_injection import VARIABLE
from gcore.system.network import free_ports
from gcore.system.process import (
    ProcessId,
    identify_process,
    is_running,
    send_signal,
    spawn_detached,
    wait_process_ended,
)
from gcore.worker.records import WorkerRecord

CLOCK = SystemClock()
TTL_S = 5
LOOK_S = 0.1
BACK_S = 1.0
"""From a death to the next start, as systemd's RestartSec; a fault may ask for more."""
READY_S = 120.0
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
Part = Literal["engine", "engine-supervisor", "rank", "rank-supervisor"]


class ChaosFailed(AssertionError):
    """A promise was broken, or something took longer than any patience."""


class NobodyHit(Exception):
    """The fault affected no process, so it showed nothing. It is tried again at another moment."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a cluster. `spares`: nodes that are not started at first. `slots`: on each node."""

    nodes: int = 2
    spares: int = 0
    slots: int = 1
    members: int = 1
    network: bool = False
    apart: bool = False
    """Whether each node has a run root of its own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the daemons', and so to their workers'."""


@dataclass
class Kept:
    """A process that is started again when it has died, `back_s` later, while it is wanted."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    wanted: bool = True
    back_s: float = BACK_S
    process: ProcessId | None = None
    died: float | None = None
    starts: int = 0

    @property
    def runs(self) -> bool:
        """Whether it lives."""
        return self.process is not None and is_running(self.process)

    def start(self) -> None:
        """Start it."""
        self.process = spawn_detached(self.command, env=self.environment, log_file=self.log)
        self.died = None
        self.starts += 1

    def signal(self, number: int) -> None:
        """Signal it, if it lives."""
        if self.process is not None:
            send_signal(self.process, number)

    def keep(self, now: float) -> None:
        """One look."""
        if self.runs or not self.wanted:
            self.died = None if self.runs else now
        elif self.died is None:
            self.died = now
        elif now - self.died >= self.back_s:
            self.start()


@dataclass(frozen=True, slots=True)
class Seen:
    """An entry of the chain, and the time of its notification."""

    at: float
    entry: LogEntry


@dataclass
class History:
    """What a bystander saw of one job."""

    mirror: JobMirror
    entries: list[Seen] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Promises that were seen broken."""

    def note(self, batch: WatchBatch) -> None:
        """A change."""
        before = self.mirror
        self.mirror = before.fold(batch)
        known = {seen.entry.seq for seen in self.entries}
        now = CLOCK.monotonic()
        fresh = (stored.record for seq, stored in sorted(self.mirror.log.items()) if seq not in known)
        self.entries += [Seen(now, entry) for entry in fresh]
        old, new = before.head, self.mirror.head
        if old is not None and new is not None:
            went_back = new.record.step < old.record.step and new.record.lineage == old.record.lineage
            if went_back or new.record.seq < old.record.seq:
                self.broken.append(f"head went from {old.record.version} to {new.record.version} without a rollback")

    @property
    def step(self) -> int:
        """Head's."""
        return self.mirror.head.record.step if self.mirror.head is not None else 0

    @property
    def ended(self) -> bool:
        """Whether the job has."""
        return self.mirror.status is not None and self.mirror.status.record.phase.ended

    def incarnation(self, node: str) -> str | None:
        """The member that is this node's controller now."""
        members = self.mirror.members.items()
        return next((inc for inc, stored in members if stored.record.node == node), None)

    def commits_with(self, shards: set[int], after: float, *, but: str = "") -> Iterator[float]:
        """When prompts of `shards` were committed after that moment, as a group that `but` did not hold."""
        for seen in self.entries:
            if seen.at > after and seen.entry.kind == "train":
                trained = (one for one in seen.entry.delta if one.kind == "trained")
                if any(one.ref.shard in shards and one.holder != but for one in trained):
                    yield seen.at

    @property
    def rollbacks(self) -> int:
        """How many the chain has seen."""
        return sum(seen.entry.kind == "rollback" for seen in self.entries)


class ChaosCluster:
    """One cluster in `folder`. Made by `running`."""

    def __init__(self, folder: Path, shape: Shape, network: Network | None, rng: random.Random) -> None:
        (folder / "points").mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.shape = shape
        self.network = network
        self.rng = rng
        self.number = 0
        """Which run of its fault this is."""
        self.points = folder / "points"
        self.runs = folder / "runs"
        self.members: dict[str, Kept] = {}
        self.endpoints: dict[str, str] = {}
        self.daemons: dict[str, Kept] = {}
        self.addresses: dict[str, str] = {}
        self.history: History | None = None
        self.uid = ""
        self.store: EtcdStore
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped: list[ProcessId] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, folder: Path, shape: Shape, rng: random.Random, *, up: bool = True
    ) -> AsyncIterator[ChaosCluster]:
        """A cluster that serves; nothing of it is left afterwards. `up` False: its daemons are not started yet."""
        with contextlib.ExitStack() as stack:
            names = [
                *(f"store-{i}" for i in range(shape.members)),
                *(f"node-{i}" for i in range(shape.nodes + shape.spares)),
            ]
            network = stack.enter_context(Network.of(names)) if shape.network else None
            cluster = cls(folder, shape, network, rng)
            try:
                await cluster._start(up=up)
                yield cluster
            finally:
                await cluster._close()

    # Where things are.

    @property
    def homes(self) -> dict[str, Path]:
        """Each node's home."""
        return {name: (self.folder / name).resolve() for name in self.addresses}

    def run_root(self, node: str) -> Path:
        """Where a node has its runs."""
        return (self.folder / node / "runs").resolve() if self.shape.apart else self.runs

    @property
    def up(self) -> list[str]:
        """The nodes whose daemon runs."""
        return sorted(name for name, daemon in self.daemons.items() if daemon.runs)

    @property
    def seen(self) -> History:
        """What was seen of the job."""
        assert self.history is not None
        return self.history

    @property
    def ended(self) -> bool:
        """Whether the job has; False before there is one."""
        return self.history is not None and self.history.ended

    def pick(self, names: Iterable[str]) -> str:
        """One of them, by the run's own dice."""
        return self.rng.choice(sorted(names))

    async def workers(self, part: Part | None = None) -> dict[str, ProcessId]:
        """The processes of that kind that serve or are about to, by "instance kind"."""
        found: dict[str, ProcessId] = {}
        for kv in (await self.store.list(keys.WORKERS)).kvs:
            record = WorkerRecord.decode(kv.value, kv.key)
            if record.state not in ("starting", "serving"):
                continue
            kind = "rank" if record.role == "train" else "engine"
            if part in (None, f"{kind}-supervisor"):
                found[f"{record.instance} supervisor"] = record.process
            child = None if record.child_pid is None else identify_process(record.child_pid)
            if part in (None, kind) and child is not None:
                found[record.instance] = child
        return found

    def blob_stores(self) -> dict[str, ProcessId]:
        """The processes of the nodes' blob stores, by "node blob store"."""
        found: dict[str, ProcessId] = {}
        for name, daemon in self.daemons.items():
            for pid in store_processes([daemon.process.pid] if daemon.process is not None else []):
                if (process := identify_process(pid)) is not None:
                    found[f"{name} blob store"] = process
        return found

    async def leader(self) -> str:
        """The etcd member that leads."""
        while True:
            for name, endpoint in self.endpoints.items():
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async with grpc.aio.insecure_channel(endpoint) as channel:
                        answer = await rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=2.0)
                    if answer.leader and answer.leader == answer.header.member_id:
                        return name
            await CLOCK.sleep(LOOK_S)

    async def compact(self) -> int:
        """Forget the store's history up to now; the revision."""
        revision = (await self.store.list(keys.NODES)).revision
        request = rpc.CompactionRequest(revision=revision, physical=True)
        async with grpc.aio.insecure_channel(next(iter(self.endpoints.values()))) as channel:
            try:
                await rpc.KVStub(channel).Compact(request, timeout=10.0)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.OUT_OF_RANGE:  # nothing was written since the last time
                    raise
        return revision

    @property
    def packages(self) -> Path:
        """Where plug-ins of all runs stand: beside the runs' folders."""
        return next(above / "packages" for above in self.folder.parents if (above / "packages").is_dir())

    # What happens to it.

    def kill_all(self) -> int:
        """kill -9 of everything at once: daemons, supervisors, engines, ranks, etcd. How many processes."""
        everything = [one.process for home in self.homes.values() for one in home_processes(home)]
        everything += [kept.process for kept in self.members.values() if kept.process is not None and kept.runs]
        for process in everything:
            send_signal(process, signal.SIGSTOP)  # so that none sees another one's death
        for process in everything:
            send_signal(process, signal.SIGKILL)
        for process in everything:
            wait_process_ended(process, 10.0)
        return len(everything)

    def stop(self, process: ProcessId) -> None:
        """SIGSTOP, in effect."""
        stop_process(process.pid)
        self._stopped.append(process)

    def go_on(self) -> None:
        """SIGCONT to whatever was stopped."""
        for process in self._stopped:
            send_signal(process, signal.SIGCONT)
        self._stopped.clear()

    def arm(self, name: str, words: str) -> Path:
        """Arm a fault point for all processes of the cluster; the first that comes there meets the fault.

        Who met it an earlier time is forgotten.
        """
        for met in self.points.glob(f"{name}.fired.*"):
            met.unlink()
        whole = self.points / f".{name}"
        whole.write_text(words)
        return whole.rename(self.points / name)

    def fired(self, name: str) -> int | None:
        """The process that met the fault, or None."""
        return next((int(path.suffix[1:]) for path in self.points.glob(f"{name}.fired.*")), None)

    # The job.

    async def submit(self, spec: Path, *settings: str) -> None:
        """Create the job, and watch it from now on."""
        loaded = load_spec(spec, settings)
        request = uuid.uuid4().hex

        async def created() -> pb.Job | None:
            async with self.client() as client:
                return await client.create_job(dump_explicit(loaded), request_id=request, mode=pb.START_MODE_RESUME)

        job = await self.answer(created)
        if self.uid != job.uid:
            self.uid = job.uid
            self.history = History(JobMirror(JobKeys(job.uid)))
            self._tasks.append(asyncio.create_task(self._watch(self.history)))
            await self.until("the job", lambda: self.seen.mirror.status is not None)

    async def look_anew(self) -> None:
        """Forget the recorded state of the job and read the store again: it was restored from an older backup."""
        keeping, *watching = self._tasks
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        self._tasks = [keeping]
        await self.store.close()
        self.store = await EtcdStore.connect(list(self.endpoints.values()), clock=CLOCK)
        self.uid, self.history = "", None

    def client(self) -> JobsClient:
        """To any controller."""
        return JobsClient(tuple(self.addresses.values()), clock=CLOCK, patience=WaitPolicy(call_s=3.0, retry_s=0.2))

    async def answer(self, ask: Callable[[], Any], patience_s: float = READY_S) -> Any:
        """What some controller answers, once one does."""
        end = CLOCK.monotonic() + patience_s
        while True:
            try:
                return await ask()
            except GcoreError as error:
                if CLOCK.monotonic() > end:
                    raise ChaosFailed(f"no controller answered within {patience_s:.0f} s: {error}") from error
                await CLOCK.sleep(LOOK_S)

    async def until(self, what: str, condition: Callable[[], Any], patience_s: float = READY_S) -> Any:
        """Wait for `condition`; what it returned."""
        end = CLOCK.monotonic() + patience_s
        while not (found := condition()):
            if CLOCK.monotonic() > end:
                raise ChaosFailed(f"no {what} within {patience_s:.0f} s; {await self.why()}")
            for task in self._tasks:
                if task.done():
                    task.result()
            await CLOCK.sleep(LOOK_S)
        return found

    async def why(self) -> str:
        """The job's state and wait causes, as a user sees them."""
        head = self.seen.mirror.head if self.history else None
        at = f"head at {head.record.version}" if head is not None else "no head"
        try:
            async with self.client() as client:
                job = await client.get_job(self.uid)
        except GcoreError as error:
            return f"{at}; {error}"
        return f"{at}; {job.reason}; it waits for: {'; '.join(wait.what for wait in job.waiting) or 'nothing'}"

    async def audit(self) -> list[str]:
        """What a user's `gcore audit` finds wrong."""

        async def asked() -> pb.AuditReport:
            async with self.client() as client:
                return await client.audit_job(self.uid)

        report = await self.answer(asked)
        return list(report.violations) or ([] if report.clean else ["the audit is not clean"])

    # Behind it.

    async def _start(self, *, up: bool) -> None:
        self._lay_out_members()
        for member in self.members.values():
            member.start()
        self.store = await EtcdStore.connect(list(self.endpoints.values()), clock=CLOCK)
        end = CLOCK.monotonic() + READY_S
        while True:
            try:
                await self.store.list(keys.NODES)
                break
            except StoreUnavailable as error:
                if CLOCK.monotonic() > end:
                    raise ChaosFailed(f"etcd does not answer: {error}") from error
        self._lay_out_nodes()
        spares = {f"node-{self.shape.nodes + i}" for i in range(self.shape.spares)}
        for name, daemon in self.daemons.items():
            daemon.wanted = up and name not in spares
            if daemon.wanted:
                daemon.start()
        self._tasks.append(asyncio.create_task(self._keep()))
        if up:
            await self.serve()

    async def serve(self) -> None:
        """Wait until each wanted daemon says that it serves."""
        async with JobsClient(tuple(self.addresses.values()), clock=CLOCK) as client:
            end = CLOCK.monotonic() + READY_S
            for name, address in self.addresses.items():
                while self.daemons[name].wanted and not await client.is_serving(address):
                    if CLOCK.monotonic() > end:
                        raise ChaosFailed(f"{name} does not serve: {self.daemons[name].log.read_text()[-2000:]}")
                    await CLOCK.sleep(LOOK_S)

    def _lay_out_members(self) -> None:
        binary = find_etcd()
        assert isinstance(binary, EtcdBinary)
        names = [f"store-{i}" for i in range(self.shape.members)]
        ports = list(free_ports(2 * len(names)))
        clients = {name: self._place(name, 2379, ports.pop()) for name in names}
        peers = {name: self._place(name, 2380, ports.pop()) for name in names}
        whole = ",".join(f"{name}=http://{peer}" for name, peer in peers.items())
        self.endpoints = clients
        for name in names:
            own, peer = f"http://{clients[name]}", f"http://{peers[name]}"
            command = [
                *(str(binary.path), f"--name={name}", f"--data-dir={self.folder / name}", f"--initial-cluster={whole}"),
                *(f"--listen-client-urls={own}", f"--advertise-client-urls={own}"),
                *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            ]
            command = command if self.network is None else self.network.command(name, command)
            self.members[name] = Kept(name, command, self.folder / "logs" / f"{name}.log", dict(os.environ))

    def _lay_out_nodes(self) -> None:
        count = self.shape.nodes + self.shape.spares
        ports = free_ports(count)
        for index in range(count):
            name = f"node-{index}"
            address = self._place(name, 7700, ports[index])
            host, _, port = address.rpartition(":")
            home = self.folder / name
            home.mkdir(exist_ok=True)
            first = index * self.shape.slots
            config = NodeConfig(
                node=name,
                home=str(home.resolve()),
                listen_host=host,
                listen_port=int(port),
                etcd=StoreRef(endpoints=tuple(self.endpoints.values())),
                slots=tuple(f"cpu:{first + slot}" for slot in range(self.shape.slots)),
                run_root=str(self.run_root(name)),
                lease_ttl_s=TTL_S,
            )
            file = home / "node.json"
            file.write_text(config.model_dump_json())
            command = [sys.executable, "-m", "controllers.daemon", "--home", str(home.resolve()), "--config", str(file)]
            command = command if self.network is None else self.network.command(name, command)
            environment = dict(os.environ) | {
                VARIABLE: str(self.points),
                "OMP_NUM_THREADS": "1",
                **self.shape.environment,
            }
            environment["PYTHONPATH"] = os.pathsep.join([str(self.packages), environment.get("PYTHONPATH", "")])
            self.addresses[name] = address
            self.daemons[name] = Kept(name, command, self.folder / "logs" / f"{name}.log", environment)

    def _place(self, name: str, port: int, free: int) -> str:
        """host:port of something of that machine."""
        if self.network is None:
            return f"127.0.0.1:{free}"
        machine: Machine = self.network[name]
        return f"{machine.address}:{port}"

    async def _keep(self) -> None:
        while True:
            await CLOCK.sleep(LOOK_S)
            for kept in (*self.members.values(), *self.daemons.values()):
                kept.keep(CLOCK.monotonic())

    async def _watch(self, history: History) -> None:
        async with aclosing(self.store.watch(history.mirror.keys.prefix)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                history.note(batch)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "store"):
            await self.store.close()
        for _ in range(3):  # a supervisor may have been about to start its child
            if not self.kill_all():
                break
