"""Interface of a train backend: a model with its optimizer, distributed over ranks.

`DeepSpeedBackend` and `Fsdp2Backend` implement it. A backend does not know what the outputs mean or in which order models are updated
(`gcore.train.step`). All methods are collectives unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor, nn

from gcore.config.train import CriticSpec, TrainSpec
from gcore.models.publisher import NamedTensor
from gcore.models.replicas import Extent
from gcore.train.batching import Feeding, OutputsOf

TensorKind = Literal["served", "master", "exp_avg", "exp_avg_sq"]
"""Which value of a parameter. `served`: in the dtype of the forward pass; `master`: float32; the others are Adam's two
moments, float32.
"""
AdamKind = Literal["exp_avg", "exp_avg_sq"]


ADAM_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Settings of a model's optimizer and of how it is split over the ranks.

    `half`: forward and backward pass in bfloat16. `offload_state`: shards and Adam's state are in host memory.
    """

    zero_stage: int
    half: bool
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    offload_state: bool = False

    @classmethod
    def of(cls, train: TrainSpec, own: TrainSpec | CriticSpec) -> OptimizerSettings:
        """Take what all models share from `train`, weight decay and gradient clipping from `own`.

        `own`: the spec section with the model's own settings (policy: `train`, critic: `train.critic`).
        """
        half = train.dtype == "bf16"
        return cls(train.zero_stage, half, train.betas, own.weight_decay, own.max_grad_norm, train.offload_state)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The outcome of one optimizer update on all ranks.

    `applied`: False if it was skipped because the gradient norm was not finite. `grad_norm`: global, before clipping.
    """

    applied: bool
    grad_norm: float


class TrainBackend(Protocol):
    """A model in training, seen from one rank."""

    @property
    def module(self) -> nn.Module:
        """The module of the forward pass. Not a collective."""
        ...

    @property
    def feeding(self) -> Feeding:
        """How samples become the model's inputs. Not a collective."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape of every trained parameter by name, in the order of `tensors`. Not a collective."""
        ...

    @property
    def outputs_of(self) -> OutputsOf:
        """The function that computes the model's outputs for the scored tokens, [n, width].

        With sequence parallelism only for those in this rank's slice of the row. Calling it is a collective.
        """
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate this rank's part of the global loss. `last`: it is the last micro-batch of the update.

        With sequence parallelism `loss` is that of the whole sequence group, on each of its ranks; the gradient of each
        rank is the part of its own tokens (`gcore.train.backends.sequence_parallel`).
        """
        ...

    def flush(self) -> None:
        """Complete the gradients of an update whose last micro-batch was back-propagated without `last`."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients by `factor`, between the last `backward` and `update`.

        Not a collective.
        """
        ...

    def update(self, learning_rate: float) -> UpdateResult:
        """Clip and apply the accumulated gradients; skip the update if their global norm is not finite."""
        ...

    def tensors(self, kind: TensorKind) -> Iterator[NamedTensor]:
        """Gather every trained parameter, or its value of `kind`, in full on every rank, one by one.

        Gathering is a collective, so every rank must read the iterator to the end.
        """
        ...

    def buffers(self) -> Iterator[NamedTensor]:
        """The persistent buffers: tensors that a model saves in addition to its parameters. Not a collective."""
        ...

    def extents(self) -> Iterator[Extent]:
        """For each parameter, the range of elements that this rank updates; none where it has no element. Not a
        collective.
        """
        ...

    def pieces(self, kind: str, extents: Iterable[Extent]) -> Iterator[Tensor]:
        """This rank's values of `kind` (`master` or one of Adam's moments), flat, one tensor per extent. Not a
        collective.
        """
        ...

    def restore(self, kind: AdamKind, values: Iterable[NamedTensor]) -> None:
        """Set one of Adam's two moments from full tensors, in any order."""
        ...

    def restore_optimizer(self, states: Mapping[AdamKind, Path], adam_steps: int) -> None:
        """Set Adam's moments from safetensors files with the parameters' names, and its step count to `adam_steps`."""
        ...

    def count_updates(self, adam_steps: int) -> None:
        """Set Adam's step count to `adam_steps`."""
        ...

    def forward_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that a forward pass uses. Not a collective."""
        ...

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that only an update needs; some appear more than once. Not a collective."""
        ...


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, by name; the others are frozen."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def saved_buffers(module: nn.Module) -> Iterator[NamedTensor]:
    """The buffers that the module saves in addition to its parameters; usually none."""
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in saved:
            yield NamedTensor(name, buffer)


def forward_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor on this rank that the forward pass of a module uses, whole or split by a backend."""
    for parameter in module.parameters():
        # FSDP2's DTensor; its module costs a rank that does not use it a second.
        if (to_local := getattr(parameter, "to_local", None)) is not None:
            yield to_local()
            continue
        yield parameter.data
        # Under ZeRO stage 3 a parameter is empty between steps, and this attribute has the rank's part.
        if isinstance(own := getattr(parameter, "ds_tensor", None), Tensor):
            yield own
    yield from module.buffers()
