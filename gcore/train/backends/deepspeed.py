"""A model under DeepSpeed ZeRO, policy or critic: exact global gradients, updates, and access to full tensors.

How it works is the same for stages 1, 2 and 3:

- The caller scales each micro-batch's loss to its part of the global loss. DeepSpeed averages over ranks, so the loss
  is multiplied by their number here. The accumulation boundary is set before each backward, so a mini-batch may have
  any number of micro-batches. All ranks must run the same number of forwards and backwards.
- No compiler is needed: it uses torch's fused Adam and no shared-memory collectives.
- At load one update with learning rate 0 creates Adam's state without changing weights; then the state is set from the
  checkpoint. The weights are loaded into the module before DeepSpeed partitions it. A checkpoint therefore loads at any
  stage and number of ranks.

Every rank loads the full weights before ZeRO partitions them: host memory must hold the model once per rank.

The module does not know what the outputs mean (policy or critic), or in which order models are updated (`step`).
"""

from __future__ import annotations

import logging
import math
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

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
from gcore.train.hf_models import parameter_groups, set_evaluation_mode

LARGEST_BUCKET = 500_000_000
"""Maximum number of elements in one of DeepSpeed's communication buckets."""


class DeepSpeedBackend:
    """A model in training; implements `TrainBackend`. All methods are collectives unless stated otherwise."""

    def __init__(self, module: nn.Module, how: OptimizerSettings, feeding: Feeding) -> None:
        """Partition `module` over the ranks, and create its optimizer with Adam's state zero. The module must be in
        float32.
        """
        set_up_deepspeed()
        trained = trained_parameters(module)
        shapes = {name: tuple(parameter.shape) for name, parameter in trained.items()}
        """Full (unpartitioned) shape of every parameter by name, in the order of `tensors`."""
        # DeepSpeed rounds the whole module, and creates its float32 copy from that. Below, the lost bits of parameters
        # are restored, and all bits of buffers, because rotary frequencies need full precision.
        masters = {name: one.detach().clone() for name, one in trained.items()} if how.half else {}
        buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
        parameters = sum(parameter.numel() for parameter in trained.values())
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=parameter_groups(module, how.weight_decay),
            config=_config(how, parameters),
        )
        set_evaluation_mode(engine)
        for name, buffer in module.named_buffers():
            buffer.data = buffers[name].to(buffer.device)
        self._engine = engine
        self.module = module
        """The module whose forward pass is trained."""
        self.updater: Any = engine.optimizer
        """DeepSpeed's ZeRO optimizer, which wraps torch's own."""
        self._stage = how.zero_stage
        self._ranks: int = engine.world_size
        self._names: dict[str, nn.Parameter] = trained_parameters(module)
        self.feeding = feeding
        self.outputs_of: OutputsOf = feeding.outputs_of(engine)
        """Computes the model's outputs for the scored tokens, [n, width]."""
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        """Shape of every parameter, in the order of `tensors`."""
        self._make_optimizer_state()
        for name, value in masters.items():
            self._set(self._names[name], value.to(feeding.device), "master")

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate this rank's part of the global loss. `last`: it is the last micro-batch of the update."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)

    def flush(self) -> None:
        """Complete an update's gradients by a backward pass of zeros that is marked as last.

        DeepSpeed passes gradients to its optimizer only in the last backward, and the last micro-batches of a streamed
        step may have no trained token.
        """
        self.backward(self.outputs_of(self.feeding.dummy_inputs()).float().sum() * 0.0, last=True)

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients by `factor`, between the last `backward` and `update`.

        Not a collective.
        """
        for gradients in self.updater.averaged_gradients.values():
            for gradient in gradients or ():
                gradient.mul_(factor)

    def update(self, learning_rate: float) -> UpdateResult:
        """Clip and apply the accumulated gradients; skip the update if their global norm is not finite."""
        for group in self.updater.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        applied = bool(self._engine.was_step_applied())
        return UpdateResult(applied, float(norm) if applied and norm is not None else float("inf"))

    def tensors(self, kind: TensorKind) -> Iterator[NamedTensor]:
        """Gather every parameter, or its value of `kind`, in full on every rank, one by one.

        Gathering is a collective, so every rank must read the iterator to the end.
        """
        for name, parameter in self._names.items():
            if kind != "served":
                value = (
                    safe_get_full_fp32_param(parameter)
                    if kind == "master"
                    else safe_get_full_optimizer_state(parameter, kind)
                )
                yield NamedTensor(name, value)
            elif self._stage == 3:
                with deepspeed.zero.GatheredParameters([parameter]):
                    yield NamedTensor(name, parameter.detach())
            else:
                yield NamedTensor(name, parameter.detach())

    def buffers(self) -> Iterator[NamedTensor]:
        """The persistent buffers, which a model saves in addition to its parameters; usually none. Not a collective."""
        return saved_buffers(self.module)

    def extents(self) -> Iterator[Extent]:
        """For each parameter of which this rank updates a part, the range of its flat elements. Not a collective."""
        for name, parameter in self._names.items():
            if self._stage == 3:
                whole = math.prod(self.shapes[name])
                size = -(-whole // self._ranks)
                start = min(whole, size * self._engine.global_rank)
                numel = min(size, whole - start)
            else:
                own = parameter._hp_mapping  # type: ignore[attr-defined]
                start, numel = (0, 0) if own is None else (own.lp_fragment_address.start, own.lp_fragment_address.numel)
            if numel:
                yield Extent(name=name, start=start, numel=numel)

    def pieces(self, kind: str, extents: Iterable[Extent]) -> Iterator[Tensor]:
        """This rank's values of `kind` (`master`, `exp_avg` or `exp_avg_sq`), flat, one tensor per extent. Not a
        collective.
        """
        for extent in extents:
            parameter = self._names[extent.name]
            if self._stage == 3:
                local = (
                    safe_get_local_fp32_param(parameter)
                    if kind == "master"
                    else safe_get_local_optimizer_state(parameter, kind)
                )
                yield local.flatten()[: extent.numel]
            else:
                yield parameter._hp_mapping.get_hp_fragment(None if kind == "master" else kind)  # type: ignore[attr-defined]

    def restore(self, kind: AdamKind, values: Iterable[NamedTensor]) -> None:
        """Set one of Adam's two moments from full tensors, in any order."""
        for one in values:
            parameter = self._names[one.name]
            self._set(parameter, one.tensor.to(parameter.device), kind)

    def count_updates(self, adam_steps: int) -> None:
        """Set Adam's step count to `adam_steps`."""
        self._set_adam_steps(adam_steps)

    def restore_optimizer(self, states: Mapping[AdamKind, Path], adam_steps: int) -> None:
        """Set Adam's moments from safetensors files with the parameters' names, and its step count to `adam_steps`."""
        for kind, path in states.items():
            with safe_open(path, framework="pt") as file:
                for name, parameter in self._names.items():
                    self._set(parameter, file.get_tensor(stored_name(name)).to(parameter.device), kind)
        self._set_adam_steps(adam_steps)

    def forward_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that a forward pass uses. Not a collective."""
        return forward_tensors(self.module)

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that only an update needs. Not a collective."""
        return optimizer_tensors(self.updater)

    def _set(self, parameter: nn.Parameter, value: Tensor, kind: Literal["master", "exp_avg", "exp_avg_sq"]) -> None:
        if self._stage == 3:
            # DeepSpeed's own partitioning of a whole value fails if its size is not a multiple of the number of ranks.
            size = -(-value.numel() // self._ranks)
            padded = functional.pad(value.flatten(), (0, size * self._ranks - value.numel()))
            own = padded.narrow(0, size * self._engine.global_rank, size)
            if kind == "master":
                safe_set_local_fp32_param(parameter, own)
            else:
                safe_set_local_optimizer_state(parameter, own, kind)
        elif kind == "master":
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)

    def _make_optimizer_state(self) -> None:
        self.flush()
        self.update(0.0)
        optimizer = self.updater
        if self._stage < 3:
            # DeepSpeed links Adam's state to the parameters during its first step, when only the first parameter group
            # has a state.
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        self._set_adam_steps(0)

    def _set_adam_steps(self, steps: int) -> None:
        for state in self.updater.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(steps)


