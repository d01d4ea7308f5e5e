"""The waits of a job in words, and which of them become an event. docs/operate/failures.md lists what is done about each.

Each wait says what would show progress (`progress`). A wait without progress for as long as `PATIENCE_S` has for its cause becomes an
event: an hour in which something moves is none, a minute in which nothing does is one. One peer reports each standstill, once: a node's own
by that node, the others by the first in their order of turns, so that it is also reported when that peer is the one that hangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from controllers.rules.memory import blocking_nodes, managed_engines, sleeping_engines
from controllers.rules.placement import is_suspended
from controllers.rules.replication import (
    HOLDERS_GRACE_S,
    checkpoint_holders,
    copies_wanted,
    has_receipts,
    is_safe,
    newest_checkpoint_away,
    unregistered_checkpoints,
)
from controllers.rules.view import JobView, Timers, turn_of
from controllers.rules.world import growth_delay_s, growth_reason, lacking_slots, world_loss
from gcore.ledger.collectives import awaited_members
from gcore.ledger.records.chain import Head, Seal, SealState
from gcore.ledger.records.job import JobPhase
from gcore.ledger.selection import AwaitGroups
from gcore.schema import PIN, written_version
from gcore.types import Version

WORKER_STATES = {"starting": "is starting", "failed": "has failed and is to be replaced", "stopping": "is stopping"}
RANKS_NAMED = 4
RECOVERY, TIDYING = ("world ", "grow "), ("forget ", "prune ", "sweep ")

START = "start "
"""Prefix of the conditions of actions that prepare a start."""

CHECKPOINT = "checkpoint"
"""The phase of a rank that copies a checkpoint, or waits until the one before is on the disk."""

PATIENCE_S: Mapping[str, float] = MappingProxyType(
    {
        "store": 5.0,
        "start": 30.0,
        "model": 120.0,
        "material": 30.0,
        "node": 30.0,
        "train_world": 120.0,
        "engines": 60.0,
        "peers": 60.0,
        "evaluation": 120.0,
        "groups": 120.0,
        "order": 120.0,
        "reward": 30.0,
        "judge": 60.0,
        "agent": 300.0,
        "tools": 60.0,
        "exchange": 30.0,
        "train": 60.0,
        "slots": 600.0,
        "finish": 120.0,
        "recovery": 60.0,
        "tidying": 60.0,
    }
)
"""By cause: seconds without progress after which a wait is told in an event. What is in flight for long is given up instead, and
an engine that answers nothing is told by `controllers.inference.rules`' times."""

LOCAL = frozenset(
    {"store", "material", "engines", "engine", "order", "reward", "judge", "agent", "tools", "recovery", "tidying"}
)
"""Causes of this node alone: it tells them itself. The others are told by one of the peers for all."""


@dataclass(frozen=True, slots=True)
class Wait:
    """`cause` is one of few words, for a metric; `what` is for people; `key` stays the same while the wait lasts.

    `progress`: another text whenever what is waited for has come nearer.
    """

    cause: str
    what: str
    key: str
    progress: str = ""

    @property
    def stall(self) -> str:
        """A key that stays the same while the wait lasts and nothing moves."""
        return f"still {self.key} {self.progress}"


def _slots(view: JobView, what: str) -> Wait:
    """For slots. A job that somebody has paused waits for that person: under a cause of its own, of which nobody is told."""
    cause = "paused" if view.claim.paused and not view.claim.ends else "slots"
    return Wait(cause, f"{what}: {slot_wait_reason(view)}", f"wait {cause}")


def slot_wait_reason(view: JobView) -> str:
    if view.claim.ends:
        return view.claim.ends
    if view.claim.paused:
        return "it is paused; `gcore resume` lets it go on"
    return view.queued.reason if view.queued is not None else "what it is given is on its way"


