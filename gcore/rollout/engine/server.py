"""The engine's routes: SGLang's paths and fields over HTTP, wired to the desk.

Refusals have SGLang's shapes (`refusals`). Routes of SGLang's that this engine does not have, and that would change what
comes out, are there and refuse in words. Nothing here waits for the model on the event loop. What controls the engine is in
`control_routes`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.errors import EngineError
from gcore.rollout.engine.answers import told_cost
from gcore.rollout.engine.auth import Keys
from gcore.rollout.engine.bodies import read
from gcore.rollout.engine.control_routes import ControlRoutes, guarded, unless_gone
from gcore.rollout.engine.core import Core
from gcore.rollout.engine.desk import BIG_ANSWER_TOKENS, Desk
from gcore.rollout.engine.openai_routes import OpenAIRoutes
from gcore.rollout.engine.protocol import Generate, generate_body
from gcore.rollout.engine.refusals import refusing, streamed_refusal
from gcore.rollout.engine.settled import settled

HEALTH_GENERATE_S = 20.0
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
        self._keys = keys
        self._control = ControlRoutes(core, desk, {**describe, "is_generation": True})
        self._openai = OpenAIRoutes(
            desk,
            Path(str(describe["tokenizer_path"])),
            core.model.context,
            served=lambda: self._control.model_path,
            answers=self._answers,
        )

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [Route("/generate", refusing(self.generate), methods=["POST", "PUT"])]
        routes += [Route("/health_generate", self.health_generate, methods=["GET"])]
        routes += [*self._control.routes(UNSERVED), *self._openai.routes()]
        return guarded(routes, self._keys)

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
        return await unless_gone(request, self._desk.answers(tickets)) or []

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

    async def health_generate(self, request: Request) -> Response:
        """Whether tokens come out. An engine that is paused or asleep is not asked for one."""
        if self._core.paused or self._core.asleep:
            return await self._control.health(request)
        body = generate_body({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        made = self._core.generated_tokens
        try:
            async with asyncio.timeout(HEALTH_GENERATE_S):
                await self._desk.answers(self._desk.admit(body))
        except TimeoutError:
            # With a long queue this one may not have had its turn; then others have.
            return Response(status_code=200 if self._core.generated_tokens > made else 503)
        return Response()


def _event(part: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
