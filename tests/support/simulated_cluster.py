"""A whole gcore cluster in one thread and simulated time: production's daemons over a store in memory, and a seed's faults.

One seed is one story: the number of nodes, the job, the quality of the network, and the events. Nodes
and single processes are killed, stopped for longer than their leases, partitioned in both directions or in one, join, leave
and return. Clocks jump. The store compacts its history, is unavailable, and renews leases. After every revision
of the store and every step of a rank, `Invariants` checks. Then the faults stop, and the job must finish.

The history lists all actions in order; the same seed gives the same history in any process. Nothing here decides, seals
or commits: production's modules write all records, and this module injects faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import importlib
import random
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from invariants import Invariants
from simulated_blobs import NoTools, Showing, Stores
from simulated_controller import simulated_dependencies
from simulated_ends import Land, hasty
from simulated_faults import TTL_S, Faults
from simulated_network import Network, PendingWatches, RemoteStore
from simulated_planning import planning
from simulated_story import Ended, Story
from simulated_workers import Engine, Floor, Rank, Worker
from virtual_time import NothingLeft, Process, ProcessClock, VirtualLoop

from controllers.api.submission.spec_changes import (
    changed_settings,
    extend_transaction,
    find_last_state,
    settings_transaction,
)
from controllers.changes import ChangeSignal
from controllers.daemon.daemon import Daemon
from controllers.daemon.incarnation import Addresses, DaemonState, Incarnation
from controllers.job.runner import JobRunner
from controllers.rules.decide import decide
from controllers.rules.waits import current_waits
from gcore.config import NodeConfig
from gcore.config.load import stored_spec
from gcore.ledger import transactions
from gcore.ledger.records.chain import RaisedGoal
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus
from gcore.ledger.selection import rules_of
from gcore.observability.metrics import Metrics
from gcore.schema import NEWEST_VERSION, set_written_version
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.reference import StoreRef
from gcore.system.concurrency import limit_time
from gcore.system.process import ProcessId
from gcore.testing import MemoryCluster
from gcore.worker.records import LaunchSpec

UID = "u"
FURTHER_S = 40.0
"""Of faults, at least, once the job has gone on after its end."""
LONGEST_CALM_S = 600.0
"""Without faults, until the job must have ended."""
SHM = Path("/dev/shm")
_METRICS = Metrics()
"""One instance for all, because it is never read and takes longer to make than a story."""


class Node:
    """A machine: a daemon, its workers, its clock, its line to the store."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self.name = name
        self.cluster = cluster
        self.clock = ProcessClock(cluster.loop)
        self.store = RemoteStore(cluster.store, cluster.network, name, cluster.pending)
        self.process: Process | None = None
        self._life: asyncio.Task[Any] | None = None
        self._daemon: SimulatedDaemon | None = None

    @property
    def workers(self) -> list[Worker]:
        """Those that live."""
        return [w for w in self.cluster.floor.workers if w.alive and w.node == self.name]

    def start(self) -> None:
        """The daemon, unless it runs."""
        if self.process is None or self.process.killed:
            self.process = Process(self.cluster.loop, self.name)
            self.cluster.floor.stores.restart(self.name)
            self._daemon = SimulatedDaemon(self)
            self._life = self.process.run(self._daemon.run())

    def jobs(self) -> list[JobRunner]:
        """What its daemon works on."""
        return list(self._daemon.runners()) if self._daemon is not None else []

    def kill(self) -> None:
        """The daemon alone."""
        if self.process is not None:
            self.process.kill()

    def leave(self) -> None:
        """SIGTERM to the daemon: its lease is revoked."""
        if self.process is not None and self._life is not None:
            process, life = self.process, self._life

            def gone(_: object) -> None:
                process.kill()
                if not self.cluster.faulty:
                    self.start()

            async def leaving() -> None:
                assert self._daemon is not None
                await self._daemon.depart()
                life.cancel()

            process.post(lambda: process.run(leaving(), "leaving"))
            life.add_done_callback(gone, context=contextvars.Context())


class SimulatedDaemon(Daemon):
    """`controllers.daemon.daemon.Daemon` without its servers."""

    def __init__(self, node: Node) -> None:
        config = NodeConfig(
            node=node.name,
            home=str(node.cluster.floor.run_dir.parent),
            etcd=StoreRef(endpoints=("simulated",)),
            slots=tuple(f"cpu:{slot}" for slot in range(node.cluster.story.slots)),
            run_root=str(node.cluster.floor.run_root(node.name)),
            memory_dir=str(node.cluster.floor.run_dir.parent / "memory"),
            lease_ttl_s=TTL_S,
        )
        super().__init__(config, node.clock)
        self._node = node

    async def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await SimulatedLife(self._own, self._node).run()

    def runners(self) -> list[Any]:
        """Of its jobs."""
        return list(self._own.runners.values())


