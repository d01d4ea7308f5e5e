"""The tokenizer of a model folder, without torch and without transformers: text to tokens and back.

It agrees with `AutoTokenizer` on the same folder. One is loaded for a job, however many sources it has. A megabyte of foreign
text takes seconds, in which an event loop would not renew its lease, so long texts are tokenized in a thread (a tokenizer
releases the interpreter lock), and no further than there is room for.
"""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from gcore.errors import DataError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
SHOWN_TEXT = 40


class ModelTokenizer:
    """Encodes and decodes for one model folder. Stateless; may be used from several threads."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens: Mapping[str, str],
        settings: Mapping[str, Any],
        max_length: int | None,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = dict(special_tokens)
        """Text of each special token that the tokenizer names, by name (`eos_token`)."""
        self.settings = dict(settings)
        """What stands in tokenizer_config.json."""
        self.max_length = max_length
        """The model's context, in tokens; None if its configuration does not say."""
        own = self._id_of("eos_token")
        self.end_token_ids = tuple(dict.fromkeys((*(() if own is None else (own,)), *end_token_ids)))
        """Every token that ends a response, the tokenizer's own first; empty if neither it nor the model names one."""

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Read a Hugging Face model folder. Raises DataError if it is none."""
        if not folder.is_dir():
            raise DataError("the model folder does not exist", where=str(folder), fix="Name a folder in model.path")
        config = _read_json(folder / "config.json")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                "the model folder has no tokenizer.json",
                where=str(folder),
                fix="Save the model with its fast tokenizer (tokenizer.save_pretrained)",
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise DataError(f"not a tokenizer ({error})", where=str(file), fix="Save the tokenizer again") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _read_json(folder / "tokenizer_config.json", optional=True)
        return cls(
            tokenizer,
            special_tokens=_special_tokens(folder),
            settings=settings,
            max_length=_context(config),
            end_token_ids=end_tokens(folder, config, tokenizer.token_to_id),
        )

    @property
    def unknown_token_id(self) -> int | None:
        """The token that stands for what the vocabulary cannot say, if the tokenizer names one."""
        return self._id_of("unk_token")

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text. Raises DataError if the vocabulary cannot say it."""
        # What tokenizer_config.json says of add_bos_token is not looked at: tokenizer.json decides, as in transformers.
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the tokenizers library raises nothing narrower
            shown = ascii(text[:SHOWN_TEXT]) + ("…" if len(text) > SHOWN_TEXT else "")
            raise DataError(
                f"the model's tokenizer cannot say {shown} ({error})",
                fix="Remove what is not in its vocabulary, or give the tokenizer an unk_token",
            ) from error
        return tuple(ids)

    def can_say(self, text: str) -> bool:
        """Whether the vocabulary has all of a text. What it lacks some tokenizers refuse, some leave out, and some replace."""
        try:
            ids = self.encode(text, add_special_tokens=False)
        except DataError:
            return False
        said = self.spell(ids)  # special tokens are a text's as well
        unknown = self.unknown_token_id
        return _plain(said) == _plain(text) and (unknown is None or unknown not in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens and end tokens left out."""
        kept = [token for token in ids if token not in self.end_token_ids]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=True)
        return text

    def spell(self, ids: Sequence[int]) -> str:
        """The text of token ids with special tokens in it, as a chat template writes them."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def special_text(self, token_id: int) -> str:
        """How a template writes a special token or an end token; empty for any other token."""
        added = self._added.get(token_id)
        if added is not None and (added.special or token_id in self.end_token_ids):
            return str(added.content)
        return self.spell((token_id,)) if token_id in self.end_token_ids else ""

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        found: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return found


def _plain(text: str) -> str:
    """`text` without what tokenizers make of texts before they look at them: spaces, capitals and forms of characters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def end_tokens(folder: Path, config: Mapping[str, Any], token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Every token that the tokenizer, `generation_config.json` or `config` calls the end, in that order, each once.

    `config`: the folder's `config.json`. `token_id`: the ID of a token by its text. Raises DataError for a file that is not JSON.
    """
    name = _special_tokens(folder).get("eos_token")
    found = [] if name is None else [token_id(name)]
    inner = config.get("text_config")
    for settings in (_read_json(folder / "generation_config.json", optional=True), config, inner):
        value = settings.get("eos_token_id") if isinstance(settings, Mapping) else None
        found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int) and not isinstance(token, bool)))


def _special_tokens(folder: Path) -> dict[str, str]:
    known = {
        **_read_json(folder / "special_tokens_map.json", optional=True),
        **_read_json(folder / "tokenizer_config.json", optional=True),
    }
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


T = TypeVar("T")

AT_ONCE = 4096
"""Characters that take no longer than it takes to ask a thread, or little."""

PER_TOKEN = 16
"""Characters for each token that there is room for, which are looked at first; of most texts, each has four or so."""


class TextTooLong(Exception):
    """A text has more tokens than there is room for: more than `tokens`."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"more than {tokens} tokens")
        self.tokens = tokens


async def run_by_size(characters: int, work: Callable[[], T]) -> T:
    """What `work` on so many characters gives: in a thread if they are many. It must change nothing."""
    return work() if characters <= AT_ONCE else await asyncio.to_thread(work)


def check_length(text: str, room: int | None, encode: Callable[[str], Sequence[int]]) -> None:
    """Raises TextTooLong for a text that is far too long, by the tokens of its beginning; other texts are for the caller to count.

    Cut off there, a text may have other tokens than within the whole, but only near the end: twice as many as fit are enough to know.
    """
    if room is None or len(text) <= max(AT_ONCE, PER_TOKEN * room):
        return
    begun = encode(text[: max(AT_ONCE, PER_TOKEN * room)])
    if len(begun) > 2 * max(room, 1):
        raise TextTooLong(len(begun) // 2)
