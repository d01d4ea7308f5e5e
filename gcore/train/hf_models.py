"""Hugging Face models as torch modules: loading, feeding, activation checkpointing, and memory errors.

Modules are always in evaluation mode, because dropout would change the policy's probability ratio to itself from 1. But
transformers enables activation checkpointing only in training mode. Therefore the checkpointed layers themselves, but
not their submodules, are set to training mode, after their own dropout rates were set to 0.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from gcore.config.train import TrainSpec
from gcore.errors import DataError, GcoreError, first_line
from gcore.models.checks import check_loaded, require_config
from gcore.models.vision import auto_class, repeat_features
from gcore.system.memory import is_out_of_memory

REMEDIES = (
    "micro_batch_tokens",
    "micro_batch_patches",
    "activation_checkpointing",
    "zero_stage",
    "offload_reference",
    "offload_state",
    "sequence_parallel",
)
"""Keys of `list_remedies`: spec fields that reduce the memory of a micro-batch, in the order in which to try them."""

STATE_REMEDIES = ("zero_stage", "offload_reference", "offload_state")
"""Those that reduce the memory of weights and optimizer."""


class OutOfMemory(GcoreError):
    """The rank ran out of device or host memory; `fix` names the spec fields that reduce its memory."""


@contextlib.contextmanager
def explain_memory_error(doing: str, train: TrainSpec, fields: tuple[str, ...]) -> Iterator[None]:
    """Convert an out-of-memory error in the block to OutOfMemory, with advice on which spec fields to change.

    `doing`: what the block does, for the message. `fields`: the keys of `list_remedies` that would help here; they
    become the advice.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        known = list_remedies(train)
        fix = ", or ".join(known[name] for name in fields if name in known)
        raise OutOfMemory(
            f"out of memory while {doing} ({first_line(error)})",
            fix=f"{fix[0].upper()}{fix[1:]}" if fix else "Use more train ranks, or larger ones",
        ) from error


def list_remedies(train: TrainSpec) -> dict[str, str]:
    """Advice that reduces memory, by spec field: only changes that this spec has not made yet, in the order to try
    them.
    """
    found = {"micro_batch_tokens": f"lower train.micro_batch_tokens (now {train.micro_batch_tokens})"}
    if train.micro_batch_patches is not None:
        found["micro_batch_patches"] = f"lower train.micro_batch_patches (now {train.micro_batch_patches})"
    if not train.activation_checkpointing:
        found["activation_checkpointing"] = "set train.activation_checkpointing: true"
    if train.zero_stage < 3:
        found["zero_stage"] = f"raise train.zero_stage (now {train.zero_stage}) with more train ranks"
    if train.kl_coef > 0 and not train.offload_reference and train.lora is None:  # with adapters there is no such model
        found["offload_reference"] = "set train.offload_reference: true"
    if not train.offload_state:
        backend = "" if train.backend == "fsdp2" else "train.backend: fsdp2 and "
        found["offload_state"] = f"set {backend}train.offload_state: true (GPUs only)"
    if train.packing != "bucketed":
        size = train.sequence_parallel
        found["sequence_parallel"] = f"raise train.sequence_parallel (now {size}) with more train ranks"
    return found


CHECKPOINT_FIX = "Set train.activation_checkpointing: false"


def load_module(
    folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False, headless: bool = False
) -> nn.Module:
    """Load the language model in `folder` into host memory, in evaluation mode, with its vision tower if it has one.

    Raises DataError if it cannot be loaded completely, or if its forward has no `logits_to_keep`, so that it would compute the
    logits of all columns. `headless`: weights may be missing, because only the backbone is used, whose names the caller
    checks.
    """
    try:
        transformers_logging.disable_progress_bar()
        module, report = auto_class(require_config(folder)).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, StrictDataclassError) as error:
        raise DataError(f"the model cannot be loaded ({first_line(error)})", where=str(folder)) from error
    check_loaded([] if headless else report["missing_keys"], folder)
    repeat_features(module)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise DataError(
            f"{type(module).__name__} always computes the logits of all columns (its forward has no logits_to_keep)",
            where=str(folder),
            fix="Use a model class with logits_to_keep; nearly all current ones have it",
        )
    loaded: nn.Module = module
    return loaded.eval()


def vocabulary_of(module: nn.Module) -> int:
    """The number of token ids that both the input and the output embedding support.

    The module must not be partitioned.
    """
    model: Any = module
    sizes = [part.weight.shape[0] for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part]
    return int(min(sizes))


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point parameters to `dtype`; buffers keep theirs, because rotary frequencies need full
    precision.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module


def checkpoint_activations(module: nn.Module, folder: Path) -> None:
    """Enable activation checkpointing: layers recompute their activations in the backward pass.

    Call `set_evaluation_mode` after anything that sets training or evaluation mode. Raises DataError if the model does
    not support it. `folder`: only named in the error.
    """
    model: Any = module
    layers = [one for one in module.modules() if isinstance(one, GradientCheckpointingLayer)]
    try:
        # Under ZeRO-3 a weight saved for the backward pass is empty until it is gathered again, so its shape must not
        # be compared. The method has this name from transformers 5 on, and the other before.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False, "determinism_check": "none"})
    except ValueError as error:
        raise DataError(
            f"{type(module).__name__} does not support activation checkpointing", where=str(folder), fix=CHECKPOINT_FIX
        ) from error
    if not layers:
        raise DataError(
            f"{type(module).__name__} checkpoints activations only in training mode",
            where=str(folder),
            fix=CHECKPOINT_FIX,
        )


def set_evaluation_mode(module: nn.Module) -> None:
    """Set evaluation mode; layers with activation checkpointing get training mode with their own dropout set to 0."""
    module.eval()
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            for name, value in vars(layer).items():
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
            layer.training = True


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of the trained parameters for the optimizer: matrices have weight decay; norms and biases do not."""
    every = [one for one in module.parameters() if one.requires_grad]
    if not weight_decay:
        return [{"params": every, "weight_decay": 0.0}]
    groups = [
        {"params": [one for one in every if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in every if one.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def stored_names(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """The names under which transformers saves these parameters, by their own names. Parameters that it would split or
    join have none.
    """
    empty = {name: torch.empty_like(one, device="meta") for name, one in parameters.items()}
    own = {id(one): name for name, one in empty.items()}
    try:
        written = revert_weight_conversion(module, dict(empty))
    except (RuntimeError, ValueError, TypeError, KeyError, NotImplementedError):  # of converters, which need the values
        return {}
    return {own[id(one)]: name for name, one in written.items() if id(one) in own}


def check_names(folder: Path, module: nn.Module, *, part: str = "") -> None:
    """Check that every parameter has the same name in the weight files of `folder`. Raises DataError if one has not.

    The trainer saves weights under the names of the module's parameters, and loaders look for the names in the files. A
    folder without safetensors files is not checked. `part`: check only parameters below this submodule; "" for all.
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
    wanted = {name: one for name, one in module.named_parameters() if name.startswith(f"{part}." if part else "")}
    unknown = sorted(wanted.keys() - stored)
    if unknown:
        # transformers renames some vision-language models as a whole when it loads them; it loads both names.
        written = stored_names(module, wanted)
        unknown = [name for name in unknown if written.get(name) not in stored]
    if unknown:
        raise DataError(
            f"{len(unknown)} parameters of {type(module).__name__} have other names in the files, for example {unknown[0]}",
            where=str(folder),
            fix="Use another model; models whose weights are rearranged on loading (fused experts) are not supported yet",
        )
