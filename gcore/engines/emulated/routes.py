"""SGLang's routes (docs/engine.md) for many emulated engines in one process: which is meant is told by the port.

Bodies are checked, and refusals worded, by the torch engine's own modules, so that a client cannot tell the two apart by
them. What an emulated engine does not have refuses in words: weights by broadcast, OpenAI's routes, tensors to look at.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gcore.engines.emulated.engine import EmulatedEngine
from gcore.engines.serving.http import (
    ApiKeyGuard,
    ApiKeys,
    answer_errors,
    error_event,
    lenient_checker,
    query_seconds,
    read_body,
    route_not_found,
)
from gcore.engines.serving.io_struct import (
    AbortBody,
    EmptyBody,
    GenerateCall,
    MemoryBody,
    PauseBody,
    UpdateFromDiskBody,
    UpdateVersionBody,
    generate_body,
)
from gcore.errors import EngineError
from gcore.rollout.engine_time import prometheus_text

LOOK_S = 0.02


UNSERVED = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/get_weights_by_name",
    "/load_lora_adapter",
    "/open_session",
    "/v1/chat/completions",
    "/v1/completions",
)


KIND = "gcore emulated engine: it computes nothing, for tests and benchmarks only"


Handler = Callable[[EmulatedEngine, Request], Awaitable[Response]]


def new_app(engines: Mapping[int, EmulatedEngine]) -> Starlette:
    """The ASGI application. `engines`: by the port on which each is asked; it may grow."""

    def of(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            engine = engines.get(request.scope["server"][1])
            if engine is None:
                return Response(status_code=503)  # it loads
            return await handler(engine, request)

        return answer_errors(handle)

    posts: dict[str, Handler] = {
        "/abort_request": abort,
        "/pause_generation": pause,
        "/continue_generation": resume,
        "/update_weights_from_disk": update,
        "/update_weight_version": rename,
        **dict.fromkeys(UNSERVED, refuse_route),
    }
    either: dict[str, Handler] = {
        "/flush_cache": flush,
        "/release_memory_occupation": release,
        "/resume_memory_occupation": wake,
    }
    reads: dict[str, Handler] = {
        "/health": health,
        "/ready": health,
        "/health_generate": health,
        "/model_info": model_info,
        "/get_model_info": model_info,
        "/server_info": server_info,
        "/get_server_info": server_info,
        "/metrics": metrics,
    }
    routes = [Route("/generate", of(generate), methods=["POST", "PUT"])]
    routes += [Route(path, of(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, of(handler), methods=["GET", "POST"]) for path, handler in either.items()]
    routes += [Route(path, of(handler), methods=["GET"]) for path, handler in reads.items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: route_not_found})


async def generate(engine: EmulatedEngine, request: Request) -> Response:
    """Samples."""
    body = await read_body(request, generate_body)
    if body.stream:
        return StreamingResponse(_events(engine, body), media_type="text/event-stream")
    answering = asyncio.ensure_future(engine.answers(engine.admit(body)))
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=499)
        answers = answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
    return JSONResponse(answers if body.is_list else answers[0])


async def _events(engine: EmulatedEngine, body: GenerateCall) -> AsyncIterator[bytes]:
    """Server-sent events. What is refused is one of them, for the status has been sent."""
    try:
        stream = engine.stream(engine.admit(body))
    except EngineError as error:
        yield _event(error_event(error))
    else:
        try:
            async for part in stream:
                if not body.is_list:
                    del part["index"]
                yield _event(part)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
    yield b"data: [DONE]\n\n"


def _event(part: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def abort(engine: EmulatedEngine, request: Request) -> Response:
    """End requests now; they answer with the tokens they have."""
    body = await read_body(request, lenient_checker(AbortBody))
    engine.abort((lambda _: True) if body.abort_all else (lambda task: body.names(task.rid)))
    return Response()


async def pause(engine: EmulatedEngine, request: Request) -> Response:
    """Make no more tokens."""
    body = await read_body(request, lenient_checker(PauseBody))
    engine.pause(body.mode)
    return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})


async def resume(engine: EmulatedEngine, request: Request) -> Response:
    """Go on."""
    await read_body(request, lenient_checker(EmptyBody))
    engine.resume()
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


async def update(engine: EmulatedEngine, request: Request) -> Response:
    """New weights: a folder that there must be, and its name."""
    body = await read_body(request, lenient_checker(UpdateFromDiskBody))
    if not (Path(body.model_path) / "config.json").is_file():
        return _told(success=False, message=f"{body.model_path} is no model's folder")
    try:
        await engine.update(body.model_path, body.weight_version, flush=body.flush_cache, abort=body.abort_all_requests)
    except EngineError as error:
        return _told(success=False, message=str(error))
    return _told(success=True, message="Succeeded to update model weights.")


async def rename(engine: EmulatedEngine, request: Request) -> Response:
    """Another name for the same weights."""
    body = await read_body(request, lenient_checker(UpdateVersionBody))
    if body.abort_all_requests:
        engine.abort(lambda _: True)
    engine.rename(body.new_version)
    message = f"Weight version updated to {body.new_version}"
    return JSONResponse({"success": True, "message": message, "new_version": body.new_version})


async def flush(engine: EmulatedEngine, request: Request) -> Response:
    """There is no cache; refused while it would be held."""
    until = engine.now() + query_seconds(request, "timeout") * engine.timing.law.speedup
    device = engine.device
    while (held := device.running or (device.waiting and not device.paused)) and engine.now() < until:
        await engine.take(LOOK_S * engine.timing.law.speedup)
    if held:
        return PlainTextResponse("Flush cache failed.\nRequests are running or waiting.\n", 400)
    return PlainTextResponse("Cache flushed.\n")


async def release(engine: EmulatedEngine, request: Request) -> Response:
    """Sleep."""
    body = await read_body(request, lenient_checker(MemoryBody))
    await engine.release(body.wanted)
    return JSONResponse(None)


async def wake(engine: EmulatedEngine, request: Request) -> Response:
    """Wake up."""
    body = await read_body(request, lenient_checker(MemoryBody))
    await engine.wake(body.wanted)
    return JSONResponse(None)


async def refuse_route(engine: EmulatedEngine, request: Request) -> Response:
    """What SGLang has and this engine has not."""
    raise EngineError(f"{request.url.path} is not served by an emulated engine", fix="Ask a real one")


async def health(engine: EmulatedEngine, request: Request) -> Response:
    """It answers."""
    return Response()


async def model_info(engine: EmulatedEngine, request: Request) -> Response:
    """What is served."""
    return JSONResponse({**_described(engine), "is_generation": True})


async def server_info(engine: EmulatedEngine, request: Request) -> Response:
    """What is served, and what goes on."""
    device = engine.device
    state = {
        "num_running_reqs": device.running,
        "num_waiting_reqs": device.waiting,
        "paused": device.paused,
        "released": sorted(device.asleep),
    }
    return JSONResponse({**_described(engine), "internal_states": [state]})


async def metrics(engine: EmulatedEngine, request: Request) -> Response:
    """Prometheus text, under SGLang's names; and what the engine's time was, in real seconds."""
    engine.advance()  # what has ended by now is not told as running
    table = (
        ("num_running_reqs", "gauge", engine.device.running),
        ("num_queue_reqs", "gauge", engine.device.waiting),
        ("num_requests_total", "counter", engine.requests),
        ("prompt_tokens_total", "counter", engine.prompt_tokens),
        ("generation_tokens_total", "counter", engine.device.tokens(engine.now())),
    )
    text = "".join(f"# TYPE sglang:{name} {kind}\nsglang:{name} {value}\n" for name, kind, value in table)
    text += prometheus_text(engine.device.sums(engine.now()), scale=1.0 / engine.timing.law.speedup)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _described(engine: EmulatedEngine) -> dict[str, Any]:
    return {
        "model_path": engine.model_path,
        "served_model_name": engine.model_path,
        "tokenizer_path": engine.model.path,
        "weight_version": engine.device.version,
        "engine": KIND,
        "context_length": engine.model.words.context,
        "vocab_size": engine.model.words.size,
    }


def _told(*, success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)


async def _gone(request: Request) -> None:
    """Returns once the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -------------------- doors
