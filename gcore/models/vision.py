"""Vision-language models: which models have a vision tower, their pictures as tensors, positions, and token masks.

The torch engine, the Hugging Face engine and train ranks use this module, so that they give a model the same inputs:

- `PictureProcessor` converts a picture's bytes to the tensors that the model takes, with the image processor of the
  model's folder and pillow. Pictures already have their final size (`gcore.media.pictures`), so nothing is resized.
- The features of a picture are computed once in a forward pass, however often the picture occurs (`repeat_features`).
- Token IDs of pictures can be neither sampled nor trained (`media_token_ids`): engines and ranks give them the logit
  minus infinity.
- Some models count positions in three dimensions (time, height, width). `PositionCounter` computes them for a whole
  sequence by the model's own rule.

A text model has none of this, and every function here accepts one.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gcore.errors import DataError, one_line
from gcore.media.model_files import MEDIA_TOKENS

CACHE_BYTES = 512 << 20
"""Default size of a processor's cache, in bytes of tensors."""


def has_vision(config: Any) -> bool:
    """Whether the model of this configuration (an object or a tree of `config.json`) has a vision tower."""
    found = config.get("vision_config") if isinstance(config, Mapping) else getattr(config, "vision_config", None)
    return found is not None


TOWERS = frozenset({"visual", "vision_tower", "vision_model"})
"""Names of a vision tower among a model's modules."""

PROJECTORS = frozenset({"multi_modal_projector", "connector", "merger", "deepstack_merger_list"})
"""Names of modules that convert features of the tower for the language model; they may be inside the tower."""


def part_of(parameter: str) -> Literal["vision", "projector", "language"]:
    """The part of a vision-language model to which a parameter belongs, by its name."""
    modules = set(parameter.split("."))
    if modules & PROJECTORS:
        return "projector"
    return "vision" if modules & TOWERS else "language"


def has_processor(folder: Path) -> bool:
    """Whether the model folder has an image processor."""
    return any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))


def auto_class(config: Any) -> Any:
    """The class of transformers that loads the model of this configuration with all its parts."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # slow to import

    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def media_token_ids(config: Any) -> tuple[int, ...]:
    """The token IDs that stand for media or begin them, ascending; empty for a text model."""
    if not has_vision(config):
        return ()
    found = {getattr(config, name, None) for name in MEDIA_TOKENS}
    return tuple(sorted(one for one in found if isinstance(one, int) and one >= 0))


def image_token_id(config: Any) -> int:
    """The token ID of a picture's placeholders. Raises DataError if the configuration has none."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    raise DataError(f"the configuration of a {config.model_type} names no image token", where="config.json")


def set_text_attention(module: Any, name: str) -> None:
    """Set the attention implementation of the language part; the vision tower keeps its own. Raises ValueError."""
    if has_vision(module.config):
        module.set_attn_implementation({"text_config": name})
    else:
        module.set_attn_implementation(name)


def text_attention(module: Any) -> str:
    """The attention implementation of the language part."""
    return str(module.config.get_text_config()._attn_implementation)


OLDEST_TRANSFORMERS = "5.18"
"""Before it, the features of several pictures are not told apart at the deeper layers of Qwen3-VL, and log-probabilities are wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class PictureTensors:
    """One picture as the model takes it. `arguments`: arguments of its forward, such as `pixel_values`, for this
    picture alone. `grid` (time, height, width): number of patches; None for models whose pictures have one size.
    """

    arguments: Mapping[str, Tensor]
    grid: tuple[int, int, int] | None

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(one.numel() * one.element_size() for one in self.arguments.values())


class PictureProcessor:
    """Converts pictures to tensors with the image processor of a model's folder, and caches results by SHA-256.
    Thread-safe."""

    def __init__(self, folder: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        """Load the processor. Raises DataError if the folder has none that pillow alone can run, or if transformers is too old."""
        from packaging.version import Version
        from transformers import AutoImageProcessor

        if Version(installed := version("transformers")) < Version(OLDEST_TRANSFORMERS):
            raise DataError(
                f"pictures need transformers {OLDEST_TRANSFORMERS} or newer, and {installed} is installed",
                where=str(folder),
                fix="pip install -U gcore[vision]",
            )
        try:
            self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise DataError(
                f"the image processor cannot be loaded ({one_line(error)})",
                where=str(folder),
                fix="Copy preprocessor_config.json of the model, and install gcore[vision]",
            ) from error
        if getattr(self._processor, "do_image_splitting", False):
            raise DataError(
                "the image processor cuts pictures into several (do_image_splitting), which gcore does not support",
                where=str(folder),
                fix="Set do_image_splitting: false in preprocessor_config.json",
            )
        self._room = cache_bytes
        self._cached: OrderedDict[str, PictureTensors] = OrderedDict()
        self._lock = threading.Lock()
        """Held while the cache is used, not while pictures are decoded."""
        self.decoded = 0
        """Number of pictures that were decoded, because the cache had no result."""

    def read(self, sha256: str, picture: Path | bytes) -> PictureTensors:
        """Return a picture as tensors in host memory. `sha256`: of the picture's bytes. Raises DataError, also for a file with
        other bytes.
        """
        with self._lock:
            found = self._cached.get(sha256)
            if found is not None:
                self._cached.move_to_end(sha256)
                return found
        found = self._processed(sha256, picture if isinstance(picture, bytes) else _read_blob(sha256, picture))
        with self._lock:
            self.decoded += 1
            if (other := self._cached.get(sha256)) is not None:  # of another thread, meanwhile
                return other
            self._cached[sha256] = found
            self._room -= found.size
            while self._room < 0 and len(self._cached) > 1:
                self._room += self._cached.popitem(last=False)[1].size
        return found

    def noise(self, height: int, width: int) -> PictureTensors:
        """A picture of this size in pixels with random content, always the same."""
        from PIL import Image

        pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return self._processed("of noise", file.getvalue())

    def _processed(self, sha256: str, picture: bytes) -> PictureTensors:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(picture)) as opened:
                pixels = opened.convert("RGB")
            made = self._processor(images=[pixels], return_tensors="pt")
        except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise DataError(f"the picture cannot be read ({one_line(error)})", where=f"picture {sha256}") from error
        arguments = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        grid = arguments.get("image_grid_thw")
        arguments.pop("num_crops", None)
        return PictureTensors(arguments, None if grid is None else tuple(grid[0].tolist()))


def _read_blob(sha256: str, file: Path) -> bytes:
    """Read the file of a blob. Its store compared the bytes once; a disk may have damaged them since. Raises DataError."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"the picture cannot be read ({one_line(error)})", where=f"picture {sha256}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(
            "the bytes of the picture have changed",
            where=str(file),
            fix="Check the disk of this node; a restarted daemon removes damaged blobs",
        )
    return data


