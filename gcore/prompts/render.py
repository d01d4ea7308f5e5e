"""From a prompt field to the text and the tokens that the model is shown, without torch and without transformers.

With `chat` a prompt is put into the model's own chat template, with the opening of the assistant's turn; a string counts as
one message of the user. Without it the string is the text. The result agrees with `AutoTokenizer.apply_chat_template(...,
add_generation_prompt=True)` and `AutoTokenizer(text)`, with one difference, on purpose: templates get no clock
(`strftime_now` is undefined, and those that ask for the date fall back to the one they were made with), because a prompt
must be the same on every node and on every day. A template is foreign code, so it runs in Jinja's immutable sandbox.

It does not cut: a prompt that is too long is an error (`gcore.prompts.stream`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gcore.errors import DataError

Messages = Sequence[Mapping[str, Any]]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


class PromptRenderer:
    """Renders, encodes and decodes for one model folder. Stateless; may be used from several threads."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: jinja2.Template | None,
        special_tokens: Mapping[str, str],
        max_length: int | None,
        where: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._where = where
        self.max_length = max_length
        """The model's context, in tokens; None if its configuration does not say."""

    @classmethod
    def load(cls, model_dir: Path | str, *, chat: bool) -> PromptRenderer:
        """Read a Hugging Face model folder's tokenizer. Raises DataError if it is none, or has no chat template for `chat`."""
        folder = Path(model_dir)
        if not folder.is_dir():
            raise DataError("the model folder does not exist", where=str(folder), fix="Name a folder in model.path")
        config = _read_json(folder / "config.json")
        if not (folder / "tokenizer.json").is_file():
            raise DataError(
                "the model folder has no tokenizer.json",
                where=str(folder),
                fix="Save the model with its fast tokenizer (tokenizer.save_pretrained)",
            )
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise DataError(
                f"not a tokenizer ({error})", where=str(folder / "tokenizer.json"), fix="Save the tokenizer again"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _read_json(folder / "tokenizer_config.json", optional=True)
        special = _special_tokens(settings, folder)
        source = _template_source(folder, settings) if chat else None
        return cls(
            tokenizer,
            template=None if source is None else _compile(source, folder),
            special_tokens=special,
            max_length=_context(config),
            where=str(folder),
        )

    @property
    def chat(self) -> bool:
        """Whether prompts go through the chat template."""
        return self._template is not None

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a response, if the tokenizer names one."""
        token = self._special_tokens.get("eos_token")
        found: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return found

    def render(self, value: str | Messages) -> str:
        """The text that the model is shown for a prompt field. Raises DataError."""
        if self._template is None:
            if isinstance(value, str):
                return value
            raise DataError(
                "the prompt is a list of chat messages, and the job shows prompts as plain text",
                where=self._where,
                fix="Set model.chat: true, or write prompts as strings",
            )
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else [dict(m) for m in value]
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise DataError(
                f"the chat template does not take the prompt ({type(error).__name__}: {error})",
                where=self._where,
                fix="Change the messages, or the template in the model's folder",
            ) from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a rendered text. Plain text gets the model's leading special tokens; a template wrote its own."""
        # What tokenizer_config.json says of add_bos_token is not looked at: tokenizer.json decides, as in transformers.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not self.chat).ids
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


class _GenerationBlock(Extension):
    """`{% generation %}`, with which templates mark the assistant's part for training: shown as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _compile(source: str, folder: Path) -> jinja2.Template:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is not valid (line {error.lineno}: {error.message})",
            where=str(folder),
            fix="Correct it, or set model.chat: false",
        ) from error


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"cannot read the file ({error})", where=str(file), fix="Save the tokenizer again"
            ) from error
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((item.get("template") for item in source if item.get("name") == "default"), None)
    if not isinstance(source, str):
        raise DataError(
            "the job shows prompts as chat messages, and the model's tokenizer has no chat template",
            where=str(folder),
            fix="Set model.chat: false, or put a chat_template.jinja into the folder",
        )
    return source


def _special_tokens(settings: Mapping[str, Any], folder: Path) -> dict[str, str]:
    known = {**_read_json(folder / "special_tokens_map.json", optional=True), **settings}
    texts: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = known.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def _context(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in _LENGTH_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"the folder is no model: it has no {path.name}",
            where=str(path.parent),
            fix="Name the folder of a Hugging Face model in model.path",
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the file ({error})", where=str(path), fix="Save the model again") from error
    if not isinstance(value, dict):
        raise DataError("the file holds no JSON object", where=str(path), fix="Save the model again")
    return value
