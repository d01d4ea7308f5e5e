"""The safetensors format without torch: dtypes, shapes, headers, and the check of a file.

A file has eight bytes with the header's length, a JSON header with dtype, shape and position of each tensor, then their
bytes, little-endian, without gaps.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gcore.models.hubs import ModelError
from gcore.system.files import check_regular_file

Dtype = Literal[
    "C64", "F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F6_E2M3",
    "F6_E3M2", "F4", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"
]  # fmt: skip
"""Name of a dtype in a safetensors file."""

BITS: Mapping[Dtype, int] = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits per element of each dtype (safetensors 0.8)."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Dtype and shape of a tensor in a safetensors file."""

    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return BITS[self.dtype] * math.prod(self.shape) // 8


MAX_HEADER_BYTES = 100_000_000
"""Longest header that the safetensors library accepts."""

_FIX = "Copy or download it again; it is incomplete"


def check_weight_file(path: Path) -> Mapping[str, TensorShape]:
    """Return dtype and shape of each tensor in a safetensors file, by name. Does not read the tensors.

    Raises ModelError unless `path` is a complete safetensors file that the safetensors library accepts.
    """
    try:
        check_regular_file(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            header = file.read(length) if 8 + length <= min(size, MAX_HEADER_BYTES) else b""
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ModelError(
            f"cannot read the weights ({reason})",
            where=str(path),
            fix="Copy or download it again, and make it readable",
        ) from error
    if header.startswith(b"{"):
        tensors = _read_header(header, path)
        expected = 8 + length + max((one.end for one in tensors.values()), default=0)
        if size < expected:
            raise ModelError(f"the file is cut off: it has {size} of {expected} bytes", where=str(path), fix=_FIX)
        if size == expected:
            _check_spans(tensors, path)
            return {name: one.tensor for name, one in tensors.items()}
    elif length < MAX_HEADER_BYTES and 8 + length > size:
        raise ModelError(f"the file is cut off: it has {size} bytes, not even its header", where=str(path), fix=_FIX)
    raise ModelError("the file is not a safetensors file", where=str(path), fix="Save the model again")


class _StoredTensor(NamedTuple):
    """A tensor in a safetensors file: where its bytes begin and end, counted from the end of the header."""

    tensor: TensorShape
    begin: int
    end: int


def _read_header(header: bytes, path: Path) -> Mapping[str, _StoredTensor]:
    found, name = {}, ""
    try:
        for name, one in json.loads(header.decode()).items():
            name.encode()
            if name == "__metadata__":
                if one is not None and any(type(value) is not str for value in one.values()):
                    raise ValueError("the metadata are no strings")
                continue
            dtype, shape, (begin, end) = one["dtype"], one["shape"], one["data_offsets"]
            if dtype not in BITS or type(shape) is not list:
                raise ValueError("its dtype or shape is unknown")
            if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
                raise ValueError("a size is not a whole number")
            found[name] = _StoredTensor(TensorShape(dtype, tuple(shape)), begin, end)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        where = f" (tensor {name!r:.80})" if name else ""
        raise ModelError(
            f"cannot read the header of the safetensors file{where}", where=str(path), fix="Save the model again"
        ) from error
    return found


def _check_spans(tensors: Mapping[str, _StoredTensor], path: Path) -> None:
    """Raise ModelError unless the tensors follow each other without gaps, and each has the bytes of its dtype and shape."""
    expected = 0
    for name, (tensor, begin, end) in sorted(tensors.items(), key=lambda item: item[1][1:]):
        if begin != expected or 8 * (end - begin) != BITS[tensor.dtype] * math.prod(tensor.shape):
            raise ModelError(
                f"tensor {name!r:.80} ({tensor.dtype} {list(tensor.shape)}) has bytes {begin} to {end} in the file's header, "
                f"and should have {tensor.nbytes} bytes from {expected}",
                where=str(path),
                fix="Save the model again",
            )
        expected = end


def header_bytes(tensors: Mapping[str, TensorShape]) -> bytes:
    """Return what comes before the tensors in a file: the header and its length, so that the tensors begin aligned to eight bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        fields[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the tensors to eight bytes
    return struct.pack("<Q", len(text)) + text
