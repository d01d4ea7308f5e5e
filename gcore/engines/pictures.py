"""Pictures in requests to the torch engine: from the `image_data` of a request to the arguments of a forward pass.

A prompt arrives with one image token, its placeholder, for each picture. The engine expands it to as many as the model needs, and reports
the expanded prompt (`return_prompt_token_ids`). The features of a prompt's pictures are computed once, in its first
pass. Prefixes are shared only between prompts with equal tokens and equal pictures.

A picture comes as a blob of the job (`{"blob": "sha256:HEX"}`), as a path in the folder of blobs, as a data URL, or as
base64. The engine opens no other file and no other URL.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gcore.errors import DataError, EngineError
from gcore.media.pictures import MOST_PICTURES
from gcore.media.protocol import blob_path
from gcore.models.vision import (
    PictureProcessor,
    PictureTensors,
    PositionCounter,
    TokenCounter,
    image_features,
    image_token_id,
    picture_arguments,
    type_argument,
)

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True, eq=False)
class PreparedPictures:
    """The pictures of a prompt. `names`: SHA-256 of each. `positions` [3, n]: of the prompt's tokens; None for models
    that count in one dimension. `shift`: difference between position and index of the tokens that follow the prompt.
    """

    names: tuple[str, ...]
    pictures: tuple[PictureTensors, ...]
    positions: torch.Tensor | None = None
    shift: int = 0

    @property
    def key(self) -> bytes:
        """Bytes that identify the pictures, for keys of prompts."""
        return b"".join(bytes.fromhex(name) for name in self.names)


class PictureInput:
    """Reads the pictures of requests with the image processor of one model."""

    def __init__(self, folder: Path, blobs: Path | None) -> None:
        """`folder`: of the model. `blobs`: folder of the job's blobs; None: requests contain their pictures. Raises
        DataError if the folder has no usable image processor.
        """
        self._processor = PictureProcessor(folder)
        self._blobs = None if blobs is None else blobs.resolve()

    def noise(self, height: int, width: int) -> PictureTensors:
        """A picture with random content, for trials."""
        return self._processor.noise(height, width)

    def read(self, given: Sequence[Any]) -> list[tuple[str, PictureTensors]]:
        """Read the pictures of a prompt from its `image_data`: SHA-256 and tensors of each. Any thread.

        Raises EngineError for what is not a picture, or may not be opened.
        """
        if len(given) > MOST_PICTURES:
            raise EngineError(f"the prompt has {len(given)} pictures; the maximum is {MOST_PICTURES}")
        return [self._read(one) for one in given]

    def _read(self, given: Any) -> tuple[str, PictureTensors]:
        name, content = self._content(given)
        try:
            return name, self._processor.read(name, content)
        except DataError as error:
            raise EngineError(error.what, where=error.where) from error

    def _content(self, given: Any) -> tuple[str, Path | bytes]:
        """SHA-256 of a picture, and its file or bytes."""
        if isinstance(given, dict):
            name = str(given.get("blob", "")).removeprefix("sha256:")
            if set(given) != {"blob"} or not _HEX.fullmatch(name):
                raise EngineError('a picture is an object, but not {"blob": "sha256:HEX"}')
            if self._blobs is None:
                raise EngineError("this engine has no folder of blobs", fix="Send the picture itself, as base64")
            return name, self._blobs / blob_path(name)
        if not isinstance(given, str):
            raise EngineError(f"a picture is {type(given).__name__}, not a string or an object")
        if given.startswith(("/", "file://")):
            return self._allowed(Path(given.removeprefix("file://")))
        if re.match(r"[a-z][a-z0-9+.-]*://", given, re.IGNORECASE):
            raise EngineError("this engine opens no URLs", fix="Send the picture itself, as base64")
        try:
            data = base64.b64decode(_DATA_URL.sub("", given[:64]) + given[64:], validate=True)
        except (binascii.Error, ValueError) as error:
            raise EngineError(f"a picture is not base64 ({error})") from error
        return hashlib.sha256(data).hexdigest(), data

    def _allowed(self, path: Path) -> tuple[str, Path]:
        found = path.resolve()
        if self._blobs is None or self._blobs not in found.parents or not _HEX.fullmatch(found.name):
            raise EngineError("a picture's path is not in this engine's folder of blobs", where=str(path))
        return found.name, found


class PictureReader(PictureInput):
    """Reads the pictures of requests, and expands prompts, for one vision-language model."""

    def __init__(self, module: Any, folder: Path, blobs: Path | None) -> None:
        """`folder`, `blobs`: as of `PictureInput`. Raises DataError."""
        super().__init__(folder, blobs)
        self._counter = TokenCounter(module)
        self._positions = PositionCounter(module)
        self.token = image_token_id(module.config)
        """Token ID of a placeholder."""
        self.type_argument = type_argument(module)
        self._counter.count(self.noise(32, 32))

    @property
    def three(self) -> bool:
        """Whether the model counts positions in three dimensions."""
        return self._positions.three

    def expand(self, tokens: Sequence[int], pictures: Sequence[tuple[str, PictureTensors]]) -> tuple[int, ...]:
        """Replace each placeholder in `tokens` by as many as its picture has. Raises EngineError for another number of
        placeholders than of pictures.
        """
        found = sum(token == self.token for token in tokens)
        if found != len(pictures):
            raise EngineError(
                f"the prompt has {found} placeholders of pictures (token {self.token}) and {len(pictures)} pictures",
                fix="Write one placeholder for each picture",
            )
        counts = iter([self._counter.count(picture) for _, picture in pictures])
        return tuple(one for token in tokens for one in ([token] * next(counts) if token == self.token else [token]))

    def prompt(self, tokens: Sequence[int], pictures: Sequence[tuple[str, PictureTensors]]) -> PreparedPictures | None:
        """The pictures of the expanded prompt `tokens`; None if it has none."""
        if not pictures:
            return None
        found = PreparedPictures(tuple(name for name, _ in pictures), tuple(picture for _, picture in pictures))
        if self.three:
            grids = [picture.grid for _, picture in pictures if picture.grid is not None]
            found.positions, found.shift = self._positions.count(tokens, grids)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PromptFeatures:
    """Features of the pictures of a prompt, by placeholder. `last` [k, width]: for the embeddings. `levels`: for the
    first layers of models that add features there.
    """

    last: torch.Tensor
    levels: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class PassPart:
    """Tokens [begin, end) of a prompt in a forward pass. `tokens`: of the whole prompt. `features`: of its pictures;
    None before `PictureFeatures.compute`.
    """

    tokens: Sequence[int]
    begin: int
    end: int
    pictures: PreparedPictures | None
    features: PromptFeatures | None


class PictureFeatures:
    """Runs a model's vision tower, and passes its features to the model's forward passes."""

    def __init__(self, module: Any, reader: PictureReader) -> None:
        self.reader = reader
        self._module = module
        features = image_features(module)
        assert features is not None
        self._compute = features
        self._is_list = True

    def compute(self, parts: Sequence[PassPart]) -> None:
        """Set the features of all parts with pictures that have none, in one pass of the vision tower."""
        lacking = [part for part in parts if part.pictures is not None and part.features is None]
        distinct: dict[str, PictureTensors] = {}
        for part in lacking:
            assert part.pictures is not None
            distinct |= dict(zip(part.pictures.names, part.pictures.pictures, strict=True))
        if not distinct:
            return
        device = next(self._module.parameters()).device
        made = self._compute(**picture_arguments(list(distinct.values()), device), return_dict=True)
        self._is_list = not isinstance(made.pooler_output, torch.Tensor)
        levels = getattr(made, "deepstack_features", None) or ()
        number = {name: i for i, name in enumerate(distinct)}
        for part in lacking:
            assert part.pictures is not None
            own = [number[name] for name in part.pictures.names]
            last, *others = (torch.cat([of[i] for i in own]) for of in (made.pooler_output, *levels))
            part.features = PromptFeatures(last, tuple(others))

    def arguments(self, parts: Sequence[PassPart], ids: torch.Tensor) -> dict[str, Any]:
        """The arguments of a forward pass over these parts, which have features. `ids` [part, token]: its tokens."""
        found: dict[str, Any] = {}
        if all(part.pictures is None for part in parts):
            return found
        if self.reader.type_argument:
            found[self.reader.type_argument] = (ids == self.reader.token).long()
        pieces: list[PromptFeatures] = []
        for part in parts:
            if part.features is not None:
                before = sum(token == self.reader.token for token in part.tokens[: part.begin])
                count = sum(token == self.reader.token for token in part.tokens[part.begin : part.end])
                own = slice(before, before + count)
                if count:
                    levels = tuple(level[own] for level in part.features.levels)
                    pieces.append(PromptFeatures(part.features.last[own], levels))
        if pieces:
            last, *levels_ = (
                torch.cat(list(of)) for of in zip(*((one.last, *one.levels) for one in pieces), strict=True)
            )
            outputs = SimpleNamespace(
                pooler_output=(last,) if self._is_list else last[None],
                deepstack_features=[(level,) for level in levels_],
            )
            found["mm_encoder_outputs"] = {"image": outputs}
        return found


def pass_positions(parts: Sequence[PassPart], width: int, *, three: bool) -> torch.Tensor:
    """The positions of a forward pass over these parts of prompts, padded on the right to `width` tokens.

    [part, width] int64, or [3, part, width] if the model counts in `three` dimensions and a part has pictures.
    """
    plain = torch.stack([torch.arange(part.begin, part.begin + width) for part in parts])
    if not three or all(part.pictures is None for part in parts):
        return plain
    found = plain.expand(3, -1, -1).clone()
    for row, part in enumerate(parts):
        if part.pictures is None or part.pictures.positions is None:
            continue
        own = part.pictures.positions[:, part.begin : part.end]
        found[:, row] += part.pictures.shift  # of generated tokens behind the prompt, after a preemption
        found[:, row, : own.shape[1]] = own
    return found
