"""How many tokens a model uses for a picture, computed from the picture's size alone.

A prompt with pictures has three forms. The *short* ids have one placeholder for each picture, as the text has. The *expanded*
ids have all tokens of each picture; the trainer and all counts use them. The *request* ids are the expanded ones with one
image token in place of each run; engines receive them. `PictureRule` converts short ids as the model's own processor
(transformers 5) does, without torch and without decoding a picture:

- Qwen2-VL, Qwen2.5-VL, Qwen3-VL: the picture is resized to multiples of patch x merge within bounds for its pixels. One
  token for each merged patch.
- Idefics 3, SmolVLM, LLaVA, Gemma 3: one size, so one number of tokens. Pictures are not cut into several.

`target_size` is stable: it maps its own results to themselves. So a picture of this size passes through the processor
without another resize.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gcore.config.capabilities import PICTURE_SCORERS
from gcore.errors import DataError
from gcore.media.model_files import ModelFiles
from gcore.media.pictures import MAX_ASPECT
from gcore.types import Range

Size = tuple[int, int]
"""Height and width of a picture in pixels."""

_MOST_RESIZES = 16
_FRAMES = 2
"""Qwen-VL: default number of frames in a patch. A picture counts as that many equal frames."""

_NEWLINE = "\n"


class PictureRule(ABC):
    """How a model's processor resizes a picture, and which tokens stand for it. Immutable, thread-safe."""

    def __init__(self, folder: ModelFiles, placeholder_id: int, image_token_id: int) -> None:
        self._folder = folder
        self.placeholder_id = placeholder_id
        """The token that stands for a picture in short ids."""
        self.image_token_id = image_token_id
        """The token at whose places in expanded ids the model puts a picture's features."""

    @staticmethod
    def load(folder: Path | str, *, min_pixels: int | None = None, max_pixels: int | None = None) -> PictureRule:
        """Load the rule of a Hugging Face model folder. `min_pixels`, `max_pixels`: bounds for height x width of a
        resized picture, instead of the processor's.

        Engines and ranks need the same bounds. Raises DataError for a model without a vision part, of an unknown
        family, or without a processor, and for bounds that its processor does not have.
        """
        files = ModelFiles(Path(folder))
        if not files.vision:
            raise DataError(
                f"the model has no vision part (model_type {files.family!r})",
                where=str(files.path),
                fix="Use a vision-language model, or remove data.images",
            )
        kind = FAMILIES.get(files.family)
        if kind is None:
            raise DataError(
                f"pictures are not supported for models of the type {files.family!r}",
                where=str(files.path),
                fix=f"Use a model of one of these types: {', '.join(sorted(FAMILIES))}",
            )
        if not files.images:
            raise DataError(
                "the model folder has no processor: neither preprocessor_config.json nor processor_config.json "
                "describes its pictures",
                where=str(files.path),
                fix="Save the model's processor there (processor.save_pretrained)",
            )
        if files.images.get("do_resize") is False:
            raise files.error("do_resize is false")
        _check_normalization(files)
        if kind is not SmartResizeRule and not (min_pixels is None and max_pixels is None):
            raise DataError(
                f"min_pixels and max_pixels are not supported for models of the type {files.family!r}, whose processor "
                "has no such bounds",
                where=str(files.path),
                fix="Remove data.min_pixels and data.max_pixels",
            )
        return SmartResizeRule(files, min_pixels, max_pixels) if kind is SmartResizeRule else kind(files)

    def check_processor(self) -> None:
        """Check that the model's processor leaves pictures of the size that this rule gives as they are. Engines and ranks
        run it on every picture. Raises DataError.
        """
        if (error := self._processor_error()) is not None:
            raise error

    def _processor_error(self) -> DataError | None:
        """Return the error about a processor that changes these pictures; None if it does not."""
        return None

    @property
    def family(self) -> str:
        """The model type, such as qwen3_vl."""
        return self._folder.family

    @property
    def settings(self) -> str:
        """SHA-256 of the model's type and its processor's settings, 64 hex digits. Equal files on two nodes mean that their
        engines and ranks make the same tensors of a picture."""
        return self._folder.picture_settings

    @cached_property
    def picture_text(self) -> str:
        """The text that stands for a picture in a plain-text prompt. It encodes to one placeholder and, if the model
        has them, the tokens around it. Raises DataError."""
        text = self._folder.token(self.placeholder_id)
        if not text:
            raise DataError(
                f"the tokenizer has no token {self.placeholder_id}, which stands for pictures",
                where=str(self._folder.path),
                fix="Save the model with its own tokenizer",
            )
        return text

    def target_size(self, height: int, width: int) -> Size:
        """Return height and width in pixels to which a picture of this size is resized. Raises DataError if one side is
        too long for the other."""
        size = (height, width)
        for _ in range(_MOST_RESIZES):
            resized = self._resize(*size)
            if resized == size:
                return size
            size = resized
        raise DataError(
            f"no size for a picture of {width}x{height} pixels is between the processor's bounds, so it would be resized again "
            "and again",
            where=str(self._folder.path),
            fix="Lower data.min_pixels, or raise data.max_pixels",
        )

    @abstractmethod
    def picture_ids(self, height: int, width: int) -> tuple[int, ...]:
        """Return the tokens that replace the placeholder of a picture of this size in pixels. Raises DataError."""

    def token_count(self, height: int, width: int) -> int:
        """Return the number of tokens of a picture of this size in pixels. Raises DataError."""
        return len(self.picture_ids(height, width))

    def patch_count(self, height: int, width: int) -> int:
        """Return the number of patches that the vision tower computes for a picture of this size in pixels."""
        vision = self._folder.vision
        side = self._folder.number(vision, "image_size", 224) // self._folder.number(vision, "patch_size", 14)
        return side * side

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of the model's config.json."""
        return self._folder.config

    def expand(self, short_ids: Sequence[int], sizes: Sequence[Size]) -> tuple[int, ...]:
        """Replace the placeholder of each picture by its tokens. `sizes`: of the pictures, in order.

        Raises DataError if the numbers of placeholders and pictures differ, or ids contain other tokens of pictures.
        """
        return self._replaced(short_ids, sizes, self.picture_ids)

    def request_ids(self, short_ids: Sequence[int], sizes: Sequence[Size]) -> tuple[int, ...]:
        """Like `expand`, with one image token for each picture, which engines repeat. Raises DataError, as `expand` does."""
        return self._replaced(short_ids, sizes, self._picture_in_request)

    def expand_request(self, request_ids: Sequence[int], sizes: Sequence[Size]) -> tuple[int, ...]:
        """Return the result of `expand` for the result of `request_ids`. Raises DataError if a picture is not there."""
        ids: list[int] = []
        place = 0
        for size in sizes:
            one = self._picture_in_request(*size)
            found = next(
                (at for at in range(place, len(request_ids)) if tuple(request_ids[at : at + len(one)]) == one), None
            )
            if found is None:
                raise _different("placeholder", sum(token == self.image_token_id for token in request_ids), len(sizes))
            ids += [*request_ids[place:found], *self.picture_ids(*size)]
            place = found + len(one)
        if self.image_token_id in request_ids[place:]:
            raise _different("placeholder", sum(token == self.image_token_id for token in request_ids), len(sizes))
        return (*ids, *request_ids[place:])

    def _picture_in_request(self, height: int, width: int) -> tuple[int, ...]:
        """`picture_ids` with each run of image tokens cut to one."""
        ids, image = self.picture_ids(height, width), self.image_token_id
        before = (None, *ids)
        return tuple(token for token, last in zip(ids, before, strict=False) if token != image or last != image)

    def _replaced(
        self, short_ids: Sequence[int], sizes: Sequence[Size], tokens_of: Callable[[int, int], tuple[int, ...]]
    ) -> tuple[int, ...]:
        found = sum(token == self.placeholder_id for token in short_ids)
        if found != len(sizes):
            raise _different("placeholder", found, len(sizes))
        self._check_short(short_ids)
        left = iter(sizes)
        ids: list[int] = []
        for token in short_ids:
            if token == self.placeholder_id:
                ids += tokens_of(*next(left))
            else:
                ids.append(token)
        return tuple(ids)

    def runs(self, ids: Sequence[int], sizes: Sequence[Size] | None = None) -> tuple[Range, ...]:
        """Return the range of each picture in expanded ids: what `expand` put in place of its placeholder.

        `sizes`: of the pictures, in order; checked if given. They are needed where pictures follow one another without
        a token between them. Raises DataError if ids do not consist of whole pictures, or not of those.
        """
        ranges = self._find(ids, sizes)
        if sizes is None:
            return ranges
        if len(ranges) != len(sizes):
            raise _different("run of picture tokens", len(ranges), len(sizes))
        for number, ((start, end), size) in enumerate(zip(ranges, sizes, strict=True), 1):
            if tuple(ids[start:end]) != self.picture_ids(*size):
                raise DataError(
                    f"picture {number} has {end - start} tokens, but its size of {size[1]}x{size[0]} pixels gives "
                    f"{self.token_count(*size)} tokens",
                    fix="Use the same processor settings in all places",
                )
        return ranges

    def _check_short(self, short_ids: Sequence[int]) -> None:
        """Raise DataError if short ids contain tokens that only expanded ids or videos have."""
        wrong = self._expanded_only.intersection(short_ids)
        if wrong:
            names = ", ".join(repr(self._folder.token(token) or token) for token in sorted(wrong))
            raise DataError(
                f"the prompt's text contains {names}, which is not a picture",
                fix="Remove it from the text; videos are not supported",
            )

    @property
    @abstractmethod
    def _expanded_only(self) -> frozenset[int]:
        """Tokens that short ids must not contain."""

    @abstractmethod
    def _resize(self, height: int, width: int) -> Size:
        """Return the size to which the processor resizes a picture. Raises DataError."""

    @abstractmethod
    def _find(self, ids: Sequence[int], sizes: Sequence[Size] | None) -> tuple[Range, ...]:
        """Return the ranges of the pictures. Raises DataError."""

    def _whole_pictures(self, ids: Sequence[int], starts: Iterable[int], tokens: tuple[int, ...]) -> tuple[Range, ...]:
        """Return the ranges of pictures that begin at `starts` and each have these `tokens`. Raises DataError."""
        ranges = tuple((start, start + len(tokens)) for start in starts)
        if any(start < 0 or tuple(ids[start:end]) != tokens for start, end in ranges):
            raise DataError("a picture's tokens are cut off", fix="Do not cut prompts with pictures")
        return ranges

    def _runs_of(self, ids: Sequence[int], counts: Sequence[int] | None) -> tuple[Range, ...]:
        """Return the ranges of pictures that consist of image tokens only. `counts`: tokens of each picture; None: each
        run is a picture."""
        runs = _token_runs(ids, self.image_token_id)
        if counts is None:
            return runs
        left = iter(counts)
        ranges: list[Range] = []
        for start, end in runs:
            while start < end:
                count = next(left, None)
                if count is None or start + count > end:
                    total = sum(last - first for first, last in runs)
                    raise DataError(
                        f"the prompt has {total} image tokens in {len(runs)} runs, but its {len(counts)} pictures have "
                        f"{sum(counts)}",
                        fix="Use the same processor settings in all places",
                    )
                ranges.append((start, start + count))
                start += count
        return tuple(ranges)


