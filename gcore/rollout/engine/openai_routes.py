"""OpenAI's routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

Refusals are of SGLang's first shape here, whatever they are about. Chat needs a chat template in the model's folder; it is
read with the first request.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gcore.errors import EngineError, GcoreError
from gcore.prompts.render import PromptRenderer
from gcore.rollout.engine import openai
from gcore.rollout.engine.bodies import read
from gcore.rollout.engine.desk import Desk
from gcore.rollout.engine.refusals import BodyRefused, BodyTooBig, refusal

Answer = Callable[[Request, Any], Awaitable[list[dict[str, Any]]]]
"""The samples of a request, or the end of it when its client goes away."""


class OpenAIRoutes:
    """The handlers. `served`: what the model is called now."""

    def __init__(self, desk: Desk, folder: Path, context: int, *, served: Callable[[], str], answers: Answer) -> None:
        self._desk = desk
        self._folder = folder
        self._context = context
        self._served = served
        self._answers = answers
        self._renderer: PromptRenderer | None = None
        self._started = int(desk.clock.wall())

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """It, by its name."""
        name = request.path_params["name"]
        if name in (self._served(), self._served().lstrip("/")):
            return JSONResponse(self._card())
        error = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        return JSONResponse({"error": {"message": f"The model {name!r} does not exist", **error}}, 404)

    def _card(self) -> dict[str, Any]:
        name = self._served()
        card = {"id": name, "object": "model", "created": self._started, "owned_by": "gcore", "root": name}
        return {**card, "parent": None, "max_model_len": self._context}

    async def completions(self, request: Request) -> Response:
        """Text goes on."""
        return await self._answered(request, openai.completion)

    async def chat_completions(self, request: Request) -> Response:
        """A chat goes on."""
        return await self._answered(request, lambda value: openai.chat(value, self._render))

    async def _answered(self, request: Request, check: Callable[[Any], openai.Asking]) -> Response:
        try:
            # The first chat reads files; and a template is foreign code that may take its time.
            value = await read(request, lambda value: value)
            asking = await asyncio.to_thread(lambda: self._encoded(check(value)))
            tickets = self._desk.admit(asking.request)
            wording = openai.Wording(asking, name=uuid.uuid4().hex, created=int(self._desk.clock.wall()))
            if asking.request.stream:
                return StreamingResponse(self._events(tickets, wording), media_type="text/event-stream")
            answers = await self._answers(request, tickets)
            return JSONResponse(wording.whole(answers)) if answers else Response(status_code=499)
        except GcoreError as error:
            known = isinstance(error, (BodyRefused, BodyTooBig))
            return refusal(error if known else BodyRefused(str(error)))

    def _encoded(self, asking: openai.Asking) -> openai.Asking:
        return replace(asking, request=self._desk.encoded(asking.request))

    async def _events(self, tickets: Any, wording: openai.Wording) -> AsyncIterator[bytes]:
        stream = self._desk.stream(tickets)
        try:
            async for parts in stream:
                for part in parts:
                    for chunk in wording.parts(part):
                        yield _event(chunk)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        for chunk in wording.usage():
            yield _event(chunk)
        yield b"data: [DONE]\n\n"

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self._renderer is None:
            self._renderer = PromptRenderer.load(self._folder, chat=True)
        text = self._renderer.render(messages)
        ids = list(self._renderer.encode(text))
        if not ids:
            raise EngineError("the messages have no tokens")
        return ids


def _event(part: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
