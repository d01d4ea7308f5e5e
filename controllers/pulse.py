"""Whether an engine gets anywhere with what it was asked: found by its answers, not by whether it lives. Pure.

A sign is any answer, also to a question that is put only for one (`probe_s` after the last). An engine that owes something and
gives no sign for `silent_s` is silent: it is left, what it was asked goes to others, and it is asked on, and used again once it
answers. Silent for `watchdog_s` in all, it is hung: to be ended, and not before, since to load a model again may take minutes.

One that gives signs, but of whose requests one ran out of its time, and after that another, without a response in between, gets
nowhere either, and is hung too.

An engine that owes nothing is not asked: 1,000 idle engines cost nothing. Does not ask or end anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

PROBES = 3
"""Questions in the time after which an engine is silent."""
SILENT_PROBE_S = 1.0
"""From one question to a silent engine to the next: it is missed."""
WHOLE_TIME = 0.9
"""A request that fails after this part of its time ran out of it; sooner, the engine refused it, or died."""


@dataclass(frozen=True, slots=True)
class EnginePatience:
    """In seconds."""

    silent_s: float = 30.0
    watchdog_s: float = 120.0
    request_s: float = 120.0
    """The longest wait for the answer to one request."""

    @property
    def probe_s(self) -> float:
        """Between two questions, and the longest wait for the answer to one."""
        return self.silent_s / PROBES


class Verdict(Enum):
    """How an engine is."""

    WELL = "well"
    SILENT = "silent"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What was heard of one engine; monotonic seconds.

    `sign`: its last answer, or when it was given work after it had none. `silent`: from that verdict on until it answers.
    `ran_out`: when a request first ran out of time since its last response. `stuck`: one that was begun after that did too.
    """

    sign: float
    silent: bool = False
    ran_out: float | None = None
    stuck: bool = False

    def begins(self, now: float) -> Pulse:
        """It is given work, after it had none. That is no sign of one that is silent."""
        return self if self.silent else replace(self, sign=now)

    def answers(self, now: float) -> Pulse:
        """It has answered something that is no response."""
        return replace(self, sign=now, silent=False)

    def responds(self, now: float) -> Pulse:
        """It has made responses."""
        return Pulse(now)

    def fails(self, patience: EnginePatience, begun: float, now: float) -> Pulse:
        """A request for responses that was begun at `begun` came to nothing."""
        if now - begun < WHOLE_TIME * patience.request_s:
            return self
        if self.ran_out is None:
            return replace(self, ran_out=now)
        return replace(self, stuck=self.stuck or begun >= self.ran_out)

    def in_vain(self, asked: float) -> Pulse:
        """What it was asked at `asked`, apart from responses, was not answered: until it answers, it owes something."""
        return self if self.silent else replace(self, sign=max(self.sign, asked), silent=True)

    def look(self, patience: EnginePatience, now: float, *, busy: bool) -> Pulse:
        """Itself, silent if that is found now. `busy`: whether it has requests for responses."""
        return replace(self, silent=True) if busy and now - self.sign >= patience.silent_s else self

    def wants_probe(self, patience: EnginePatience, now: float, probed: float, *, busy: bool) -> bool:
        """Whether it is time to ask how it is, if nobody is asking. `probed`: when it was last asked."""
        if self.silent:
            return now - probed >= min(SILENT_PROBE_S, patience.probe_s)
        return busy and now - max(self.sign, probed) >= patience.probe_s

    def verdict(self, patience: EnginePatience, now: float) -> Verdict:
        """How it is at `now`."""
        if self.stuck or (self.silent and now - self.sign >= patience.watchdog_s):
            return Verdict.HUNG
        return Verdict.SILENT if self.silent else Verdict.WELL

    def why(self, patience: EnginePatience, now: float) -> str:
        """What is wrong with it, for people; nothing yet of one that may just have died, which others will tell."""
        if self.stuck:
            return f"answers, but no request within {patience.request_s:g} s, twice in a row; it is ended, and another started"
        if self.verdict(patience, now) is Verdict.HUNG:
            return f"has answered nothing for {patience.watchdog_s:g} s; it is ended, and another started"
        if self.silent and now - self.sign >= patience.silent_s:
            return f"has answered nothing for {patience.silent_s:g} s; its requests go to others, and it is asked on"
        return ""
