"""From a model's folder to what a rank trains: how it is fed, the policy, and the reference.

In this order, because each changes the module for what comes after: read it, prove how sequences may be laid out, copy it
for the reference while policy and reference are still the same, ask for activation checkpointing, hand it to DeepSpeed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gcore.train.attention import NAME, PACKED
from gcore.train.launch import RankLaunch
from gcore.train.module import check_names, checkpoint_activations, load_module
from gcore.train.packing import Packing
from gcore.train.policy import Policy
from gcore.train.prove import fit
from gcore.train.reference import Reference

Most = Callable[[Sequence[float]], list[float]]
"""Each number's largest over the ranks; a collective."""


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """What a rank trains, and what it is held against."""

    policy: Policy
    reference: Reference | None


def load_models(launch: RankLaunch, device: torch.device, most: Most, tell: Callable[[], None]) -> Models:
    """Both, ready for the first step. Raises DataError. A collective."""
    train, model = launch.spec.train, launch.spec.model
    folder = launch.checkpoint_path or launch.model_path
    module = load_module(folder, torch.float32, trust_remote_code=model.trust_remote_code)
    check_names(folder, module)
    tell()
    packing = fit(module, train, model.max_length, most).packing
    tell()
    original = _original(launch, module, packing) if train.kl_coef > 0 else None
    if train.activation_checkpointing:
        checkpoint_activations(module, folder)
    if packing == "packed":
        dtype = torch.bfloat16 if train.dtype == "bf16" else torch.float32
        PACKED.use_fastest(module.config, dtype, device)
    policy = Policy.of(module, train, packing, device)
    tell()
    reference = Reference(original, train, device) if original is not None else None
    tell()
    return Models(policy, reference)


def _original(launch: RankLaunch, module: nn.Module, packing: Packing) -> nn.Module:
    """The job's model as it was: the policy's own, if that has not been trained yet."""
    if launch.checkpoint_path is None:
        return copy.deepcopy(module)
    dtype = torch.bfloat16 if launch.spec.train.dtype == "bf16" else torch.float32
    found = load_module(launch.model_path, dtype, trust_remote_code=launch.spec.model.trust_remote_code)
    if packing == "packed":
        found.set_attn_implementation(NAME)  # type: ignore[operator]
    return found
