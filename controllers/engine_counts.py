"""What is asked of engines, counted: requests by result, how long they took, and what they brought. Decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from gcore.clock import Clock
from gcore.errors import EngineError, EngineGaveUp, EngineUnreachable
from gcore.metrics import Metrics
from gcore.types import Sample

T = TypeVar("T")
Pool = Literal["rollout", "reward"]


async def counted(
    request: Awaitable[T], metrics: Metrics, clock: Clock, pool: Pool, samples_of: Callable[[T], Sequence[Sample]]
) -> T:
    """What `request` brings. Raises what it raises. `samples_of`: the responses in it; a classifier's scores are none.

    What judges write is no sample; their tokens are counted by the judge.
    """
    metrics.engine_open.labels(pool).inc()
    begun, result = clock.monotonic(), "aborted"  # also of one that whoever asked gives up
    try:
        brought = await request
        samples = samples_of(brought)
        if not any(sample.finish_reason == "abort" for sample in samples):
            result = "ok"
        if pool == "rollout":
            metrics.samples.inc(len(samples))
            metrics.generated_tokens.inc(sum(len(sample.token_ids) for sample in samples))
    except EngineGaveUp:
        raise
    except EngineUnreachable:
        result = "unreachable"
        raise
    except EngineError:
        result = "refused"
        raise
    else:
        return brought
    finally:
        metrics.engine_open.labels(pool).dec()
        metrics.engine_requests.labels(pool, result).inc()
        metrics.engine_seconds.labels(pool).observe(max(clock.monotonic() - begun, 0.0))
