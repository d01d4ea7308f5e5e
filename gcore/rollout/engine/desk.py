"""Between HTTP and the model's thread: turns checked requests into tasks, and deliveries into answers.

Lives on the event loop. What depends on the model (token ids, context, stop strings without a tokenizer) is checked here,
before anything reaches the thread. A request whose client has gone away is aborted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gcore.clock import Clock
from gcore.errors import EngineError
from gcore.rollout.engine.answers import answer, cost, emptied
from gcore.rollout.engine.core import Core
from gcore.rollout.engine.post import Post
from gcore.rollout.engine.protocol import Asked, Generate, SamplingBody
from gcore.rollout.engine.tasks import Delivery, Task, prompt_key
from gcore.rollout.engine.text import Text, cut_at

BIG_ANSWER_TOKENS = 16_384
"""From so many on (or other entries of its lists), an answer is put together off the event loop."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A task, and what its answer needs. `name`: the request's own name for it, before it is numbered for `n`."""

    task: Task
    name: str
    params: SamplingBody
    asked: Asked
    since: float


class Desk(Post[Task, Delivery]):
    """Takes requests. `open` it before the first."""

    def __init__(self, core: Core, text: Text | None, *, clock: Clock, seeds: np.random.Generator) -> None:
        super().__init__(core, clock)
        self._core = core
        self._text = text
        self._seeds = seeds

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
        self.check_names(set(names))
        return [
            ticket
            for tokens, (_, params, asked), name in zip(prompts, pairs, names, strict=True)
            for ticket in self._tickets(tokens, params, self._placed(asked, tokens), name, streams=request.stream)
        ]

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
            task = Task(self.number(), rid, prompt, sampling, streams=streams and params.makes_tokens, key=key)
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

    def _deliveries(self, tickets: Sequence[_Ticket]) -> AsyncIterator[list[Delivery]]:
        return self.deliveries([ticket.task for ticket in tickets], {ticket.name for ticket in tickets})

    async def answers(self, tickets: Sequence[_Ticket]) -> list[dict[str, Any]]:
        """Wait for all, and word the answers in order."""
        ended = await self.ended([ticket.task for ticket in tickets], {ticket.name for ticket in tickets})
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
