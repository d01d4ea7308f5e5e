"""Whether a model's weights are all there, by names and sizes, without torch and without reading them.

The header of a safetensors file says where its last tensor ends; a file that was not copied to its end is shorter. Told
before anything is started: later it would be an error in every engine and every rank. That the numbers are right is not
looked at.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from gcore.models.hub import INDEX, WHOLE
from gcore.models.names import ModelError

MAX_HEADER_BYTES = 100_000_000
_FIX = "Copy or download it again; it was not written to its end"


def check_whole(folder: Path) -> None:
    """Raises ModelError if a folder's weights are missing, or one of their files is cut off or no safetensors."""
    if (folder / INDEX).is_file():
        files = _files_of_index(folder / INDEX)
    else:
        files = [WHOLE]
        if not (folder / WHOLE).is_file():
            raise ModelError(
                f"the model folder has no weights ({WHOLE})",
                where=str(folder),
                fix="Save the model with its weights (model.save_pretrained)",
            )
    for name in files:
        _check_file(folder / name)


def _files_of_index(index: Path) -> list[str]:
    try:
        named = json.loads(index.read_bytes())["weight_map"].values()
        files = sorted({str(name) for name in named})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError("the index of the weights cannot be read", where=str(index), fix=_FIX) from error
    for name in files:
        if Path(name).name != name:
            raise ModelError(
                f"the index of the weights names a file of another folder ({name[:80]!r})",
                where=str(index),
                fix="Put its files beside it, and name them so",
            )
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing or not files:
        raise ModelError(
            f"{len(missing)} of {len(files)} files of weights are missing" + (f", {missing[0]}" if missing else ""),
            where=str(index.parent),
            fix="Copy or download the model again",
        )
    return files


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            header = file.read(length) if 8 + length <= min(size, MAX_HEADER_BYTES) else b""
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ModelError(f"cannot read the weights ({reason})", where=str(path), fix="Make it readable") from error
    if header.startswith(b"{"):
        expected = 8 + length + _end_of_tensors(header, path)
        if size < expected:
            raise ModelError(f"the file is cut off: it has {size} of {expected} bytes", where=str(path), fix=_FIX)
        if size == expected:
            return
    elif length < MAX_HEADER_BYTES and 8 + length > size:
        raise ModelError(f"the file is cut off: it has {size} bytes, not even its header", where=str(path), fix=_FIX)
    raise ModelError("the file is no safetensors file", where=str(path), fix="Save the model again")


def _end_of_tensors(header: bytes, path: Path) -> int:
    try:
        tensors: dict[str, Any] = json.loads(header)
        return max((int(t["data_offsets"][1]) for name, t in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(
            "the header of the safetensors file cannot be read", where=str(path), fix="Save the model again"
        ) from error
