"""The routes that control an engine and tell how it is, whatever it serves: SGLang's paths and fields over HTTP.

Pauses, aborts, memory, health, what is served and what goes on; changes of weights are in `weight_routes`. Nothing here waits
for the model on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.errors import EngineError
from gcore.rollout.engine.administration import AbortBody, EmptyBody, MemoryBody, PauseBody
from gcore.rollout.engine.auth import Guard, Keys
from gcore.rollout.engine.bodies import checker, read, seconds
from gcore.rollout.engine.refusals import no_such_route, refusing
from gcore.rollout.engine.served import Front, Served
from gcore.rollout.engine.weight_routes import WeightRoutes
from gcore.rollout.metered import told

T = TypeVar("T")
LOOK_S = 0.02
"""How often a flush that may wait looks whether the engine is idle."""


class ControlRoutes:
    """The handlers. `describe` is what `/model_info` and `/server_info` tell about the process."""

    def __init__(self, core: Served, desk: Front, describe: dict[str, Any]) -> None:
        self._core = core
        self._desk = desk
        self._describe = describe
        self._weights = WeightRoutes(core, desk, str(describe["model_path"]))
        self._flushing = asyncio.Lock()

    @property
    def model_path(self) -> str:
        """The folder whose weights are served."""
        return self._weights.model_path

    def routes(self, unserved: Sequence[str]) -> list[Route]:
        """The routes; those of SGLang's in `unserved` refuse in words."""
        both = ["GET", "POST"]
        posts = {
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            **self._weights.table(),
            **dict.fromkeys(unserved, self.unserved),
        }
        reads = {
            "/health": self.health,
            "/ready": self.health,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/metrics": self.metrics,
        }
        either = {
            "/flush_cache": self.flush,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.wake,
            "/get_weights_by_name": self._weights.by_name,
        }
        routes = [Route(path, refusing(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in reads.items()]
        return routes + [Route(path, refusing(handler), methods=both) for path, handler in either.items()]

    async def abort(self, request: Request) -> Response:
        """End requests now; they answer with the tokens they have."""
        body = await read(request, checker(AbortBody))
        if body.abort_all:
            await self._desk.perform(self._core.abort_all)
        else:
            await self._desk.perform(lambda: self._core.abort(lambda task: body.names(task.rid)))
        return Response()

    async def pause(self, request: Request) -> Response:
        """Make no more tokens."""
        body = await read(request, checker(PauseBody))
        await self._desk.perform(lambda: self._core.pause(body.mode))
        self._desk.gate.look_again()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        """Go on."""
        await read(request, checker(EmptyBody))
        await self._desk.perform(self._core.resume)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        """Give the cache's memory back; refused while sequences hold it, after `timeout` seconds of waiting for them."""
        timeout = seconds(request, "timeout")
        clock, core = self._desk.clock, self._core

        def flush() -> bool:
            if core.running or (core.waiting and not core.paused):
                return False
            core.flush()
            return True

        async with self._flushing:
            until = clock.monotonic() + timeout
            while not (flushed := await self._desk.perform(flush)) and clock.monotonic() < until:
                await clock.sleep(LOOK_S)
        if flushed:
            return PlainTextResponse("Cache flushed.\n")
        words = "Timed out waiting for idle state.\n" if timeout else "Flush cache failed.\n"
        return PlainTextResponse(f"{words}Requests are running or waiting; retract or abort them first.\n", 400)

    async def release(self, request: Request) -> Response:
        """Sleep: memory goes back, requests wait."""
        body = await read(request, checker(MemoryBody))
        await self._desk.perform(lambda: self._core.release(body.wanted))
        self._desk.gate.look_again()
        return JSONResponse(None)

    async def wake(self, request: Request) -> Response:
        """Wake up."""
        body = await read(request, checker(MemoryBody))
        await self._desk.perform(lambda: self._core.wake(body.wanted))
        return JSONResponse(None)

    async def unserved(self, request: Request) -> Response:
        """What SGLang has and this engine has not."""
        raise EngineError(f"{request.url.path} is not served by this engine", fix="Ask an SGLang server")

    async def health(self, request: Request) -> Response:
        """Whether the model's thread lives."""
        return Response(status_code=200 if self._desk.runner.alive else 503)

    async def model_info(self, request: Request) -> Response:
        """What is served."""
        return JSONResponse({**self._described(), "preferred_sampling_params": None})

    async def server_info(self, request: Request) -> Response:
        """What is served, and what goes on."""
        core = self._core
        state = {
            "num_running_reqs": core.running,
            "num_waiting_reqs": core.waiting,
            "paused": core.paused,
            "released": sorted(core.asleep),
        }
        return JSONResponse({**self._described(), "internal_states": [state]})

    def _described(self) -> dict[str, Any]:
        path = self.model_path
        return {
            **self._describe,
            "model_path": path,
            "served_model_name": path,
            "weight_version": self._core.version,
        }

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, under SGLang's names; and what the engine's time was."""
        core, desk = self._core, self._desk
        table = (
            ("num_running_reqs", "gauge", "Sequences that are worked on.", core.running),
            ("num_queue_reqs", "gauge", "Sequences that wait.", core.waiting),
            ("num_requests_total", "counter", "Sequences asked for.", desk.requests),
            ("prompt_tokens_total", "counter", "Prompt tokens of these.", desk.prompt_tokens),
            ("generation_tokens_total", "counter", "Tokens made.", core.generated_tokens),
        )
        text = "".join(
            f"# HELP sglang:{name} {words}\n# TYPE sglang:{name} {kind}\nsglang:{name} {value}\n"
            for name, kind, words, value in table
        )
        text += told(desk.runner.sums())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def guarded(routes: Sequence[Route], keys: Keys) -> ASGIApp:
    """The ASGI application of these routes, behind the keys."""
    return Guard(Starlette(routes=list(routes), exception_handlers={HTTPException: no_such_route}), keys)


async def unless_gone(request: Request, answering: Coroutine[Any, Any, T]) -> T | None:
    """What `answering` gives; None when the client has gone away first."""
    task = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    """Returns once the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
