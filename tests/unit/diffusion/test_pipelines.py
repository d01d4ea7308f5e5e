"""The diffusers engine's core over tiny pipelines of each family, beside diffusers' own pipelines."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gcore.engines.diffusers import core
from gcore.engines.diffusers.core import DiffusionCore, measure_slots
from gcore.engines.serving.denoising import DenoisingOutput, DenoisingRequest
from gcore.errors import DataError
from gcore.models.diffusion.files import PipelineFiles
from gcore.models.diffusion.networks import load_network_module, pack_conditions, unpack_conditions
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.models.diffusion.schedule import NoiseSchedule
from gcore.models.diffusion.windows import kept_states
from gcore.testing.pipelines import FAMILIES, Family, write_pipeline

GUIDANCE, SIDE, STEPS = 3.0, 16, 4
PROMPTS = ("a red square", "a blue circle", "a green square")

Load = Callable[..., ImagePipeline]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    path = tmp_path_factory.mktemp("pipelines")

    def folder(family: Family) -> Path:
        found = path / family
        return found if found.exists() else write_pipeline(found, family)

    return folder


@pytest.fixture(scope="module")
def load(folders: Callable[[Family], Path]) -> Load:
    made: dict[Any, ImagePipeline] = {}

    def pipeline(family: Family, guidance: float = GUIDANCE) -> ImagePipeline:
        if (family, guidance) not in made:
            made[family, guidance] = ImagePipeline.load(
                folders(family), guidance=guidance, dtype=torch.float32, device="cpu"
            )
        return made[family, guidance]

    return pipeline


def requests(pipeline: ImagePipeline, count: int = 3, **changed: Any) -> list[DenoisingRequest]:
    shape = pipeline.files.state_shape(SIDE, SIDE)
    return [
        DenoisingRequest(
            number=number,
            rid=f"r{number}",
            prompt=(),
            text=PROMPTS[number % len(PROMPTS)],
            negative="",
            shape=shape,
            levels=pipeline.levels(STEPS, shape),
            **{"kind": "sde", "noise_level": 0.7, "steps": (0, 1), "noise_seed": number, "seed": 9 + number} | changed,
        )
        for number in range(count)
    ]


def denoised(core: DiffusionCore, tasks: list[DenoisingRequest]) -> dict[int, DenoisingOutput]:
    core.submit(tasks)
    while core.can_work:
        core.cycle()
    outbox, core.outbox = core.outbox, []
    return {output.number: output for output in outbox}


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_without_noise_are_those_of_the_familys_own_pipeline(load: Load, family: Family) -> None:
    import diffusers

    pipeline = load(family)
    task = requests(pipeline, 1, kind="ode", steps=())[0]
    output = denoised(DiffusionCore(pipeline, slots=4, version="0.0"), [task])[0]
    assert output.result is not None
    state = torch.randn(1, *task.shape, generator=torch.Generator().manual_seed(task.noise_seed))
    own: Any = pipeline._pipeline
    scheduler = own.scheduler
    given: dict[str, Any] = {"guidance_scale": GUIDANCE, "height": SIDE, "width": SIDE, "latents": state}
    if family in ("flux", "qwen_image"):
        given["latents"] = own._pack_latents(state, 1, task.shape[0], *task.shape[1:])
    if family == "qwen_image":
        given = given | {"guidance_scale": None, "true_cfg_scale": GUIDANCE, "negative_prompt": ""}
    if family == "sd3":
        given["max_sequence_length"] = 1
        own.vae_scale_factor = own.image_processor.config.vae_scale_factor = 1
        expected = own(task.text, num_inference_steps=STEPS, output_type="latent", **given).images
        assert torch.allclose(output.result.states, expected, atol=1e-5)
        return
    expected = own(task.text, num_inference_steps=STEPS, output_type="np", **given).images[0]
    assert isinstance(scheduler, (diffusers.FlowMatchEulerDiscreteScheduler, diffusers.DDIMScheduler))
    assert abs(output.result.picture.numpy() / 255 - expected).max() <= 1.01 / 255


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_of_stored_states_gives_the_engines_log_probabilities(load: Load, family: Family) -> None:
    pipeline = load(family)
    tasks = requests(pipeline)
    results = [output.result for output in denoised(DiffusionCore(pipeline, slots=4, version="0.0"), tasks).values()]
    for place, step in enumerate(tasks[0].steps):
        pairs = [result.states[place : place + 2] for result in results if result is not None]
        states, following = torch.stack([one[0] for one in pairs]), torch.stack([one[1] for one in pairs])
        conditions = [result.condition for result in results if result is not None]
        levels = torch.full((len(pairs),), tasks[0].levels[step])
        negatives = [pipeline.condition("")] * len(pairs)
        for rows, tolerance in ((slice(None), 1e-6), (slice(0, 1), 1e-5)):
            predicted = pipeline.network.predict(states[rows], levels[rows], conditions[rows], negatives[rows])
            moved = pipeline.schedule.step("sde", states[rows], predicted, tasks[0].levels, step, 0.7)
            found = moved.log_prob(following[rows])
            engines = torch.tensor([result.logprobs[place] for result in results if result is not None])
            assert torch.allclose(found, engines[rows], atol=tolerance, rtol=0)


def test_dropout_of_a_network_does_not_change_a_replay(folders: Callable[[Family], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("sd"), tmp_path / "sd")
    config = folder / "unet/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dropout": 0.5}))
    pipeline = ImagePipeline.load(folder, guidance=1.0, dtype=torch.float32, device="cpu")
    condition, state = pipeline.condition(PROMPTS[0]), torch.ones(1, *pipeline.files.state_shape(SIDE, SIDE))
    trained = type(pipeline.network)(load_network_module(folder, folder / "unet"), guidance=1.0)
    drops = [part for part in trained.module.modules() if isinstance(part, torch.nn.Dropout)]
    assert any(part.p == 0.5 for part in drops), "this network has dropout"
    found = [
        network.predict(state, torch.tensor([500.0]), [condition])
        for network in (pipeline.network, pipeline.network, trained, trained)
    ]
    assert all(torch.equal(one, found[0]) for one in found)


def test_prompts_of_other_lengths_are_replayed_with_the_embeddings_of_their_engine_without_padding(load: Load) -> None:
    pipeline = load("qwen_image")
    texts = ("red", "a large red square beside a small blue circle", "a red square")
    tasks = [replace(one, text=text) for one, text in zip(requests(pipeline), texts, strict=True)]
    results = denoised(DiffusionCore(pipeline, slots=4, version="0.0"), tasks)
    widths = set()
    for task in tasks:
        result = results[task.number].result
        assert result is not None
        condition, negative = unpack_conditions(pack_conditions(result.condition, result.negative))
        assert negative is not None
        assert "mask" not in condition, "nothing is padded"
        widths.add(condition["embeds"].shape[1])
        levels = torch.tensor([task.levels[0]])
        predicted = pipeline.network.predict(result.states[:1], levels, [condition], [negative])
        moved = pipeline.schedule.step("sde", result.states[:1], predicted, task.levels, 0, 0.7)
        assert moved.log_prob(result.states[1:2]).item() == pytest.approx(result.logprobs[0], abs=1e-5)
    assert len(widths) == 3


def test_a_sample_does_not_depend_on_the_samples_beside_it(load: Load) -> None:
    pipeline = load("sd3")
    tasks = requests(pipeline, 5)
    core = DiffusionCore(pipeline, slots=2, version="0.0")
    apart = denoised(core, tasks)
    together = denoised(DiffusionCore(pipeline, slots=5, version="0.0"), tasks)
    for number in range(5):
        one, other = apart[number].result, together[number].result
        assert one is not None
        assert other is not None
        assert torch.allclose(one.states, other.states, atol=1e-5)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_noise_of_steps_and_of_the_initial_state_have_seeds_of_their_own(load: Load) -> None:
    pipeline = load("sd3")
    first, second, third = (
        denoised(DiffusionCore(pipeline, slots=1, version="0.0"), [task])[0].result
        for task in (
            requests(pipeline, 1)[0],
            requests(pipeline, 1, seed=8)[0],
            requests(pipeline, 1, noise_seed=8)[0],
        )
    )
    assert first is not None
    assert second is not None
    assert third is not None
    assert torch.equal(first.states[0], second.states[0])
    assert not torch.equal(first.states[1], second.states[1])
    assert not torch.equal(first.states[0], third.states[0])


def test_the_first_step_does_not_repeat_the_noise_of_the_initial_state(load: Load) -> None:
    pipeline = load("sd3", 1.0)
    result = denoised(DiffusionCore(pipeline, slots=1, version="0.0"), requests(pipeline, 1, seed=5, noise_seed=5))[
        0
    ].result
    assert result is not None
    task = requests(pipeline, 1, seed=5, noise_seed=5)[0]
    levels = torch.tensor([task.levels[0]])
    velocity = pipeline.network.predict(result.states[:1], levels, [result.condition])
    step = pipeline.schedule.step(task.kind, result.states[:1], velocity, task.levels, 0, task.noise_level)
    noise = (result.states[1] - step.mean[0]) / step.std
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(result.states[0], torch.randn(task.shape, generator=generator))
    assert torch.allclose(noise, torch.randn(task.shape, generator=generator), atol=1e-4)


def test_a_share_of_the_random_steps_is_returned(load: Load) -> None:
    pipeline = load("sd3")
    core = DiffusionCore(pipeline, slots=4, version="0.0")
    (task,) = requests(pipeline, 1, steps=(0, 1, 2))
    whole, share = (denoised(core, [one])[0].result for one in (task, dataclasses.replace(task, kept=(0, 2))))
    assert whole is not None
    assert share is not None
    assert torch.equal(whole.picture, share.picture)
    assert share.logprobs == (whole.logprobs[0], whole.logprobs[2])
    assert torch.equal(share.states, whole.states)
    assert [(span.start, span.end) for span in share.spans] == [(0, 2)]


def test_only_the_states_around_random_steps_are_kept(load: Load) -> None:
    pipeline = load("sd3")
    core = DiffusionCore(pipeline, slots=4, version="0.0")
    assert kept_states((0, 1, 3)) == (0, 1, 2, 3, 4)
    for steps, states in (((1,), 2), ((0, 2), 4), ((0, 1, 2), 4), ((), 1)):
        result = denoised(core, requests(pipeline, 1, steps=steps))[0].result
        assert result is not None
        assert (len(result.logprobs), len(result.states)) == (len(steps), states)
    result = denoised(core, requests(pipeline, 1, returns_states=False))[0].result
    assert result is not None
    assert (len(result.logprobs), len(result.states)) == (2, 1)


def test_versions_are_those_of_each_trained_step(load: Load) -> None:
    pipeline = load("sd3")
    core = DiffusionCore(pipeline, slots=4, version="0.1")
    core.submit(requests(pipeline, 1, steps=(0, 1, 2)))
    core.cycle()
    core.cycle()
    core.rename("0.2")
    while core.can_work:
        core.cycle()
    result = core.outbox[0].result
    assert result is not None
    assert [(span.version, span.start, span.end) for span in result.spans] == [("0.1", 0, 2), ("0.2", 2, 3)]


def test_a_sample_that_was_preempted_has_the_same_noise_again(load: Load) -> None:
    pipeline = load("sd3")
    task = requests(pipeline, 1)[0]
    core = DiffusionCore(pipeline, slots=4, version="0.0")
    expected = denoised(core, [task])[0].result
    core.submit([task])
    core.cycle()
    core.cycle()
    core.pause("retract")
    assert (core.running, core.waiting) == (0, 1)
    core.resume()
    found = denoised(core, [])[0].result
    assert expected is not None
    assert found is not None
    assert torch.equal(found.states, expected.states)


def test_the_number_of_running_samples_is_bounded_by_the_free_memory(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load("sd")
    slots = DiffusionCore(pipeline, slots=64, version="0.0")
    shape = pipeline.files.state_shape(SIDE, SIDE)
    assert measure_slots(slots, shape, 1 << 50, 64) == 64
    computed: list[int] = []

    def peak(_: torch.device, action: Callable[[], None]) -> int:
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, "decode", lambda states: computed.append(len(states)))
            action()
        return 1000 + 100 * computed[-1]

    monkeypatch.setattr(core, "_peak_bytes", peak)
    assert [measure_slots(slots, shape, free, 64) for free in (1, 125, 1250, 1 << 50)] == [1, 1, 10, 64]
    assert computed[:2] == [1, 3]


def test_aborted_samples_have_no_picture(load: Load) -> None:
    pipeline = load("sd3")
    core = DiffusionCore(pipeline, slots=1, version="0.0")
    core.submit(requests(pipeline))
    core.cycle()
    core.abort(lambda task: task.number < 2)
    outputs = denoised(core, [])
    assert [outputs[number].ending.kind for number in range(3)] == ["abort", "abort", "stop"]
    assert outputs[0].result is None


def test_pictures_that_are_not_numbers_fail_with_the_reason(folders: Callable[[Family], Path]) -> None:
    pipeline = ImagePipeline.load(folders("sd3"), guidance=1.0, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        next(iter(pipeline.network.module.parameters())).fill_(float("nan"))
    output = denoised(DiffusionCore(pipeline, slots=1, version="0.0"), requests(pipeline, 1))[0]
    assert output.result is None
    assert "predictions are not finite; lower train.learning_rate" in str(output.ending.message)


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [(16, 18, "multiples of 4 pixels"), (0, 16, "multiples"), (64, 16, "16 pixels a side")],
)
def test_sizes_that_cannot_be_generated_are_refused(load: Load, height: int, width: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("sd3").files.state_shape(height, width)


def edited(folder: Path, name: str, **changes: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "model_index.json").unlink(),
            r"model_index\.json: cannot read a file of the pipeline",
        ),
        (lambda folder: edited(folder, "model_index.json", _class_name="WanPipeline"), "WanPipeline are not supported"),
        (lambda folder: shutil.rmtree(folder / "text_encoder_2"), "has no text_encoder_2"),
        (lambda folder: shutil.rmtree(folder / "transformer"), "has no transformer"),
        (lambda folder: shutil.rmtree(folder / "scheduler"), "has no scheduler"),
        (
            lambda folder: edited(folder, "scheduler/scheduler_config.json", _class_name="PNDMScheduler"),
            "PNDMScheduler is not supported",
        ),
        (
            lambda folder: edited(folder, "scheduler/scheduler_config.json", stochastic_sampling=True),
            "stochastic_sampling: its steps are random",
        ),
    ],
)
def test_a_pipeline_with_a_missing_or_unknown_part_is_refused(
    folders: Callable[[Family], Path], tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(folders("sd3"), folder)
    damage(folder)
    with pytest.raises(DataError, match=message):
        ImagePipeline.load(folder, guidance=1.0, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_a_pipeline_of_latents_without_a_vae_is_refused(
    folders: Callable[[Family], Path], tmp_path: Path, family: Family
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(folders(family), folder)
    edited(folder, "model_index.json", vae=[None, None])
    with pytest.raises(DataError, match="has no vae, and its network generates 4 channels"):
        PipelineFiles.read(folder)


@pytest.mark.parametrize(
    ("family", "file", "name"),
    [
        ("sd3", "transformer/diffusion_pytorch_model", "proj_out.weight"),
        ("sd3", "text_encoder_2/model", "text_projection.weight"),
        ("flux", "text_encoder_2/model", "encoder.final_layer_norm.weight"),
        ("sd", "vae/diffusion_pytorch_model", "decoder.conv_in.weight"),
    ],
)
def test_a_renamed_weight_of_any_part_is_refused_by_name(
    folders: Callable[[Family], Path], tmp_path: Path, family: Family, file: str, name: str
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "pipeline"
    shutil.copytree(folders(family), folder)
    weights = folder / f"{file}.safetensors"
    tensors = load_file(weights)
    tensors["other"] = tensors.pop(name)
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(DataError, match=f"weights lack {name}"):
        ImagePipeline.load(folder, guidance=1.0, dtype=torch.float32, device="cpu")


def test_counting_tokens_does_not_change_how_another_thread_encodes_prompts(tmp_path: Path) -> None:
    pipeline = ImagePipeline.load(write_pipeline(tmp_path / "p"), guidance=1.0, dtype=torch.float32, device="cpu")
    pipeline.condition("a red square")
    fast = pipeline._pipeline.tokenizer.backend_tokenizer
    padding, truncation = fast.padding, fast.truncation
    assert padding is not None
    assert len(pipeline.tokens("a red square")) == 5
    assert (fast.padding, fast.truncation) == (padding, truncation)


@pytest.mark.parametrize(("shift", "steps", "sigmas"), [
    (1.0, 10, [1.0, 0.889, 0.778, 0.667, 0.55599999, 0.44499999, 0.33399999, 0.223, 0.112, 0.001, 0.0]),
    (3.0, 10, [1.0, 0.96012932, 0.91334897, 0.8576923, 0.79036826, 0.70727849, 0.60215056, 0.46487603, 0.27804878,
               0.00892857, 0.0]),
])  # fmt: skip
def test_levels_are_those_of_the_scheduler(tmp_path: Path, shift: float, steps: int, sigmas: list[float]) -> None:
    schedule = NoiseSchedule.load(write_pipeline(tmp_path / "p", "sd3", shift=shift))
    levels = schedule.levels(steps, 16)
    assert levels == pytest.approx(sigmas, abs=1e-8)
    assert PipelineFiles.read(tmp_path / "p").trainable_steps(steps) == range(steps - 1)


def test_a_ddim_schedule_whose_last_timestep_has_no_step_after_it_is_refused(folders: Callable[[Family], Path]) -> None:
    schedule = NoiseSchedule.load(folders("sd"))
    assert schedule.levels(4, 16)[-2:] == (1.0, 0.0)
    without = replace(schedule, settings=schedule.settings | {"steps_offset": 0})
    with pytest.raises(
        ValueError, match="do not fall: 0 is followed by 0 at the end; a DDIM scheduler needs steps_offset: 1"
    ):
        without.levels(4, 16)


def test_the_fingerprint_of_a_scheduler_is_that_of_its_settings(folders: Callable[[Family], Path]) -> None:
    schedule = NoiseSchedule.load(folders("sd3"))
    assert (
        replace(schedule, settings=schedule.settings | {"_diffusers_version": "0"}).fingerprint == schedule.fingerprint
    )
    assert replace(schedule, settings=schedule.settings | {"shift": 2.0}).fingerprint != schedule.fingerprint


def test_an_average_of_the_weights_comes_with_them_and_only_generates_what_names_it(
    folders: Callable[[Family], Path], tmp_path: Path
) -> None:
    pipeline = ImagePipeline.load(folders("sd3"), guidance=1.0, dtype=torch.float32, device="cpu")
    core = DiffusionCore(pipeline, slots=4, version="0.0", average=True)
    (task,) = requests(pipeline, 1)
    averaged = dataclasses.replace(task, averaged=True)

    def picture(one: DenoisingRequest) -> torch.Tensor:
        result = denoised(core, [one])[0].result
        assert result is not None
        return result.picture

    before = picture(task)
    assert torch.equal(picture(averaged), before), "both begin with the weights of the pipeline"
    for folder, scale in ((tmp_path, 2.0), (tmp_path / "average", 0.5)):
        module = copy.deepcopy(pipeline.network.module)
        for parameter in module.parameters():
            parameter.data.mul_(scale)
        module.save_pretrained(folder)
    core.change_weights(core.stage_weights(tmp_path), "0.1", flush=False, abort=False)
    doubled, halved = picture(task), picture(averaged)
    assert not torch.equal(doubled, before)
    assert not torch.equal(halved, before)
    assert not torch.equal(halved, doubled)
    core.change_weights(core.stage_weights(pipeline.files.network), "0.2", flush=False, abort=False)
    assert torch.equal(picture(averaged), before), "weights without an average are their own"