def partition_module(module: nn.Module, train: TrainSpec) -> Any:
    """Partition a frozen module over the ranks with ZeRO stage 3: each layer is gathered when it computes.

    Returns the DeepSpeed engine around the module.
    """
    set_up_deepspeed()
    buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
    zero: dict[str, Any] = {"stage": 3}
    if train.offload_reference and torch.cuda.is_available():
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    engine, *_ = deepspeed.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "bf16": {"enabled": train.dtype == "bf16"},
            "steps_per_print": None,
        },
    )
    engine.eval()
    for name, buffer in module.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
    return engine


def optimizer_tensors(root: object) -> Iterator[Tensor]:
    """All tensors that a DeepSpeed optimizer reaches, except those of modules, which belong to the forward pass.

    Follows attributes, collections, torch's own optimizer, gradients, and attributes of tensors, from `root`.
    """
    seen: set[int] = set()
    left: list[Any] = [root]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
            left.extend(vars(one).values())
            if one.is_leaf and one.grad is not None:
                left.append(one.grad)
        elif isinstance(one, dict):
            left.extend(one.values())
            left.extend(key for key in one if isinstance(key, Tensor))
        elif isinstance(one, (list, tuple, set, frozenset)) or type(one).__module__ == "collections":
            left.extend(one)
        elif not isinstance(one, (nn.Module, type)) and type(one).__module__.startswith(("deepspeed.", "torch.optim.")):
            left.extend(vars(one).values() if hasattr(one, "__dict__") else ())


def set_up_deepspeed() -> None:
    """Disable DeepSpeed's log output, its shared-memory collectives (which need a compiler), and its import of Muon.

    Call it before `deepspeed.initialize`.
    """
    deepspeed_logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _leave_muon_out()


def _leave_muon_out() -> None:
    """Prevent the import of Muon, which loads torch's compiler and takes 2 s of CPU time.

    DeepSpeed checks whether the optimizer is an instance of Muon, and imports the function of Muon's update before it
    looks for parameters that need it. Stubs are enough for both.
    """
    for name, attribute in (("muon_optimizer", "MuonWithAuxAdam"), ("original_muon", "muon_update")):
        stub = types.ModuleType(f"deepspeed.runtime.zero.muon.{name}")
        vars(stub)[attribute] = type(attribute, (), {})
        sys.modules.setdefault(stub.__name__, stub)


def _config(how: OptimizerSettings, parameters: int) -> dict[str, Any]:
    # The default would reserve two gigabytes for any model. DeepSpeed requires an even number.
    bucket = 2 * max(1, min(LARGEST_BUCKET, parameters + 1) // 2)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": how.max_grad_norm,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "torch_adam": True,
                "fused": True,
                "lr": 0.0,
                "betas": list(how.betas),
                "eps": ADAM_EPS,
                "weight_decay": how.weight_decay,
            },
        },
        "zero_optimization": {
            "stage": how.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "bf16": {"enabled": how.half, "check_grad_overflow": True},
        "steps_per_print": None,
    }
