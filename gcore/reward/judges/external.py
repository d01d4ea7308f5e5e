"""Client for an external judge with OpenAI's chat completions API.

The client sends one request per answer, each with its own seed. It sends only fields that every server supports. A
server that does not answer, is overloaded (429) or fails (5xx) raises `JudgeAway`, and requests pause for the delay
that the server asks for. A server that refuses the question raises `JudgeError` with the server's message. If the
server rejects the key (401) or the account is empty (402), requests wait (`gcore.reward.judges.rate_limit`), because
the error does not concern the question. A 403 may concern the question, so it raises `JudgeAway`; several different
questions in a row with 403 count as a rejected key. If several different questions in a row get no answer, that is an
outage, and all requests wait until one succeeds. If only some answers to a question arrive, the client keeps them,
because they are paid for; a retry requests only the missing ones.

Pictures of a question are sent as data URLs (`image_url`). They are read from the files of their blobs and encoded in a
thread, only when the request is about to be sent, so at most `in_flight` requests hold pictures in memory.

Proxies and certificates come from the controller's environment (`HTTPS_PROXY`, `NO_PROXY`, `SSL_CERT_FILE`). Redirects
are not followed, because the key must reach only the configured address. The key comes from the controllers'
environment or a file, and never appears in logs, records or messages; error messages of a server are shown without it.
The cost of a request is known from its response. Requests that are billed without a response (cancelled or timed out)
are not counted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx

from gcore.config.reward import ExternalJudge, Fallback, JudgeSpec
from gcore.errors import DataError
from gcore.reward.api import PictureFile
from gcore.reward.judges.rate_limit import Budget, FailureStreak, JudgeRequestObserver, RateLimiter
from gcore.reward.judges.types import IMAGE_MARK, Answer, JudgeAway, JudgeError, JudgeLate
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all, wait_within
from gcore.types import PictureRef

SEED_BITS = 31
"""Bits of the seeds that are sent; not every server accepts larger ones."""

MOST_TOKENS = 1 << 32
"""Maximum plausible token count of one request; a larger one counts as missing."""

MOST_WORDS = 300
"""Maximum length of a server's error message, in characters."""

RequestFate = Literal["answered", "refused", "key", "away"]
"""Result of a request: answered; refused permanently; key rejected; or unavailable (`away`), so that a retry may help.
"""


class InvalidCompletion(Exception):
    """The response is not a chat completion."""


@dataclass(frozen=True, slots=True)
class JudgeCompletion:
    """A parsed chat completion. `counted`: whether the server reported token counts; without them they are 0."""

    answer: Answer
    counted: bool