class SmartResizeRule(PictureRule):
    """Rule of the Qwen-VL models. Sides are multiples of `patch_size` x `merge_size` pixels; height x width is between
    `min_pixels` and `max_pixels`, if the picture's shape allows it."""

    def __init__(self, folder: ModelFiles, min_pixels: int | None, max_pixels: int | None) -> None:
        image = folder.token_id("image_token_id")
        super().__init__(folder, image, image)
        self.vision_start_id = folder.token_id("vision_start_token_id")
        self.vision_end_id = folder.token_id("vision_end_token_id")
        self.video_token_id = folder.token_id("video_token_id")
        self.patch_size = folder.number(folder.images, "patch_size", 14)
        self.merge_size = folder.number(folder.images, "merge_size", 2)
        frames = folder.number(folder.images, "temporal_patch_size", _FRAMES)
        for name, own, default in (
            ("patch_size", self.patch_size, self.patch_size),
            ("spatial_merge_size", self.merge_size, self.merge_size),
            ("temporal_patch_size", frames, _FRAMES),
        ):
            if (of_model := folder.vision.get(name, default)) != own:
                raise folder.error(f"its {name} is {own}, but the model's is {of_model}")
        size = folder.mapping(folder.images, "size")
        least = folder.images.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
        most = folder.images.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
        self._own_min = folder.number({"min_pixels": least}, "min_pixels", 56 * 56)
        self._own_max = folder.number({"max_pixels": most}, "max_pixels", 28 * 28 * 1280)
        self.min_pixels = min_pixels or self._own_min
        self.max_pixels = max_pixels or self._own_max
        if self.min_pixels > self.max_pixels:
            raise DataError(
                f"min_pixels ({self.min_pixels}) is above max_pixels ({self.max_pixels})",
                where=str(folder.path),
                fix="Correct data.min_pixels and data.max_pixels; unset ones come from the model's processor",
            )

    def _processor_error(self) -> DataError | None:
        if self.min_pixels < self._own_min:
            return self._beyond("min_pixels", self.min_pixels, f"below the {self._own_min}", "enlarge smaller")
        if self.max_pixels > self._own_max:
            return self._beyond("max_pixels", self.max_pixels, f"above the {self._own_max}", "shrink larger")
        return None

    def _beyond(self, name: str, value: int, place: str, effect: str) -> DataError:
        return DataError(
            f"{name} ({value}) is {place} of the model's processor, which would {effect} pictures again",
            where=str(self._folder.path),
            fix=f"Correct data.{name}, or change the bounds of the processor in the model's folder",
        )

    @cached_property
    def picture_text(self) -> str:
        inner = super().picture_text
        return self._folder.token(self.vision_start_id) + inner + self._folder.token(self.vision_end_id)

    def _resize(self, height: int, width: int) -> Size:
        """As Qwen2-VL's processor in transformers."""
        if max(height, width) / min(height, width) > MAX_ASPECT:
            raise DataError(
                f"a picture of {width}x{height} pixels has one side more than {MAX_ASPECT} times as long as the other",
                fix="Cut or pad it, or raise data.max_pixels",
            )
        factor = self.patch_size * self.merge_size
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if rows * columns > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows = max(factor, math.floor(height / scale / factor) * factor)
            columns = max(factor, math.floor(width / scale / factor) * factor)
        elif rows * columns < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * scale / factor) * factor
            columns = math.ceil(width * scale / factor) * factor
        return rows, columns

    def token_count(self, height: int, width: int) -> int:
        rows, columns = self.grid(height, width)
        return rows * columns // self.merge_size**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of patches of a picture of this size in pixels. Raises DataError."""
        rows, columns = self.target_size(height, width)
        return rows // self.patch_size, columns // self.patch_size

    def patch_count(self, height: int, width: int) -> int:
        rows, columns = self.grid(height, width)
        return rows * columns

    def picture_ids(self, height: int, width: int) -> tuple[int, ...]:
        return (self.image_token_id,) * self.token_count(height, width)

    @property
    def _expanded_only(self) -> frozenset[int]:
        return frozenset({self.video_token_id})

    def _find(self, ids: Sequence[int], sizes: Sequence[Size] | None) -> tuple[Range, ...]:
        return self._runs_of(ids, None if sizes is None else [self.token_count(*size) for size in sizes])


