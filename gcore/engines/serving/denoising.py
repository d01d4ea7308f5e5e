"""Requests for pictures (`/rollout/generate`) and their answers, of all engines that denoise: the fields of SGLang's diffusion
server, as JSON.

A request asks for one picture of its prompt for each of its seeds. The arrays of an answer (states, pictures, embeddings)
are blobs in the store of the engine's node, which the answer names; an engine without a store returns them as base64.
Needs torch only where an engine's tensors become bytes.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from gcore.api.tls import Connector
from gcore.engines.launch import DenoisingLaunch
from gcore.engines.request import Finish, OutputSpan
from gcore.engines.serving.io_struct import INT64
from gcore.errors import EngineError
from gcore.media.client import BlobClient, open_blob_http
from gcore.media.pictures import encode_png
from gcore.models.diffusion.files import PipelineFiles
from gcore.models.diffusion.settings import FLOW
from gcore.types import MediumKind

if TYPE_CHECKING:
    from torch import Tensor

    from gcore.models.diffusion.networks import Condition
    from gcore.models.diffusion.steps import StepKind

MOST_PICTURES = 4096
"""Maximum number of pictures of one request."""

MOST_STEPS = 1000

Seed = Annotated[int, Field(ge=0, lt=INT64)]


class DenoisingBody(BaseModel):
    """POST /rollout/generate. `seed`: one, or one for each picture. `noise_seed`: of the initial states; default: the
    seeds. `rollout_sde_step_indices`: the random steps, ascending; default: all whose log-probability can be trained.
    `blob_holder`: whose reservation in the blob store the arrays use up; default: none.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    prompt: str
    negative_prompt: str = ""
    seed: Seed | list[Seed]
    noise_seed: Seed | list[Seed] | None = None
    rid: str | list[str] | None = None
    height: int | None = Field(None, ge=1, le=16384)
    width: int | None = Field(None, ge=1, le=16384)
    num_inference_steps: int = Field(10, ge=1, le=MOST_STEPS)
    guidance_scale: float | None = None
    rollout_sde_type: Literal["sde", "cps", "dance", "ode"] = "sde"
    rollout_noise_level: float = Field(0.7, gt=0, lt=100)
    rollout_sde_step_indices: list[int] | None = None
    rollout_return_step_indices: list[int] | None = None
    rollout_log_prob_no_const: bool = False
    rollout_return_denoising_env: bool = True
    rollout_return_dit_trajectory: bool = True
    use_average: bool = False
    blob_holder: str = ""


@dataclass(frozen=True, slots=True)
class DenoisingRequest:
    """A request for one picture. Checked before an engine begins it.

    `prompt`: token IDs of the first text encoder, for counting. `levels`: of the scheduler, one more than steps. `steps`:
    the random steps, ascending; all others follow the ODE. `kept`: those of them whose log-probabilities and states are
    returned; None: all. `noise_seed`: of the initial state; `seed`: of the noise of steps. If they are equal, the steps go on where
    the initial state ended. `returns_states`: whether states are returned.
    """

    number: int
    rid: str
    prompt: tuple[int, ...]
    text: str
    negative: str
    shape: tuple[int, int, int]
    levels: tuple[float, ...]
    kind: StepKind
    noise_level: float
    steps: tuple[int, ...]
    noise_seed: int
    seed: int
    constants: bool = True
    """Whether log-probabilities have the constants of the normal distribution (`DenoisingStep.log_prob`)."""
    returns_states: bool = True
    kept: tuple[int, ...] | None = None
    averaged: bool = False
    """Whether the average of the weights generates it."""
    blob_holder: str = ""
    """Name of the requester, whose reservation in the blob store the arrays use up."""

    @property
    def trained(self) -> tuple[int, ...]:
        """The random steps whose log-probabilities and states are returned."""
        return self.steps if self.kept is None else self.kept


@dataclass(frozen=True, slots=True, eq=False)
class DenoisingResult:
    """A finished sample, on the CPU. `logprobs`: of each of the request's kept steps. `states` [n, channels, height, width],
    float32: before and after each of these steps, each once (`kept_states`); without steps, or if they are not returned,
    the finished state alone. `picture` [height, width, 3], uint8. `condition`, `negative`: of the prompt, and of the
    negative prompt if the engine guides.
    """

    logprobs: tuple[float, ...]
    spans: tuple[OutputSpan, ...]
    states: Tensor
    picture: Tensor
    condition: Condition
    negative: Condition | None


@dataclass(frozen=True, slots=True)
class PictureArrays:
    """The arrays of a finished sample as bytes: float32 states [n, channels, height, width] of shape `shape`, the picture as a PNG
    file of `height` x `width` pixels, and the condition."""

    states: bytes
    shape: tuple[int, ...]
    picture: bytes
    height: int
    width: int
    condition: bytes

    @staticmethod
    def of(result: DenoisingResult) -> PictureArrays:
        """Those of an engine's result."""
        from gcore.models.diffusion.networks import pack_conditions

        states, (height, width, _) = result.states.contiguous(), result.picture.shape
        picture = encode_png(result.picture.numpy())
        condition = pack_conditions(result.condition, result.negative)
        return PictureArrays(states.numpy().tobytes(), tuple(states.shape), picture, height, width, condition)


