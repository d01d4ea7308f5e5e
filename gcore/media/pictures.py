"""Picture files: read the facts from the header, and convert a file to its canonical form.

The canonical form of a picture is upright, 8-bit RGB, and of the size that the model's processor would choose. So no
later consumer rotates, converts or resizes, and the engine and the trainer see the same pixels. A file that is already
so keeps its bytes. Any other file is converted once, and stored as a PNG without metadata:

- The EXIF orientation (or that of XMP) is applied.
- Transparent pixels are composited over white.
- 16-bit channels keep their high byte.
- Palette, grey and CMYK pictures are converted with Pillow's formulas. Colour profiles are ignored.
- The picture is resized once, with Pillow's bicubic filter.

Equal input gives equal output with the same builds of Pillow and zlib.

The size is read from the file's first bytes before Pillow opens it, so a small file with a huge picture is refused
without decoding. Pillow is imported on first use: controllers import this module, but do not all have pictures.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from gcore.errors import DataError
from gcore.types import Medium

if TYPE_CHECKING:
    from PIL import Image

PictureFormat = Literal["PNG", "JPEG", "WebP"]
SizeRule = Callable[[int, int], tuple[int, int]]
"""Function that maps height and width of a picture in pixels to the height and width that the model's processor uses."""

MAX_DECODE_PIXELS = 64 << 20
"""Default limit for width x height of a picture. A decoded picture of this size has 192 MiB."""

MAX_FILE_BYTES = 256 << 20
"""Maximum size of a picture file in bytes."""

MOST_PICTURES = 256
"""Maximum number of pictures in one prompt."""

MAX_ASPECT = 200
"""Maximum ratio of the longer to the shorter side, as in Qwen's processors."""

_ORIENTATION = 0x0112
_SWAPPED = 5
"""EXIF orientations from 5 on exchange width and height."""

_MAX_CHUNKS = 1 << 18
_BLOCK = 1 << 20
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N", "I")

_BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(struct.error, zlib.error, MemoryError, RecursionError),
)
"""Exceptions that Pillow raises for damaged files."""

_FIX = "Replace the file, or remove the entry that names it"


class PictureError(DataError):
    """A picture cannot be used."""


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """What the header of a picture file says. `width`, `height`: in pixels, after the EXIF rotation.

    `mode`: Pillow's name of the pixel format. `frames`: number of pictures in the file. `plain`: whether the pixels are
    upright 8-bit RGB already.
    """

    format: PictureFormat
    width: int
    height: int
    mode: str
    frames: int
    plain: bool


def inspect_picture(source: bytes | str | Path, *, max_decode_pixels: int = MAX_DECODE_PIXELS) -> PictureFacts:
    """Read the facts of a picture from its header, without decoding it. `source`: the file's bytes, or its path.

    `max_decode_pixels`: limit for width x height. Raises PictureError for a file that is missing, not regular, empty,
    cut off, damaged, animated, of another format, too large, of one pixel, or more than `MAX_ASPECT` times as long as
    wide.
    """
    with open_picture(source) as (file, where):
        return _inspect(file, where, max_decode_pixels)[0]


def normalize_picture(
    source: bytes | str | Path,
    target: SizeRule | tuple[int, int],
    *,
    max_decode_pixels: int = MAX_DECODE_PIXELS,
) -> tuple[bytes, Medium]:
    """Return the canonical form of a picture and its description. `source`: the file's bytes, or its path.

    `target`: height and width of the result in pixels, or the rule that gives them. The file's own bytes are returned
    if it is upright 8-bit RGB of that size; otherwise those of a PNG. Raises PictureError as `inspect_picture`, also
    for a file that cannot be decoded, and what the rule raises.
    """
    with open_picture(source) as (file, where):
        facts, image = _inspect(file, where, max_decode_pixels)
        height, width = target(facts.height, facts.width) if callable(target) else target
        if min(height, width) < 1 or height * width > max_decode_pixels:
            raise PictureError(
                f"the picture would be resized to {width}x{height} pixels, but at most {max_decode_pixels} are allowed",
                where=where,
                fix="Lower data.max_pixels",
            )
        try:
            image.load()
            if facts.plain and (facts.height, facts.width) == (height, width):
                file.seek(0)
                data = file.read()
            else:
                data = _encode(_resize(_turn(_to_rgb(image), _orientation(image)), height, width))
        except _BROKEN as error:
            raise _damaged(where, error) from error
    return data, Medium("picture", hashlib.sha256(data).hexdigest(), len(data), (height, width, 3), "uint8")


