"""Whose engine an engine is: its node's controller's, or, while that is away, the peer's whom a hash names. Pure.

All engines of a slot are one controller's, and all of the slots that one of them spans: whoever wakes one has to know that the other
sleeps.

While a node's controller is there and about to join, its engines are nobody's. Otherwise whoever joins a large job first would
have all the engines of all the others for a moment: to find out what they serve, and to let them go again.

Two that both believe it for a moment do no harm (`controllers.engines`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from controllers.turns import turn
from gcore.ledger.records import Member
from gcore.worker.records import WorkerRecord


def responsible_for(
    job_uid: str,
    workers: Mapping[str, WorkerRecord],
    members: Mapping[str, Member],
    me: str,
    joining: Collection[str] = (),
    role: Literal["rollout", "reward"] = "rollout",
) -> dict[str, WorkerRecord]:
    """The serving engines of the job that are mine: those of my node, and those of nodes without a member by hash.

    `joining`: nodes whose controller is waited for. An engine of a judge is asked by everybody; who puts it to sleep and wakes it
    is one, found in the same way.
    """
    here = {m.node: incarnation for incarnation, m in sorted(members.items())}
    begins = _begins(worker for worker in workers.values() if worker.role != "train" and worker.job_uid == job_uid)
    mine = {}
    for instance, worker in sorted(workers.items()):
        if worker.role != role or worker.job_uid != job_uid or worker.state != "serving":
            continue
        owner = here.get(worker.node)
        if owner is None and worker.node in joining:
            continue
        begin = begins.get((worker.node, worker.slot), worker.slot)
        if owner == me or (
            owner is None and me in members and turn(members, me, f"engines of {worker.node} {begin}") == 0
        ):
            mine[instance] = worker
    return mine


def _begins(engines: Iterable[WorkerRecord]) -> dict[tuple[str, str], str]:
    """By node and slot, where the widest engine there begins; of slots whose engines span no other nothing is said."""
    wide = sorted((one for one in engines if one.further), key=lambda one: len(one.slots))
    return {(one.node, slot): one.slot for one in wide for slot in one.slots}
