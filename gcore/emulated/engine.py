"""An emulated engine in an event loop: requests in, answers out when the device says that they have ended.

What goes on in time is its slot's (`live_slot`), which it may share with others. What depends on the model is checked as the torch
engine's desk checks it. A change of weights waits for what runs unless the engine is paused (`gcore.rollout.engine.gate`),
and takes the time that the law says. One that sleeps takes requests and lets them wait; its weights cannot be changed then. Who asks for a stream hears
of responses as they grow and as they end. What an emulated engine cannot tell is refused in words (`checks`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gcore.clock import Clock
from gcore.emulated.checks import Model, tokens_of
from gcore.emulated.device import Device, PauseMode
from gcore.emulated.law import Timing
from gcore.emulated.live_slot import LiveSlot
from gcore.emulated.responses import Response, Voice, respond
from gcore.errors import EngineError
from gcore.rollout.engine.answers import answer, emptied
from gcore.rollout.engine.gate import Gate
from gcore.rollout.engine.params import SamplingBody
from gcore.rollout.engine.protocol import Asked, Generate
from gcore.rollout.engine.tasks import Delivery, Task, is_older
from gcore.rollout.engine.text import cut_at
from gcore.types import Version

LEAST_S = 0.05
"""Between two parts of a stream."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A task under way, and what its answer needs."""

    task: Task
    params: SamplingBody
    asked: Asked
    ended: asyncio.Future[Delivery]
    since: float


