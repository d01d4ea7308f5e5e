"""The rollout replicas that this controller is responsible for: routing to them, and bringing them the weights.

Each engine has one controller at a time that routes to it and publishes to it (`controllers.owning`). Two that both believe it do
no harm: samples carry the version they were made with, and the seal checks that. An engine that does not serve head's version is not routed to.

One that owes answers and gives none is left by everybody who waits for it (`controllers.pulse` says when); it is asked on how it
is, in the background, and is used again once it answers. To end one that hangs is its node's business (`controllers.staffing`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from controllers.changes import Changes
from controllers.continuing import Decode, Responses, told_every
from controllers.engine_counts import counted
from controllers.pulse import EnginePatience, Pulse, Verdict
from controllers.routing import Following, Load, route
from controllers.view import EngineView
from gcore.clock import Clock, SystemClock
from gcore.errors import EngineError, EngineUnreachable
from gcore.metrics import Metrics
from gcore.rollout.client import EngineClient, Growing, SamplingParams
from gcore.types import Sample, Version
from gcore.worker.records import WorkerRecord

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How everybody is, is looked at so often: patience is a matter of seconds."""


@dataclass
class _Line:
    client: EngineClient
    view: EngineView
    in_flight: int = 0
    """Samples asked for and not answered, with those that wait for its weights."""
    coming: Version | None = None
    """What it is being brought to."""
    pulse: Pulse = field(default_factory=lambda: Pulse(0.0))
    requests: set[asyncio.Task[tuple[Sample, ...]]] = field(default_factory=set)
    """For responses, under way."""
    probe: asyncio.Task[None] | None = None
    """The last question how it is."""
    probed: float = 0.0
    """When it was put."""