@contextlib.contextmanager
def open_picture(source: bytes | str | Path) -> Iterator[tuple[BinaryIO, str | None]]:
    """Open a picture file. Yields it and how errors name it. Raises PictureError for a file that is missing, not regular,
    empty or larger than `MAX_FILE_BYTES`."""
    if isinstance(source, bytes):
        _check_length(len(source), None)
        yield io.BytesIO(source), None
        return
    where = str(source)
    try:
        # Without O_NONBLOCK the open of a fifo would wait for a writer.
        handle = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PictureError("the picture does not exist", where=where, fix="Correct the path in the entry") from error
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise PictureError(f"cannot read the picture ({reason})", where=where, fix=_FIX) from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise PictureError(f"the picture is {kind}", where=where, fix="Name a PNG, JPEG or WebP file")
    with os.fdopen(handle, "rb") as file:
        _check_length(found.st_size, where)
        yield file, where


def _check_length(size: int, where: str | None) -> None:
    if not size:
        raise PictureError("the picture file is empty", where=where, fix=_FIX)
    if size > MAX_FILE_BYTES:
        raise PictureError(
            f"the picture file has {size} bytes, but at most {MAX_FILE_BYTES} are allowed", where=where, fix=_FIX
        )


def _damaged(where: str | None, error: BaseException | None = None) -> PictureError:
    reason = "" if error is None else f" ({str(error) or type(error).__name__})"
    return PictureError(f"the picture file is damaged or cut off{reason}", where=where, fix=_FIX)


@dataclass(frozen=True, slots=True)
class _Header:
    """What the file's first bytes say. `width`, `height`: as stored. `bits`: per channel. `late_exif`: EXIF data after
    the pixels, which Pillow finds only by decoding. `late_text`: whether there is other metadata after them.
    """

    format: PictureFormat
    width: int
    height: int
    bits: int = 8
    late_exif: bytes = b""
    late_text: bool = False


def _inspect(file: BinaryIO, where: str | None, max_pixels: int) -> tuple[PictureFacts, Image.Image]:
    """Check a picture file without decoding it. Return its facts, and the opened image, whose pixels are not loaded.

    Raises PictureError.
    """
    header = _read_header(file, where)
    _check_size(header.width, header.height, where, max_pixels)
    image = _open_image(file, header, where)
    width, height = image.size
    frames = int(getattr(image, "n_frames", 1))
    if frames != 1:
        raise PictureError(
            f"the picture is animated ({frames} frames)", where=where, fix="Save one frame as a PNG, JPEG or WebP file"
        )
    orientation = _orientation(image)
    if orientation >= _SWAPPED:
        width, height = height, width
    _check_size(width, height, where, max_pixels)
    opaque = image.mode == "RGB" and "transparency" not in image.info
    plain = opaque and header.bits == 8 and orientation == 1 and not header.late_exif and not header.late_text
    return PictureFacts(header.format, width, height, image.mode, frames, plain), image


def _check_size(width: int, height: int, where: str | None, max_pixels: int) -> None:
    """Raise PictureError if a picture of this size cannot be used."""
    if width < 1 or height < 1:
        raise _damaged(where)
    if width * height > max_pixels:
        raise PictureError(
            f"the picture has {width}x{height} = {width * height} pixels, but at most {max_pixels} are decoded",
            where=where,
            fix="Make the picture smaller, or remove the entry that names it",
        )
    if width * height == 1:
        raise PictureError("the picture has a single pixel", where=where, fix=_FIX)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureError(
            f"the picture has {width}x{height} pixels; one side is more than {MAX_ASPECT} times as long as the other",
            where=where,
            fix="Cut or pad the picture, or remove the entry that names it",
        )


