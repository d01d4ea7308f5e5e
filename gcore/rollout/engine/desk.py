"""Between HTTP and the model's thread: turns checked requests into tasks, and deliveries into answers.

Lives on the event loop. What depends on the model (token ids, context, stop strings without a tokenizer) is checked here,
before anything reaches the thread. A request whose client has gone away is aborted.

Of a sample that streams only the newest delivery is kept, for it holds all that came before: a client that reads slowly
skips steps, and costs no memory that grows.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from gcore.clock import Clock
from gcore.errors import EngineError
from gcore.rollout.engine.answers import answer, cost, emptied
from gcore.rollout.engine.core import Core
from gcore.rollout.engine.gate import Gate
from gcore.rollout.engine.protocol import Asked, Generate, SamplingBody
from gcore.rollout.engine.runner import Runner
from gcore.rollout.engine.tasks import Delivery, Task, prompt_key
from gcore.rollout.engine.text import Text, cut_at

T = TypeVar("T")
BIG_ANSWER_TOKENS = 16_384
"""From so many on (or other entries of its lists), an answer is put together off the event loop."""


class _Arrivals:
    """The newest delivery of each of a request's samples, until it is taken."""

    def __init__(self) -> None:
        self._newest: dict[int, Delivery] = {}
        self._there = asyncio.Event()

    def put(self, delivery: Delivery) -> None:
        """Takes the place of an older one."""
        self._newest[delivery.number] = delivery
        self._there.set()

    async def take(self) -> list[Delivery]:
        """All that there are; waits for one."""
        await self._there.wait()
        self._there.clear()
        newest, self._newest = self._newest, {}
        return list(newest.values())


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A task, and what its answer needs. `name`: the request's own name for it, before it is numbered for `n`."""

    task: Task
    name: str
    params: SamplingBody
    asked: Asked
    since: float


