"""The files of a model folder that describe how the model reads pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gcore.errors import DataError

MEDIA_TOKENS = (
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id"),
    *("vision_start_token_id", "boi_token_index"),
)
"""Names of token IDs in a model's configuration that stand for media, or begin them."""

_QWEN = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
_QWEN_3_5 = {
    "image_token_id": 248_056,
    "video_token_id": 248_057,
    "vision_start_token_id": 248_053,
    "vision_end_token_id": 248_054,
}
_IDEFICS_3 = {"image_token_id": 128_257}
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN_3_5),
    "idefics3": _IDEFICS_3,
    "smolvlm": _IDEFICS_3,
    "gemma3": {"image_token_index": 262_144, "boi_token_index": 255_999, "eoi_token_index": 256_000},
    "llava": {"image_token_index": 32_000},
}
"""By model type: default token IDs of its configuration in transformers, which may save only what differs from them."""


def media_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The token IDs that stand for media or begin them, ascending; empty for a text model. `config`: the content of a
    `config.json`. No engine samples them, and no rank trains them (`gcore.models.vision.media_token_ids`).
    """
    if config.get("vision_config") is None:
        return ()
    defaults = dict(_DEFAULT_IDS.get(str(config.get("model_type")), {}))
    if isinstance(config.get("image_token_id"), int):
        defaults.pop("image_token_index", None)  # another name for the same
    ids = {**defaults, **config}  # null: the model has no such token
    return tuple(sorted({ids[name] for name in MEDIA_TOKENS if isinstance(ids.get(name), int) and ids[name] >= 0}))


class ModelFiles:
    """The files of a model folder that describe its pictures. Raises DataError for a file that cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_object(path / "config.json")
        self.family = str(self.config.get("model_type"))
        self.vision: Mapping[str, Any] = self.config.get("vision_config") or {}
        self.processor = _read_object(path / "processor_config.json", optional=True)
        nested = self.processor.get("image_processor")  # as transformers 5 saves it
        self.images: Mapping[str, Any] = (
            nested if isinstance(nested, dict) else _read_object(path / "preprocessor_config.json", optional=True)
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer, of the `tokenizers` library."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                "the model folder has no tokenizer.json", where=str(self.path), fix="Save the model with its tokenizer"
            )
        return Tokenizer.from_file(str(file))

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a text without adding special tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def token(self, token_id: int) -> str:
        """Return the text of a token; empty if the tokenizer does not have it."""
        return self.tokenizer.id_to_token(token_id) or ""

    def spell(self, token_id: int) -> str:
        """Return the characters of a token; not those by which the tokenizer names it."""
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))

    def number(self, settings: Mapping[str, Any], name: str, default: int) -> int:
        """Return a positive whole number of `settings`. Raises DataError."""
        value = settings.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{name} is {value!r}, not a positive whole number")
        return value

    def mapping(self, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return an object of `settings`; empty if there is none."""
        value = settings.get(name)
        return value if isinstance(value, Mapping) else {}

    def token_id(self, *names: str) -> int:
        """Return the first of these tokens that the configuration names, or has by default. Raises DataError."""
        for ids in (self.config, _DEFAULT_IDS.get(self.family, {})):
            for name in names:
                if isinstance(found := ids.get(name), int):
                    return found
        raise self.error(f"the model's configuration has no {names[0]}")

    @cached_property
    def picture_settings(self) -> str:
        """SHA-256 of the model's type and all settings of its image processor, 64 hex digits."""
        settings = json.dumps([self.family, self.images], sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()

    def error(self, what: str) -> DataError:
        """Return the error about a processor that cannot be used."""
        return DataError(
            f"the model's image processor cannot be used: {what}",
            where=str(self.path),
            fix="Save the model's processor there (processor.save_pretrained), or use another model",
        )


def _read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object; empty if it is optional and missing. Raises DataError."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        there = path.parent.is_dir()
        raise DataError(
            f"the folder is not a model: it has no {path.name}" if there else "the model folder does not exist",
            where=str(path.parent),
            fix="Name the folder of a Hugging Face model" if there else "Name an existing folder",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read the file ({error})", where=str(path), fix="Save the model again") from error
    if not isinstance(value, dict):
        raise DataError("the file does not contain a JSON object", where=str(path), fix="Save the model again")
    return value