# The sockets at which emulated engines are asked: one server, a port for each engine, opened and shut while it runs.
#
# A port that is shut takes its connections with it, as an engine's that has died. Leaves signals to the process.

BACKLOG = 128


GRACE_S = 1


KEPT_S = 60
"""Seconds that an idle connection is kept."""


class EngineListeners:
    """Of a process's engines. Belongs to the loop in which it serves."""

    def __init__(self, application: ASGIApp, host: str, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEPT_S,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._open: dict[int, asyncio.Server] = {}

    async def serve(self) -> None:
        """Until it is closed."""
        await self._server.serve(sockets=[])

    def close(self) -> None:
        """End. Ports that are still open answer what is under way first."""
        self._server.should_exit = True

    async def open(self) -> int:
        """A port of its own for one engine."""
        await self._server.up.wait()
        listener = socket.create_server((self._host, 0), backlog=BACKLOG)
        # Inherited by each connection; asyncio does not set it on sockets that it has not made.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = int(listener.getsockname()[1])
        self._open[port] = await self._server.listen(listener)
        return port

    def shut(self, port: int) -> None:
        """Nobody is asked there any more; who was being answered hears nothing further."""
        self._open.pop(port).close()
        self._server.break_off(port)


class KeysByPort:
    """An ASGI application whose ports each have a key, as engines of their own would; an empty one is none."""

    def __init__(self, application: ASGIApp, keys: Mapping[int, str]) -> None:
        self._app = application
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        port = (scope.get("server") or ("", 0))[1]
        await ApiKeyGuard(self._app, ApiKeys(self._keys.get(port) or None))(scope, receive, send)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """As at its start."""
        loop = asyncio.get_running_loop()
        config, state = self.config, self.server_state

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=state, app_state=self.lifespan.state
            )

        server = await loop.create_server(protocol, sock=listener, backlog=config.backlog, ssl=config.ssl)
        self.servers.append(server)
        return server

    def break_off(self, port: int) -> None:
        """End the connections of that port at once."""
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if transport is not None and transport.get_extra_info("sockname")[1] == port:
                transport.abort()
