"""The engine's routes: SGLang's paths and fields over HTTP, wired to the desk.

Refusals have SGLang's shapes (`refusals`). Routes of SGLang's that this engine does not have, and that would change what
comes out, are there and refuse in words. Nothing here waits for the model on the event loop. Changes of weights are in
`weight_routes`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.errors import EngineError
from gcore.rollout.engine.administration import AbortBody, EmptyBody, MemoryBody, PauseBody
from gcore.rollout.engine.answers import told_cost
from gcore.rollout.engine.auth import Guard, Keys
from gcore.rollout.engine.bodies import checker, read, seconds
from gcore.rollout.engine.core import Core
from gcore.rollout.engine.desk import BIG_ANSWER_TOKENS, Desk
from gcore.rollout.engine.openai_routes import OpenAIRoutes
from gcore.rollout.engine.protocol import Generate, generate_body
from gcore.rollout.engine.refusals import no_such_route, refusing, streamed_refusal
from gcore.rollout.engine.settled import settled
from gcore.rollout.engine.weight_routes import WeightRoutes

HEALTH_GENERATE_S = 20.0
LOOK_S = 0.02
"""How often a flush that may wait looks whether the engine is idle."""
UNSERVED = (
    "/encode",
    "/classify",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/open_session",
    "/close_session",
)
"""SGLang's routes that this engine refuses."""


class Routes:
    """The handlers. `describe` is what `/model_info` and `/server_info` tell about the process."""

    def __init__(self, core: Core, desk: Desk, describe: dict[str, Any], keys: Keys) -> None:
        self._core = core
        self._desk = desk
        self._describe = describe
        self._keys = keys
        self._weights = WeightRoutes(core, desk, str(describe["model_path"]))
        self._openai = OpenAIRoutes(
            desk,
            Path(str(describe["tokenizer_path"])),
            core.model.context,
            served=lambda: self._weights.model_path,
            answers=self._answers,
        )
        self._flushing = asyncio.Lock()

    def app(self) -> ASGIApp:
        """The ASGI application."""
        both = ["GET", "POST"]
        posts = {
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            **self._weights.table(),
            **dict.fromkeys(UNSERVED, self.unserved),
        }
        reads = {
            "/health": self.health,
            "/ready": self.health,
            "/health_generate": self.health_generate,
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
        routes = [Route("/generate", refusing(self.generate), methods=["POST", "PUT"])]
        routes += [Route(path, refusing(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in reads.items()]
        routes += [Route(path, refusing(handler), methods=both) for path, handler in either.items()]
        routes += self._openai.routes()
        return Guard(Starlette(routes=routes, exception_handlers={HTTPException: no_such_route}), self._keys)

    async def generate(self, request: Request) -> Response:
        """Samples."""
        body = await read(request, lambda value: self._desk.encoded(generate_body(value)))
        if body.stream:
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        answers = await self._answers(request, self._desk.admit(body))
        if body.prompts and not answers:
            return Response(status_code=499)
        whole = answers if body.is_list else answers[0]
        if sum(told_cost(a, body.asked_by(i)) for i, a in enumerate(answers)) < BIG_ANSWER_TOKENS:
            return JSONResponse(whole)
        return await asyncio.to_thread(JSONResponse, whole)

    async def _answers(self, request: Request, tickets: Any) -> list[dict[str, Any]]:
        """The samples; none when the client has gone away first."""
        answering = asyncio.ensure_future(self._desk.answers(tickets))
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else []
        finally:
            answering.cancel()
            leaving.cancel()

    async def _events(self, body: Generate) -> AsyncIterator[bytes]:
        """Server-sent events. What the desk refuses is one of them, for the status has been sent."""
        try:
            stream = self._desk.stream(self._desk.admit(body))
        except EngineError as error:
            yield _event(streamed_refusal(error))
        else:
            try:
                async for parts in stream:
                    for part in parts:
                        asked = body.asked_by(part["index"])
                        if part["meta_info"]["finish_reason"] is None:
                            params = body.params[part["index"] // body.params[0].n]
                            part["text"] = settled(part["text"], params.stop_strings)
                        if not body.is_list:
                            del part["index"]
                        big = told_cost(part, asked) >= BIG_ANSWER_TOKENS
                        yield await asyncio.to_thread(_event, part) if big else _event(part)
            finally:
                await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        yield b"data: [DONE]\n\n"

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

    async def health_generate(self, request: Request) -> Response:
        """Whether tokens come out. An engine that is paused or asleep is not asked for one."""
        if self._core.paused or self._core.asleep:
            return await self.health(request)
        body = generate_body({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
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
        return JSONResponse({**self._described(), "is_generation": True, "preferred_sampling_params": None})

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
        path = self._weights.model_path
        return {
            **self._describe,
            "model_path": path,
            "served_model_name": path,
            "weight_version": self._core.version,
        }

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


async def _gone(request: Request) -> None:
    """Returns once the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(part: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
