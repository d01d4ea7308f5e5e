"""Trained denoising steps as rows of micro-batches, and their scores under a network.

A row is one trained step of one generated picture. Rows are independent of each other, so a micro-batch may have only some
of a picture's rows. The arrays come from blobs: states as float32 numbers, embeddings as a safetensors file
(`gcore.models.diffusion.networks.pack_conditions`). They are read when a micro-batch is computed, so that a step's states
are never in memory together.

- Losses with log-probabilities replay a step: the state before it, the state that the engine sampled after it, and the
  levels of the engine's schedule.
- Losses of the forward process add noise to the finished picture at the level of the step. The noise comes from a seed of
  the picture and the step, so that every pass and every rank that trains the row has the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcore.config.diffusion import DenoisingSpec
from gcore.config.train import TrainSpec
from gcore.errors import DataError
from gcore.ledger.balance import SampleSlot
from gcore.ledger.records.chain import Seal
from gcore.models.diffusion.networks import Condition, DenoisingNetwork, condition_shape, unpack_conditions
from gcore.models.diffusion.schedule import NoiseSchedule
from gcore.models.diffusion.steps import StepKind
from gcore.models.diffusion.windows import kept_states
from gcore.train.algorithms.denoising import prediction_gap
from gcore.train.backends.sequence_parallel import ALONE, SequenceGroup
from gcore.train.batching import MicroBatch, OutputsOf, Scores, StepTensors
from gcore.train.packing import MicroPlan, MiniBatchPlan, is_masked
from gcore.train.rank.feed import StepInput, TrainSample
from gcore.types import Medium

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How the engine sampled: kind of the random steps, their noise level, and the form of log-probabilities
    (`DenoisingStep.log_prob`). The guidance belongs to the network."""

    kind: StepKind
    noise_level: float
    constants: bool = True

    @staticmethod
    def of(diffusion: DenoisingSpec) -> StepSettings:
        """Those of a job's spec."""
        return StepSettings(diffusion.sampler, diffusion.noise_level, diffusion.constants)


