"""What happened to a job, in the words and numbers of its events, from one change of one of its records. Pure.

Which number an event has, and whether it is told at all, is for `controllers.service.events`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controllers.by_source import key_of
from controllers.identity import node_of
from gcore.config.flow import FlowSpec
from gcore.ledger.job import Evaluation, FaultRecord, JobRecord, JobStatus, ModelFetch, Trouble
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import Moves
from gcore.ledger.records import Assignment, Checkpoint, Checkpoints, LogEntry, Member
from gcore.ledger.tally import commonest_reason
from gcore.store.keys import JobKeys
from gcore.store.types import WatchEvent
from placement.move_words import in_words

MOST_MOVES = 8
"""Moves that one write of their record may tell of."""
MOST_CHECKPOINTS = 8
"""Checkpoints that one write of their record tells of each, the newest; those before them are summed up. Usually a write registers one;
whoever lists the records later finds all of them in the last."""
Derived = tuple[str, str, dict[str, Any]]
"""An event's kind, its message and its data."""


def derive(keys: JobKeys, before: JobMirror, change: WatchEvent, after: JobMirror) -> Iterator[Derived]:
    """What a change of one of a job's records tells, `before` it and `after` the batch that brought it. Raises UnreadableRecord."""
    key, kv = change.kv.key, change.kv
    if change.kind == "delete":
        if key.startswith(keys.member_prefix):
            node = node_of(key.removeprefix(keys.member_prefix))
            yield "member", f"{node} is gone", {"node": node, "joined": False}
        return
    if key == keys.state:
        status = JobStatus.decode(kv.value, key)
        yield "state", f"{status.phase}: {status.reason}", {"state": status.phase.value, "reason": status.reason}
    elif key == keys.job:
        job = JobRecord.decode(kv.value, key)
        if job.remote_code:
            files = ", ".join(job.remote_code)
            what = f"Python code that comes with the model runs in every engine and rank, as the spec asks for: {files}"
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
    elif key == keys.checkpoints:
        known = {c.seq for c in before.checkpoints.record.entries} if before.checkpoints else set()
        entries = Checkpoints.decode(kv.value, key).entries
        yield from _registered([one for one in entries if one.seq not in known and one.file])
    elif key.startswith(keys.member_prefix):
        node = node_of(key.removeprefix(keys.member_prefix))
        if Member.decode(kv.value, key).leaving:
            yield "member", f"{node} is leaving: its shards go to the others", {"node": node, "leaving": True}
        else:
            yield "member", f"{node} has joined", {"node": node, "joined": True}
    elif key == keys.moves:
        yield from _moves(before.moves, Moves.decode(kv.value, key))
    elif key.startswith(keys.log_prefix):
        yield from _entry(before, LogEntry.decode(kv.value, key), after)
    elif key.startswith(keys.eval_prefix):
        yield _evaluation(Evaluation.decode(kv.value, key))


def truncated(source: str, step: Mapping[str, Any]) -> Derived:
    """The warning that most responses of a source were cut off in a step (its data)."""
    share = step["stats"].get(key_of("truncated", source), step["stats"].get("truncated", 0.0))
    message = (
        f"{share:.0%} of the responses of source {source!r} were cut off in step {step['step']}; raise max_new_tokens, or "
        "see rollout.truncated"
    )
    return "warning", message, {"cause": "truncated", "source": source, "share": share, "step": step["step"]}


def _shards(before: JobMirror, new: Assignment) -> Derived:
    old = before.assign.record if before.assign else None
    moved = 0
    if old is not None and len(old.owners) == len(new.owners):
        moved = sum(old.owner(shard) != new.owner(shard) for shard in range(len(new.owners)))
    shares = {node_of(member): list(new.shards_of(member)) for member in new.members}
    spread = ", ".join(f"{node} {len(shards)}" for node, shards in sorted(shares.items()))
    what = f"{moved} shards moved" if old is not None else "shards are dealt out"
    return "shards", f"{what}: {spread}", {"moved": moved, "shares": shares}


