"""The ends of a simulated controller: connections to ranks and engines, workers, prompts, and a ledger that reports its writes.

Each replaces a network, a process or a folder of production. Nothing here decides, seals or commits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

from simulated_blobs import picture_of
from simulated_network import Network, NoAnswer, RemoteStore, ask
from simulated_pictures import make_pictures
from simulated_workers import Engine, Floor, Rank
from virtual_time import ProcessClock

from controllers.rules.view import JobView, RankView, SavedCheckpoint, Timers
from controllers.rules.workers import Launch, StartEngine, StartRank, launch_key
from controllers.telemetry.notices import PluginErrorLog, WarningLog
from controllers.workers.launcher import WorkerLauncher
from controllers.workers.ranks import RankConnections, RankNotConnected
from gcore.config import JobSpec, NodeConfig
from gcore.errors import EngineError, EngineUnreachable, GcoreError
from gcore.ledger.balance import parts_sha256
from gcore.ledger.records.chain import Seal
from gcore.ledger.transactions import TransactionExecutor
from gcore.observability.metrics import Metrics
from gcore.rollout.api import DenoisingParams, SamplingParams
from gcore.store.keys import JobKeys
from gcore.store.reference import StoreRef
from gcore.system.concurrency import limit_time
from gcore.system.process import ProcessId
from gcore.train.rank.feed import FeedState, WorldName
from gcore.types import DenoisingTrajectory, Group, Outcome, Pool, Prompt, PromptRef, Sample, Version, VersionSpan
from gcore.worker.records import LaunchSpec

SOURCE = "source"
CALL_S = 5.0


class Hasty(Timers):
    """Waits and turns are ignored by this peer: it acts at once.

    Correctness must not depend on turns and waits.
    """

    chance: random.Random
    share: Callable[[], float]

    def note(self, conditions: Iterable[str], now: float) -> Hasty:
        noted = Hasty(super().note(conditions, now).since)
        object.__setattr__(noted, "chance", self.chance)
        object.__setattr__(noted, "share", self.share)
        return noted

    def ripe(self, condition: str, turn: int, now: float, *, after: float = 0.0) -> bool:
        return self.chance.random() < self.share() or super().ripe(condition, turn, now, after=after)


def hasty(chance: random.Random, share: Callable[[], float]) -> Timers:
    """Waits of a peer that is out of turn with the probability that `share` says."""
    waits = Hasty({})
    object.__setattr__(waits, "chance", chance)
    object.__setattr__(waits, "share", share)
    return waits


@dataclass(frozen=True)
class Land:
    """What a controller finds on its node and beyond."""

    floor: Floor
    network: Network
    store: Callable[[str], RemoteStore]
    metrics: Metrics
    spec: JobSpec
    uid: str
    chance: random.Random
    filter_rate: float
    start_worker: Callable[[LaunchSpec], int]
    """Starts a simulated one; its pid."""
    serves: Callable[[str], bool]
    """Whether a node's daemon answers."""
    plans: bool = False
    """Whether controllers plan as in production."""


class SimulatedStaff(WorkerLauncher):
    """Starts simulated workers."""

    def __init__(self, config: NodeConfig, clock: ProcessClock, land: Land) -> None:
        super().__init__(config, clock)
        self._land = land
        self._count = 0

    def _spawn(self, action: StartEngine | StartRank, view: JobView) -> Launch:
        self._count += 1
        role: Pool
        world: str | None
        rank: int | None
        child: dict[str, Any]
        judge = ""
        if isinstance(action, StartRank):
            role, world, rank = "train", action.world, action.place.rank
            child, name = dict(self._rank_child(action, view).document), f"{world}-{rank}"
        else:
            judge = action.place.judge
            role, world, rank = "reward" if judge else "rollout", None, None
            child, name = {}, f"{judge or 'engine'}-{action.place.slot.replace(':', '')}"
        launch = LaunchSpec(
            instance=f"{name}-{view.node}-{self._land.chance.getrandbits(24):06x}",
            node=view.node,
            role=role,
            job_uid=view.mirror.keys.uid,
            slot=action.place.slot,
            store=StoreRef(endpoints=("simulated",)),
            log_file="none",
            command=("none",),
            child=child,
            world=world,
            rank=rank,
            judge=judge,
            lease_ttl_s=10,
        )
        pid = self._land.start_worker(launch)
        self._land.floor.tell(f"{view.me} starts {launch_key(action)} as {launch.instance}")
        return Launch(launch.instance, ProcessId(pid, pid), self._clock.monotonic())


