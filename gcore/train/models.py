"""From models' folders to what a rank trains: how they are fed, the policy, its critic, and the reference.

In this order, because each changes the module for what comes after: read it, prove how sequences may be laid out, copy it
for the critic and the reference while they are still the same, ask for activation checkpointing, hand it to DeepSpeed.
Policy and critic are fed the same micro-batches; where the critic is another model, both must be able to take them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gcore.errors import DataError
from gcore.train.attention import NAME, PACKED
from gcore.train.critic import Critic, load_backbone, make_value_model
from gcore.train.launch import RankLaunch
from gcore.train.module import check_names, checkpoint_activations, load_module
from gcore.train.packing import Packing
from gcore.train.policy import Policy
from gcore.train.prove import fit
from gcore.train.reference import Reference
from gcore.weights.layout import critic_folder

Most = Callable[[Sequence[float]], list[float]]
"""Each number's largest over the ranks; a collective."""


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """What a rank trains, and what it is held against. `critic`: of jobs that have one."""

    policy: Policy
    reference: Reference | None
    critic: Critic | None = None


Fill = Callable[[str, nn.Module], None]
"""Puts the weights of a state into a whole module, the policy's or the critic's, in place of its own; a collective."""


def load_models(
    launch: RankLaunch, device: torch.device, most: Most, tell: Callable[[], None], fill: Fill | None = None
) -> Models:
    """All of them, ready for the first step. `fill`: of a world that starts from copies. Raises DataError. A collective."""
    train, model = launch.spec.train, launch.spec.model
    folder = launch.checkpoint_path or launch.model_path
    module = load_module(folder, torch.float32, trust_remote_code=model.trust_remote_code)
    check_names(folder, module)
    tell()
    backbone = _other_backbone(launch, module)
    packing = fit(module, train, model.max_length, most, beside=backbone).packing
    tell()
    original = _original(launch, module, packing) if train.kl_coef > 0 else None
    if train.critic is not None and backbone is None:
        backbone = copy.deepcopy(module)
    if fill is not None:
        fill("policy", module)
        tell()
    if train.activation_checkpointing:
        for one in (module, backbone):
            if one is not None:
                checkpoint_activations(one, folder)
    if packing == "packed":
        dtype = torch.bfloat16 if train.dtype == "bf16" else torch.float32
        PACKED.use_fastest(module.config, dtype, device, beside=None if backbone is None else backbone.config)
    policy = Policy.of(module, train, packing, device)
    tell()
    reference = Reference(original, train, device) if original is not None else None
    tell()
    if backbone is None:
        return Models(policy, reference)
    value_model = make_value_model(backbone, _head_folder(launch))
    if fill is not None:
        fill("critic", value_model)
    # What one of them does not know, neither can be fed.
    vocabulary = min(policy.feeding.vocabulary, value_model.vocabulary)
    policy.feeding = dataclasses.replace(policy.feeding, vocabulary=vocabulary)
    critic = Critic.of(value_model, train, policy.feeding)
    tell()
    return Models(policy, reference, critic)


def _other_backbone(launch: RankLaunch, policy: nn.Module) -> nn.Module | None:
    """The critic's, if it is not the policy's as it was just read. Raises DataError."""
    critic = launch.spec.train.critic
    if critic is None or (launch.checkpoint_path is None and critic.path is None):
        return None
    folder = critic_folder(launch.checkpoint_path) if launch.checkpoint_path is not None else launch.critic_path
    module = load_backbone(folder, trust_remote_code=launch.spec.model.trust_remote_code)
    own, needed = (int(getattr(one.config, "max_position_embeddings", None) or 0) for one in (module, policy))
    needed = min(filter(None, (needed, launch.spec.model.max_length)), default=0)
    if own and own < needed:
        raise DataError(
            f"the critic's model takes {own} tokens at most, and the policy may be given {needed}",
            where=str(folder),
            fix=f"Set model.max_length: {own}, or name another model in train.critic.path",
        )
    return module


def _head_folder(launch: RankLaunch) -> Path | None:
    """Where the critic's head may lie; None: it is new."""
    if launch.checkpoint_path is not None:
        return critic_folder(launch.checkpoint_path)
    return None if launch.critic_path == launch.model_path else launch.critic_path


def _original(launch: RankLaunch, module: nn.Module, packing: Packing) -> nn.Module:
    """The job's model as it was: the policy's own, if that has not been trained yet."""
    if launch.checkpoint_path is None:
        return copy.deepcopy(module)
    dtype = torch.bfloat16 if launch.spec.train.dtype == "bf16" else torch.float32
    found = load_module(launch.model_path, dtype, trust_remote_code=launch.spec.model.trust_remote_code)
    if packing == "packed":
        found.set_attn_implementation(NAME)  # type: ignore[operator]
    return found
