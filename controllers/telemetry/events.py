"""The events of a job (what `gcore events` prints), derived from the changes of the job's records in the store.

`derive_events` turns the change of one record into events; `EventLog` numbers and keeps them. Every controller derives
the same events with the same sequence numbers (from the store's revisions, the numbers of its transactions). So a
client can switch to any controller and continue after the last number it saw, without loss or repetition, unless it is
more than `MOST_EVENTS` behind.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from controllers.identity import node_of
from controllers.telemetry.step_stats import source_key, truncated_sources
from gcore.config.data import ONLY_SOURCE
from gcore.config.train import FlowSpec
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment, Checkpoint, Checkpoints, LogEntry, Member
from gcore.ledger.records.job import (
    NEWEST_MOVES,
    EvalSample,
    Evaluation,
    FaultRecord,
    JobRecord,
    JobStatus,
    ModelFetch,
    Moves,
    Plan,
    Trouble,
)
from gcore.ledger.records.restart_reasons import removal_cause, restart_sentence
from gcore.ledger.statistics import commonest_reason
from gcore.observability.samples import evaluation_picture
from gcore.store.keys import JobKeys
from gcore.store.types import WatchBatch, WatchEvent
from gcore.types import Version
from placement.moves import move_in_words
from placement.slots import count_noun

MOST_MOVES = 8
"""Maximum number of events from one write of the record of placement changes (moves)."""

MOST_CHECKPOINTS = 8
"""Maximum number of checkpoint events from one write of the record `checkpoints`. The newest checkpoints get one each,
and one event sums up the earlier ones. Usually a write registers one checkpoint, but a controller that lists the
records later finds all of them in the last write."""

Derived = tuple[str, str, dict[str, Any]]
"""Kind, message and data of an event."""

PER_REVISION = 16
"""Sequence numbers that are reserved for the events of one revision of the store (`_in_their_room`)."""

MOST_EVENTS = 10_000
"""Maximum number of events that a controller keeps of one job in memory; it drops the oldest. A long job has one event
per step. Older events are in the run folder."""

SUMMED_UP = frozenset({"checkpoint", "placement"})
"""Kinds of events that come from a record which is overwritten and has a list of entries (checkpoints, moves)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a job. `sequence`: unique number, ascending. `time`: when this controller saw it, in
    seconds since the epoch.

    `message`: a sentence for users; `data`: the same for programs, with keys that depend on `kind`.
    """

    sequence: int
    time: float
    kind: str
    message: str
    data: dict[str, Any]
    again: bool = False
    """Whether another controller may have sent this event under another sequence number: this controller derived it
    later, from the newest content of a record that is overwritten."""

    @property
    def data_json(self) -> str:
        """`data` as JSON."""
        return json.dumps(self.data)


class EventLog:
    """The newest events of one job on this controller, ascending by sequence number."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._warned: set[str] = set()
        """Sources that already have a truncation warning."""
        self._moved: deque[tuple[Any, ...]] = deque(maxlen=NEWEST_MOVES)
        """The newest placement changes (moves) that already have an event: generation, step, kind and state of each."""
        self._last = -1

    def note(self, before: JobMirror, batch: WatchBatch, after: JobMirror, wall: float) -> None:
        """Add the events of a batch of record changes; events that are already in the log are not added again.

        `before`, `after`: the job's records before and after the batch. `wall`: the present time in seconds since the
        epoch.
        """
        ordered = sorted(batch.events, key=self._place)
        for revision, changes in groupby(ordered, key=lambda change: change.kv.mod_revision):
            told = [one for change in changes for one in self._told(before, change, after)]
            for sequence, (kind, message, data) in enumerate(_in_their_room(told), revision * PER_REVISION):
                if sequence > self._last:
                    again = batch.reset and kind in SUMMED_UP
                    self.events.append(Event(sequence, wall, kind, message, data, again=again))
                    self._last = sequence

    def _told(self, before: JobMirror, change: WatchEvent, after: JobMirror) -> Iterator[Derived]:
        """Derive the events and the truncation warnings of one record change."""
        derived = [one for one in derive_events(self._keys, before, change, after) if self._is_new(one)]
        yield from derived
        yield from self._warnings(derived, after)

    def _place(self, change: WatchEvent) -> tuple[int, int, str]:
        """The sort key of a record change: its revision, then the kind of record.

        Within one revision, records that are never overwritten come first, then the job's state. So a controller that
        reads them after the other records were overwritten gives the events the same numbers. Records with lists come
        last, because they yield more events the later they are read.
        """
        key = change.kv.key
        lasting = key.startswith((self._keys.log_prefix, self._keys.eval_prefix)) or key == self._keys.job
        lists = key in (self._keys.checkpoints, self._keys.moves)
        return change.kv.mod_revision, 0 if lasting else 1 if key == self._keys.state else 3 if lists else 2, key

    def _is_new(self, derived: Derived) -> bool:
        """Whether the event is to be added: false for a move that already has an event. If several writes of the moves
        arrive together, each yields the same moves."""
        kind, _, data = derived
        if kind != "placement":
            return True
        move = data["generation"], data["step"], data["kind"], data["state"]
        known = move in self._moved
        self._moved.append(move)
        return not known

    def _warnings(self, derived: Sequence[Derived], after: JobMirror) -> Iterator[Derived]:
        """Yield a warning for each source, once per job, when most of its responses in a step were truncated.
        Controllers with the same events yield the same warnings."""
        for kind, _, data in derived:
            if kind != "step":
                continue
            sources = list(after.head.record.tally.sources) if after.head is not None else []
            only = sources[0] if len(sources) == 1 else ONLY_SOURCE
            fresh = [source for source in truncated_sources(data["stats"], only) if source not in self._warned]
            for source in fresh[: PER_REVISION - len(derived)]:
                self._warned.add(source)
                yield truncation_warning(source, data)

    def after(self, sequence: int, *, goes_on: bool = False) -> list[Event]:
        """The kept events with a sequence number above `sequence`.

        `goes_on`: the client already received events, maybe from another controller; skip those that it may have under
        another number.
        """
        newer = []
        for event in reversed(self.events):
            if event.sequence <= sequence:
                break
            if not (goes_on and event.again):
                newer.append(event)
        return newer[::-1]


