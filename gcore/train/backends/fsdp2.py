"""A model under torch's FSDP2 (`fully_shard`), policy or critic: exact global gradients, updates, and full tensors.

- Every parameter is split by rows over the ranks. Its shard is float32 and is also what Adam updates. A layer's
  weights are gathered in the dtype of the forward pass when it computes, and its gradients are reduced in float32
  after each backward pass, so that a rank never holds more than one layer's whole gradient.
- The caller scales each micro-batch's loss to its part of the global loss. FSDP averages over ranks, so the loss is
  multiplied by their number here. All ranks must run the same number of forwards and backwards.
- `train.zero_stage: 3` frees a layer's gathered weights after its forward pass and gathers them again for the backward
  pass; stages 1 and 2 keep them in between.
- The optimizer is torch's own, on the local shards.

Every rank loads the full weights before they are split: host memory must hold the model once per rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from gcore.config.train import TrainSpec
from gcore.models.adapters import stored_name
from gcore.models.publisher import NamedTensor
from gcore.models.replicas import Extent
from gcore.train.backends.base import (
    ADAM_EPS,
    AdamKind,
    OptimizerSettings,
    TensorKind,
    UpdateResult,
    forward_tensors,
    saved_buffers,
    trained_parameters,
)
from gcore.train.batching import Feeding, OutputsOf
from gcore.train.hf_models import set_evaluation_mode

log = logging.getLogger("gcore.train")


class Fsdp2Backend:
    """A model in training; implements `TrainBackend`. All methods are collectives unless stated otherwise."""

    def __init__(self, module: nn.Module, how: OptimizerSettings, feeding: Feeding) -> None:
        """Split `module` over the ranks, and create its optimizer with Adam's state zero. The module must be in
        float32.
        """
        self.module = module
        self.feeding = feeding
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(parameter.shape) for name, parameter in trained_parameters(module).items()
        }
        self._how = how
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._served = torch.bfloat16 if how.half else torch.float32
        buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
        for parameter in module.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(self._served)  # only what is trained needs float32
        _shard(module, half=how.half, device=feeding.device, reshard=how.zero_stage == 3, offload=how.offload_state)
        for name, buffer in module.named_buffers():
            buffer.data = buffers[name].to(feeding.device)  # rotary frequencies need full precision
        set_evaluation_mode(module)
        self.outputs_of: OutputsOf = feeding.outputs_of(module)
        self._sharded: dict[str, Any] = dict(trained_parameters(module))
        """The trained parameters as FSDP's DTensors. The module itself has gathered ones while it computes."""
        self._own = {name: nn.Parameter(one.to_local().detach()) for name, one in self._sharded.items()}
        """This rank's rows of each parameter: the memory of its shard, as the optimizer's parameter."""
        self._optimizer = self._make_optimizer()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate this rank's part of the global loss, and add the reduced gradient to this rank's shards."""
        (loss * self._ranks).backward()

    def flush(self) -> None:
        """Do nothing: gradients are complete after each backward pass."""

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients by `factor`, between the last `backward` and `update`.

        Not a collective.
        """
        for gradient in self._gradients():
            gradient.mul_(factor)

    @torch.no_grad()
    def update(self, learning_rate: float) -> UpdateResult:
        """Clip and apply the accumulated gradients; skip the update if their global norm is not finite."""
        norm = self._gradient_norm()
        applied = math.isfinite(norm)
        if applied:
            self.scale_gradients(min(1.0, self._how.max_grad_norm / (norm + 1e-6)))
            for name, own in self._own.items():
                gradient = self._sharded[name].grad
                # A parameter without a gradient still decays and moves on by its momentum, as under DeepSpeed.
                own.grad = torch.zeros_like(own) if gradient is None else gradient.to_local()
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        for name, own in self._own.items():
            own.grad = self._sharded[name].grad = None
        self._reshard()
        return UpdateResult(applied, norm if applied else float("inf"))

    def tensors(self, kind: TensorKind) -> Iterator[NamedTensor]:
        """Gather every parameter, or its value of `kind`, in full on every rank, one by one.

        Gathering is a collective, so every rank must read the iterator to the end.
        """
        for name in self.shapes:
            whole = self._gathered(name, self._value(name, kind))
            yield NamedTensor(name, whole.to(self._served) if kind == "served" else whole)

    def buffers(self) -> Iterator[NamedTensor]:
        """The persistent buffers, which a model saves in addition to its parameters; usually none. Not a collective."""
        return saved_buffers(self.module)

    def extents(self) -> Iterator[Extent]:
        """For each parameter of which this rank has rows, the range of its flat elements. Not a collective."""
        for name, own in self._own.items():
            if own.numel():
                first, _ = self._rows(name)
                yield Extent(name=name, start=first * (own.numel() // own.shape[0]), numel=own.numel())

    def pieces(self, kind: str, extents: Iterable[Extent]) -> Iterator[Tensor]:
        """This rank's values of `kind` (`master`, `exp_avg` or `exp_avg_sq`), flat, one tensor per extent. Not a
        collective.
        """
        for extent in extents:
            yield self._value(extent.name, kind).flatten()

    @torch.no_grad()
    def restore(self, kind: AdamKind, values: Iterable[NamedTensor]) -> None:
        """Set one of Adam's two moments from full tensors, in any order."""
        for one in values:
            first, end = self._rows(one.name)
            self._value(one.name, kind).copy_(one.tensor[first:end])

    @torch.no_grad()
    def restore_optimizer(self, states: Mapping[AdamKind, Path], adam_steps: int) -> None:
        """Set Adam's moments from safetensors files with the parameters' names, and its step count to `adam_steps`.

        Each rank reads only its own rows.
        """
        for kind, path in states.items():
            with safe_open(path, framework="pt") as file:
                for name in self.shapes:
                    first, end = self._rows(name)
                    if first < end:
                        self._value(name, kind).copy_(file.get_slice(stored_name(name))[first:end])
        self.count_updates(adam_steps)

    def count_updates(self, adam_steps: int) -> None:
        """Set Adam's step count to `adam_steps`."""
        for state in self._optimizer.state.values():
            state["step"].fill_(adam_steps)

    def forward_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that a forward pass uses: its shards. Frees gathered weights. Not a collective."""
        self._reshard()
        yield from forward_tensors(self.module)

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that only an update needs. Not a collective."""
        for state in self._optimizer.state.values():
            yield from state.values()
        yield from self._gradients()

    def _make_optimizer(self) -> torch.optim.AdamW:
        decayed = {name for name, shape in self.shapes.items() if len(shape) >= 2}
        groups: list[dict[str, Any]] = [
            {"params": [own for name, own in self._own.items() if (name in decayed) is decays], "weight_decay": decay}
            for decays, decay in ((True, self._how.weight_decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=self._how.betas, eps=ADAM_EPS, fused=True)
        for group in groups:
            for own in group["params"]:
                zeros = {kind: torch.zeros_like(own, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
                optimizer.state[own] = {"step": torch.zeros((), device=own.device), **zeros}
        return optimizer

    def _gradients(self) -> Iterator[Tensor]:
        for one in self._sharded.values():
            if one.grad is not None:
                yield one.grad.to_local()

    def _gradient_norm(self) -> float:
        squares = [float(torch.linalg.vector_norm(one, dtype=torch.float32)) ** 2 for one in self._gradients()]
        total = torch.tensor([math.fsum(squares)], dtype=torch.float64, device=self.feeding.device)
        dist.all_reduce(total)
        return math.sqrt(float(total))

    def _value(self, name: str, kind: str) -> Tensor:
        """This rank's rows of a parameter or of one of its moments."""
        own = self._own[name]
        if kind in ("served", "master"):
            return own.detach()
        return self._optimizer.state[own][kind]  # type: ignore[no-any-return]

    def _rows(self, name: str) -> tuple[int, int]:
        """The first of this rank's rows of a parameter, and the end."""
        rows = self.shapes[name][0]
        size = -(-rows // self._ranks)
        return min(rows, size * self._rank), min(rows, size * (self._rank + 1))

    def _gathered(self, name: str, own: Tensor) -> Tensor:
        shape, device = self.shapes[name], self.feeding.device
        size = -(-shape[0] // self._ranks)
        padded = torch.zeros((size, *shape[1:]), dtype=own.dtype, device=device)
        padded[: own.shape[0]].copy_(own)
        whole = torch.empty((size * self._ranks, *shape[1:]), dtype=own.dtype, device=device)
        dist.all_gather_into_tensor(whole, padded)
        return whole[: shape[0]]

    def _reshard(self) -> None:
        for one in self.module.modules():
            if isinstance(one, FSDPModule):
                one.reshard()


def shard_frozen(module: nn.Module, train: TrainSpec, device: torch.device) -> nn.Module:
    """Split a module without gradients over the ranks: each layer is gathered when it computes. Returns the module."""
    buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
    offload = train.offload_reference and device.type != "cpu"
    _shard(module, half=False, device=device, reshard=True, offload=offload)
    for name, buffer in module.named_buffers():
        buffer.data = buffers[name].to(device)
    return module.eval()


def _shard(module: nn.Module, *, half: bool, device: torch.device, reshard: bool, offload: bool) -> None:
    """Split each layer, and then the rest of the module, over all ranks."""
    mesh: DeviceMesh = init_device_mesh(device.type, (dist.get_world_size(),))
    how: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy(),
    }
    layers = [one for one in module.modules() if one is not module and isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        log.warning(
            "%s has no layers that FSDP2 can gather one by one, so each rank holds all weights in every pass",
            type(module).__name__,
        )
    for layer in reversed(layers):
        fully_shard(layer, **how)
    fully_shard(module, **how)
