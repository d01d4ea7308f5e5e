"""From the bytes of a request to a checked object: the limit on bytes, the content type, JSON, the fields.

Big bodies are parsed and checked off the event loop. JSON is read strictly: NaN and infinities are not numbers, and what
nests too deeply to be parsed is refused like any other nonsense.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from gcore.rollout.engine.refusals import BodyRefused, BodyTooBig

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
MOST_BODY_BYTES = 128 * 1024 * 1024
"""A bigger body is refused, before it is read where its length is told: about 20 million token ids."""
BIG_BODY_BYTES = 256 * 1024
"""A body from this size on is parsed and checked off the event loop."""
HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""What may be half of a surrogate pair: JSON can say it, but it is no character, and nothing could encode it again."""
TYPE_NAMES = frozenset({"str", "int", "bool", "float", "list", "dict"})


async def read(request: Request, check: Callable[[Any], T]) -> T:
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


def checker(kind: type[B]) -> Callable[[Any], B]:
    """A check that reads fields leniently and ignores those it does not know, as SGLang does on administrative routes."""

    def check(value: Any) -> B:
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            raise BodyRefused(sentence(error)) from error

    return check


def seconds(request: Request, name: str) -> float:
    """A query parameter of seconds; 0 where it is not given. Raises BodyRefused for what is no number, or negative."""
    text = request.query_params.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BodyRefused(f"{name} is {text!r}", fix=f"Give {name} in seconds, at least 0")
    return value


def sentence(error: ValidationError) -> str:
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
        value = json.loads(raw, parse_constant=_no_constant)
        if HALVES.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:  # a UnicodeError is a ValueError
        raise BodyRefused(f"the body is not JSON ({error})") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _place(location: Sequence[str | int]) -> tuple[str, ...]:
    """The fields and indices of a location, without the names of types that were tried."""
    parts = [str(part) for part in location]
    return tuple(part for part in parts if re.fullmatch(r"\w+", part) and part not in TYPE_NAMES)
