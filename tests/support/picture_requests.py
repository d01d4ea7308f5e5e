"""Requests with pictures to engines that serve the tiny vision-language models: tokens, and pictures as a request has them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path

from gcore.media.protocol import blob_path
from gcore.testing.vision_models import IMAGE, VISION_END, VISION_START
from gcore.types import Medium


def short(*texts: list[int]) -> list[int]:
    """Texts with a picture between each two."""
    ids = list(texts[0])
    for text in texts[1:]:
        ids += [VISION_START, IMAGE, VISION_END, *text]
    return ids


def expanded(ids: list[int], counts: Iterable[int]) -> list[int]:
    """The tokens of `short` with as many image tokens for each picture as `counts` says."""
    left = iter(counts)
    return [one for token in ids for one in ([token] * next(left) if token == IMAGE else [token])]


def text_of(picture: bytes) -> str:
    """A picture as base64."""
    return base64.b64encode(picture).decode()


def store_picture(folder: Path, picture: bytes) -> Medium:
    """Put a picture of 32 x 32 pixels into an engine's folder of blobs."""
    medium = Medium("picture", hashlib.sha256(picture).hexdigest(), len(picture), (32, 32, 3), "uint8")
    path = folder / blob_path(medium.sha256)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(picture)
    return medium
