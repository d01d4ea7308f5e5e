"""Asks a judge outside of the cluster, through OpenAI's chat completions.

One request an answer, each with its own seed, and only the fields that every server knows. A server that does not answer, has too
much to do (429) or fails (5xx) is `JudgeAway`, and is left alone for as long as it asks; one that refuses the question is
`JudgeError`, in its own words. A key that it does not take (401), or that is not paid for (402), is waited for
(`gcore.reward.judges.rate_limit`): it says nothing of the question. A 403 may, so its question is `JudgeAway`; several questions in a
row are taken for the key's. Where several questions in a row have no answer, all wait until one is answered, because an outage says
nothing of them either. Answers are kept until all answers to their question have come: they are paid for, and the next try asks only
for the others.

Proxies and certificates are those of the controller's environment (`HTTPS_PROXY`, `NO_PROXY`, `SSL_CERT_FILE`). Redirects are not
followed: the key is for one address. The key is in the controllers' environment or in a file, and in nothing that is logged, stored
or said; a server's words of a failure are shown without it. What a request costs is known when its answer is there; what a server
bills without an answer (a request that was cancelled, or came too late) is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from gcore.config.reward import ExternalJudge, Fallback, JudgeSpec
from gcore.errors import DataError
from gcore.reward.judges.rate_limit import Budget, FailureStreak, JudgeRequestObserver, RateLimiter
from gcore.reward.judges.types import Answer, JudgeAway, JudgeError, JudgeLate
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all, wait_within

SEED_BITS = 31
"""Of the seeds that are sent: servers take no larger ones for certain."""

MOST_TOKENS = 1 << 32
"""Of one request that are believed: a server that says more does not say how many there are."""

MOST_WORDS = 300
"""Characters of what a server says of a failure."""

RequestFate = Literal["answered", "refused", "key", "away"]
"""Of a request: there is an answer; it will not be taken however often it is sent; the key is not; it may be taken later."""


class InvalidCompletion(Exception):
    """What came is no chat completion."""


@dataclass(frozen=True, slots=True)
class JudgeCompletion:
    """`counted`: whether the server said how many tokens there are."""

    answer: Answer
    counted: bool


def completion_request(judge: JudgeSpec, external: ExternalJudge, question: str, seed: int) -> dict[str, Any]:
    """What is sent for one answer."""
    messages = [{"role": "system", "content": judge.system}] if judge.system is not None else []
    body: dict[str, Any] = {
        "model": external.model,
        "messages": [*messages, {"role": "user", "content": _sendable(question)}],
        "temperature": judge.temperature,
        "top_p": judge.top_p,
        "max_tokens": judge.max_new_tokens,
        "seed": seed & ((1 << SEED_BITS) - 1),
        "stream": False,
    }
    return body | ({"stop": list(judge.stop)} if judge.stop else {})


def _sendable(question: str) -> str:
    """`question` with half surrogate pairs, which a template may write and no server can be sent, spelt out."""
    return question.encode(errors="backslashreplace").decode()


def classify_status(status: int) -> RequestFate:
    """What a status says. 401: the key is wrong; 402: its account is empty. 403 may be about one question alone."""
    if 200 <= status < 300:
        return "answered"
    if status in (401, 402):
        return "key"
    return "away" if status >= 500 or status in (403, 408, 409, 425, 429) else "refused"


def parse_completion(tree: Any) -> JudgeCompletion:
    """Raises InvalidCompletion."""
    try:
        choice = tree["choices"][0]
        content = choice["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise InvalidCompletion("it has no choices[0].message") from error
    if not isinstance(content, str | None):
        raise InvalidCompletion("its content is no text")
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
    """What a server says of a failure, in whichever shape: `tree` is its body as JSON, if it is that, `text` as it came."""
    said = tree.get("error", tree.get("message", tree.get("detail"))) if isinstance(tree, Mapping) else None
    said = said.get("message", said) if isinstance(said, Mapping) else said
    return " ".join((text if said is None else str(said)).split())[:MOST_WORDS]


def retry_after_s(value: str | None, wall: float) -> float | None:
    """Seconds that the header `Retry-After` asks for, which says seconds or a date; None if it says nothing that can be read."""
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

BUSY_S = 1.0
"""A server that has too much to do and does not say for how long is left alone so long."""

CONNECT_S = 10.0

MOST_DENIED = 3
"""Different questions in a row with a status of 403 that may be about them; what follows is about the key."""

MOST_AWAY = 3
"""Different questions in a row without an answer that may be theirs; what follows is about the server."""

_LOGIN = re.compile(r"//[^/@\s]+@")

MOST_KEPT = 4096
"""Answers that wait for the others to their question."""


class AnswerTooLarge(Exception):
    """An answer is larger than any of a judge."""


class QuestionForbidden(JudgeAway):
    """The server is there, and does not let the question pass: it may be about the question or the key."""


def judge_key(judge: JudgeSpec, environ: Mapping[str, str], where: str) -> str | None:
    """The judge's key, from the environment of this process or a file of its node; None if it needs none. Raises DataError."""
    if judge.external is None or judge.external.key_reference is None:
        return None
    kind, _, name = judge.external.key_reference.partition(":")
    if kind == "file":
        return _key_in(Path(name), judge.name, f"{where}.external.key")
    field = f"{where}.external.{'key_env' if judge.external.key is None else 'key'}"
    key = environ.get(name, "").strip()
    if not key:
        raise DataError(
            f"judge {judge.name!r} needs a key, and the environment variable {name} is not set here",
            where=field,
            fix=f"Set {name} for the controllers of all nodes, and start them again",
        )
    if not (key.isascii() and key.isprintable()):
        raise DataError(
            f"the environment variable {name} holds something that cannot be a key: it has characters that no header takes",
            where=field,
            fix=f"Set {name} to the key alone",
        )
    return key


