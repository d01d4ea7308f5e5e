"""Routes that control an engine and report its state, for any `ServedEngine`: SGLang's paths and fields over HTTP.

They pause and abort requests, release memory, change the served weights, and report health and metrics. A weight change
responds with `{"success": bool, "message": str}`, with status 400 if nothing was changed. It waits for running requests
unless the engine is paused. A KV cache that running sequences use is not flushed: to change weights during an in-place
pause, send `flush_cache: false`; to recompute keys and values, pause with `retract`.

Handlers are functions of an engine and a request. `engine_of` finds the engine of a request, so that one application
can serve several.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.engines.serving.engine import ServedEngine
from gcore.engines.serving.http import (
    ApiKeyGuard,
    ApiKeys,
    answer_errors,
    query_seconds,
    read_fields,
    route_not_found,
)
from gcore.engines.serving.io_struct import (
    AbortBody,
    EmptyBody,
    MemoryBody,
    PauseBody,
    UpdateFromDiskBody,
    UpdateVersionBody,
)
from gcore.errors import EngineError, GcoreError
from gcore.rollout.engine_time import prometheus_text

TEXT_ROUTES = (
    "/generate",
    "/classify",
    "/encode",
    "/v1/completions",
    "/v1/chat/completions",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
"""Routes of SGLang that an engine for pictures refuses."""

TRANSFER_ROUTES = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/get_weights_by_name",
)
"""Routes of SGLang that an engine refuses if it loads weights from a folder only and returns none."""

T = TypeVar("T")
E = TypeVar("E", bound=ServedEngine[Any])
Handler = Callable[[E, Request], Awaitable[Response]]

CLIENT_CLOSED_REQUEST = 499
FLUSH_POLL_S = 0.02


def control_routes(engine_of: Callable[[Request], E | None], unserved: Sequence[str]) -> list[Route]:
    """Return the control routes. `engine_of`: the engine of a request; None: none yet. `unserved`: SGLang's paths that
    are refused with an explanation.
    """
    both = ["GET", "POST"]
    posts: dict[str, Handler[E]] = {
        "/abort_request": abort,
        "/pause_generation": pause,
        "/continue_generation": resume,
        "/update_weights_from_disk": update_from_disk,
        "/update_weight_version": rename_weights,
        **dict.fromkeys(unserved, refuse_route),
    }
    reads: dict[str, Handler[E]] = {
        "/health": health,
        "/ready": health,
        "/model_info": model_info,
        "/get_model_info": model_info,
        "/server_info": server_info,
        "/get_server_info": server_info,
        "/metrics": metrics,
    }
    either: dict[str, Handler[E]] = {
        "/flush_cache": flush,
        "/release_memory_occupation": release,
        "/resume_memory_occupation": wake,
    }
    routes = [Route(path, bind_engine(engine_of, handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, bind_engine(engine_of, handler), methods=["GET"]) for path, handler in reads.items()]
    return routes + [Route(path, bind_engine(engine_of, handler), methods=both) for path, handler in either.items()]


def bind_engine(
    engine_of: Callable[[Request], E | None], handler: Handler[E]
) -> Callable[[Request], Awaitable[Response]]:
    """Turn a handler of (engine, request) into one of a request. Errors become responses.

    Responds with status 503 if `engine_of` returns None: the engine is still loading.
    """

    async def handle(request: Request) -> Response:
        engine = engine_of(request)
        return Response(status_code=503) if engine is None else await handler(engine, request)

    return answer_errors(handle)


def make_app(routes: Sequence[Route]) -> Starlette:
    """Return the ASGI application of these routes."""
    return Starlette(routes=list(routes), exception_handlers={HTTPException: route_not_found})


def guard_routes(routes: Sequence[Route], keys: ApiKeys) -> ASGIApp:
    """Return the ASGI application of these routes, which requires the API keys."""
    return ApiKeyGuard(make_app(routes), keys)


async def abort(engine: ServedEngine[Any], request: Request) -> Response:
    """End one request or all requests now; they respond with the tokens that they have."""
    body = await read_fields(request, AbortBody)
    await engine.abort((lambda _: True) if body.abort_all else (lambda task: body.names(task.rid)))
    return Response()


async def pause(engine: ServedEngine[Any], request: Request) -> Response:
    """Stop generating tokens."""
    body = await read_fields(request, PauseBody)
    await engine.pause(body.mode)
    engine.gate.recheck()
    return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})


async def resume(engine: ServedEngine[Any], request: Request) -> Response:
    """Generate tokens again."""
    await read_fields(request, EmptyBody)
    await engine.resume()
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


async def update_from_disk(engine: ServedEngine[Any], request: Request) -> Response:
    """Load weights from a folder and serve them."""
    body = await read_fields(request, UpdateFromDiskBody)
    try:
        await engine.update_from_disk(
            body.model_path, body.weight_version, flush=body.flush_cache, abort=body.abort_all_requests
        )
    except GcoreError as error:
        return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
    message = "Succeeded to update model weights." + version_notice(body.weight_version)
    return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})


async def rename_weights(engine: ServedEngine[Any], request: Request) -> Response:
    """Change the version of the served weights."""
    body = await read_fields(request, UpdateVersionBody)
    try:
        await engine.rename(body.new_version, abort=body.abort_all_requests)
    except EngineError as error:
        return JSONResponse({"success": False, "message": str(error), "new_version": engine.state.version}, 400)
    message = f"Weight version updated to {body.new_version}"
    return JSONResponse({"success": True, "message": message, "new_version": body.new_version})


async def flush(engine: ServedEngine[Any], request: Request) -> Response:
    """Drop the KV cache. While sequences use it, wait up to the query's `timeout` seconds, then refuse."""
    timeout = query_seconds(request, "timeout")
    async with engine.flushing:
        until = engine.clock.monotonic() + timeout
        while not (flushed := await engine.flush()) and engine.clock.monotonic() < until:
            await engine.clock.sleep(FLUSH_POLL_S)
    if flushed:
        return PlainTextResponse("Cache flushed.\n")
    words = "Timed out waiting for idle state.\n" if timeout else "Flush cache failed.\n"
    return PlainTextResponse(f"{words}Requests are running or waiting; retract or abort them first.\n", 400)


