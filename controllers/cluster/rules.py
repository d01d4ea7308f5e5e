"""Rules about which slots of this node are unhealthy, and which schema version is written.

A single failed start of a worker says little: the job may be wrong, the disk full, the store unavailable. A slot is
unhealthy after `FAILURES` consecutive failed starts on it *while a worker of the same job and kind serves on another
slot*, on this node or another. A worker that spans several slots counts for all of them. Such a slot is tried again
after `REST_S`, and after twice as long each time it becomes unhealthy again; a worker that serves on it makes it
healthy. A restarted daemon has no memory of failures. A slot whose device the driver no longer lists, or whose core
this process may not use, is unhealthy until that is available again.

The schema version is the newest that every controller reads, so that nodes can be upgraded one by one. It never decreases: the store records
the newest version that any controller has written (`gcore.store.keys.WRITTEN`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gcore import schema
from gcore.engines.emulated.launch import is_emulated
from gcore.schema import FIRST_VERSION
from gcore.worker.records import WorkerRecord

FAILURES = 3
"""Consecutive failed starts after which a slot is unhealthy."""

REST_S, LONGEST_REST_S = 600.0, 4 * 3600.0
"""Seconds until an unhealthy slot is tried again: at first, and at most."""

MOST_SAID = 400
"""Maximum characters of a worker's failure reason in a message."""

NOT_THE_SLOTS = (
    "memory ran out",
    "could not register",
    "is taken by worker",
    "is gone from the store",
    "No space left",
)
"""Texts in the failure reason of a worker which show that its slot is not the cause."""

Kind = tuple[str, str, str]
"""A worker's job, role and judge. Workers of one kind are interchangeable."""

WorkerPlace = tuple[str, str]
"""A node and one of its slots."""


