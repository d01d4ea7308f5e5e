"""A classifier's folder as SGLang must be shown it, so that it gives the numbers that the model's weights give.

SGLang 0.5.23 builds the heads of Qwen2 and Qwen3 with a bias. transformers has none there, so no weights hold one, and what chance
put into it at the start stays: every server would add another number to all its scores. Such a model is shown from a folder of links to
its files, with one file more, in which the bias is 0. Needs no torch; leaves the model's own folder as it is.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from gcore.models.folder import read_config
from gcore.models.hub import INDEX
from gcore.rollout.sglang.launch import SglangLaunch

BIASED = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
NAME = "score.bias"
FILE = "gcore-head-bias.safetensors"


def prepared(launch: SglangLaunch, scratch: Path) -> SglangLaunch:
    """The launch, of a folder in `scratch` where the model needs one."""
    folder = Path(launch.model)
    if launch.task != "classify" or not set(BIASED) & set(read_config(folder).get("architectures") or ()):
        return launch
    files = sorted(folder.glob("*.safetensors"))
    if any(NAME in header(file) for file in files):
        return launch
    shown = scratch / "model"
    shown.mkdir()
    for file in folder.iterdir():
        (shown / file.name).symlink_to(file.resolve())
    (shown / FILE).write_bytes(zero())
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_bytes())
        index["weight_map"][NAME] = FILE
        (shown / INDEX).unlink()
        (shown / INDEX).write_text(json.dumps(index))
    return launch.model_copy(update={"model": str(shown)})


def header(file: Path) -> dict[str, Any]:
    """A safetensors file's tensors, by name; none of a file that cannot be read (the server says more)."""
    try:
        with file.open("rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            found = json.loads(raw.read(length))
    except (OSError, ValueError, struct.error):
        return {}
    return found if isinstance(found, dict) else {}


def zero() -> bytes:
    """A safetensors file that holds the bias of one number, 0."""
    told = json.dumps({NAME: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    told += b" " * (-len(told) % 8)
    return struct.pack("<Q", len(told)) + told + bytes(4)
