"""HTTP side of the diffusers engine: `/rollout/generate` with the fields of SGLang's diffusion server, as JSON.

A request asks for one picture of its prompt for each of its seeds. The arrays of an answer (states, pictures, embeddings)
are blobs in the store of the engine's node, which the answer names; an engine without a store returns them as base64.
The control routes are those of all engines.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.api.tls import Connector
from gcore.engines.diffusers.core import (
    DenoisingOutput,
    DenoisingRequest,
    DenoisingResult,
    DiffusionCore,
    measure_slots,
)
from gcore.engines.launch import DiffusersLaunch
from gcore.engines.serving.http import ApiKeys, answer_errors, checked_body, read_body
from gcore.engines.serving.io_struct import INT64
from gcore.engines.serving.routes import (
    CLIENT_CLOSED_REQUEST,
    bind_engine,
    health,
    run_unless_disconnected,
)
from gcore.engines.torch.async_engine import AsyncEngine
from gcore.engines.torch.model import DTYPES, TOO_BIG, device_of, explain_memory_error, free_bytes
from gcore.engines.torch.server import serve_engine as serve_core
from gcore.engines.torch.weight_routes import engine_app
from gcore.errors import EngineError
from gcore.media.client import BlobClient, open_blob_http
from gcore.media.pictures import encode_png
from gcore.models.diffusion.networks import pack_conditions
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.models.diffusion.steps import StepKind
from gcore.system.clock import Clock
from gcore.system.control_line import ControlLine
from gcore.types import MediumKind

MOST_PICTURES = 4096
"""Maximum number of pictures of one request."""

MOST_STEPS = 1000

Seed = Annotated[int, Field(ge=0, lt=INT64)]


class DenoisingBody(BaseModel):
    """POST /rollout/generate. `seed`: one, or one for each picture. `noise_seed`: of the initial states; default: the
    seeds. `rollout_sde_step_indices`: the random steps, ascending; default: all whose log-probability can be trained.
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
    rollout_log_prob_no_const: bool = False
    rollout_return_denoising_env: bool = True
    rollout_return_dit_trajectory: bool = True