class EngineBook:
    """Engines by instance id. `aim` says which are mine; `views` is what `decide` sees."""

    def __init__(
        self,
        changes: Changes,
        timeout_s: float,
        connect: Callable[..., EngineClient] = EngineClient,
        *,
        clock: Clock | None = None,
        patience: EnginePatience | None = None,
        metrics: Metrics | None = None,
        told_every: int | None = None,
    ) -> None:
        self._changes = changes
        self._told_every = told_every
        self._timeout_s = timeout_s
        self._connect = connect
        self._clock = clock or SystemClock()
        self._patience = patience or EnginePatience(request_s=timeout_s)
        self._metrics = metrics or Metrics()
        self._lines: dict[str, _Line] = {}
        self._beside: set[asyncio.Task[None]] = set()
        """Aborts and probes."""
        self._requests = itertools.count()
        self._looked = -LOOK_S

    @property
    def views(self) -> dict[str, EngineView]:
        """What is known of my engines."""
        return {instance: line.view for instance, line in self._lines.items()}

    async def aim(self, workers: Mapping[str, WorkerRecord]) -> None:
        """These are mine from now on."""
        for instance in list(self._lines):
            if instance not in workers or workers[instance].address != self._lines[instance].view.address:
                line = self._lines.pop(instance)
                _leave(line)
                await line.client.close()
                self._changes.notify()
        for instance, worker in workers.items():
            if instance not in self._lines:
                client = self._connect(f"http://{worker.address}", timeout_s=self._timeout_s)
                now = self._clock.monotonic()
                view = EngineView(instance, worker.address, None)
                self._lines[instance] = _Line(client, view, pulse=Pulse(now))
                self._changes.notify()

    async def close(self) -> None:
        """Close all connections."""
        await self.aim({})

    async def publish(self, instance: str, version: Version, folder: Path) -> None:
        """Bring one engine to `version`. Raises EngineError.

        Of one that is met, was distrusted or has failed it is found out first what it serves: a peer may have brought it there.
        """
        line = self._lines.get(instance)
        if line is None:
            # It may have ended, or become a peer's, between the decision and the deed.
            raise EngineUnreachable(f"{instance} is not connected", fix="Look again")
        line.coming = version
        asked = self._clock.monotonic()
        try:
            if line.view.version is None and await line.client.served() == version:
                # Whoever brought it there may have died before it let the engine go on; going on twice does no harm.
                await line.client.resume()
            else:
                await line.client.update_weights(str(folder), version)
            line.view = replace(line.view, version=version, trouble="")
            line.pulse = line.pulse.answers(self._clock.monotonic())
        except EngineError as error:
            # What it serves now is anybody's guess: it is asked, and let go on, when this is tried again.
            line.view = replace(line.view, version=None, trouble=error.what)
            if isinstance(error, EngineUnreachable):
                line.pulse = line.pulse.in_vain(asked)
                self._looked = -LOOK_S  # that it is silent is seen before the next try is decided on
            raise
        finally:
            line.coming = None
            self._changes.notify()

    def distrust(self, instance: str) -> None:
        """Nothing is known of the engine any more; it is asked, and brought up to date, before it is used again."""
        if instance in self._lines:
            self._lines[instance].view = replace(self._lines[instance].view, version=None)
            self._changes.notify()

    def look_after(self) -> None:
        """Look how everybody is; leave who is silent, and ask on. Called at each look by whoever drives the job."""
        now = self._clock.monotonic()
        if now < self._looked + LOOK_S:
            return
        self._looked = now
        for instance, line in self._lines.items():
            if line.coming is not None:
                continue  # bringing it weights has a limit of its own
            busy = bool(line.requests)
            line.pulse = line.pulse.look(self._patience, now, busy=busy)
            verdict = line.pulse.verdict(self._patience, now)
            view = replace(
                line.view,
                version=line.view.version if verdict is Verdict.WELL else None,
                silent=verdict is not Verdict.WELL,
                hung=verdict is Verdict.HUNG,
                why=line.pulse.why(self._patience, now),
            )
            if verdict is not Verdict.WELL:
                _leave(line)
            if view != line.view:
                line.view = view
                self._changes.notify()
            if line.pulse.wants_probe(self._patience, now, line.probed, busy=busy) and (
                line.probe is None or line.probe.done()
            ):
                line.probed = now
                line.probe = self._do_beside(self._probe(line), f"probe {instance}")

    async def _probe(self, line: _Line) -> None:
        try:
            async with asyncio.timeout(self._patience.probe_s):
                await line.client.scheduler_state()
        except (EngineUnreachable, TimeoutError) as error:
            log.debug("%s: %s", line.client.base_url, error)
            return
        except EngineError as error:  # who refuses has answered
            log.debug("%s: %s", line.client.base_url, error)
        line.pulse = line.pulse.answers(self._clock.monotonic())

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
        decode: Decode | None = None,
    ) -> tuple[Sample, ...]:
        """A sample for each prompt and its seed, on an engine that serves `version` (`controllers.routing`); waits for one.

        With `follow` it is whichever version is wanted when there is a seat, and tokens of newer ones may come after.
        Raises EngineError. An engine that does not answer is distrusted. With `decode`, the tokenizer's, another goes on with
        what that one has told (`controllers.continuing`); if it has told nothing, the request is for the caller to repeat.
        """
        every = told_every(params, self._told_every) if decode is not None else 0
        if decode is None or not every:
            return await self._generate(version, prompts, params, seeds, rid, follow, None)
        responses = Responses(prompts, params, seeds, decode)
        while True:
            ask = responses.ask()
            growing = Growing(every, responses.grow)
            try:
                made = await self._generate(version, ask.prompts, ask.params, ask.seeds, rid, follow, growing)
            except EngineUnreachable as error:
                kept = responses.keep()
                if not kept:
                    raise
                self._metrics.kept_tokens.inc(kept)
                log.warning("%s; %d tokens that it had told are kept", error, kept)
                if responses.is_whole:
                    return responses.whole(())
            else:
                return responses.whole(made)

    async def _generate(
        self,
        version: Version,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams | Sequence[SamplingParams],
        seeds: Sequence[int],
        rid: str,
        follow: Following | None,
        growing: Growing | None,
    ) -> tuple[Sample, ...]:
        """By one engine. Raises EngineError."""
        instance, line = await self._seat(follow.wanted if follow is not None else lambda: version, len(seeds))
        if follow is not None:
            assert line.view.version is not None
            version = line.view.version
            follow.began(version)
        # No two requests are called the same: an abort of one that was given up must not end the one that repeats it.
        rid = f"{rid}/{next(self._requests)}"
        finished = False
        try:
            heard = None if growing is None else Growing(growing.every, _heard(line, growing, self._clock))
            asked = line.client.generate_each(prompts, params, seeds=seeds, rid=rid, growing=heard)
            samples = await counted(self._asked(instance, line, asked), self._metrics, self._clock)
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

    async def _asked(
        self, instance: str, line: _Line, request: Coroutine[Any, Any, tuple[Sample, ...]]
    ) -> tuple[Sample, ...]:
        """What `request` brings. Raises EngineUnreachable when the engine is left meanwhile."""
        task = asyncio.create_task(request, name=f"ask {instance}")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # heard, if nobody waits any more
        begun = self._clock.monotonic()
        if not line.requests:
            line.pulse = line.pulse.begins(begun)
        line.requests.add(task)
        try:
            await asyncio.wait({task})
        finally:
            line.requests.discard(task)
            task.cancel()
        if task.cancelled():
            raise EngineUnreachable(f"{instance} is left, for it answers nothing", fix="The request goes to another")
        try:
            samples = task.result()
        except EngineUnreachable:
            line.pulse = line.pulse.fails(self._patience, begun, self._clock.monotonic())
            raise
        line.pulse = line.pulse.responds(self._clock.monotonic())
        return samples

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

        self._do_beside(abort(), f"abort {rid}")

    def _do_beside(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task


def _heard(line: _Line, growing: Growing, clock: Clock) -> Callable[[int, Sample], None]:
    """Whoever tells of samples lives."""

    def tell(place: int, sample: Sample) -> None:
        line.pulse = line.pulse.answers(clock.monotonic())
        growing.tell(place, sample)

    return tell


def _leave(line: _Line) -> None:
    """Whoever waits for its responses goes to another."""
    for request in line.requests:
        request.cancel()