class SimulatedLife(Incarnation):
    """`controllers.daemon.incarnation.Incarnation` with jobs that reach simulated workers."""

    def __init__(self, own: DaemonState, node: Node) -> None:
        super().__init__(own, node.store, Addresses(node.name, ""), _nothing)
        self._node = node

    def _new_runner(self, uid: str, identity: Any) -> Any:
        whole, land = self._node.cluster, self._node.cluster.land
        waits = hasty(land.chance, lambda: whole.story.hasty if whole.faulty else 0.0)
        node, changes = self._node, ChangeSignal()
        needs = simulated_dependencies(uid, identity, node.store, changes, node.clock, land, waits, self._config)
        return JobRunner(uid, identity, self._cluster, changes, needs)


async def _nothing(_: bool, __: str) -> None:
    return None


class SimulatedCluster:
    """One seed's."""

    def __init__(self, story: Story, run_dir: Path) -> None:
        self.story = story
        self.loop = VirtualLoop()
        self.chance = random.Random(f"run {story.seed}")
        self.history: list[str] = []
        self.wrong = ""
        self.faulty = True
        self.faults = 0
        self._further, self._faulty_until = story.goes_on, 0.0
        self._succeeded = asyncio.Event()
        self._over = asyncio.Event()
        self.store = MemoryCluster(ProcessClock(self.loop))
        self.network = Network(self.loop, random.Random(f"network {story.seed}"))
        self.pending = PendingWatches(self.store)
        spec = story.spec
        self.job = JobRecord(
            uid=UID,
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            run_dir=str(run_dir),
            created=0.0,
            prompts=story.prompts,
        )
        self.floor = Floor(
            self.network,
            random.Random(f"floor {story.seed}"),
            run_dir,
            self.tell,
            self.is_wrong,
            lambda: self.invariants.ranks_changed(),
            Stores(self.network, random.Random(f"stores {story.seed}"), story.blob_bytes, UID, self.lives),
            checkpoint_after=lambda seal: spec.checkpoints_after(seal.step, last=seal.last, asked=seal.checkpoint),
            apart=story.copies is not None,
        )
        self.land = Land(
            self.floor,
            self.network,
            lambda node: self.nodes[node].store,
            _METRICS,
            spec,
            UID,
            random.Random(f"land {story.seed}"),
            story.filter_rate,
            self.start_worker,
            self.serves,
            story.plans,
        )
        self.invariants = Invariants(rules_of(self.job), JobKeys(UID), self.floor, self.is_wrong, self.tell)
        self.store.listeners[:0] = [self.invariants.revision, self._note_end]
        self.nodes: dict[str, Node] = {}
        self.processes: dict[int, Worker] = {}

    def tell(self, what: str) -> None:
        """A line of the history."""
        self.history.append(f"{self.loop.now:8.2f}  {what}")

    def is_wrong(self, what: str) -> None:
        """Something that must not happen has happened: the story ends here."""
        if not self.wrong:
            self.wrong = what
            self.tell(f"WRONG: {what}")
            self._over.set()

    def start_worker(self, launch: LaunchSpec) -> int:
        """A simulated supervisor with its child; its pid."""
        pid = 1_000 + len(self.processes)
        kind = Rank if launch.role == "train" else Engine
        process = Process(self.loop, launch.instance)
        node = self.nodes[launch.node]
        self.processes[pid] = kind(self.floor, process, node.store, node.clock, launch, pid)
        return pid

    def lives(self, name: str) -> bool:
        """Whether a node's daemon is there, stopped or not."""
        node = self.nodes.get(name)
        return node is not None and node.process is not None and not node.process.killed

    def serves(self, name: str) -> bool:
        """Whether a node's daemon answers."""
        node = self.nodes.get(name)
        return node is not None and node.process is not None and node.process.running

    def is_running(self, process: ProcessId) -> bool:
        """Whether there is such a process."""
        worker = self.processes.get(process.pid)
        return worker is not None and worker.alive

    def signalled(self, process: ProcessId, number: int) -> None:
        """SIGTERM to a worker."""
        worker = self.processes.get(process.pid)
        if worker is not None:
            worker.leave()

    async def run(self) -> None:
        """The story."""
        for number in range(self.story.nodes):
            self.add_node(f"n{number}").start()
        for work in (self._housekeep(), self._go_on_after_ends(), self._change_settings()):
            asyncio.get_running_loop().create_task(work)
        # A job that does not fit on the nodes that are there when it is started fails, as it should.
        while len(self.store.listing(keys.NODES).kvs) < self.story.nodes and not self.wrong:
            await self._pass(0.5)
        created = JobStatus(phase=JobPhase.PENDING, reason="created")
        txn = transactions.create(JobKeys(UID), self.job, created, 0)
        self.store.transact(txn.compares, txn.writes)
        while self.invariants.mirror.head is None and not self.wrong:
            await self._pass(0.5)
        self.network.weather = self.story.weather
        faults = Faults(self)
        until = self.loop.now + self.story.faults_s
        while self.loop.now < until and not self.wrong and not self.ended:
            await self._pass(self.chance.expovariate(1.0 / self.story.fault_every_s))
            until = max(until, self._faulty_until)
            if not self.wrong:
                self.faults += faults.one()
        faults.stop()
        await self._calm()

    async def _calm(self) -> None:
        """Without faults the job comes to its end."""
        deadline = self.loop.now + LONGEST_CALM_S * (1 if self.story.room is None else 4)
        while not self.wrong and not self.ended:
            if self.loop.now > deadline:
                self._tell_waits()
                self.is_wrong("stuck: faults have stopped long ago, and the job has not come to its end")
            await self._pass(2.0)
        status = self.invariants.mirror.status
        if not self.wrong and status is not None and status.record.phase is not JobPhase.SUCCEEDED:
            barren = self.story.filter_rate > 0 and "could be trained" in status.record.reason
            if not barren:
                self.is_wrong(f"the job ended as {status.record.phase}: {status.record.reason}")
        if not self.wrong:
            self.invariants.at_the_end()

    def _tell_waits(self) -> None:
        """What everybody waits for, as they would say it themselves."""
        for node in self.nodes.values():
            for job in (one for one in node.jobs() if one.is_working):
                view = job.look()
                self.tell(f"{job.me} sees head {view.head.version} at revision {job.mirror.revision}")
                self.tell(f"{job.me} would {[intent.condition for intent in decide(view)]}")
                for wait in current_waits(view):
                    self.tell(f"{job.me} waits: {wait.what}")

    async def _go_on_after_ends(self) -> None:
        """Have the job go on after its end, as somebody asks who submits it with a higher goal, as often as its story says."""
        while self._further:
            await self._succeeded.wait()
            await self._pass(self.chance.choice([0.0, 0.01, 0.1, 3.0]))
            self._succeeded.clear()
            if self.wrong:
                return
            self._further -= 1
            raised = self._go_on()
            self.tell(f"the job goes on: {raised}")
            if self.faulty:
                self._faulty_until = self.loop.now + FURTHER_S

    def _go_on(self) -> RaisedGoal:
        mirror = self.invariants.mirror
        named = self.store.listing(keys.name(self.job.name)).kvs[0].mod_revision
        ended, _, entry = find_last_state(mirror, named)
        steps, epochs = (ended.job.record.spec["flow"][what] for what in ("steps", "epochs"))
        raised = RaisedGoal(what="epochs", before=epochs or 1, after=(epochs or 1) + 1)
        if steps is not None:
            raised = RaisedGoal(what="steps", before=steps, after=steps + 4)
        txn = extend_transaction(JobKeys(UID), ended, entry, raised, by="api", time=self.loop.now)
        self.store.transact(txn.compares, txn.writes)
        return raised

    async def _change_settings(self) -> None:
        """Submit the running job with the other train backend, as often as its story says."""
        for _ in range(self.story.changes):
            await self._pass(random.Random(f"{self.story.seed} {self.loop.now}").expovariate(0.1))
            mirror = self.invariants.mirror
            if self.wrong or mirror.head is None or mirror.status is None or mirror.status.record.phase.ended:
                continue
            named = self.store.listing(keys.name(self.job.name)).kvs[0].mod_revision
            job, _, entry = find_last_state(mirror, named, ended=False)
            spec = stored_spec(job.job.record.spec)
            other = "fsdp2" if spec.train.backend == "deepspeed" else "deepspeed"
            spec = spec.model_copy(update={"train": spec.train.model_copy(update={"backend": other})})
            changed = changed_settings(job.job.record, spec)
            assert changed is not None
            txn = settings_transaction(JobKeys(UID), job, entry, changed, by="api")
            self.store.transact(txn.compares, txn.writes)
            self.tell(f"the job is to be trained with {other}")

    def _note_end(self, _: object) -> None:
        status = self.invariants.mirror.status
        if status is not None and status.record.phase is JobPhase.SUCCEEDED:
            self._succeeded.set()

    @property
    def ended(self) -> bool:
        """Whether the job has, for good."""
        status = self.invariants.mirror.status
        if status is None or (self._further and status.record.phase is JobPhase.SUCCEEDED):
            return False
        return status.record.phase.ended

    async def _pass(self, seconds: float) -> None:
        """Time."""
        with contextlib.suppress(TimeoutError):
            async with limit_time(seconds):
                await self._over.wait()

    async def _housekeep(self) -> None:
        """The background work of the server."""
        while True:
            await asyncio.sleep(0.5)
            self.store.end_leases()

    def add_node(self, name: str) -> Node:
        """A machine with that name."""
        node = self.nodes[name] = Node(self, name)
        return node


