"""Train ranks and engines of the simulated cluster: their state and refusals are production's, compute is a delay.

A rank keeps `gcore.train.rank.feed`'s state and answers with it. Its weights are the list of its training batches: one
set of refs for each step. All ranks of a world enter a step together, as in collectives, and if one dies the others
fail. An engine serves the highest version that it received, and generates a group after a delay. Both are registered by
`gcore.worker.supervisor`, as real workers are by their supervisors; a worker whose registration is refused exits.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from simulated_blobs import Stores
from simulated_network import Network, RemoteStore
from virtual_time import Process, ProcessClock

from gcore.ledger.audit.receipts import Receipt
from gcore.ledger.records.chain import Seal
from gcore.media.protocol import StoreFull
from gcore.models.layout import (
    EXP_AVG_FILE,
    EXP_AVG_SQ_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    CheckpointDamaged,
    Manifest,
    checkpoint_folder,
    file_entry,
    manifest_digest,
    verify_checkpoint,
    weights_folder,
)
from gcore.system.concurrency import limit_time
from gcore.system.files import replace_folder
from gcore.train.rank import feed as feed_state
from gcore.train.rank.feed import FeedState, TrainGroup, TrainSample, WorldName
from gcore.train.rank.launch import PARTS, refuse_release, refuse_restore
from gcore.types import DenoisingTrajectory, Group, PromptRef, Sample, Token, Version
from gcore.worker.lifecycle import RegistrationRefused
from gcore.worker.records import LaunchSpec, WorkerRecord
from gcore.worker.supervisor import Registrar

Content = tuple[frozenset[PromptRef], ...]
"""The training refs of weights, step by step."""


@dataclass
class Floor:
    """What all simulated workers share: the machine room."""

    network: Network
    chance: random.Random
    run_dir: Path
    """The run's folder, as the job's record names it."""
    tell: Callable[[str], None]
    wrong: Callable[[str], None]
    """Called with what must not happen."""
    looked: Callable[[], None]
    """Called when a rank's content has changed."""
    stores: Stores
    """Of blobs. One keeps its files when its node restarts."""
    receipts: list[Receipt] = field(default_factory=list)
    ranks: dict[str, Rank] = field(default_factory=dict)
    """By address."""
    engines: dict[str, Engine] = field(default_factory=dict)
    worlds: dict[str, list[Rank]] = field(default_factory=dict)
    checkpoint_after: Callable[[Seal], bool] = lambda seal: seal.last

    apart: bool = False
    """Whether each node has a folder of its own for the run."""

    _staged: dict[Path, frozenset[Version]] = field(default_factory=dict)

    def folder(self, node: str) -> Path:
        """Where a node has the run's folder."""
        return self.run_root(node) / self.run_dir.name if self.apart else self.run_dir

    def run_root(self, node: str) -> Path:
        """Where a node has its own folders of runs."""
        return self.run_dir.parent / node

    def staged(self, look: Callable[[Path], frozenset[Version]], node: str) -> frozenset[Version]:
        """The versions whose weights lie in a node's folder of the run; it is looked at when something was put there."""
        folder = self.folder(node)
        if folder not in self._staged:
            self._staged[folder] = look(folder)
        return self._staged[folder]

    def restage(self) -> None:
        """Something was put into the run's folder, or taken out."""
        self._staged.clear()

    @property
    def workers(self) -> list[Worker]:
        """All that were ever started."""
        return [*self.ranks.values(), *self.engines.values()]


