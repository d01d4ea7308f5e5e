"""From a prompt field to the text and the tokens that the model is shown.

With `chat` a prompt is put into a chat template, with the opening of the assistant's turn; a string counts as one message
of the user. Without it the string is the text. The result agrees with `AutoTokenizer.apply_chat_template(messages, tools=...,
add_generation_prompt=True, **variables)` and `AutoTokenizer(text)`, but for the clock, which templates get from a variable
here (`gcore.data.templates`), and for text parts that a template does not read (`gcore.data.messages`).

A model may have several end tokens. What comes behind an answer is what the template writes there, and the end of the turn stands
there once, whichever end token the answer has.

A template writes its own special tokens, so the tokenizer adds none to what it wrote: a leading token is never there twice.
A source's system message goes before messages that have none of their own; an entry that begins with one keeps it. It does
not cut: a prompt that is too long is an error, or filtered (`gcore.data.stream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from gcore.data.messages import MARK, ContentForms, Messages, prepare_messages
from gcore.data.templates import (
    FOREIGN_FAILURES,
    ToolDefinitions,
    bind_variables,
    check_variables,
    compile_template,
    explain_failure,
    read_template,
    read_tools,
    template_of_model,
    tools_of_entry,
)
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import DataError

_CONTEXT = 16
"""Tokens in front of a text that is encoded behind them, and of an answer that are compared with what a template writes."""

_SOME_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a source shows messages. `template`: without tools; `tool_template`: with them, often the same."""

    template: jinja2.Template
    tool_template: jinja2.Template
    system: str = ""
    tools: ToolDefinitions = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        tokenizer: ModelTokenizer,
        model_dir: Path,
        *,
        template: str | None,
        system: str | None,
        tools: str | None,
        variables: Mapping[str, Any],
    ) -> ChatForm:
        """`template` and `tools` are files, in place of the model's template and of none. Raises DataError."""
        definitions = () if tools is None else read_tools(Path(tools))
        if template is not None:
            sources = [(read_template(Path(template)), template)]
        else:
            settings = tokenizer.settings
            sources = [template_of_model(model_dir, settings, for_tools=given) for given in (False, True)]
        compiled = [compile_template(source, where) for source, where in dict.fromkeys(sources)]
        check_variables([source for source, _ in sources], variables, sources[0][1])
        return cls(compiled[0], compiled[-1], system or "", definitions, bind_variables(variables))