class DenoisingHandler(AsyncEngine[DenoisingRequest, DenoisingOutput]):
    """Turns checked bodies into requests for pictures, and results into answers. Call `open` before the first request.

    `store`: of the engine's node; None: arrays are in the answer. Runs on the event loop.
    """

    def __init__(
        self,
        core: DiffusionCore,
        *,
        clock: Clock,
        description: dict[str, Any],
        side: tuple[int, int],
        store: BlobClient | None,
    ) -> None:
        super().__init__(core, None, clock, {**description, "is_generation": True})
        self._pipeline = core.pipeline
        self._side = side
        self._store = store

    def admit(self, body: DenoisingBody) -> list[DenoisingRequest]:
        """Check a body, and return its requests. Starts nothing. Raises EngineError."""
        pipeline = self._pipeline
        if not body.prompt.strip():
            raise EngineError("the prompt is empty", fix="Give a text to draw")
        guidance = pipeline.network.guidance
        if body.guidance_scale is not None and body.guidance_scale != guidance:
            raise EngineError(
                f"guidance_scale is {body.guidance_scale}, but this engine serves with {guidance}, with which its "
                "log-probabilities are replayed",
                fix="Correct rollout.diffusion.guidance",
            )
        shape = pipeline.state_shape(body.height or self._side[0], body.width or self._side[1])
        levels = pipeline.levels(body.num_inference_steps, shape)
        kind = body.rollout_sde_type
        steps = _random_steps(pipeline, kind, body.rollout_noise_level, levels, body.rollout_sde_step_indices)
        seeds = body.seed if isinstance(body.seed, list) else [body.seed]
        given = seeds if body.noise_seed is None else body.noise_seed
        noises = given if isinstance(given, list) else [given] * len(seeds)
        if not 1 <= len(seeds) <= MOST_PICTURES or len(noises) != len(seeds):
            raise EngineError(f"seed has {len(seeds)} and noise_seed {len(noises)} entries; give one for each picture")
        rid = body.rid
        rids = rid if isinstance(rid, list) else None if rid is None else [f"{rid}_{i}" for i in range(len(seeds))]
        if rids is not None and (len(rids) != len(seeds) or len(set(rids)) < len(rids)):
            raise EngineError(f"rid has {len(set(rids))} different names for {len(seeds)} pictures")
        tokens = pipeline.tokens(body.prompt)
        return [
            DenoisingRequest(
                number=self.number(),
                rid=name,
                prompt=tokens,
                text=body.prompt,
                negative=body.negative_prompt,
                shape=shape,
                levels=levels,
                kind=kind,
                noise_level=body.rollout_noise_level,
                steps=steps,
                noise_seed=noise,
                seed=seed,
                constants=not body.rollout_log_prob_no_const,
                returns_states=body.rollout_return_dit_trajectory,
            )
            for name, seed, noise in zip(self.names(rids, len(seeds)), seeds, noises, strict=True)
        ]

    async def answers(self, requests: list[DenoisingRequest], *, with_condition: bool) -> list[dict[str, Any]]:
        """Denoise all requests, and return the answers in order. Raises EngineError if the store refuses an array."""
        since = self.clock.monotonic()
        ended = await self.ended(requests, {request.rid for request in requests})
        latency = self.clock.monotonic() - since
        found = []
        for request in requests:
            output = ended[request.number]
            answer = _answer(request, output, latency)
            if output.result is not None:
                answer |= await self._arrays(output.result, with_condition=with_condition)
            found.append(answer)
        return found

    async def _arrays(self, result: DenoisingResult, *, with_condition: bool) -> dict[str, Any]:
        """The arrays of a sample, as an answer has them."""
        states, picture, condition = await asyncio.to_thread(_encode, result)
        shape = tuple(result.states.shape)
        found = {
            "dit_trajectory": await self._array("trajectory", states, shape, "float32"),
            "generated_output": await self._array("decoded", picture, tuple(result.picture.shape), "uint8"),
        }
        if with_condition:
            found["denoising_env"] = await self._array("embeds", condition, (len(condition),), "uint8")
        return found

    async def _array(self, kind: MediumKind, data: bytes, shape: Sequence[int], dtype: str) -> dict[str, Any]:
        named = {"kind": kind, "size": len(data), "shape": list(shape), "dtype": dtype}
        if self._store is None:
            return {**named, "data": base64.b64encode(data).decode()}
        blob = await self._store.put_bytes(data)
        return {**named, "sha256": blob.sha256}


def _random_steps(
    pipeline: ImagePipeline, kind: StepKind, noise_level: float, levels: Sequence[float], wanted: Sequence[int] | None
) -> tuple[int, ...]:
    """The random steps of a request. Raises EngineError for steps that cannot be trained, and for a noise level that the kind
    does not have."""
    schedule = pipeline.schedule
    if kind == "ode":
        if wanted:
            raise EngineError("an ode has no random steps", fix="Remove rollout_sde_step_indices")
        return ()
    if kind != "sde" and not schedule.is_flow:
        raise EngineError(f"a DDIM schedule has no steps of the kind {kind}", fix="Use sde or ode")
    if noise_level > 1 and (kind == "cps" or not schedule.is_flow):
        raise EngineError(
            f"rollout_noise_level is {noise_level}, but such a step replaces at most all of its noise",
            fix="Use at most 1",
        )
    trainable = [index for index in range(len(levels) - 1) if schedule.is_trainable(kind, levels, index)]
    if wanted is None:
        return tuple(trainable)
    wrong = sorted(set(wanted) - set(trainable))
    if wrong or sorted(set(wanted)) != list(wanted):
        what = f"step {wrong[0]} is not one of" if wrong else "rollout_sde_step_indices must ascend within"
        raise EngineError(
            f"{what} the steps that can be random, 0 to {trainable[-1] if trainable else 0}: the last one's standard "
            "deviation is too small to train"
        )
    return tuple(wanted)


