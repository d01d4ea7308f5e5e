"""A network that follows the policy: engines serve it in the policy's place (DiffusionNFT, arXiv 2509.16117), or evaluate it (a
moving average).

After each training step its weights become d·own + (1 - d)·policy. It has no optimizer. It is whole on every rank, and the
same: each rank computes it from the gathered weights of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from gcore.models.layout import SERVED_FOLDER
from gcore.models.publisher import NamedTensor
from gcore.models.replicas import Extent
from gcore.train.backends.base import AdamKind, TensorKind, TrainBackend, forward_tensors, saved_buffers
from gcore.train.batching import Feeding, OutputsOf


class FollowingNetwork:
    """A network that follows the policy. To checkpoints and replicas it is a `TrainBackend` without an optimizer, whose moments
    are zero."""

    def __init__(
        self,
        module: nn.Module,
        feeding: Feeding,
        policy: TrainBackend,
        kept_share: Callable[[int], float],
        *,
        half: bool,
        folder: str = SERVED_FOLDER,
    ) -> None:
        """`module`: a complete copy in float32, on any device. `policy`: what it follows. `kept_share`: the share d by training
        step, from 0. `half`: whether it computes in bfloat16, as the policy then does. `folder`: its subfolder in checkpoints,
        which says what it is for."""
        self.module = module.requires_grad_(False).eval()
        self.feeding = feeding
        self.folder = folder
        self._policy = policy
        self._kept_share = kept_share
        self._masters = {name: one.detach().clone() for name, one in module.named_parameters()} if half else {}
        """The weights in float32, in host memory, if the network computes in bfloat16."""
        module.to(feeding.device)
        if half:
            for parameter in module.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        self.outputs_of: OutputsOf = feeding.outputs_of(module)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(one.shape) for name, one in module.named_parameters()}

    @property
    def serves(self) -> bool:
        """Whether engines serve it in the policy's place."""
        return self.folder == SERVED_FOLDER

    @torch.no_grad()
    def follow(self, step: int, tell: Callable[[], None]) -> None:
        """Follow the policy after training step `step`, from 0. A collective."""
        kept = self._kept_share(step)
        parameters = dict(self.module.named_parameters())
        for one in self._policy.tensors("master"):
            own = self._masters.get(one.name, parameters[one.name])
            own.copy_(own * kept + one.tensor.to(own.device) * (1 - kept))
            if own is not parameters[one.name]:
                parameters[one.name].copy_(own)
            tell()

    def tensors(self, kind: TensorKind) -> Iterator[NamedTensor]:
        """Yield every parameter, or zeros for the moments. Not a collective."""
        for name, parameter in self.module.named_parameters():
            whole = self._masters.get(name, parameter.detach())
            yield NamedTensor(name, whole if kind in ("served", "master") else torch.zeros_like(whole))

    def buffers(self) -> Iterator[NamedTensor]:
        """The persistent buffers. Not a collective."""
        return saved_buffers(self.module)

    def extents(self) -> Iterator[Extent]:
        """The ranges of elements that this rank keeps for all: those that it updates of the policy."""
        return self._policy.extents()

    def pieces(self, kind: str, extents: Iterable[Extent]) -> Iterator[Tensor]:
        """The values of these ranges, flat; zeros for the moments."""
        parameters = dict(self.module.named_parameters())
        for extent in extents:
            whole = self._masters.get(extent.name, parameters[extent.name].detach())
            piece = whole.reshape(-1)[extent.start : extent.start + extent.numel]
            yield piece if kind == "master" else torch.zeros_like(piece)

    def restore(self, kind: AdamKind, values: Iterable[NamedTensor]) -> None:
        """Read and drop the moments, which are zero."""
        for _ in values:
            pass

    def restore_optimizer(self, states: Mapping[AdamKind, Path], adam_steps: int) -> None:
        """Do nothing: there is no optimizer."""

    def count_updates(self, adam_steps: int) -> None:
        """Do nothing: there is no optimizer."""

    def forward_tensors(self) -> Iterator[Tensor]:
        """Every tensor that a forward pass uses."""
        return forward_tensors(self.module)