def current_waits(view: JobView) -> Iterator[Wait]:
    """Everything the job waits for now, as this controller sees it."""
    mirror = view.mirror
    if mirror.status is None or mirror.status.record.phase.ended:
        return
    if view.store_trouble:
        # No step goes on without a write, so whatever else is awaited is not the cause.
        yield Wait("store", f"{view.node} cannot write to the store: {view.store_trouble.rstrip('.')}", "wait store")
        return
    yield from _models(view)
    for node, newest in view.outdated_nodes.items():
        what = (
            f"{node} is of an older version: it reads records of schema version {newest} at most, and {written_version()} is written, so nothing "
            "is placed there, and it works on nothing; install there the gcore that the others have, and start it without "
            f"{PIN}"
        )
        yield Wait("node", what, f"wait node {node}")
    if view.missing_input:
        yield Wait("material", f"{view.node} cannot work on the job: {view.missing_input.rstrip('.')}", "wait material")
        return  # whatever else is missing here is missing because of that
    if mirror.status.record.phase is JobPhase.PENDING or mirror.head is None or mirror.plan is None:
        short = lacking_slots(view) if mirror.status.record.phase is JobPhase.PENDING else ""
        if short and view.share is not None and view.nodes and not view.share.granted:
            yield _slots(view, "the job waits for slots")
            return
        yield Wait("start", short or "the job is about to be started", f"wait start {bool(short)}", short)
        return
    head = mirror.head.record
    if is_suspended(view):
        yield _slots(view, "the job stands still")
        return
    yield from _world(view, head)
    yield from _under_way(view)
    yield from _engines(view, head)
    if view.reward_pool is not None and view.reward_pool.waiting:
        yield Wait("reward", f"on {view.node} {view.reward_pool.what}", "wait reward", str(view.reward_pool.scored))
    yield from _judges(view)
    if view.tool_pool is not None and view.tool_pool.waiting:
        cause = "tools" if view.spec.agent is None else "agent"
        yield Wait(cause, f"on {view.node} {view.tool_pool.what}", f"wait {cause}", str(view.tool_pool.scored))
    yield from _collectives(view)
    seal = view.seal
    if view.is_over or seal is None or seal.collects:
        yield from _evaluation(view)
    yield from _oldest_in_flight(view, head)
    if view.is_over:
        writing = _being_written(view)
        what = f"all steps are trained; {writing or 'the last checkpoint or evaluation is not yet there'}"
        yield Wait("finish", what, "wait finish", writing)
    elif seal is None or seal.collects:
        yield from _groups(view, head)
        if seal is not None and seal.state is SealState.PARTIAL:
            yield from _exchange(view, seal)
    elif seal.state is SealState.SEALED:
        yield from _exchange(view, seal)
    else:
        yield from _training(view, seal)


def _models(view: JobView) -> Iterator[Wait]:
    """Waits for models that nodes fetch before they join."""
    joined = {stored.record.node for stored in view.mirror.members.values()}
    for stored in view.mirror.fetches.values():
        fetch = stored.record
        # A node joins with its model: the last word on its progress may have been lost, and would stand here for ever.
        if fetch.done < fetch.total and fetch.node not in joined:
            yield Wait("model", f"{fetch.node} is {fetch.sentence}", f"wait model {fetch.node}", str(fetch.done))


def _world(view: JobView, head: Head) -> Iterator[Wait]:
    """Waits for slots of a new train world, and for its ranks."""
    if (away := newest_checkpoint_away(view)) and world_loss(view):
        what = (
            f"no node that is there has {away}, from which a new train world is to start; one that has it is waited for"
        )
        yield Wait("train_world", f"{what} for {HOLDERS_GRACE_S:.0f} s", f"wait holders {head.world} {away}")
    if (lost := world_loss(view)) and (short := lacking_slots(view)):
        yield Wait("train_world", f"{lost.why}: {short}", f"wait slots {head.world}", short)
    for place in view.plan.ranks:
        claim = view.mirror.claim(head.world, place.rank)
        worker = view.workers.get(claim.instance) if claim else None
        if worker is None or worker.state != "serving":
            state = WORKER_STATES.get(worker.state, worker.state) if worker else "has no process yet"
            yield Wait(
                "train_world",
                f"train rank {place.rank} on {place.node} {state}",
                f"wait rank {head.world} {place.rank}",
                worker.state if worker else "",
            )


def _engines(view: JobView, head: Head) -> Iterator[Wait]:
    """Waits for this node's engines: for their weights, unless they are to sleep, and for their answers."""
    resting = sleeping_engines(view)
    awake = [engine for name, engine in view.engines.items() if name not in resting]
    if (awake or not view.engines) and not any(engine.version == head.version for engine in awake):
        served = sorted({weights_text(e.version) for e in view.engines.values() if e.version is not None})
        have = f"they have {', '.join(served)}" if served else "none is ready"
        what = f"the engines of {view.node} are to load {weights_text(head.version)} ({have})"
        troubles = sorted(f"{engine.instance}: {engine.trouble}" for engine in view.engines.values() if engine.trouble)
        what += f"; {troubles[0]}" if troubles else ""
        yield Wait("engines", what, f"wait engines {head.version}", have)
    for name, engine in managed_engines(view).items():
        if engine.trouble and engine.asleep != (name in resting):
            what = f"engine {name} is to {'sleep' if name in resting else 'wake'}: {engine.trouble}"
            yield Wait("engine", what, f"wait memory {name}", engine.trouble)
    for engine in view.engines.values():
        if engine.why:
            yield Wait(
                "engine", f"engine {engine.instance} {engine.why}", f"wait engine {engine.instance} {engine.hung}"
            )


