"""One response as the policy's side of it sees it: the agent's questions, one after the other, and what becomes of them.

    limits       `agent.max_turns`, the policy's own tokens (`max_new_tokens`), all tokens behind the first question
                 (`agent.max_tokens`). Who asks beyond one is told so with 429, and the response is one that was cut off, whatever the
                 agent does then. What the agent returns counts all the same
    history      a question that does not go on with what was said is refused with 409; with `agent.history: last` it begins
                 a new conversation, and the response is the last one. Turns and the policy's own tokens count over all of them,
                 all tokens in each
    long texts   are rendered and tokenized in a thread (`gcore.data.tokenizer`)
    time         runs while no question is being answered: how long engines take is not the agent's doing
    engines      one that fails is the production's business: the agent is told 503, and the response is made anew from the
                 beginning

One question at a time: a second one meanwhile is refused with 409. A client that asks again because it did not hear the answer
is told the same answer. Asks its engine through its caller.
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
from gcore.rollout.environments.episode import Transcript, decode_suffix
from gcore.system.clock import Clock
from gcore.system.concurrency import wait_within
from gcore.types import FinishReason, Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DialogueDelta:
    """What is new in a question, as tokens and as words."""

    ids: tuple[int, ...]
    text: str


class Dialogue:
    """One conversation of an agent with the policy, as one growing sequence of tokens. Grows by `answered`; `shown` looks only.

    The first question is rendered and tokenized whole. Each later one must hold what was said so far, word for word,
    and only what is new is tokenized: the whole is rendered with a mark in the place of the last answer, and what the
    template writes behind the mark stands behind the tokens that were generated. Those stay as the engine gave them.
    So the policy has always before it exactly what it is trained on. A template that would write an earlier turn
    otherwise now (one that leaves out the thinking of turns that are past) is not followed: what was said was said.
    """

    def __init__(self, renderer: PromptRenderer, question: ChatRequest, room: int | None = None) -> None:
        """Of the first question, for which there is room for so many tokens. Raises AgentRequestRefused if the template or the tokenizer does not
        take it, TextTooLong if it is far too long."""
        self._renderer = renderer
        self._tools = question.tools
        self._messages: tuple[Message, ...] = ()
        self._said: tuple[int, ...] = ()
        self._whole = Transcript()
        self.before = self._taken(lambda: self._first(question, room))
        """The tokens of the first question."""
        if not self.before:
            raise AgentRequestRefused(
                400, "bad_messages", "the template makes nothing of the messages", param="messages"
            )

    @property
    def turns(self) -> int:
        """Answers so far."""
        return self._whole.turns

    @property
    def length(self) -> int:
        """Tokens behind the first question."""
        return len(self._whole.token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens."""
        return self.before + self._whole.token_ids

    def goes_on(self, question: ChatRequest) -> bool:
        """Whether it holds all that was said so far, and more."""
        said = len(self._messages)
        return (
            question.tools == self._tools
            and len(question.messages) > said
            and question.messages[:said] == self._messages
        )

    def changed(self, question: ChatRequest) -> str:
        """Where it departs from what was said so far, for people."""
        if question.tools != self._tools:
            return "its tools are others than before"
        for number, (one, other) in enumerate(zip(question.messages, self._messages, strict=False)):
            if one != other:
                return f"message {number} was another before"
        return f"it has {len(question.messages)} messages, and {len(self._messages)} were there before"

    def shown(self, question: ChatRequest, room: int | None = None) -> DialogueDelta:
        """What a question that goes on adds, for which there is room for so many tokens. Raises AgentRequestRefused, TextTooLong."""
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
        """The policy was shown that, said `sample`, which reads `text`, and the agent was sent `answer`."""
        self._whole.observe(shown.ids, shown.text)
        self._whole.turn(sample, text)
        self._said = sample.token_ids
        self._messages = (*question.messages, parse_message(answer, len(question.messages)))

    def text_of(self, sample: Sample, shown: DialogueDelta) -> str:
        """What `sample` says behind what is shown."""
        return decode_suffix(sample.token_ids, self.token_ids + shown.ids, self._renderer)

    def sample(self, finish_reason: FinishReason) -> Sample:
        """The whole, as it is trained. At least one turn."""
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
"""The status of a question beyond a limit."""