class Desk:
    """Takes requests. `open` it before the first."""

    def __init__(self, core: Core, text: Text | None, *, clock: Clock, seeds: np.random.Generator) -> None:
        self._core = core
        self._text = text
        self.clock = clock
        self._seeds = seeds
        self._arrivals: dict[int, _Arrivals] = {}
        """By the task's number, while it is under way."""
        self._names: set[str] = set()
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: Runner | None = None
        self.gate = Gate(lambda: core.paused or bool(core.asleep))
        self.prompt_tokens = 0
        self.requests = 0

    def open(self, runner: Runner) -> None:
        """Called on the event loop that requests arrive on."""
        self._runner = runner
        self._loop = asyncio.get_running_loop()

    @property
    def runner(self) -> Runner:
        """The model's thread."""
        assert self._runner is not None
        return self._runner

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Called in the model's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._arrive, deliveries)

    def _arrive(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            arrivals = self._arrivals.get(delivery.number)
            if arrivals is not None:
                arrivals.put(delivery)
                if delivery.ending is not None:
                    del self._arrivals[delivery.number]

    async def perform(self, action: Callable[[], T]) -> T:
        """Carry out `action` between two steps."""
        return await asyncio.wrap_future(self.runner.perform(action))

    def encoded(self, request: Generate) -> Generate:
        """With tokens for texts. May be called from any thread: a long text takes seconds."""
        if (text := self._text) is None:
            return request
        return replace(
            request, prompts=tuple(list(text.encode(p)) if isinstance(p, str) else p for p in request.prompts)
        )

    def admit(self, request: Generate) -> list[_Ticket]:
        """The samples of an encoded request as tickets, prompt by prompt. Raises EngineError for what cannot be served."""
        pairs = list(zip(request.prompts, request.params, request.asked, strict=True))
        prompts = [self._tokens(prompt, params) for prompt, params, _ in pairs]
        names = request.rids or tuple(uuid.uuid4().hex for _ in prompts)
        self._check_names(set(names))
        return [
            ticket
            for tokens, (_, params, asked), name in zip(prompts, pairs, names, strict=True)
            for ticket in self._tickets(tokens, params, self._placed(asked, tokens), name, streams=request.stream)
        ]

    def _check_names(self, names: set[str]) -> None:
        if taken := self._names & names:
            raise EngineError(f"a request called {min(taken)!r} is under way", fix="Give each request a rid of its own")

    def _tickets(
        self, prompt: tuple[int, ...], params: SamplingBody, asked: Asked, name: str, *, streams: bool
    ) -> list[_Ticket]:
        model, now, key = self._core.model, self.clock.monotonic(), prompt_key(prompt)
        tickets = []
        for index in range(params.n):
            sampling = params.sampling(
                index=index,
                drawn_seed=int(self._seeds.integers(2**63)),
                end_tokens=model.end_tokens,
                room=self._core.longest - len(prompt),
                vocabulary=model.vocabulary,
                asked=asked,
            )
            rid = name if params.n == 1 else f"{name}_{index}"
            task = Task(self._next, rid, prompt, sampling, streams=streams and params.makes_tokens, key=key)
            self._next += 1
            tickets.append(_Ticket(task, name, params, asked, now))
        return tickets

    def _placed(self, asked: Asked, prompt: tuple[int, ...]) -> Asked:
        """Raises EngineError for log-probabilities that there are not."""
        start = asked.prompt_from
        if asked.top > self._core.model.vocabulary:
            raise EngineError(
                f"top_logprobs_num is {asked.top}, and the vocabulary has {self._core.model.vocabulary} tokens"
            )
        if start is not None and start > len(prompt):
            raise EngineError(f"logprob_start_len is {start}, and the prompt has {len(prompt)} tokens")
        return replace(asked, prompt_from=None) if start == len(prompt) else asked

    def _tokens(self, prompt: str | list[int], params: SamplingBody) -> tuple[int, ...]:
        model = self._core.model
        if self._text is None and (isinstance(prompt, str) or params.stop_strings):
            raise EngineError("the model folder has no tokenizer.json", fix="Send input_ids, and no stop strings")
        assert not isinstance(prompt, str)
        tokens = tuple(prompt)
        if not tokens:
            raise EngineError("the prompt has no tokens")
        wrong = next((token for token in (min(tokens), max(tokens)) if not 0 <= token < model.vocabulary), None)
        if wrong is not None:
            raise EngineError(f"token id {wrong} is not in the vocabulary of {model.vocabulary}")
        if len(tokens) >= model.context:
            raise EngineError(
                f"a prompt of {len(tokens)} tokens leaves no room in the context of {model.context} tokens"
            )
        if len(tokens) + (params.max_new_tokens or 0) > model.context:
            raise EngineError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens {params.max_new_tokens} exceed "
                f"the context of {model.context} tokens",
                fix="Shorten the prompt or lower max_new_tokens",
            )
        # Where there is no limit it is what the cache holds, and that must be one token at least.
        self._core.check(len(tokens), 1 if params.max_new_tokens is None else params.max_new_tokens)
        return tokens

    def _send(self, tickets: Sequence[_Ticket], arrivals: _Arrivals) -> None:
        tasks = [ticket.task for ticket in tickets]
        self._arrivals.update((task.number, arrivals) for task in tasks)
        self.requests += len(tasks)
        self.prompt_tokens += sum(len(task.prompt) for task in tasks)
        self.runner.perform(lambda: self._core.submit(tasks))

    def _take_back(self, tickets: Sequence[_Ticket]) -> None:
        """Whatever of these still runs has nobody who waits for it."""
        left = {t.task.number for t in tickets if self._arrivals.pop(t.task.number, None) is not None}
        if left:
            self.runner.perform(lambda: self._core.abort(lambda task: task.number in left))

    async def _deliveries(self, tickets: Sequence[_Ticket]) -> AsyncIterator[list[Delivery]]:
        """What arrives for these, until all have ended. Closing it takes back what still runs."""
        names = {ticket.name for ticket in tickets}
        # Again: of two that were admitted in one turn of the loop neither had its names yet.
        self._check_names(names)
        self._names |= names
        try:
            async with self.gate.passing():
                arrivals, left = _Arrivals(), len(tickets)
                self._send(tickets, arrivals)
                try:
                    while left:
                        arrived = await arrivals.take()
                        left -= sum(delivery.ending is not None for delivery in arrived)
                        yield arrived
                finally:
                    self._take_back(tickets)
        finally:
            self._names -= names

    async def answers(self, tickets: Sequence[_Ticket]) -> list[dict[str, Any]]:
        """Wait for all, and word the answers in order."""
        ended: dict[int, Delivery] = {}
        stream = self._deliveries(tickets)
        try:
            async for arrived in stream:
                ended.update((delivery.number, delivery) for delivery in arrived)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        now = self.clock.monotonic()

        def word() -> list[dict[str, Any]]:
            return [self._word(ticket, ended[ticket.task.number], now) for ticket in tickets]

        if sum(cost(ended[t.task.number], t.asked) for t in tickets) < BIG_ANSWER_TOKENS:
            return word()
        return await asyncio.to_thread(word)

    async def stream(self, tickets: Sequence[_Ticket]) -> AsyncIterator[list[dict[str, Any]]]:
        """Every sample as it grows, told by `index`; each answer holds all that there is so far.

        Of each the first token is told at once, then every `stream_interval`-th or later, and the end.
        """
        place = {ticket.task.number: i for i, ticket in enumerate(tickets)}
        told = [0] * len(tickets)
        stream = self._deliveries(tickets)
        try:
            async for arrived in stream:
                now = self.clock.monotonic()
                pairs = []
                for delivery in arrived:
                    i = place[delivery.number]
                    grown = len(delivery.tokens) - told[i]
                    if delivery.ending is not None or not told[i] or grown >= tickets[i].params.stream_interval:
                        told[i] += grown
                        pairs.append((i, delivery))

                def word(pairs: list[tuple[int, Delivery]] = pairs, now: float = now) -> list[dict[str, Any]]:
                    return [{**self._word(tickets[i], d, now), "index": i} for i, d in pairs]

                if sum(cost(d, tickets[i].asked) for i, d in pairs) < BIG_ANSWER_TOKENS:
                    yield word()
                else:
                    yield await asyncio.to_thread(word)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator

    def _word(self, ticket: _Ticket, delivery: Delivery, now: float) -> dict[str, Any]:
        if not ticket.params.makes_tokens:
            delivery = emptied(delivery)
        return answer(
            delivery,
            rid=ticket.task.rid,
            text=self._final_text(ticket.params, delivery),
            prompt=ticket.task.prompt,
            asked=ticket.asked,
            text_of=self._text_of,
            latency_s=now - ticket.since,
        )

    def _text_of(self, token: int) -> str:
        return "" if self._text is None else self._text.decode([token], skip_special_tokens=False)

    def _final_text(self, params: SamplingBody, delivery: Delivery) -> str:
        """The tokens' text, without the stop token or string that ended it (unless it is asked for)."""
        if self._text is None:
            return ""
        matched = None if delivery.ending is None or params.no_stop_trim else delivery.ending.matched
        tokens = delivery.tokens[:-1] if isinstance(matched, int) else delivery.tokens
        text = self._text.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        return cut_at(text, matched) if isinstance(matched, str) else text
