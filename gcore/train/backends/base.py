"""Train backend: a model with its optimizer, distributed over ranks.

`DeepSpeedBackend` implements it. A backend does not know what the outputs mean or in which order models are updated
(`gcore.train.step`). All methods are collectives unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor, nn

from gcore.models.publisher import NamedTensor
from gcore.models.replicas import Extent
from gcore.train.batching import Feeding, LogitsOf

TensorKind = Literal["served", "master", "exp_avg", "exp_avg_sq"]
"""`served`: in the dtype of the forward pass; `master`: float32; the others are Adam's state, float32."""
AdamKind = Literal["exp_avg", "exp_avg_sq"]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Whether an update was applied, and the global gradient norm before clipping.

    Not applied: the norm was not finite.
    """

    applied: bool
    grad_norm: float


class TrainBackend(Protocol):
    """A model being trained."""

    @property
    def module(self) -> nn.Module:
        """The module of the forward pass. Not a collective."""
        ...

    @property
    def feeding(self) -> Feeding:
        """Device, vocabulary, and layout of rows. Not a collective."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter, in the order of `tensors`. Not a collective."""
        ...

    @property
    def outputs_of(self) -> LogitsOf:
        """Compute the model's outputs for the scored tokens, [n, width]."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate this rank's part of the global loss. `last`: the last micro-batch of the update."""
        ...

    def flush(self) -> None:
        """Finish the gradients of an update whose last micro-batches have no trained token."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the next update, after the last `backward`. Not a collective."""
        ...

    def update(self, learning_rate: float) -> UpdateResult:
        """Clip and apply the gradients; skip the update if their norm is not finite."""
        ...

    def tensors(self, kind: TensorKind) -> Iterator[NamedTensor]:
        """Gather every parameter, one by one, on every rank. A collective: every rank reads to the end."""
        ...

    def buffers(self) -> Iterator[NamedTensor]:
        """Tensors that a model saves in addition to its parameters. Not a collective."""
        ...

    def extents(self) -> Iterator[Extent]:
        """The extent of each parameter that this rank updates, which may be empty. Not a collective."""
        ...

    def pieces(self, kind: str, extents: Iterable[Extent]) -> Iterator[Tensor]:
        """This rank's own values of `master` or of Adam's state, flat, one per extent. Not a collective."""
        ...

    def restore(self, kind: AdamKind, values: Iterable[NamedTensor]) -> None:
        """Set one half of Adam's state from whole tensors, in any order."""
        ...

    def restore_optimizer(self, states: Mapping[AdamKind, Path], adam_steps: int) -> None:
        """Set Adam's state from safetensors files with the parameters' names, and its update count."""
        ...

    def count_updates(self, adam_steps: int) -> None:
        """Set Adam's update count."""
        ...

    def forward_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that a forward pass uses. Not a collective."""
        ...

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that only an update needs; some appear more than once. Not a collective."""
        ...
