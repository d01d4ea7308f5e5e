"""Rows of trained denoising steps: read from an engine's blobs, they have the engine's log-probabilities and gradients of a
plain loop."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gcore.engines.diffusers.core import DiffusionCore
from gcore.engines.serving.denoising import DenoisingRequest, DenoisingResult
from gcore.errors import DataError
from gcore.models.diffusion.networks import pack_conditions
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.testing.pipelines import write_pipeline
from gcore.train.denoising.rows import DenoisingRows, StepSettings, read_rows, score_rows
from gcore.train.rank.feed import TrainSample
from gcore.types import Medium

STEPS = ((0, 2), (0, 1, 2), (1,))
SETTINGS = StepSettings("sde", 0.7)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> ImagePipeline:
    folder = write_pipeline(tmp_path_factory.mktemp("pipeline") / "sd3", "sd3")
    return ImagePipeline.load(folder, guidance=2.0, dtype=torch.float32, device="cpu")


def stored(folder: Path, kind: str, data: bytes, shape: tuple[int, ...], dtype: str) -> Medium:
    name = hashlib.sha256(data).hexdigest()
    (folder / name).write_bytes(data)
    return Medium(kind, name, len(data), shape, dtype)  # type: ignore[arg-type]


@pytest.fixture
def samples(pipeline: ImagePipeline, tmp_path: Path) -> list[TrainSample]:
    shape = pipeline.files.state_shape(16, 16)
    levels = [pipeline.levels(count, shape) for count in (4, 4, 6)]
    core = DiffusionCore(pipeline, slots=8, version="0.0")
    core.submit(
        [
            DenoisingRequest(
                number, str(number), (), "a red square", "", shape, levels[number], "sde", 0.7, steps, number, number
            )
            for number, steps in enumerate(STEPS)
        ]
    )
    while core.can_work:
        core.cycle()
    found = []
    for output in sorted(core.outbox, key=lambda one: one.number):
        result = output.result
        assert isinstance(result, DenoisingResult)
        embeds = pack_conditions(result.condition, result.negative)
        media = (
            stored(tmp_path, "trajectory", result.states.numpy().tobytes(), tuple(result.states.shape), "float32"),
            stored(tmp_path, "embeds", embeds, (len(embeds),), "uint8"),
        )
        found.append(
            TrainSample(
                np.zeros(0, np.int32),
                np.array(result.logprobs, np.float32),
                1.0,
                media=media,
                steps=np.array(STEPS[output.number], np.int32),
                sigmas=np.array(levels[output.number], np.float32),
            )
        )
    return found


def every_row(samples: list[TrainSample], folder: Path) -> DenoisingRows:
    return read_rows([(one, range(len(one.logprobs))) for one in samples], folder, torch.device("cpu"))


def predicted(pipeline: ImagePipeline, rows: DenoisingRows) -> torch.Tensor:
    return pipeline.network.predict(rows.states, rows.level, rows.conditions, rows.negatives)


def test_rows_of_several_schedules_have_the_engines_log_probabilities(
    pipeline: ImagePipeline, samples: list[TrainSample], tmp_path: Path
) -> None:
    rows = every_row(samples, tmp_path)
    scores = score_rows(predicted(pipeline, rows), rows, pipeline.schedule, SETTINGS)
    engines = np.concatenate([one.logprobs for one in samples])
    assert scores.logp.detach().numpy() == pytest.approx(engines, abs=1e-5)
    assert scores.values.shape == rows.states.shape
    assert scores.kl(scores.values, exact=True).detach().numpy() == pytest.approx(np.zeros(6))


def test_a_part_of_the_rows_has_the_numbers_of_all_rows(
    pipeline: ImagePipeline, samples: list[TrainSample], tmp_path: Path
) -> None:
    whole = every_row(samples, tmp_path)
    part = read_rows([(samples[1], [2]), (samples[0], [1])], tmp_path, torch.device("cpu"))
    for place, row in enumerate((4, 1)):
        assert torch.equal(part.states[place], whole.states[row])
        assert torch.equal(part.following[place], whole.following[row])
        assert (part.steps[place], part.levels[place]) == (whole.steps[row], whole.levels[row])
    scores = score_rows(predicted(pipeline, part), part, pipeline.schedule, SETTINGS)
    engines = [samples[1].logprobs[2], samples[0].logprobs[1]]
    assert scores.logp.detach().numpy() == pytest.approx(engines, abs=1e-5)


def test_gradients_of_rows_together_are_the_sum_of_each_alone(
    pipeline: ImagePipeline, samples: list[TrainSample], tmp_path: Path
) -> None:
    module = pipeline.network.module.requires_grad_(True)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 2.0])
    rows = every_row(samples, tmp_path)
    try:
        scores = score_rows(predicted(pipeline, rows), rows, pipeline.schedule, SETTINGS)
        together = torch.autograd.grad((weights * scores.logp).sum(), list(module.parameters()), allow_unused=True)
        alone = [torch.zeros_like(one) for one in module.parameters()]
        place = 0
        for sample in samples:
            for number in range(len(sample.logprobs)):
                row = read_rows([(sample, [number])], tmp_path, torch.device("cpu"))
                one = score_rows(predicted(pipeline, row), row, pipeline.schedule, SETTINGS).logp.sum()
                found = torch.autograd.grad(weights[place] * one, list(module.parameters()), allow_unused=True)
                alone = [a if b is None else a + b for a, b in zip(alone, found, strict=True)]
                place += 1
    finally:
        module.requires_grad_(False)
    largest = max(float(one.abs().max()) for one in alone)
    assert largest > 0
    for first, second in zip(together, alone, strict=True):
        assert first is None or torch.allclose(first, second, atol=1e-5 * largest)


def test_kl_divergences_are_those_of_single_steps(
    pipeline: ImagePipeline, samples: list[TrainSample], tmp_path: Path
) -> None:
    rows = every_row(samples, tmp_path)
    scores = score_rows(predicted(pipeline, rows), rows, pipeline.schedule, SETTINGS)
    reference = torch.randn(scores.values.shape, generator=torch.Generator().manual_seed(0))
    for row in range(len(rows.steps)):
        alone = slice(row, row + 1)
        prediction = predicted(pipeline, rows)[alone]
        step = pipeline.schedule.step("sde", rows.states[alone], prediction, rows.levels[row], rows.steps[row], 0.7)
        squares = ((step.mean - reference[alone]) ** 2).mean().item()
        for exact, spread in ((True, step.std), (False, step.diffusion)):
            found = scores.kl(reference, exact=exact)[row].item()
            assert found == pytest.approx(squares / (2 * spread**2), rel=1e-5)


def test_states_in_lower_precision_or_of_other_steps_are_refused(samples: list[TrainSample], tmp_path: Path) -> None:
    states, embeds = samples[0].media
    for wrong, message in (
        (states._replace(dtype="float16"), "are float16"),
        (states._replace(shape=(3, 3, 16, 16)), "4 float32 states of the trained steps"),
        (states._replace(shape=(4, 3, 16, 8)), "have 12288 bytes, not those"),
    ):
        with pytest.raises(DataError, match=message):
            read_rows([(replace(samples[0], media=(wrong, embeds)), [0])], tmp_path, torch.device("cpu"))
    with pytest.raises(DataError, match="0 blobs of the kind embeds"):
        read_rows([(replace(samples[0], media=(states,)), [0])], tmp_path, torch.device("cpu"))
    broken = stored(tmp_path, "embeds", b"x" * 20, (20,), "uint8")
    with pytest.raises(DataError, match="embeddings of a prompt cannot be read"):
        read_rows([(replace(samples[0], media=(states, broken)), [0])], tmp_path, torch.device("cpu"))
