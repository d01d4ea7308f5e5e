"""Wait reports: what a job waits for, as sentences for users, and which waits become an event. docs/operate/failures.md
lists what to do about each.

Each wait has a text that changes with any progress (`progress`). A wait becomes an event if there is no progress for
`PATIENCE_S` of its cause; an hour with progress causes no event. One peer reports each stall, once. A cause that
concerns one node is reported by that node, any other by the first peer in the turn order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from controllers.identity import node_of
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

WORKER_STATES = {"starting": "is starting", "failed": "has failed and will be replaced", "stopping": "is stopping"}
RANKS_NAMED = 4
"""Maximum number of train ranks that a sentence lists by number."""

RECOVERY, TIDYING = ("world ", "grow "), ("forget ", "prune ", "sweep ")
"""Prefixes of the conditions of intents that form a train world, and of those that delete old records and files."""

START = "start "
"""Prefix of the conditions of intents that fetch the checkpoint from which train ranks start."""

CHECKPOINT = "checkpoint"
"""The phase of a rank that copies a checkpoint or waits until the previous one is written to disk."""

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
        "blobs": 30.0,
        "train": 60.0,
        "slots": 600.0,
        "finish": 120.0,
        "recovery": 60.0,
        "tidying": 60.0,
    }
)
"""Seconds without progress after which a wait becomes an event, by cause. Two causes have no entry: a prompt that is in
flight for too long is given up, and an engine that does not respond is reported by the times of
`controllers.inference.rules`."""

LOCAL = frozenset(
    {"store", "material", "engines", "engine", "order", "reward", "judge", "agent", "tools", "recovery", "tidying"}
)
"""Causes that concern a single node, which reports them itself. For other causes one peer reports for all."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that a job waits for.

    `cause`: kind of the wait, a label of metrics. `what`: a sentence for users. `key`: identifies the wait; constant
    while it lasts. `progress`: a text that changes whenever there is progress.
    """

    cause: str
    what: str
    key: str
    progress: str = ""

    @property
    def stall(self) -> str:
        """A text that stays the same while the wait lasts without progress; for `Timers`."""
        return f"still {self.key} {self.progress}"


def _slots(view: JobView, what: str) -> Wait:
    """The wait of a job for slots. `what`: beginning of the sentence. If a user has paused the job, the wait has the
    cause "paused", which never becomes an event."""
    cause = "paused" if view.claim.paused and not view.claim.ends else "slots"
    return Wait(cause, f"{what}: {slot_wait_reason(view)}", f"wait {cause}")


def slot_wait_reason(view: JobView) -> str:
    """Why the job has no slots or too few, as a part of a sentence."""
    if view.claim.ends:
        return view.claim.ends
    if view.claim.paused:
        return "the job is paused; `gcore resume` continues it"
    return view.queued.reason if view.queued is not None else "the slots granted to it are not free yet"


def current_waits(view: JobView) -> Iterator[Wait]:
    """Everything that the job waits for now, as this controller sees it."""
    mirror = view.mirror
    if mirror.status is None or mirror.status.record.phase.ended:
        return
    if view.store_trouble:
        # Every step needs a write to the store, so other waits are not the cause.
        yield Wait("store", f"{view.node} cannot write to the store: {view.store_trouble.rstrip('.')}", "wait store")
        return
    yield from _models(view)
    for node, newest in view.outdated_nodes.items():
        what = (
            f"{node} runs an older version of gcore: it reads schema version {newest} at most, and the cluster writes {written_version()}, so the "
            "node takes no part in the job; install the version of the other nodes there, and start it without "
            f"{PIN}"
        )
        yield Wait("node", what, f"wait node {node}")
    if view.missing_input:
        yield Wait("material", f"{view.node} cannot work on the job: {view.missing_input.rstrip('.')}", "wait material")
        return  # this is the cause of all other waits of this node
    if mirror.status.record.phase is JobPhase.PENDING or mirror.head is None or mirror.plan is None:
        short = lacking_slots(view) if mirror.status.record.phase is JobPhase.PENDING else ""
        if short and view.share is not None and view.nodes and not view.share.granted:
            yield _slots(view, "the job waits for slots")
            return
        yield Wait("start", short or "the job is starting", f"wait start {bool(short)}", short)
        return
    head = mirror.head.record
    if is_suspended(view):
        yield _slots(view, "the job is suspended")
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
        what = f"all steps are trained; {writing or 'the last checkpoint or evaluation is not finished'}"
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
    """Waits for models that nodes download before they join."""
    joined = {stored.record.node for stored in view.mirror.members.values()}
    for stored in view.mirror.fetches.values():
        fetch = stored.record
        # A node joins when it has its model. Its last progress record may be incomplete, so it is ignored then.
        if fetch.done < fetch.total and fetch.node not in joined:
            yield Wait("model", f"{fetch.node} is {fetch.sentence}", f"wait model {fetch.node}", str(fetch.done))


def _world(view: JobView, head: Head) -> Iterator[Wait]:
    """Waits for a checkpoint or slots for a new train world, and for ranks that do not serve yet."""
    if (away := newest_checkpoint_away(view)) and world_loss(view):
        what = (
            f"the new train world is to start from {away}, which no connected node has; waiting for a node that has it"
        )
        yield Wait("train_world", f"{what}, at most {HOLDERS_GRACE_S:.0f} s", f"wait holders {head.world} {away}")
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
    """Waits for this node's engines: no awake engine has the newest weights, or an engine cannot sleep, wake or
    respond."""
    resting = sleeping_engines(view)
    awake = [engine for name, engine in view.engines.items() if name not in resting]
    if (awake or not view.engines) and not any(engine.version == head.version for engine in awake):
        served = sorted({weights_text(e.version) for e in view.engines.values() if e.version is not None})
        have = f"they have {', '.join(served)}" if served else "none is ready"
        what = f"no engine of {view.node} has loaded {weights_text(head.version)} yet ({have})"
        troubles = sorted(f"{engine.instance}: {engine.trouble}" for engine in view.engines.values() if engine.trouble)
        what += f"; {troubles[0]}" if troubles else ""
        yield Wait("engines", what, f"wait engines {head.version}", have)
    for name, engine in managed_engines(view).items():
        if engine.trouble and engine.asleep != (name in resting):
            what = f"engine {name} cannot {'sleep' if name in resting else 'wake'}: {engine.trouble}"
            yield Wait("engine", what, f"wait memory {name}", engine.trouble)
    for engine in view.engines.values():
        if engine.why:
            yield Wait(
                "engine", f"engine {engine.instance} {engine.why}", f"wait engine {engine.instance} {engine.hung}"
            )


def _judges(view: JobView) -> Iterator[Wait]:
    """Waits for judges that have no serving engine, for judge engines that do not respond, and for queued requests to
    judges."""
    job = view.mirror.keys.uid
    serving = {w.judge for w in view.workers.values() if w.job_uid == job and w.state == "serving"}
    for judge in view.spec.served_judges:
        if judge.name not in serving:
            yield Wait("judge", f"no engine of judge {judge.name!r} is ready yet", f"wait judge {judge.name}")
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
    """The wait until the train ranks have received the responses of a sealed batch."""
    late = [rank for rank in range(seal.world_size) if view.missing(seal, rank)]
    what = f"the responses of step {seal.step} are being sent to {ranks_text(late)}"
    if not late and growth_delay_s(view):
        yield Wait("train_world", f"a larger train world will be formed ({growth_reason(view)})", "wait growth")
    lacking = sum(len(samples) for rank in late for samples in view.missing(seal, rank).values())
    fetched = sum(view.ranks[rank].fetched_bytes for rank in late if rank in view.ranks)
    yield Wait("exchange", what, f"wait exchange {seal.token}", f"{lacking} {fetched}")
    for rank in late:
        yield from _blobs(view, seal, rank)


def _blobs(view: JobView, seal: Seal, rank: int) -> Iterator[Wait]:
    """The wait of a train rank for the blobs of groups that it has received, named by the first of them."""
    fetching = view.fetching(seal, rank)
    groups = [group for group in seal.groups if group.digest in fetching]
    if not groups:
        return
    lost = next((group for group in groups if fetching[group.digest].unavailable), None)
    first = groups[0] if lost is None else lost
    node = next((place.node for place in view.plan.ranks if place.rank == rank), "its node")
    what = f"train rank {rank} on {node} waits for blobs of prompt {first.ref} from {node_of(first.holder)}"
    if lost is None:
        of = fetching[first.digest]
        what += f": {of.fetched / 1e6:.1f} of {of.total / 1e6:.1f} MB are there"
    else:
        what += f": no store has blob {min(fetching[first.digest].unavailable)}"
    if len(groups) > 1:
        what += f", and for those of {len(groups) - 1} more {'prompt' if len(groups) == 2 else 'prompts'}"
    moved = f"{len(groups)} {view.ranks[rank].fetched_bytes}"
    yield Wait("blobs", what, f"wait blobs {seal.token} {rank}", moved)


def _training(view: JobView, seal: Seal) -> Iterator[Wait]:
    """The wait until all ranks have trained a READY batch, or until enough nodes have its receipts (records of what
    each rank trained)."""
    behind = [r for r in range(seal.world_size) if r not in view.ranks or view.ranks[r].applied != seal.token]
    phases = {view.ranks[r].phase if r in view.ranks else "not connected" for r in behind}
    if not behind and not has_receipts(view, seal.token):
        what = f"step {seal.step} commits when {copies_wanted(view)} nodes have its receipts"
        yield Wait("train", what, f"wait receipts {seal.token}")
        return
    what = f"{ranks_text(behind)} {'trains' if len(behind) == 1 else 'train'} step {seal.step}"
    moved = " ".join(f"{r}:{view.ranks[r].phase}:{view.ranks[r].progress}" for r in behind if r in view.ranks)
    what = f"{what} ({', '.join(sorted(phases))})" if phases else what
    if CHECKPOINT in phases and (writing := _being_written(view)):
        what = f"{what}; waiting for the previous checkpoint: {writing}"
    what = f"{what}; {view.hindered}" if view.hindered else what
    if nodes := blocking_nodes(view):
        what = f"{what}; on {', '.join(nodes)} engines are releasing memory for the ranks"
    yield Wait("train", what, f"wait train {seal.token}", moved)


def _being_written(view: JobView) -> str:
    """A sentence about the checkpoint that is being written or copied to other nodes; empty if there is none."""
    writing = view.writing
    if writing is None or writing.over:
        fresh = next(iter(unregistered_checkpoints(view)), None)
        if fresh is None or is_safe(view, fresh.version, fresh.digest):
            return ""
        have = ", ".join(sorted(checkpoint_holders(view, fresh.version, fresh.digest))) or "none"
        return (
            f"the checkpoint of step {fresh.version.step} needs copies on {copies_wanted(view)} nodes (so far: {have})"
        )
    if writing.error:
        return f"the checkpoint of step {writing.version.step} cannot be written and is retried ({writing.error})"
    megabytes = f"{writing.written / 1e6:.0f} of {writing.total / 1e6:.0f} MB"
    return f"the checkpoint of step {writing.version.step} is being written ({megabytes})"


def _under_way(view: JobView) -> Iterator[Wait]:
    """Waits for actions of this node that read or write many bytes on its disk."""
    for condition in sorted(view.under_way):
        if condition.startswith(RECOVERY):
            what = f"{view.node} reads and checks the state from which the next train world will start"
            yield Wait("recovery", what, f"wait {condition}")
        elif condition.startswith(START):
            what = f"{view.node} fetches and checks the checkpoint from which its train ranks start"
            yield Wait("recovery", what, f"wait {condition}")
        elif condition.startswith(TIDYING):
            yield Wait(
                "tidying",
                f"{view.node} removes old records from the store and old files from the run's folder",
                "wait tidying",
            )
            return


def _groups(view: JobView, head: Head) -> Iterator[Wait]:
    """Waits for groups that the next batch still lacks, and for the order of a curriculum."""
    chosen = view.chosen
    if isinstance(chosen, AwaitGroups):
        count = "1 more prompt" if chosen.missing == 1 else f"{chosen.missing} more prompts"
        what = f"step {head.step + 1} needs {count} with all their responses (oldest: {chosen.oldest})"
        if view.awaited:
            begun = weights_text(view.offered.in_flight[chosen.oldest])
            what += f"; it was started with {begun} and would exceed the staleness limit in a later step"
        moved = f"{chosen.missing} {chosen.oldest} {len(view.offered.groups)} {len(view.holdings)}"
        yield Wait("groups", what, f"wait groups {head.seq}", moved)
    if view.is_ordering:
        yield Wait("order", f"{view.node} is computing the order of the curriculum", "wait order")


def _oldest_in_flight(view: JobView, head: Head) -> Iterator[Wait]:
    """The wait for prompts that were started in an earlier step and are still in flight here, if staleness is
    allowed."""
    left_over = [(version.step, ref, version) for ref, version in view.in_flight.items() if version != head.version]
    if view.rules.staleness and left_over:
        _, ref, version = min(left_over)
        count = "1 prompt" if len(left_over) == 1 else f"{len(left_over)} prompts"
        what = f"{count} of earlier steps still in flight on {view.node}; the oldest, {ref}, was started with {weights_text(version)}"
        yield Wait("in_flight", what, f"wait in flight {ref}")


def _collectives(view: JobView) -> Iterator[Wait]:
    """Waits for peers that have not yet contributed to a collective operation of the flow."""
    parts = {member: stored.record for member, stored in view.mirror.parts.items()}
    for at, name in sorted({(part.at, name) for part in parts.values() for name in part.given}):
        if f"{at}/{name}" in view.mirror.agreed:
            continue
        late = awaited_members(at, name, view.mirror.members, parts)
        if late:
            nodes = ", ".join(sorted(view.mirror.members[member].record.node for member in late))
            what = f"step {at.step + 1}: {nodes} {'has' if len(late) == 1 else 'have'} not contributed to collective {name!r} yet"
            yield Wait("peers", f"{what} (the flow there has not reached it)", f"wait {at} {name}")


def _evaluation(view: JobView) -> Iterator[Wait]:
    """Waits for the evaluation of head's weights, if one is due."""
    version = view.head.version
    if not view.is_evaluated_after(version.step, last=view.is_over) or str(version) in view.mirror.evaluations:
        return
    parts = view.mirror.eval_parts_of(version)
    made = f"{len(parts)} of {next(iter(parts.values())).parts} parts" if parts else "no part yet"
    what = f"the evaluation of {weights_text(version)} has {made}"
    yield Wait("evaluation", what, f"wait evaluation {version}", str(len(parts)))


