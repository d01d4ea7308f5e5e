"""Renders the prompt field of a dataset entry to the model's input text and tokens.

With `chat`, a chat template renders the prompt and opens the assistant's turn; a string counts as one user message.
Without it, the string is the text. The result agrees with `AutoTokenizer.apply_chat_template(messages, tools=...,
add_generation_prompt=True, **variables)` and `AutoTokenizer(text)`, with two exceptions: the date comes from a variable
(`gcore.data.templates`), and text parts are joined for templates that do not support them (`gcore.data.messages`).

For dialogs of several turns the module also renders what follows an answer of the model. A model may have several end
tokens; the end of the turn appears once, whichever end token the answer has.

A template writes its own special tokens, so the tokenizer adds none: a leading token never appears twice. A source's
system message is inserted before messages without one. Prompts are not cut: a prompt that is too long is an error, or
filtered (`gcore.data.stream`).
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
"""Number of preceding tokens that are considered when text is encoded after other tokens, and when the end of an answer
is compared with the template's text.
"""

_SOME_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a source renders chat messages. `template`: for prompts without tools. `tool_template`: with tools; often
    equal.

    `system`: text of the system message, or empty. `variables`: of the templates.
    """

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
        """Load templates and tools. `template`: a Jinja file; None: the model's template. `tools`: a JSON file; None:
        no tools. Raises DataError.
        """
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
    """Renders prompts of one source to text, encodes text and decodes tokens. Stateless and thread-safe."""

    def __init__(self, tokenizer: ModelTokenizer, form: ChatForm | None, *, where: str, picture_text: str = "") -> None:
        """`picture_text`: text for a picture in a template that supports only text; empty: there are no pictures."""
        self.tokenizer = tokenizer
        self._form = form
        self._where = where
        if form is not None:
            self._contents = ContentForms(partial(self._tried, form.template, None), picture_text)
            self._tool_contents = ContentForms(
                partial(self._tried, form.tool_template, list(form.tools) or [_SOME_TOOL]), picture_text
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
        picture_text: str = "",
    ) -> PromptRenderer:
        """Load the renderer for a Hugging Face model folder.

        `chat`: use a chat template; the settings after it are only allowed with it. `template`, `tools`: files, see
        `ChatForm.load`. `variables`: of the template. `tokenizer`: that of the folder, if already loaded.
        `picture_text`: text for a picture in a template that supports only text; empty: there are no pictures. Raises
        DataError if the model or its chat template does not exist, or if a file is not readable or not valid.
        """
        folder = Path(model_dir)
        tokenizer = tokenizer or ModelTokenizer.load(folder)
        if chat:
            form = ChatForm.load(
                tokenizer, folder, template=template, system=system, tools=tools, variables=variables or {}
            )
            return cls(tokenizer, form, where=str(folder), picture_text=picture_text)
        only_chat = {"template": template, "system": system, "tools": tools, "template_variables": variables}
        for name, given in only_chat.items():
            if given:
                raise DataError(
                    f"`{name}` is set, but the prompts are plain text",
                    fix=f"Set chat: true there or model.chat: true, or set `{name}` only for sources with chat: true",
                )
        return cls(tokenizer, None, where=str(folder))

    @property
    def chat(self) -> bool:
        """Whether prompts use a chat template."""
        return self._form is not None

    @property
    def max_length(self) -> int | None:
        """The model's context length in tokens; None if its configuration has none."""
        return self.tokenizer.max_length

    def render(
        self,
        value: str | Messages,
        fields: Mapping[str, Any] | None = None,
        *,
        opens: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a prompt to the model's input text.

        `value`: the prompt field, a string or chat messages. `fields`: its entry, which may have its own tools.
        `opens`: whether to open the assistant's turn at the end. `variables`: template variables in addition to the
        source's. Raises DataError.
        """
        form = self._form
        if form is None:
            if isinstance(value, str):
                return value
            raise DataError(
                "the prompt is a list of chat messages, but the job uses plain-text prompts",
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
                f"the chat template failed on the prompt ({type(error).__name__}: {error})",
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
        """Return the text that the template writes after an answer of the model, for the following `messages`, up to
        the opening of the next answer.

        `said`: tokens of the answer; if they end the turn themselves, the text does not end it again. Raises DataError.
        """
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, *messages]
        _, found, rest = self.render(asked, fields).rpartition(MARK)
        if not found:
            raise DataError(
                "cannot determine the text after an answer: the chat template leaves out the assistant's last message",
                where=self._where,
                fix="Make the template write every assistant message",
            )
        return self._without_end(rest, said, asked[:2], fields)

    def continued(self, messages: Messages, answer: int, fields: Mapping[str, Any], *, said: Sequence[int]) -> str:
        """Return the text that the template writes after message number `answer` of a dialog, up to the opening of the
        next answer.

        That message is an answer of the model. `said`: its tokens; if they end the turn themselves, the text does not
        end it again. Raises DataError, also if the template's output does not show where the answer ends.
        """
        asked = [*messages[:answer], {"role": "assistant", "content": MARK}, *messages[answer + 1 :]]
        _, *rest = self.render(asked, fields).split(MARK)
        if len(rest) != 1:
            how = "leaves out" if not rest else "writes more than once"
            raise DataError(
                f"cannot determine the text after an answer: the chat template {how} the assistant's last message",
                where=self._where,
                fix="Make the template write every assistant message once",
            )
        return self._without_end(rest[0], said, asked[: answer + 1], fields)

    def answer_end(self, fields: Mapping[str, Any]) -> int | None:
        """Return the token that ends an answer: the end token that the chat template writes after one, or else the
        model's first end token; None if there is none.
        """
        ends: dict[str, int] = {self.tokenizer.special_text(token): token for token in self.tokenizer.end_token_ids}
        if self.chat:
            asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
            closing = self._closing(asked, fields).lstrip()
            written = [text for text in ends if text and closing.startswith(text)]
            if written:
                return ends[max(written, key=len)]
        return next(iter(self.tokenizer.end_token_ids), None)

    def _without_end(self, rest: str, said: Sequence[int], asked: Messages, fields: Mapping[str, Any]) -> str:
        """Return `rest`, the template's text after an answer, without the end of the turn if the answer already has
        one.

        `said`: tokens of the answer. `asked`: the messages up to the answer. The end is the answer's own last token. If
        the answer ends with another end token than the template's, the end is the end token that the template also
        writes after the last answer of a conversation, so that it cannot be the opening of the next turn.
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
        """Return the text that the template writes after the last message of `asked`, the answer `MARK`, at the end of
        a conversation; empty if the template fails.
        """
        try:
            return self.render(asked, fields, opens=False).rpartition(MARK)[2]
        except DataError:
            return ""

    def encode_behind(self, before: Sequence[int], text: str) -> tuple[int, ...]:
        """Encode a text that follows the tokens `before`, which stay unchanged. Raises DataError.

        The result is as in the complete text, unless a token of the complete text would span the boundary.
        """
        known = self.tokenizer.spell(before[-_CONTEXT:])
        try:
            again = self.tokenizer.encode(known, add_special_tokens=False)
            both = self.tokenizer.encode(known + text, add_special_tokens=False)
        except DataError:  # generated text need not be in the vocabulary
            again = both = ()
        if both[: len(again)] == again and both:
            return both[len(again) :]
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a rendered text. Without a chat template the model's leading special tokens are added. Raises
        DataError.
        """
        return self.tokenizer.encode(text, add_special_tokens=not self.chat)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens and end tokens."""
        return self.tokenizer.decode(ids)
