"""What an engine's metrics say of its time, read by whoever keeps the books: two readings make an `EngineTime`. Pure.

gcore's own engines tell sums that they keep themselves (`gcore.rollout.metered`). An SGLang server keeps none, so what it has is taken:
the sum of its inter-token latencies is, for each request, the time from its first token to its last, and so the integral of the requests that
were being decoded, without their prefill; where even that is missing, the requests that run at the two readings are taken to
have run between them. It does not tell pauses or sleep: who brings it weights, or puts it to sleep, knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gcore.rollout import metered
from gcore.rollout.metered import CLOCK, PREFIX, Sums

SGLANG = "sglang:"
DECODING = "inter_token_latency_seconds_sum"
ALMOST_S = 1e-3
"""By so much may an engine's sums differ from its time: they are told as they are added up."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """At one moment. `sums` None: the engine keeps none; then `decoding_s` may say more than `running` does."""

    at: float
    sums: Sums | None
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


def read(text: str, asked: float, answered: float) -> EngineReading:
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
        else Sums(clock, *(found.get(PREFIX + name, 0.0) for name in metered.NAMES if name != CLOCK)),
        running=found.get(f"{SGLANG}num_running_reqs", 0.0),
        waiting=found.get(f"{SGLANG}num_queue_reqs", 0.0),
        tokens=int(found.get(f"{SGLANG}generation_tokens_total", 0.0)),
        requests=int(found.get(f"{SGLANG}num_requests_total", 0.0)),
        decoding_s=found.get(SGLANG + DECODING),
    )


def between(one: EngineReading, other: EngineReading, rows: int) -> EngineTime | None:
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
    one: EngineReading, other: EngineReading, before: Sums, after: Sums, tokens: int, requests: int
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
