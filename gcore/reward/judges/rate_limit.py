"""When the next request to an external judge may be sent from one controller: rate, budget, and streaks of failures.

At most `in_flight` requests are under way, and they start no more often than this controller's share of `requests_per_s` allows (a
token bucket: it fills at the rate, up to `burst_size`; when the rate changes, the time since the last look counts at the smaller of
the two, so no more is done than the rates and one burst allow). No request is sent while the server has asked for time
(`Retry-After`), while it answers no question, while it does not take the key, and while the judge's budget is spent. Requests wait in
turn and fail at nothing: `timeout_s` counts from the moment that one is sent. A wait longer than the rate needs is reported in a
sentence.

Once the key was refused, one request alone is sent every `KEY_AGAIN_S`: a wrong key does not fail one prompt after the other. A
server that answers nothing is asked by one request alone, later and later. Failures in a row of *different* questions are the
server's; one question that always fails says nothing of the others.
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
"""What may be done at once is what the rate allows in so long: timers are late, and what they are late is not to be lost."""

_WHOLE = 1.0 - 1e-9
"""What a deed takes, but for rounding."""


def burst_size(rate: float) -> float:
    """The most that a bucket of this rate, in deeds a second, holds."""
    return max(1.0, rate * BURST_S)


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """`level` deeds might be done at moment `at`; it has filled at `rate`, in deeds a second, until then."""

    rate: float
    level: float
    at: float

    @classmethod
    def full(cls, rate: float, now: float) -> TokenBucket:
        """One that begins now."""
        return cls(rate, burst_size(rate), now)

    def filled(self, rate: float, now: float) -> TokenBucket:
        """As it is now, and of this rate from now on."""
        gained = max(0.0, now - self.at) * min(rate, self.rate)
        return TokenBucket(rate, min(burst_size(rate), self.level + gained), max(now, self.at))

    @property
    def wait_s(self) -> float:
        """Seconds until the next deed may be done, if the rate stays."""
        return 0.0 if self.level >= _WHOLE else (1.0 - self.level) / self.rate

    def taken(self) -> TokenBucket:
        """After a deed. Raises ValueError if it must wait."""
        if self.wait_s > 0:
            raise ValueError(f"nothing may be done for {self.wait_s:g} s")
        return TokenBucket(self.rate, max(0.0, self.level - 1.0), self.at)


LOOK_AGAIN_S = 1.0
"""The longest wait until it is looked again whether the gate is open: shares and costs change."""

KEY_AGAIN_S = 60.0

LONGEST_HOLD_S = 60.0
"""A server is not waited for longer, whatever it asks for."""

FIRST_AWAY_S = 1.0
"""Until a server that answers nobody is asked again: twice as long each time, up to `LONGEST_HOLD_S`."""

TOLD_AWAY_S = 10.0
"""That a server answers nobody is told after so long: many a one is back before."""

Cause = Literal["pace", "server", "away", "key", "cost"]
"""Why the next request is held back."""


class JudgeRequestObserver(Protocol):
    """Is told what becomes of the requests to a judge, by its name. It neither waits nor raises."""

    def held(self, judge: str, cause: Cause, seconds: float) -> None:
        """The next request was held back for so long."""
        ...

    def waits(self, judge: str, why: str) -> None:
        """The next request waits, and why; nothing: it does not, or only for its turn."""
        ...

    def trouble(self, judge: str, topic: str, sentence: str) -> None:
        """To be told to people, once."""
        ...


class Budget(Protocol):
    """The spending of the whole job on a judge."""

    def overdrawn(self, judge: str) -> str:
        """Why nothing more may be spent on a judge; nothing if it may."""
        ...

    def note(self, judge: str, tokens_in: int, tokens_out: int) -> None:
        """A request was answered, and is paid for."""
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    cause: Cause
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Away:
    """A server that answers nobody: since when, and until when it is left alone."""

    why: str
    since: float
    until: float
    delay_s: float
    told: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.why}; no question is answered, and one is tried every {self.delay_s:g} s"

    def again(self, why: str, now: float) -> _Away:
        """It did not answer again."""
        delay_s = min(2 * self.delay_s, LONGEST_HOLD_S)
        return replace(self, why=why, until=now + delay_s, delay_s=delay_s)


class RateLimiter:
    """Rate limit of one judge, on one controller. Mutable; one event loop."""

    def __init__(
        self,
        judge: str,
        spec: ExternalJudge,
        purse: Budget,
        told: JudgeRequestObserver,
        clock: Clock,
        peers: Callable[[], int] = lambda: 1,
    ) -> None:
        """`peers`: how many controllers ask now, this one included."""
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
        """Why the key is not taken, as the server says."""
        self._away: _Away | None = None
        """That the server answers nobody."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until a request may be sent, which is under way as long as this is held."""
        async with self._places, AsyncExitStack() as line:
            await line.enter_async_context(self._line)
            await self._opened()
            if not self._refused and self._away is None:
                await line.aclose()  # otherwise the next waits for what becomes of this one
            yield

    def hold(self, seconds: float) -> None:
        """The server wants to be left alone for so long."""
        seconds = min(max(seconds, 0.0), LONGEST_HOLD_S)
        self._held_until = max(self._held_until, self._clock.monotonic() + seconds)

    def refuse(self, why: str) -> None:
        """The server does not take the key. `why`: a sentence."""
        if not self._refused:
            self._told.trouble(self._judge, "key", why)
        self._refused = why
        self._held_until = self._clock.monotonic() + KEY_AGAIN_S

    def accepted(self) -> None:
        """The server has answered, so it takes the key."""
        if self._refused:
            self._refused, self._held_until = "", self._clock.monotonic()
            self._told.trouble(self._judge, "key", f"judge {self._judge!r} takes the key again")

    def away(self, why: str) -> None:
        """The server answers nobody. `why`: a clause of the last who asked. Those who had asked before it was seen change nothing."""
        now = self._clock.monotonic()
        if self._away is None:
            self._away = _Away(why, since=now, until=now + FIRST_AWAY_S, delay_s=FIRST_AWAY_S)
        elif now >= self._away.until:
            self._away = self._away.again(why, now)
            if not self._away.told and now - self._away.since >= TOLD_AWAY_S:
                self._away = replace(self._away, told=True)
                self._told.trouble(self._judge, "away", f"{why}; no question is answered, and all wait until one is")

    def answered(self) -> None:
        """The server is there, whatever it said."""
        if self._away is not None and self._away.told:
            self._told.trouble(self._judge, "away", f"judge {self._judge!r} answers again")
        self._away = None

    @property
    def is_away(self) -> bool:
        """Whether the server answers nobody."""
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
        """Why the next request may not be sent now, and for how long at least."""
        now = self._clock.monotonic()
        self._bucket = self._bucket.filled(self._share, now)
        if why := self._purse.overdrawn(self._judge):
            return _Held("cost", LOOK_AGAIN_S, why)
        if now < self._held_until:
            rest = self._held_until - now
            if self._refused:
                return _Held("key", rest, f"{self._refused}; it is asked again every {KEY_AGAIN_S:g} s")
            return _Held("server", rest, f"the server of judge {self._judge!r} has asked for time")
        if self._away is not None and now < self._away.until:
            return _Held("away", self._away.until - now, self._away.sentence)
        if wait := self._bucket.wait_s:
            return _Held("pace", wait)
        return None


class FailureStreak:
    """Counts different questions that failed with no answer between them. Mutable."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failed: set[str] = set()

    def failed(self, question: str) -> bool:
        """Whether so many have failed by now that it is not theirs."""
        if len(self._failed) < self._most:
            self._failed.add(question)
        return len(self._failed) >= self._most

    def ended(self) -> None:
        """One did not fail."""
        self._failed.clear()