def new_client(
    judge: JudgeSpec, key: str | None, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """What asks a judge. Raises DataError for an address, proxies or certificates that cannot be used here."""
    assert judge.external is not None
    try:
        if not httpx.URL(judge.external.url).host:  # which may be a name that none can be, as requests find out
            raise ValueError("its address names no host")
        return httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(judge.timeout_s, connect=min(CONNECT_S, judge.timeout_s), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=judge.external.in_flight),
            follow_redirects=False,
            trust_env=True,
            transport=transport,
        )
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:  # OSError: of SSL too
        raise DataError(
            f"judge {judge.name!r} cannot be asked from here ({_without_login(str(error)) or type(error).__name__})",
            where=judge.external.url,
            fix="Correct external.url, or HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR of the "
            "controllers",
        ) from error


def _key_in(file: Path, judge: str, where: str) -> str:
    """The one line of the file. Raises DataError."""
    fix = "Write the key alone into it, on every node, readable by the controllers' user only"
    try:
        with file.open("rb") as opened:
            key = opened.read(LONGEST_KEY + 1).decode("ascii").strip()
            mode = os.fstat(opened.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DataError(
            f"the key of judge {judge!r} cannot be read from {file} ({why})", where=where, fix=fix
        ) from error
    if mode & 0o007:
        raise DataError(f"anybody may read {file}, the key of judge {judge!r}", where=where, fix=f"chmod 600 {file}")
    if not key or len(key) > LONGEST_KEY or not key.isprintable():
        raise DataError(f"{file} does not hold the key of judge {judge!r}", where=where, fix=fix)
    return key


class ExternalJudgeClient:
    """Puts the questions of one judge. Implements `gcore.reward.judges.types.ChatCall`. It times its requests itself."""

    def __init__(
        self,
        judge: JudgeSpec,
        key: str | None,
        gate: RateLimiter,
        purse: Budget,
        told: JudgeRequestObserver,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        assert judge.external is not None
        self._judge = judge
        self._external: ExternalJudge = judge.external
        self._key = key
        self._gate = gate
        self._purse = purse
        self._told = told
        self._clock = clock
        self._url = self._external.url.rstrip("/") + "/chat/completions"
        self._place = urlsplit(self._url).netloc.rpartition("@")[2]
        """Host and port, and nothing that must not be told."""
        self._kept: OrderedDict[tuple[str, int], Answer] = OrderedDict()
        self._uncounted = False
        self._unanswered = FailureStreak(MOST_AWAY)
        self._denied = FailureStreak(MOST_DENIED)
        """Those of status 403."""
        self._http = new_client(judge, key, transport)

    async def __call__(self, question: str, seeds: Sequence[int]) -> tuple[Answer, ...]:
        """One answer a seed; waits as long as the gate is shut. Raises JudgeAway, JudgeError."""
        # A copy: whoever asks the same beside this one takes what was kept with it.
        have = {seed: self._kept[question, seed] for seed in seeds if (question, seed) in self._kept}
        missing = [seed for seed in dict.fromkeys(seeds) if seed not in have]
        # Not all or none: what the others are still asking is paid for.
        asking = [asyncio.ensure_future(self._one(question, seed)) for seed in missing]
        try:
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
        finally:
            await cancel_all(asking)
        have |= {seed: one for seed, one in zip(missing, outcomes, strict=True) if isinstance(one, Answer)}
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            self._kept |= {(question, seed): answer for seed, answer in have.items()}
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            raise next((one for one in failures if not isinstance(one, JudgeAway)), failures[0])
        for seed in seeds:
            self._kept.pop((question, seed), None)
        return tuple(have[seed] for seed in seeds)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _one(self, question: str, seed: int) -> Answer:
        body = completion_request(self._judge, self._external, question, seed)
        while True:
            async with self._gate.turn():
                try:
                    answer = await self._asked(question, body)
                except QuestionForbidden:
                    raise
                except JudgeAway as error:
                    if not self._is_outage(question, error):
                        raise
                    answer = None
            if answer is not None:
                return answer

    def _is_outage(self, question: str, error: JudgeAway) -> bool:
        """Whether a question that had no answer is one of many, and waits."""
        if isinstance(self._judge.on_error, Fallback):
            return False  # nothing is lost, and somebody has said what scores meanwhile
        if self._unanswered.failed(question):
            self._gate.away(error.what)
        return self._gate.is_away

    async def _asked(self, question: str, body: Mapping[str, object]) -> Answer | None:
        """None: the server does not take the key."""
        try:
            response, raw = await wait_within(self._posted(body), self._judge.timeout_s, self._clock)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise JudgeLate(
                f"judge {self._judge.name!r} gave no answer within {self._judge.timeout_s:g} s",
                where=self._url,
                fix="Ask it for less at a time (external.in_flight, max_new_tokens), or give it a larger timeout_s",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError, ExceptionGroup) as error:
            # Besides its own errors httpx lets those of names, of proxies and of several tries to connect through.
            raise JudgeAway(
                f"judge {self._judge.name!r} did not answer at {self._place} ({self._hidden(str(error)) or type(error).__name__})",
                where=self._url,
                fix="See whether its external.url is right, and the controllers reach it",
            ) from error
        except AnswerTooLarge as error:
            self._heard()
            raise JudgeError(
                f"judge {self._judge.name!r} gave an answer of more than {LARGEST_ANSWER_BYTES} bytes",
                where=self._url,
                fix="Lower max_new_tokens",
            ) from error
        return self._read(question, response, raw)

    async def _posted(self, body: Mapping[str, object]) -> tuple[httpx.Response, bytes]:
        """The response, and the bytes of its body. Raises AnswerTooLarge."""
        raw = bytearray()
        async with self._http.stream("POST", self._url, json=body) as response:
            async for chunk in response.aiter_bytes():
                raw += chunk
                if len(raw) > LARGEST_ANSWER_BYTES:
                    raise AnswerTooLarge
        return response, bytes(raw)

    def _read(self, question: str, response: httpx.Response, raw: bytes) -> Answer | None:
        """What a response says. None: the server does not take the key. Raises JudgeAway, JudgeError."""
        status, tree, name = response.status_code, _parsed(raw), self._judge.name
        fate = classify_status(status)
        said = self._hidden(error_text(tree, raw.decode(errors="replace")))
        words = f" (status {status}{f': {said}' if said else ''})"
        if fate in ("key", "refused") or status == 403:
            self._heard()
        if status != 403:
            self._denied.ended()
        if fate == "key" or (status == 403 and self._denied.failed(question)):
            self._gate.refuse(f"judge {name!r} does not take the key{words}; {self._how_to_set()}")
        if fate == "key":
            return None
        if fate == "away":
            asked_for = retry_after_s(response.headers.get("retry-after"), self._clock.wall())
            self._gate.hold(asked_for if asked_for is not None else BUSY_S if status == 429 else 0.0)
            fix = {429: "Lower external.requests_per_s", 403: "See whether the key may use this model"}.get(status)
            failure = QuestionForbidden if status == 403 else JudgeAway
            raise failure(f"judge {name!r} does not answer now{words}", where=self._url, fix=fix)
        if fate == "refused":
            raise JudgeError(
                f"judge {name!r} refuses what it is asked{words}",
                where=self._url,
                fix="Correct external, or the template",
            )
        self._gate.accepted()
        try:
            found = parse_completion(tree)
            self._heard()
        except InvalidCompletion as error:
            raise JudgeAway(
                f"judge {name!r} gave no chat completion ({error})", where=self._url, fix="See what answers there"
            ) from error
        if not found.counted and not self._uncounted:
            self._uncounted = True
            cost = "; what it costs is not counted, and most_cost ends nothing" if self._external.most_cost else ""
            self._told.trouble(name, "usage", f"judge {name!r} does not say how many tokens its answers have{cost}")
        self._purse.note(name, found.answer.tokens_in, found.answer.tokens_out)
        return found.answer

    def _heard(self) -> None:
        """The server is there."""
        self._unanswered.ended()
        self._gate.answered()

    def _how_to_set(self) -> str:
        reference = self._external.key_reference
        if reference is None:
            return "name the environment variable that holds it in external.key_env, or its file in external.key"
        kind, _, name = reference.partition(":")
        return f"{'set' if kind == 'env' else 'correct'} {name} for the controllers, and start them again"

    def _hidden(self, text: str) -> str:
        """`text` without the key, which some servers repeat."""
        return text.replace(self._key, "***") if self._key else text


def _without_login(text: str) -> str:
    """`text` without the user and the password of an address in it, such as a proxy's."""
    return _LOGIN.sub("//***@", text)


def _parsed(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
