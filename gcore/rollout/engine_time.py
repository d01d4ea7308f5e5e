"""Engine utilization: an engine's seconds, divided into busy, idle, paused and asleep, as counters for metrics.

gcore's engines measure the seconds themselves (`EngineTimeMeter`). An SGLang server does not, so they are estimated:
the sum of its inter-token latencies is the number of decoding requests, integrated over time, without prefill. If that
metric is missing too, the mean of the running requests at two readings is assumed for the time in between. SGLang does
not report pauses or sleep; the client that updates its weights or puts it to sleep adds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Doing = Literal["working", "paused", "asleep"]
"""State of an engine. `working` includes an engine that is idle because it has no request."""

PREFIX = "gcore_engine_"


@dataclass(frozen=True, slots=True)
class EngineTimeSums:
    """An engine's seconds since its start until `at` (on its monotonic clock), by state.

    `active_s`: seconds with at least one request. `running_s`: the same, weighted by the number of running requests. A
    row is a place for a request in the engine's batch.

    At any time an engine either works, has nothing to do, is paused (during a weight update), or sleeps. While it works
    each second counts as busy in proportion to the requested rows, `min(1, wanted / rows)`, where `wanted` counts
    running and waiting requests; the rest counts as idle. Busy, idle, paused and asleep seconds therefore add up to the
    elapsed time. Sums only grow, so two readings give the values in between. `prometheus_text` exports them with the
    engine's other metrics. They do not say why an engine is idle.
    """

    at: float
    busy_s: float = 0.0
    idle_s: float = 0.0
    paused_s: float = 0.0
    asleep_s: float = 0.0
    active_s: float = 0.0
    running_s: float = 0.0

    def until(self, now: float, doing: Doing, wanted: int, rows: int) -> EngineTimeSums:
        """Return the sums at `now`, if the engine was in the state `doing` with `wanted` requests since `at`."""
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
    """Measures the time of one engine by state (`EngineTimeSums`).

    One thread writes and any thread may read, because the shared state is replaced and never changed.
    """

    def __init__(self, rows: int, now: float) -> None:
        """`rows`: number of requests that fill the engine's batch. `now`: monotonic seconds."""
        self.rows = rows
        self._state: tuple[EngineTimeSums, Doing, int] = EngineTimeSums(now), "working", 0

    def note(self, doing: Doing, wanted: int, now: float) -> None:
        """Record that the engine is in the state `doing` with `wanted` running and waiting requests from `now` on."""
        sums, before, had = self._state
        if (before, had) != (doing, wanted):
            self._state = sums.until(now, before, had, self.rows), doing, wanted

    def read(self, now: float) -> EngineTimeSums:
        """Return the sums at `now`, in monotonic seconds."""
        sums, doing, wanted = self._state
        return sums.until(now, doing, wanted, self.rows)


def current_activity(*, paused: bool, asleep: bool) -> Doing:
    """Combine the two flags of an engine; `asleep` wins."""
    return "asleep" if asleep else "paused" if paused else "working"


def prometheus_text(sums: EngineTimeSums, *, scale: float = 1.0) -> str:
    """Encode the sums in Prometheus text format. `scale`: seconds to export per second in the sums (simulated clocks)."""
    lines = []
    for name, words in NAMES.items():
        metric, value = f"{PREFIX}{name}", getattr(sums, _FIELDS[name]) * scale
        kind = "gauge" if name == CLOCK else "counter"
        lines.append(f"# HELP {metric} {words}\n# TYPE {metric} {kind}\n{metric} {value!r}\n")
    return "".join(lines)


CLOCK = "clock_seconds"

NAMES = {
    CLOCK: "The engine's monotonic clock when the sums were read.",
    "busy_seconds_total": "Seconds, weighted by the share of the engine's rows in use.",
    "idle_seconds_total": "Seconds, weighted by the share of the engine's rows not in use.",
    "paused_seconds_total": "Seconds in which the engine was paused for a weight update.",
    "asleep_seconds_total": "Seconds in which the engine's memory was released.",
    "active_seconds_total": "Seconds with at least one request.",
    "running_seconds_total": "Seconds with at least one request, weighted by the number of running requests.",
}

_FIELDS = {CLOCK: "at"} | {name: name.removesuffix("econds_total") for name in NAMES if name != CLOCK}
SGLANG = "sglang:"
DECODING = "inter_token_latency_seconds_sum"

ALMOST_S = 1e-3
"""Maximum difference in seconds between the sum of the parts and the elapsed time."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """An engine's metrics at the moment `at`. `running`, `waiting`: current numbers of requests.

    `tokens`, `requests`: tokens generated and sequences requested since the engine's start.

    `sums` None: the engine does not measure its time. It is then estimated from `decoding_s`, SGLang's summed
    inter-token latencies, or less precisely from `running`.
    """

    at: float
    sums: EngineTimeSums | None
    running: float
    waiting: float
    tokens: int
    requests: int
    decoding_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineTime:
    """How an engine spent the time between two readings, in seconds. `tokens`, `requests`: generated and requested in it.

    Busy, idle, paused and asleep seconds add up to the time from `begin` to `end`.
    """

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
    """Parse an engine's metrics in Prometheus text format. Missing metrics are 0.

    `asked`, `answered`: when the request was sent and answered, on the reader's monotonic clock.

    An engine on the same machine has the same clock. If its clock is outside of the interval, the middle of the
    interval is used.
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
    """Compute how an engine spent the time between two readings.

    None if the second reading is not later, or is from another process at the same address. `rows`: number of requests
    that fill the engine's batch; used if the engine does not measure its time.
    """
    passed = other.at - one.at
    if passed <= 0:
        return None
    tokens, requests = max(other.tokens - one.tokens, 0), max(other.requests - one.requests, 0)
    if one.sums is not None and other.sums is not None:
        # The sums show whether it is the same process. Token counts may decrease, because unfinished ones may be corrected.
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
        return None  # another process at the same address
    # A reading between the end of a request and its record may count slightly too much for one state.
    active_s = max(after.active_s - before.active_s, 0.0)
    running_s = max(after.running_s - before.running_s, 0.0)
    least = [max(part, 0.0) for part in parts]  # not all are 0, because they sum to at least the elapsed time
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
    """Parse the metrics of engines, by name, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith((PREFIX, SGLANG)):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            try:
                number = float(value)
            except ValueError:
                continue  # a metric in an unknown format
            if math.isfinite(number):
                found[name] = found.get(name, 0.0) + number
    return found
