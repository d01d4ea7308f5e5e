"""Micro-batches of generated pictures: each trained step is in one of them, they are small enough, and their losses and
gradients do not depend on how they were cut."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ready_seals import ready_seal
from torch import Tensor

from gcore.config import parse_spec
from gcore.config.spec import JobSpec
from gcore.engines.diffusers.core import DenoisingRequest, DenoisingResult, DiffusionCore
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import Seal, SealedGroup
from gcore.models.diffusion.networks import NETWORKS, pack_conditions
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.testing.pipelines import write_pipeline
from gcore.train.algorithms.denoising import nft_loss, nft_weights, prediction_gap
from gcore.train.batching import BatchIndex, StepTensors
from gcore.train.denoising.objectives import denoising_objective
from gcore.train.denoising.rows import DenoisingBatch, DenoisingFeeding, StepScores, StepSettings, plan_rows
from gcore.train.objectives import Count, OtherScores, Targets
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
from gcore.types import Medium, PromptRef, Version

CPU = torch.device("cpu")
PROMPTS = ("a red square", "a blue circle")
SAMPLES, TOKENS = 3, 16
LOW, HIGH = 5.5e-5, 1.6e-4
"""Clip ranges that some of the ratios exceed, with either sign of the advantage."""


def spec_of(loss: str = "ppo", **train: Any) -> JobSpec:
    sampler = "ode" if loss in ("nft", "weighted_matching") else "sde"
    return parse_spec(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 1, "samples_per_prompt": SAMPLES},
            "rollout": {"engine": "diffusers", "diffusion": {"steps": 4, "sampler": sampler}},
            "reward": {"name": "/r.py:r"},
            "train": {"loss": loss, "clip_low": 1e-4, "clip_high": 1e-4, **train},
        }
    )


class Made:
    """Groups of pictures that an engine made: `pipeline`, `work`, and `feeding` of a rank that trains them."""

    def __init__(self, folder: Path, *, forward: bool) -> None:
        self.pipeline = ImagePipeline.load(
            write_pipeline(folder / "p", "sd3"), guidance=1.0, dtype=torch.float32, device="cpu"
        )
        self.blobs = folder / "blobs"
        self.blobs.mkdir()
        shape = self.pipeline.files.state_shape(16, 16)
        steps = () if forward else (0, 1, 2)
        core = DiffusionCore(self.pipeline, slots=8, version="0.0")
        levels = self.pipeline.levels(4, shape)
        for number in range(SAMPLES * len(PROMPTS)):
            text = PROMPTS[number // SAMPLES]
            core.submit(
                [
                    DenoisingRequest(
                        number, "r", (), text, "", shape, levels, "sde" if steps else "ode", 0.7, steps, number, number
                    )
                ]
            )
        while core.can_work:
            core.cycle()
        results = [one.result for one in sorted(core.outbox, key=lambda one: one.number)]
        self.samples = [self._sample(result, levels) for result in results if result is not None]
        self.forward = forward
        self.shape = shape

    def _sample(self, result: DenoisingResult, levels: tuple[float, ...]) -> TrainSample:
        embeds = pack_conditions(result.condition, result.negative)
        media = (
            self._stored("trajectory", result.states.numpy().tobytes(), tuple(result.states.shape), "float32"),
            self._stored("embeds", embeds, (len(embeds),), "uint8"),
        )
        logprobs = result.logprobs or (0.0, 0.0, 0.0)
        return TrainSample(
            np.zeros(0, np.int32),
            np.array(logprobs, np.float32),
            1.0,
            media=media,
            steps=np.arange(3, dtype=np.int32),
            sigmas=np.array(levels, np.float32),
        )

    def _stored(self, kind: Any, data: bytes, shape: tuple[int, ...], dtype: str) -> Medium:
        name = hashlib.sha256(data).hexdigest()
        (self.blobs / name).write_bytes(data)
        return Medium(kind, name, len(data), shape, dtype)

    def work(self, rank: int = 0, ranks: int = 1) -> StepInput:
        held, sealed = {}, []
        for number in range(len(PROMPTS)):
            ref, digest = PromptRef(0, number, 0), f"{number:032x}"
            own = dict(enumerate(self.samples[number * SAMPLES : (number + 1) * SAMPLES]))
            held[digest] = TrainGroup(ref, digest, np.zeros(3, np.int32), own)
            sealed.append(group_of(ref, digest, (3,) * SAMPLES))
        seal = ready_seal(sealed, ranks=ranks)
        return StepInput(seal, balance_samples(seal), rank, held)

    def feeding(self, network: Any = None) -> DenoisingFeeding:
        module = network or self.pipeline.network.module
        kind = NETWORKS["StableDiffusion3Pipeline"](module, 1.0)
        settings = StepSettings("sde", 0.7)
        return DenoisingFeeding(
            kind, self.pipeline.schedule, settings, self.blobs, CPU, self.shape, forward=self.forward
        )


def group_of(ref: PromptRef, digest: str, steps: tuple[int, ...], tokens: int = TOKENS) -> SealedGroup:
    return SealedGroup(
        ref=ref,
        digest=digest,
        prompt_tokens=3,
        response_tokens=steps,
        versions=(Version(0, 0),),
        holder="h",
        step_tokens=tokens,
    )


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("replayed"), forward=False)


@pytest.fixture(scope="module")
def noised(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("noised"), forward=True)


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 400),
)
def test_each_step_of_each_picture_is_in_one_micro_batch_of_one_rank(
    groups: list[list[int]], ranks: int, budget: int
) -> None:
    sealed = [group_of(PromptRef(0, n, 0), f"{n:032x}", tuple(steps)) for n, steps in enumerate(groups)]
    seal = ready_seal(sealed, ranks=ranks)
    layout = balance_samples(seal)
    planned = [plan_rows(seal, StepInput(seal, layout, rank, {}), budget) for rank in range(ranks)]
    assert len({len(rows) for one in planned for _, rows in one}) == 1, "all ranks run as many"
    found = [
        (slot.group, slot.sample, place)
        for one in planned
        for _, rows in one
        for row in rows
        for slot in row.slots
        for place in row.places
    ]
    assert sorted(found) == [
        (g, s, place) for g, steps in enumerate(groups) for s, count in enumerate(steps) for place in range(count)
    ]
    for one in planned:
        for plan, rows in one:
            assert (plan.tokens, plan.sequences) == (sum(map(sum, groups)), sum(map(len, groups)))
            assert all(len(row.slots) * len(row.places) * TOKENS <= max(budget, TOKENS) for row in rows)


def scored(made: Made, step: StepTensors, module: Any) -> dict[BatchIndex, StepScores]:
    feeding = made.feeding(module)
    outputs_of = feeding.outputs_of(module)
    return {place: feeding.score(outputs_of, step.at(place)) for place in step.places()}  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [TOKENS, 2 * TOKENS, 3 * TOKENS, 100 * TOKENS])
def test_log_probabilities_do_not_depend_on_the_cut(replayed: Made, budget: int) -> None:
    spec = spec_of(micro_batch_tokens=budget)
    step = replayed.feeding().cut(replayed.work(), spec.train)
    with torch.no_grad():
        scores = scored(replayed, step, replayed.pipeline.network.module)
    for place, found in scores.items():
        batch = step.at(place)
        assert found.logp.shape == batch.mask.shape
        assert torch.allclose(found.logp, batch.rollout_logp, atol=1e-5), "as the engine computed them"
    assert sum(step.at(place).mask.numel() for place in step.places()) == 3 * SAMPLES * len(PROMPTS)


@pytest.mark.parametrize("loss", ["ppo", "grpo_guard", "nft", "weighted_matching"])
def test_a_rank_without_pictures_runs_a_dummy_that_changes_nothing(replayed: Made, noised: Made, loss: str) -> None:
    made = noised if loss in ("nft", "weighted_matching") else replayed
    module = copy.deepcopy(made.pipeline.network.module).requires_grad_(True)
    feeding = made.feeding(module)
    spec = spec_of(loss, kl_coef=0.5)
    batch = feeding.cut(made.work(rank=6, ranks=7), spec.train).at(BatchIndex(0, 0))
    assert isinstance(batch, DenoisingBatch)
    assert batch.slots == ()
    scores = feeding.score(feeding.outputs_of(module), batch)
    kept = scores.kept()
    targets = Targets(batch, torch.zeros(1, 1), kept.logp, kept.logp, batch.mask, OtherScores(kept, kept, kept))
    objective = denoising_objective(spec, made.pipeline.schedule)
    found = objective.loss(scores, targets)
    found.backward()
    assert found.item() == 0.0
    assert not any(float(value) for value in objective.metrics(scores, targets).values())
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in module.parameters())
    assert any(p.grad is not None for p in module.parameters()), "a collective of gradients finds every parameter"


def gradients(made: Made, spec: JobSpec, budget: int, others: Mapping[str, Any]) -> tuple[list[Tensor], float]:
    """Gradients of the objective over all micro-batches of the step, with advantages 1, -1, 0.5 in each group, and the number
    of rows whose ratio was clipped."""
    module = copy.deepcopy(made.pipeline.network.module).requires_grad_(True)
    feeding = made.feeding(module)
    step = feeding.cut(made.work(), spec.train.model_copy(update={"micro_batch_tokens": budget}))
    objective, clipped = denoising_objective(spec, made.pipeline.schedule), 0.0
    for place in step.places():
        batch = step.at(place)
        gain = torch.tensor([[(1.0, -1.0, 0.5)[slot.sample]] for slot in batch.slots])
        scores = feeding.score(feeding.outputs_of(module), batch)  # type: ignore[arg-type]
        made_by: dict[str, StepScores] = {}
        for name, other in others.items():
            with torch.no_grad():
                made_by[name] = made.feeding(other).score(feeding.outputs_of(other), batch)  # type: ignore[arg-type]
        old = made_by.get("old")
        targets = Targets(
            batch,
            gain,
            batch.rollout_logp if old is None else old.logp,
            made_by["reference"].logp if "reference" in made_by else None,
            batch.mask,
            OtherScores(old, made_by.get("reference"), made_by.get("served")),
        )
        loss = objective.loss(scores, targets) / objective.denominator(Count(step.plans[0].tokens, 6))
        loss.backward()
        metrics = objective.metrics(scores, targets)
        assert metrics["trained_tokens"] == batch.mask.sum()
        clipped += float(metrics.get("clipped", 0.0))
    return [p.grad.clone() for p in module.parameters() if p.grad is not None], clipped


def moved(made: Made, seed: int) -> Any:
    """The network with slightly other weights."""
    module = copy.deepcopy(made.pipeline.network.module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1e-3 * torch.randn(p.shape, generator=generator))
    return module


def every_row(made: Made, module: Any) -> tuple[Any, StepScores, Tensor]:
    feeding = made.feeding(module)
    step = feeding.cut(made.work(), spec_of(micro_batch_tokens=10_000).train)
    batch = step.at(BatchIndex(0, 0))
    assert isinstance(batch, DenoisingBatch)
    gain = torch.tensor([[(1.0, -1.0, 0.5)[slot.sample]] for slot in batch.slots]).expand(batch.mask.shape).flatten()
    return batch.inputs, feeding.score(feeding.outputs_of(module), batch), gain


@pytest.mark.parametrize("budget", [TOKENS, 5 * TOKENS, 10_000])
@pytest.mark.parametrize("loss", ["ppo", "grpo_guard"])
def test_gradients_of_the_clipped_losses_are_those_of_a_plain_loop(replayed: Made, loss: str, budget: int) -> None:
    spec = spec_of(loss, kl_coef=0.5, clip_low=LOW, clip_high=HIGH)
    others = {"old": moved(replayed, 1), "reference": moved(replayed, 2)}
    found, count = gradients(replayed, spec, budget, others)
    module = copy.deepcopy(replayed.pipeline.network.module).requires_grad_(True)
    rows, scores, gain = every_row(replayed, module)
    with torch.no_grad():
        old, reference = every_row(replayed, others["old"])[1], every_row(replayed, others["reference"])[1]
    change, weight = scores.logp.flatten() - old.logp.flatten(), torch.ones(())
    if loss == "grpo_guard":
        gap = ((scores.values - old.values) ** 2).flatten(1).mean(1)
        change, weight = (change + gap / (2 * scores.std**2)) * scores.std, -1 / rows.delta
    ratio = change.exp()
    clipped = ratio.clamp(1 - LOW, 1 + HIGH)
    own = weight * torch.maximum(-gain * ratio, -gain * clipped)
    above, below = (gain > 0) & (ratio > 1 + HIGH), (gain < 0) & (ratio < 1 - LOW)
    assert count == int(above.sum() + below.sum())
    assert above.any()
    assert below.any()
    (own + 0.5 * scores.kl(reference.values, exact=False)).mean().backward()
    expected = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("budget", [TOKENS, 10_000])
def test_gradients_of_diffusion_nft_are_those_of_a_plain_loop(noised: Made, budget: int) -> None:
    spec = spec_of("nft", kl_coef=0.01, diffusion={"adv_clip": 2.0, "nft_beta": 0.5})
    others = {"served": moved(noised, 1), "reference": moved(noised, 2)}
    found, _ = gradients(noised, spec, budget, others)
    module = copy.deepcopy(noised.pipeline.network.module).requires_grad_(True)
    rows, scores, gain = every_row(noised, module)
    with torch.no_grad():
        served, reference = every_row(noised, others["served"])[1], every_row(noised, others["reference"])[1]
    weights = nft_weights(gain, most=2.0)
    own = nft_loss(scores.values, served.values, rows.states, rows.following, rows.level, weights, beta=0.5, most=2.0)
    (own + 0.01 * prediction_gap(scores.values, reference.values)).mean().backward()
    expected = [p.grad for p in module.parameters() if p.grad is not None]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5 * max(1.0, float(other.abs().max())))


def test_weighted_matching_weighs_the_error_of_each_picture_by_its_advantage(noised: Made) -> None:
    found, _ = gradients(noised, spec_of("weighted_matching", diffusion={"temperature": 0.5}), 10_000, {})
    module = copy.deepcopy(noised.pipeline.network.module).requires_grad_(True)
    rows, scores, gain = every_row(noised, module)
    ((gain / 0.5).exp() * prediction_gap(scores.values, rows.noise - rows.following)).mean().backward()
    expected = [p.grad for p in module.parameters() if p.grad is not None]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5 * max(1.0, float(other.abs().max())))


def test_the_noise_of_a_row_is_the_same_in_every_pass_and_another_for_every_row(noised: Made) -> None:
    module = noised.pipeline.network.module
    first, again = every_row(noised, module)[0], every_row(noised, module)[0]
    assert torch.equal(first.noise, again.noise)
    assert torch.equal(first.states, again.states)
    flat = first.noise.flatten(1)
    distances = torch.cdist(flat, flat) + 100 * torch.eye(len(flat))
    assert float(distances.min()) > 1.0
    level = first.level.view(-1, 1, 1, 1)
    assert torch.allclose(first.states, (1 - level) * first.following + level * first.noise)


def test_a_pictures_cost_counts_its_trained_steps() -> None:
    def shares(steps: tuple[tuple[int, ...], ...]) -> list[int]:
        sealed = [group_of(PromptRef(0, n, 0), f"{n:032x}", one) for n, one in enumerate(steps)]
        seal: Seal = ready_seal(sealed, ranks=2)
        layout = balance_samples(seal)
        return [sum(seal.groups[s.group].response_tokens[s.sample] for s in layout.of_rank(rank)) for rank in range(2)]

    assert shares(((8, 2), (2, 4))) == [8, 8]
