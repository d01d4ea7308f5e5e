"""Picture files: what their header says, which are refused, and their canonical form."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from picture_files import decoded, encoded, picture
from PIL import Image, ImageOps, PngImagePlugin

from gcore.errors import DataError
from gcore.media.pictures import MAX_DECODE_PIXELS, PictureError, inspect_picture, normalize_picture


def same_size(height: int, width: int) -> tuple[int, int]:
    return height, width


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """A PNG file with a header of that size and next to no pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


# --- canonical form


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("JPEG", {"progressive": True}), ("WebP", {})])
def test_a_plain_picture_of_the_target_size_keeps_its_bytes(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    data = encoded(picture(), kind, **options)
    (tmp_path / "a").write_bytes(data)
    for source in (data, tmp_path / "a", str(tmp_path / "a")):
        facts = inspect_picture(source)
        assert (facts.format, facts.width, facts.height, facts.mode, facts.frames) == (kind, 12, 8, "RGB", 1)
        kept, medium = normalize_picture(source, (8, 12))
        assert kept == data
        assert medium == ("picture", hashlib.sha256(data).hexdigest(), len(data), (8, 12, 3), "uint8")


def test_another_size_gives_a_png_resized_by_the_bicubic_filter_and_asks_the_rule_once() -> None:
    asked = []

    def rule(height: int, width: int) -> tuple[int, int]:
        asked.append((height, width))
        return 16, 24

    data, medium = normalize_picture(encoded(picture()), rule)
    assert asked == [(8, 12)]
    assert medium.shape == (16, 24, 3)
    assert decoded(data).tobytes() == picture().resize((24, 16), Image.Resampling.BICUBIC).tobytes()
    assert normalize_picture(encoded(picture()), (16, 24))[0] == data
    assert normalize_picture(data, (16, 24))[0] == data, "a canonical picture stays as it is"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    lossless = {"lossless": True} if kind == "WebP" else {}
    data = encoded(picture(), kind, exif=exif_of(orientation), **lossless)
    upright = ImageOps.exif_transpose(decoded(data))
    facts = inspect_picture(data)
    assert (facts.width, facts.height) == upright.size
    result, medium = normalize_picture(data, same_size)
    assert decoded(result).tobytes() == upright.tobytes()
    assert medium.shape == (*upright.size[::-1], 3)
    assert (result == data) == (orientation == 1)
    assert not decoded(result).getexif().get(0x0112, 1) > 1


def test_exif_after_the_pixels_and_an_orientation_in_xmp_count() -> None:
    plain = encoded(picture())
    late = plain[:-12] + chunk(b"eXIf", exif_of(6).tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    for data in (late, encoded(picture(), pnginfo=info)):
        assert (inspect_picture(data).width, inspect_picture(data).height) == (8, 12)
        expected = ImageOps.exif_transpose(decoded(data)).tobytes()
        assert decoded(normalize_picture(data, same_size)[0]).tobytes() == expected


def test_transparent_pixels_are_composited_over_white() -> None:
    rgba = Image.new("RGBA", (4, 2), (255, 0, 0, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 0))
    rgba.putpixel((2, 0), (0, 0, 0, 128))
    for kind in ("PNG", "WebP"):
        lossless = {"lossless": True} if kind == "WebP" else {}
        result = decoded(normalize_picture(encoded(rgba, kind, **lossless), same_size)[0])
        assert result.mode == "RGB"
        assert [result.getpixel((x, 0)) for x in range(3)] == [(255, 0, 0), (255, 255, 255), (127, 127, 127)]
    grey = encoded(Image.new("LA", (4, 2), (0, 0)))
    assert decoded(normalize_picture(grey, same_size)[0]).getpixel((0, 0)) == (255, 255, 255)


def test_a_transparent_colour_and_a_transparent_palette_entry_become_white() -> None:
    rgb = Image.new("RGB", (4, 2), (1, 2, 3))
    palette = Image.new("P", (4, 2), 1)
    palette.putpalette([9, 9, 9, 50, 60, 70])
    for data in (encoded(rgb, transparency=(1, 2, 3)), encoded(palette, transparency=1)):
        result = decoded(normalize_picture(data, same_size)[0])
        assert result.getpixel((0, 0)) == (255, 255, 255)
        assert result.info.get("transparency") is None


@pytest.mark.parametrize(("mode", "kind"), [("P", "PNG"), ("L", "PNG"), ("1", "PNG"), ("CMYK", "JPEG"), ("L", "JPEG")])
def test_palette_grey_and_cmyk_pictures_become_rgb(mode: str, kind: str) -> None:
    data = encoded(picture(mode=mode), kind)
    assert inspect_picture(data).mode == mode
    result = decoded(normalize_picture(data, same_size)[0])
    assert result.mode == "RGB"
    assert result.tobytes() == decoded(data).convert("RGB").tobytes()


def test_sixteen_bits_keep_their_high_byte() -> None:
    grey = Image.frombytes("I;16", (2, 2), struct.pack("<4H", 0, 255, 256 * 7 + 255, 65535))
    result = decoded(normalize_picture(encoded(grey), same_size)[0])
    assert [result.getpixel(at)[0] for at in ((0, 0), (1, 0), (0, 1), (1, 1))] == [0, 0, 7, 255]
    rows = b"".join(b"\0" + struct.pack(">6H", *[256 * 5 + 200] * 6) for _ in range(2))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0))
    colour = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    data, _ = normalize_picture(colour, same_size)
    assert data != colour, "other decoders may read 16 bits otherwise"
    assert decoded(data).getpixel((0, 0)) == (5, 5, 5)


