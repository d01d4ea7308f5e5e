"""Train backend: a model under an optimizer, however it is spread over ranks.

`DeepSpeedBackend` implements it. What a model's outputs mean, and in which order models are updated (`gcore.train.step`), is no
matter of a backend. All methods are collectives but those that say that they are not.
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
"""`served`: as forward computes with it; `master`: float32; the rest is Adam's, float32."""
AdamKind = Literal["exp_avg", "exp_avg_sq"]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Whether an update was made, and the global gradient norm before clipping; not made: the norm was not finite."""

    applied: bool
    grad_norm: float


class TrainBackend(Protocol):
    """A model being trained."""

    @property
    def module(self) -> nn.Module:
        """The module that computes forward. Not a collective."""
        ...

    @property
    def feeding(self) -> Feeding:
        """Device, vocabulary, and how rows are laid out. Not a collective."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every parameter's shape, in the order in which `tensors` gives them. Not a collective."""
        ...

    @property
    def outputs_of(self) -> LogitsOf:
        """Compute the model's outputs at the scored places, [n, width]."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate this rank's part of the global loss. `last`: the last micro-batch of the update."""
        ...

    def flush(self) -> None:
        """Finish the gradients of an update whose last micro-batches have no trained token."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply what the next update applies, after the last `backward`. Not a collective."""
        ...

    def update(self, learning_rate: float) -> UpdateResult:
        """Clip and apply the gradients; leave them out if their norm is not finite."""
        ...

    def tensors(self, kind: TensorKind) -> Iterator[NamedTensor]:
        """Gather every parameter, one by one, on every rank. A collective: every rank reads to the end."""
        ...

    def buffers(self) -> Iterator[NamedTensor]:
        """Tensors that a model saves besides its parameters. Not a collective."""
        ...

    def extents(self) -> Iterator[Extent]:
        """The extent of each parameter that this rank updates, which may be empty. Not a collective."""
        ...

    def pieces(self, kind: str, extents: Iterable[Extent]) -> Iterator[Tensor]:
        """This rank's own values of `master` or Adam's, flat, one for each of its extents. Not a collective."""
        ...

    def restore(self, kind: AdamKind, values: Iterable[NamedTensor]) -> None:
        """Set one half of Adam's state from whole tensors, in any order."""
        ...

    def restore_optimizer(self, states: Mapping[AdamKind, Path], adam_steps: int) -> None:
        """Set Adam's state from safetensors files under the parameters' names, and its count of updates."""
        ...

    def count_updates(self, adam_steps: int) -> None:
        """Set Adam's count of updates."""
        ...

    def forward_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that a forward pass computes with. Not a collective."""
        ...

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that only an update needs, some of them more than once. Not a collective."""
        ...
