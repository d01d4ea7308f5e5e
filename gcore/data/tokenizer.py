"""The tokenizer of a model folder, without torch and transformers.

It gives the same results as `AutoTokenizer` for the same folder. A job loads one tokenizer for all its sources.
Tokenizing a megabyte of foreign text takes seconds and would keep an event loop from renewing its lease. So long texts
are tokenized in a thread (tokenizers release the GIL), and only the beginning of texts that are far too long.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gcore.errors import DataError
from gcore.system.files import read_json_file

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
SHOWN_TEXT = 40


class ModelTokenizer:
    """Tokenizer of one model folder: encodes text and decodes tokens. Stateless and thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens: Mapping[str, str],
        settings: Mapping[str, Any],
        max_length: int | None,
        end_token_ids: Sequence[int] = (),
        bytewise: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self.bytewise = bytewise
        """Whether tokens are bytes (`of_bytes`)."""
        self._added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = dict(special_tokens)
        """Text of each special token that the tokenizer defines, by name (`eos_token`)."""
        self.settings = dict(settings)
        """The content of tokenizer_config.json."""
        self.max_length = max_length
        """The model's context length in tokens; None if its configuration has none."""
        own = self._id_of("eos_token")
        self.end_token_ids = tuple(dict.fromkeys((*(() if own is None else (own,)), *end_token_ids)))
        """All tokens that end a response, the tokenizer's own first; empty if neither it nor the model defines one."""

    @classmethod
    def of_bytes(cls) -> ModelTokenizer:
        """The tokenizer of prompts for pictures, whose tokens are the bytes of the text in UTF-8. The pipeline's own encoders
        read the text, each with a tokenizer of its own."""
        letters = _byte_letters()
        tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return cls(tokenizer, special_tokens={}, settings={}, max_length=None, bytewise=True)

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Load the tokenizer of a Hugging Face model folder. Raises DataError."""
        if not folder.is_dir():
            raise DataError(
                "the model folder does not exist", where=str(folder), fix="Name an existing folder in model.path"
            )
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
            raise DataError(
                f"the file is not a tokenizer ({error})", where=str(file), fix="Save the tokenizer again"
            ) from error
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
        """The token for text outside the vocabulary; None if the tokenizer has none."""
        return self._id_of("unk_token")

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Encode a text. Raises DataError if the vocabulary does not cover it.

        `add_special_tokens`: whether to add the special tokens that tokenizer.json defines, such as a leading one.
        """
        # As in transformers, tokenizer.json decides about leading tokens, not add_bos_token in tokenizer_config.json.
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the tokenizers library raises nothing narrower
            shown = ascii(text[:SHOWN_TEXT]) + ("…" if len(text) > SHOWN_TEXT else "")
            raise DataError(
                f"the model's tokenizer cannot encode {shown} ({error})",
                fix="Remove characters that are not in its vocabulary, or give the tokenizer an unk_token",
            ) from error
        return tuple(ids)

    def can_say(self, text: str) -> bool:
        """Return whether the vocabulary covers a text.

        Other text would raise, be dropped, or be replaced by the unknown token, depending on the tokenizer.
        """
        try:
            ids = self.encode(text, add_special_tokens=False)
        except DataError:
            return False
        said = self.spell(ids)  # texts may contain special tokens
        unknown = self.unknown_token_id
        return _plain(said) == _plain(text) and (unknown is None or unknown not in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens and end tokens."""
        kept = [token for token in ids if token not in self.end_token_ids]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=True)
        return text

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens as a chat template writes them."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def special_text(self, token_id: int) -> str:
        """Return the text with which a chat template writes a special token or end token; empty for any other token."""
        added = self._added.get(token_id)
        if added is not None and (added.special or token_id in self.end_token_ids):
            return str(added.content)
        return self.spell((token_id,)) if token_id in self.end_token_ids else ""

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        found: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return found


def _byte_letters() -> list[str]:
    """The letter with which byte-level tokenizers write each byte: printable Latin-1 letters stand for themselves, and the
    other bytes, in order, for the letters from 256 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _plain(text: str) -> str:
    """Normalize a text as tokenizers may do (spaces, case, Unicode forms), to compare it with its decoded tokens."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def end_tokens(folder: Path, config: Mapping[str, Any], token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Return the IDs of all tokens that end a response: those of the tokenizer, of `generation_config.json`, and of
    `config`, in that order, without duplicates.

    `config`: content of the folder's `config.json`. `token_id`: maps a token's text to its ID. Raises DataError for a
    file that is not JSON.
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
        value = read_json_file(path)
    except FileNotFoundError as error:
        raise DataError(
            f"the folder is not a model: it has no {path.name}",
            where=str(path.parent),
            fix="Name the folder of a Hugging Face model in model.path",
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the file ({error})", where=str(path), fix="Save the model again") from error
    if not isinstance(value, dict):
        raise DataError("the file does not contain a JSON object", where=str(path), fix="Save the model again")
    return value


T = TypeVar("T")

AT_ONCE = 4096
"""Maximum number of characters that are tokenized on the event loop: for these a thread would cost about as much time.
"""

PER_TOKEN = 16
"""Number of characters per available token that are examined to find texts that are far too long. Most texts have about
four characters per token.
"""


class TextTooLong(Exception):
    """A text has more tokens than fit: certainly more than `tokens`."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"more than {tokens} tokens")
        self.tokens = tokens


async def run_by_size(characters: int, work: Callable[[], T]) -> T:
    """Run `work`, which tokenizes `characters` characters: directly if they are few, else in a thread.

    `work` must have no side effects.
    """
    return work() if characters <= AT_ONCE else await asyncio.to_thread(work)


def check_length(text: str, room: int | None, encode: Callable[[str], Sequence[int]]) -> None:
    """Raise TextTooLong if the beginning of a text has at least twice as many tokens as fit.

    `room`: number of tokens that fit; None: no limit. `encode`: the tokenizer. Cheap, because only the beginning is
    encoded; callers count the tokens of texts that pass. A cut text may tokenize differently, but only near its end, so
    twice as many tokens are proof.
    """
    if room is None or len(text) <= max(AT_ONCE, PER_TOKEN * room):
        return
    begun = encode(text[: max(AT_ONCE, PER_TOKEN * room)])
    if len(begun) > 2 * max(room, 1):
        raise TextTooLong(len(begun) // 2)
