"""Tests of training, with torch: the contract kit for custom advantage estimators and losses, and fakes.

`FakeTrainBackend` trains a module in this process alone; `FakeObjective` and `FakePublisher` replace the real ones.

    from gcore.testing.training import check_advantage, check_loss

    def test_my_estimator():
        check_advantage("against_median")

As in `gcore.testing.contracts`, each check loads the plug-in by its entry-point name and raises `ContractBroken` with a
sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from gcore.config.base import Option, explain_errors
from gcore.config.train import TrainSpec
from gcore.errors import EngineError
from gcore.models.publisher import NamedTensor
from gcore.models.replicas import Extent
from gcore.rollout.api import FolderUpdate, WeightUpdate
from gcore.testing.contracts import ContractBroken
from gcore.train.backends.base import AdamKind, TensorKind, UpdateResult, trained_parameters
from gcore.train.batching import Feeding, MicroBatch, OutputsOf, Scores
from gcore.train.objectives import Count, Need, Targets, find_plugin_advantage, find_plugin_loss
from gcore.types import Version

OUTCOMES = ((1.0, 0.0, 1.0, 2.0, 0.5, -1.0), (0.0,) * 6, (1e6, -1e6, 3.0, 0.25, 0.25, 0.25))
GROUPS = (0, 0, 0, 1, 1, 1)
TOLERANCE = 1e-9


def check_advantage(name: str, *, options: Mapping[str, Option] | None = None) -> None:
    """Check an advantage estimator: its results are finite, the same each time, and do not depend on the order of samples or the numbers of groups.

    Every train rank computes the advantages itself, and a group's number has no meaning. Raises ContractBroken, PluginFault.
    """
    estimate = find_plugin_advantage(_train(advantage=name, advantage_options=dict(options or {})))
    _check_promise(estimate is not None, f"{name!r} is built into gcore; name an estimator of your own")
    assert estimate is not None
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    for outcomes in OUTCOMES:
        values, groups = torch.tensor(outcomes, dtype=torch.float64), torch.tensor(GROUPS)
        found = estimate(values.clone(), groups.clone())
        _same(found, estimate(values, groups), f"estimator {name!r} gives another result for the same input")
        _same(found[order], estimate(values[order], groups[order]), f"estimator {name!r} depends on the samples' order")
        _same(found, estimate(values, 1000 - 7 * groups), f"estimator {name!r} depends on the groups' numbers")


def check_loss(name: str, *, options: Mapping[str, Option] | None = None) -> None:
    """Check a loss: it and its gradient are finite, the same for a row alone and in a batch, and independent of masked values.

    A loss that violates this depends on how samples are divided between ranks and micro-batches. Raises ContractBroken,
    PluginFault.
    """
    train = _train(loss=name, loss_options=dict(options or {}))
    loss = find_plugin_loss(train)
    _check_promise(loss is not None, f"{name!r} is built into gcore; name a loss of your own")
    assert loss is not None
    logp = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, -0.3]], dtype=torch.float64)
    old = torch.tensor([[-1.2, -0.9, -1.5], [-0.7, -0.8, -0.9]], dtype=torch.float64)
    gain = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])

    def of(rows: slice, logp: Tensor = logp) -> tuple[Tensor, Tensor]:
        """Return the masked token losses of some rows, and their gradient."""
        own = logp[rows].clone().requires_grad_()
        clips = {"clip_low": train.clip_low, "clip_high": train.clip_high}
        token_loss = loss(own, old[rows], gain[rows], mask[rows], **clips).where(mask[rows], 0.0)
        (gradient,) = torch.autograd.grad(token_loss.sum(), own)
        return token_loss.detach(), gradient

    both, gradient = of(slice(0, 2))
    _check_promise(
        bool(both.isfinite().all() and gradient.isfinite().all()), f"loss {name!r} or its gradient is not finite"
    )
    for row in range(2):
        alone, of_alone = of(slice(row, row + 1))
        _same(both[row : row + 1], alone, f"loss {name!r} of a row depends on other rows of the batch")
        _same(gradient[row : row + 1], of_alone, f"the gradient of loss {name!r} depends on other rows of the batch")
    odd = logp.clone()
    odd[1, 2] = -9.0  # after the response's end
    _same(both, of(slice(0, 2), odd)[0], f"loss {name!r} depends on masked values")


def _train(**settings: Any) -> TrainSpec:
    """Return a `train` section with these fields. Raises ContractBroken with the problems, such as an unknown name, if it is not valid."""
    try:
        return TrainSpec(**settings)
    except ValidationError as error:
        problems = explain_errors(error, TrainSpec, root="spec")
        raise ContractBroken("; ".join(f"train.{problem}" for problem in problems)) from error


def _check_promise(kept: bool, sentence: str) -> None:
    if not kept:
        raise ContractBroken(sentence)


def _same(one: Tensor, other: Tensor, sentence: str) -> None:
    scale = max(1.0, float(one.abs().max()))
    _check_promise(bool(((one - other).abs() <= TOLERANCE * scale).all()), sentence)


class FakeTrainBackend:
    """A `TrainBackend` for one process: trains a module with torch's AdamW, in float32, without sharding.

    `outputs_of`: computes the module's outputs at the scored positions of a micro-batch. The backend owns the module from now on.
    """

    def __init__(
        self,
        module: nn.Module,
        feeding: Feeding,
        outputs_of: OutputsOf,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        max_grad_norm: float = 1.0,
    ) -> None:
        self.module = module
        self.feeding = feeding
        self.outputs_of = outputs_of
        self._names = trained_parameters(module)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(one.shape) for name, one in self._names.items()}
        self._max_grad_norm = max_grad_norm
        self._adam = torch.optim.AdamW(self._names.values(), lr=0.0, betas=betas, weight_decay=0.0)
        for parameter in self._names.values():
            parameter.grad = torch.zeros_like(parameter)
        self.update(0.0)
        self.count_updates(0)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Compute the gradients of `loss` and add them to those of the step. `last` has no effect here."""
        loss.backward()

    def flush(self) -> None:
        """Nothing to do: gradients are not buffered."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for parameter in self._names.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def update(self, learning_rate: float) -> UpdateResult:
        """Clip the gradients to their maximum norm and make one optimizer update; skip the update if the norm is not finite."""
        self._adam.param_groups[0]["lr"] = learning_rate
        norm = float(nn.utils.clip_grad_norm_(self._names.values(), self._max_grad_norm))
        applied = norm < float("inf")
        if applied:
            self._adam.step()
        self._adam.zero_grad()
        return UpdateResult(applied, norm if applied else float("inf"))

    def tensors(self, kind: TensorKind) -> Iterator[NamedTensor]:
        """Yield each parameter's tensor of this kind: its value (served, master), or a state of Adam."""
        for name, parameter in self._names.items():
            yield NamedTensor(name, self._tensor(parameter, kind))

    def buffers(self) -> Iterator[NamedTensor]:
        """Yield the module's buffers that its state dict contains."""
        saved = self.module.state_dict().keys()
        for name, buffer in self.module.named_buffers():
            if name in saved:
                yield NamedTensor(name, buffer)

    def extents(self) -> Iterator[Extent]:
        """Yield one extent per parameter, which covers it completely, because nothing is sharded."""
        for name, parameter in self._names.items():
            yield Extent(name=name, start=0, numel=parameter.numel())

    def pieces(self, kind: str, extents: Iterable[Extent]) -> Iterator[Tensor]:
        """Yield the flattened tensor of this kind of each extent's parameter."""
        for extent in extents:
            yield self._tensor(self._names[extent.name], kind).flatten()

    def restore(self, kind: AdamKind, values: Iterable[NamedTensor]) -> None:
        """Copy the tensors into Adam's state of this kind, by parameter name."""
        for one in values:
            self._adam.state[self._names[one.name]][kind].copy_(one.tensor)

    def restore_optimizer(self, states: Mapping[AdamKind, Path], adam_steps: int) -> None:
        """Copy the tensors in the safetensors files into Adam's state, and set its step count."""
        for kind, path in states.items():
            self.restore(kind, (NamedTensor(name, tensor) for name, tensor in load_file(path).items()))
        self.count_updates(adam_steps)

    def count_updates(self, adam_steps: int) -> None:
        """Set Adam's step count, which its bias correction uses."""
        for state in self._adam.state.values():
            state["step"].fill_(adam_steps)

    def forward_tensors(self) -> Iterator[Tensor]:
        """Yield the module's parameters and buffers."""
        yield from (parameter.data for parameter in self.module.parameters())
        yield from self.module.buffers()

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield Adam's state tensors and the gradients."""
        for parameter, state in self._adam.state.items():
            yield from (value for value in state.values() if isinstance(value, Tensor))
            if parameter.grad is not None:
                yield parameter.grad

    def _tensor(self, parameter: nn.Parameter, kind: str) -> Tensor:
        if kind in ("served", "master"):
            return parameter.detach()
        found: Tensor = self._adam.state[parameter][kind]
        return found