@dataclass(frozen=True, slots=True)
class StartFailures:
    """Consecutive failed starts on a slot. `kind`: of the last worker. `since`: time of the first, in monotonic
    seconds. `reason`: that of the last."""

    kind: Kind
    starts: int
    since: float
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a slot is unhealthy because of failed starts, and until when (monotonic seconds) it is not used."""

    why: str
    until: float


@dataclass(frozen=True)
class NodeHealth:
    """What is known about starts of workers on the slots of the node `node`. Immutable."""

    node: str
    counted: frozenset[str] = frozenset()
    """Registered workers of this node whose failure is counted already."""
    failing: Mapping[str, StartFailures] = field(default_factory=dict)
    """Consecutive failed starts, by slot."""
    served: Mapping[Kind, Mapping[WorkerPlace, float]] = field(default_factory=dict)
    """For each kind of worker: the slots on which one was seen serving, and when last (monotonic seconds)."""
    resting: Mapping[str, Quarantine] = field(default_factory=dict)
    """The unhealthy slots."""
    relapses: Mapping[str, int] = field(default_factory=dict)
    """By slot: how often it was found unhealthy since a worker last served on it."""

    @property
    def sick(self) -> dict[str, str]:
        """The slots that are unhealthy because of failed workers, with the reason."""
        return {slot: resting.why for slot, resting in self.resting.items()}


def update_health(
    health: NodeHealth, workers: Mapping[str, WorkerRecord], active: frozenset[str], now: float
) -> NodeHealth:
    """Return the state after a look at all workers of the cluster. Jobs that are no longer `active` are forgotten.
    `now`: monotonic seconds."""
    health = _rested(_of(active, health), now)
    served = {kind: dict(places) for kind, places in health.served.items()}
    failing, relapses, resting = dict(health.failing), dict(health.relapses), dict(health.resting)
    counted = {instance for instance in health.counted if instance in workers}
    for worker in workers.values():
        if worker.job_uid not in active or any(map(is_emulated, worker.slots)):
            continue
        if worker.state == "serving":
            served.setdefault(_kind(worker), {}).update({(worker.node, slot): now for slot in worker.slots})
            if worker.node == health.node:
                for slot in worker.slots:
                    for known in (failing, relapses, resting):
                        known.pop(slot, None)
    for instance, worker in sorted(workers.items()):
        if worker.node == health.node and instance not in counted and _failed_to_start(worker):
            counted.add(instance)
            if worker.job_uid in active:
                for slot in worker.slots:
                    failing[slot] = _once_more(failing.get(slot), worker, now)
    updated = replace(health, counted=frozenset(counted), failing=failing, served=served)
    return _judged(replace(updated, relapses=relapses, resting=resting), now)


def next_check_at(health: NodeHealth) -> float | None:
    """When the next unhealthy slot may be tried again, in monotonic seconds; None: there is none."""
    return min((resting.until for resting in health.resting.values()), default=None)


def _judged(health: NodeHealth, now: float) -> NodeHealth:
    """Mark slots as unhealthy that have failed often enough."""
    resting, relapses = dict(health.resting), dict(health.relapses)
    for slot, failing in health.failing.items():
        places = health.served.get(failing.kind, {})
        elsewhere = [place for place, at in places.items() if place != (health.node, slot) and at >= failing.since]
        if slot in resting or failing.starts < FAILURES or not elsewhere:
            continue
        times = relapses[slot] = relapses.get(slot, 0) + 1
        rest = min(REST_S * 2.0 ** (times - 1), LONGEST_REST_S)
        node, other = min(elsewhere)
        what = f"the judge {failing.kind[2]!r}" if failing.kind[2] else failing.kind[1]
        why = (
            f"the last {failing.starts} starts of a worker for {what} failed on this slot, while one of the same job serves on {other} of "
            f"{node}; the slot is tried again after {rest / 60:.0f} minutes; the last error: {failing.reason[:MOST_SAID] or 'none'}"
        )
        resting[slot] = Quarantine(why, now + rest)
    return replace(health, resting=resting, relapses=relapses)


def _rested(health: NodeHealth, now: float) -> NodeHealth:
    """Allow one try on each slot whose time is over: one more failure makes it unhealthy again."""
    over = {slot for slot, resting in health.resting.items() if now >= resting.until}
    if not over:
        return health
    failing = {
        slot: replace(one, starts=FAILURES - 1, since=now) if slot in over else one
        for slot, one in health.failing.items()
    }
    left = {slot: resting for slot, resting in health.resting.items() if slot not in over}
    return replace(health, resting=left, failing=failing)


def _of(active: frozenset[str], health: NodeHealth) -> NodeHealth:
    """Forget jobs that are not active."""
    served = {kind: places for kind, places in health.served.items() if kind[0] in active}
    # The count of a resting slot is kept, so that another job need not find the failure again.
    failing = {slot: one for slot, one in health.failing.items() if one.kind[0] in active or slot in health.resting}
    return replace(health, served=served, failing=failing)


def _once_more(known: StartFailures | None, worker: WorkerRecord, now: float) -> StartFailures:
    """Count one more failed start."""
    kind = _kind(worker)
    if known is None:
        return StartFailures(kind, 1, now, worker.reason)
    if known.kind != kind:  # two kinds of workers fail on the slot, so it counts as a further failure of the slot
        return replace(known, kind=kind, starts=known.starts + 1, reason=worker.reason)
    return replace(known, starts=known.starts + 1, reason=worker.reason)


def _failed_to_start(worker: WorkerRecord) -> bool:
    """Whether the worker failed before it served, for a reason that may be its slot."""
    blameless = any(words in worker.reason for words in NOT_THE_SLOTS)
    return worker.state == "failed" and not worker.address and not blameless and not any(map(is_emulated, worker.slots))


def _kind(worker: WorkerRecord) -> Kind:
    return worker.job_uid, worker.role, worker.judge


N = TypeVar("N")
MOST_DIGITS = 9


def choose_version(nodes: Collection[str], reads: Mapping[str, int], written: int = FIRST_VERSION) -> int:
    """Choose the schema version that this process writes: the newest that all `nodes` can read, but no older one than
    `written`, the newest that was written so far. `reads`: the newest version that each node can read.

    Nodes that can read no version that this process can write are ignored.
    """
    newest = min((reads.get(node, FIRST_VERSION) for node in nodes), default=schema.SCHEMA_VERSION)
    return max(min(schema.READABLE), min(schema.SCHEMA_VERSION, max(newest, written)))


def parse_version(said: bytes) -> int | None:
    """Parse a schema version that is stored as text; None if it is none."""
    return int(said) if said.isdigit() and len(said) <= MOST_DIGITS else None


def compatible_nodes(nodes: Mapping[str, N], reads: Mapping[str, int], version: int) -> Mapping[str, N]:
    """The nodes that can read records of schema `version`. Nothing of a job may be placed on the others, because they
    could not work on it.

    Returns the argument `nodes` itself if all can.
    """
    found = {name: node for name, node in nodes.items() if reads.get(name, FIRST_VERSION) >= version}
    return nodes if len(found) == len(nodes) else found


def incompatible_nodes(nodes: Mapping[str, N], reads: Mapping[str, int], version: int) -> Mapping[str, int]:
    """The nodes that cannot read records of schema `version`, with the newest version that each can read."""
    found = {name: reads.get(name, FIRST_VERSION) for name in nodes}
    return {name: newest for name, newest in sorted(found.items()) if newest < version}
