"""Answers the requests of one agent for one response, and records them as one training sample.

    limits       `agent.max_turns`, the policy's own tokens (`max_new_tokens`), all tokens after the first request
                 (`agent.max_tokens`). A request beyond a limit gets 429, and the response counts as truncated, whatever the
                 agent does then. The agent's reward still counts
    history      a request that does not continue the conversation is refused with 409. With `agent.history: last` it starts
                 a new conversation, and only the last conversation is trained. The limits on turns and on the policy's own
                 tokens apply to all conversations together, the limit on all tokens to each one
    long texts   are rendered and tokenized in a thread (`gcore.data.tokenizer`)
    time         the agent's time does not run while a request is being answered
    engines      if an engine fails, the agent gets 503, and the response is repeated from the beginning

One request at a time: a concurrent one is refused with 409. A client that retries because it did not receive the answer
gets the same answer. The caller passes the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import TextTooLong, check_length, run_by_size
from gcore.errors import DataError, GcoreError
from gcore.rollout.agents.api import AgentFault, AgentRequestRefused
from gcore.rollout.agents.chat_protocol import (
    ChatCompletion,
    ChatFinishReason,
    ChatRequest,
    Message,
    SamplingRules,
    format_answer,
    parse_message,
    parse_request,
)
from gcore.rollout.environments.episode import ShownTokens, Transcript, decode_suffix
from gcore.system.clock import Clock
from gcore.system.concurrency import wait_within
from gcore.types import FinishReason, Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DialogueDelta:
    """The part of a request that the conversation did not contain before, as tokens and as text."""

    ids: tuple[int, ...]
    text: str


class Dialogue:
    """One conversation of an agent with the policy, as one growing sequence of tokens.

    `answered` extends the conversation; `shown` does not change it.

    The first request is rendered and tokenized as a whole. Each later one must contain the conversation so far
    unchanged, and only the new part is tokenized: all messages are rendered with a mark in place of the last answer,
    and the text after the mark is appended to the generated tokens. These stay as the engine returned them. The policy
    therefore always sees exactly the tokens on which it is trained. If the template would now render an earlier turn
    differently (for example without the reasoning of past turns), the change is ignored.
    """

    def __init__(self, renderer: PromptRenderer, question: ChatRequest, room: int | None = None) -> None:
        """Start with the first request. `room`: maximum number of its tokens.

        Raises AgentRequestRefused if template or tokenizer refuse it, TextTooLong if it is far too long.
        """
        self._renderer = renderer
        self._tools = question.tools
        self._messages: tuple[Message, ...] = ()
        self._said: tuple[int, ...] = ()
        self._whole = Transcript()
        self.before = self._taken(lambda: self._first(question, room))
        """Tokens of the first request."""
        if not self.before:
            raise AgentRequestRefused(
                400, "bad_messages", "the chat template renders the messages to an empty text", param="messages"
            )

    @property
    def turns(self) -> int:
        """Number of answers so far."""
        return self._whole.turns

    @property
    def length(self) -> int:
        """Number of tokens after those of the first request: answers and later messages."""
        return len(self._whole.token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the conversation, including the first request."""
        return self.before + self._whole.token_ids

    def goes_on(self, question: ChatRequest) -> bool:
        """Whether the request continues the conversation: it contains all messages so far, and more."""
        said = len(self._messages)
        return (
            question.tools == self._tools
            and len(question.messages) > said
            and question.messages[:said] == self._messages
        )

    def changed(self, question: ChatRequest) -> str:
        """Say in a few words how the request differs from the conversation so far, for the error message."""
        if question.tools != self._tools:
            return "its tools differ"
        for number, (one, other) in enumerate(zip(question.messages, self._messages, strict=False)):
            if one != other:
                return f"message {number} differs"
        return f"it has {len(question.messages)} messages, but the conversation has {len(self._messages)}"

    def shown(self, question: ChatRequest, room: int | None = None) -> DialogueDelta:
        """Render and tokenize the new part of a request that continues the conversation.

        `room`: maximum number of its tokens. Raises AgentRequestRefused, TextTooLong.
        """
        if not self._messages:
            return DialogueDelta((), "")
        last = len(self._messages) - 1

        def added() -> DialogueDelta:
            text = self._renderer.continued(question.messages, last, self._fields, said=self._said)
            check_length(text, room, self._renderer.encode)
            ids = self._renderer.encode_behind(self.token_ids, text)
            return DialogueDelta(ids, decode_suffix(ids, self.token_ids, self._renderer))

        return self._taken(added)

    def answered(self, question: ChatRequest, shown: DialogueDelta, sample: Sample, text: str, answer: Message) -> None:
        """Extend the conversation by an answered request.

        `shown`: the request's new part. `sample`, `text`: the policy's answer as tokens and as text. `answer`: the
        message that is sent to the agent.
        """
        self._whole.observe(ShownTokens(shown.ids, shown.text, shown.ids))
        self._whole.turn(sample, text)
        self._said = sample.token_ids
        self._messages = (*question.messages, parse_message(answer, len(question.messages)))

    def text_of(self, sample: Sample, shown: DialogueDelta) -> str:
        """Decode `sample`, which was generated after the new part `shown`."""
        return decode_suffix(sample.token_ids, self.token_ids + shown.ids, self._renderer)

    def sample(self, finish_reason: FinishReason) -> Sample:
        """Return the whole conversation as a training sample. Needs at least one answer."""
        return replace(self._whole.sample(finish_reason), prompt_ids=self.before)

    def _first(self, question: ChatRequest, room: int | None) -> tuple[int, ...]:
        text = self._renderer.render(question.messages, self._fields)
        check_length(text, room, self._renderer.encode)
        return self._renderer.encode(text)

    @property
    def _fields(self) -> Mapping[str, Any]:
        return {"tools": list(self._tools)} if self._tools else {}

    def _taken(self, made: Callable[[], T]) -> T:
        try:
            return made()
        except DataError as error:
            raise AgentRequestRefused(400, "bad_messages", error.what, param="messages") from error


