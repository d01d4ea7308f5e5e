"""A checkpoint's tensors in host memory: a copy that the next steps do not change while it goes to the disk.

Taken inside the step, tensor by tensor, so that a rank holds one gathered tensor at a time beside it. Only the rank that
writes keeps it: 12 bytes a parameter (float32 weight and Adam's two), for the policy and for the critic alike. There is one
copy at most; its memory is kept from one checkpoint to the next, which spares the machine finding it again.

Does not write (`gcore.train.writing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gcore.train.trained import Kind, NamedTensor, TrainedModel
from gcore.weights.layout import EXP_AVG_FILE, EXP_AVG_SQ_FILE, MODEL_FILE
from gcore.weights.tensors_file import Dtype, TensorShape

CHECKPOINT_KINDS: Mapping[str, Kind] = {MODEL_FILE: "master", EXP_AVG_FILE: "exp_avg", EXP_AVG_SQ_FILE: "exp_avg_sq"}
CODES: Mapping[torch.dtype, Dtype] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNED = 8
"""Each tensor's copy begins at a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor's shape and type in the file, and its bytes."""

    shape: TensorShape
    data: memoryview


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """What becomes a safetensors file: tensors by name, in the file's order."""

    name: str
    tensors: Mapping[str, CopiedTensor]

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(one.shape.nbytes for one in self.tensors.values())


class HostCopy:
    """One model's."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tell: Callable[[], None]) -> tuple[CopiedFile, ...]:
        """The model's weights and its optimizer's state as they are now. A collective. What was taken before is overwritten."""
        return tuple(self._file(name, kind, tell) for name, kind in CHECKPOINT_KINDS.items())

    def take_part(self, tell: Callable[[], None]) -> None:
        """What the ranks that do not write do meanwhile."""
        for kind in CHECKPOINT_KINDS.values():
            for _ in self._model.tensors(kind):
                tell()

    def _file(self, name: str, kind: Kind, tell: Callable[[], None]) -> CopiedFile:
        extra = list(self._model.buffers()) if name == MODEL_FILE else []
        sizes = [4 * torch.Size(shape).numel() for shape in self._model.shapes.values()]
        sizes += [one.tensor.numel() * one.tensor.element_size() for one in extra]
        memory = self._memory_of(name, sum(_aligned(size) for size in sizes))
        copied, at = {}, 0
        for one, dtype in self._all(kind, extra):
            size = one.tensor.numel() * dtype.itemsize
            place = memory[at : at + size]
            place.view(dtype).copy_(one.tensor.detach().reshape(-1))
            copied[one.name] = CopiedTensor(TensorShape(CODES[dtype], tuple(one.tensor.shape)), place.numpy().data)
            at += _aligned(size)
            tell()
        return CopiedFile(name, copied)

    def _all(self, kind: Kind, extra: list[NamedTensor]) -> Iterator[tuple[NamedTensor, torch.dtype]]:
        for one in self._model.tensors(kind):
            yield one, torch.float32
        for one in extra:
            yield one, one.tensor.dtype

    def _memory_of(self, name: str, size: int) -> Tensor:
        found = self._memory.get(name)
        if found is None or found.numel() != size:
            found = self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
