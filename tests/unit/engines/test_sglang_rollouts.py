"""SGLang's requests for rollouts, and the check of its answers, against those of a stand-in that computes them alike."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from fake_sglang_diffusion import FAULTS, FakeRollouts, encoded

from gcore.engines.launch import SglangDiffusionLaunch
from gcore.engines.serving.denoising import DenoisingRequest, DenoisingResult
from gcore.engines.sglang.command import (
    DIFFUSION_MODELS,
    DiffusionPorts,
    check_engine_args,
    check_pipeline,
    diffusion_command,
)
from gcore.engines.sglang_diffusion.engine import check_tensors
from gcore.engines.sglang_diffusion.rollouts import (
    RolloutRefused,
    check_request,
    read_rollout,
    rollout_body,
)
from gcore.errors import DataError, EngineError, UsageError
from gcore.models.diffusion.networks import load_network
from gcore.models.diffusion.pipeline import SampledPipeline
from gcore.models.tensors import TensorShape
from gcore.testing.pipelines import Family, write_pipeline

SERVED: tuple[Family, ...] = ("qwen_image", "sd3", "flux")
GUIDANCE = 2.0
PORTS = DiffusionPorts(1, 3, 4)
Folders = Callable[[Family], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("pipelines")

    def folder(family: Family) -> Path:
        found = root / family
        return found if found.exists() else write_pipeline(found, family)

    return folder


@pytest.fixture(scope="module")
def fakes(folders: Folders) -> Callable[[Family], FakeRollouts]:
    made: dict[Family, FakeRollouts] = {}

    def fake(family: Family) -> FakeRollouts:
        if family not in made:
            made[family] = FakeRollouts(folders(family))
        return made[family]

    return fake


def request_of(pipeline: SampledPipeline, text: str = "a red square", **changed: Any) -> DenoisingRequest:
    shape = pipeline.files.state_shape(16, 16)
    given = {"kind": "sde", "noise_level": 0.7, "steps": (0, 2), "noise_seed": 5, "seed": 5} | changed
    levels = given.pop("levels", pipeline.levels(4, shape))
    return DenoisingRequest(
        number=0, rid="r", prompt=(), text=text, negative="blue", shape=shape, levels=levels, **given
    )


def rollout(
    fake: FakeRollouts, request: DenoisingRequest, pipeline: SampledPipeline
) -> tuple[tuple[float, ...], DenoisingResult]:
    """The answer of the stand-in, sent as SGLang sends it and checked."""
    raw = msgpack.packb(encoded(fake.answer(rollout_body(request, pipeline, "cpu"))))
    return read_rollout(msgpack.unpackb(raw), request, pipeline, "0.3")


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize(("kind", "constants"), [("sde", True), ("cps", False)])
@pytest.mark.parametrize("guidance", [1.0, GUIDANCE])
def test_a_replay_of_the_states_of_an_answer_gives_its_log_probabilities(
    folders: Folders,
    fakes: Callable[[Family], FakeRollouts],
    family: Family,
    kind: str,
    constants: bool,
    guidance: float,
) -> None:
    pipeline = SampledPipeline.read(folders(family), guidance=guidance)
    request = request_of(pipeline, kind=kind, constants=constants)
    fake = fakes(family)
    fake.embedded = guidance
    levels, result = rollout(fake, request, pipeline)
    network = load_network(folders(family), guidance=guidance, dtype=torch.float32, device="cpu")
    assert network.needs_negative == (result.negative is not None)
    assert (len(levels), result.states.shape[0], tuple(result.picture.shape)) == (5, 4, (16, 16, 3))
    assert [(span.version, span.start, span.end) for span in result.spans] == [("0.3", 0, 2)]
    for place, step in enumerate(request.steps):
        before, after = result.states[2 * place : 2 * place + 1], result.states[2 * place + 1 : 2 * place + 2]
        negatives = [] if result.negative is None else [result.negative]
        velocity = network.predict(before, torch.tensor([levels[step]]), [result.condition], negatives)
        found = pipeline.schedule.step(request.kind, before, velocity, levels, step, 0.7)
        replayed = found.log_prob(after, constants=constants).item()
        assert replayed == pytest.approx(result.logprobs[place], abs=1e-5)


def test_only_trained_steps_and_their_states_are_returned(
    folders: Folders, fakes: Callable[[Family], FakeRollouts]
) -> None:
    pipeline = SampledPipeline.read(folders("qwen_image"), guidance=1.0)
    _, every = rollout(fakes("qwen_image"), request_of(pipeline), pipeline)
    _, one = rollout(fakes("qwen_image"), request_of(pipeline, kept=(2,)), pipeline)
    assert torch.equal(one.states, every.states[2:])
    assert one.logprobs == every.logprobs[1:]
    _, final = rollout(fakes("qwen_image"), request_of(pipeline, kind="ode", steps=()), pipeline)
    assert (final.logprobs, tuple(final.states.shape)) == ((), (1, 4, 8, 8))
    _, without = rollout(fakes("qwen_image"), request_of(pipeline, returns_states=False), pipeline)
    assert (without.logprobs, without.states.shape[0]) == (every.logprobs, 1)
    assert torch.equal(without.picture, every.picture)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("two", "not a list with one picture"),
        ("no-trajectory", "the answer has no dit_trajectory"),
        ("no-log-probs", "the answer has no rollout_log_probs"),
        ("no-embeds", "the answer has no encoder_hidden_states"),
        ("no-tensor", "sigmas cannot be read"),
        ("bf16", r"rounded to bfloat16 after their log-probabilities.*--dit-precision fp32"),
        ("half-values", "rounded to float16"),
        ("half", r"the states are float16 \[4, 16, 16\] instead of float32"),
        ("nan-states", "latents has numbers that are not finite"),
        ("nan-picture", "generated_output has numbers that are not finite"),
        ("nan-log-probs", "rollout_log_probs has numbers that are not finite"),
        ("fewer-states", r"the states are float32 \[3, 16, 16\]"),
        ("smaller-states", r"the states are float32 \[4, 16, 15\]"),
        ("other-states", "the states are of the timesteps"),
        ("fewer-steps", r"log-probabilities are float32 \[3\]"),
        ("all-random", r"the steps \[0, 1, 2\] were random instead of \[0, 2\]"),
        ("smaller-picture", r"the picture is float32 \[3, 1, 16, 15\]"),
        ("other-seed", "has the seed 6 instead of 5"),
        ("other-levels", "SGLang's scheduler has the noise levels"),
        ("rising-levels", "do not fall to 0"),
        ("unguided", "SGLang did not guide, but the guidance is 2"),
        ("masked", "a mask of embeddings"),
    ],
)
def test_an_answer_that_cannot_be_trained_is_refused_with_its_reason(
    folders: Folders, fakes: Callable[[Family], FakeRollouts], fault: str, message: str
) -> None:
    pipeline = SampledPipeline.read(folders("qwen_image"), guidance=GUIDANCE)
    with pytest.raises(RolloutRefused, match=message):
        rollout(fakes("qwen_image"), request_of(pipeline, f"a red square!{fault}"), pipeline)


def test_each_fault_of_the_stand_in_is_tested() -> None:
    (marks,) = [
        one.args[1]
        for one in test_an_answer_that_cannot_be_trained_is_refused_with_its_reason.pytestmark  # type: ignore[attr-defined]
    ]
    assert set(FAULTS) - {fault for fault, _ in marks} == {"guided"}


def test_guidance_that_the_engine_does_not_serve_with_is_refused(
    folders: Folders, fakes: Callable[[Family], FakeRollouts]
) -> None:
    pipeline = SampledPipeline.read(folders("qwen_image"), guidance=1.0)
    with pytest.raises(RolloutRefused, match="SGLang guided with a negative prompt, but the guidance is 1"):
        rollout(fakes("qwen_image"), request_of(pipeline, "a red square!guided"), pipeline)
    distilled = SampledPipeline.read(folders("flux"), guidance=GUIDANCE)
    fakes("flux").embedded = 3.5
    with pytest.raises(RolloutRefused, match=r"guidance is \[3500.0\] / 1000 instead of 2"):
        rollout(fakes("flux"), request_of(distilled), distilled)


def test_requests_that_sglang_cannot_serve_are_refused(folders: Folders) -> None:
    pipeline = SampledPipeline.read(folders("qwen_image"), guidance=1.0)
    check_request(request_of(pipeline))
    with pytest.raises(EngineError, match="no steps of the kind dance"):
        check_request(request_of(pipeline, kind="dance"))
    with pytest.raises(EngineError, match="one seed, but noise_seed differs"):
        check_request(request_of(pipeline, noise_seed=6))


def test_a_negative_prompt_is_sent_only_where_sglang_must_guide_by_it(folders: Folders) -> None:
    for family, guidance, field in (("qwen_image", 1.0, 1.0), ("qwen_image", 2.0, 2.0), ("flux", 3.5, None)):
        pipeline = SampledPipeline.read(folders(family), guidance=guidance)  # type: ignore[arg-type]
        body = rollout_body(request_of(pipeline), pipeline, "cuda")
        assert body.get("negative_prompt") == ("blue" if pipeline.files.guides(guidance) else None)
        assert (body["guidance_scale"], body.get("true_cfg_scale")) == (guidance, field)
        assert (body["seed"], body["num_outputs_per_prompt"], body["generator_device"]) == (5, 1, "cuda")
        assert body["rollout_debug_mode"] is False


@pytest.mark.parametrize(
    ("family", "config", "guidance", "message"),
    [
        ("sd", {}, 1.0, "only of flow matching"),
        ("qwen_image", {"guidance_embeds": True}, 1.0, "does not pass the guidance to a Qwen-Image network"),
        ("flux", {"guidance_embeds": False}, 2.0, "is not proved, and it is 2"),
    ],
)
def test_pipelines_that_sglang_does_not_compute_as_ranks_do_are_refused(
    tmp_path: Path, folders: Folders, family: Family, config: dict[str, Any], guidance: float, message: str
) -> None:
    pipeline = SampledPipeline.read(folders(family), guidance=guidance)
    pipeline.files.config.update(config)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=message):
        check_pipeline(pipeline.files, guidance)


def launch(folder: Path, **more: Any) -> SglangDiffusionLaunch:
    return SglangDiffusionLaunch.model_validate({"model": str(folder), "python": "/env/bin/python"} | more)


def test_the_command_line_keeps_the_server_on_the_loopback_interface_and_in_float32(folders: Folders) -> None:
    folder = folders("flux")
    words = diffusion_command(launch(folder, host="0.0.0.0", guidance=2.5), "FluxPipeline", PORTS)
    given = {name: value for name, value in itertools.pairwise(words) if name.startswith("--")}
    assert (given["--host"], given["--port"], given["--scheduler-port"], given["--master-port"]) == (
        "127.0.0.1",
        "1",
        "3",
        "4",
    )
    assert (given["--dit-precision"], given["--backend"], given["--model-id"]) == ("fp32", "sglang", "FLUX.1-dev")
    assert list(words).count("fp32") == 4
    assert given["--embedded-cfg-scale"] == "2.5"
    on_gpu = diffusion_command(
        launch(folder, device="cuda", engine_args=("--vae-tiling", "true")), "FluxPipeline", PORTS
    )
    assert (list(on_gpu).count("fp32"), on_gpu[-2:]) == (1, ("--vae-tiling", "true"))
    with pytest.raises(UsageError, match="rounds states to the network's type, bfloat16"):
        diffusion_command(launch(folder, dtype="bfloat16"), "FluxPipeline", PORTS)


@pytest.mark.parametrize(
    "word", ["--host", "--dit-precision=bf16", "--dit_precision", "--batching_max_size=4", "--flow-s"]
)
def test_options_on_which_log_probabilities_depend_are_refused(folders: Folders, word: str) -> None:
    with pytest.raises(UsageError, match="is set by gcore"):
        diffusion_command(launch(folders("flux"), engine_args=(word,)), "FluxPipeline", PORTS)


def test_an_option_with_underscores_is_the_same_option() -> None:
    with pytest.raises(UsageError, match="--api-key is set by gcore"):
        check_engine_args(["--api_key=k"])


def test_the_server_gets_two_neighbouring_ports_and_two_more() -> None:
    ports = DiffusionPorts.free()
    assert len({ports.http, ports.http + 1, ports.scheduler, ports.master}) == 4


def test_each_served_class_has_a_network_that_ranks_can_replay(folders: Folders) -> None:
    kinds = {json.loads((folders(family) / "model_index.json").read_text())["_class_name"] for family in SERVED}
    assert kinds == set(DIFFUSION_MODELS)


def test_weights_must_have_the_tensors_of_the_network_and_no_others(folders: Folders, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    own = {"a": TensorShape("F32", (2, 3)), "b": TensorShape("F32", (4,))}
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    good = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    for changed, message in (
        ({}, ""),
        ({"b": None}, "the weights lack b"),
        ({"c": torch.zeros(1)}, "the weights have c, which the network does not have"),
        ({"b": torch.zeros(5)}, r"b is F32 \[5\], expected \[4\]"),
        ({"b": torch.zeros(4, dtype=torch.int32)}, r"b is I32 \[4\], expected \[4\]"),
    ):
        save_file({name: one for name, one in (good | changed).items() if one is not None}, file)
        if message:
            with pytest.raises(EngineError, match=message):
                check_tensors(tmp_path, own)
        else:
            check_tensors(tmp_path, own)