def completion_request(
    judge: JudgeSpec, external: ExternalJudge, question: str, seed: int, pictures: Sequence[str] = ()
) -> dict[str, Any]:
    """JSON body of the request for one answer to `question`, sampled with `seed`. `pictures`: URLs of its pictures, one for
    each `IMAGE_MARK`."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": judge.system}] if judge.system is not None else []
    body: dict[str, Any] = {
        "model": external.model,
        "messages": [*messages, {"role": "user", "content": _content(question, pictures)}],
        "temperature": judge.temperature,
        "top_p": judge.top_p,
        "max_tokens": judge.max_new_tokens,
        "seed": seed & ((1 << SEED_BITS) - 1),
        "stream": False,
    }
    return body | ({"stop": list(judge.stop)} if judge.stop else {})


def _content(question: str, pictures: Sequence[str]) -> str | list[dict[str, Any]]:
    """The content of a message: text, or parts of text and pictures, in the order of the question."""
    if not pictures:
        return _sendable(question)
    texts = question.split(IMAGE_MARK)
    shown = [*({"type": "image_url", "image_url": {"url": url}} for url in pictures), None]
    parts: list[dict[str, Any]] = []
    for text, picture in zip(texts, shown, strict=True):
        parts += [{"type": "text", "text": _sendable(text)}] if text.strip() else []
        parts += [] if picture is None else [picture]
    return parts


def picture_url(file: PictureFile) -> str:
    """The data URL of a picture file. Blocks. Raises JudgeAway if it is missing or has changed: its blob is made again."""
    try:
        data = Path(file.path).read_bytes()
    except OSError as error:
        raise JudgeAway(f"cannot read a picture of the question ({error.strerror})", where=file.path) from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise JudgeAway("a picture of the question has other bytes than its SHA-256 says", where=file.path)
    kind = next((kind for kind, start in _FIRST_BYTES.items() if data.startswith(start)), "webp")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


_FIRST_BYTES = {"png": b"\x89PNG", "jpeg": b"\xff\xd8"}


def _sendable(question: str) -> str:
    """`question` with lone surrogates escaped: a template may produce them, but they cannot be sent."""
    return question.encode(errors="backslashreplace").decode()


def classify_status(status: int) -> RequestFate:
    """Classify an HTTP status. 401 (wrong key) and 402 (empty account) are `key`.

    403 is `away`, because it may concern a single question.
    """
    if 200 <= status < 300:
        return "answered"
    if status in (401, 402):
        return "key"
    return "away" if status >= 500 or status in (403, 408, 409, 425, 429) else "refused"


def parse_completion(tree: Any) -> JudgeCompletion:
    """Parse a response's JSON. Raises InvalidCompletion."""
    try:
        choice = tree["choices"][0]
        content = choice["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise InvalidCompletion("it has no choices[0].message") from error
    if not isinstance(content, str | None):
        raise InvalidCompletion("its content is not text")
    usage = tree.get("usage")
    tokens_in, tokens_out = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    answer = Answer(
        text=content or "",
        tokens_in=tokens_in or 0,
        tokens_out=tokens_out or 0,
        truncated=choice.get("finish_reason") == "length",
    )
    return JudgeCompletion(answer, tokens_in is not None and tokens_out is not None)


def error_text(tree: Any, text: str) -> str:
    """Find the error message in a server's response, in any of the usual formats.

    `tree`: the parsed body if it is JSON; `text`: the raw body.
    """
    said = tree.get("error", tree.get("message", tree.get("detail"))) if isinstance(tree, Mapping) else None
    said = said.get("message", said) if isinstance(said, Mapping) else said
    return " ".join((text if said is None else str(said)).split())[:MOST_WORDS]


def retry_after_s(value: str | None, wall: float) -> float | None:
    """Seconds from the header `Retry-After`, which contains seconds or a date; None if it is absent or invalid.

    `wall`: now, in seconds since the epoch.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - wall
        except (ValueError, OverflowError):
            return None
    return seconds if 0 <= seconds < float("inf") else 0.0 if seconds < 0 else None


def _count(usage: Any, name: str) -> int | None:
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MOST_TOKENS else None


LARGEST_ANSWER_BYTES = 1 << 20
LONGEST_KEY = 8192
"""Maximum length of a key file, in bytes."""

BUSY_S = 1.0
"""Delay in seconds after a 429 without `Retry-After`."""

CONNECT_S = 10.0
"""Maximum timeout of a connection attempt, in seconds."""

MOST_DENIED = 3
"""Number of distinct questions in a row with status 403 after which the key counts as rejected."""

MOST_AWAY = 3
"""Number of distinct questions in a row without an answer after which the server counts as unavailable."""

_LOGIN = re.compile(r"//[^/@\s]+@")

MOST_KEPT = 4096
"""Maximum number of answers kept until the other answers to their question arrive."""


OpenPictures = Callable[[tuple[PictureRef, ...]], contextlib.AbstractAsyncContextManager[tuple[PictureFile, ...]]]
"""Yields the files of a question's pictures on this machine, which stay there until the block ends. Raises JudgeError."""


class _Question(NamedTuple):
    """A question, with the files of its pictures."""

    text: str
    files: tuple[PictureFile, ...]

    @property
    def key(self) -> str:
        """What tells it from other questions."""
        return "\n".join((*(one.sha256 for one in self.files), self.text))


class AnswerTooLarge(Exception):
    """A response exceeds the size limit."""


class QuestionForbidden(JudgeAway):
    """The server responded with 403; the reason may be the question or the key."""


def judge_key(judge: JudgeSpec, environ: Mapping[str, str], where: str) -> str | None:
    """Read the judge's API key from `environ` or from a file on this node; None if the judge needs none.

    `where`: key of the judge's section in messages. Raises DataError.
    """
    if judge.external is None or judge.external.key_reference is None:
        return None
    kind, _, name = judge.external.key_reference.partition(":")
    if kind == "file":
        return _key_in(Path(name), judge.name, f"{where}.external.key")
    field = f"{where}.external.{'key_env' if judge.external.key is None else 'key'}"
    key = environ.get(name, "").strip()
    if not key:
        raise DataError(
            f"judge {judge.name!r} needs a key, but the environment variable {name} is not set here",
            where=field,
            fix=f"Set {name} for the controllers of all nodes, and restart them",
        )
    if not (key.isascii() and key.isprintable()):
        raise DataError(
            f"the environment variable {name} is not a valid key: it contains characters not allowed in a header",
            where=field,
            fix=f"Set {name} to the key only",
        )
    return key


def new_client(
    judge: JudgeSpec, key: str | None, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """HTTP client for a judge. Raises DataError for an address, proxies or certificates that do not work here."""
    assert judge.external is not None
    try:
        if not httpx.URL(judge.external.url).host:  # requests detect an invalid host name
            raise ValueError("its address has no host")
        return httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(judge.timeout_s, connect=min(CONNECT_S, judge.timeout_s), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=judge.external.in_flight),
            follow_redirects=False,
            trust_env=True,
            transport=transport,
        )
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:  # OSError includes errors of SSL
        raise DataError(
            f"no client for judge {judge.name!r} can be created ({_without_login(str(error)) or type(error).__name__})",
            where=judge.external.url,
            fix="Correct external.url, or HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR of the "
            "controllers",
        ) from error


def _key_in(file: Path, judge: str, where: str) -> str:
    """Read the API key from `file`. Raises DataError, also if all users may access the file."""
    fix = "Write only the key into it, on every node, readable by the controllers' user only"
    try:
        with file.open("rb") as opened:
            key = opened.read(LONGEST_KEY + 1).decode("ascii").strip()
            mode = os.fstat(opened.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise DataError(
            f"the API key of judge {judge!r} cannot be read from {file} ({why})", where=where, fix=fix
        ) from error
    if mode & 0o007:
        raise DataError(
            f"all users have access to {file}, the key of judge {judge!r}", where=where, fix=f"chmod 600 {file}"
        )
    if not key or len(key) > LONGEST_KEY or not key.isprintable():
        raise DataError(f"{file} does not contain the key of judge {judge!r}", where=where, fix=fix)
    return key


class ExternalJudgeClient:
    """Sends the questions of one judge. Implements `gcore.reward.judges.types.ChatCall`, with its own timeouts."""

    def __init__(
        self,
        judge: JudgeSpec,
        key: str | None,
        gate: RateLimiter,
        purse: Budget,
        told: JudgeRequestObserver,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        open_pictures: OpenPictures | None = None,
    ) -> None:
        """`open_pictures`: provides the files of pictures; None: the judge sees none."""
        assert judge.external is not None
        self._judge = judge
        self._external: ExternalJudge = judge.external
        self._key = key
        self._gate = gate
        self._purse = purse
        self._told = told
        self._clock = clock
        self._open_pictures = open_pictures
        self._url = self._external.url.rstrip("/") + "/chat/completions"
        self._place = urlsplit(self._url).netloc.rpartition("@")[2]
        """Host and port, without credentials."""
        self._kept: OrderedDict[tuple[str, int], Answer] = OrderedDict()
        self._uncounted = False
        self._unanswered = FailureStreak(MOST_AWAY)
        self._denied = FailureStreak(MOST_DENIED)
        """Questions with status 403."""
        self._http = new_client(judge, key, transport)

    async def __call__(
        self, question: str, seeds: Sequence[int], pictures: tuple[PictureRef, ...] = ()
    ) -> tuple[Answer, ...]:
        """Request one answer per seed, each after the rate limiter permits it. Raises JudgeAway, JudgeError."""
        if not pictures:
            return await self._answers(_Question(question, ()), seeds)
        if self._open_pictures is None:
            raise RuntimeError(f"judge {self._judge.name!r} was opened without pictures")
        async with self._open_pictures(pictures) as files:
            return await self._answers(_Question(question, files), seeds)

    async def _answers(self, question: _Question, seeds: Sequence[int]) -> tuple[Answer, ...]:
        # A copy: a concurrent call with the same question may remove the kept answers.
        key = question.key
        have = {seed: self._kept[key, seed] for seed in seeds if (key, seed) in self._kept}
        missing = [seed for seed in dict.fromkeys(seeds) if seed not in have]
        # Wait for all requests, even if one fails: the others are paid for.
        asking = [asyncio.ensure_future(self._one(question, seed)) for seed in missing]
        try:
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
        finally:
            await cancel_all(asking)
        have |= {seed: one for seed, one in zip(missing, outcomes, strict=True) if isinstance(one, Answer)}
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            self._kept |= {(key, seed): answer for seed, answer in have.items()}
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            raise next((one for one in failures if not isinstance(one, JudgeAway)), failures[0])
        for seed in seeds:
            self._kept.pop((key, seed), None)
        return tuple(have[seed] for seed in seeds)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _one(self, question: _Question, seed: int) -> Answer:
        while True:
            async with self._gate.turn():
                body = await self._body(question, seed)
                try:
                    answer = await self._asked(question.key, body)
                except QuestionForbidden:
                    raise
                except JudgeAway as error:
                    if not self._is_outage(question.key, error):
                        raise
                    answer = None
            if answer is not None:
                return answer

    async def _body(self, question: _Question, seed: int) -> bytes:
        """The body of a request. Raises JudgeAway if a picture cannot be read."""
        if not question.files:
            return _encoded(completion_request(self._judge, self._external, question.text, seed))

        def encode() -> bytes:
            urls = [picture_url(file) for file in question.files]
            return _encoded(completion_request(self._judge, self._external, question.text, seed, urls))

        return await asyncio.to_thread(encode)

    def _is_outage(self, question: str, error: JudgeAway) -> bool:
        """Count an unanswered question. Return whether there is an outage, in which the question waits instead of
        failing.
        """
        if isinstance(self._judge.on_error, Fallback):
            return False  # the fallback reward scores the response
        if self._unanswered.failed(question):
            self._gate.away(error.what)
        return self._gate.is_away

    async def _asked(self, question: str, body: bytes) -> Answer | None:
        """Send one request about the question with this key. Return None if the server rejects the key. Raises JudgeAway, JudgeError."""
        try:
            response, raw = await wait_within(self._posted(body), self._judge.timeout_s, self._clock)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise JudgeLate(
                f"judge {self._judge.name!r} did not answer within {self._judge.timeout_s:g} s",
                where=self._url,
                fix="Lower external.in_flight or max_new_tokens, or raise timeout_s",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError, ExceptionGroup) as error:
            # httpx also raises errors of name resolution, proxies and connection attempts.
            raise JudgeAway(
                f"judge {self._judge.name!r} did not answer at {self._place} ({self._hidden(str(error)) or type(error).__name__})",
                where=self._url,
                fix="Check external.url, and that the controllers can reach it",
            ) from error
        except AnswerTooLarge as error:
            self._heard()
            raise JudgeError(
                f"judge {self._judge.name!r} returned a response of more than {LARGEST_ANSWER_BYTES} bytes",
                where=self._url,
                fix="Lower max_new_tokens",
            ) from error
        return self._read(question, response, raw)

    async def _posted(self, body: bytes) -> tuple[httpx.Response, bytes]:
        """Send a request; return the response and its body. Raises AnswerTooLarge."""
        raw = bytearray()
        async with self._http.stream("POST", self._url, content=body, headers=_JSON) as response:
            async for chunk in response.aiter_bytes():
                raw += chunk
                if len(raw) > LARGEST_ANSWER_BYTES:
                    raise AnswerTooLarge
        return response, bytes(raw)

    def _read(self, question: str, response: httpx.Response, raw: bytes) -> Answer | None:
        """Turn a response into an answer, and tell the rate limiter about it. Return None if the server rejects the key.

        Raises JudgeAway, JudgeError.
        """
        status, tree, name = response.status_code, _parsed(raw), self._judge.name
        fate = classify_status(status)
        said = self._hidden(error_text(tree, raw.decode(errors="replace")))
        words = f" (status {status}{f': {said}' if said else ''})"
        if fate in ("key", "refused") or status == 403:
            self._heard()
        if status != 403:
            self._denied.ended()
        if fate == "key" or (status == 403 and self._denied.failed(question)):
            self._gate.refuse(f"judge {name!r} rejects the key{words}; {self._how_to_set()}")
        if fate == "key":
            return None
        if fate == "away":
            asked_for = retry_after_s(response.headers.get("retry-after"), self._clock.wall())
            self._gate.hold(asked_for if asked_for is not None else BUSY_S if status == 429 else 0.0)
            fix = {429: "Lower external.requests_per_s", 403: "Check that the key may use this model"}.get(status)
            failure = QuestionForbidden if status == 403 else JudgeAway
            raise failure(f"judge {name!r} is unavailable{words}", where=self._url, fix=fix)
        if fate == "refused":
            raise JudgeError(
                f"judge {name!r} refuses the request{words}",
                where=self._url,
                fix="Correct external, or the template",
            )
        self._gate.accepted()
        try:
            found = parse_completion(tree)
            self._heard()
        except InvalidCompletion as error:
            raise JudgeAway(
                f"judge {name!r} returned no chat completion ({error})",
                where=self._url,
                fix="Check that external.url is a chat completions API",
            ) from error
        if not found.counted and not self._uncounted:
            self._uncounted = True
            cost = "; its cost is not counted, and most_cost has no effect" if self._external.most_cost else ""
            self._told.trouble(name, "usage", f"judge {name!r} does not report token counts{cost}")
        self._purse.note(name, found.answer.tokens_in, found.answer.tokens_out)
        return found.answer

    def _heard(self) -> None:
        """Record that the server responded."""
        self._unanswered.ended()
        self._gate.answered()

    def _how_to_set(self) -> str:
        reference = self._external.key_reference
        if reference is None:
            return "set external.key_env to its environment variable, or external.key to its file"
        kind, _, name = reference.partition(":")
        return f"{'set' if kind == 'env' else 'correct'} {name} for the controllers, and restart them"

    def _hidden(self, text: str) -> str:
        """`text` without the key, which some servers repeat."""
        return text.replace(self._key, "***") if self._key else text


_JSON = {"Content-Type": "application/json"}


def _encoded(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode(errors="replace")


def _without_login(text: str) -> str:
    """`text` without the user and password in an address, such as a proxy's."""
    return _LOGIN.sub("//***@", text)


def _parsed(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
