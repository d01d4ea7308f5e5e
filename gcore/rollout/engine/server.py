"""The engine's routes: SGLang's paths and fields over HTTP, wired to the desk.

Every refusal is a JSON object `{"error": {"message": sentence}}` with status 400; administrative calls answer
`{"success": bool, "message": str}` as SGLang does. Nothing here waits for the model on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gcore.errors import EngineError
from gcore.rollout.engine.core import Core
from gcore.rollout.engine.desk import BIG_ANSWER_TOKENS, Desk
from gcore.rollout.engine.model import stage
from gcore.rollout.engine.protocol import (
    AbortBody,
    Body,
    ContinueBody,
    GenerateBody,
    MemoryBody,
    PauseBody,
    UpdateFromDiskBody,
    UpdateVersionBody,
)

B = TypeVar("B", bound=Body)
HEALTH_GENERATE_S = 20.0
TYPE_NAMES = frozenset({"str", "int", "bool", "float", "list"})
BIG_BODY_BYTES = 256 * 1024
"""A body from this size on is parsed and checked off the event loop."""


class Routes:
    """The handlers. `describe` is what `/model_info` and `/server_info` tell about the process."""

    def __init__(self, core: Core, desk: Desk, describe: dict[str, Any]) -> None:
        self._core = core
        self._desk = desk
        self._describe = describe
        # One change of weights at a time, or a slow reader's older weights could be installed last.
        self._changing = asyncio.Lock()

    def app(self) -> Starlette:
        """The ASGI application."""
        both = ["GET", "POST"]
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/abort_request": self.abort,
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weight_version": self.update_version,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
        }
        reads: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self.health,
            "/ready": self.health,
            "/health_generate": self.health_generate,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/metrics": self.metrics,
        }
        routes = [Route("/generate", _refusing(self.generate), methods=["POST", "PUT"])]
        routes += [Route(path, _refusing(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in reads.items()]
        routes += [
            Route("/flush_cache", _refusing(self.flush), methods=both),
            Route("/release_memory_occupation", _refusing(self.release), methods=both),
            Route("/resume_memory_occupation", _refusing(self.wake), methods=both),
        ]
        return Starlette(routes=routes)

    async def generate(self, request: Request) -> Response:
        """Samples."""
        body = await _read(request, GenerateBody)
        tickets = self._desk.admit(body)
        if body.stream:
            return StreamingResponse(_events(self._desk.stream(tickets)), media_type="text/event-stream")
        answering = asyncio.ensure_future(self._desk.answers(tickets))
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=499)
            answers = answering.result()
        finally:
            answering.cancel()
            leaving.cancel()
        single = not body.is_batch and body.params[0].n == 1
        whole = answers[0] if single else answers
        if sum(len(a["output_ids"]) for a in answers) < BIG_ANSWER_TOKENS:
            return JSONResponse(whole)
        return await asyncio.to_thread(JSONResponse, whole)

    async def abort(self, request: Request) -> Response:
        """End requests now; they answer with the tokens they have."""
        body = await _read(request, AbortBody)
        message = body.abort_message or "aborted on request"
        if body.abort_all:
            await self._desk.perform(lambda: self._core.abort_all(message))
        else:
            await self._desk.perform(lambda: self._core.abort(lambda task: body.names(task.rid), message))
        return Response()

    async def update_from_disk(self, request: Request) -> Response:
        """Other weights, between two steps."""
        body = await _read(request, UpdateFromDiskBody)
        core, version = self._core, body.weight_version
        try:
            async with self._changing:
                core.check_version(version)
                staged = await asyncio.to_thread(stage, core.model, Path(body.model_path))
                await self._desk.perform(
                    lambda: core.change_weights(staged, version, flush=body.flush_cache, abort=body.abort_all_requests)
                )
        except EngineError as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def update_version(self, request: Request) -> Response:
        """Call the served weights otherwise."""
        body = await _read(request, UpdateVersionBody)

        def rename() -> None:
            self._core.check_version(body.new_version)
            if body.abort_all_requests:
                self._core.abort_all("aborted by a change of the weights' version")
            self._core.rename(body.new_version)

        try:
            await self._desk.perform(rename)
        except EngineError as error:
            served = self._core.version
            return JSONResponse({"success": False, "message": str(error), "new_version": served}, 400)
        message = f"Weight version updated to {body.new_version}"
        return JSONResponse({"success": True, "message": message, "new_version": body.new_version})

    async def pause(self, request: Request) -> Response:
        """Make no more tokens."""
        body = await _read(request, PauseBody)
        await self._desk.perform(lambda: self._core.pause(body.mode))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        """Go on."""
        await _read(request, ContinueBody)
        await self._desk.perform(self._core.resume)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        """Give the cache's memory back; refused while sequences hold it."""
        await self._desk.perform(self._core.flush)
        return PlainTextResponse("Cache flushed.\n")

    async def release(self, request: Request) -> Response:
        """Sleep: memory goes back, requests wait."""
        body = await _read(request, MemoryBody)
        await self._desk.perform(lambda: self._core.release(body.wanted))
        return JSONResponse(None)

    async def wake(self, request: Request) -> Response:
        """Wake up."""
        body = await _read(request, MemoryBody)
        await self._desk.perform(lambda: self._core.wake(body.wanted))
        return JSONResponse(None)

    async def health(self, request: Request) -> Response:
        """Whether the model's thread lives."""
        return Response(status_code=200 if self._desk.runner.alive else 503)

    async def health_generate(self, request: Request) -> Response:
        """Whether tokens come out. An engine that is paused or asleep is not asked for one."""
        if self._core.paused or self._core.asleep:
            return await self.health(request)
        body = GenerateBody.model_validate(
            {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "rid": "HEALTH_CHECK"}
        )
        made = self._core.generated_tokens
        try:
            async with asyncio.timeout(HEALTH_GENERATE_S):
                await self._desk.answers(self._desk.admit(body))
        except TimeoutError:
            # With a long queue this one may not have had its turn; then others have.
            return Response(status_code=200 if self._core.generated_tokens > made else 503)
        return Response()

    async def model_info(self, request: Request) -> Response:
        """What is served."""
        return JSONResponse({**self._describe, "is_generation": True, "weight_version": self._core.version})

    async def server_info(self, request: Request) -> Response:
        """What is served, and what goes on."""
        core = self._core
        state = {
            "num_running_reqs": core.running,
            "num_waiting_reqs": core.waiting,
            "paused": core.paused,
            "released": sorted(core.asleep),
        }
        return JSONResponse({**self._describe, "weight_version": core.version, "internal_states": [state]})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, under SGLang's names."""
        core, desk = self._core, self._desk
        table = (
            ("num_running_reqs", "gauge", "Sequences that are being decoded.", core.running),
            ("num_queue_reqs", "gauge", "Sequences that wait for a row.", core.waiting),
            ("num_requests_total", "counter", "Sequences asked for.", desk.requests),
            ("prompt_tokens_total", "counter", "Prompt tokens of these.", desk.prompt_tokens),
            ("generation_tokens_total", "counter", "Tokens made.", core.generated_tokens),
        )
        text = "".join(
            f"# HELP sglang:{name} {words}\n# TYPE sglang:{name} {kind}\nsglang:{name} {value}\n"
            for name, kind, words, value in table
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _refusing(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """What cannot be served is a 400 with one sentence."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except EngineError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)

    return handle


async def _read(request: Request, kind: type[B]) -> B:
    raw = await request.body()
    if len(raw) < BIG_BODY_BYTES:
        return _parse(raw, kind)
    return await asyncio.to_thread(_parse, raw, kind)


def _parse(raw: bytes, kind: type[B]) -> B:
    """Raises EngineError that names the field. An empty body is an empty object."""
    try:
        return kind.model_validate(json.loads(raw or b"{}"))
    except ValidationError as error:
        # Of a choice of types every branch complains; the one that got farthest knows best.
        errors = [(_place(e["loc"]), e) for e in error.errors(include_url=False, include_input=False)]
        path, first = max(errors, key=lambda pair: len(pair[0]))
        place = ".".join(path)
        words = "is not known to this engine" if first["type"] == "extra_forbidden" else first["msg"].lower()
        raise EngineError(f"{place}: {words}" if place else words.removeprefix("value error, ")) from error
    except ValueError as error:
        raise EngineError(f"the body is not JSON ({error})") from error


def _place(location: Sequence[str | int]) -> tuple[str, ...]:
    """The fields and indices of a location, without the names of types that were tried."""
    parts = [str(part) for part in location]
    return tuple(part for part in parts if re.fullmatch(r"[a-z_]+|\d+", part) and part not in TYPE_NAMES)


async def _gone(request: Request) -> None:
    """Returns once the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(answers: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async for item in answers:
        yield b"data: " + json.dumps(item).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"