class Worker:
    """A process with a registration."""

    def __init__(
        self, floor: Floor, process: Process, store: RemoteStore, clock: ProcessClock, spec: LaunchSpec, pid: int
    ) -> None:
        self.floor = floor
        self.process = process
        self.spec = spec
        self.node = spec.node
        self.record = WorkerRecord(
            instance=spec.instance,
            node=spec.node,
            role=spec.role,
            job_uid=spec.job_uid,
            slot=spec.slot,
            pid=pid,
            pid_started=pid,
            world=spec.world,
            rank=spec.rank,
            judge=spec.judge,
        )
        self._registrar = Registrar(spec, store, clock, self._hear)
        process.run(self._registrar.run(), "registration")
        process.run(self._live(), "life")

    @property
    def alive(self) -> bool:
        """Whether its process is there, stopped or not."""
        return not self.process.killed

    def end(self, why: str) -> None:
        """It is over."""
        if self.alive:
            self.floor.tell(f"{self.spec.instance} ends: {why}")
            self.process.kill()
            self.lost()

    def lost(self) -> None:
        """Its process is gone."""

    def leave(self) -> None:
        """SIGTERM: it takes its registration away, and ends."""

        async def leaving() -> None:
            await self._registrar.leave()
            self.end("asked to stop")

        self.process.post(lambda: self.process.run(leaving(), "leaving"))

    def _show(self, state: str, **more: Any) -> None:
        self.record = self.record.model_copy(update={"state": state, **more})
        self._registrar.show(self.record)

    def _hear(self, event: object) -> None:
        if isinstance(event, RegistrationRefused):
            self.floor.network.loop.call_soon(lambda: self.end(f"refused: {event.reason}"))

    async def _live(self) -> None:
        self._show("starting")
        await asyncio.sleep(0.5 + 2.0 * self.floor.chance.random())
        self._show("serving", address=self.spec.instance)
        self.serving()

    def serving(self) -> None:
        """It is ready."""


@dataclass(frozen=True)
class _Rest:
    """The parts to release, and the callback."""

    what: frozenset[str]
    reply: Callable[[bool], None]