def describe_pipeline(launch: DenoisingLaunch, files: PipelineFiles, device: str) -> dict[str, Any]:
    """Facts for `/model_info` and `/server_info` of an engine with this launch document, which computes on `device`."""
    height, width = files.size(launch.height, launch.width)
    return {
        "model_path": launch.model,
        "tokenizer_path": launch.model,
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "dtype": launch.dtype,
        "device": device,
        "height": height,
        "width": width,
    }


@dataclass(frozen=True, slots=True)
class DenoisingOutput:
    """How a request ended; `result` is None if it was aborted or could not be finished. `version`: of the weights at its end."""

    number: int
    version: str
    ending: Finish
    result: DenoisingResult | None = None
    broken: str = ""
    """Why the picture could not be finished; empty if it was, or was aborted."""


class RequestedPipeline(Protocol):
    """What requests are checked against: a pipeline of diffusers (`gcore.models.diffusion.pipeline.SampledPipeline`), or an
    emulated one."""

    @property
    def files(self) -> PipelineFiles:
        """Of the pipeline's folder."""
        ...

    @property
    def guidance(self) -> float:
        """With which the engine serves."""
        ...

    def levels(self, steps: int, shape: tuple[int, int, int]) -> tuple[float, ...]:
        """The levels of a schedule of `steps` steps. Raises EngineError."""
        ...

    def tokens(self, prompt: str) -> tuple[int, ...]:
        """The prompt's tokens."""
        ...


def admit_pictures(
    body: DenoisingBody,
    pipeline: RequestedPipeline,
    side: tuple[int, int],
    *,
    number: Callable[[], int],
    names: Callable[[Sequence[str] | None, int], Sequence[str]],
    averages: bool = False,
) -> list[DenoisingRequest]:
    """Check a body, and return its requests. Raises EngineError, DataError.

    `side`: height and width of pictures if the body has none. `number`: returns a new number for a request. `names`: returns
    the request IDs of so many requests, given those of the body. `averages`: whether the engine has an average of its weights.
    """
    if body.use_average and not averages:
        raise EngineError(
            "this engine has no average of the weights", fix="Start gcore's diffusers engine with --average true"
        )
    if not body.prompt.strip():
        raise EngineError("the prompt is empty", fix="Give a text to draw")
    guidance = pipeline.guidance
    if body.guidance_scale is not None and body.guidance_scale != guidance:
        raise EngineError(
            f"guidance_scale is {body.guidance_scale}, but this engine serves with {guidance}, with which its "
            "log-probabilities are replayed",
            fix="Correct rollout.diffusion.guidance",
        )
    shape = pipeline.files.state_shape(body.height or side[0], body.width or side[1])
    levels = pipeline.levels(body.num_inference_steps, shape)
    steps = _random_steps(body, pipeline.files)
    kept = steps if body.rollout_return_step_indices is None else tuple(body.rollout_return_step_indices)
    if not set(kept) <= set(steps) or list(kept) != sorted(set(kept)):
        raise EngineError(f"rollout_return_step_indices must ascend within the random steps {list(steps)}")
    seeds = body.seed if isinstance(body.seed, list) else [body.seed]
    given = seeds if body.noise_seed is None else body.noise_seed
    noises = given if isinstance(given, list) else [given] * len(seeds)
    if not 1 <= len(seeds) <= MOST_PICTURES or len(noises) != len(seeds):
        raise EngineError(f"seed has {len(seeds)} and noise_seed {len(noises)} entries; give one for each picture")
    if len(set(zip(seeds, noises, strict=True))) < len(seeds):
        raise EngineError("two pictures have equal seeds, so they would be equal", fix="Give each its own seed")
    rid = body.rid
    rids = rid if isinstance(rid, list) else None if rid is None else [f"{rid}_{i}" for i in range(len(seeds))]
    if rids is not None and (len(rids) != len(seeds) or len(set(rids)) < len(rids)):
        raise EngineError(f"rid has {len(set(rids))} different names for {len(seeds)} pictures")
    tokens = pipeline.tokens(body.prompt)
    return [
        DenoisingRequest(
            number=number(),
            rid=name,
            prompt=tokens,
            text=body.prompt,
            negative=body.negative_prompt,
            shape=shape,
            levels=levels,
            kind=body.rollout_sde_type,
            noise_level=body.rollout_noise_level,
            steps=steps,
            kept=kept,
            averaged=body.use_average,
            noise_seed=noise,
            seed=seed,
            constants=not body.rollout_log_prob_no_const,
            returns_states=body.rollout_return_dit_trajectory,
            blob_holder=body.blob_holder,
        )
        for name, seed, noise in zip(names(rids, len(seeds)), seeds, noises, strict=True)
    ]