def _read_header(file: BinaryIO, where: str | None) -> _Header:
    beginning = file.read(32)
    file.seek(0)
    try:
        if beginning.startswith(b"\x89PNG\r\n\x1a\n"):
            return _read_png(file)
        if beginning.startswith(b"\xff\xd8\xff"):
            return _read_jpeg(file)
        if beginning[:4] == b"RIFF" and beginning[8:12] == b"WEBP":
            return _read_webp(file, beginning)
    except (ValueError, struct.error) as error:
        raise PictureError(f"the picture file is damaged or cut off ({error})", where=where, fix=_FIX) from error
    except OSError as error:
        raise PictureError(f"cannot read the picture ({error.strerror or error})", where=where, fix=_FIX) from error
    raise PictureError("the file is not a PNG, JPEG or WebP picture", where=where, fix="Convert it to one of them")


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("the file ends early")
    return data


def _read_png(file: BinaryIO) -> _Header:
    """Walk over the chunks of a PNG file up to its end. Raises ValueError, struct.error."""
    file.seek(8)
    width = height = bits = 0
    pixels = late_text = False
    late_exif = b""
    for number in range(_MAX_CHUNKS):
        length, kind = struct.unpack(">I4s", _read_exactly(file, 8))
        if (number == 0) != (kind == b"IHDR"):
            raise ValueError("the first chunk is not IHDR, or IHDR occurs twice")
        after = file.tell() + length + 4
        if kind == b"IHDR":
            width, height, bits = struct.unpack(">IIB", _read_exactly(file, 9))
        elif kind == b"IDAT":
            pixels = True
        elif kind == b"IEND":
            if not pixels:
                raise ValueError("there are no pixels")
            _read_exactly(file, length + 4)
            return _Header("PNG", width, height, bits, late_exif, late_text)
        elif pixels and kind == b"eXIf" and length <= _BLOCK:
            late_exif = _read_exactly(file, length)
        elif pixels and kind in (b"iTXt", b"zTXt", b"tEXt", b"eXIf"):
            late_text = True
        file.seek(after)
    raise ValueError(f"more than {_MAX_CHUNKS} chunks")


def _read_jpeg(file: BinaryIO) -> _Header:
    """Walk over the segments of a JPEG file up to the pixels, and look for its end. Raises ValueError, struct.error."""
    file.seek(2)
    width = height = 0
    for _ in range(_MAX_CHUNKS):
        if _read_exactly(file, 1) != b"\xff":
            continue  # as decoders do, skip bytes between segments
        marker = 0xFF
        while marker == 0xFF:
            marker = _read_exactly(file, 1)[0]
        if marker == 0xD9:
            raise ValueError("there are no pixels")
        if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:
            continue
        (length,) = struct.unpack(">H", _read_exactly(file, 2))
        after = file.tell() + length - 2
        if length < 2:
            raise ValueError("a segment has no length")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            _, height, width = struct.unpack(">BHH", _read_exactly(file, 5))
        if marker == 0xDA:
            file.seek(after)
            _find_end(file)
            return _Header("JPEG", width, height)
        file.seek(after)
    raise ValueError(f"more than {_MAX_CHUNKS} segments or bytes between them")


def _find_end(file: BinaryIO) -> None:
    """Raise ValueError if a JPEG file has no end marker after its pixels, which cannot contain that marker."""
    before = b""
    while block := file.read(_BLOCK):
        if b"\xff\xd9" in before + block:
            return
        before = block[-1:]
    raise ValueError("the file ends early")


