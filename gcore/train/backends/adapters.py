"""Low-rank adapters (LoRA) in a model in training: PEFT's layers beside frozen matrices.

The base model is frozen at the values that engines serve: its files' weights, rounded to the dtype of the model's
configuration. Only A and B of each adapter are trained. There is no dropout, because the policy's log-probabilities
must be the same in each pass. B starts at zero, so a new adapter changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gcore.config.train import ALL_LINEAR, LoraSpec
from gcore.errors import DataError
from gcore.models.adapters import AdapterConfig, read_adapters, stored_name
from gcore.train.backends.base import TrainBackend
from gcore.train.batching import OutputsOf


def add_adapters(module: nn.Module, lora: LoraSpec, seed: int, served: torch.dtype, folder: Path) -> None:
    """Freeze the module at its values in `served`, and add a new adapter to each target, in float32.

    `seed`: of the matrices A; every rank must pass the same. `folder`: of the model, for errors. Raises DataError if a
    target matches no linear layer, or the rank is above a layer's width.
    """
    try:
        import torch.distributed.tensor  # PEFT names it without importing it
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise DataError(
            f"PEFT cannot be imported ({error})", where="train.lora", fix="Install gcore[lora] on every node"
        ) from error
    _check_targets(module, lora, folder)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(served).to(parameter.dtype)
        parameter.requires_grad_(False)
    names: Any = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.scale * lora.rank, target_modules=names, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    module.eval()


def load_adapters(module: nn.Module, folder: Path) -> None:
    """Set the adapters of `module` to those of a checkpoint. Raises DataError if the checkpoint has others."""
    stored = read_adapters(folder)
    own = {stored_name(name): one for name, one in module.named_parameters() if one.requires_grad}
    wrong = sorted(
        name
        for name in own.keys() | stored.keys()
        if name not in own or name not in stored or own[name].shape != stored[name].shape
    )
    if wrong:
        raise DataError(
            f"{len(wrong)} adapters of the checkpoint differ from those of the spec, for example {wrong[0]}",
            where=str(folder),
            fix="Set train.lora to what the checkpoint was trained with",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])


def adapter_config(module: nn.Module, lora: LoraSpec, base: Path) -> AdapterConfig:
    """Describe the module's adapters for their files: all linear layers by the last parts of their names."""
    targets = set(lora.targets)
    if targets == {ALL_LINEAR}:
        targets = {name.rpartition(".")[2] for name, _ in _adapted(module)}
    return AdapterConfig(str(base), lora.rank, lora.scale * lora.rank, tuple(sorted(targets)))


class BaseReference:
    """The policy without its adapters: the reference of a job with adapters, which needs no second model."""

    def __init__(self, policy: TrainBackend) -> None:
        self._policy = policy

    def forward_tensors(self) -> Iterator[torch.Tensor]:
        """Nothing beside the policy's own tensors."""
        return iter(())

    @contextlib.contextmanager
    def awake(self) -> Iterator[OutputsOf]:
        """The base model's logits function, valid within the block."""
        layers = [layer for _, layer in _adapted(self._policy.module)]
        for layer in layers:
            # PEFT's own switch also changes which parameters get gradients, which a backend that has split them forbids.
            layer._disable_adapters = True
        try:
            yield self._policy.outputs_of
        finally:
            for layer in layers:
                layer._disable_adapters = False


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's layers with adapters, by name."""
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, layer


def _check_targets(module: nn.Module, lora: LoraSpec, folder: Path) -> None:
    model: Any = module
    head = model.get_output_embeddings()
    linear = {name: one for name, one in module.named_modules() if isinstance(one, nn.Linear)}
    found: dict[str, nn.Linear] = {}
    for target in lora.targets:
        chosen = {
            name: one
            for name, one in linear.items()
            if (one is not head if target == ALL_LINEAR else name == target or name.endswith(f".{target}"))
        }
        if not chosen and target == ALL_LINEAR:
            raise DataError(
                f"a {model.config.model_type} has no linear layer (torch.nn.Linear) beside its output layer, and adapters change "
                "only linear layers",
                where="train.lora",
                fix="Leave it out, or use another model",
            )
        if not chosen:
            kinds = sorted({name.rpartition(".")[2] for name in linear})
            raise DataError(
                f"no linear layer of the model is called {target!r}",
                where="train.lora.targets",
                fix=f"Name some of {', '.join(kinds)}, or {ALL_LINEAR}",
            )
        found |= chosen
    if head is not None and any(one is head for one in found.values()) and model.config.tie_word_embeddings:
        raise DataError(
            "the output layer shares its matrix with the embedding, so it cannot have an adapter",
            where="train.lora.targets",
            fix="Leave it out",
        )
    width, narrow = min((min(layer.weight.shape), name) for name, layer in found.items())
    if lora.rank > width:
        raise DataError(
            f"rank {lora.rank} is above the width of layer {narrow} of {folder.name} ({width})",
            where="train.lora.rank",
            fix=f"Set it to {width} or less",
        )
