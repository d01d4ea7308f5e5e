"""HTTP of engines: request bodies to checked objects, the shapes of refusals, and API keys.

Big bodies are parsed and checked off the event loop. JSON is read strictly: NaN and infinities are not numbers, and a body
that nests too deeply to be parsed is refused. Refusals have SGLang's three shapes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gcore.errors import EngineError, GcoreError
from gcore.system.files import refuse_constant

BAD_REQUEST = 400
TOO_LARGE = 413


class BodyRefused(EngineError):
    """The body (or the query) is not what the route takes."""


class BodyTooBig(EngineError):
    """The body is bigger than the engine reads."""


class ParamsRefused(EngineError):
    """A sampling parameter, or a field of /generate, is unknown or of another type."""


def error_response(error: GcoreError) -> Response:
    """The answer to a request that is refused because of `error`, in SGLang's shapes, so that a client reads one kind of answer.

    There are three, all of them status 400. The body is not what the route takes at all: an object with `object:
    "error"` and the sentence at the top. A sampling parameter is unknown or of another type: `{"error": sentence}`.
    Everything else that cannot be served: `{"error": {"message": sentence}}`. A body that is too big is a 413 of the
    first kind. Routes that are not there, and methods that a route does not have, answer `{"detail": ...}`.
    """
    if isinstance(error, BodyTooBig):
        return _whole(str(error), TOO_LARGE, "Content Too Large")
    if isinstance(error, BodyRefused):
        return _whole(str(error), BAD_REQUEST, "Bad Request")
    if isinstance(error, ParamsRefused):
        return JSONResponse({"error": str(error)}, BAD_REQUEST)
    return JSONResponse({"error": {"message": str(error)}}, BAD_REQUEST)


def error_event(error: GcoreError) -> dict[str, Any]:
    """The same as a part of a stream, which has begun with status 200."""
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error",
            "code": BAD_REQUEST,
            "retryable": False,
        }
    }


def answer_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The handler, whose errors are answers."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except GcoreError as error:
            return error_response(error)

    return handle


async def route_not_found(request: Request, error: Exception) -> Response:
    """For starlette's own refusals: an unknown path, a method that the path does not have."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


def _whole(message: str, status: int, kind: str) -> Response:
    return JSONResponse({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)


T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

MOST_BODY_BYTES = 128 * 1024 * 1024
"""A bigger body is refused, before it is read where its length is told: about 20 million token ids."""

BIG_BODY_BYTES = 256 * 1024
"""A body from this size on is parsed and checked off the event loop."""

HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""What may be half of a surrogate pair: JSON can say it, but it is no character, and nothing could encode it again."""

TYPE_NAMES = frozenset({"str", "int", "bool", "float", "list", "dict"})


async def read_fields(request: Request, kind: type[B]) -> B:
    """The request's JSON body with the fields of `kind`, as `read_body` reads it."""
    return await read_body(request, lambda value: checked_body(kind, value))


async def read_body(request: Request, check: Callable[[Any], T]) -> T:
    """The request's JSON body, as `check` makes it. Raises BodyRefused, BodyTooBig, and what `check` raises."""
    raw = await _bytes(request)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not raw:
        raise BodyRefused("the body is missing", fix="Send a JSON object, {} if there is nothing to say")
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise BodyRefused(f"the content type is {media!r}", fix="Send the body as application/json")
    if len(raw) < BIG_BODY_BYTES:
        return check(_parsed(raw))
    return await asyncio.to_thread(lambda: check(_parsed(raw)))


def checked_body(kind: type[B], value: Any) -> B:
    """A body with the fields of `kind`. Raises BodyRefused."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise BodyRefused(validation_sentence(error)) from error


def query_seconds(request: Request, name: str) -> float:
    """A query parameter of seconds; 0 where it is not given. Raises BodyRefused for what is no number, or negative."""
    text = request.query_params.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BodyRefused(f"{name} is {text!r}", fix=f"Give {name} in seconds, at least 0")
    return value


def validation_sentence(error: ValidationError) -> str:
    """What is wrong, and where, in one sentence."""
    # Of a choice of types every branch complains; the one that got farthest knows best.
    errors = [(_place(e["loc"]), e) for e in error.errors(include_url=False, include_input=False)]
    path, first = max(errors, key=lambda pair: len(pair[0]))
    place = ".".join(path)
    if first["type"] == "extra_forbidden":
        return f"unknown field {place}"
    words = first["msg"].lower().removeprefix("value error, ")
    if first["type"] in ("model_type", "dataclass_type"):
        words = "input should be a JSON object"
    return f"{place}: {words}" if place else words


async def _bytes(request: Request) -> bytes:
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > MOST_BODY_BYTES:
        raise _too_big()
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY_BYTES:
            raise _too_big()
        parts.append(part)
    return b"".join(parts)


def _too_big() -> BodyTooBig:
    return BodyTooBig(f"the body is bigger than {MOST_BODY_BYTES} bytes", fix="Send the prompts in several requests")


def _parsed(raw: bytes) -> Any:
    try:
        value = json.loads(raw, parse_constant=refuse_constant)
        if HALVES.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:  # a UnicodeError is a ValueError
        raise BodyRefused(f"the body is not JSON ({error})") from error


def _place(location: Sequence[str | int]) -> tuple[str, ...]:
    """The fields and indices of a location, without the names of types that were tried."""
    parts = [str(part) for part in location]
    return tuple(part for part in parts if re.fullmatch(r"\w+", part) and part not in TYPE_NAMES)


OPEN = ("/health", "/ready", "/metrics")
"""Paths that begin so need no key."""

ADMIN = frozenset(
    {
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/update_weights_from_ipc",
        "/update_weight_version",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/end_weight_update",
        "/get_weights_by_name",
    }
)


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys of an engine, and which routes they open, as in SGLang. None: no key is asked for.

    `api_key` guards all routes. `admin_api_key` guards those that change the engine or what runs on it; where both are
    set, those take the admin key only. Health, readiness and metrics are always open, for probes that know no key. A key
    comes as `Authorization: Bearer KEY`.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)

    def allow(self, path: str, authorization: str | None) -> bool:
        """Whether a request to `path` with this header may pass."""
        if path.startswith(OPEN):
            return True
        wanted = (self.admin_api_key or self.api_key) if path in ADMIN else self.api_key
        if not wanted:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), wanted.encode())


class ApiKeyGuard:
    """An ASGI application behind the keys."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and not self._keys.allow(scope["path"], Headers(scope=scope).get("authorization")):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)
