"""Loads the networks of a rank that trains a policy for pictures: the trained one, the reference, and the one that follows it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gcore.config.diffusion import FORWARD_LOSSES
from gcore.errors import DataError
from gcore.models.diffusion.files import PipelineFiles, pipeline_parts
from gcore.models.diffusion.networks import NETWORKS, load_network_module
from gcore.models.diffusion.schedule import NoiseSchedule
from gcore.models.layout import AVERAGE_FOLDER, SERVED_FOLDER
from gcore.train.backends.base import OptimizerSettings, TrainBackend
from gcore.train.denoising.follower import FollowingNetwork
from gcore.train.denoising.objectives import denoising_objective
from gcore.train.denoising.rows import DenoisingFeeding, StepSettings
from gcore.train.models import Fill, RankModels, Reference, import_backend
from gcore.train.rank.launch import RankLaunch


def load_denoising_models(
    launch: RankLaunch, device: torch.device, tell: Callable[[], None], fill: Fill | None = None
) -> RankModels:
    """Load all networks of the job, ready for the first step. A collective. Arguments as of `load_models`.

    Raises DataError if a network cannot be loaded or trained.
    """
    spec, train, diffusion = launch.spec, launch.spec.train, launch.spec.rollout.diffusion
    assert diffusion is not None
    if launch.blobs is None:
        raise DataError("the job's node has no blob store for generated pictures", fix="Install gcore[vision] there")
    pipeline = Path(spec.model.path)
    files, schedule = PipelineFiles.read(pipeline), NoiseSchedule.load(pipeline)
    folder = launch.checkpoint_path or launch.model_path
    module = load_network_module(pipeline, folder)
    tell()
    network = NETWORKS[pipeline_parts(pipeline)["_class_name"]](_Described(module), diffusion.guidance)
    feeding = DenoisingFeeding(
        network,
        schedule,
        StepSettings.of(diffusion),
        Path(launch.blobs.folder),
        device,
        files.state_shape(*files.size(diffusion.height, diffusion.width)),
        forward=train.loss in FORWARD_LOSSES,
    )
    original = _original(launch, module) if train.kl_coef > 0 else None
    assert train.diffusion is not None
    inner = SERVED_FOLDER if train.loss == "nft" else AVERAGE_FOLDER
    served = _second(launch, module, inner) if train.follows else None
    if fill is not None:
        fill("policy", module)
        if served is not None:
            fill("served", served)
        tell()
    policy: TrainBackend = import_backend(train.backend)(module, OptimizerSettings.of(train, train), feeding)
    tell()
    reference = None if original is None else Reference(original, train, feeding)
    follower = None
    if served is not None:
        half = train.dtype == "bf16"
        follower = FollowingNetwork(served, feeding, policy, train.diffusion.kept_share, half=half, folder=inner)
    tell()
    objective = denoising_objective(spec, schedule)
    return RankModels(policy, reference, follower=follower, objective=objective)


class _Described:
    """What `DenoisingNetwork` reads of a module, before a backend splits it: its configuration and the dtype of its passes."""

    def __init__(self, module: nn.Module) -> None:
        described: Any = module
        self.config = described.config
        self._module = module

    def parameters(self) -> Any:
        """Its parameters, whose dtype the backend may change."""
        return self._module.parameters()


def _original(launch: RankLaunch, module: nn.Module) -> nn.Module:
    """The job's initial network as reference."""
    if launch.checkpoint_path is None and launch.start.state is None:
        return copy.deepcopy(module)
    return load_network_module(Path(launch.spec.model.path), launch.model_path)


def _second(launch: RankLaunch, module: nn.Module, inner: str) -> nn.Module:
    """The network that follows: of the subfolder `inner` of the checkpoint, or a copy of the untrained one."""
    if launch.checkpoint_path is None:
        return copy.deepcopy(module)
    return load_network_module(Path(launch.spec.model.path), launch.checkpoint_path / inner)
