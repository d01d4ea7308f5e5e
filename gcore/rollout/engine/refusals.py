"""The shapes in which a request is refused: SGLang's, so that a client reads one kind of answer.

There are three, all of them status 400. The body is not what the route takes at all: an object with `object: "error"`
and the sentence at the top. A sampling parameter is unknown or of another type: `{"error": sentence}`. Everything else
that cannot be served: `{"error": {"message": sentence}}`. A body that is too big is a 413 of the first kind. Routes that
are not there, and methods that a route does not have, answer `{"detail": ...}`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gcore.errors import EngineError, GcoreError

BAD_REQUEST = 400
TOO_LARGE = 413


class BodyRefused(EngineError):
    """The body (or the query) is not what the route takes."""


class BodyTooBig(EngineError):
    """The body is bigger than the engine reads."""


class ParamsRefused(EngineError):
    """A sampling parameter, or a field of /generate, is unknown or of another type."""


def refusal(error: GcoreError) -> Response:
    """The answer to a request that is refused because of `error`."""
    if isinstance(error, BodyTooBig):
        return _whole(str(error), TOO_LARGE, "Content Too Large")
    if isinstance(error, BodyRefused):
        return _whole(str(error), BAD_REQUEST, "Bad Request")
    if isinstance(error, ParamsRefused):
        return JSONResponse({"error": str(error)}, BAD_REQUEST)
    return JSONResponse({"error": {"message": str(error)}}, BAD_REQUEST)


def streamed_refusal(error: GcoreError) -> dict[str, Any]:
    """The same as a part of a stream, which has begun with status 200."""
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error",
            "code": BAD_REQUEST,
            "retryable": False,
        }
    }


def refusing(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The handler, whose errors are answers."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except GcoreError as error:
            return refusal(error)

    return handle


async def no_such_route(request: Request, error: Exception) -> Response:
    """For starlette's own refusals: an unknown path, a method that the path does not have."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


def _whole(message: str, status: int, kind: str) -> Response:
    return JSONResponse({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)
