"""One conversation of an agent with the policy, as one growing sequence of tokens. Pure.

The first question is rendered and tokenized whole. Each later one must hold what was said so far, word for word, and only what is
new is tokenized: the whole is rendered with a mark in the place of the last answer, and what the template writes behind the mark
stands behind the tokens that were generated. Those stay as the engine gave them. So the policy has always before it exactly what it is
trained on. A template that would write an earlier turn otherwise now (one that leaves out the thinking of turns that are past) is
not followed: what was said was said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from gcore.agents.api import Refused
from gcore.agents.asked import Question
from gcore.agents.words import Message, message_of
from gcore.environments.episode import Renderer, text_behind
from gcore.environments.transcript import Transcript
from gcore.errors import DataError
from gcore.prompts.long_texts import check_length
from gcore.types import FinishReason, Sample

T = TypeVar("T")


class ChatRenderer(Renderer, Protocol):
    """What the template makes of messages (`gcore.prompts.render.PromptRenderer`)."""

    def render(self, value: Sequence[Message], fields: Mapping[str, Any]) -> str:
        """All of them, with the opening of an answer."""
        ...

    def continued(self, messages: Sequence[Message], answer: int, fields: Mapping[str, Any], *, ended: bool) -> str:
        """What stands behind the answer at that place, up to the next."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a rendered text."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """What is new in a question, as tokens and as words."""

    ids: tuple[int, ...]
    text: str


class Dialogue:
    """Grows by `answered`; `shown` looks only."""

    def __init__(self, renderer: ChatRenderer, question: Question, room: int | None = None) -> None:
        """Of the first question, for which there is room for so many tokens. Raises Refused if the template or the tokenizer does not
        take it, TooLong if it is far too long."""
        self._renderer = renderer
        self._tools = question.tools
        self._messages: tuple[Message, ...] = ()
        self._ended = False
        self._whole = Transcript()
        self.before = self._taken(lambda: self._first(question, room))
        """The tokens of the first question."""
        if not self.before:
            raise Refused(400, "bad_messages", "the template makes nothing of the messages", param="messages")

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

    def goes_on(self, question: Question) -> bool:
        """Whether it holds all that was said so far, and more."""
        said = len(self._messages)
        return (
            question.tools == self._tools
            and len(question.messages) > said
            and question.messages[:said] == self._messages
        )

    def changed(self, question: Question) -> str:
        """Where it departs from what was said so far, for people."""
        if question.tools != self._tools:
            return "its tools are others than before"
        for number, (one, other) in enumerate(zip(question.messages, self._messages, strict=False)):
            if one != other:
                return f"message {number} was another before"
        return f"it has {len(question.messages)} messages, and {len(self._messages)} were there before"

    def shown(self, question: Question, room: int | None = None) -> Shown:
        """What a question that goes on adds, for which there is room for so many tokens. Raises Refused, TooLong."""
        if not self._messages:
            return Shown((), "")
        last = len(self._messages) - 1

        def added() -> Shown:
            text = self._renderer.continued(question.messages, last, self._fields, ended=self._ended)
            check_length(text, room, self._renderer.encode)
            ids = self._renderer.encode_behind(self.token_ids, text)
            return Shown(ids, text_behind(ids, self.token_ids, self._renderer))

        return self._taken(added)

    def answered(self, question: Question, shown: Shown, sample: Sample, text: str, answer: Message) -> None:
        """The policy was shown that, said `sample`, which reads `text`, and the agent was sent `answer`."""
        self._whole.observe(shown.ids, shown.text)
        self._whole.turn(sample, text)
        self._ended = sample.token_ids[-1:] == (self._renderer.eos_token_id,)
        self._messages = (*question.messages, message_of(answer, len(question.messages)))

    def text_of(self, sample: Sample, shown: Shown) -> str:
        """What `sample` says behind what is shown."""
        return text_behind(sample.token_ids, self.token_ids + shown.ids, self._renderer)

    def sample(self, finish_reason: FinishReason) -> Sample:
        """The whole, as it is trained. At least one turn."""
        return replace(self._whole.sample(finish_reason), prompt_ids=self.before)

    def _first(self, question: Question, room: int | None) -> tuple[int, ...]:
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
            raise Refused(400, "bad_messages", error.what, param="messages") from error
