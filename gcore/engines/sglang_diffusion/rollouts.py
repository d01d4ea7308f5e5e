"""Rollouts of SGLang's diffusion server: its request for one picture, and the check of its answer.

As `sglang.multimodal_gen` 0.5.23 has them (`runtime/entrypoints/post_training`, `runtime/post_training`). An answer is a
msgpack list with one object; a tensor in it is a safetensors file with the name `t`. Properties on which this module relies:

- Each request asks for one picture. With several, SGLang draws more numbers from each generator for a step, so the noise of a
  picture would depend on their number.
- One seed gives the initial state and then the noise of the random steps.
- Guidance happens if and only if the guidance is above 1 and there is a negative prompt. Missing fields get defaults of the
  model's class, so all are sent.
- States are float32 in the answer, but SGLang rounds each to the type of the network's prediction, after it has computed the
  log-probability. `check_precision` detects that.
- `sde` uses the second level in place of a level that is close to 1; gcore uses it in the first step, whatever its level is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from gcore.engines.request import OutputSpan
from gcore.engines.serving.denoising import DenoisingRequest, DenoisingResult
from gcore.errors import EngineError
from gcore.models.diffusion.files import PACKED
from gcore.models.diffusion.networks import Condition, unpack_squares
from gcore.models.diffusion.pipeline import SampledPipeline
from gcore.models.diffusion.windows import kept_states

POOLED = ("StableDiffusion3Pipeline", "FluxPipeline")
"""Pipelines whose network also gets a pooled embedding of the prompt."""

LEVEL_ERROR = 1e-4
"""Largest difference between SGLang's noise levels and those of the pipeline's own scheduler: of rounding."""

NEAR_ONE = 1e-5
"""SGLang treats a level that differs from 1 by at most this as 1."""


class RolloutRefused(EngineError):
    """SGLang's answer cannot be trained."""


def check_request(request: DenoisingRequest) -> None:
    """Raise EngineError for a request that SGLang cannot serve."""
    if request.kind == "dance":
        raise EngineError("SGLang has no steps of the kind dance", fix="Use sde, cps or ode, or the diffusers engine")
    if request.noise_seed != request.seed:
        raise EngineError(
            "SGLang draws the initial state and the noise of steps from one seed, but noise_seed differs from seed",
            fix="Leave rollout.diffusion.same_noise out, or use the diffusers engine",
        )


def rollout_body(request: DenoisingRequest, pipeline: SampledPipeline, device: str) -> dict[str, Any]:
    """SGLang's request for a picture. `device`: of the network, on which SGLang must draw the noise."""
    files, guidance = pipeline.files, pipeline.guidance
    guides = files.guides(guidance)
    scale = guidance if guides or files.is_distilled else 1.0
    body: dict[str, Any] = {
        "prompt": request.text,
        "seed": request.seed,
        "generator_device": device,
        "height": request.shape[1] * files.scale,
        "width": request.shape[2] * files.scale,
        "num_inference_steps": len(request.levels) - 1,
        "num_outputs_per_prompt": 1,
        "guidance_scale": scale,
        "rollout": True,
        "rollout_sde_type": request.kind,
        "rollout_noise_level": request.noise_level,
        # SGLang refuses to compute the constants of steps without noise.
        "rollout_log_prob_no_const": request.kind == "ode" or not request.constants,
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": True,
        "rollout_return_dit_trajectory": True,
        "rollout_sde_step_indices": list(request.steps),
        "rollout_return_step_indices": list(_kept(request)),
        "suppress_logs": True,
    }
    if files.kind == "QwenImagePipeline":
        body["true_cfg_scale"] = scale
    if guides:
        body["negative_prompt"] = request.negative
    return body


def _kept(request: DenoisingRequest) -> tuple[int, ...]:
    """Numbers of the states that are returned: around trained steps, or the finished one."""
    return (kept_states(request.trained) if request.returns_states else ()) or (len(request.levels) - 1,)