class Rank(Worker):
    """One of a train world."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        child, spec = self.spec.child, self.spec
        assert spec.world is not None
        assert spec.rank is not None
        self.name = WorldName(spec.job_uid, spec.world, child["lineage"])
        streams = child["spec"]["train"]["stream"]
        self.state = FeedState(self.name, spec.rank, child["world_size"], done=child["start"]["step"], streams=streams)
        run_dir = self.floor.folder(self.node)
        self.damage = damaged(run_dir, child["start"]["checkpoint"])
        self.content = () if self.damage else read_content(run_dir, child["start"]["checkpoint"])
        self.checkpoint: tuple[Version, str, str] | None = None
        """The newest that was written: version, folder, digest."""
        self.listeners: dict[object, Callable[[], None]] = {}
        self._work: asyncio.Queue[feed_state.StepInput | feed_state.StepPartInput | _Rest] = asyncio.Queue()
        self.released: frozenset[str] = frozenset()
        self._fetches = False
        self._gathered: asyncio.Future[None] | None = None
        self._inside: object = None
        """The rank's purpose in a collective."""
        self._accumulated: list[PromptRef] = []
        """What the parts of the step to come were, so far."""
        self.floor.ranks[spec.instance] = self
        self.backend = child["spec"]["train"].get("backend", "deepspeed")
        world = self.floor.worlds.setdefault(spec.world, [])
        if world and world[0].backend != self.backend:
            self.floor.wrong(f"{spec.instance} starts with {self.backend} in a world of {world[0].backend}")
        world.append(self)
        if not self.damage and len(self.content) != self.state.done:
            self.floor.wrong(f"{spec.instance} starts at step {self.state.done} with weights of {len(self.content)}")

    async def _live(self) -> None:
        if not self.damage:
            return await super()._live()
        self._show("starting")
        await self.fail(self.damage)

    def serving(self) -> None:
        if self.spec.rank == 0:  # engines are to serve what the world goes on from, under its new name
            self._stage(Version(self.name.lineage, self.state.done))
        self.process.run(self._train(), "training")
        self._notify()

    def feed(
        self,
        name: WorldName,
        token: Token,
        groups: list[tuple[Group, frozenset[int]]],
        holders: Collection[str] = (),
    ) -> bool:
        """Samples of groups; whether they were not refused. `holders`: nodes whose stores have their media."""
        holders = frozenset(holders)
        held = {group.digest(): held_group(group, samples, holders) for group, samples in groups}
        answer = feed_state.feed_samples(self.state, name, token, held)
        if isinstance(answer, feed_state.RankRefusal):
            return False
        if answer.state != self.state:
            self.state = answer.state
            self._notify()
            if self.state.wanted and not self._fetches:
                self._fetches = True
                self.process.run(self._fetch(), "blobs")
        return True

    async def _fetch(self) -> None:
        """Fetch the blobs that samples lack, until there are none or no store has them."""
        try:
            while wanted := {n: w for n, w in self.state.wanted.items() if n not in self.state.unavailable}:
                await asyncio.sleep(0.05 + 0.5 * self.floor.chance.random())
                name = self.floor.chance.choice(sorted(wanted))
                one = self.state.wanted.get(name)
                if one is None:
                    continue
                if not self.floor.stores.reaches(self.node, self.node):
                    continue
                try:
                    found = self.floor.stores.transfer(name, one.holders, self.node)
                except StoreFull:
                    continue
                if found:
                    self.state = feed_state.add_blobs(self.state, [name])
                elif found is False:
                    self.state = feed_state.miss_blobs(self.state, [name])
                    self.floor.tell(f"{self.spec.instance} finds blob {name[:8]} in no store")
                self._notify()
        finally:
            self._fetches = False

    def apply(self, name: WorldName, token: Token, seal: bytes) -> bool:
        """Train on a READY seal; whether it was not refused."""
        answer = feed_state.apply_step(self.state, name, token, Seal.decode(seal))
        if isinstance(answer, feed_state.Begin):
            self._check_blobs(answer.work)
            self.state = answer.state
            self._work.put_nowait(answer.work)
            self._notify()
        return not isinstance(answer, feed_state.RankRefusal)

    def accumulate(self, name: WorldName, token: Token, seal: bytes) -> bool:
        """Train on the READY parts of a seal, up to their gradients; whether it was not refused."""
        answer = feed_state.accumulate_parts(self.state, name, token, Seal.decode(seal))
        if isinstance(answer, feed_state.BeginParts):
            self.state = answer.state
            for part in answer.parts:
                self._check_blobs(part.work)
                self._work.put_nowait(part)
            self._notify()
            self.floor.looked()
        return not isinstance(answer, feed_state.RankRefusal)

    def _check_blobs(self, work: feed_state.StepInput) -> None:
        """A step or part that begins has all blobs of this rank's samples."""
        for slot in work.layout.of_rank(work.rank):
            group = work.groups.get(work.seal.groups[slot.group].digest)
            if group is not None and group.media_of((slot.sample,)).keys() - self.state.blobs:
                self.floor.wrong(f"{self.spec.instance} trains {group.ref} of {work.seal.token} without a blob")

    def rest(self, name: WorldName, step: int | None, reply: Callable[[bool], None]) -> None:
        """Give memory back, behind `step`, or (None) take it again; replies when it is done whether it was not refused."""
        refused = feed_state.check_caller(self.state, name) or (
            refuse_restore(self.state) if step is None else refuse_release(self.state, step)
        )
        if refused is not None:
            reply(False)
        else:
            self._work.put_nowait(_Rest(frozenset() if step is None else PARTS, reply))

    def lost(self) -> None:
        """The others of its world wait in a collective, or will; they fail after a while."""
        for other in self.floor.worlds[self.name.world]:
            if other is not self and other.alive:
                other.process.run(other.fail(f"rank {self.spec.rank} is gone"), "failing")

    async def fail(self, why: str) -> None:
        await asyncio.sleep(1.0 + 3.0 * self.floor.chance.random())
        self._show("failed", reason=why)
        await asyncio.sleep(3.0)
        self.floor.network.loop.call_soon(lambda: self.end(why))

    async def _train(self) -> None:
        while True:
            work = await self._work.get()
            if isinstance(work, _Rest):
                await self._come_to(work.what)
                work.reply(True)
                continue
            await self._come_to(frozenset())
            if isinstance(work, feed_state.StepPartInput):
                await self._add(work)
                continue
            for part in feed_state.remaining_parts(work):
                await self._add(part)
            await self._gather(work.seal.token)
            await asyncio.sleep(0.3 + self.floor.chance.random())
            self._finish(work)

    async def _come_to(self, released: frozenset[str]) -> None:
        """Have this released and nothing else."""
        if released != self.released:
            await asyncio.sleep(0.1 + 0.5 * self.floor.chance.random())
            self.released = released
            self.floor.tell(f"{self.spec.instance} {'gave its memory back' if released else 'has its memory again'}")
            if not released:
                awake = [e for e in self.floor.engines.values() if e.alive and e.node == self.node and e.has_memory]
                for engine in awake:
                    self.floor.tell(f"{engine.spec.instance} has its memory at the same time")
            self._notify()

    async def _add(self, part: feed_state.StepPartInput) -> None:
        """A part of the step to come."""
        seal = part.work.seal
        await self._gather(seal.encode())
        await asyncio.sleep(0.1 + 0.3 * self.floor.chance.random())
        start = sum(seal.parts[: part.number])
        self._accumulated += [group.ref for group in seal.groups[start:]]
        self.floor.tell(f"{self.spec.instance} has added part {part.number} of step {seal.step}")

    async def _gather(self, what: object) -> None:
        """All ranks of the world are in the same step, as in a collective."""
        loop = self.floor.network.loop
        self._gathered, self._inside = loop.create_future(), what
        world = [rank for rank in self.floor.worlds[self.name.world] if rank.alive]
        inside = [rank for rank in world if rank._gathered is not None]
        if len({rank._inside for rank in inside}) > 1:
            self.floor.wrong(f"ranks of world {self.name.world} are in a collective with different tokens")
        if len(inside) == self.state.world_size:
            for rank in inside:
                assert rank._gathered is not None
                rank._gathered.set_result(None)
                if rank is not self:
                    rank._gathered = None
        await self._gathered
        self._gathered = None

    def _finish(self, work: feed_state.StepInput) -> None:
        seal = work.seal
        accumulated, self._accumulated = self._accumulated, []
        if seal.parts and accumulated != [group.ref for group in seal.groups]:
            self.floor.wrong(f"{self.spec.instance} has added {accumulated} for {seal.token}")
        samples: dict[PromptRef, set[int]] = {}
        for slot in work.layout.of_rank(work.rank):
            samples.setdefault(seal.groups[slot.group].ref, set()).add(slot.sample)
        parts = {ref: frozenset(found) for ref, found in samples.items()}
        digests = {group.ref: group.digest for group in seal.groups if group.ref in parts}
        self.floor.receipts.append(Receipt(seal.token, self.name.world, work.rank, parts, digests))
        self.content = (*self.content, frozenset(group.ref for group in seal.groups))
        version = Version(seal.lineage, seal.step)
        if work.rank == 0:
            self._stage(version)
            if self.floor.checkpoint_after(seal):
                self.checkpoint = write_checkpoint(self.floor.folder(self.node), version, self)
        self.state = feed_state.finish_step(self.state)
        self.floor.tell(f"{self.spec.instance} has applied {seal.token}")
        self.floor.looked()
        self._notify()

    def _stage(self, version: Version) -> None:
        """Weights for the engines."""
        weights_folder(self.floor.folder(self.node), version).mkdir(parents=True, exist_ok=True)
        self.floor.restage()

    def _notify(self) -> None:
        for notify in tuple(self.listeners.values()):
            notify()


