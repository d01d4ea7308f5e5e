"""When the daemon's certificate ends, shown as a metric: a cluster whose certificates ended talks to nobody any more.

It is looked at again and again, for files are replaced while a daemon runs. Does not renew anything.
"""

from __future__ import annotations

from gcore.clock import Clock
from gcore.metrics import Metrics
from gcore.tls.material import Watched

LOOK_EVERY_S = 60.0


async def watch_certificate(watched: Watched, metrics: Metrics, clock: Clock) -> None:
    """For ever."""
    while True:
        pem = watched.pem.cert
        metrics.certificate_ends.set(0.0 if pem is None else ends_at(pem))
        await clock.sleep(LOOK_EVERY_S)


def ends_at(pem: bytes) -> float:
    """When a certificate ends, in seconds since the epoch."""
    from gcore.tls.authority import seen

    return seen(pem).ends.timestamp()
