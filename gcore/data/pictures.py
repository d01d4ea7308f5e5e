"""The pictures of a source's prompts: which an entry names, and where they are in its prompt.

An entry names its pictures in the field `images` (a list of paths, or one path), and has a marker for each in its
prompt. Chat messages may have parts of type image instead, with or without a path of their own:

    {"prompt": "<image>How many?", "images": ["a.png"]}
    {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}], "images": ...}
    {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, ...]}]}

For chat prompts, markers become parts of type image, which the chat template writes. In plain-text prompts they become
the text with which the model's tokenizer writes a picture. Only sizes are used here; no picture is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from gcore.config.data import ResolvedSource
from gcore.data.dataset import Dataset, mark_used
from gcore.data.messages import Messages, is_picture, join_parts
from gcore.errors import DataError
from gcore.media.picture_index import IndexedPicture, PictureIndex, PictureRoots, open_picture_index
from gcore.media.pictures import MOST_PICTURES
from gcore.media.placeholders import PictureRule
from gcore.types import PictureRef, entry_value

Progress = Callable[[int, int], None]

VIDEO_MARKER = "<video>"
"""What stands for a video in the prompts of multimodal datasets."""


def listed_pictures(entry: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return the names of the pictures in the field `field` of an entry; none if it is null or missing."""
    value = entry_value(entry, field)
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def named_pictures(entry: Mapping[str, Any], prompt_field: str, field: str) -> Iterator[str]:
    """Return the names of all pictures of an entry: in the field `field`, and in parts of its messages."""
    yield from listed_pictures(entry, field)
    prompt = entry.get(prompt_field)
    for message in () if isinstance(prompt, str) or prompt is None else prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if is_picture(part) and part.get("image") is not None:
                yield part["image"]


def open_pictures(
    source: ResolvedSource, dataset: Dataset, cache_dir: Path, progress: Progress | None = None
) -> PictureIndex | None:
    """Check the pictures of a source, and return their index; None if the source has no pictures. Blocks.

    `progress`: called with the number of checked pictures and their total number. Raises DataError that names pictures
    that cannot be used, with their entries.
    """
    field = source.images
    if field is None:
        return None

    def named() -> Iterator[tuple[str, int]]:
        for number, entry in enumerate(dataset):
            for name in named_pictures(entry, source.prompt, field):
                yield name, number

    roots = PictureRoots(dataset.folder, dataset.pictures)
    names = repr((dataset.digest, source.prompt, field))
    key = blake2b(repr((str(dataset.path), source.split, source.prompt, field)).encode(), digest_size=8).hexdigest()
    cache = cache_dir / f".{dataset.path.name[:40]}.{key}.pictures.index"
    index = open_picture_index(cache, roots, names, named, dataset.name_of, progress=progress)
    mark_used(cache)
    return index


class PlacedPictures(NamedTuple):
    """A prompt with its pictures in place. `prompt`: text, or messages with parts of type image. `names`: of its pictures,
    in order."""

    prompt: str | Messages
    names: tuple[str, ...]


def place_pictures(
    prompt: str | Messages, listed: Sequence[str], marker: str, picture_text: str | None
) -> PlacedPictures:
    """Put the pictures of a prompt in the place of their markers.

    `listed`: names from the entry's field of pictures, for markers and parts without a path. `picture_text`: text for a
    picture in a plain-text prompt; None: the prompt is rendered with a chat template. Raises DataError if there are not
    as many places as listed pictures.
    """
    if isinstance(prompt, str) and picture_text is not None:
        found = prompt.count(marker)
        _check_number(found, len(listed), marker)
        return PlacedPictures(prompt.replace(marker, picture_text), tuple(listed))
    messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    placed: list[dict[str, Any]] = []
    names: list[str | None] = []
    for message in messages:
        content = message.get("content")
        parts = list(_parts(content, marker))
        pictures = [part for part in parts if is_picture(part)]
        names += (part.get("image") for part in pictures)
        # Templates look for the key image, so each part gets only the keys of its type.
        plain = [{"type": "image"} if is_picture(part) else {"type": "text", "text": part["text"]} for part in parts]
        placed.append({**message, "content": plain} if pictures or isinstance(content, list) else dict(message))
    _check_number(names.count(None), len(listed), marker)
    left = iter(listed)
    chosen = tuple(next(left) if name is None else name for name in names)
    return PlacedPictures(prompt if isinstance(prompt, str) and not chosen else placed, chosen)


