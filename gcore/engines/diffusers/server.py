"""HTTP side of the diffusers engine: `/rollout/generate` (`gcore.engines.serving.denoising`), and the control routes of all
engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.engines.diffusers.core import DiffusionCore, measure_slots
from gcore.engines.launch import DiffusersLaunch
from gcore.engines.serving.denoising import (
    AnswerWriter,
    DenoisingBody,
    DenoisingOutput,
    DenoisingRequest,
    admit_pictures,
    describe_pipeline,
)
from gcore.engines.serving.http import ApiKeys, answer_errors, checked_body, read_body
from gcore.engines.serving.routes import (
    CLIENT_CLOSED_REQUEST,
    TEXT_ROUTES,
    bind_engine,
    health,
    run_unless_disconnected,
)
from gcore.engines.torch.async_engine import AsyncEngine
from gcore.engines.torch.model import DTYPES, TOO_BIG, device_of, explain_memory_error, free_bytes
from gcore.engines.torch.server import serve_engine as serve_core
from gcore.engines.torch.weight_routes import engine_app
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.system.clock import Clock
from gcore.system.control_line import ControlLine


class DenoisingHandler(AsyncEngine[DenoisingRequest, DenoisingOutput]):
    """Turns checked bodies into requests for pictures, and results into answers. Call `open` before the first request.

    `side`: height and width of pictures if a request has none. Runs on the event loop.
    """

    def __init__(
        self,
        core: DiffusionCore,
        *,
        clock: Clock,
        description: dict[str, Any],
        side: tuple[int, int],
        writer: AnswerWriter,
    ) -> None:
        super().__init__(core, None, clock, description)
        self._pipeline = core.pipeline
        self._averages = core.averages
        self._side = side
        self._writer = writer

    def admit(self, body: DenoisingBody) -> list[DenoisingRequest]:
        """Check a body, and return its requests. Starts nothing. Raises EngineError."""
        return admit_pictures(
            body, self._pipeline, self._side, number=self.number, names=self.names, averages=self._averages
        )

    async def answers(self, requests: list[DenoisingRequest], *, with_condition: bool) -> list[dict[str, Any]]:
        """Denoise all requests, and return the answers in order. Raises BlobError if the store refuses an array."""
        since = self.clock.monotonic()
        ended = await self.ended(requests, {request.rid for request in requests})
        latency = self.clock.monotonic() - since
        return [
            await self._writer.answer(request, ended[request.number], latency, with_condition=with_condition)
            for request in requests
        ]


UNSERVED = (*TEXT_ROUTES, "/update_weights_from_tensor", "/update_weights_from_ipc")
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
        core = DiffusionCore(pipeline, slots=launch.batch_slots, version=launch.weight_version, average=launch.average)
        shape = pipeline.files.state_shape(*pipeline.files.size(launch.height, launch.width))
        free = free_bytes(pipeline.network.device)
        core.slots = measure_slots(core, shape, free, launch.batch_slots)
        return core


def _facade(
    core: DiffusionCore, _text: object, launch: DiffusersLaunch, clock: Clock
) -> tuple[DenoisingHandler, ASGIApp]:
    """The request handler and the application of a core."""
    files = core.pipeline.files
    description = describe_pipeline(launch, files, str(core.pipeline.network.device))
    description |= {**core.facts, "max_running_requests": core.rows}
    side = files.size(launch.height, launch.width)
    handler = DenoisingHandler(core, clock=clock, description=description, side=side, writer=AnswerWriter.open(launch))
    return handler, diffusion_app(handler, ApiKeys(launch.api_key, launch.admin_api_key))


def serve_engine(launch: DiffusersLaunch, control: ControlLine | None) -> None:
    """Load the pipeline of a launch document and serve it, as `gcore.engines.torch.server.serve_engine`."""
    serve_core(launch, control, start_diffusion, _facade)