def _belongings(config: NodeConfig, clock: Any, connector: Any) -> DaemonState:
    return DaemonState(config, clock, _METRICS, connector)


@contextlib.contextmanager
def in_place(cluster: SimulatedCluster) -> Iterator[None]:
    """Production's few ways out of this process lead into the simulation meanwhile: names by chance, and processes."""
    chance = random.Random(f"names {cluster.story.seed}")

    class Names:
        @staticmethod
        def uuid4() -> Any:
            return SimpleNamespace(hex=f"{chance.getrandbits(128):032x}")

    with contextlib.ExitStack() as stack:
        for module in (
            "controllers.job.effects",
            "controllers.identity",
            "controllers.job.rollback",
            "controllers.api.submission.spec_changes",
            "controllers.rules.world",
        ):
            if not hasattr(importlib.import_module(module), "uuid"):
                continue
            stack.enter_context(mock.patch(f"{module}.uuid", Names))
        # It would collect garbage, and here all controllers are one process.
        stack.enter_context(mock.patch("controllers.daemon.incarnation.trim_memory"))
        stack.enter_context(mock.patch("controllers.daemon.daemon.DaemonState", _belongings))
        set_written_version(NEWEST_VERSION)
        stack.enter_context(mock.patch("controllers.workers.launcher.is_running", cluster.is_running))
        for module in ("controllers.job.reconciler", "controllers.daemon.incarnation"):
            stack.enter_context(mock.patch(f"{module}.send_signal", cluster.signalled))
        # A story may have more misfortune than a real job should live through, and less log.
        stack.enter_context(mock.patch("controllers.rules.world.MAX_FRUITLESS_ROLLBACKS", 1000))
        stack.enter_context(mock.patch("controllers.workers.launcher.MAX_LAUNCHES", 1000))
        stack.enter_context(mock.patch("controllers.rules.retention.KEEP_LOG", 8))
        stack.enter_context(mock.patch("controllers.rules.retention.PRUNE_AT", 4))
        tools = None if cluster.story.spec.environment is None else NoTools()
        stack.enter_context(mock.patch("controllers.job.session.new_episode_pool", return_value=tools))
        stack.enter_context(mock.patch("controllers.flow.episodes.find_environment", return_value=Showing))
        if cluster.story.plans:
            stack.enter_context(planning(cluster.floor, random.Random(f"planning {cluster.story.seed}")))
        yield