def _read_webp(file: BinaryIO, beginning: bytes) -> _Header:
    """Read the size of a WebP picture, and compare the file's length with its header. Raises ValueError, struct.error."""
    length, kind = struct.unpack("<4xI4x4s", beginning[:16])
    if file.seek(0, os.SEEK_END) < length + 8:
        raise ValueError("the file ends early")
    file.seek(0)
    if kind == b"VP8X":
        width = int.from_bytes(beginning[24:27], "little") + 1
        height = int.from_bytes(beginning[27:30], "little") + 1
    elif kind == b"VP8L":
        (packed,) = struct.unpack("<I", beginning[21:25])
        width, height = (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", beginning[26:30]))
    else:
        raise ValueError(f"unknown chunk {kind!r}")
    return _Header("WebP", width, height)


def _open_image(file: BinaryIO, header: _Header, where: str | None) -> Image.Image:
    """Open a picture with Pillow's class for its format. `Image.open` would also check the size, and warn.

    A JPEG file with several pictures, as phones write them, counts as its first picture. Raises PictureError, and DataError
    if Pillow is missing.
    """
    try:
        from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
    except ImportError as error:
        raise without_pillow(error) from error
    kinds: dict[str, Callable[[BinaryIO], Image.Image]] = {
        "PNG": PngImagePlugin.PngImageFile,
        "JPEG": JpegImagePlugin.JpegImageFile,
        "WebP": WebPImagePlugin.WebPImageFile,
    }
    try:
        file.seek(0)
        image = kinds[header.format](file)
        # Pillow's own method for PNG files decodes the pixels to find EXIF data after them.
        exif = Image.Image.getexif(image)
        if header.late_exif:
            exif.load(header.late_exif)
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise _damaged(where, error) from error
    return image


def without_pillow(error: ImportError) -> DataError:
    """The error about a missing Pillow, which is not about a picture."""
    return DataError(
        f"pictures need Pillow, which cannot be imported ({error})", fix="Install it: pip install 'gcore[vision]'"
    )


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened picture, 1 to 8; 1 is upright."""
    from PIL import Image

    try:
        value = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except _BROKEN:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded picture to RGB."""
    from PIL import Image

    if image.mode in _GREY_16:
        return _high_bytes(image).convert("RGB")
    if image.mode[-1:] in "Aa" or "transparency" in image.info:
        over = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(over, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _high_bytes(image: Image.Image) -> Image.Image:
    """Convert a grey picture of 16 bits to 8 bits. Pillow's `convert` would clip values above 255."""
    from PIL import Image

    data = image.tobytes()
    if image.mode == "I":  # 32-bit integers in the machine's order, with values of 16 bits
        high = data[1::4] if struct.pack("=I", 1)[0] == 1 else data[2::4]
    else:
        big = image.mode == "I;16B" or (image.mode == "I;16N" and struct.pack("=I", 1)[0] == 0)
        high = data[0 if big else 1 :: 2]
    return Image.frombytes("L", image.size, high)


def _turn(image: Image.Image, orientation: int) -> Image.Image:
    """Apply an EXIF orientation."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image if orientation == 1 else image.transpose(turns[orientation])


def _resize(image: Image.Image, height: int, width: int) -> Image.Image:
    from PIL.Image import Resampling

    return image if image.size == (width, height) else image.resize((width, height), Resampling.BICUBIC)


def encode_png(pixels: Any) -> bytes:
    """Return the PNG file of `pixels`, a numpy array [height, width, 3] of uint8."""
    from PIL import Image

    return _encode(Image.fromarray(pixels))


def blank_png(height: int, width: int) -> bytes:
    """Return the PNG file of a grey picture of this size in pixels. Raises DataError if Pillow is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise without_pillow(error) from error
    return _encode(Image.new("RGB", (width, height), (128, 128, 128)))


def _encode(image: Image.Image) -> bytes:
    """Return a picture as a PNG file without metadata."""
    image.info = {}  # otherwise Pillow writes the colour profile
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=3)
    return out.getvalue()