def _parts(content: Any, marker: str) -> Iterator[Mapping[str, Any]]:
    """Return the parts of a message's content, with each marker in its texts as a part of type image."""
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    for part in given:
        if is_picture(part):
            yield part
            continue
        first, *rest = part["text"].split(marker)
        if first or not rest:
            yield {"type": "text", "text": first}
        for text in rest:
            yield {"type": "image"}
            if text:
                yield {"type": "text", "text": text}


def check_unmarked(prompt: str | Messages, marker: str) -> None:
    """Raise DataError if a prompt of a source without pictures has a marker of a picture."""
    found = _count_marker(prompt, marker)
    if found:
        raise DataError(
            f"the prompt has {found} image marker{'s' * (found != 1)}, but data.images is not set, so the model would see the "
            f"text {marker!r} in place of a picture",
            fix="Name the field with its pictures in data.images, or set data.image_marker to a text that no prompt has",
        )


def _check_videos(prompt: str | Messages) -> None:
    """Raise DataError if a prompt of a source with pictures has a marker of a video."""
    if _count_marker(prompt, VIDEO_MARKER):
        raise DataError(
            f"the prompt contains {VIDEO_MARKER}, but videos are not supported",
            fix="Remove the entry, or the marker from its text",
        )


def _count_marker(prompt: str | Messages, marker: str) -> int:
    """How often the texts of a prompt contain a marker."""
    contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return sum(str(join_parts(content) or "").count(marker) for content in contents)


def _check_number(places: int, pictures: int, marker: str) -> None:
    if places != pictures:
        raise DataError(
            f"the prompt has {places} image marker{'s' * (places != 1)}, but the entry has {pictures} "
            f"picture{'s' * (pictures != 1)}",
            fix=f"Write {marker} once for each picture of the entry",
        )


@dataclass(frozen=True, slots=True)
class PromptPictures:
    """The pictures of a source with a model. Thread-safe. `field`: with an entry's pictures. `marker`: in prompts."""

    index: PictureIndex
    rule: PictureRule
    field: str
    marker: str

    def place(self, prompt: str | Messages, entry: Mapping[str, Any], *, chat: bool) -> PlacedPictures:
        """Put the pictures of an entry into its prompt. `chat`: whether it is rendered with a chat template.

        Raises DataError.
        """
        _check_videos(prompt)
        text = None if chat else self.rule.picture_text
        try:
            placed = place_pictures(prompt, listed_pictures(entry, self.field), self.marker, text)
        except DataError as error:
            if entry_value(entry, self.field) is not None:
                raise
            raise DataError(
                f"{error.what}, because its field {self.field!r} is missing or null",
                where=error.where,
                fix=f"Correct data.images. Or {error.fix[0].lower()}{error.fix[1:]}" if error.fix else None,
            ) from error
        if len(placed.names) > MOST_PICTURES:
            raise DataError(
                f"the prompt has {len(placed.names)} pictures; the maximum is {MOST_PICTURES}",
                fix="Leave pictures out of the entry, or join them into larger ones",
            )
        return placed

    def refs(self, names: Sequence[str]) -> tuple[PictureRef, ...]:
        """Return the files and sizes of pictures. Raises DataError."""
        return tuple(self._ref(name) for name in names)

    def _ref(self, name: str) -> PictureRef:
        path, known = self.index.find(name)
        height, width = self.rule.target_size(known.height, known.width)
        return PictureRef(str(path), known.sha256, known.height, known.width, height, width, self._size(known))

    def _size(self, known: IndexedPicture) -> int:
        """The expected size of a picture's blob in bytes."""
        height, width = self.rule.target_size(known.height, known.width)
        return known.identity.size if (height, width) == (known.height, known.width) else 3 * height * width

    @property
    def total_size(self) -> int:
        """The expected size of the blobs of all pictures in bytes."""
        return sum(self._size(one) for one in self.index)

    def expand(
        self, short_ids: Sequence[int], pictures: Sequence[PictureRef]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Replace the placeholder of each picture: by its tokens, and by its tokens in requests to engines. Raises DataError."""
        sizes = [(one.height, one.width) for one in pictures]
        return self.rule.expand(short_ids, sizes), self.rule.request_ids(short_ids, sizes)