def _judges(view: JobView) -> Iterator[Wait]:
    """Waits for judges without a serving engine, for judges that do not answer, and for questions in the queue."""
    job = view.mirror.keys.uid
    serving = {w.judge for w in view.workers.values() if w.job_uid == job and w.state == "serving"}
    for judge in view.spec.served_judges:
        if judge.name not in serving:
            yield Wait("judge", f"no engine of judge {judge.name!r} serves yet", f"wait judge {judge.name}")
    for engine in view.judges.values():
        if engine.why:
            yield Wait(
                "judge",
                f"engine {engine.instance} {engine.why}",
                f"wait judge engine {engine.instance} {engine.hung}",
            )
    asked = view.judge_pool
    if asked is not None and asked.waiting:
        yield Wait("judge", f"on {view.node} {asked.what}", "wait judging", str(asked.scored))


def _exchange(view: JobView, seal: Seal) -> Iterator[Wait]:
    """Waits for responses that are not yet fed to the ranks."""
    late = [rank for rank in range(seal.world_size) if view.missing(seal, rank)]
    what = f"the responses of step {seal.step} are on their way to {ranks_text(late)}"
    if not late and growth_delay_s(view):
        yield Wait("train_world", f"a larger train world is to be formed ({growth_reason(view)})", "wait growth")
    lacking = sum(len(samples) for rank in late for samples in view.missing(seal, rank).values())
    yield Wait("exchange", what, f"wait exchange {seal.token}", str(lacking))


def _training(view: JobView, seal: Seal) -> Iterator[Wait]:
    """Waits for ranks that have not applied their share, and for receipts that too few nodes have."""
    behind = [r for r in range(seal.world_size) if r not in view.ranks or view.ranks[r].applied != seal.token]
    phases = {view.ranks[r].phase if r in view.ranks else "not connected" for r in behind}
    if not behind and not has_receipts(view, seal.token):
        what = f"the receipts of step {seal.step} are to lie on {copies_wanted(view)} nodes before it is committed"
        yield Wait("train", what, f"wait receipts {seal.token}")
        return
    what = f"{ranks_text(behind)} {'trains' if len(behind) == 1 else 'train'} step {seal.step}"
    moved = " ".join(f"{r}:{view.ranks[r].phase}:{view.ranks[r].progress}" for r in behind if r in view.ranks)
    what = f"{what} ({', '.join(sorted(phases))})" if phases else what
    if CHECKPOINT in phases and (writing := _being_written(view)):
        what = f"{what}; before its own, {writing}"
    what = f"{what}; {view.hindered}" if view.hindered else what
    if nodes := blocking_nodes(view):
        what = f"{what}; on {', '.join(nodes)} engines give memory back, and ranks take it"
    yield Wait("train", what, f"wait train {seal.token}", moved)


def _being_written(view: JobView) -> str:
    """The progress of the checkpoint that is being written; empty if none is."""
    writing = view.writing
    if writing is None or writing.over:
        fresh = next(iter(unregistered_checkpoints(view)), None)
        if fresh is None or is_safe(view, fresh.version, fresh.digest):
            return ""
        have = ", ".join(sorted(checkpoint_holders(view, fresh.version, fresh.digest))) or "none yet"
        return (
            f"the checkpoint of step {fresh.version.step} is to lie on {copies_wanted(view)} nodes (it does on {have})"
        )
    if writing.error:
        return f"the checkpoint of step {writing.version.step} is tried again until the disk takes it ({writing.error})"
    megabytes = f"{writing.written / 1e6:.0f} of {writing.total / 1e6:.0f} MB"
    return f"the checkpoint of step {writing.version.step} is being written ({megabytes})"


def _under_way(view: JobView) -> Iterator[Wait]:
    """Waits for this node's actions that take as long as its disk does."""
    for condition in sorted(view.under_way):
        if condition.startswith(RECOVERY):
            what = f"{view.node} reads and checks what the next train world is to start from"
            yield Wait("recovery", what, f"wait {condition}")
        elif condition.startswith(START):
            what = f"{view.node} fetches and checks the checkpoint that its train ranks start from"
            yield Wait("recovery", what, f"wait {condition}")
        elif condition.startswith(TIDYING):
            yield Wait(
                "tidying", f"{view.node} moves what is old out of the store and the run's folder", "wait tidying"
            )
            return


