"""When the daemon's certificates end, and those of the store's members, shown as metrics: a cluster whose certificates ended talks to nobody
any more.

They are looked at again and again, for files are replaced while a daemon runs. Does not renew anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gcore.clock import Clock
from gcore.errors import UsageError
from gcore.metrics import Metrics
from gcore.store.reference import StoreRef
from gcore.store.shown_certificates import shown_ends
from gcore.tls.material import Watched

LOOK_EVERY_S = 60.0


async def watch_certificates(watched: Watched | None, store: StoreRef, metrics: Metrics, clock: Clock) -> None:
    """For ever. `watched`: the certificate that the daemon shows to callers."""
    while True:
        metrics.certificate_ends.set(min(own_ends(watched, store), default=0.0))
        metrics.show_store_certificates(await shown_ends(store))
        await clock.sleep(LOOK_EVERY_S)


def own_ends(watched: Watched | None, store: StoreRef) -> Iterator[float]:
    """When this process's certificates end: the one for callers, and the one that it shows to the store. What cannot be read in this
    moment is left out."""
    if watched is not None and (pem := watched.pem.cert) is not None:
        yield ends_at(pem)
    if store.tls is not None and store.tls.cert is not None:
        with contextlib.suppress(OSError, UsageError):
            yield ends_at(Path(store.tls.cert).read_bytes())


def ends_at(pem: bytes) -> float:
    """When a certificate ends, in seconds since the epoch. Raises UsageError."""
    from gcore.tls.authority import seen

    return seen(pem).ends.timestamp()