def split_by_revision(batch: WatchBatch) -> Iterator[WatchBatch]:
    """Split a batch of record changes into one batch per revision; a full listing stays one batch.

    Which changes arrive in one batch is random, but every controller must derive the same events from them.
    """
    if batch.reset or len({event.kv.mod_revision for event in batch.events}) < 2:
        yield batch
        return
    for revision, events in groupby(batch.events, key=lambda event: event.kv.mod_revision):
        yield WatchBatch(tuple(events), revision)


def _in_their_room(told: list[Derived]) -> list[Derived]:
    """Limit the events of one revision to the `PER_REVISION` reserved sequence numbers. If there are more, the last
    event counts the rest."""
    if len(told) <= PER_REVISION:
        return told
    kept, more = told[: PER_REVISION - 1], told[PER_REVISION - 1 :]
    kinds = Counter(kind for kind, _, _ in more)
    what = ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))
    return [*kept, ("note", f"{len(more)} more events at the same time: {what}", {"more": dict(kinds)})]


def derive_events(keys: JobKeys, before: JobMirror, change: WatchEvent, after: JobMirror) -> Iterator[Derived]:
    """Derive the events of one record change. `before`, `after`: the job's records before and after the batch of the
    change.

    Raises UnreadableRecord.
    """
    key, kv = change.kv.key, change.kv
    if change.kind == "delete":
        if key.startswith(keys.member_prefix):
            node = node_of(key.removeprefix(keys.member_prefix))
            yield "member", _left(before, key.removeprefix(keys.member_prefix)), {"node": node, "joined": False}
        return
    if key == keys.state:
        status = JobStatus.decode(kv.value, key)
        yield "state", f"{status.phase}: {status.reason}", {"state": status.phase.value, "reason": status.reason}
    elif key == keys.job:
        job = JobRecord.decode(kv.value, key)
        if job.remote_code:
            files = ", ".join(job.remote_code)
            what = (
                f"model.trust_remote_code is set: Python code of the model runs in every engine and train rank: {files}"
            )
            yield "warning", what, {"files": list(job.remote_code)}
    elif key.startswith(keys.fetch_prefix):
        fetch = ModelFetch.decode(kv.value, key)
        data = {"node": fetch.node, "model": fetch.path, "done": fetch.done, "total": fetch.total}
        yield "model", f"{fetch.node} is {fetch.sentence}", data
    elif key.startswith(keys.fault_prefix):
        fault = FaultRecord.decode(kv.value, key)
        yield "fault", fault.what, {"node": fault.node, "what": fault.what, "trace": fault.trace}
    elif key.startswith(keys.trouble_prefix):
        trouble = Trouble.decode(kv.value, key)
        data = {"cause": trouble.topic, "node": trouble.node, "reason": trouble.sentence}
        yield "warning", f"{trouble.node}: {trouble.sentence}", data
    elif key == keys.assign:
        yield _shards(before, Assignment.decode(kv.value, key))
    elif key == keys.plan:
        yield from _removed_engines(before, Plan.decode(kv.value, key))
    elif key == keys.checkpoints:
        known = {c.seq for c in before.checkpoints.record.entries} if before.checkpoints else set()
        entries = Checkpoints.decode(kv.value, key).entries
        yield from _registered([one for one in entries if one.seq not in known and one.file])
    elif key.startswith(keys.member_prefix):
        node = node_of(key.removeprefix(keys.member_prefix))
        if Member.decode(kv.value, key).leaving:
            yield (
                "member",
                f"{node} is leaving: its daemon shuts down; its shards move to other nodes",
                {"node": node, "leaving": True},
            )
        else:
            yield "member", f"{node} has joined", {"node": node, "joined": True}
    elif key == keys.moves:
        yield from _moves(before.moves, Moves.decode(kv.value, key))
    elif key.startswith(keys.log_prefix):
        yield from _entry(before, LogEntry.decode(kv.value, key), after)
    elif key.startswith(keys.eval_prefix):
        yield _evaluation(Evaluation.decode(kv.value, key), after.job.record if after.job else None)


