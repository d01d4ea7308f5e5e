"""What engines are served of a policy: all of its weights, or the base model with the adapters added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from gcore.config.train import LoraSpec
from gcore.models.adapters import merged_tensors, served_shapes, stored_name, stored_shapes
from gcore.models.dtypes import CODES
from gcore.models.layout import TensorShape
from gcore.models.publisher import NamedTensor
from gcore.train.backends.base import TrainBackend


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
        return served_shapes(stored_shapes(self._base), self._dtype)

    def tensors(self, *, writes: bool, tell: Callable[[], None]) -> Iterator[NamedTensor]:
        """Gather the adapters, a collective; then merge them on the rank that writes."""
        adapters = {}
        for one in self._policy.tensors("master"):
            adapters[stored_name(one.name)] = one.tensor.detach().cpu().clone()
            tell()
        if writes:
            yield from merged_tensors(self._base, adapters, self._scale, self._dtype)