class FixedRule(PictureRule):
    """Rule of LLaVA. The processor cuts every picture to one size, so each has the same number of tokens."""

    def __init__(self, folder: ModelFiles) -> None:
        image = folder.token_id("image_token_id", "image_token_index")
        super().__init__(folder, image, image)
        if folder.images.get("do_pad"):
            raise folder.error("do_pad is true")
        size = folder.images.get("size")
        self._size: Mapping[str, Any] = size if isinstance(size, Mapping) else {"shortest_edge": size or 224}
        self._count = self._fixed_count()

    def _fixed_count(self) -> int:
        folder = self._folder
        patch = folder.processor.get("patch_size")
        if patch is None:
            return folder.number(folder.config, "image_seq_length", 576)
        cut = folder.images.get("crop_size") or {"height": 224, "width": 224}
        cut = cut if isinstance(cut, Mapping) else {"height": cut, "width": cut}
        if folder.images.get("do_center_crop") is False:
            if "height" not in self._size:
                raise folder.error("do_center_crop is false, so pictures differ in size")
            cut = self._size
        rows, columns = (folder.number(cut, side, 224) // int(patch) for side in ("height", "width"))
        dropped = folder.processor.get("vision_feature_select_strategy") == "default"
        return rows * columns + int(folder.processor.get("num_additional_image_tokens") or 0) - dropped

    def _resize(self, height: int, width: int) -> Size:
        if "shortest_edge" not in self._size:
            return self._folder.number(self._size, "height", 224), self._folder.number(self._size, "width", 224)
        short = self._folder.number(self._size, "shortest_edge", 224)
        long = int(short * max(height, width) / min(height, width))
        return (short, long) if height <= width else (long, short)

    def picture_ids(self, height: int, width: int) -> tuple[int, ...]:
        return (self.image_token_id,) * self._count

    @property
    def _expanded_only(self) -> frozenset[int]:
        return frozenset()

    def _find(self, ids: Sequence[int], sizes: Sequence[Size] | None) -> tuple[Range, ...]:
        number = sum(token == self.image_token_id for token in ids) // self._count
        return self._runs_of(ids, [self._count] * (number if sizes is None else len(sizes)))


class WrappedRule(PictureRule):
    """Rule of Gemma 3. Each picture has one size and the same tokens, between a begin and an end token, with empty lines
    around them. The empty lines join with newlines of the text beside them."""

    def __init__(self, folder: ModelFiles) -> None:
        begin = folder.token_id("boi_token_id", "boi_token_index")
        super().__init__(folder, begin, folder.token_id("image_token_id", "image_token_index"))
        self._end = folder.token_id("eoi_token_id", "eoi_token_index")
        if folder.images.get("do_pan_and_scan"):
            raise folder.error("do_pan_and_scan is true")
        self._size = folder.mapping(folder.images, "size")
        count = folder.number(folder.processor, "image_seq_length", 256)
        if folder.config.get("mm_tokens_per_image", count) != count:
            raise folder.error(
                f"image_seq_length is {count}, but the model's mm_tokens_per_image is "
                f"{folder.config['mm_tokens_per_image']}"
            )
        self._inner = (begin, *(self.image_token_id,) * count, self._end)

    def _resize(self, height: int, width: int) -> Size:
        return self._folder.number(self._size, "height", 224), self._folder.number(self._size, "width", 224)

    def picture_ids(self, height: int, width: int) -> tuple[int, ...]:
        return self._inner

    def _replaced(
        self, short_ids: Sequence[int], sizes: Sequence[Size], tokens_of: Callable[[int, int], tuple[int, ...]]
    ) -> tuple[int, ...]:
        whole = super()._replaced(short_ids, sizes, tokens_of)
        if not sizes:
            return whole
        ids: list[int] = []
        newlines = 0  # not written yet
        for token in whole:
            text = self._folder.spell(token)
            if text and not text.strip(_NEWLINE):
                newlines += len(text)
                continue
            newlines += 2 * (token == self.placeholder_id)
            if newlines:
                ids += self._folder.encode(_NEWLINE * newlines)
            newlines = 2 * (token == self._end)
            ids.append(token)
        return (*ids, *(self._folder.encode(_NEWLINE * newlines) if newlines else ()))

    @property
    def _expanded_only(self) -> frozenset[int]:
        return frozenset({self.image_token_id, self._end})

    def _find(self, ids: Sequence[int], sizes: Sequence[Size] | None) -> tuple[Range, ...]:
        starts = [place for place, token in enumerate(ids) if token == self.placeholder_id]
        return self._whole_pictures(ids, starts, self._inner)


class MarkedRule(PictureRule):
    """Rule of Idefics 3 and SmolVLM. Each picture has one size and the same tokens: a token around pictures, one for a whole
    picture, the image tokens, and the token around pictures again."""

    def __init__(self, folder: ModelFiles) -> None:
        image = folder.token_id("image_token_id")
        super().__init__(folder, image, image)
        self._side = folder.number(folder.mapping(folder.images, "max_image_size"), "longest_edge", 364)
        self._count = folder.number(folder.processor, "image_seq_len", 169)
        side, patch, scale = (
            *(folder.vision.get("image_size"), folder.vision.get("patch_size")),
            folder.config.get("scale_factor"),
        )
        if isinstance(side, int) and isinstance(patch, int) and isinstance(scale, int):
            own = (side // patch) ** 2 // scale**2
            if own != self._count:
                raise folder.error(f"image_seq_len is {self._count}, but the model makes {own} tokens of a picture")

    def _processor_error(self) -> DataError | None:
        if self._folder.images.get("do_image_splitting") is False:
            return None
        return DataError(
            "the model's image processor cuts pictures into several (do_image_splitting), which engines and train ranks "
            "do not support",
            where=str(self._folder.path),
            fix="Set do_image_splitting: false in preprocessor_config.json",
        )

    @cached_property
    def _marks(self) -> tuple[int, int]:
        """The token around pictures, and the token before a whole picture."""
        found = []
        for text in ("<fake_token_around_image>", "<global-img>"):
            mark: int | None = self._folder.tokenizer.token_to_id(text)
            if mark is None:
                raise self._folder.error(f"the tokenizer has no token {text}")
            found.append(mark)
        return found[0], found[1]

    @cached_property
    def _inner(self) -> tuple[int, ...]:
        around, whole = self._marks
        return (around, whole, *(self.image_token_id,) * self._count, around)

    def _resize(self, height: int, width: int) -> Size:
        return self._side, self._side

    def picture_ids(self, height: int, width: int) -> tuple[int, ...]:
        return self._inner

    @property
    def _expanded_only(self) -> frozenset[int]:
        return frozenset(self._marks)

    def _find(self, ids: Sequence[int], sizes: Sequence[Size] | None) -> tuple[Range, ...]:
        # Marks without image tokens are no picture: a model may write them.
        return self._whole_pictures(ids, [start - 2 for start, _ in _token_runs(ids, self.image_token_id)], self._inner)


FAMILIES: Mapping[str, Any] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), SmartResizeRule),
    **dict.fromkeys(("idefics3", "smolvlm"), MarkedRule),
    "gemma3": WrappedRule,
    "llava": FixedRule,
}
"""The rules by model type."""


