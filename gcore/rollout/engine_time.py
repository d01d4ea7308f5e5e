"""Engine time: how an engine's seconds divide into busy, idle, paused and asleep, as sums that metrics report.

gcore's engines keep the sums themselves (`EngineTimeMeter`). An SGLang server keeps none, so they are estimated: the sum of
its inter-token latencies is the integral of the requests that were being decoded, without their prefill; where even
that is missing, the requests that run at two readings are taken to have run between them. SGLang does not report pauses or
sleep: the client that updates its weights, or puts it to sleep, adds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Doing = Literal["working", "paused", "asleep"]
"""An engine that works on nothing is idle."""

PREFIX = "gcore_engine_"


@dataclass(frozen=True, slots=True)
class EngineTimeSums:
    """How an engine's time was spent until `at`, monotonic seconds of its clock, since it began. The caller says what time it is.

    `active_s`: seconds in which there was anything to work on; `running_s`: the same, times the requests that had a row.

    An engine is at one thing at a time: it works on what it was given, has nothing to do, is paused (its weights are
    being changed), or sleeps. While it works it is busy by the share of its rows that are wanted, those that run and
    those that wait for one, `min(1, wanted / rows)`, and idle by the rest; so busy, idle, paused and asleep seconds
    add up to the time that passed. Sums only grow: two readings tell all that was between. They are served as Prometheus
    text (`prometheus_text`) beside the engine's other metrics. Why an engine is idle it does not know.
    """

    at: float
    busy_s: float = 0.0
    idle_s: float = 0.0
    paused_s: float = 0.0
    asleep_s: float = 0.0
    active_s: float = 0.0
    running_s: float = 0.0

    def until(self, now: float, doing: Doing, wanted: int, rows: int) -> EngineTimeSums:
        """With the time until `now`, in which it was `doing` that."""
        passed = now - self.at
        if passed <= 0:
            return self
        if doing == "paused":
            return replace(self, at=now, paused_s=self.paused_s + passed)
        if doing == "asleep":
            return replace(self, at=now, asleep_s=self.asleep_s + passed)
        running = min(wanted, rows)
        busy = passed * (running / rows)
        return replace(
            self,
            at=now,
            busy_s=self.busy_s + busy,
            idle_s=self.idle_s + (passed - busy),
            active_s=self.active_s + (passed if running else 0.0),
            running_s=self.running_s + passed * running,
        )


class EngineTimeMeter:
    """Meter of one engine's time. One thread notes, any may read: what they share is replaced, never changed."""

    def __init__(self, rows: int, now: float) -> None:
        """`rows`: requests that saturate it."""
        self.rows = rows
        self._state: tuple[EngineTimeSums, Doing, int] = EngineTimeSums(now), "working", 0

    def note(self, doing: Doing, wanted: int, now: float) -> None:
        """It is at this from now on."""
        sums, before, had = self._state
        if (before, had) != (doing, wanted):
            self._state = sums.until(now, before, had, self.rows), doing, wanted

    def read(self, now: float) -> EngineTimeSums:
        """Everything until now."""
        sums, doing, wanted = self._state
        return sums.until(now, doing, wanted, self.rows)


def current_activity(*, paused: bool, asleep: bool) -> Doing:
    """What an engine is at that is so."""
    return "asleep" if asleep else "paused" if paused else "working"


def prometheus_text(sums: EngineTimeSums, *, scale: float = 1.0) -> str:
    """As Prometheus reads it. `scale`: seconds that one of the sums' is."""
    lines = []
    for name, words in NAMES.items():
        metric, value = f"{PREFIX}{name}", getattr(sums, _FIELDS[name]) * scale
        kind = "gauge" if name == CLOCK else "counter"
        lines.append(f"# HELP {metric} {words}\n# TYPE {metric} {kind}\n{metric} {value!r}\n")
    return "".join(lines)


CLOCK = "clock_seconds"

NAMES = {
    CLOCK: "The engine's monotonic clock, at which the sums were read.",
    "busy_seconds_total": "Seconds, times the share of the engine's rows that was wanted.",
    "idle_seconds_total": "Seconds, times the share of the engine's rows that nobody wanted.",
    "paused_seconds_total": "Seconds in which it was paused: its weights were being changed.",
    "asleep_seconds_total": "Seconds in which it had given its memory back.",
    "active_seconds_total": "Seconds in which there was anything to work on.",
    "running_seconds_total": "The same, times the requests that were worked on.",
}