class SimulatedLinks(RankConnections):
    """`controllers.workers.ranks` over simulated messages."""

    def __init__(self, clock: ProcessClock, on_change: Callable[[], None], node: str, land: Land) -> None:
        super().__init__(clock, on_change)
        self._node = node
        self._land = land
        self._aimed: dict[int, tuple[str, asyncio.Task[None]]] = {}

    def aim(self, world: WorldName | None, addresses: Mapping[int, str]) -> None:
        if world != self._world:
            self._world = world
            self.views = {}
            for rank in list(self._aimed):
                self._aimed.pop(rank)[1].cancel()
        for rank in list(self._aimed):
            if addresses.get(rank) != self._aimed[rank][0]:
                self._aimed.pop(rank)[1].cancel()
        for rank, address in addresses.items():
            if rank not in self._aimed and world is not None:
                task = asyncio.get_running_loop().create_task(self._hear(world, rank, self._land.floor.ranks[address]))
                self._aimed[rank] = (address, task)

    async def feed(
        self, rank: int, seal: Seal, groups: Any, share: int, sender: str, holders: Collection[str] = ()
    ) -> None:
        there, world = self._there(rank), self._world
        assert world is not None
        sent = list(groups)
        state = await self._ask(there, lambda: there.feed(world, seal.token, sent, holders) and there.state)
        if state and world == self._world and state.holding is not None:
            self._note_listing(rank, state)

    async def apply(self, rank: int, seal: Seal, stored: bytes, *, whole: bool = True) -> None:
        there, world = self._there(rank), self._world
        assert world is not None
        do = there.apply if whole else there.accumulate
        await self._ask(there, lambda: do(world, seal.token, stored))

    async def rest(self, rank: int, step: int | None) -> None:
        there, world, network = self._there(rank), self._world, self._land.network
        assert world is not None

        def arrive(reply: Callable[[Any], None]) -> None:
            there.process.post(lambda: there.rest(world, step, reply))

        try:
            await ask(network, self._node, there.node, arrive, timeout_s=CALL_S)
        except NoAnswer as error:
            raise RankNotConnected(str(error)) from None

    def _there(self, rank: int) -> Rank:
        if rank not in self._aimed:
            raise RankNotConnected(f"rank {rank} is not connected", fix="Look again")
        return self._land.floor.ranks[self._aimed[rank][0]]

    async def _ask(self, there: Rank, do: Callable[[], Any]) -> Any:
        def arrive(reply: Callable[[Any], None]) -> None:
            there.process.post(lambda: reply(do()))

        try:
            return await ask(self._land.network, self._node, there.node, arrive, timeout_s=CALL_S)
        except NoAnswer as error:
            raise RankNotConnected(str(error)) from None

    async def _hear(self, world: WorldName, rank: int, there: Rank) -> None:
        """What the rank says of itself, when it changes, and again from time to time."""
        network, key = self._land.network, object()
        changed = asyncio.Event()

        def notify() -> None:
            network.send(there.node, self._node, changed.set)

        there.listeners[key] = notify
        try:
            while True:
                changed.clear()
                try:
                    state, checkpoint = await self._ask(there, lambda: (there.state, there.checkpoint))
                except RankNotConnected:
                    await asyncio.sleep(0.5)
                    continue
                if world == self._world:
                    if checkpoint is not None:
                        self.saved[checkpoint[0]] = SavedCheckpoint(*checkpoint)
                    held = {digest: frozenset(samples) for digest, samples in state.held.items()}
                    begun = (
                        (len(state.begun), state.done + 1, parts_sha256(state.begun)) if state.begun else (0, 0, b"")
                    )
                    shown = RankView(rank, state.holding, held, state.applied)
                    shown = replace(shown, begun=begun[0], begun_step=begun[1], begun_content=begun[2])
                    shown = replace(shown, released=there.released, fetching=state.fetching)
                    self._show(shown)
                try:
                    async with limit_time(4.0):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            there.listeners.pop(key, None)

    def _show(self, view: RankView) -> None:
        """As production's does: what a rank holds of one token only grows."""
        known = self.views.get(view.rank)
        if known is not None and known.holding is not None and known.holding == view.holding:
            digests = {*known.held, *view.held}
            held = {d: known.held.get(d, frozenset()) | view.held.get(d, frozenset()) for d in digests}
            view = replace(view, held=held)
        super()._show(view)

    def _note_listing(self, rank: int, state: FeedState) -> None:
        view = self.views.get(rank, RankView(rank))
        assert state.holding is not None
        if view.holding is None or view.holding <= state.holding:
            self._show(replace(view, holding=state.holding, held=dict(state.held), fetching=state.fetching))