def _left(before: JobMirror, incarnation: str) -> str:
    """Say how a controller left the job: orderly, or without handing its shards over. `before`: the job's records while
    it was a member."""
    known, sentence = before.members.get(incarnation), f"{node_of(incarnation)} has left"
    if known is None or known.record.leaving or before.has_ended:
        return sentence
    return f"{sentence} without handing over its prompt shards: its daemon ended, lost its lease, or cannot work on the job"


def truncation_warning(source: str, step: Mapping[str, Any]) -> Derived:
    """The warning that most responses of a source were truncated in a step. `step`: the data of the step event."""
    share = step["stats"].get(source_key("truncated", source), step["stats"].get("truncated", 0.0))
    message = (
        f"{share:.0%} of the responses of source {source!r} were truncated in step {step['step']}. Raise max_new_tokens, or "
        "see rollout.truncated"
    )
    return "warning", message, {"cause": "truncated", "source": source, "share": share, "step": step["step"]}


def _shards(before: JobMirror, new: Assignment) -> Derived:
    old = before.assign.record if before.assign else None
    moved = 0
    if old is not None and len(old.owners) == len(new.owners):
        moved = sum(old.owner(shard) != new.owner(shard) for shard in range(len(new.owners)))
    shares = {node_of(member): list(new.shards_of(member)) for member in new.members}
    spread = ", ".join(f"{node} has {len(shards)}" for node, shards in sorted(shares.items()))
    what = f"{moved} of {len(new.owners)} prompt shards moved; now " if old is not None else "prompt shards assigned: "
    return "shards", f"{what}{spread}", {"moved": moved, "shares": shares}


def _removed_engines(before: JobMirror, new: Plan) -> Iterator[Derived]:
    """Yield the event of engines that were removed from the plan while the train world goes on.

    A job with a policy that moves slots has a placement event instead, and a new world the rollback's event.
    """
    old = None if before.plan is None else before.plan.record
    cause = removal_cause(new.reason)
    if old is None or cause is None or old.world != new.world or before.moves.moves:
        return
    removed, left = len(old.engines) - len(new.engines), len(new.engines)
    if removed > 0:
        what = f"{count_noun(removed, 'engine')} removed, {left} remain{'s' * (left == 1)}: {cause}"
        yield "engines", what, {"removed": removed, "left": left, "reason": cause}


def _registered(new: Sequence[Checkpoint]) -> Iterator[Derived]:
    """Yield the events of newly registered checkpoints, oldest first; more than `MOST_CHECKPOINTS` are summed up."""
    earlier = new[:-MOST_CHECKPOINTS]
    if earlier:
        last = earlier[-1]
        data = {"step": last.step, "lineage": last.lineage, "file": last.file, "count": len(earlier)}
        many = "1 checkpoint" if len(earlier) == 1 else f"{len(earlier)} checkpoints"
        yield "checkpoint", f"{many} up to step {last.step} saved before the newest {MOST_CHECKPOINTS}", data
    for one in new[-MOST_CHECKPOINTS:]:
        data = {"step": one.step, "lineage": one.lineage, "file": one.file}
        yield "checkpoint", f"step {one.step} is saved; a restart can begin from it", data


def _moves(before: Moves, after: Moves) -> Iterator[Derived]:
    """Yield the events of placement changes that are new or whose state changed. `gcore placement explain` shows their
    effect."""
    known = {(move.generation, move.time): move.state for move in before.moves}
    for move in after.moves[-MOST_MOVES:]:
        if known.get((move.generation, move.time)) != move.state:
            data = {
                "step": move.step,
                "kind": move.kind.value,
                "state": move.state,
                "generation": move.generation,
                "before": move.before.model_dump(),
                "after": move.after.model_dump(),
                "reason": move.reason,
            }
            yield "placement", move_in_words(move), data


