"""From a prompt field to the text and the tokens that the model is shown.

With `chat` a prompt is put into a chat template, with the opening of the assistant's turn; a string counts as one message
of the user. Without it the string is the text. The result agrees with `AutoTokenizer.apply_chat_template(messages, tools=...,
add_generation_prompt=True)` and `AutoTokenizer(text)`, but for the clock that templates do not get here
(`gcore.data.templates`).

A template writes its own special tokens, so the tokenizer adds none to what it wrote: a leading token is never there twice.
A source's system message goes before messages that have none of their own; an entry that begins with one keeps it. It does
not cut: a prompt that is too long is an error, or filtered (`gcore.data.stream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from gcore.data.templates import (
    FOREIGN_FAILURES,
    ToolDefinitions,
    compile_template,
    read_template,
    read_tools,
    template_of_model,
    tools_of_entry,
)
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import DataError

Messages = Sequence[Mapping[str, Any]]
SYSTEM_ROLES = ("system", "developer")

_ANSWER = "\ue000answer\ue000"
"""Stands for an answer in a template: no text has it."""

_CONTEXT = 16
"""Tokens in front of a text that is encoded behind them."""

_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a source shows messages. `template`: without tools; `tool_template`: with them, often the same."""

    template: jinja2.Template
    tool_template: jinja2.Template
    system: str = ""
    tools: ToolDefinitions = ()

    @classmethod
    def load(
        cls, tokenizer: ModelTokenizer, model_dir: Path, *, template: str | None, system: str | None, tools: str | None
    ) -> ChatForm:
        """`template` and `tools` are files, in place of the model's template and of none. Raises DataError."""
        definitions = () if tools is None else read_tools(Path(tools))
        if template is not None:
            own = compile_template(read_template(Path(template)), template)
            return cls(own, own, system or "", definitions)
        plain = compile_template(*template_of_model(model_dir, tokenizer.settings, for_tools=False))
        with_tools = compile_template(*template_of_model(model_dir, tokenizer.settings, for_tools=True))
        return cls(plain, with_tools, system or "", definitions)


class PromptRenderer:
    """Renders, encodes and decodes for one source. Stateless; may be used from several threads."""

    def __init__(self, tokenizer: ModelTokenizer, form: ChatForm | None, *, where: str) -> None:
        self.tokenizer = tokenizer
        self._form = form
        self._where = where

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        chat: bool,
        template: str | None = None,
        system: str | None = None,
        tools: str | None = None,
        tokenizer: ModelTokenizer | None = None,
    ) -> PromptRenderer:
        """For a Hugging Face model folder; `tokenizer`: that of the folder, if it is loaded already.

        Raises DataError: no such model, no chat template for `chat`, files that cannot be read or are not what they
        should be, and whatever only a chat template can show without one.
        """
        folder = Path(model_dir)
        tokenizer = tokenizer or ModelTokenizer.load(folder)
        if chat:
            form = ChatForm.load(tokenizer, folder, template=template, system=system, tools=tools)
            return cls(tokenizer, form, where=str(folder))
        for name, given in (("template", template), ("system", system), ("tools", tools)):
            if given:
                raise DataError(
                    f"`{name}` is given, and the prompts are shown as plain text",
                    fix=f"Set chat: true there or model.chat: true, or give `{name}` only to sources that chat",
                )
        return cls(tokenizer, None, where=str(folder))

    @property
    def chat(self) -> bool:
        """Whether prompts go through a chat template."""
        return self._form is not None

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a response, if the tokenizer names one."""
        return self.tokenizer.eos_token_id

    @property
    def max_length(self) -> int | None:
        """The model's context, in tokens; None if its configuration does not say."""
        return self.tokenizer.max_length

    def render(self, value: str | Messages, fields: Mapping[str, Any] | None = None) -> str:
        """The text that the model is shown for a prompt field of the entry `fields`. Raises DataError."""
        form = self._form
        if form is None:
            if isinstance(value, str):
                return value
            raise DataError(
                "the prompt is a list of chat messages, and the job shows prompts as plain text",
                where=self._where,
                fix="Set model.chat: true, or write prompts as strings",
            )
        tools = tools_of_entry(fields or {}, form.tools)
        template = form.tool_template if tools else form.template
        try:
            return template.render(
                messages=_messages(value, form.system),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=True,
                **self.tokenizer.special_tokens,
            )
        except FOREIGN_FAILURES as error:
            raise DataError(
                f"the chat template does not take the prompt ({type(error).__name__}: {error})",
                where=self._where,
                fix="Change the messages, or the template",
            ) from error

    def behind(self, messages: Messages, fields: Mapping[str, Any], *, ended: bool) -> str:
        """What the template writes between an answer of the assistant and its next one, if `messages` come between them.

        `ended`: the answer has its end token already. Raises DataError.
        """
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *messages]
        _, found, rest = self.render(asked, fields).rpartition(_ANSWER)
        if not found:
            raise DataError("the chat template leaves an answer out", where=self._where, fix="Change the template")
        end = self.tokenizer.special_tokens.get("eos_token")
        return rest.removeprefix(end) if ended and end is not None else rest

    def continued(self, messages: Messages, answer: int, fields: Mapping[str, Any], *, ended: bool) -> str:
        """What the template writes behind the assistant's message at place `answer`, up to the opening of the next answer.

        `ended`: the answer has its end token already. Raises DataError, also for a template that does not show where that is.
        """
        asked = [*messages[:answer], {"role": "assistant", "content": _ANSWER}, *messages[answer + 1 :]]
        _, *rest = self.render(asked, fields).split(_ANSWER)
        if len(rest) != 1:
            how = "leaves out" if not rest else "writes more than once"
            raise DataError(
                f"what stands behind an answer cannot be told: the chat template {how} what the assistant said last",
                where=self._where,
                fix="Change the template",
            )
        end = self.tokenizer.special_tokens.get("eos_token")
        return rest[0].removeprefix(end) if ended and end is not None else rest[0]

    def encode_behind(self, before: Sequence[int], text: str) -> tuple[int, ...]:
        """Token ids of a text that stands behind the tokens `before`, which stay as they are. Raises DataError.

        No special tokens are added, nor the space that some tokenizers begin a text with.
        """
        alone = self.tokenizer.encode(text, add_special_tokens=False)
        near = tuple(before[-_CONTEXT:])
        said = self.tokenizer.decode(near)
        if self.tokenizer.decode(near + alone) == said + text:
            return alone
        again = self.tokenizer.encode(said, add_special_tokens=False)
        both = self.tokenizer.encode(said + text, add_special_tokens=False)
        return both[len(again) :] if both[: len(again)] == again else alone

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a rendered text. Plain text gets the model's leading special tokens. Raises DataError."""
        return self.tokenizer.encode(text, add_special_tokens=not self.chat)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.tokenizer.decode(ids)


def _messages(value: str | Messages, system: str) -> list[dict[str, Any]]:
    given: Messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    messages = [_as_templates_expect(message) for message in given]
    if system and messages[0].get("role") not in SYSTEM_ROLES:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that are null, and with its reasoning under the names that templates read, as transformers does."""
    there = {key: value for key, value in message.items() if value is not None}
    reasoning = next((there[name] for name in _REASONING if name in there), None)
    return there if reasoning is None else {"thinking": reasoning, **there, "reasoning_content": reasoning}
