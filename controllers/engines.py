"""The rollout replicas that this controller is responsible for: routing to them, and bringing them the weights.

Each engine has one controller at a time that routes to it and publishes to it: its node's, or, while that is away, the
peer whom a hash names. Two that both believe it do no harm: samples carry the version they were made with, and the seal
checks that. An engine that does not serve head's version is not routed to.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controllers.changes import Changes
from controllers.routing import Load, route
from controllers.turns import turn
from controllers.view import EngineView
from gcore.errors import EngineError, EngineUnreachable
from gcore.ledger.records import Member
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.types import Sample, Version
from gcore.worker.records import WorkerRecord

log = logging.getLogger(__name__)


def responsible_for(
    job_uid: str, workers: Mapping[str, WorkerRecord], members: Mapping[str, Member], me: str
) -> dict[str, WorkerRecord]:
    """The serving engines of the job that are mine: those of my node, and those of nodes without a member by hash."""
    here = {m.node: incarnation for incarnation, m in sorted(members.items())}
    mine = {}
    for instance, worker in sorted(workers.items()):
        if worker.role != "rollout" or worker.job_uid != job_uid or worker.state != "serving":
            continue
        owner = here.get(worker.node)
        if owner == me or (owner is None and me in members and turn(members, me, f"engine {instance}") == 0):
            mine[instance] = worker
    return mine


@dataclass(frozen=True, slots=True)
class Following:
    """How a request lives through changes of weights: it begins with the version `wanted` now, of which `began` is told."""

    wanted: Callable[[], Version]
    began: Callable[[Version], None]


@dataclass
class _Line:
    client: EngineClient
    view: EngineView
    in_flight: int = 0
    """Samples asked for and not answered, with those that wait for its weights."""
    coming: Version | None = None
    """What it is being brought to."""


class EngineBook:
    """Engines by instance id. `aim` says which are mine; `views` is what `decide` sees."""

    def __init__(self, changes: Changes, timeout_s: float, connect: Callable[..., EngineClient] = EngineClient) -> None:
        self._changes = changes
        self._timeout_s = timeout_s
        self._connect = connect
        self._lines: dict[str, _Line] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._requests = itertools.count()

    @property
    def views(self) -> dict[str, EngineView]:
        """What is known of my engines."""
        return {instance: line.view for instance, line in self._lines.items()}

    async def aim(self, workers: Mapping[str, WorkerRecord]) -> None:
        """These are mine from now on."""
        for instance in list(self._lines):
            if instance not in workers or workers[instance].address != self._lines[instance].view.address:
                await self._lines.pop(instance).client.close()
                self._changes.notify()
        for instance, worker in workers.items():
            if instance not in self._lines:
                client = self._connect(f"http://{worker.address}", timeout_s=self._timeout_s)
                self._lines[instance] = _Line(client, EngineView(instance, worker.address, None))
                self._changes.notify()

    async def close(self) -> None:
        """Close all connections."""
        await self.aim({})

    async def publish(self, instance: str, version: Version, folder: Path) -> None:
        """Bring one engine to `version`, and find out that it serves it. Raises EngineError."""
        line = self._lines.get(instance)
        if line is None:
            # It may have ended, or become a peer's, between the decision and the deed.
            raise EngineUnreachable(f"{instance} is not connected", fix="Look again")
        line.coming = version
        try:
            served = (await line.client.info()).version
            if served != version:
                await line.client.update_weights(str(folder), version)
                served = (await line.client.info()).version
            else:
                # Whoever brought it there may have died before it let the engine go on; going on twice does no harm.
                await line.client.resume()
            line.view = replace(line.view, version=served)
        finally:
            line.coming = None
            self._changes.notify()

    def distrust(self, instance: str) -> None:
        """Nothing is known of the engine any more; it is asked, and brought up to date, before it is used again."""
        if instance in self._lines:
            self._lines[instance].view = replace(self._lines[instance].view, version=None)
            self._changes.notify()

    def serves(self, version: Version) -> bool:
        """Whether one of my engines serves `version`."""
        return any(line.view.version == version for line in self._lines.values())

    async def generate(
        self,
        version: Version,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        seeds: Sequence[int],
        rid: str,
        follow: Following | None = None,
    ) -> tuple[Sample, ...]:
        """A sample for each prompt and its seed, on an engine that serves `version` (`controllers.routing`); waits for one.

        With `follow` it is whichever version is wanted when there is a seat, and tokens of newer ones may come after.
        Raises EngineError. An engine that does not answer is distrusted, and the request is for the caller to repeat.
        """
        instance, line = await self._seat(follow.wanted if follow is not None else lambda: version, len(seeds))
        if follow is not None:
            assert line.view.version is not None
            version = line.view.version
            follow.began(version)
        # No two requests are called the same: an abort of one that was given up must not end the one that repeats it.
        rid = f"{rid}/{next(self._requests)}"
        finished = False
        try:
            samples = await line.client.generate_each(prompts, params, seeds=seeds, rid=rid)
            finished = True
            made = {span.version for sample in samples for span in sample.spans}
            others = {one for one in made if one < version or (one != version and follow is None)}
            if others:
                # A peer that also believed it to be its own has published to it.
                self.distrust(instance)
                made_by = ", ".join(map(str, sorted(others)))
                raise EngineError(f"{instance} answered with weights {made_by}, not {version}", fix="It is asked again")
            return samples
        except EngineUnreachable:
            finished = True
            self.distrust(instance)
            raise
        finally:
            line.in_flight -= len(seeds)
            self._changes.notify()
            if not finished:
                self._abandon(line, rid, len(seeds))

    async def _seat(self, wanted: Callable[[], Version], size: int) -> tuple[str, _Line]:
        """An engine that serves what is wanted, `size` samples added to what it has in flight, for the caller to take away."""
        held: tuple[str, _Line] | None = None
        try:
            while True:
                version = wanted()
                known = self._lines.get(held[0]) if held is not None else None
                if held is not None and known is not held[1]:
                    held = None  # it has gone, or another has its name
                instance = route(self._loads(version), size, held[0] if held is not None else None)
                if instance is not None and (held is None or instance != held[0]):
                    if held is not None:
                        held[1].in_flight -= size
                    held = instance, self._lines[instance]
                    held[1].in_flight += size
                if held is not None and held[1].view.version == version:
                    return held
                await self._changes.wait()
        except BaseException:
            if held is not None:
                held[1].in_flight -= size
            raise

    def _loads(self, version: Version) -> list[Load]:
        return [
            Load(instance, line.in_flight, line.view.version == version)
            for instance, line in self._lines.items()
            if version in (line.view.version, line.coming)
        ]

    def _abandon(self, line: _Line, rid: str, count: int) -> None:
        """The caller gave up: let the engine give up too. In the background, and as far as it goes."""

        async def abort() -> None:
            try:
                await line.client.abort(rid, count)
            except EngineError as error:
                log.debug("abort %s: %s", rid, error)

        task = asyncio.get_running_loop().create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