@dataclass(frozen=True, slots=True, eq=False)
class DenoisingRows:
    """Rows of a micro-batch on its device.

    `states`, `following` [n, channels, height, width] float32: before each step, and as sampled after it. With a loss of the
    forward process: the picture with noise, and without. `noise` then is the noise [n, channels, height, width] that was
    added; None otherwise. `levels`: all levels of each row's schedule. `steps`: the number of each row's step.
    `conditions`, `negatives`: embeddings of each row's prompt; rows of one prompt share them. `negatives` is empty without
    guidance.
    """

    states: Tensor
    following: Tensor
    levels: tuple[tuple[float, ...], ...]
    steps: tuple[int, ...]
    conditions: tuple[Condition, ...]
    negatives: tuple[Condition, ...]
    noise: Tensor | None = None

    @property
    def level(self) -> Tensor:
        """The level of each state [n] float32, which the network gets."""
        found = [levels[step] for levels, step in zip(self.levels, self.steps, strict=True)]
        return torch.tensor(found, dtype=torch.float32, device=self.states.device)

    @property
    def delta(self) -> Tensor:
        """By how much each step changes the level [n] float32; negative."""
        found = [levels[step + 1] - levels[step] for levels, step in zip(self.levels, self.steps, strict=True)]
        return torch.tensor(found, dtype=torch.float32, device=self.states.device)

    def part(self, places: Sequence[int]) -> DenoisingRows:
        """The rows at these places."""
        index = torch.tensor(places, device=self.states.device)
        return DenoisingRows(
            self.states[index],
            self.following[index],
            tuple(self.levels[i] for i in places),
            tuple(self.steps[i] for i in places),
            tuple(self.conditions[i] for i in places),
            tuple(self.negatives[i] for i in places) if self.negatives else (),
            None if self.noise is None else self.noise[index],
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepScores(Scores):
    """Scores of denoising steps: log-probabilities [b, w] as of tokens, and without entropies, which are 0. By row of the
    micro-batch, [n, ...]:

    `values` [n, channels, height, width]: the mean of each step; with a loss of the forward process: the predictions. `std`,
    `diffusion` [n]: of `gcore.models.diffusion.steps.DenoisingStep`; `delta` [n]: by how much the step changes the level.
    They do not depend on the network, and are 0 with a loss of the forward process.
    """

    values: Tensor
    std: Tensor
    diffusion: Tensor
    delta: Tensor

    def kept(self) -> Self:
        """What later passes compare with, without gradients, in host memory: the values of a whole step are large."""
        return replace(
            self, logp=self.logp.detach(), entropy=self.entropy.detach(), values=self.values.detach().to("cpu")
        )

    def kl(self, reference: Tensor, *, exact: bool) -> Tensor:
        """KL divergence [n] to the same steps with means `reference` [n, ...], as a mean over dimensions.

        `exact`: of the two normal distributions: squares / (2 std²). Otherwise Flow-GRPO's form (arXiv 2505.05470), which
        divides by the diffusion coefficient without the step size: squares / (2 s²).
        """
        scale = self.std if exact else self.diffusion
        return prediction_gap(self.values, reference) / (2 * scale**2)


@dataclass(frozen=True, slots=True, eq=False)
class DenoisingBatch(MicroBatch):
    """A micro-batch of generated pictures: a row of the table for each picture, a column for each trained step in it.

    `read`: reads its rows from blobs, in the order of the table.
    """

    read: Callable[[], DenoisingRows]

    @property
    def size(self) -> str:
        """Size of the micro-batch in words, for error messages."""
        return f"a micro-batch of {self.mask.numel()} denoising steps of {len(self.slots)} pictures, {self.computed} tokens"

    @property
    def inputs(self) -> DenoisingRows:
        """The rows, read again at each access."""
        return self.read()


def score_rows(predictions: Tensor, rows: DenoisingRows, schedule: NoiseSchedule, settings: StepSettings) -> StepScores:
    """The distributions of all rows' steps, and the log-probabilities [n] of the sampled states.

    `predictions` [n, channels, height, width] float32. Rows that take the same step of the same schedule are computed
    together. The gradient flows through the predictions.
    """
    logp, mean, std, diffusion, order = [], [], [], [], []
    for (levels, step), places in _places(zip(rows.levels, rows.steps, strict=True)).items():
        index = torch.tensor(places, device=predictions.device)
        found = schedule.step(settings.kind, rows.states[index], predictions[index], levels, step, settings.noise_level)
        logp.append(found.log_prob(rows.following[index], constants=settings.constants))
        mean.append(found.mean)
        std += [found.std] * len(places)
        diffusion += [found.diffusion] * len(places)
        order += places
    back = torch.argsort(torch.tensor(order, device=predictions.device))
    spread, strength = (
        torch.tensor(values, dtype=torch.float32, device=predictions.device)[back] for values in (std, diffusion)
    )
    logp_of_rows = torch.cat(logp)[back]
    return StepScores(logp_of_rows, torch.zeros_like(logp_of_rows), torch.cat(mean)[back], spread, strength, rows.delta)


def _places(keys: Iterable[K]) -> dict[K, list[int]]:
    """The places of each key, in order of their first."""
    found: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def read_rows(
    samples: Sequence[tuple[TrainSample, Sequence[int]]],
    folder: Path,
    device: torch.device,
    noises: NoiseSchedule | None = None,
) -> DenoisingRows:
    """Read the rows of some steps of some samples from their blobs. Each embedding is read once.

    `samples`: each with the places of its trained steps that are rows. `folder`: of the blobs, named by SHA-256. `noises`:
    adds noise to finished pictures, for losses of the forward process; None: steps are replayed. Raises DataError for
    arrays that do not belong to the sample's numbers.
    """
    before: list[NDArray[np.float32]] = []
    after: list[NDArray[np.float32]] = []
    levels: list[tuple[float, ...]] = []
    steps: list[int] = []
    conditions: list[Condition] = []
    negatives: list[Condition | None] = []
    known: dict[str, tuple[Condition, Condition | None]] = {}
    for sample, places in samples:
        assert sample.steps is not None
        assert sample.sigmas is not None
        numbers = sample.steps.tolist()
        kept = _states(sample, folder, 1 if noises is not None else len(kept_states(numbers)))
        at = {number: row for row, number in enumerate(kept_states(numbers))}
        medium = _medium(sample, "embeds")
        if medium.sha256 not in known:
            known[medium.sha256] = unpack_conditions((folder / medium.sha256).read_bytes())
        condition, negative = known[medium.sha256]
        own = tuple(sample.sigmas.tolist())
        for place in places:
            step = numbers[place]
            before.append(_noise(sample, step, kept[0].shape) if noises is not None else kept[at[step]])
            after.append(kept[0] if noises is not None else kept[at[step + 1]])
            levels.append(own)
            steps.append(step)
            conditions.append(condition)
            negatives.append(negative)
    if len({negative is None for negative in negatives}) > 1:
        raise DataError("some samples have embeddings of a negative prompt, and others have none")

    def put(condition: Condition) -> Condition:
        return {name: tensor.to(device) for name, tensor in condition.items()}

    placed = {id(one): put(one) for one in (*conditions, *negatives) if one is not None}
    rows = DenoisingRows(
        torch.from_numpy(np.stack(before)).to(device),
        torch.from_numpy(np.stack(after)).to(device),
        tuple(levels),
        tuple(steps),
        tuple(placed[id(one)] for one in conditions),
        tuple(placed[id(one)] for one in negatives if one is not None),
    )
    if noises is None:
        return rows
    return replace(rows, states=noises.noised(rows.following, rows.states, rows.level), noise=rows.states)


def _noise(sample: TrainSample, step: int, shape: Sequence[int]) -> NDArray[np.float32]:
    """The noise that is added to a finished picture at the level of `step`."""
    seed = hashlib.sha256(f"{_medium(sample, 'trajectory').sha256}|{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "little"))
    drawn: NDArray[np.float32] = torch.randn(tuple(shape), generator=generator).numpy()
    return drawn


def _medium(sample: TrainSample, kind: str) -> Medium:
    found = [one for one in sample.media if one.kind == kind]
    if len(found) != 1:
        raise DataError(f"the sample of a generated picture has {len(found)} blobs of the kind {kind} instead of one")
    return found[0]


def _states(sample: TrainSample, folder: Path, wanted: int) -> NDArray[np.float32]:
    """The `wanted` stored states of a sample, mapped from its blob. Raises DataError."""
    medium = _medium(sample, "trajectory")
    if medium.dtype != "float32" or len(medium.shape) != 4 or medium.shape[0] != wanted:
        raise DataError(
            f"the states of a generated picture are {medium.dtype} {list(medium.shape)}, but {wanted} float32 states "
            "of the trained steps are needed: their log-probabilities were computed from these",
            fix="Use the engine and the trainer of one version",
        )
    file = folder / medium.sha256
    if (size := file.stat().st_size) != 4 * int(np.prod(medium.shape)):
        raise DataError(f"the states of a generated picture have {size} bytes, not those of {list(medium.shape)}")
    return np.memmap(file, dtype="<f4", mode="r", shape=medium.shape)


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """Which rows a micro-batch has: the steps at `places` of each sample of `slots`. Without samples it is a dummy."""

    slots: tuple[SampleSlot, ...] = ()
    places: range = range(0)


def plan_rows(seal: Seal, work: StepInput, budget: int) -> tuple[tuple[MiniBatchPlan, tuple[RowsPlan, ...]], ...]:
    """Split this rank's rows of each mini-batch into micro-batches of at most `budget` image tokens, and at least one row.

    All ranks get the same number, computed from the seal; some of them may be dummies. A micro-batch has all steps of some
    pictures, or some steps of one picture.
    """
    found = []
    for number in range(work.layout.mini_batches):
        shares = [[slot for slot in share if not is_masked(seal, slot)] for share in work.layout.shares[number]]
        cuts = [_cut_rows(seal, share, budget) for share in shares]
        count = max(len(cut) for cut in cuts)
        own = cuts[work.layout.group_of(work.rank)]
        steps = [seal.groups[slot.group].response_tokens[slot.sample] for share in shares for slot in share]
        plan = MiniBatchPlan((MicroPlan(),) * count, tokens=sum(steps), sequences=len(steps))
        found.append((plan, (*own, *(RowsPlan(),) * (count - len(own)))))
    return tuple(found)


def _cut_rows(seal: Seal, share: Sequence[SampleSlot], budget: int) -> list[RowsPlan]:
    found: list[RowsPlan] = []
    alike: dict[tuple[int, int], list[SampleSlot]] = {}
    for slot in share:
        group = seal.groups[slot.group]
        alike.setdefault((group.response_tokens[slot.sample], max(group.step_tokens, 1)), []).append(slot)
    for (steps, tokens), slots in sorted(alike.items()):
        rows = max(1, budget // tokens)
        if rows < steps:
            places = [range(first, min(first + rows, steps)) for first in range(0, steps, rows)]
            found += [RowsPlan((slot,), one) for slot in slots for one in places]
            continue
        each = rows // steps
        found += [RowsPlan(tuple(slots[at : at + each]), range(steps)) for at in range(0, len(slots), each)]
    return found


class DenoisingFeeding:
    """How a rank turns generated pictures into micro-batches; implements `Feeding`."""

    group: SequenceGroup = ALONE

    def __init__(
        self,
        network: DenoisingNetwork,
        schedule: NoiseSchedule,
        settings: StepSettings,
        blobs: Path,
        device: torch.device,
        shape: tuple[int, int, int],
        *,
        forward: bool,
    ) -> None:
        """`network`: how the job's network is called. `blobs`: folder of the arrays, named by SHA-256. `shape`: of a state.
        `forward`: whether the loss is one of the forward process, which adds noise to finished pictures."""
        self._network = network
        self._schedule = schedule
        self._settings = settings
        self._blobs = blobs
        self.device = device
        self._shape = shape
        self._forward = forward

    def outputs_of(self, call: Callable[..., Any]) -> OutputsOf:
        """Wrap a network as a function from rows to guided predictions [n, channels, height, width] float32.

        Rows whose embeddings have equal shapes share a pass.
        """
        network = self._network.calling(call)

        def predictions(rows: DenoisingRows) -> Tensor:
            alike = _places(map(condition_shape, rows.conditions)).values()
            parts = [rows] if len(alike) == 1 else [rows.part(places) for places in alike]
            found = [network.predict(one.states, one.level, one.conditions, one.negatives) for one in parts]
            order = torch.tensor([place for places in alike for place in places], device=rows.states.device)
            return torch.cat(found)[torch.argsort(order)]

        return predictions

    def dummy_inputs(self) -> DenoisingRows:
        """One row of zeros."""
        state = torch.zeros(1, *self._shape, device=self.device)
        first, second = (1.0, 0.5) if self._schedule.is_flow else (2.0, 1.0)
        condition = {name: one.to(self.device) for name, one in self._network.blank_condition().items()}
        negatives = (condition,) if self._network.needs_negative else ()
        return DenoisingRows(
            state, state, ((first, second),), (0,), (condition,), negatives, state if self._forward else None
        )

    def cut(self, work: StepInput, train: TrainSpec) -> StepTensors:
        """Split this rank's share of a step into micro-batches. Arrays are read later."""
        planned = plan_rows(work.seal, work, train.micro_batch_tokens)
        batches = tuple(tuple(self._batch(work, one) for one in rows) for _, rows in planned)
        return StepTensors(work, tuple(plan for plan, _ in planned), batches)

    def _batch(self, work: StepInput, plan: RowsPlan) -> DenoisingBatch:
        if not plan.slots:
            nothing = torch.zeros(1, 1, dtype=torch.bool, device=self.device)
            zeros = torch.zeros(1, 1, device=self.device)
            return DenoisingBatch((), nothing, nothing, zeros, 0, 1, self.dummy_inputs)
        samples = []
        for slot in plan.slots:
            sealed = work.seal.groups[slot.group]
            samples.append((work.groups[sealed.digest].samples[slot.sample], plan.places))
        every = torch.ones(len(samples), len(plan.places), dtype=torch.bool, device=self.device)
        logp = np.stack([sample.logprobs[places.start : places.stop] for sample, places in samples])
        tokens = sum(work.seal.groups[slot.group].step_tokens for slot in plan.slots) * len(plan.places)
        noises = self._schedule if self._forward else None

        def read() -> DenoisingRows:
            return read_rows(samples, self._blobs, self.device, noises)

        logprobs = torch.from_numpy(logp.astype(np.float32)).to(self.device)
        return DenoisingBatch(plan.slots, every, every, logprobs, tokens, tokens, read)

    def score(self, outputs_of: OutputsOf, batch: DenoisingBatch, *, entropic: bool = False) -> StepScores:
        """Scores of a micro-batch's steps under a network. There are no entropies."""
        rows = batch.inputs
        predictions = outputs_of(rows)
        if self._forward or not batch.slots:
            zeros = predictions.new_zeros(len(predictions))
            nothing = predictions.flatten(1).sum(1).mul(0.0).view(batch.mask.shape)
            return StepScores(nothing, torch.zeros_like(nothing), predictions, zeros, zeros, zeros)
        found = score_rows(predictions, rows, self._schedule, self._settings)
        logp = found.logp.view(batch.mask.shape)
        return replace(found, logp=logp, entropy=torch.zeros_like(logp))