def _registered(new: Sequence[Checkpoint]) -> Iterator[Derived]:
    """Checkpoints that were not known, oldest first."""
    earlier = new[:-MOST_CHECKPOINTS]
    if earlier:
        last = earlier[-1]
        data = {"step": last.step, "lineage": last.lineage, "file": last.file, "count": len(earlier)}
        many = "a checkpoint" if len(earlier) == 1 else f"{len(earlier)} checkpoints"
        yield "checkpoint", f"{many} up to step {last.step}: registered before the newest {MOST_CHECKPOINTS}", data
    for one in new[-MOST_CHECKPOINTS:]:
        data = {"step": one.step, "lineage": one.lineage, "file": one.file}
        yield "checkpoint", f"checkpoint of step {one.step} is registered", data


def _moves(before: Moves, after: Moves) -> Iterator[Derived]:
    """Each new move, with its reason; one that was wanted and has come to be. What came of a move is for `gcore placement explain`."""
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
            yield "placement", in_words(move), data


def _entry(before: JobMirror, entry: LogEntry, after: JobMirror) -> Iterator[Derived]:
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
        yield "step", f"step {entry.step} is committed", data
        if entry.stats.get("groups_lacking") and entry.stats.get("planned_steps") != entry.step:
            yield _smaller(entry, sum(by_node.values()))
        skipped = int(entry.stats.get("skipped_updates", 0))
        if skipped:
            updates = f"{skipped} update{'s' if skipped > 1 else ''} of step {entry.step} skipped"
            yield "skipped", f"{updates}: gradient not finite", {"step": entry.step, "updates": skipped}
    elif entry.kind == "rollback":
        from_step = before.head.record.step if before.head else entry.step
        data = {"from_step": from_step, "to_step": entry.step, "lineage": entry.lineage, "reason": entry.reason}
        yield "rollback", f"back from step {from_step} to {entry.step}: {entry.reason}", data
    elif entry.kind == "account":
        yield _untrained(entry)


def _known_steps(job: JobRecord) -> int | None:
    """The job's last step, if that is known from its beginning."""
    return FlowSpec.model_validate(job.spec.get("flow", {})).last_step(job.prompts)


def _smaller(entry: LogEntry, groups: int) -> Derived:
    """A step with fewer groups than its quota must not be a mystery."""
    lacking, used = int(entry.stats["groups_lacking"]), int(entry.stats.get("prompts_used", 0))
    message = (
        f"step {entry.step} trained {groups} of {groups + lacking} groups: there were no more after {used} prompts "
        "(flow.max_prompts_per_step, the end of the last epoch, or data.window)"
    )
    return "warning", message, {"cause": "smaller", "step": entry.step, "groups": groups, "lacking": lacking}


def _untrained(entry: LogEntry) -> Derived:
    kinds = {kind: sum(one.kind == kind for one in entry.delta) for kind in ("filtered", "failed")}
    common = commonest_reason(entry.delta)
    message = ", ".join(f"{n} {'prompt' if n == 1 else 'prompts'} {kind}" for kind, n in kinds.items() if n)
    if common is not None:
        reason, times = common
        message += f": {reason}" if times == len(entry.delta) else f"; the commonest reason, {times} times: {reason}"
    return "account", message, {"count": len(entry.delta), **kinds, "reason": common[0] if common else ""}


def _evaluation(evaluation: Evaluation) -> Derived:
    data = {
        "step": evaluation.version.step,
        "lineage": evaluation.version.lineage,
        "accuracy": evaluation.accuracy,
        "count": evaluation.count,
        "unscored": evaluation.unscored,
        "samples": [sample.model_dump() for sample in evaluation.samples],
        "by_source": {name: score.model_dump(exclude_defaults=True) for name, score in evaluation.by_source.items()},
    }
    message = f"accuracy {evaluation.accuracy:.1%} after step {evaluation.version.step}"
    if evaluation.unscored:
        why = next((f": {score.why_unscored}" for score in evaluation.by_source.values() if score.why_unscored), "")
        message += f"; {evaluation.unscored} responses could not be scored and count as not correct{why}"
    return "eval", message, data