_FIELDS = {CLOCK: "at"} | {name: name.removesuffix("econds_total") for name in NAMES if name != CLOCK}
SGLANG = "sglang:"
DECODING = "inter_token_latency_seconds_sum"

ALMOST_S = 1e-3
"""By so much may an engine's sums differ from its time: they are told as they are added up."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """At one moment. `sums` None: the engine keeps none; then `decoding_s` may say more than `running` does."""

    at: float
    sums: EngineTimeSums | None
    running: float
    waiting: float
    tokens: int
    requests: int
    decoding_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineTime:
    """What an engine's time between two readings was, in seconds: busy, idle, paused and asleep add up to the time from `begin` to `end`."""

    begin: float
    end: float
    busy_s: float
    idle_s: float
    paused_s: float
    asleep_s: float
    active_s: float
    running_s: float
    tokens: int
    requests: int


def parse_reading(text: str, asked: float, answered: float) -> EngineReading:
    """Metrics in Prometheus' words, read between two moments of the reader's clock. What is not there is 0.

    An engine of the same machine has the same clock; one whose clock shows a time that cannot be is taken to have answered half-way.
    """
    found = _numbers(text)
    clock = found.get(PREFIX + CLOCK)
    at = (asked + answered) / 2 if clock is None or not asked <= clock <= answered else clock
    return EngineReading(
        at=at,
        sums=None
        if clock is None
        else EngineTimeSums(clock, *(found.get(PREFIX + name, 0.0) for name in NAMES if name != CLOCK)),
        running=found.get(f"{SGLANG}num_running_reqs", 0.0),
        waiting=found.get(f"{SGLANG}num_queue_reqs", 0.0),
        tokens=int(found.get(f"{SGLANG}generation_tokens_total", 0.0)),
        requests=int(found.get(f"{SGLANG}num_requests_total", 0.0)),
        decoding_s=found.get(SGLANG + DECODING),
    )


def time_between(one: EngineReading, other: EngineReading, rows: int) -> EngineTime | None:
    """What was between two readings of one engine; None if the other is not later, or not of the same process.

    `rows`: requests that saturate it, where it does not say how busy it was.
    """
    passed = other.at - one.at
    if passed <= 0:
        return None
    tokens, requests = max(other.tokens - one.tokens, 0), max(other.requests - one.requests, 0)
    if one.sums is not None and other.sums is not None:
        # Its sums say whether it is the same process; of tokens some may be taken back that were told while they were made.
        return _summed(one, other, one.sums, other.sums, tokens, requests)
    if other.tokens < one.tokens or other.requests < one.requests:
        return None
    if one.decoding_s is None or other.decoding_s is None:
        running_s = passed * (one.running + other.running) / 2
    else:
        running_s = max(other.decoding_s - one.decoding_s, 0.0)
    busy = min(running_s / rows, passed)
    active = min(running_s, passed)
    return EngineTime(one.at, other.at, busy, passed - busy, 0.0, 0.0, active, running_s, tokens, requests)


def _summed(
    one: EngineReading, other: EngineReading, before: EngineTimeSums, after: EngineTimeSums, tokens: int, requests: int
) -> EngineTime | None:
    parts = [
        after.busy_s - before.busy_s,
        after.idle_s - before.idle_s,
        after.paused_s - before.paused_s,
        after.asleep_s - before.asleep_s,
    ]
    passed = after.at - before.at
    if passed <= 0 or abs(sum(parts) - passed) > ALMOST_S:
        return None  # it began anew at the same address
    # It may have been asked between the end of a request and its own word of that, and has then told a little too much of one thing.
    active_s = max(after.active_s - before.active_s, 0.0)
    running_s = max(after.running_s - before.running_s, 0.0)
    least = [max(part, 0.0) for part in parts]  # not all of them 0: they add up to what passed, and more
    busy, idle, paused, asleep = (part * (other.at - one.at) / sum(least) for part in least)
    return EngineTime(
        one.at,
        other.at,
        busy,
        idle,
        paused,
        asleep,
        active_s=active_s,
        running_s=running_s,
        tokens=tokens,
        requests=requests,
    )


def _numbers(text: str) -> Mapping[str, float]:
    """By name, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith((PREFIX, SGLANG)):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            try:
                number = float(value)
            except ValueError:
                continue  # somebody else's metric of a shape of its own
            if math.isfinite(number):
                found[name] = found.get(name, 0.0) + number
    return found
