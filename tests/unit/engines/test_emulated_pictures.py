"""Emulated pictures: sizes of their arrays, durations of their steps, and which weights computed which trained steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gcore.engines.emulated.device import EmulatedDevice
from gcore.engines.emulated.law import ReplicaTiming, TimingModel
from gcore.engines.emulated.pictures import EmulatedPipeline, png_of, trained_spans
from gcore.engines.emulated.rank import _sample_tokens
from gcore.engines.request import GenerationRequest, OutputSpan, RequestSampling
from gcore.engines.serving.denoising import DenoisingBody, DenoisingRequest, admit_pictures
from gcore.errors import EngineError
from gcore.ledger.records.chain import SealedGroup
from gcore.media.pictures import inspect_picture
from gcore.testing.pipelines import write_pipeline
from gcore.types import PromptRef, Version

LAW = TimingModel(
    event_noise=0.0,
    replica_noise=0.0,
    denoise_s=1.0,
    denoise_per_token_s=0.01,
    denoise_per_pair_s=0.0001,
    picture_s=3.0,
    prefill_tokens_per_s=1e12,
)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> EmulatedPipeline:
    """16 x 16 pixels in 16 image tokens."""
    return EmulatedPipeline.read(write_pipeline(tmp_path_factory.mktemp("pipeline") / "sd3"), 1.0, None, None)


def request(number: int = 0, steps: tuple[int, ...] = (0, 1, 2), count: int = 4, seed: int = 5) -> DenoisingRequest:
    levels = tuple(1 - index / count for index in range(count + 1))
    return DenoisingRequest(number, "r", (1,), "a", "", (3, 16, 16), levels, "sde", 0.7, steps, seed, seed)


def test_arrays_are_functions_of_the_request_and_have_the_sizes_that_training_expects(
    pipeline: EmulatedPipeline, tmp_path: Path
) -> None:
    made = pipeline.arrays(request())
    assert made == pipeline.arrays(request())
    assert (len(made.states), made.shape) == (4 * 4 * 3 * 16 * 16, (4, 3, 16, 16))
    assert pipeline.arrays(replace(request(), kept=(2,))).shape == (2, 3, 16, 16)
    assert pipeline.arrays(request(steps=())).shape == (1, 3, 16, 16)
    assert pipeline.arrays(replace(request(), returns_states=False)).states == b""
    assert pipeline.arrays(request(seed=6)).states != made.states
    (file := tmp_path / "picture").write_bytes(made.picture)
    facts = inspect_picture(str(file))
    assert (facts.height, facts.width) == (16, 16)
    assert len(made.picture) > 3 * 16 * 16
    assert len(made.condition) == pipeline.condition_bytes > 0


def test_a_png_file_has_the_pixels_row_by_row(tmp_path: Path) -> None:
    from PIL import Image

    pixels = bytes(range(2 * 3 * 3))
    (file := tmp_path / "p.png").write_bytes(png_of(pixels, 2, 3))
    with Image.open(file) as picture:
        assert (picture.size, picture.tobytes()) == ((3, 2), pixels)


def test_a_step_takes_passes_and_the_tokens_of_each_picture(pipeline: EmulatedPipeline) -> None:
    each = 16 * 0.01 + 16 * 16 * 0.0001
    timing = ReplicaTiming(LAW, "r", pipeline.timing(LAW))
    assert timing.decode_step(1) == pytest.approx(1.0 + each)
    assert timing.decode_step(4) == pytest.approx(1.0 + 4 * each)
    assert timing.begin(0, 2) == pytest.approx(6.0), "decoding of two pictures"
    guided = ReplicaTiming(LAW, "r", replace(pipeline, guidance=3.0).timing(LAW))
    assert guided.decode_step(4) == pytest.approx(2 * (1.0 + 4 * each)), "a second pass for the negative prompt"
    assert ReplicaTiming(LAW, "r").begin(0, 2) == 0.0, "texts need nothing beside their tokens"


def test_a_preempted_picture_begins_again(pipeline: EmulatedPipeline) -> None:
    drawn = request(number=7)
    device = EmulatedDevice(
        ReplicaTiming(LAW, "r", pipeline.timing(LAW)), lambda *_: pipeline.response(drawn), rows=2, version="0.1"
    )
    device.submit([GenerationRequest(7, "r", (1,), RequestSampling(4, 5))], 0.0)
    device.advance(3.0 + 2.5 * device.step_s)
    device.pause("retract", 3.0 + 2.5 * device.step_s)
    device.call_weights("0.2", 10.0)
    device.resume(10.0)
    (ended,) = device.advance(13.0 + 4 * device.step_s + 1e-6)
    assert len(ended.tokens) == 4
    assert [(span.version, span.start, span.end) for span in ended.spans] == [("0.2", 0, 4)]
    assert ended.retractions == 1


def test_spans_count_trained_steps() -> None:
    spans = (OutputSpan("0.1", 0, 2), OutputSpan("0.2", 2, 4))
    assert trained_spans(request(), spans, "0.2") == (OutputSpan("0.1", 0, 2), OutputSpan("0.2", 2, 3))
    assert trained_spans(replace(request(), kept=(2,)), spans, "0.2") == (OutputSpan("0.2", 0, 1),)
    assert trained_spans(request(steps=()), spans, "0.2") == (OutputSpan("0.2", 0, 0),)


def admitted(pipeline: EmulatedPipeline, **fields: Any) -> DenoisingRequest:
    body = DenoisingBody(prompt="a", seed=1, **{"num_inference_steps": 4, **fields})
    (found,) = admit_pictures(body, pipeline, pipeline.side, number=lambda: 0, names=lambda *_: ["r"])
    return found


def test_only_steps_that_can_be_trained_are_random(pipeline: EmulatedPipeline) -> None:
    assert admitted(pipeline).levels == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert admitted(pipeline).steps == (0, 1, 2)
    assert admitted(pipeline, rollout_sde_type="ode").steps == ()
    assert admitted(pipeline, rollout_sde_step_indices=[0, 2]).steps == (0, 2)
    for fields, said in (
        ({"rollout_sde_step_indices": [3]}, "step 3 is not one of the steps that can be random, 0 to 2"),
        ({"rollout_sde_step_indices": [1, 0]}, "must ascend within the steps that can be random, 0 to 2"),
        ({"rollout_sde_step_indices": [1, 1]}, "must ascend"),
        ({"rollout_sde_step_indices": [1], "rollout_sde_type": "ode"}, "an ode has no random steps"),
        ({"rollout_sde_type": "cps", "rollout_noise_level": 1.5}, "replaces at most all of its noise"),
        ({"num_inference_steps": 1, "rollout_sde_step_indices": [0]}, "step 0 is not one of"),
    ):
        with pytest.raises(EngineError, match=said):
            admitted(pipeline, **fields)


def test_a_ddim_scheduler_has_steps_of_its_own_kind_only_and_the_last_one_can_be_trained(tmp_path: Path) -> None:
    pipeline = EmulatedPipeline.read(write_pipeline(tmp_path / "sd", "sd"), 1.0, None, None)
    assert admitted(pipeline).steps == (0, 1, 2, 3)
    with pytest.raises(EngineError, match="a DDIM schedule has no steps of the kind cps"):
        admitted(pipeline, rollout_sde_type="cps")
    with pytest.raises(EngineError, match="replaces at most all of its noise"):
        admitted(pipeline, rollout_noise_level=1.5)


def test_a_rank_takes_the_time_of_the_image_tokens_of_trained_steps() -> None:
    group = SealedGroup(
        ref=PromptRef(0, 0, 0),
        digest="d",
        holder="h",
        prompt_tokens=7,
        response_tokens=(3, 5),
        versions=(Version(0, 0),),
        reward=0.0,
        source="s",
    )
    assert _sample_tokens(group, 1) == 12
    assert _sample_tokens(group.model_copy(update={"step_tokens": 100}), 1) == 500


def test_an_emulated_pipeline_is_checked_as_a_real_one(pipeline: EmulatedPipeline) -> None:
    assert pipeline.side == (16, 16)
    assert pipeline.files.size(None, 8) == (16, 8)