def held_group(group: Group, samples: frozenset[int], holders: frozenset[str] = frozenset()) -> TrainGroup:
    """A fed group, as a rank has it."""
    prompt = np.asarray(group.prompt_ids, dtype=np.int32)
    held = {index: _held_sample(group.samples[index]) for index in samples}
    return TrainGroup(group.ref, group.digest(), prompt, held, media=group.media, holders=holders)


def _held_sample(sample: Sample) -> TrainSample:
    output = sample.output if isinstance(sample.output, DenoisingTrajectory) else None
    return TrainSample(
        np.asarray(sample.token_ids, dtype=np.int32),
        np.zeros(len(sample.logprobs), dtype=np.float32),
        sample.reward,
        sample.masked,
        observed=sample.observed,
        media=sample.media,
        steps=None if output is None else np.asarray(output.steps, dtype=np.int32),
        sigmas=None if output is None else np.asarray(output.sigmas, dtype=np.float32),
    )


def damaged(run_dir: Path, checkpoint: str) -> str:
    """Why a rank refuses to begin from a checkpoint that was whole when it was chosen, or nothing."""
    try:
        if checkpoint:
            verify_checkpoint(run_dir / checkpoint)
    except CheckpointDamaged as error:
        return str(error)
    return ""


def read_content(run_dir: Path, checkpoint: str) -> Content:
    """The training refs of a checkpoint's weights; of the first model, none."""
    if not checkpoint:
        return ()
    steps = json.loads((run_dir / checkpoint / MODEL_FILE).read_text())
    return tuple(frozenset(PromptRef.parse(ref) for ref in step) for step in steps)