def _encode(result: DenoisingResult) -> tuple[bytes, bytes, bytes]:
    """States, picture and condition as bytes: float32 numbers, a PNG file, and a safetensors file."""
    states = result.states.contiguous().numpy().tobytes()
    return states, encode_png(result.picture.numpy()), pack_conditions(result.condition, result.negative)


def _answer(request: DenoisingRequest, output: DenoisingOutput, latency_s: float) -> dict[str, Any]:
    """An answer without its arrays."""
    result, ending = output.result, output.ending
    reason: dict[str, Any] = {"type": ending.kind}
    if ending.kind == "abort":
        reason |= {"message": ending.message, "status_code": None, "err_type": None}
    if output.broken:
        reason["broken"] = output.broken
    spans = () if result is None else result.spans
    return {
        "seed": request.seed,
        "rollout_step_indices": list(request.steps),
        "rollout_log_probs": [] if result is None else list(result.logprobs),
        "sigmas": list(request.levels),
        "meta_info": {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt),
            "weight_version": output.version,
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in spans],
            "e2e_latency": latency_s,
        },
    }


UNSERVED = (
    "/generate",
    "/classify",
    "/encode",
    "/v1/completions",
    "/v1/chat/completions",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
"""SGLang's routes that this engine refuses."""


def diffusion_app(engine: DenoisingHandler, keys: ApiKeys) -> ASGIApp:
    """The ASGI application of the diffusers engine, protected by the API keys."""

    async def generate(request: Request) -> Response:
        body = await read_body(request, partial(checked_body, DenoisingBody))
        requests = engine.admit(body)
        working = engine.answers(requests, with_condition=body.rollout_return_denoising_env)
        answers = await run_unless_disconnected(request, working)
        return Response(status_code=CLIENT_CLOSED_REQUEST) if answers is None else JSONResponse(answers)

    routes = [Route("/rollout/generate", answer_errors(generate), methods=["POST"])]
    routes += [Route("/health_generate", bind_engine(lambda _: engine, health), methods=["GET"])]
    return engine_app(engine, routes, UNSERVED, keys)


def start_diffusion(launch: DiffusersLaunch, _text: object) -> DiffusionCore:
    """Load the pipeline of a launch document and create its core. Raises DataError, EngineError."""
    with explain_memory_error("while it loaded the pipeline", TOO_BIG):
        pipeline = ImagePipeline.load(
            Path(launch.model), guidance=launch.guidance, dtype=DTYPES[launch.dtype], device=device_of(launch)
        )
        core = DiffusionCore(pipeline, slots=launch.batch_slots, version=launch.weight_version)
        shape = pipeline.state_shape(*_side(pipeline, launch))
        free = free_bytes(pipeline.network.device)
        core.slots = measure_slots(core, shape, free, launch.batch_slots)
        return core


def _side(pipeline: ImagePipeline, launch: DiffusersLaunch) -> tuple[int, int]:
    return launch.height or pipeline.default_side, launch.width or pipeline.default_side


def _facade(
    core: DiffusionCore, _text: object, launch: DiffusersLaunch, clock: Clock
) -> tuple[DenoisingHandler, ASGIApp]:
    """The request handler and the application of a core."""
    side = _side(core.pipeline, launch)
    description: Mapping[str, Any] = {
        "model_path": launch.model,
        "tokenizer_path": launch.model,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "max_running_requests": core.rows,
        "dtype": launch.dtype,
        "device": str(core.pipeline.network.device),
        "height": side[0],
        "width": side[1],
    }
    store = None
    if launch.blob_store:
        http = open_blob_http(Connector(None if launch.tls is None else launch.tls.material))
        store = BlobClient(launch.blob_store, launch.job_uid, launch.blob_key, http)
    handler = DenoisingHandler(core, clock=clock, description={**description, **core.facts}, side=side, store=store)
    return handler, diffusion_app(handler, ApiKeys(launch.api_key, launch.admin_api_key))


def serve_engine(launch: DiffusersLaunch, control: ControlLine | None) -> None:
    """Load the pipeline of a launch document and serve it, as `gcore.engines.torch.server.serve_engine`."""
    serve_core(launch, control, start_diffusion, _facade)