class FakeObjective:
    """A policy `Objective` without ratio and clipping: minus advantage times log-probability of each token."""

    needs: frozenset[Need] = frozenset()

    def trained(self, batch: MicroBatch, old: Tensor | None) -> Tensor:
        """Return which tokens are trained: all in the batch's mask."""
        return batch.mask

    def loss(self, scores: Scores, targets: Targets) -> Tensor:
        """Return the sum of minus log-probability times advantage over the masked tokens."""
        return torch.where(targets.mask, -scores.logp * targets.advantages, 0.0).sum()

    def denominator(self, count: Count) -> float:
        """Return the number of trained tokens, by which the loss is divided."""
        return float(count.tokens)

    def metrics(self, scores: Scores, targets: Targets) -> Mapping[str, Tensor]:
        """Return the number of trained tokens as `trained_tokens`."""
        return {"trained_tokens": targets.mask.sum()}


class FakePublisher:
    """A `Publisher` that keeps staged weights in memory. `tensors`: yields the current weights. `read` returns staged ones."""

    def __init__(self, tensors: Callable[[], Iterator[NamedTensor]]) -> None:
        self._tensors = tensors
        self._staged: dict[Version, dict[str, Tensor]] = {}

    def stage(self, version: Version, tell: Callable[[], None]) -> FolderUpdate:
        """Keep a copy of the current weights as `version`, and return the update that names it. Calls `tell` after each tensor."""
        staged: dict[str, Tensor] = {}
        for one in self._tensors():
            staged[one.name] = one.tensor.detach().clone()
            tell()
        self._staged[version] = staged
        return FolderUpdate(version, f"memory/{version}")

    def send(self, update: WeightUpdate) -> None:
        """Nothing to do: `read` returns the staged weights."""

    def release(self, update: WeightUpdate) -> None:
        """Drop the copy of this update's weights."""
        self._staged.pop(update.version, None)

    def read(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """Return the staged tensors of this update by name. Raises EngineError if they are not staged."""
        if update.version not in self._staged:
            raise EngineError(f"the weights of version {update.version} are not staged", where="memory")
        return self._staged[update.version]