class ScorerRule:
    """How a scorer of pictures, such as CLIP, gets a question: a text, and apart from it one picture, which its engine
    resizes. Immutable, thread-safe."""

    picture_text = ""
    """The text that stands for a picture: none."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    @staticmethod
    def load(folder: Path | str) -> ScorerRule:
        """Load the rule of a model folder. Raises DataError for one without an image processor."""
        files = ModelFiles(Path(folder))
        if not files.images:
            raise DataError(
                "the model folder has no image processor (preprocessor_config.json)",
                where=str(files.path),
                fix="Save the model's processor there (processor.save_pretrained)",
            )
        _check_normalization(files)
        return ScorerRule(files)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of the text."""
        text = self._files.config.get("text_config")
        return self._files.number(text if isinstance(text, Mapping) else {}, "max_position_embeddings", 77)

    def check_processor(self) -> None:
        """Do nothing: any processor may resize pictures, because only the engine sees them."""

    def target_size(self, height: int, width: int) -> Size:
        """Return the picture's own height and width in pixels."""
        return height, width

    def request_ids(self, short_ids: Sequence[int], sizes: Sequence[Size]) -> tuple[int, ...]:
        """Return the text's tokens. Raises DataError unless there is one picture."""
        if len(sizes) != 1:
            raise DataError(
                f"it shows {len(sizes)} pictures, and a model of the type {self._files.family!r} scores one",
                fix="Show one picture",
            )
        return tuple(short_ids)

    def expand(self, short_ids: Sequence[int], sizes: Sequence[Size]) -> tuple[int, ...]:
        """Return the text's tokens: the picture has none. Raises DataError unless there is one picture."""
        return self.request_ids(short_ids, sizes)


