"""The model under DeepSpeed ZeRO: scoring, exact global gradients, updates, and its full tensors in and out.

The recipe, the same for stages 1, 2 and 3:

- The caller scales each micro-batch's loss to its part of the global one; ranks are averaged by DeepSpeed, so it is
  multiplied by their number here. The boundary is set by hand before each backward, so that a mini-batch may have any
  number of micro-batches. All ranks must run equally many, forward or backward.
- No compiler is needed: torch's own Adam, and no shared-memory collectives.
- The module is in evaluation mode throughout: with dropout the ratio of a policy to itself would not be 1.
- Adam's state is made at load by one update with learning rate 0, which changes nothing, and then set to what the
  checkpoint says; weights are in the module before DeepSpeed takes it over. So a checkpoint loads at any stage and
  number of ranks.

Weights are loaded whole by every rank before ZeRO partitions them: host memory must hold the model once a rank.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from gcore.config.spec import TrainSpec
from gcore.errors import DataError
from gcore.train.batch import LogitsOf

LARGEST_BUCKET = 500_000_000
ADAM_EPS = 1e-8
Kind = Literal["served", "master", "exp_avg", "exp_avg_sq"]
"""`served`: as forward computes with it; `master`: float32; the rest is Adam's, float32."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    """A whole tensor of the model, under its Hugging Face name."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Whether an update was made, and the global gradient norm before clipping; not made: the norm was not finite."""

    applied: bool
    grad_norm: float


class Policy:
    """A model being trained. All methods but `shapes` and `buffers` are collectives."""

    def __init__(self, engine: Any, module: nn.Module, shapes: Mapping[str, tuple[int, ...]], stage: int) -> None:
        self._engine = engine
        self._module = module
        self._stage = stage
        self._ranks: int = engine.world_size
        self._names: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.shapes = shapes
        """Every parameter's shape, in the order in which `tensors` gives them."""

    @classmethod
    def load(cls, folder: Path, train: TrainSpec, device: torch.device) -> Policy:
        """The model in `folder`, ready to train, Adam's state zero. Raises DataError."""
        deepspeed_logger.setLevel(logging.WARNING)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _leave_muon_out()
        module = load_module(folder, torch.float32)
        _check_names(folder, module)
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        masters = {}
        if train.dtype == "bf16":
            # DeepSpeed rounds the module and makes its float32 copy from that; the lost bits are put back below.
            masters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        parameters = sum(parameter.numel() for parameter in module.parameters())
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=_config(train, parameters)
        )
        engine.eval()
        policy = cls(engine, module, shapes, train.zero_stage)
        policy._make_optimizer_state(device)
        for name, value in masters.items():
            safe_set_full_fp32_param(policy._names[name], value.to(device))
        return policy

    def logits_of(self, tokens: Tensor, keep: int) -> Tensor:
        """Tokens [b, t] to the logits [b, keep, vocabulary] of the last `keep` columns."""
        logits: Tensor = self._engine(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits
        return logits

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this rank's part of the global loss. `last`: of the update."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)

    def update(self, learning_rate: float) -> UpdateResult:
        """Clip and apply the gradients; leave them out if their norm is not finite."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        applied = bool(self._engine.was_step_applied())
        return UpdateResult(applied, float(norm) if applied and norm is not None else float("inf"))

    def tensors(self, kind: Kind) -> Iterator[NamedTensor]:
        """Every parameter whole, one after the other, on every rank. To be read to the end by all."""
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
        """What a model saves besides its parameters; mostly nothing. Not a collective."""
        saved = self._module.state_dict().keys()
        for name, buffer in self._module.named_buffers():
            if name in saved:
                yield NamedTensor(name, buffer)

    def restore_optimizer(self, states: Mapping[Literal["exp_avg", "exp_avg_sq"], Path], adam_steps: int) -> None:
        """Set Adam's state from safetensors files under the parameters' names, and its count of updates."""
        for kind, path in states.items():
            with safe_open(path, framework="pt") as file:
                for name, parameter in self._names.items():
                    safe_set_full_optimizer_state(parameter, file.get_tensor(name).to(parameter.device), kind)
        self._set_adam_steps(adam_steps)

    def _make_optimizer_state(self, device: torch.device) -> None:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
        self.backward(self.logits_of(tokens, 1).float().sum() * 0.0, last=True)
        self.update(0.0)
        self._set_adam_steps(0)

    def _set_adam_steps(self, steps: int) -> None:
        for state in self._engine.optimizer.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(steps)


def load_module(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The causal language model in `folder`. Raises DataError."""
    try:
        transformers_logging.disable_progress_bar()
        module: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"this model cannot be loaded ({first})", where=str(folder)) from error
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise DataError(
            f"{type(module).__name__} computes logits for all columns only (its forward has no logits_to_keep)",
            where=str(folder),
            fix="Use a model class that has it; nearly all current ones do",
        )
    return module.eval()


def logits_of(module: nn.Module) -> LogitsOf:
    """A plain module's logits, as `Policy.logits_of` gives them."""

    def call(tokens: Tensor, keep: int) -> Tensor:
        logits: Tensor = module(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits
        return logits

    return call


def _leave_muon_out() -> None:
    """DeepSpeed asks whether the optimizer is Muon, and that module pulls all of torch's compiler in: most of a second.

    A module whose Muon is a class of which there are no instances answers the question too.
    """
    name = "deepspeed.runtime.zero.muon.muon_optimizer"
    stand_in = types.ModuleType(name)
    vars(stand_in)["MuonWithAuxAdam"] = type("MuonWithAuxAdam", (), {})
    sys.modules.setdefault(name, stand_in)


def _check_names(folder: Path, module: nn.Module) -> None:
    """Weights are written under the parameters' names, so those must be the names that loaders expect."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        stored = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            stored = set(file.keys())
    else:
        return
    unknown = sorted(name for name, _ in module.named_parameters() if name not in stored)
    if unknown:
        raise DataError(
            f"{len(unknown)} parameters of {type(module).__name__} are not stored under their own names, e.g. {unknown[0]}",
            where=str(folder),
            fix="Models whose weights are rearranged on loading (fused experts) cannot be trained yet",
        )


def _config(train: TrainSpec, parameters: int) -> dict[str, Any]:
    bucket = max(1, min(LARGEST_BUCKET, parameters))  # the default would set two gigabytes aside for any model
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.max_grad_norm,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "torch_adam": True,
                "lr": 0.0,
                "betas": list(train.betas),
                "eps": ADAM_EPS,
                "weight_decay": train.weight_decay,
            },
        },
        "zero_optimization": {
            "stage": train.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "bf16": {"enabled": train.dtype == "bf16", "check_grad_overflow": True},
        "steps_per_print": None,
    }