class SimulatedClient:
    """`gcore.rollout.client` of one simulated engine."""

    def __init__(self, node: str, engine: Engine, land: Land) -> None:
        self._node = node
        self._engine = engine
        self._land = land

    async def close(self) -> None:
        """Nothing is open."""

    async def resume(self) -> None:
        """It was never paused."""

    async def abort(self, rid: str, count: int) -> None:
        """Have it given back."""

        def abort(reply: Callable[[Any], None]) -> None:
            self._engine.abort(rid)
            reply(None)

        await self._ask(abort)

    async def served(self) -> Any:
        """Which weights it serves; None after it slept."""
        return await self._ask(lambda reply: reply(None if self._engine.nameless else self._engine.version))

    async def sleeps(self) -> bool:
        """Whether it was put to sleep, and brought no weights since."""
        return bool(await self._ask(lambda reply: reply(self._engine.nameless)))

    async def released(self) -> bool:
        """Whether it has none."""
        return bool(await self._ask(lambda reply: reply(self._engine.asleep)))

    async def sleep(self) -> None:
        """Have its memory back."""

        def sleep(reply: Callable[[Any], None]) -> None:
            self._engine.sleep()
            reply(None)

        await self._ask(sleep)

    async def take_memory(self) -> None:
        """Give it again."""

        def wake(reply: Callable[[Any], None]) -> None:
            self._engine.wake()
            reply(None)

        await self._ask(wake)

    async def wake(self, version: Version) -> None:
        """The same, of one that keeps what it serves; what that is it is brought all the same."""
        await self.take_memory()

    async def update_weights(self, folder: str, version: Version) -> None:
        """Bring it newer ones."""

        def publish(reply: Callable[[Any], None]) -> None:
            if not self._engine.asleep:
                self._engine.publish(version)
            reply(self._engine.asleep)

        if await self._ask(publish):
            raise EngineError("the weights are released", fix="Wake it first")

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        """A response to each, of two or three tokens, or a picture."""
        first = params if isinstance(params, SamplingParams) else params[0]
        if first.denoising is not None:
            return await self._denoise(first.denoising, seeds, rid)
        is_whole, made = await self._ask(lambda reply: self._engine.generate(rid, reply), timeout_s=30.0)
        if not made:
            raise EngineUnreachable("it was put to sleep", fix="Ask another")
        return tuple(self._sample(made, "stop" if is_whole else "abort") for _ in prompts)

    async def _denoise(self, params: DenoisingParams, seeds: Sequence[int], rid: str) -> tuple[Sample, ...]:
        engine, stores = self._engine, self._land.floor.stores

        def arrive(reply: Callable[[Any], None]) -> None:
            def finish(found: tuple[bool, tuple[Version, ...]]) -> None:
                is_whole, made = found
                if not (is_whole and made):
                    reply(found)
                    return
                try:
                    reply(make_pictures(params, seeds, made, engine.node, stores))
                except GcoreError as error:  # the engine answers that it cannot store it now
                    reply(error)

            engine.generate(rid, finish)

        found = await self._ask(arrive, timeout_s=30.0)
        if isinstance(found, GcoreError):
            raise EngineUnreachable(str(found))
        if isinstance(found[0], Sample):
            return tuple(found)
        if not found[1]:
            raise EngineUnreachable("it was put to sleep", fix="Ask another")
        aborted = DenoisingTrajectory((), (1.0, 0.0), (), (VersionSpan(found[1][-1], 0, 0),), 0, ())
        return (Sample(output=aborted, finish_reason="abort"),) * len(seeds)

    def _sample(self, made: tuple[Version, ...], reason: Literal["stop", "abort"]) -> Sample:
        tokens = (self._land.chance.randrange(1 << 20), *range(self._land.chance.randint(1, 2)))
        ends = [1, len(tokens)] if len(made) > 1 else [len(tokens)]
        starts = [0, *ends[:-1]]
        spans = tuple(VersionSpan(v, s, e) for v, s, e in zip(made, starts, ends, strict=True))
        return Sample(tokens, (0.0,) * len(tokens), "", reason, spans)

    async def _ask(self, do: Callable[[Callable[[Any], None]], None], timeout_s: float = CALL_S) -> Any:
        def arrive(reply: Callable[[Any], None]) -> None:
            self._engine.process.post(lambda: do(reply))

        try:
            return await ask(self._land.network, self._node, self._engine.node, arrive, timeout_s=timeout_s)
        except NoAnswer as error:
            raise EngineUnreachable(str(error), fix="Ask another") from None