def test_metadata_and_colour_profiles_are_left_out_and_equal_input_gives_equal_output() -> None:
    data = encoded(picture(), icc_profile=b"profile", dpi=(72, 72), pnginfo=None)
    results = {normalize_picture(data, (16, 16))[0] for _ in range(3)}
    assert len(results) == 1
    assert not decoded(results.pop()).info


# --- refused


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP"])
def test_a_file_that_is_cut_off_is_refused_from_its_header_or_when_it_is_decoded(kind: str) -> None:
    data = encoded(picture(60, 40), kind)
    for length in (1, 7, 20, len(data) // 2, len(data) - 3):
        with pytest.raises(PictureError, match=r"damaged or cut off|not a PNG"):
            inspect_picture(data[:length])
        with pytest.raises(PictureError):
            normalize_picture(data[:length], same_size)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP"])
def test_damaged_bytes_give_a_picture_or_a_picture_error(kind: str) -> None:
    data = encoded(picture(60, 40), kind)
    dice = random.Random(kind)
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(dice.randint(1, 4)):
            broken[dice.randrange(len(data) if dice.random() < 0.5 else 60)] = dice.randrange(256)
        try:
            result, medium = normalize_picture(bytes(broken), (8, 8))
        except PictureError:
            continue
        assert decoded(result).size == (8, 8)
        assert medium.shape == (8, 8, 3)


@pytest.mark.parametrize("kind", ["PNG", "WebP"])
def test_an_animated_picture_is_refused(kind: str) -> None:
    frames = [picture(), ImageOps.invert(picture())]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
    with pytest.raises(PictureError, match=r"animated \(2 frames\)"):
        inspect_picture(data)


def test_a_jpeg_with_several_pictures_as_phones_write_it_counts_as_its_first(tmp_path: Path) -> None:
    data = encoded(picture(), "MPO", save_all=True, append_images=[picture(6, 4)])
    assert inspect_picture(data).frames == 1
    assert normalize_picture(data, same_size)[0] == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"GIF89a" + bytes(40), "not a PNG, JPEG or WebP"),
        (b"<svg></svg>", "not a PNG, JPEG or WebP"),
        (encoded(Image.new("RGB", (1, 1))), "single pixel"),
        (encoded(Image.new("L", (10_000, 3))), "10000x3 pixels; one side is more than 200 times"),
        (encoded(Image.new("L", (3, 603))), "more than 200 times"),
        (png_header(0, 5), "damaged"),
    ],
    ids=["empty", "gif", "svg", "pixel", "wide", "tall", "no width"],
)
def test_an_unusable_picture_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.png").write_bytes(data)
    for call in (inspect_picture, lambda source: normalize_picture(source, same_size)):
        with pytest.raises(PictureError, match=message) as caught:
            call(tmp_path / "a.png")
        assert caught.value.where == str(tmp_path / "a.png")
        assert caught.value.fix
        with pytest.raises(PictureError, match=message):
            call(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is a folder"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "does not exist"),
    ],
    ids=["missing", "folder", "fifo", "broken link"],
)
def test_a_path_without_a_file_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "a.png")
    with pytest.raises(PictureError, match=message):
        inspect_picture(tmp_path / "a.png")
    with pytest.raises(PictureError, match="cannot read"):
        inspect_picture("a\0b.png")


def webp_header(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + sides


def jpeg_header(width: int, height: int) -> bytes:
    data = bytearray(encoded(picture(), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("make", [png_header, webp_header, jpeg_header])
@pytest.mark.parametrize("side", [9_000, 16_000])
def test_a_huge_picture_in_a_small_file_is_refused_by_gcore_and_not_by_pillow(
    make: Callable[[int, int], bytes], side: int
) -> None:
    data = make(side, side)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (inspect_picture, lambda source: normalize_picture(source, (8, 8))):
            with pytest.raises(PictureError, match=f"{side}x{side} = {side * side} pixels, but at most"):
                call(data)
        with pytest.raises(PictureError, match="at most 95 are decoded"):
            inspect_picture(encoded(picture()), max_decode_pixels=95)
        assert inspect_picture(png_header(8000, 8000)).width == 8000
        # More than Pillow's own limit, at which it would warn.
        assert inspect_picture(png_header(10_000, 10_000), max_decode_pixels=10**8).width == 10_000
    assert MAX_DECODE_PIXELS < 80_000_000


def test_a_target_without_pixels_or_with_too_many_is_refused() -> None:
    for target in ((0, 8), (10_000, 10_000)):
        with pytest.raises(PictureError, match="would be resized"):
            normalize_picture(encoded(picture()), target)


def test_the_module_imports_no_pillow() -> None:
    program = "import sys, gcore.media.pictures; print('PIL' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_missing_pillow_is_an_error_about_the_installation_and_not_about_a_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encoded(picture())
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"need Pillow.*pip install 'gcore\[vision\]'") as caught:
        inspect_picture(data)
    assert not isinstance(caught.value, PictureError)
