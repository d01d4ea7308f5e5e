"""Picture files for tests."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def picture(width: int = 12, height: int = 8, mode: str = "RGB") -> Image.Image:
    """A picture in which every pixel differs from its neighbours."""
    image = Image.new("RGB", (width, height))
    image.putdata([(x * 19 % 256, y * 31 % 256, (x + y) * 7 % 256) for y in range(height) for x in range(width)])
    return image if mode == "RGB" else image.convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decoded(data: bytes) -> Image.Image:
    """The picture in a file."""
    image = Image.open(io.BytesIO(data))
    image.load()
    return image
