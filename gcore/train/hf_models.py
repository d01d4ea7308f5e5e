"""Hugging Face models as plain torch modules: loading, feeding, activation checkpointing, and memory errors.

Modules are in evaluation mode throughout: with dropout the ratio of a policy to itself would not be 1. Activation
checkpointing is a matter of training mode in transformers, so the layers it concerns, and nothing inside them, are put
into it, after every dropout of theirs was set to 0.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from gcore.config.train import TrainSpec
from gcore.errors import DataError, GcoreError
from gcore.system.memory import is_out_of_memory
from gcore.train.backends.packed_attention import PACKED
from gcore.train.batching import LogitsOf, ModelInputs

REMEDIES = ("micro_batch_tokens", "activation_checkpointing", "zero_stage", "offload_reference")
"""Fields that help against too little memory in a micro-batch, in this order."""


class OutOfMemory(GcoreError):
    """A rank's memory does not hold what the spec makes it compute."""


@contextlib.contextmanager
def explain_memory_error(doing: str, train: TrainSpec, fields: tuple[str, ...]) -> Iterator[None]:
    """Turn running out of memory in the block into OutOfMemory. `fields`: of `list_remedies`, those that would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        known = list_remedies(train)
        fix = ", or ".join(known[name] for name in fields if name in known)
        raise OutOfMemory(
            f"out of memory while {doing} ({_first_line(error)})",
            fix=f"{fix[0].upper()}{fix[1:]}" if fix else "Use more train ranks, or larger ones",
        ) from error


def list_remedies(train: TrainSpec) -> dict[str, str]:
    """What can still be changed in the spec, by field, in the order in which to try."""
    found = {"micro_batch_tokens": f"lower train.micro_batch_tokens (now {train.micro_batch_tokens})"}
    if not train.activation_checkpointing:
        found["activation_checkpointing"] = "set train.activation_checkpointing: true"
    if train.zero_stage < 3:
        found["zero_stage"] = f"raise train.zero_stage (now {train.zero_stage}) with more train ranks"
    if train.kl_coef > 0 and not train.offload_reference:
        found["offload_reference"] = "set train.offload_reference: true"
    return found


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


CHECKPOINT_FIX = "Set train.activation_checkpointing: false"


def load_module(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> nn.Module:
    """The causal language model in `folder`, in host memory. Raises DataError."""
    try:
        transformers_logging.disable_progress_bar()
        module: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, StrictDataclassError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"this model cannot be loaded ({first})", where=str(folder)) from error
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise DataError(
            f"{type(module).__name__} computes logits for all columns only (its forward has no logits_to_keep)",
            where=str(folder),
            fix="Use a model class that has it; nearly all current ones do",
        )
    return module.eval()


def logits_of(call: Callable[..., Any]) -> LogitsOf:
    """The logits of a module, or of an engine around one, that takes what Hugging Face models take."""

    def logits(inputs: ModelInputs) -> Tensor:
        more = {}
        if inputs.positions is not None:
            PACKED.lay(inputs.rectangles, inputs.tokens.device)
            more["position_ids"] = inputs.positions
        out: Tensor = call(input_ids=inputs.tokens, use_cache=False, logits_to_keep=inputs.columns, **more).logits
        flat = out.flatten(0, 1)
        return flat if inputs.rows is None else flat.index_select(0, inputs.rows)

    return logits


def vocabulary_of(module: nn.Module) -> int:
    """The tokens that a whole module knows, as input and as output."""
    model: Any = module
    sizes = [part.weight.shape[0] for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part]
    return int(min(sizes))


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Round the parameters; buffers stay as they are: rotary frequencies are no good in half precision."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module


def checkpoint_activations(module: nn.Module, folder: Path) -> None:
    """Compute the layers' activations again in the backward pass. Call `evaluate` after whatever sets modes. DataError."""
    model: Any = module
    layers = [one for one in module.modules() if isinstance(one, GradientCheckpointingLayer)]
    try:
        # Under ZeRO-3 a weight that was saved for the backward pass is empty by then, and is fetched again: its shape
        # is no sign of another computation.
        # Its name from transformers 5 on, else the one before.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False, "determinism_check": "none"})
    except ValueError as error:
        raise DataError(
            f"{type(module).__name__} has no activation checkpointing", where=str(folder), fix=CHECKPOINT_FIX
        ) from error
    if not layers:
        raise DataError(
            f"{type(module).__name__} checkpoints its layers in training mode only",
            where=str(folder),
            fix=CHECKPOINT_FIX,
        )


def set_evaluation_mode(module: nn.Module) -> None:
    """Evaluation mode, in which layers are checkpointed if that was asked for."""
    module.eval()
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            for name, value in vars(layer).items():
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
            layer.training = True


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What the optimizer gets: matrices decay, norms and biases do not."""
    every = list(module.parameters())
    if not weight_decay:
        return [{"params": every, "weight_decay": 0.0}]
    groups = [
        {"params": [one for one in every if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in every if one.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def check_names(folder: Path, module: nn.Module, *, part: str = "") -> None:
    """Weights are written under the parameters' names, so those must be the names that loaders expect. DataError.

    `part`: the prefix of those that matter, "" for all.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        stored = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            stored = set(file.keys())
    else:
        return
    names = (name for name, _ in module.named_parameters() if name.startswith(f"{part}." if part else ""))
    unknown = sorted(name for name in names if name not in stored)
    if unknown:
        raise DataError(
            f"{len(unknown)} parameters of {type(module).__name__} are not stored under their own names, e.g. {unknown[0]}",
            where=str(folder),
            fix="Models whose weights are rearranged on loading (fused experts) cannot be trained yet",
        )
