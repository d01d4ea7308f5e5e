"""A classifier's routes: SGLang's paths and fields over HTTP, wired to the desk.

It has no words to say: whoever asks it for samples is refused with a sentence. What controls it is as of any engine
(`gcore.rollout.engine.control_routes`).
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.errors import EngineError
from gcore.rollout.classifier.body import classify_body
from gcore.rollout.classifier.core import ClassifierCore
from gcore.rollout.classifier.desk import ClassifierDesk
from gcore.rollout.engine.auth import Keys
from gcore.rollout.engine.bodies import read
from gcore.rollout.engine.control_routes import ControlRoutes, guarded, unless_gone
from gcore.rollout.engine.refusals import refusing

WORDLESS = ("/generate", "/v1/completions", "/v1/chat/completions")
UNSERVED = (
    "/encode",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
"""SGLang's routes that this engine refuses."""
GONE = 499


class ClassifierRoutes:
    """The handlers. `describe` is what `/model_info` and `/server_info` tell about the process."""

    def __init__(self, core: ClassifierCore, desk: ClassifierDesk, describe: dict[str, Any], keys: Keys) -> None:
        self._desk = desk
        self._keys = keys
        self._control = ControlRoutes(core, desk, {**describe, "is_generation": False})

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [Route("/classify", refusing(self.classify), methods=["POST", "PUT"])]
        routes += [Route(path, refusing(self.wordless), methods=["POST", "PUT"]) for path in WORDLESS]
        routes += [Route("/health_generate", self._control.health, methods=["GET"])]
        return guarded([*routes, *self._control.routes(UNSERVED)], self._keys)

    async def classify(self, request: Request) -> Response:
        """Scores."""
        body = await read(request, lambda value: self._desk.encoded(classify_body(value)))
        answers = await unless_gone(request, self._desk.answers(self._desk.admit(body)))
        if answers is None:
            return Response(status_code=GONE)
        return JSONResponse(answers if body.is_list else answers[0])

    async def wordless(self, request: Request) -> Response:
        """It writes nothing."""
        raise EngineError(
            "this engine serves a classifier, which says one number and writes nothing", fix="Ask it at /classify"
        )