def picture_arguments(pictures: Sequence[PictureTensors], device: torch.device) -> dict[str, Tensor]:
    """Join pictures to the arguments of one forward pass. There must be at least one."""
    names = pictures[0].arguments.keys()
    return {name: torch.cat([one.arguments[name] for one in pictures]).to(device) for name in names}


def image_features(module: Any) -> Callable[..., Any] | None:
    """The method that runs the vision tower; None for a text model. Classifiers have it in the model below their head."""
    inner = getattr(module, "model", None)
    found: Callable[..., Any] | None = getattr(module, "get_image_features", None)
    return getattr(inner, "get_image_features", None) if found is None else found


class TokenCounter:
    """Counts the placeholders of a picture in the tokens of a model."""

    def __init__(self, module: nn.Module) -> None:
        model: Any = module
        self._features: Any = image_features(module)
        self._device: torch.device = next(module.parameters()).device
        merge = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", None)
        self._patches = None if merge is None else int(merge) ** 2
        self._fixed: int | None = None

    @torch.no_grad()
    def count(self, picture: PictureTensors) -> int:
        """The number of placeholders of this picture. The first call runs a model whose pictures have one size."""
        if picture.grid is not None and self._patches is not None:
            return math.prod(picture.grid) // self._patches
        if self._fixed is None:
            REPEATS.places = None
            features = self._features(**picture_arguments([picture], self._device), return_dict=True)
            self._fixed = int(features.pooler_output[0].shape[0])
        return self._fixed


class _Repeats:
    """The places of the next forward pass: for each occurrence of a picture, its number among the given pictures."""

    places: Sequence[int] | None = None


REPEATS = _Repeats()
"""Set before each forward pass with pictures. One forward pass runs at a time in a process."""


def repeat_features(module: Any) -> None:
    """Make a vision-language model compute the features of each given picture once, and use them at every occurrence
    (`REPEATS`). Without occurrences the features have no effect, but their gradients are computed, as zeros.

    Does nothing for a text model.
    """
    inner: Any = getattr(module, "model", None)
    if not has_vision(module.config) or not hasattr(inner, "get_image_features"):
        return
    inner.get_image_features = _RepeatedFeatures(inner.get_image_features)


class _RepeatedFeatures:
    """`get_image_features` of a model, with its results repeated by `REPEATS`."""

    def __init__(self, compute: Any) -> None:
        self._compute = compute

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        found = self._compute(*arguments, **more)
        if REPEATS.places is not None:
            found.pooler_output = _take(found.pooler_output, REPEATS.places)
            levels = getattr(found, "deepstack_features", None)
            if levels is not None:
                found.deepstack_features = [_take(level, REPEATS.places) for level in levels]
        return found


def _take(features: Any, places: Sequence[int]) -> Any:
    """Features by picture, at these places: a tensor [picture, token, width], or one [token, width] for each picture."""
    if isinstance(features, Tensor):
        return features[list(places)] if places else features[:0]
    return tuple(features[place] for place in places) or (features[0][:0],)


class PositionCounter:
    """Positions of a sequence with pictures, as a model counts them."""

    def __init__(self, module: nn.Module) -> None:
        model: Any = module
        self._rule = getattr(getattr(model, "model", None), "get_rope_index", None)
        self._image = image_token_id(model.config) if has_vision(model.config) else -1

    @property
    def three(self) -> bool:
        """Whether the model counts in three dimensions."""
        return self._rule is not None

    def count(self, ids: Sequence[int], grids: Sequence[tuple[int, int, int]]) -> tuple[Tensor, int]:
        """Positions [3, n] int64 of the sequence `ids` [n], whose pictures have these grids in order, and by how much
        the position of a following text token differs from its index.
        """
        assert self._rule is not None
        tokens = torch.tensor([list(ids)])
        given = torch.tensor(grids) if grids else None
        positions, delta = self._rule(tokens, mm_token_type_ids=(tokens == self._image).int(), image_grid_thw=given)
        return positions[:, 0], int(delta[0, 0])


def type_argument(module: Any) -> str:
    """The name of the argument that says which tokens are of pictures, for models whose attention differs there; empty
    for all others.
    """
    name = "token_type_ids"
    return name if has_vision(module.config) and name in inspect.signature(module.forward).parameters else ""
