"""Which jobs there are and how many slots each has, as metrics tell it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from gcore.ledger.claims import Claim, Shares, slots_of
from gcore.ledger.guarded import Stored
from gcore.store.keys import full_name


def jobs_shown(
    claims: Mapping[str, Claim], working: Collection[str], shares: Stored[Shares] | None
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Jobs by state, and slots by job. `working`: the jobs that have slots, or all where nobody shares them out."""
    states = Counter(_state(claim, works=uid in working) for uid, claim in claims.items())
    shared = {} if shares is None else shares.record.jobs
    slots = {
        full_name(claims[uid].name or uid, claims[uid].namespace): len(slots_of(share.granted))
        for uid, share in shared.items()
        if uid in claims
    }
    return states, slots


def _state(claim: Claim, *, works: bool) -> str:
    if works:
        return "running"
    return "paused" if claim.paused else "queued"