def read_rollout(
    answer: Any, request: DenoisingRequest, pipeline: SampledPipeline, version: str
) -> tuple[tuple[float, ...], DenoisingResult]:
    """Check SGLang's answer to a request (`rollout_body`), decoded from msgpack. `version`: of the weights.

    Returns the noise levels that its scheduler used, and the sample. Raises RolloutRefused.
    """
    if not (isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict)):
        raise RolloutRefused("the answer is not a list with one picture")
    (one,) = answer
    if one.get("seed") != request.seed:
        raise RolloutRefused(f"the picture has the seed {one.get('seed')} instead of {request.seed}")
    trajectory = _table(one, "dit_trajectory")
    levels = _levels(trajectory, request)
    states = _states(trajectory, request, pipeline, levels)
    logprobs = _logprobs(one, request, levels)
    condition, negative = _conditions(_table(one, "denoising_env"), pipeline)
    picture = _picture(_tensor(one.get("generated_output"), "generated_output"), request, pipeline)
    spans = (OutputSpan(version, 0, len(logprobs)),)
    return levels, DenoisingResult(logprobs, spans, states, picture, condition, negative)


def _table(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = given.get(name)
    if not isinstance(found, dict):
        raise RolloutRefused(f"the answer has no {name}")
    return found


def _tensor(given: Any, name: str) -> Tensor:
    """A finite tensor of an answer."""
    if not (isinstance(given, dict) and isinstance(given.get("data"), bytes)):
        raise RolloutRefused(f"the answer has no {name}")
    try:
        found: Tensor = load(given["data"])["t"]
    except (SafetensorError, ValueError, KeyError) as error:
        raise RolloutRefused(f"{name} cannot be read ({error!r})") from error
    if not found.is_floating_point() or not torch.isfinite(found).all():
        raise RolloutRefused(f"{name} has numbers that are not finite, or is of type {found.dtype}")
    return found


def _levels(trajectory: Mapping[str, Any], request: DenoisingRequest) -> tuple[float, ...]:
    """The noise levels, if they are those of the pipeline's own scheduler."""
    given = _tensor(trajectory.get("sigmas"), "dit_trajectory.sigmas")
    if given.dtype != torch.float32 or tuple(given.shape) != (len(request.levels),):
        raise RolloutRefused(f"sigmas are {_form(given)} instead of float32 [{len(request.levels)}]")
    found = tuple(float(level) for level in given)
    if found[-1] != 0 or any(after >= before for before, after in pairwise(found)):
        raise RolloutRefused(f"the noise levels do not fall to 0: {_list(found)}")
    if max(abs(own - other) for own, other in zip(request.levels, found, strict=True)) > LEVEL_ERROR:
        raise RolloutRefused(
            f"SGLang's scheduler has the noise levels {_list(found)}, and the pipeline's own has {_list(request.levels)}"
        )
    for step in request.steps if request.kind == "sde" else ():
        if math.isclose(found[step], 1.0, rel_tol=NEAR_ONE) != (step == 0):
            raise RolloutRefused(
                f"step {step} begins at level {found[step]:g}, where SGLang computes another deviation"
            )
    return found


def _states(
    trajectory: Mapping[str, Any], request: DenoisingRequest, pipeline: SampledPipeline, levels: Sequence[float]
) -> Tensor:
    """The states [n, channels, height, width] that were requested."""
    found = _tensor(trajectory.get("latents"), "dit_trajectory.latents")
    times = _tensor(trajectory.get("timesteps"), "dit_trajectory.timesteps")
    kept, (channels, height, width) = _kept(request), request.shape
    packed = pipeline.files.kind in PACKED
    wanted = (height // 2 * (width // 2), 4 * channels) if packed else request.shape
    if found.dtype != torch.float32 or tuple(found.shape) != (len(kept), *wanted):
        raise RolloutRefused(f"the states are {_form(found)} instead of float32 {[len(kept), *wanted]}")
    scale = float(pipeline.schedule.settings.get("num_train_timesteps", 1000))
    expected = [levels[number] for number in kept]
    if tuple(times.shape) != (len(kept),) or any(
        abs(float(time) / scale - level) > LEVEL_ERROR for time, level in zip(times, expected, strict=True)
    ):
        raise RolloutRefused(f"the states are of the timesteps {_list(times.flatten().tolist())}, not of states {kept}")
    check_precision(found)
    return unpack_squares(found, height // 2, width // 2) if packed else found


def check_precision(states: Tensor) -> None:
    """Raise RolloutRefused if one of these float32 states [n, ...] was rounded to 16 bits: its log-probability is of other numbers."""
    for dtype in (torch.bfloat16, torch.float16):
        if (states.to(dtype).float() == states).flatten(1).all(1).any():
            raise RolloutRefused(
                f"the states were rounded to {_name(dtype)} after their log-probabilities were computed",
                fix="Start SGLang with --dit-precision fp32",
            )


def _logprobs(one: Mapping[str, Any], request: DenoisingRequest, levels: Sequence[float]) -> tuple[float, ...]:
    """The log-probabilities of the trained steps."""
    found = _tensor(one.get("rollout_log_probs"), "rollout_log_probs")
    if found.dtype != torch.float32 or tuple(found.shape) != (len(levels) - 1,):
        raise RolloutRefused(f"log-probabilities are {_form(found)} instead of float32 [{len(levels) - 1}]")
    numbers: list[float] = found.tolist()
    random = {step for step, number in enumerate(numbers) if number != 0}
    if random != set(request.steps):
        raise RolloutRefused(f"the steps {sorted(random)} were random instead of {list(request.steps)}")
    return tuple(numbers[step] for step in request.trained)


def _conditions(env: Mapping[str, Any], pipeline: SampledPipeline) -> tuple[Condition, Condition | None]:
    """The conditions of the prompt and of the negative prompt, if SGLang guided as the pipeline does."""
    files, guidance = pipeline.files, pipeline.guidance
    guides = files.guides(guidance)
    if bool(env.get("neg_cond_kwargs")) != guides:
        what = "did not guide" if guides else "guided with a negative prompt"
        raise RolloutRefused(f"SGLang {what}, but the guidance is {guidance:g}")
    if files.is_distilled:
        given = _tensor(env.get("guidance"), "denoising_env.guidance")
        if given.numel() != 1 or not math.isclose(float(given) / 1000, guidance, rel_tol=1e-3):
            raise RolloutRefused(f"SGLang's guidance is {given.flatten().tolist()} / 1000 instead of {guidance:g}")
    condition = _condition(_table(env, "pos_cond_kwargs"), files.kind)
    return condition, _condition(_table(env, "neg_cond_kwargs"), files.kind) if guides else None


def _condition(given: Mapping[str, Any], kind: str) -> Condition:
    """The embeddings of one prompt as `gcore.models.diffusion.networks` names them, in float32, as the network computes."""
    found = {"embeds": _row(given, "encoder_hidden_states", 3).float()}
    if kind in POOLED:
        found["pooled"] = _row(given, "pooled_projections", 2).float()
    if given.get("encoder_hidden_states_mask") is not None:
        raise RolloutRefused("a mask of embeddings came with one prompt, which needs none")
    return found


def _row(given: Mapping[str, Any], name: str, dimensions: int) -> Tensor:
    """A tensor with a leading dimension of 1, which SGLang drops if there is one sample. Several encoders' are in a list."""
    value = given.get(name)
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    found = _tensor(value, name)
    found = found.unsqueeze(0) if found.dim() == dimensions - 1 else found
    if found.dim() != dimensions or found.shape[0] != 1:
        raise RolloutRefused(f"{name} is {_form(found)} instead of {dimensions} dimensions with one row")
    return found


def _picture(given: Tensor, request: DenoisingRequest, pipeline: SampledPipeline) -> Tensor:
    """The picture [height, width, 3], uint8, of [3, height, width] or [3, 1, height, width] with values from 0 to 1."""
    pixels = given.squeeze(1) if given.dim() == 4 else given
    wanted = (3, request.shape[1] * pipeline.files.scale, request.shape[2] * pipeline.files.scale)
    if tuple(pixels.shape) != wanted:
        raise RolloutRefused(f"the picture is {_form(given)} instead of {list(wanted)}")
    return (pixels.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def _form(tensor: Tensor) -> str:
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(numbers: Sequence[float]) -> str:
    return "[" + ", ".join(f"{number:.4g}" for number in numbers) + "]"
