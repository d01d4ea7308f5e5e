"""How jobs stand among those that want the cluster's slots, as the API tells of it.

What a job wants and has is read from the store. Who waits, at which place and why, is worked out by the daemon for all of them, once for
each change (`controllers.cluster.ClusterMirror.queue`), and not anew for everybody who asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from controllers.service.claiming import waits_for_slots, with_claim
from controllers.service.records import StoredJobs
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.claims import Queued, Shares

ENDED = frozenset({pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED})


async def stand(jobs: StoredJobs, messages: Sequence[pb.Job], shares: Shares | None, *, quick: bool = False) -> None:
    """Say in each message what the job claims and has of the slots, and at which place it waits for some. `quick`: without that. Raises
    StoreUnavailable."""
    going_on = [message for message in messages if message.state not in ENDED]
    claims = await asyncio.gather(*(jobs.claim(message.uid) for message in going_on))
    found = [(message, claim) for message, claim in zip(going_on, claims, strict=True) if claim is not None]
    waiting = [claim for message, claim in found if waits_for_slots(claim.record, shares, message.uid)]
    queue: Mapping[str, Queued] = await jobs.queue(*waiting) if waiting and not quick else {}
    for message, claim in found:
        with_claim(message, claim.record, shares, queue)
