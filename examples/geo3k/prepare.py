"""Geometry problems in the format of Geometry3K, and a small random model: `python examples/geo3k/prepare.py`.

The files have the columns of the data set `hiyouga/geometry3k` (`images`, `problem`, `answer`), so that the example can be
tried without a network. A problem is a drawn triangle with two known angles. Nothing can be learned with the random model.
The folder is written completely or not at all.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gcore.errors import DataError, GcoreError
from gcore.system.files import replace_folder

DEFAULT_TO = Path(".cache/examples/geo3k-tiny")
COUNTS = {"train": 64, "test": 16}
SIDE = 96
"""Height and width of a picture, in pixels."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def draw_triangle(left: int, right: int) -> bytes:
    """Return a PNG of a triangle with these angles at its base, in degrees; the third angle is called x."""
    from PIL import Image, ImageDraw

    base, floor = SIDE - 24, SIDE - 14
    up = base / (1 / math.tan(math.radians(left)) + 1 / math.tan(math.radians(right)))
    scale = min(1.0, (floor - 14) / up)
    ends = [(12.0, floor), (12 + base * scale, floor)]
    top = (12 + up * scale / math.tan(math.radians(left)), floor - up * scale)
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(picture)
    draw.polygon([*ends, top], outline="black")
    for (x, y), text in zip([*ends, top], (str(left), str(right), "x"), strict=True):
        draw.text((x - 5, y + (2 if y == floor else -12)), text, fill="black")
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def problems(count: int, first: int) -> Iterator[dict[str, Any]]:
    """Yield rows of the data set; no two triangles are equal."""
    for number in range(first, first + count):
        left, right = 35 + number % 40, 40 + 5 * (number // 40)
        yield {
            "images": [{"bytes": draw_triangle(left, right), "path": f"triangle-{number}.png"}],
            "problem": "<image>Find the angle x of the triangle, in degrees.",
            "answer": str(180 - left - right),
        }


def prepare(to: Path) -> dict[str, int]:
    """Write data and model into the folder `to`, and return the number of rows of each split. Raises DataError."""
    import pyarrow
    import pyarrow.parquet

    from gcore.testing.vision_models import make_tiny_vision_model

    if to.exists() and any(to.iterdir()) and not (to / "data").is_dir():
        raise DataError("the folder has other content", where=str(to), fix="Name another with --to")
    picture = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    text = pyarrow.string()
    schema = pyarrow.schema([("images", pyarrow.list_(picture)), ("problem", text), ("answer", text)])
    first = 0
    with replace_folder(to, owner="geo3k", durable=False) as draft:
        (draft / "data").mkdir()
        for split, count in COUNTS.items():
            table = pyarrow.Table.from_pylist(list(problems(count, first)), schema=schema)
            pyarrow.parquet.write_table(table, draft / "data" / f"{split}-00000-of-00001.parquet")
            first += count
        make_tiny_vision_model(draft / "model")
        (draft / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return COUNTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(description="Write geometry problems and a small random model.")
    parser.add_argument("--to", type=Path, default=DEFAULT_TO, help=f"default: {DEFAULT_TO}")
    to = parser.parse_args(arguments).to
    try:
        counts = prepare(to)
    except GcoreError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{to}: a random model, {counts['train']} prompts to train on, {counts['test']} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
