"""The WSGI application of the web page. Threads of the HTTP server receive requests; the daemon's event loop handles them.

Every request gets a response in bounded time: the content, or an error status with one sentence. At most `MOST_AT_ONCE` requests wait for the
event loop; further ones get status 503. Text of models and users is sent as JSON and shown in text nodes, under a policy that allows only
the page's own script (`content_security_policy`). The parameter `who` identifies the caller of a request.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import functools
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Iterable
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs

from controllers.api.edge.access import NOBODY_IS_TOLD_APART, Caller, acting_as
from controllers.api.edge.errors import NotFound
from gcore.errors import GcoreError, StoreUnavailable

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from controllers.web.content import PageContent, ServedPicture, Tree

log = logging.getLogger(__name__)
MOST_AT_ONCE = 8
ANSWER_S = 10.0
"""Timeout of a request in seconds."""

UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PICTURE = re.compile(r"pictures/((?:evaluation-)?[0-9]{1,18}-[0-9]{1,18})/([0-9a-f]{64})", re.ASCII)
"""Path of a picture below that of a job: its folder of samples and its SHA-256."""

MOST_DIGITS = 18

SAFE = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]

Answer: TypeAlias = "Tree | list[Tree] | ServedPicture"
Who = Callable[["WSGIEnvironment"], Caller]
"""Identifies the caller of a request."""


class PageApp:
    """The WSGI application of the page. `make_content`: called at the first request; the result builds the JSON, in the event
    loop `loop` of the daemon. `who`: identifies the caller of a request."""

    def __init__(
        self,
        make_content: Callable[[], PageContent],
        loop: asyncio.AbstractEventLoop,
        who: Who = lambda environ: NOBODY_IS_TOLD_APART,
    ) -> None:
        self._make_content = make_content
        self._loop = loop
        self._who = who
        self._turns = threading.BoundedSemaphore(MOST_AT_ONCE)

    @functools.cached_property
    def _shown(self) -> PageContent:
        return self._make_content()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Handle one HTTP request (PEP 3333)."""
        path = environ["PATH_INFO"]
        if path == "/":
            text, policy = load_page()
            start_response("200 OK", [("Content-Type", "text/html; charset=utf-8"), policy, *SAFE])
            return [text]
        question = self._question(path, environ.get("QUERY_STRING", ""))
        if question is None:
            return _answer(
                start_response, "404 Not Found", {"error": "Not found. Available paths: /, /metrics, /targets."}
            )
        if not self._turns.acquire(blocking=False):
            said = "Too many concurrent requests. Retry in a second."
            return _answer(start_response, "503 Service Unavailable", {"error": said})
        try:
            status, tree = self._ask(question, self._who(environ))
        finally:
            self._turns.release()
        return _answer(start_response, status, tree)

    def _question(self, path: str, query: str) -> Callable[[], Coroutine[Any, Any, Answer]] | None:
        """The method of `PageContent` that answers a path; None for an unknown path."""
        if path == "/page/jobs":
            return self._shown.cluster
        if path == "/targets":
            return self._shown.targets
        place, _, rest = path.removeprefix("/page/jobs/").partition("/")
        if not path.startswith("/page/jobs/") or not UID.fullmatch(place):
            return None
        if rest == "slots":
            return functools.partial(self._shown.slots, place)
        if rest == "pictures":
            step = parse_number(query, "step")
            return functools.partial(self._shown.pictures, place, None if step < 0 else step)
        if picture := PICTURE.fullmatch(rest):
            return functools.partial(self._shown.picture, place, *picture.groups())
        if rest == "":
            return functools.partial(self._shown.job, place, parse_number(query, "after"))
        return None

    def _ask(self, question: Callable[[], Coroutine[Any, Any, Answer]], caller: Caller) -> tuple[str, Answer]:
        """Run `question` in the daemon's event loop on behalf of `caller`; return the HTTP status and the JSON."""
        answering = _for(caller, question)
        try:
            asked = asyncio.run_coroutine_threadsafe(answering, self._loop)
        except RuntimeError:  # The daemon is shutting down.
            answering.close()
            return "503 Service Unavailable", {"error": "This controller is shutting down. Use another controller."}
        try:
            return "200 OK", asked.result(ANSWER_S)
        except NotFound as error:
            return "404 Not Found", {"error": str(error)}
        except StoreUnavailable as error:
            return "503 Service Unavailable", {"error": str(error)}
        except (TimeoutError, concurrent.futures.CancelledError):
            asked.cancel()
            return "504 Gateway Timeout", {"error": "The request timed out. The store or the disk may be slow."}
        except GcoreError as error:
            return "500 Internal Server Error", {"error": str(error)}
        except Exception:
            log.exception("a request of the web page failed")
            return "500 Internal Server Error", {"error": "Internal error. See the log of the controller."}


async def _for(caller: Caller, question: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
    with acting_as(caller):
        return await question()


def parse_number(query: str, name: str) -> int:
    """The number that a query has under `name`; -1 if absent or invalid."""
    said = parse_qs(query, max_num_fields=8).get(name, ["-1"])[-1] if query.count("&") < 8 else "-1"
    return int(said) if said.isascii() and said.isdigit() and len(said) <= MOST_DIGITS else -1


def _answer(start_response: StartResponse, status: str, tree: Answer) -> Iterable[bytes]:
    if isinstance(tree, dict | list):
        start_response(status, [("Content-Type", "application/json"), *SAFE])
        return [json.dumps(tree, separators=(",", ":")).encode()]
    start_response(status, [("Content-Type", tree.media_type), *SAFE])
    return [tree.data]


@functools.cache
def load_page() -> tuple[bytes, tuple[str, str]]:
    """The bytes of `page.html`, and the HTTP header with its content security policy."""
    text = resources.files("controllers.web").joinpath("page.html").read_text(encoding="utf-8")
    return text.encode(), ("Content-Security-Policy", content_security_policy(text))


def content_security_policy(text: str) -> str:
    """The content security policy: allow the page's own script and style and requests to this controller, and nothing else."""
    scripts, styles = (re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("script", "style"))
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(scripts)}",
            f"style-src {_hashes(styles)}",
            "connect-src 'self'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hashes(texts: Iterable[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in texts)
