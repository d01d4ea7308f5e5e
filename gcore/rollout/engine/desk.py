"""Between HTTP and the model's thread: turns checked requests into tasks, and deliveries into answers.

Lives on the event loop. What depends on the model (token ids, context, stop strings without a tokenizer) is checked here,
before anything reaches the thread. A request whose client has gone away is aborted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from gcore.clock import Clock
from gcore.errors import EngineError
from gcore.rollout.engine.core import Core
from gcore.rollout.engine.protocol import GenerateBody, SamplingBody, answer
from gcore.rollout.engine.runner import Runner
from gcore.rollout.engine.tasks import Delivery, Task
from gcore.rollout.engine.text import Text, cut_at

T = TypeVar("T")
BIG_ANSWER_TOKENS = 16_384
"""From so many tokens on, an answer is put together off the event loop."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A task under way, and what its answer needs."""

    task: Task
    params: SamplingBody
    with_logprobs: bool
    since: float
    arrivals: asyncio.Queue[Delivery]


class Desk:
    """Takes requests. Set `runner` before the first."""

    def __init__(self, core: Core, text: Text | None, *, clock: Clock, seeds: np.random.Generator) -> None:
        self._core = core
        self._text = text
        self._clock = clock
        self._seeds = seeds
        self._tickets: dict[int, _Ticket] = {}
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: Runner | None = None
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
            ticket = self._tickets.get(delivery.number)
            if ticket is not None:
                ticket.arrivals.put_nowait(delivery)

    async def perform(self, action: Callable[[], T]) -> T:
        """Carry out `action` between two steps."""
        return await asyncio.wrap_future(self.runner.perform(action))

    def admit(self, body: GenerateBody) -> list[_Ticket]:
        """The request's samples as tickets, prompt by prompt. Raises EngineError for what cannot be served."""
        params, logprobs = body.params, body.logprobs
        prompts = [self._tokens(prompt, p) for prompt, p in zip(body.prompts, params, strict=True)]
        rids = _rids(body)
        tickets = []
        for prompt, p, with_logprobs, rid in zip(prompts, params, logprobs, rids, strict=True):
            for index in range(p.n):
                drawn = int(self._seeds.integers(2**63))
                sampling = p.sampling(index=index, drawn_seed=drawn, end_tokens=self._core.model.end_tokens)
                name = rid if p.n == 1 else f"{rid}_{index}"
                task = Task(self._next, name, prompt, sampling, streams=body.stream)
                self._next += 1
                tickets.append(_Ticket(task, p, with_logprobs, self._clock.monotonic(), asyncio.Queue()))
        return tickets

    def _tokens(self, prompt: str | list[int], params: SamplingBody) -> tuple[int, ...]:
        model = self._core.model
        if self._text is None and (isinstance(prompt, str) or params.stop_strings):
            raise EngineError("the model folder has no tokenizer.json", fix="Send input_ids, and no stop strings")
        if isinstance(prompt, str):
            assert self._text is not None
            tokens = self._text.encode(prompt)
        else:
            tokens = tuple(prompt)
        if not tokens:
            raise EngineError("the prompt has no tokens")
        highest = max(*tokens, *(params.stop_token_ids or ()), 0)
        if highest >= model.vocabulary:
            raise EngineError(f"token id {highest} is not in the vocabulary of {model.vocabulary}")
        if len(tokens) + params.max_new_tokens > model.context:
            raise EngineError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens {params.max_new_tokens} exceed "
                f"the context of {model.context} tokens",
                fix="Shorten the prompt or lower max_new_tokens",
            )
        return tokens

    def _send(self, tickets: Sequence[_Ticket]) -> None:
        tasks = [ticket.task for ticket in tickets]
        self._tickets.update((ticket.task.number, ticket) for ticket in tickets)
        self.requests += len(tasks)
        self.prompt_tokens += sum(len(task.prompt) for task in tasks)
        self.runner.perform(lambda: self._core.submit(tasks))

    def _take_back(self, tickets: Sequence[_Ticket]) -> None:
        """Whatever of these still runs has nobody who waits for it."""
        left = {t.task.number for t in tickets if self._tickets.pop(t.task.number, None) is not None}
        if left:
            self.runner.perform(lambda: self._core.abort(lambda task: task.number in left))

    async def answers(self, tickets: Sequence[_Ticket]) -> list[dict[str, Any]]:
        """Wait for all, and word the answers in order."""
        self._send(tickets)
        try:
            deliveries = []
            for ticket in tickets:
                deliveries.append(await ticket.arrivals.get())
                del self._tickets[ticket.task.number]
        finally:
            self._take_back(tickets)
        pairs = list(zip(tickets, deliveries, strict=True))
        now = self._clock.monotonic()
        if sum(len(d.tokens) for d in deliveries) < BIG_ANSWER_TOKENS:
            return [self._word(t, d, now) for t, d in pairs]
        return await asyncio.to_thread(lambda: [self._word(t, d, now) for t, d in pairs])

    async def stream(self, tickets: Sequence[_Ticket]) -> AsyncIterator[dict[str, Any]]:
        """Every sample as it grows; `index` tells them apart. Each answer holds all that there is so far."""
        merged: asyncio.Queue[Delivery] = asyncio.Queue()
        merging = [_Ticket(t.task, t.params, t.with_logprobs, t.since, merged) for t in tickets]
        index = {ticket.task.number: i for i, ticket in enumerate(merging)}
        self._send(merging)
        left = len(merging)
        try:
            while left:
                delivery = await merged.get()
                i = index[delivery.number]
                if delivery.ending is not None:
                    left -= 1
                    del self._tickets[delivery.number]
                yield {**self._word(merging[i], delivery, self._clock.monotonic()), "index": i}
        finally:
            self._take_back(merging)

    def _word(self, ticket: _Ticket, delivery: Delivery, now: float) -> dict[str, Any]:
        return answer(
            delivery,
            rid=ticket.task.rid,
            text=self._final_text(ticket.params, delivery),
            prompt_tokens=len(ticket.task.prompt),
            with_logprobs=ticket.with_logprobs,
            latency_s=now - ticket.since,
        )

    def _final_text(self, params: SamplingBody, delivery: Delivery) -> str:
        """The tokens' text, without the stop token or string that ended it."""
        if self._text is None:
            return ""
        matched = None if delivery.ending is None else delivery.ending.matched
        tokens = delivery.tokens[:-1] if isinstance(matched, int) else delivery.tokens
        text = self._text.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        return cut_at(text, matched) if isinstance(matched, str) else text


def _rids(body: GenerateBody) -> list[str]:
    """As SGLang names them: a list as it is, one name numbered through a batch, none made up."""
    if isinstance(body.rid, list):
        return body.rid
    if body.rid is None:
        return [uuid.uuid4().hex for _ in range(body.batch_size)]
    return [f"{body.rid}_{i}" for i in range(body.batch_size)] if body.is_batch else [body.rid]