def weights_text(version: Version) -> str:
    """Name weights for users, e.g. `the weights of step 7`, `the initial weights`; with the lineage unless it is 0."""
    weights = f"the weights of step {version.step}" if version.step else "the initial weights"
    return f"{weights} in lineage {version.lineage}" if version.lineage else weights


def ranks_text(ranks: Sequence[int]) -> str:
    """Name train ranks for users, e.g. `train rank 0`, `train ranks 0, 1 and 2`, `12 train ranks`."""
    if len(ranks) > RANKS_NAMED:
        return f"{len(ranks)} train ranks"
    if len(ranks) < 2:
        return f"train rank {ranks[0]}" if ranks else "the train ranks"
    return f"train ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def overdue_waits(view: JobView, waiting: Iterable[Wait], waits: Timers, now: float) -> Iterator[Wait]:
    """The waits that this peer reports as events at time `now`. `waits`: since when each wait has made no progress."""
    for wait in waiting:
        patience = PATIENCE_S.get(wait.cause)
        mine = wait.cause in LOCAL or _first(view, f"tell {wait.cause}")
        if wait.cause == "engine":
            yield wait  # such a wait exists only after a delay of its own
        elif patience is not None and mine and now - waits.since.get(wait.stall, now) >= patience:
            yield wait


def _first(view: JobView, topic: str) -> bool:
    """Whether this peer is first in the turn order for `topic`. If the job has no members yet (a node joins when it has
    the job's model and data), the turn order of the nodes applies."""
    members = view.mirror.members
    return (turn_of(members, view.me, topic) if members else turn_of(view.nodes, view.node, topic)) == 0


WHOLE = ("engine", "node", "store")
"""Causes whose event does not say for how long nothing has moved: the job continues on other nodes, or the sentence
says everything."""


def wait_sentence(wait: Wait) -> str:
    """The sentence of a wait's event."""
    if wait.cause in WHOLE:
        return wait.what
    return f"no progress for {PATIENCE_S[wait.cause]:g} s: {wait.what}"