async def release(engine: ServedEngine[Any], request: Request) -> Response:
    """Release memory (sleep). Requests wait until it is restored."""
    body = await read_fields(request, MemoryBody)
    await engine.release(body.wanted)
    engine.gate.recheck()
    return JSONResponse(None)


async def wake(engine: ServedEngine[Any], request: Request) -> Response:
    """Restore released memory."""
    body = await read_fields(request, MemoryBody)
    await engine.wake(body.wanted)
    return JSONResponse(None)


async def refuse_route(engine: ServedEngine[Any], request: Request) -> Response:
    """Refuse a route of SGLang that this engine does not support."""
    raise EngineError(f"{request.url.path} is not supported by {engine.kind}", fix=engine.alternative)


async def health(engine: ServedEngine[Any], request: Request) -> Response:
    """Respond with 200 if the engine can still respond to requests, else 503."""
    return Response(status_code=200 if engine.alive else 503)


async def model_info(engine: ServedEngine[Any], request: Request) -> Response:
    """Describe the served model."""
    return JSONResponse({**engine.describe(), "preferred_sampling_params": None})


async def server_info(engine: ServedEngine[Any], request: Request) -> Response:
    """Describe the served model, and the number of running and waiting sequences."""
    state = {
        "num_running_reqs": engine.state.running,
        "num_waiting_reqs": engine.state.waiting,
        "paused": engine.state.paused,
        "released": sorted(engine.state.asleep),
    }
    return JSONResponse({**engine.describe(), "internal_states": [state]})


async def metrics(engine: ServedEngine[Any], request: Request) -> Response:
    """Return metrics as Prometheus text under SGLang's names, and how the engine's time was spent."""
    sums = engine.time_sums()
    table = (
        ("num_running_reqs", "gauge", "Running sequences.", engine.state.running),
        ("num_queue_reqs", "gauge", "Waiting sequences.", engine.state.waiting),
        ("num_requests_total", "counter", "Requested sequences.", engine.requests),
        ("prompt_tokens_total", "counter", "Prompt tokens of the requested sequences.", engine.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens made.", engine.generated_tokens),
    )
    text = "".join(
        f"# HELP sglang:{name} {words}\n# TYPE sglang:{name} {kind}\nsglang:{name} {value}\n"
        for name, kind, words, value in table
    )
    text += prometheus_text(sums, scale=engine.time_scale)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def version_notice(version: str | None) -> str:
    """Return the last sentence of an update's message, if the update set a version."""
    return "" if version is None else f" Weight version updated to {version}."


def encode_event(part: dict[str, Any]) -> bytes:
    """Encode JSON as one server-sent event."""
    return b"data: " + json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


STREAM_END = b"data: [DONE]\n\n"


async def run_unless_disconnected(request: Request, answering: Coroutine[Any, Any, T]) -> T | None:
    """Await `answering` and return its result. If the client disconnects first, cancel it and return None."""
    task = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
