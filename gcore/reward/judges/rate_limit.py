"""Rate limiter for requests of one controller to an external judge. Requests also wait for budget, outages and refused keys.

At most `in_flight` requests are pending. They start no faster than this controller's share of `requests_per_s` (a token
bucket: it fills at that rate up to `burst_size`; when the rate changes, the time since the last update counts at the
smaller rate). No request is sent while the server asks for a delay (`Retry-After`), during an outage, while the server
refuses the key, or after the judge's budget is spent. Requests wait in order and do not fail because of the wait:
`timeout_s` starts when a request is sent. A wait that the rate alone does not explain is reported.

After the key was refused, a single request is sent every `KEY_AGAIN_S`, so that a wrong key does not fail prompts.
During an outage a single request is sent with exponential backoff. Failures of several *different* questions in a row
count as an outage of the server; one question that always fails does not affect others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from gcore.config.reward import ExternalJudge
from gcore.system.clock import Clock

BURST_S = 0.1
"""Seconds of the rate that may be sent in one burst, so that late timers do not lose throughput."""

_WHOLE = 1.0 - 1e-9
"""One token, with tolerance for rounding."""


def burst_size(rate: float) -> float:
    """Capacity of a bucket with this rate in requests per second."""
    return max(1.0, rate * BURST_S)


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """Token bucket (one token per request) with `level` tokens at time `at`; it fills at `rate` tokens per second."""

    rate: float
    level: float
    at: float

    @classmethod
    def full(cls, rate: float, now: float) -> TokenBucket:
        """Return a full bucket at time `now` in monotonic seconds."""
        return cls(rate, burst_size(rate), now)

    def filled(self, rate: float, now: float) -> TokenBucket:
        """Return the bucket at time `now`, filled up to then; its rate is `rate` from then on."""
        gained = max(0.0, now - self.at) * min(rate, self.rate)
        return TokenBucket(rate, min(burst_size(rate), self.level + gained), max(now, self.at))

    @property
    def wait_s(self) -> float:
        """Seconds until the next request may start, at the current rate."""
        return 0.0 if self.level >= _WHOLE else (1.0 - self.level) / self.rate

    def taken(self) -> TokenBucket:
        """Return the bucket without the token of one request. Raises ValueError if the request must wait."""
        if self.wait_s > 0:
            raise ValueError(f"the next request must wait for {self.wait_s:g} s")
        return TokenBucket(self.rate, max(0.0, self.level - 1.0), self.at)


LOOK_AGAIN_S = 1.0
"""Maximum seconds before the reasons to wait are checked again: this controller's share of the rate and the job's cost
may have changed."""

KEY_AGAIN_S = 60.0
"""Seconds between the requests that test whether a refused key is accepted again."""

LONGEST_HOLD_S = 60.0
"""Maximum delay in seconds that a server can request."""

FIRST_AWAY_S = 1.0
"""First retry delay during an outage, in seconds; it doubles up to `LONGEST_HOLD_S`."""

TOLD_AWAY_S = 10.0
"""Seconds of an outage before it is reported; many are shorter."""

Cause = Literal["pace", "server", "away", "key", "cost"]
"""Why the next request waits: the rate, a delay that the server asked for, an outage, a refused key, or the spent budget.
"""


class JudgeRequestObserver(Protocol):
    """Gets a call when a request waits or a server has a problem; `judge` is its name. Methods neither block nor raise."""

    def held(self, judge: str, cause: Cause, seconds: float) -> None:
        """The next request waited for `seconds` because of `cause`."""
        ...

    def waits(self, judge: str, why: str) -> None:
        """The next request waits because of the sentence `why`; empty if it does not wait, or only for the rate."""
        ...

    def trouble(self, judge: str, topic: str, sentence: str) -> None:
        """Report to users that a problem began or ended. `topic`: kind of the problem."""
        ...


class Budget(Protocol):
    """Tracks the spending of a whole job on judges, over all controllers."""

    def overdrawn(self, judge: str) -> str:
        """Return why the job may not spend more on `judge`; empty if it may."""
        ...

    def note(self, judge: str, tokens_in: int, tokens_out: int) -> None:
        """Add the cost of an answered request, from its token counts."""
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    cause: Cause
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Away:
    """An outage of a server. `why`: the last error. `told`: whether it was reported to users.

    It began at `since`; no request is sent before `until` (monotonic seconds). `delay_s`: the current retry delay.
    """

    why: str
    since: float
    until: float
    delay_s: float
    told: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.why}; no request succeeds, and one is retried every {self.delay_s:g} s"

    def again(self, why: str, now: float) -> _Away:
        """The outage after one more failed request."""
        delay_s = min(2 * self.delay_s, LONGEST_HOLD_S)
        return replace(self, why=why, until=now + delay_s, delay_s=delay_s)


class RateLimiter:
    """Rate limiter of one judge on one controller. Mutable; belongs to one event loop."""

    def __init__(
        self,
        judge: str,
        spec: ExternalJudge,
        purse: Budget,
        told: JudgeRequestObserver,
        clock: Clock,
        peers: Callable[[], int] = lambda: 1,
    ) -> None:
        """`purse`: the job's budget. `told`: gets the waits and problems.

        `peers` returns the number of controllers that send requests, including this one. They share the rate equally.
        """
        self._judge = judge
        self._spec = spec
        self._purse = purse
        self._told = told
        self._clock = clock
        self._peers = peers
        self._bucket = TokenBucket.full(self._share, clock.monotonic())
        self._places = asyncio.Semaphore(spec.in_flight)
        self._line = asyncio.Lock()
        self._held_until = clock.monotonic()
        self._refused = ""
        """The server's reason for refusing the key, or empty."""
        self._away: _Away | None = None
        """The current outage, or None."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until a request may be sent. The request is pending while the context is open."""
        async with self._places, AsyncExitStack() as line:
            await line.enter_async_context(self._line)
            await self._opened()
            if not self._refused and self._away is None:
                await line.aclose()  # otherwise the next request waits for the result of this one
            yield

    def hold(self, seconds: float) -> None:
        """Record that the server asks for a delay; no request is sent for `seconds`."""
        seconds = min(max(seconds, 0.0), LONGEST_HOLD_S)
        self._held_until = max(self._held_until, self._clock.monotonic() + seconds)

    def refuse(self, why: str) -> None:
        """Record that the server refuses the key; one request is sent per `KEY_AGAIN_S` from now on. `why`: a sentence."""
        if not self._refused:
            self._told.trouble(self._judge, "key", why)
        self._refused = why
        self._held_until = self._clock.monotonic() + KEY_AGAIN_S

    def accepted(self) -> None:
        """Record that the server answered a request and therefore accepts the key."""
        if self._refused:
            self._refused, self._held_until = "", self._clock.monotonic()
            self._told.trouble(self._judge, "key", f"judge {self._judge!r} accepts the key again")

    def away(self, why: str) -> None:
        """Record a failed request during an outage.

        `why`: the error. Failures of requests sent before the outage was detected are ignored.
        """
        now = self._clock.monotonic()
        if self._away is None:
            self._away = _Away(why, since=now, until=now + FIRST_AWAY_S, delay_s=FIRST_AWAY_S)
        elif now >= self._away.until:
            self._away = self._away.again(why, now)
            if not self._away.told and now - self._away.since >= TOLD_AWAY_S:
                self._away = replace(self._away, told=True)
                self._told.trouble(self._judge, "away", f"{why}; no request succeeds, and all wait until one does")

    def answered(self) -> None:
        """Record that the server responded, with any result; this ends an outage."""
        if self._away is not None and self._away.told:
            self._told.trouble(self._judge, "away", f"judge {self._judge!r} answers again")
        self._away = None

    @property
    def is_away(self) -> bool:
        """Whether there is an outage."""
        return self._away is not None

    @property
    def _share(self) -> float:
        return self._spec.requests_per_s / max(1, self._peers())

    async def _opened(self) -> None:
        try:
            while (held := self._held()) is not None:
                self._told.waits(self._judge, held.why)
                began = self._clock.monotonic()
                try:
                    await self._clock.sleep(min(held.seconds, LOOK_AGAIN_S))
                finally:
                    self._told.held(self._judge, held.cause, self._clock.monotonic() - began)
        finally:
            self._told.waits(self._judge, "")
        self._bucket = self._bucket.taken()

    def _held(self) -> _Held | None:
        """Return why the next request may not be sent now, and the minimum wait in seconds; None if it may be sent."""
        now = self._clock.monotonic()
        self._bucket = self._bucket.filled(self._share, now)
        if why := self._purse.overdrawn(self._judge):
            return _Held("cost", LOOK_AGAIN_S, why)
        if now < self._held_until:
            rest = self._held_until - now
            if self._refused:
                return _Held("key", rest, f"{self._refused}; a request is retried every {KEY_AGAIN_S:g} s")
            return _Held("server", rest, f"the server of judge {self._judge!r} asked for a delay")
        if self._away is not None and now < self._away.until:
            return _Held("away", self._away.until - now, self._away.sentence)
        if wait := self._bucket.wait_s:
            return _Held("pace", wait)
        return None


class FailureStreak:
    """Counts the different questions that failed since the last success. `most`: number that indicates an outage."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failed: set[str] = set()

    def failed(self, question: str) -> bool:
        """Record a failed question. Return whether enough questions failed to blame the server."""
        if len(self._failed) < self._most:
            self._failed.add(question)
        return len(self._failed) >= self._most

    def ended(self) -> None:
        """Record a success."""
        self._failed.clear()
