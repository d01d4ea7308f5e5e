"""What a job's records say, shown as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from controllers.actions import Action, Place, Register, Retain, Warn
from controllers.by_source import split_key
from controllers.holdings import Holdings
from controllers.housekeeping import CHECKPOINT_TROUBLE
from controllers.reward_parts import named_parts
from controllers.turns import Waits
from controllers.view import JobView
from controllers.waiting import Wait
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import MoveKind
from gcore.ledger.records import LogEntry
from gcore.metrics import Metrics
from gcore.metrics.steps import PHASES
from gcore.store.types import WatchBatch


def show_flights(metrics: Metrics, mirror: JobMirror, holdings: Holdings, now: float) -> None:
    """What this peer has in flight and holds, and how old the oldest in flight is. `now`: the monotonic clock."""
    if mirror.job is None or mirror.head is None:
        return
    job, head = mirror.job.record.full_name, mirror.head.record
    metrics.groups_in_flight.labels(job).set(len(holdings.in_flight))
    metrics.groups_offered.labels(job).set(len(holdings.offers))
    oldest = holdings.in_flight.oldest()
    metrics.oldest_seconds.labels(job).set(0.0 if oldest is None else max(now - oldest[1].since, 0.0))
    versions = holdings.in_flight.versions(head).values()
    metrics.oldest_steps.labels(job).set(max((head.step - version.step for version in versions), default=0))


def show_waits(metrics: Metrics, mirror: JobMirror, waiting: Sequence[Wait], waits: Waits, now: float) -> None:
    """For how long what the job waits for has been waited for, by cause. `now`: the monotonic clock."""
    if mirror.job is None:
        return
    seconds: dict[str, float] = {}
    for wait in waiting:
        held = now - waits.since.get(wait.key, now)
        seconds[wait.cause] = max(seconds.get(wait.cause, 0.0), held)
    metrics.show_waits(mirror.job.record.full_name, seconds)


def count_checkpoints(metrics: Metrics, action: Action, view: JobView) -> None:
    """Count what a deed that was done made of checkpoints."""
    match action:
        case Register():
            metrics.checkpoints.labels("registered").inc()
        case Retain() if view.mirror.checkpoints is not None:
            metrics.checkpoints.labels("forgotten").inc(len(view.mirror.checkpoints.record.entries) - len(action.kept))
        case Warn() if action.topic == CHECKPOINT_TROUBLE:
            metrics.checkpoints.labels("failed").inc()


def count_moves(metrics: Metrics, action: Action) -> None:
    """Count a move of the placement that was written."""
    if isinstance(action, Place):
        for kind in MoveKind:
            metrics.moves.labels(kind.value, action.proposal.move.state)
        metrics.moves.labels(action.proposal.move.kind.value, action.proposal.move.state).inc()


def show(metrics: Metrics, mirror: JobMirror, batch: WatchBatch, me: str) -> None:
    """Set the job's gauges, and count what `me` wrote in this batch. History that is only read again is not counted."""
    if mirror.job is None or mirror.head is None:
        return
    job = mirror.job.record.full_name
    metrics.step.labels(job).set(mirror.head.record.step)
    metrics.lineage.labels(job).set(mirror.head.record.lineage)
    metrics.members.labels(job).set(len(mirror.members))
    if mirror.assign is not None:
        metrics.shards_owned.labels(job).set(len(mirror.assign.record.shards_of(me)))
    newest = max(mirror.evaluations.values(), key=lambda e: e.revision, default=None)
    if newest is not None:
        metrics.show_stats(job, {"accuracy": newest.record.accuracy})
        for source, score in newest.record.by_source.items():
            metrics.show_source(job, source, {"accuracy": score.accuracy})
            measured = {"accuracy": score.accuracy, "unscored": float(score.unscored), **score.metrics}
            metrics.show_evaluation(job, source, measured)
    for source, tally in mirror.head.record.tally.sources.items():
        prompts = {"trained": tally.kept, "filtered": tally.filtered, "failed": tally.failed}
        metrics.show_source(job, source, {}, prompts)
    for event in batch.events:
        if not event.kv.key.startswith(mirror.keys.log_prefix) or event.kind == "delete":
            continue
        entry = LogEntry.decode(event.kv.value, event.kv.key)
        if entry.kind == "train":
            metrics.show_stats(job, {"groups_lacking": 0.0} | entry.stats)
            _show_sources(metrics, job, mirror, entry)
            metrics.show_parts(job, named_parts(entry.stats))
        if entry.writer == me and not batch.reset:
            for name, phase in PHASES.items():
                if name in entry.stats:
                    metrics.step_seconds.labels(phase).observe(entry.stats[name])
            for ended in entry.delta:
                metrics.prompt_outcomes.labels(ended.kind).inc()


def _show_sources(metrics: Metrics, job: str, mirror: JobMirror, entry: LogEntry) -> None:
    """A step's numbers by source; a job with one source has them as the step's own."""
    assert mirror.head is not None
    found = [(split, value) for key, value in entry.stats.items() if (split := split_key(key)) is not None]
    for (name, source), value in found:
        metrics.show_source(job, source, {name: value})
    sources = list(mirror.head.record.tally.sources)
    if not found and len(sources) == 1:
        metrics.show_source(job, sources[0], entry.stats)