_TOO_LONG = "with this question the response has more than {} tokens (agent.max_tokens)"

Say = Callable[[tuple[int, ...], int, tuple[str, ...], int], Awaitable[Sample]]
"""One answer of the policy: to these tokens, of so many at most, to one of these texts, behind so many that it made before."""


@dataclass(frozen=True, slots=True)
class DialogueLimits:
    """What one response may take. `own`: tokens that the policy makes; `room`: all behind the first question; `context`: of the
    model; `own_s`: seconds of the agent's own."""

    turns: int
    own: int
    room: int
    context: int | None
    own_s: float


class AgentSession:
    """One response. One event loop."""

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
        """`restarts`: with `history: last`; `stop`: of the job; `name`: what completions are called; `refused` is told of refusals."""
        self._renderer, self._say, self._rules, self._limits, self._clock = renderer, say, rules, limits, clock
        self._restarts, self._stop, self._name, self._refused = restarts, stop, name, refused
        self._dialogue: Dialogue | None = None
        self._turns, self._made = 0, 0
        self._last: tuple[ChatRequest, ChatCompletion] | None = None
        self._asking = False
        self._changed = asyncio.Event()
        self._own_s, self._since = 0.0, clock.monotonic()
        self.cut = False
        """Whether a limit was met."""
        self.failed: GcoreError | None = None
        """Why it cannot go on, through no fault of the agent's."""

    async def complete(self, raw: bytes, *, again: bool = False) -> tuple[ChatRequest, ChatCompletion]:
        """The answer to a request's body. `again`: the client says that it asks for the second time. Raises AgentRequestRefused."""
        if self._asking:
            raise self._told(
                AgentRequestRefused(
                    409, "busy", "a question is being answered; one at a time, for they are one sequence"
                )
            )
        self._turn_clock(asking=True)
        try:
            return await self._complete(raw, again=again)
        except AgentRequestRefused as error:
            raise self._told(error) from error.__cause__
        except GcoreError as error:
            self.failed = self.failed or error
            raise AgentRequestRefused(503, "engine_failed", f"the policy cannot be asked now: {error.what}") from error
        finally:
            self._turn_clock(asking=False)

    def start(self) -> None:
        """The agent's time begins."""
        self._own_s, self._since = 0.0, self._clock.monotonic()

    async def watch(self) -> NoReturn:
        """Until it cannot go on: raises AgentFault when the agent's time is over, and why it has failed if it has."""
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
                    f"took longer than {self._limits.own_s:g} s by itself",
                    where="agent.time_limit_s",
                    fix="Raise it, or make the agent quicker",
                )

    @property
    def asked(self) -> bool:
        """Whether the policy has said anything."""
        return self._dialogue is not None

    def sample(self) -> Sample:
        """The response. At least one answer."""
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
        """The conversation that it belongs to, and what it adds. Raises AgentRequestRefused. Changes nothing: it may run in a thread."""
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
                f"the question does not go on with what was said before: {now.changed(question)}; send all messages as they were "
                "sent and answered, with new ones behind them, or set agent.history: last",
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
            f"the first question has {has}, and with {self._limits.room} for the response (agent.max_tokens) the model's context of "
            f"{self._limits.context} does not hold it",
            param="messages",
        )

    def _left(self, dialogue: Dialogue, shown: DialogueDelta) -> int:
        """Tokens that the policy may still make. Raises AgentRequestRefused if there are none."""
        limits = self._limits
        why = ""
        if self._turns >= limits.turns:
            why = f"the policy has answered {self._turns} times, as often as it may (agent.max_turns)"
        elif self._made >= limits.own:
            why = f"the policy has made {self._made} tokens, as many as it may (rollout.max_new_tokens)"
        elif dialogue.length + len(shown.ids) >= limits.room:
            why = _TOO_LONG.format(limits.room)
        if why:
            raise _over(why)
        return min(limits.own - self._made, limits.room - dialogue.length - len(shown.ids))

    def _told(self, why: AgentRequestRefused) -> AgentRequestRefused:
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
    return AgentRequestRefused(OVER, "rollout_limit", f"the response is over: {why}")


def _until(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """What an agent is sent of `text`: what stands before the first text that ends an answer, and whether there is one."""
    ends = [at for one in stop if (at := text.find(one)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
