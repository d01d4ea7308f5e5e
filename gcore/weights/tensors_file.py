"""Writes a safetensors file tensor by tensor, so that a model never has to lie whole in the memory of one process.

The format: eight bytes with the header's length, a JSON header with type, shape and place of each tensor, then their
bytes, little-endian, without gaps. All names and shapes must therefore be known before the first tensor. Reading is left
to the safetensors library.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from gcore.weights.layout import FileEntry

Dtype = Literal["F64", "F32", "BF16", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
BYTES: Mapping[Dtype, int] = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Type and shape of a tensor that will be written."""

    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return BYTES[self.dtype] * math.prod(self.shape)


class TensorsFile:
    """A safetensors file being written. Use as a context manager; `entry` is there after the last tensor.

    Tensors come in the order of `tensors`; another one, or one of the wrong size, is a ValueError. Without `hashed` no
    digest is computed, which for a large model takes a while, and there is no `entry`.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorShape], *, hashed: bool = True) -> None:
        self._waiting = list(tensors.items())
        self._hashed = hashed
        self._digest = hashlib.sha256()
        self._size = 0
        self._unforced = 0
        self._file = path.open("wb")
        self._put(_header(tensors))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._waiting:
            raise ValueError(f"{len(self._waiting)} tensors were never written, the first is {self._waiting[0][0]}")

    def write(self, name: str, data: memoryview) -> None:
        """The next tensor's bytes."""
        self._expect(name, data)
        self._put(data)

    def write_through(self, name: str, data: memoryview, block: int, tick: Callable[[int], None]) -> None:
        """The next tensor's bytes, about `block` at a time; `tick` hears how many more were brought to the disk."""
        self._expect(name, data)
        flat = data.cast("B")
        for start in range(0, len(flat), block):
            part = flat[start : start + block]
            self._put(part)
            self._unforced += len(part)
            if self._unforced >= block:
                self.force(tick)

    def force(self, tick: Callable[[int], None]) -> None:
        """Bring what `write_through` wrote to the disk."""
        self._file.flush()
        os.fdatasync(self._file.fileno())
        forced, self._unforced = self._unforced, 0
        tick(forced)

    @property
    def entry(self) -> FileEntry:
        """Size and digest of what was written so far. ValueError if it was not hashed."""
        if not self._hashed:
            raise ValueError("this file was written without a digest")
        return FileEntry(size=self._size, sha256=self._digest.hexdigest())

    def _expect(self, name: str, data: memoryview) -> None:
        expected, shape = self._waiting.pop(0)
        if name != expected or data.nbytes != shape.nbytes:
            raise ValueError(f"{name} of {data.nbytes} bytes where {expected} of {shape.nbytes} is due")

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        if self._hashed:
            self._digest.update(data)
        self._size += memoryview(data).nbytes


def _header(tensors: Mapping[str, TensorShape]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        fields[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight
    return struct.pack("<Q", len(text)) + text