OVER = 429
"""HTTP status of a request beyond a limit of the response."""

_TOO_LONG = "with this request the response exceeds {} tokens (agent.max_tokens)"

Say = Callable[[tuple[int, ...], int, tuple[str, ...], int], Awaitable[Sample]]
"""Generates an answer with an engine.

Arguments: the tokens so far, the maximum number of new tokens, the stop texts, and the number of tokens that the policy
has already generated for this response.
"""


@dataclass(frozen=True, slots=True)
class DialogueLimits:
    """Limits of one response.

    `turns`: answers of the policy. `own`: generated tokens. `room`: all tokens after the first request. `context`:
    context length of the model. `own_s`: seconds of the agent's own time, without the time of the policy.
    """

    turns: int
    own: int
    room: int
    context: int | None
    own_s: float


class AgentSession:
    """The policy's side of one response of an agent: answers requests, enforces limits. Belongs to one event loop."""

    def __init__(
        self,
        renderer: PromptRenderer,
        say: Say,
        rules: SamplingRules,
        limits: DialogueLimits,
        clock: Clock,
        *,
        restarts: bool = False,
        stop: tuple[str, ...] = (),
        name: str = "",
        refused: Callable[[AgentRequestRefused], None] = lambda why: None,
    ) -> None:
        """`say` generates an answer with an engine. `rules`: what requests may ask for. `stop`: stop texts of the job.

        `restarts`: whether a request may start a new conversation (`agent.history: last`). `name`: prefix of
        completion ids. `refused` is called with each refusal that is not due to a limit.
        """
        self._renderer, self._say, self._rules, self._limits, self._clock = renderer, say, rules, limits, clock
        self._restarts, self._stop, self._name, self._refused = restarts, stop, name, refused
        self._dialogue: Dialogue | None = None
        self._turns, self._made = 0, 0
        self._last: tuple[ChatRequest, ChatCompletion] | None = None
        self._asking = False
        self._changed = asyncio.Event()
        self._own_s, self._since = 0.0, clock.monotonic()
        self.cut = False
        """Whether a limit was reached, so that the response counts as truncated."""
        self.failed: GcoreError | None = None
        """An error that is not the agent's fault and ends the response."""

    async def complete(self, raw: bytes, *, again: bool = False) -> tuple[ChatRequest, ChatCompletion]:
        """Answer a request with the body `raw`; returns the parsed request and the answer. Raises AgentRequestRefused.

        `again`: the client marks the request as a retry; if it equals the last one, it gets the same answer.
        """
        if self._asking:
            raise self._note_refusal(
                AgentRequestRefused(
                    409, "busy", "another request of this rollout is being answered; send one at a time"
                )
            )
        self._turn_clock(asking=True)
        try:
            return await self._complete(raw, again=again)
        except AgentRequestRefused as error:
            raise self._note_refusal(error) from error.__cause__
        except GcoreError as error:
            self.failed = self.failed or error
            raise AgentRequestRefused(503, "engine_failed", f"the policy is unavailable: {error.what}") from error
        finally:
            self._turn_clock(asking=False)

    def start(self) -> None:
        """Start to measure the agent's own time. Called when the agent gets a process."""
        self._own_s, self._since = 0.0, self._clock.monotonic()

    async def watch(self) -> NoReturn:
        """Wait until the response must end: raises AgentFault when the agent's time is over, or the error in `failed`."""
        while True:
            if self.failed is not None:
                raise self.failed
            left = self._limits.own_s - self._own_s - (self._clock.monotonic() - self._since)
            self._changed.clear()
            if self._asking:
                await self._changed.wait()
            elif left > 0:
                with suppress(TimeoutError):
                    await wait_within(self._changed.wait(), left, self._clock)
            else:
                raise AgentFault(
                    f"took longer than {self._limits.own_s:g} s without the policy's time",
                    where="agent.time_limit_s",
                    fix="Raise it, or make the agent faster",
                )

    @property
    def asked(self) -> bool:
        """Whether the policy has answered at least once."""
        return self._dialogue is not None

    def sample(self) -> Sample:
        """Return the last conversation as a training sample. Needs at least one answer."""
        assert self._dialogue is not None
        reason: FinishReason = "length" if self.cut else "stop"
        return self._dialogue.sample(reason)

    async def _complete(self, raw: bytes, *, again: bool) -> tuple[ChatRequest, ChatCompletion]:
        question = parse_request(raw, self._rules)
        if again and self._last is not None and self._last[0] == question:
            return self._last
        dialogue, shown = await run_by_size(len(raw), lambda: self._placed(question))
        left = self._left(dialogue, shown)
        most = left if question.most is None else min(left, question.most)
        stop = tuple(dict.fromkeys((*self._stop, *question.stop)))
        sample = await self._say(dialogue.token_ids + shown.ids, most, stop, self._made)
        text = dialogue.text_of(sample, shown)
        said, stopped = _until(text, stop)
        self._turns += 1
        self._made += len(sample.token_ids)
        answer = format_answer(said, f"call-{self._turns}", tools=bool(question.tools))
        tokens_in = len(dialogue.token_ids) + len(shown.ids)
        dialogue.answered(question, shown, sample, text, answer)
        is_long = sample.finish_reason == "length" and not stopped
        self.cut = self.cut or (is_long and most == left)
        finish: ChatFinishReason = "length" if is_long else "tool_calls" if "tool_calls" in answer else "stop"
        name, made_at = f"chatcmpl-{self._name}-{self._turns}", int(self._clock.wall())
        completion = ChatCompletion(name, question.model, made_at, answer, finish, tokens_in, len(sample.token_ids))
        self._dialogue, self._last = dialogue, (question, completion)
        return self._last

    def _placed(self, question: ChatRequest) -> tuple[Dialogue, DialogueDelta]:
        """Return the conversation that the request continues or begins, and the request's new part.

        Raises AgentRequestRefused. Changes no state, because it may run in a thread.
        """
        now, room = self._dialogue, self._limits.room
        if now is not None and now.goes_on(question):
            try:
                return now, now.shown(question, room - now.length)
            except TextTooLong:
                raise _over(_TOO_LONG.format(room)) from None
        if now is not None and not self._restarts:
            raise AgentRequestRefused(
                409,
                "history_changed",
                f"the request does not continue the conversation: {now.changed(question)}; send all earlier messages "
                "unchanged, followed by new ones, or set agent.history: last",
                param="messages",
            )
        context = self._limits.context
        try:
            begun = Dialogue(self._renderer, question, None if context is None else context - room)
        except TextTooLong as error:
            raise self._unheld(str(error)) from None
        if context is not None and len(begun.before) + room > context:
            raise self._unheld(f"{len(begun.before)} tokens")
        return begun, DialogueDelta((), "")

    def _unheld(self, has: str) -> AgentRequestRefused:
        return AgentRequestRefused(
            400,
            "context_length_exceeded",
            f"the first request has {has}; with {self._limits.room} tokens for the response (agent.max_tokens) it exceeds "
            f"the model's context of {self._limits.context} tokens",
            param="messages",
        )

    def _left(self, dialogue: Dialogue, shown: DialogueDelta) -> int:
        """Number of tokens that the policy may still generate. Raises AgentRequestRefused if there are none."""
        limits = self._limits
        why = ""
        if self._turns >= limits.turns:
            why = f"the policy has answered {self._turns} times, the maximum (agent.max_turns)"
        elif self._made >= limits.own:
            why = f"the policy has generated {self._made} tokens, the maximum (rollout.max_new_tokens)"
        elif dialogue.length + len(shown.ids) >= limits.room:
            why = _TOO_LONG.format(limits.room)
        if why:
            raise _over(why)
        return min(limits.own - self._made, limits.room - dialogue.length - len(shown.ids))

    def _note_refusal(self, why: AgentRequestRefused) -> AgentRequestRefused:
        if why.status == OVER:
            self.cut = True
        else:
            self._refused(why)
        return why

    def _turn_clock(self, *, asking: bool) -> None:
        now = self._clock.monotonic()
        if asking:
            self._own_s += now - self._since
        self._since, self._asking = now, asking
        self._changed.set()


def _over(why: str) -> AgentRequestRefused:
    return AgentRequestRefused(OVER, "rollout_limit", f"the response has reached a limit: {why}")


def _until(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Cut `text` before its first stop text; also return whether it contains one."""
    ends = [at for one in stop if (at := text.find(one)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
