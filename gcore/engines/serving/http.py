"""HTTP helpers of engines: parsing and validation of request bodies, the formats of error responses, and API keys.

Large bodies are parsed and validated off the event loop. JSON is parsed strictly: NaN and infinities are rejected, and
so is a body that is nested too deeply. Error responses have the three formats of SGLang (`error_response`).
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
from gcore.media.protocol import BlobError, BlobTooLarge
from gcore.system.files import refuse_constant

BAD_REQUEST = 400
TOO_LARGE = 413
UNAVAILABLE = 503


class BodyRefused(EngineError):
    """The body (or the query) is not what the route accepts."""


class BodyTooBig(EngineError):
    """The body is larger than the engine accepts."""


class ParamsRefused(EngineError):
    """A sampling parameter, or a field of /generate, is unknown or has the wrong type."""


def error_response(error: GcoreError) -> Response:
    """Return the HTTP response for `error`, in one of SGLang's three formats with status 400. The third has status 503 if the
    blob store of the node refused an array of the answer: the same request may succeed later.

    1. The body is not what the route accepts: an object with `object: "error"` and `message`. A body that is too large
       gets the same with status 413.
    2. A sampling parameter is unknown or has the wrong type: `{"error": message}`.
    3. Anything else that cannot be served: `{"error": {"message": message}}`.
    """
    if isinstance(error, BodyTooBig):
        return _whole(str(error), TOO_LARGE, "Content Too Large")
    if isinstance(error, BodyRefused):
        return _whole(str(error), BAD_REQUEST, "Bad Request")
    if isinstance(error, ParamsRefused):
        return JSONResponse({"error": str(error)}, BAD_REQUEST)
    waits = isinstance(error, BlobError) and not isinstance(error, BlobTooLarge)
    return JSONResponse({"error": {"message": str(error)}}, UNAVAILABLE if waits else BAD_REQUEST)


def error_event(error: GcoreError) -> dict[str, Any]:
    """Return `error` as the JSON of a server-sent event, for a stream whose status 200 was already sent."""
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error",
            "code": BAD_REQUEST,
            "retryable": False,
        }
    }


def answer_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that a GcoreError that it raises becomes a response (`error_response`)."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except GcoreError as error:
            return error_response(error)

    return handle


async def route_not_found(request: Request, error: Exception) -> Response:
    """Respond with `{"detail": ...}` to an unknown path, or to a method that the path does not have."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


def _whole(message: str, status: int, kind: str) -> Response:
    return JSONResponse({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)


T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

MOST_BODY_BYTES = 128 * 1024 * 1024
"""Maximum size of a body: about 20 million token IDs. A larger one is refused; if it has a content length, before it
is read.
"""

BIG_BODY_BYTES = 256 * 1024
"""From this size on, a body is parsed and checked off the event loop."""

HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Matches a possible surrogate half: JSON can contain it, but it is not a character and cannot be encoded again."""

TYPE_NAMES = frozenset({"str", "int", "bool", "float", "list", "dict"})


async def read_fields(request: Request, kind: type[B]) -> B:
    """Read the request's JSON body and validate it as the pydantic model `kind`. Raises BodyRefused, BodyTooBig."""
    return await read_body(request, lambda value: checked_body(kind, value))


async def read_body(request: Request, check: Callable[[Any], T]) -> T:
    """Read the request's JSON body and return the result of `check`, which gets the parsed JSON.

    `check` runs in another thread for large bodies. Raises BodyRefused, BodyTooBig, and what `check` raises.
    """
    raw = await _bytes(request)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not raw:
        raise BodyRefused("the body is missing", fix="Send a JSON object, {} if there are no fields")
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise BodyRefused(f"the content type is {media!r}", fix="Send the body as application/json")
    if len(raw) < BIG_BODY_BYTES:
        return check(_parsed(raw))
    return await asyncio.to_thread(lambda: check(_parsed(raw)))


def checked_body(kind: type[B], value: Any) -> B:
    """Validate a parsed body as the pydantic model `kind`. Raises BodyRefused."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise BodyRefused(validation_sentence(error)) from error


def query_seconds(request: Request, name: str) -> float:
    """Return a query parameter in seconds; 0 if missing. Raises BodyRefused if it is not a number, or negative."""
    text = request.query_params.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BodyRefused(f"{name} is {text!r}", fix=f"Give {name} in seconds, at least 0")
    return value


def validation_sentence(error: ValidationError) -> str:
    """Describe the first validation error in one sentence, with the field's path."""
    # In a union every branch reports an error; use the one that got furthest.
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
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MOST_BODY_BYTES:
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
    return BodyTooBig(f"the body is larger than {MOST_BODY_BYTES} bytes", fix="Send the prompts in several requests")


def _parsed(raw: bytes) -> Any:
    try:
        value = json.loads(raw, parse_constant=refuse_constant)
        if HALVES.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:  # a UnicodeError is a ValueError
        raise BodyRefused(f"the body is not JSON ({error})") from error


def _place(location: Sequence[str | int]) -> tuple[str, ...]:
    """Return the fields and indexes of a pydantic error location, without the names of the union's types."""
    parts = [str(part) for part in location]
    return tuple(part for part in parts if re.fullmatch(r"\w+", part) and part not in TYPE_NAMES)


OPEN = ("/health", "/ready", "/metrics")
"""Path prefixes that need no API key."""

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
        "/get_weights_checksum",
    }
)


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The API keys of an engine, and the routes that need them, as in SGLang. None: no key is required.

    `api_key` protects all routes. `admin_api_key` protects those that change the engine or its requests; if both are
    set, these accept only the admin key. Health, readiness and metrics are always open, for probes without a key. A key
    is sent as `Authorization: Bearer KEY`.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)

    def allow(self, path: str, authorization: str | None) -> bool:
        """Whether a request to `path` with this `Authorization` header may be served."""
        if path.startswith(OPEN):
            return True
        wanted = (self.admin_api_key or self.api_key) if path in ADMIN else self.api_key
        if not wanted:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), wanted.encode())


class ApiKeyGuard:
    """ASGI middleware that checks API keys, and responds with 401 without a valid one."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request to the application, or refuse it."""
        if scope["type"] == "http" and not self._keys.allow(scope["path"], Headers(scope=scope).get("authorization")):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)