def write_checkpoint(run_dir: Path, version: Version, rank: Rank) -> tuple[Version, str, str]:
    """A checkpoint as a rank leaves it: its content, and a manifest that names every file."""
    folder = checkpoint_folder(run_dir, version)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replace_folder(folder, owner=rank.spec.instance, durable=False) as draft:
            text = json.dumps([sorted(map(str, step)) for step in rank.content])
            for name in (MODEL_FILE, EXP_AVG_FILE, EXP_AVG_SQ_FILE, "config.json"):
                (draft / name).write_text(text)
            manifest = Manifest(
                job_uid=rank.name.job_uid,
                world=rank.name.world,
                lineage=version.lineage,
                step=version.step,
                updates=version.step,
                files={
                    name: file_entry(draft / name)
                    for name in (MODEL_FILE, EXP_AVG_FILE, EXP_AVG_SQ_FILE, "config.json")
                },
            )
            (draft / MANIFEST_FILE).write_bytes(manifest.encode())
    return version, str(folder.relative_to(run_dir)), manifest_digest(folder)


class Engine(Worker):
    """A rollout replica."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.version = Version(0, 0)
        self.asleep = False
        self.nameless = False
        """Whether it slept, and was brought no weights since."""
        self.slept = 0
        self._brought = asyncio.Event()
        self._unwanted: dict[str, asyncio.Event] = {}
        """By name of what is under way, whether it is to be given back."""
        self.floor.engines[self.spec.instance] = self

    @property
    def has_memory(self) -> bool:
        """Whether it serves, and is awake."""
        return self.record.state == "serving" and not self.asleep

    def publish(self, version: Version) -> None:
        """These weights are served from now on, if they are newer. It must be awake."""
        self.nameless = False
        self._brought.set()
        self.version = max(self.version, version)

    def sleep(self) -> None:
        """Release memory. Requests wait."""
        if not self.asleep:
            self.asleep = self.nameless = True
            self.slept += 1
            self._brought.clear()

    def wake(self) -> None:
        """Restore memory without valid weights."""
        self.asleep = False

    def generate(self, rid: str, reply: Callable[[tuple[bool, tuple[Version, ...]]], None]) -> None:
        """Whether a response is whole, and the weights that made it, once it is there or given back; none if it was given up."""

        async def generating() -> None:
            unwanted = self._unwanted.setdefault(rid, asyncio.Event())
            while self.nameless:  # paused, until it is brought weights
                await self._brought.wait()
            begun, slept = self.version, self.slept
            try:
                async with limit_time(self.floor.chance.lognormvariate(-0.5, 0.8)):
                    await unwanted.wait()
            except TimeoutError:
                pass
            self._unwanted.pop(rid, None)  # a request that arrived twice is made twice, and given back with the first
            # What is under way when it is put to sleep is given back.
            made = () if self.slept > slept else tuple(sorted({begun, self.version}))
            reply((not unwanted.is_set(), made))

        if self.alive:
            self.process.run(generating(), "request")

    def abort(self, rid: str) -> None:
        """Give back what has been made of it until now."""
        if rid in self._unwanted:
            self._unwanted[rid].set()