def _entry(before: JobMirror, entry: LogEntry, after: JobMirror) -> Iterator[Derived]:
    """Yield the events of a new log entry: a committed step with its warnings, a rollback, or prompts that ended
    without training."""
    if entry.kind == "train":
        by_node: dict[str, int] = {}
        for ended in entry.delta:
            if ended.kind == "trained":
                node = node_of(ended.holder)
                by_node[node] = by_node.get(node, 0) + 1
        known = _known_steps(after.job.record) if after.job else None
        steps = known or int(entry.stats.get("planned_steps", 0))
        data = {
            "step": entry.step,
            "steps": steps,
            "steps_estimated": known is None and steps != entry.step,
            "lineage": entry.lineage,
            "stats": entry.stats,
            "groups_by_node": by_node,
            "filtered": sum(e.kind == "filtered" for e in entry.delta),
            "failed": sum(e.kind == "failed" for e in entry.delta),
        }
        yield "step", f"step {entry.step} committed", data
        if entry.stats.get("groups_lacking") and entry.stats.get("planned_steps") != entry.step:
            yield _smaller(entry, sum(by_node.values()))
        skipped = int(entry.stats.get("skipped_updates", 0))
        if skipped:
            updates = f"{skipped} update{'s' if skipped > 1 else ''} of step {entry.step} skipped"
            yield "skipped", f"{updates}: the gradient is not finite", {"step": entry.step, "updates": skipped}
    elif entry.kind == "rollback":
        from_step = before.head.record.step if before.head else entry.step
        data = {"from_step": from_step, "to_step": entry.step, "lineage": entry.lineage, "reason": entry.reason}
        if entry.raised is not None:
            data["raised"] = str(entry.raised)
        lost = None if before.head is None else from_step - entry.step
        yield "rollback", restart_sentence(entry.step, entry.lineage, entry.reason, lost), data
    elif entry.kind == "account":
        yield _untrained(entry)


def _known_steps(job: JobRecord) -> int | None:
    """The number of the job's last step; None if it depends on how many prompts are filtered."""
    return FlowSpec.model_validate(job.spec.get("flow", {})).last_step(job.prompts)


def _smaller(entry: LogEntry, groups: int) -> Derived:
    """The warning that a step trained fewer groups than `flow.groups_per_step`. `groups`: how many it trained."""
    lacking, used = int(entry.stats["groups_lacking"]), int(entry.stats.get("prompts_used", 0))
    message = (
        f"step {entry.step} trained {groups} of {groups + lacking} groups: no more were available after {used} prompts "
        "(limit: flow.max_prompts_per_step, data.window, or the end of the last epoch)"
    )
    return "warning", message, {"cause": "smaller", "step": entry.step, "groups": groups, "lacking": lacking}


def _untrained(entry: LogEntry) -> Derived:
    """The event of an account entry: how many prompts were filtered or failed while no step was due, with the most
    frequent reason."""
    kinds = {kind: sum(one.kind == kind for one in entry.delta) for kind in ("filtered", "failed")}
    common = commonest_reason(entry.delta)
    message = ", ".join(f"{n} {'prompt' if n == 1 else 'prompts'} {kind}" for kind, n in kinds.items() if n)
    if common is not None:
        reason, times = common
        message += f": {reason}" if times == len(entry.delta) else f"; most frequent reason ({times} times): {reason}"
    return "account", message, {"count": len(entry.delta), **kinds, "reason": common[0] if common else ""}


def _evaluation(evaluation: Evaluation, job: JobRecord | None) -> Derived:
    data = {
        "step": evaluation.version.step,
        "lineage": evaluation.version.lineage,
        "accuracy": evaluation.accuracy,
        "mean_reward": evaluation.mean_reward,
        "graded": evaluation.is_graded,
        "count": evaluation.count,
        "unscored": evaluation.unscored,
        "samples": [_sample(sample, evaluation.version, job) for sample in evaluation.samples],
        "by_source": {name: score.model_dump(exclude_defaults=True) for name, score in evaluation.by_source.items()},
    }
    graded = f", mean reward {evaluation.mean_reward:.3f}" if evaluation.is_graded else ""
    message = f"accuracy {evaluation.accuracy:.1%}{graded} after step {evaluation.version.step}"
    if evaluation.unscored:
        why = next((f": {score.why_unscored}" for score in evaluation.by_source.values() if score.why_unscored), "")
        message += f"; {evaluation.unscored} responses could not be scored and count as incorrect{why}"
    return "eval", message, data


def _sample(sample: EvalSample, version: Version, job: JobRecord | None) -> dict[str, Any]:
    """A displayed response. A generated picture has the path of its `file`; empty if the job keeps no pictures."""
    tree = sample.model_dump(exclude={"picture"})
    if sample.picture is None:
        return tree
    keeps = job is not None and job.spec.get("samples", {}).get("picture_mib", 1)
    file = evaluation_picture(job.run_dir, version, sample.picture.sha256) if job is not None and keeps else ""
    return tree | {"picture": sample.picture.model_dump() | {"file": file}}