def judge_rule(folder: Path | str) -> PictureRule | ScorerRule:
    """Load how the model of a judge that sees pictures reads them. Raises DataError, as `PictureRule.load`."""
    is_scorer = ModelFiles(Path(folder)).family in PICTURE_SCORERS
    return ScorerRule.load(folder) if is_scorer else PictureRule.load(folder)


def _check_normalization(files: ModelFiles) -> None:
    """Raise DataError for a processor whose mean or deviation of pixels cannot be used: every logit would be NaN."""
    for name in ("image_mean", "image_std"):
        value = files.images.get(name)
        numbers: list[Any] = value if isinstance(value, list) else [value]
        plain = all(type(one) in (int, float) and math.isfinite(one) for one in numbers)
        if value is not None and (not plain or len(numbers) not in (1, 3)):
            raise files.error(f"{name} is {value!r}, not three numbers")
        if name == "image_std" and 0 in numbers:
            raise files.error("image_std contains 0, by which pixels would be divided")


def _token_runs(ids: Sequence[int], token: int) -> tuple[Range, ...]:
    """Return the longest ranges of `ids` that consist of `token`."""
    runs: list[Range] = []
    for place, one in enumerate(ids):
        if one != token:
            continue
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return tuple(runs)


def _different(what: str, found: int, pictures: int) -> DataError:
    return DataError(
        f"the prompt has {found} {what}{'s' * (found != 1)}, but {pictures} picture{'s' * (pictures != 1)}",
        fix="Write one image marker for each picture, and no text that reads as one",
    )