class PromptRenderer:
    """Renders, encodes and decodes for one source. Stateless; may be used from several threads."""

    def __init__(self, tokenizer: ModelTokenizer, form: ChatForm | None, *, where: str) -> None:
        self.tokenizer = tokenizer
        self._form = form
        self._where = where
        if form is not None:
            self._contents = ContentForms(partial(self._tried, form.template, None))
            self._tool_contents = ContentForms(
                partial(self._tried, form.tool_template, list(form.tools) or [_SOME_TOOL])
            )

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        chat: bool,
        template: str | None = None,
        system: str | None = None,
        tools: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tokenizer: ModelTokenizer | None = None,
    ) -> PromptRenderer:
        """For a Hugging Face model folder. `variables`: of the template; `tokenizer`: that of the folder, if it is loaded already.

        Raises DataError: no such model, no chat template for `chat`, files that cannot be read or are not what they
        should be, and whatever only a chat template can show without one.
        """
        folder = Path(model_dir)
        tokenizer = tokenizer or ModelTokenizer.load(folder)
        if chat:
            form = ChatForm.load(
                tokenizer, folder, template=template, system=system, tools=tools, variables=variables or {}
            )
            return cls(tokenizer, form, where=str(folder))
        only_chat = {"template": template, "system": system, "tools": tools, "template_variables": variables}
        for name, given in only_chat.items():
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
    def max_length(self) -> int | None:
        """The model's context, in tokens; None if its configuration does not say."""
        return self.tokenizer.max_length

    def render(
        self,
        value: str | Messages,
        fields: Mapping[str, Any] | None = None,
        *,
        opens: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model is shown for a prompt field of the entry `fields`.

        `opens`: with the opening of an answer behind it; `variables`: of the template, beside those of the source. Raises DataError.
        """
        form = self._form
        if form is None:
            if isinstance(value, str):
                return value
            raise DataError(
                "the prompt is a list of chat messages, and the job shows prompts as plain text",
                where=self._where,
                fix="Set model.chat: true, or write prompts as strings",
            )
        tools = list(tools_of_entry(fields or {}, form.tools)) or None
        template, contents = (form.tool_template, self._tool_contents) if tools else (form.template, self._contents)
        own = bind_variables(variables or {})
        try:
            messages = [contents.fit(message) for message in prepare_messages(value, form.system)]
            return self._written(template, tools, messages, opens=opens, variables=own)
        except FOREIGN_FAILURES as error:
            raise DataError(
                f"the chat template does not take the prompt ({type(error).__name__}: {error})",
                where=self._where,
                fix=explain_failure(error),
            ) from error

    def _written(
        self,
        template: jinja2.Template,
        tools: list[dict[str, Any]] | None,
        messages: list[dict[str, Any]],
        *,
        opens: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        assert self._form is not None
        return template.render(
            {
                "documents": None,
                **self.tokenizer.special_tokens,
                **self._form.variables,
                **(variables or {}),
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": opens,
            }
        )

    def _tried(
        self, template: jinja2.Template, tools: list[dict[str, Any]] | None, messages: list[dict[str, Any]]
    ) -> str:
        try:
            return self._written(template, tools, messages)
        except FOREIGN_FAILURES:
            return ""

    def behind(self, messages: Messages, fields: Mapping[str, Any], *, said: Sequence[int]) -> str:
        """What the template writes between an answer of the assistant and its next one, if `messages` come between them.

        `said`: the tokens of the answer; where they end the turn themselves, its end is left out. Raises DataError.
        """
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, *messages]
        _, found, rest = self.render(asked, fields).rpartition(MARK)
        if not found:
            raise DataError("the chat template leaves an answer out", where=self._where, fix="Change the template")
        return self._without_end(rest, said, asked[:2], fields)

    def continued(self, messages: Messages, answer: int, fields: Mapping[str, Any], *, said: Sequence[int]) -> str:
        """What the template writes behind the assistant's message at place `answer`, up to the opening of the next answer.

        `said`: the tokens of the answer; where they end the turn themselves, its end is left out. Raises DataError, also for a
        template that does not show where an answer ends.
        """
        asked = [*messages[:answer], {"role": "assistant", "content": MARK}, *messages[answer + 1 :]]
        _, *rest = self.render(asked, fields).split(MARK)
        if len(rest) != 1:
            how = "leaves out" if not rest else "writes more than once"
            raise DataError(
                f"what stands behind an answer cannot be told: the chat template {how} what the assistant said last",
                where=self._where,
                fix="Change the template",
            )
        return self._without_end(rest[0], said, asked[: answer + 1], fields)

    def answer_end(self, fields: Mapping[str, Any]) -> int | None:
        """The token that ends an answer: the end token that the chat template writes behind one, else the first that there is."""
        ends: dict[str, int] = {self.tokenizer.special_text(token): token for token in self.tokenizer.end_token_ids}
        if self.chat:
            asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
            closing = self._closing(asked, fields).lstrip()
            written = [text for text in ends if text and closing.startswith(text)]
            if written:
                return ends[max(written, key=len)]
        return next(iter(self.tokenizer.end_token_ids), None)

    def _without_end(self, rest: str, said: Sequence[int], asked: Messages, fields: Mapping[str, Any]) -> str:
        """`rest`, which the template writes behind an answer, without the end of the turn if the answer `said` ends with one.

        The end is what the answer ended with. An answer may also end with another end token than the template's; then
        the end is the end token that the template writes behind the last answer of a conversation too, which is therefore no
        opening of the next turn.
        """
        own = self.tokenizer.special_text(said[-1]) if said else ""
        if not own:
            return rest
        head, found, tail = rest.partition(own)
        if found and (not head.strip() or self.tokenizer.spell(said[-_CONTEXT:-1]).endswith(head)):
            return tail
        if said[-1] not in self.tokenizer.end_token_ids:
            return rest
        closing, begun = self._closing(asked, fields).lstrip(), rest.lstrip()
        ends = [self.tokenizer.special_text(token) for token in self.tokenizer.end_token_ids]
        end = max((text for text in ends if closing.startswith(text) and begun.startswith(text)), key=len, default="")
        return begun[len(end) :] if end else rest

    def _closing(self, asked: Messages, fields: Mapping[str, Any]) -> str:
        """What the template writes behind the answer `MARK`, with which `asked` ends; empty for a template that does not take that."""
        try:
            return self.render(asked, fields, opens=False).rpartition(MARK)[2]
        except DataError:
            return ""

    def encode_behind(self, before: Sequence[int], text: str) -> tuple[int, ...]:
        """Token ids of a text that stands behind the tokens `before`, which stay as they are. Raises DataError.

        They are those that the text has within the whole, where no token of the whole lies across its beginning.
        """
        known = self.tokenizer.spell(before[-_CONTEXT:])
        try:
            again = self.tokenizer.encode(known, add_special_tokens=False)
            both = self.tokenizer.encode(known + text, add_special_tokens=False)
        except DataError:  # what was generated need not be a text that the vocabulary has
            again = both = ()
        if both[: len(again)] == again and both:
            return both[len(again) :]
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a rendered text. Plain text gets the model's leading special tokens. Raises DataError."""
        return self.tokenizer.encode(text, add_special_tokens=not self.chat)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens and end tokens left out."""
        return self.tokenizer.decode(ids)