class EmulatedEngine:
    """One engine. `name` tells it from others, for its pace. `slot`: where it is resident, None: one of its own; `spans`: on which slots
    there. Belongs to the loop in which it is first asked."""

    def __init__(
        self,
        name: str,
        model: Model,
        timing: Timing,
        clock: Clock,
        *,
        rows: int,
        version: str,
        slot: LiveSlot | None = None,
        spans: tuple[str, ...] = ("",),
    ) -> None:
        self.name = name
        self.model = model
        self.model_path = model.path
        self.timing = timing
        self._clock = clock
        self._speedup = timing.law.speedup
        self._voice = Voice(timing.law, model.words, model.longest, model.verdict)
        self.device = Device(timing, self._response, rows=rows, version=version)
        self._slot = slot or LiveSlot(clock, timing.law.speedup)
        self._slot.add(self.device, self._deliver, spans)
        self.gate = Gate(lambda: self.device.still)
        self.requests = 0
        self.prompt_tokens = 0
        self._tickets: dict[int, Ticket] = {}
        self._names: set[str] = set()
        self._next = 0
        self._moving = asyncio.Lock()
        """Memory is given back or taken."""
        self._follow(version)

    def admit(self, request: Generate) -> list[Ticket]:
        """The samples of a request, prompt by prompt. Raises EngineError for what cannot be served."""
        names = request.rids or tuple(uuid.uuid4().hex for _ in request.prompts)
        if taken := self._names & set(names):
            raise EngineError(f"a request called {min(taken)!r} is under way", fix="Give each request a rid of its own")
        tickets = []
        for prompt, params, asked, name in zip(request.prompts, request.params, request.asked, names, strict=True):
            tokens = tokens_of(self.model, prompt, params, asked)
            for index in range(params.n):
                tickets.append(self._ticket(tokens, params, asked, name if params.n == 1 else f"{name}_{index}", index))
        return tickets

    async def answers(self, tickets: Sequence[Ticket]) -> list[dict[str, Any]]:
        """Wait for all, and word the answers in order. Cancelled, it takes back what still runs."""
        async with self._under_way(tickets):
            ended = await asyncio.gather(*(ticket.ended for ticket in tickets))
        return [self._word(ticket, delivery) for ticket, delivery in zip(tickets, ended, strict=True)]

    def advance(self) -> None:
        """Hand out what has ended by now."""
        self._slot.do(self.device, self.device.advance)

    async def stream(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        """The same as a stream: each as it ends, told by `index`, and before that every `stream_interval` tokens what there is of it."""
        async with self._under_way(tickets):
            waiting = {ticket.ended: place for place, ticket in enumerate(tickets)}
            told = [0] * len(tickets)
            while waiting:
                done, _ = await asyncio.wait(
                    waiting, timeout=self._grown_in(tickets), return_when=asyncio.FIRST_COMPLETED
                )
                for place, future in sorted((waiting.pop(future), future) for future in done):
                    yield {**self._word(tickets[place], future.result()), "index": place}
                self.advance()
                for place in waiting.values():
                    ticket = tickets[place]
                    part = self.device.so_far(ticket.task.number)
                    if part is not None and len(part.tokens) - told[place] >= ticket.params.stream_interval:
                        told[place] = len(part.tokens)
                        yield {**self._word(ticket, part), "index": place}

    def _grown_in(self, tickets: Sequence[Ticket]) -> float:
        """Seconds until some of these may have grown by as much as is told at once."""
        every = min(ticket.params.stream_interval for ticket in tickets)
        return max(every * self.device.step_s / self._speedup, LEAST_S)

    @contextlib.asynccontextmanager
    async def _under_way(self, tickets: Sequence[Ticket]) -> AsyncIterator[None]:
        names = {ticket.task.rid for ticket in tickets}
        async with self.gate.passing():
            self._names |= names
            self._tickets |= {ticket.task.number: ticket for ticket in tickets}
            self.requests += len(tickets)
            self.prompt_tokens += sum(len(ticket.task.prompt) for ticket in tickets)
            try:
                tasks = [ticket.task for ticket in tickets]
                self._slot.do(self.device, lambda now: self.device.submit(tasks, now))
                yield
            finally:
                self._names -= names
                left = {t.task.number for t in tickets if self._tickets.pop(t.task.number, None) is not None}
                if left:
                    self.abort(lambda task: task.number in left)

    def abort(self, unwanted: Callable[[Task], bool]) -> None:
        """End these now; they answer with the tokens they have."""
        self._slot.do(self.device, lambda now: self.device.abort(unwanted, now))

    def pause(self, mode: PauseMode) -> None:
        """Make no more tokens."""
        self._slot.do(self.device, lambda now: self.device.pause(mode, now))
        self.gate.look_again()

    def resume(self) -> None:
        """Go on."""
        self._slot.do(self.device, self.device.resume)

    async def release(self, tags: frozenset[str]) -> None:
        """Sleep. Raises EngineError while something runs."""
        async with self._moving:
            if self.device.running:
                raise EngineError("requests are running", fix="Abort or pause them first")
            # First, so that nothing begins while the memory is given back.
            self._slot.do(self.device, lambda now: self.device.release(tags, now))
            self.gate.look_again()
            await self.take(self.timing.sleep())

    async def wake(self, tags: frozenset[str]) -> None:
        """Wake up. Raises EngineError for what does not sleep."""
        async with self._moving:
            if not tags <= self.device.asleep:
                raise EngineError(f"{', '.join(sorted(tags - self.device.asleep))} was not released")
            await self.take(self.timing.wake())
            self._slot.do(self.device, lambda now: self.device.wake(tags, now))

    def told(self, step: int) -> None:
        """The job has come to that step. Only a judge needs to be told."""
        if self.model.verdict is not None:
            self.timing.step = step

    def gone(self) -> None:
        """It is no more on its slot. What it had under way never ends."""
        self._slot.remove(self.device)

    async def update(self, path: str, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve what lies in `path` from now on. Raises EngineError; then nothing has changed."""
        if abort:
            self.abort(lambda _: True)
        async with self.gate.changing():
            if "weights" in self.device.asleep:
                raise EngineError("the weights are released", fix="Call /resume_memory_occupation first")
            if version is not None and is_older(version, self.device.version):
                raise EngineError(f"version {version} is older than {self.device.version}, which is served")
            if flush and self.device.running:
                raise EngineError(
                    "requests hold the cache", fix="Retract or abort them first, or set flush_cache false"
                )
            await self.take(self.timing.publish())
            self.model_path = path
            self.rename(version if version is not None else self.device.version)

    def rename(self, version: str) -> None:
        """Call the weights so."""
        self._slot.do(self.device, lambda now: self.device.call_weights(version, now))
        self._follow(version)

    def _follow(self, version: str) -> None:
        """The policy's weights are of the step that they are called by. A judge's are not; it is told (`Timing.step`)."""
        if self.model.verdict is None:
            with contextlib.suppress(ValueError):
                self.timing.step = Version.parse(version).step

    async def take(self, emulated_s: float) -> None:
        """Let so many emulated seconds pass."""
        await self._clock.sleep(emulated_s / self._speedup)

    def now(self) -> float:
        """Emulated seconds."""
        return self._clock.monotonic() * self._speedup

    def _response(self, task: Task, version: str) -> Response:
        return respond(self._voice, task.prompt, task.sampling, version, self.timing.step)

    def _ticket(self, tokens: tuple[int, ...], params: SamplingBody, asked: Asked, rid: str, index: int) -> Ticket:
        words = self.model.words
        sampling = params.sampling(
            index=index,
            drawn_seed=uuid.uuid4().int >> 65,
            end_tokens=words.end_tokens,
            room=words.context - len(tokens),
            vocabulary=words.size,
            asked=asked,
        )
        task = Task(self._next, rid, tokens, sampling)
        self._next += 1
        ended: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        return Ticket(task, params, asked, ended, self._clock.monotonic())

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            ticket = self._tickets.pop(delivery.number, None)
            if ticket is not None and not ticket.ended.done():
                ticket.ended.set_result(delivery)

    def _word(self, ticket: Ticket, delivery: Delivery) -> dict[str, Any]:
        if not ticket.params.makes_tokens:
            delivery = emptied(delivery)
        return answer(
            delivery,
            rid=ticket.task.rid,
            text=self._said(ticket.params, delivery),
            prompt=ticket.task.prompt,
            asked=ticket.asked,
            text_of=lambda token: (
                "" if self.model.text is None else self.model.text.decode([token], skip_special_tokens=False)
            ),
            latency_s=self._clock.monotonic() - ticket.since,
        )

    def _said(self, params: SamplingBody, delivery: Delivery) -> str:
        text = self.model.text
        if text is None:
            return ""
        matched = None if delivery.ending is None or params.no_stop_trim else delivery.ending.matched
        tokens = delivery.tokens[:-1] if isinstance(matched, int) else delivery.tokens
        said = text.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        return cut_at(said, matched) if isinstance(matched, str) else said