def _groups(view: JobView, head: Head) -> Iterator[Wait]:
    """Waits for groups that the next step's batch lacks."""
    chosen = view.chosen
    if isinstance(chosen, AwaitGroups):
        count = "1 more prompt" if chosen.missing == 1 else f"{chosen.missing} more prompts"
        what = f"step {head.step + 1} needs {count} with all their responses (the oldest: {chosen.oldest})"
        if view.awaited:
            begun = weights_text(view.offered.in_flight[chosen.oldest])
            what += f"; it was begun with {begun}, and would be too old later"
        moved = f"{chosen.missing} {chosen.oldest} {len(view.offered.groups)} {len(view.holdings)}"
        yield Wait("groups", what, f"wait groups {head.seq}", moved)
    if view.is_ordering:
        yield Wait("order", f"{view.node} works out the order of the curriculum", "wait order")


def _oldest_in_flight(view: JobView, head: Head) -> Iterator[Wait]:
    """Waits for prompts that are in flight since an earlier step, where some staleness is allowed."""
    left_over = [(version.step, ref, version) for ref, version in view.in_flight.items() if version != head.version]
    if view.rules.staleness and left_over:
        _, ref, version = min(left_over)
        count = "1 prompt" if len(left_over) == 1 else f"{len(left_over)} prompts"
        what = f"{count} of earlier steps still in flight on {view.node}; the oldest, {ref}, was begun with {weights_text(version)}"
        yield Wait("in_flight", what, f"wait in flight {ref}")


def _collectives(view: JobView) -> Iterator[Wait]:
    """Waits for peers that have not yet given their part of a collective."""
    parts = {member: stored.record for member, stored in view.mirror.parts.items()}
    for at, name in sorted({(part.at, name) for part in parts.values() for name in part.given}):
        if f"{at}/{name}" in view.mirror.agreed:
            continue
        late = awaited_members(at, name, view.mirror.members, parts)
        if late:
            nodes = ", ".join(sorted(view.mirror.members[member].record.node for member in late))
            what = f"step {at.step + 1}: {nodes} {'has' if len(late) == 1 else 'have'} not yet given {name!r}"
            yield Wait("peers", f"{what} (the flow there has not come to it)", f"wait {at} {name}")


def _evaluation(view: JobView) -> Iterator[Wait]:
    """Waits for the evaluation of head's weights, if it is due."""
    version = view.head.version
    if not view.is_evaluated_after(version.step, last=view.is_over) or str(version) in view.mirror.evaluations:
        return
    parts = view.mirror.eval_parts_of(version)
    made = f"{len(parts)} of its {next(iter(parts.values())).parts} parts" if parts else "none of its parts"
    what = f"the evaluation of {weights_text(version)} has {made}"
    yield Wait("evaluation", what, f"wait evaluation {version}", str(len(parts)))


def weights_text(version: Version) -> str:
    """`the weights of step 7`; of the model that training began with, and of a later lineage, it says that."""
    weights = f"the weights of step {version.step}" if version.step else "the first weights"
    return f"{weights} in lineage {version.lineage}" if version.lineage else weights


def ranks_text(ranks: Sequence[int]) -> str:
    """`train rank 0`, `train ranks 0, 1 and 2`, `12 train ranks`."""
    if len(ranks) > RANKS_NAMED:
        return f"{len(ranks)} train ranks"
    if len(ranks) < 2:
        return f"train rank {ranks[0]}" if ranks else "the train ranks"
    return f"train ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def overdue_waits(view: JobView, waiting: Iterable[Wait], waits: Timers, now: float) -> Iterator[Wait]:
    """The waits that this peer is to tell, or has told, as of `now`; `waits` says since when each stands still."""
    for wait in waiting:
        patience = PATIENCE_S.get(wait.cause)
        mine = wait.cause in LOCAL or _first(view, f"tell {wait.cause}")
        if wait.cause == "engine":
            yield wait  # it is one only after a time of its own
        elif patience is not None and mine and now - waits.since.get(wait.stall, now) >= patience:
            yield wait


def _first(view: JobView, topic: str) -> bool:
    """Whether this peer tells for all. Before anybody is a member (none is until the job runs here with its model and its
    data) that goes by the nodes that are there."""
    members = view.mirror.members
    return (turn_of(members, view.me, topic) if members else turn_of(view.nodes, view.node, topic)) == 0


WHOLE = ("engine", "node", "store")
"""Causes whose waits say all that there is to say, for others go on without what is waited for."""


def wait_sentence(wait: Wait) -> str:
    """The sentence of the event."""
    if wait.cause in WHOLE:
        return wait.what
    return f"nothing has moved for {PATIENCE_S[wait.cause]:g} s: {wait.what}"