def tell_story(story: Story) -> Ended:
    """Play it to its end, or until something is wrong."""
    home = Path(tempfile.mkdtemp(prefix="gcore-sim-", dir=SHM if SHM.is_dir() else None))
    loop = None
    gc.disable()
    try:
        (home / "run").mkdir()
        cluster = SimulatedCluster(story, home / "run")
        loop = cluster.loop

        def defect(_: Any, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if error is None:
                return
            text = "".join(traceback.format_exception(error)) if error else str(context)
            cluster.is_wrong(f"{context.get('message')} raised: {text}")

        loop.set_exception_handler(defect)
        asyncio.set_event_loop(loop)
        with in_place(cluster):
            try:
                loop.run_until_complete(cluster.run())
            except NothingLeft:
                cluster.is_wrong("everybody waits, and nothing will ever happen")
        head = cluster.invariants.mirror.head
        return Ended(
            story,
            cluster.history,
            cluster.wrong,
            steps=head.record.step if head is not None else 0,
            lineages=head.record.lineage if head is not None else 0,
            seconds=loop.now,
            revisions=cluster.store.revision,
            faults=cluster.faults,
        )
    finally:
        if loop is not None:
            loop.set_exception_handler(lambda *_: None)
            loop.finish()
        gc.enable()
        asyncio.set_event_loop(None)
        shutil.rmtree(home, ignore_errors=True)
