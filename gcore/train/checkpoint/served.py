"""What engines are served of a policy: all of its weights, or the base model with the adapters added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from gcore.config.train import LoraSpec
from gcore.models.adapters import merged_tensors, stored_name, stored_shapes
from gcore.models.layout import Dtype, TensorShape
from gcore.models.publisher import NamedTensor
from gcore.train.backends.base import TrainBackend

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
"""The name of each dtype in a safetensors file."""


FLOATS = {CODES[dtype] for dtype in CODES if dtype.is_floating_point}


class ServedWeights(Protocol):
    """The tensors of a complete model, as its files have them."""

    def shapes(self) -> Mapping[str, TensorShape]:
        """Dtype and shape of each tensor, in the order of `tensors`. Not a collective."""
        ...

    def tensors(self, *, writes: bool, tell: Callable[[], None]) -> Iterator[NamedTensor]:
        """Yield every tensor on the rank that `writes`; the others must read their iterator to the end too."""
        ...


class WholeModel:
    """A policy of which all weights are trained; implements `ServedWeights`."""

    def __init__(self, policy: TrainBackend, dtype: torch.dtype) -> None:
        self._policy = policy
        self._dtype = dtype

    def shapes(self) -> Mapping[str, TensorShape]:
        """Parameters in the served dtype, and buffers in their own."""
        found = {name: TensorShape(CODES[self._dtype], shape) for name, shape in self._policy.shapes.items()}
        buffers = ((one.name, one.tensor) for one in self._policy.buffers())
        return found | {name: TensorShape(CODES[one.dtype], tuple(one.shape)) for name, one in buffers}

    def tensors(self, *, writes: bool, tell: Callable[[], None]) -> Iterator[NamedTensor]:
        """Gather the parameters one by one. A collective."""
        for one in self._policy.tensors("served"):
            yield NamedTensor(one.name, one.tensor.to(self._dtype))
        yield from self._policy.buffers()


class MergedModel:
    """A policy with adapters; implements `ServedWeights`.

    The sum is computed in float32 from the base model's files and rounded once.
    """

    def __init__(self, policy: TrainBackend, lora: LoraSpec, base: Path, dtype: torch.dtype) -> None:
        self._policy = policy
        self._scale = lora.scale
        self._base = base
        self._dtype = dtype

    def shapes(self) -> Mapping[str, TensorShape]:
        """As in the base model's files, floating-point tensors in the served dtype."""
        own = CODES[self._dtype]
        return {
            name: TensorShape(own if one.dtype in FLOATS else one.dtype, one.shape)
            for name, one in stored_shapes(self._base).items()
        }

    def tensors(self, *, writes: bool, tell: Callable[[], None]) -> Iterator[NamedTensor]:
        """Gather the adapters, a collective; then merge them on the rank that writes."""
        adapters = {}
        for one in self._policy.tensors("master"):
            adapters[stored_name(one.name)] = one.tensor.detach().cpu().clone()
            tell()
        if writes:
            yield from merged_tensors(self._base, adapters, self._scale, self._dtype)