LAYERS = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
"""Sizes of a tower, and of a language model."""


class Stream:
    """Prompts that come from nowhere, with a picture if the job's have any."""

    def __init__(self, *, pictures: bool) -> None:
        self._pictures = pictures

    def prompt(self, ref: PromptRef) -> Prompt:
        if not self._pictures:
            return Prompt(ref, f"prompt {ref}", (1, 2), {}, SOURCE)
        return Prompt(ref, "", (1, 2), {}, SOURCE, request_ids=(1, 2), pictures=(picture_of(str(ref)),))

    def found(self, ref: PromptRef) -> tuple[Any, int]:
        decode = "x".__mul__
        renderer = SimpleNamespace(
            tokenizer=SimpleNamespace(decode=lambda tokens: decode(len(tokens))),
            decode=lambda tokens: decode(len(tokens)),
            encode_behind=lambda before, text: (0,) * len(text),
            chat=False,
        )
        rule = SimpleNamespace(
            patch_count=lambda height, width: 4,
            config={"vision_config": LAYERS, "text_config": LAYERS},
            picture_text="i",
            target_size=lambda height, width: (height, width),
            expand=lambda tokens, sizes: (0,) * (len(tokens) + 3 * len(sizes)),
            request_ids=lambda tokens, sizes: tokens,
        )
        return SimpleNamespace(name=SOURCE, renderer=renderer, rule=rule if self._pictures else None), 0


class SilentFaults(PluginErrorLog):
    """Nobody reads them here."""

    def note(self, what: str, trace: str = "") -> None:
        """Passed over."""


class SilentTroubles(WarningLog):
    """Nobody reads them here."""

    def note(self, topic: str, sentence: str) -> None:
        """Passed over."""


class TellingLedger(TransactionExecutor):
    """Tells what became of each transaction, for the history."""

    def __init__(self, store: Any, keys: JobKeys, me: str, tell: Callable[[str], None]) -> None:
        super().__init__(store, keys)
        self._me = me
        self._tell = tell

    async def run(self, txn: Any) -> Any:
        report = await super().run(txn)
        self._tell(f"{self._me} {txn.kind}: {report.outcome}")
        return report


def flow(land: Land) -> Any:
    """A flow as users write them; what is kept is chance."""

    async def simulated(peer: Any) -> None:
        async for step in peer.steps():
            async with step.collect() as batch:
                async for prompt in peer.prompts(step):
                    batch.start(produce(peer, prompt))
            await step.train()
            await step.publish()

    async def produce(peer: Any, prompt: Prompt) -> Group | Outcome:
        samples = await peer.rollout(prompt)
        if land.chance.random() < land.filter_rate:
            return Outcome("filtered", "constant")
        media = () if peer.media is None else await peer.media.of(prompt)
        if peer.media is not None:
            await peer.media.end_sampling(prompt.ref)
        return Group(prompt.ref, prompt.token_ids, samples, prompt.source, media=media)

    return simulated