def _random_steps(body: DenoisingBody, files: PipelineFiles) -> tuple[int, ...]:
    """The random steps of a request; by default all that can be trained. Raises EngineError for steps that cannot be trained,
    and for a kind of steps or a noise level that the pipeline's scheduler does not have."""
    kind, wanted, is_flow = body.rollout_sde_type, body.rollout_sde_step_indices, files.scheduler == FLOW
    if kind == "ode":
        if wanted:
            raise EngineError("an ode has no random steps", fix="Remove rollout_sde_step_indices")
        return ()
    if kind != "sde" and not is_flow:
        raise EngineError(f"a DDIM schedule has no steps of the kind {kind}", fix="Use sde or ode")
    if body.rollout_noise_level > 1 and (kind == "cps" or not is_flow):
        raise EngineError(
            f"rollout_noise_level is {body.rollout_noise_level}, but such a step replaces at most all of its noise",
            fix="Use at most 1",
        )
    trainable = files.trainable_steps(body.num_inference_steps)
    if wanted is None:
        return tuple(trainable)
    wrong = sorted(set(wanted) - set(trainable))
    if wrong or sorted(set(wanted)) != wanted:
        what = f"step {wrong[0]} is not one of" if wrong else "rollout_sde_step_indices must ascend within"
        raise EngineError(
            f"{what} the steps that can be random, 0 to {max(len(trainable) - 1, 0)}: the last one's standard deviation is too "
            "small to train"
        )
    return tuple(wanted)


class AnswerWriter:
    """Writes answers, and puts their arrays into `store`, that of the engine's node; None: the arrays are in the answers."""

    def __init__(self, store: BlobClient | None) -> None:
        self._store = store

    @staticmethod
    def open(launch: DenoisingLaunch) -> AnswerWriter:
        """The writer of an engine with this launch document."""
        if not launch.blob_store:
            return AnswerWriter(None)
        http = open_blob_http(Connector(None if launch.tls is None else launch.tls.material))
        return AnswerWriter(BlobClient(launch.blob_store, launch.job_uid, launch.blob_key, http))

    async def answer(
        self, request: DenoisingRequest, output: DenoisingOutput, latency_s: float, *, with_condition: bool
    ) -> dict[str, Any]:
        """The answer to a request. Raises BlobError if the store refuses an array."""
        result, version = output.result, output.version
        if result is None:
            return answer_numbers(request, output.ending, (), (), version, latency_s, output.broken)
        answer = answer_numbers(request, output.ending, result.logprobs, result.spans, version, latency_s)
        arrays = await asyncio.to_thread(PictureArrays.of, result)
        return answer | await self.arrays(request, arrays, with_condition=with_condition)

    async def arrays(self, request: DenoisingRequest, arrays: PictureArrays, *, with_condition: bool) -> dict[str, Any]:
        """The arrays of a sample, as an answer has them. Raises BlobError."""
        array = partial(self._array, request.blob_holder)
        side = arrays.height, arrays.width, 3
        found = {"generated_output": await array("decoded", arrays.picture, side, "uint8")}
        if request.returns_states:
            found["dit_trajectory"] = await array("trajectory", arrays.states, arrays.shape, "float32")
        if with_condition:
            found["denoising_env"] = await array("embeds", arrays.condition, (len(arrays.condition),), "uint8")
        return found

    async def _array(
        self, holder: str, kind: MediumKind, data: bytes, shape: Sequence[int], dtype: str
    ) -> dict[str, Any]:
        named = {"kind": kind, "size": len(data), "shape": list(shape), "dtype": dtype}
        if self._store is None:
            return {**named, "data": base64.b64encode(data).decode()}
        blob = await self._store.put_bytes(data, holder=holder)
        return {**named, "sha256": blob.sha256}


def answer_numbers(
    request: DenoisingRequest,
    ending: Finish,
    logprobs: Sequence[float],
    spans: Sequence[OutputSpan],
    version: str,
    latency_s: float,
    broken: str = "",
) -> dict[str, Any]:
    """An answer without its arrays. `logprobs`, `spans`: of the request's trained steps; empty if it was aborted. `version`: of
    the weights at its end. `broken`: why the picture could not be finished."""
    reason: dict[str, Any] = {"type": ending.kind}
    if ending.kind == "abort":
        reason |= {"message": ending.message, "status_code": None, "err_type": None}
    if broken:
        reason["broken"] = broken
    return {
        "seed": request.seed,
        "rollout_step_indices": list(request.trained),
        "rollout_log_probs": list(logprobs),
        "sigmas": list(request.levels),
        "meta_info": {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt),
            "weight_version": version,
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in spans],
            "e2e_latency": latency_s,
        },
    }
