"""Prometheus metrics of a job, computed from its records: progress, waits, placement, and its size in the store.

No decision depends on them. A member of the store that does not respond is removed from the metrics; failed requests
report the problem.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from controllers.rules.actions import Action, PostWarning, RegisterCheckpoint, RetainCheckpoints, WriteMove
from controllers.rules.retention import CHECKPOINT_TROUBLE
from controllers.rules.view import JobView, Timers
from controllers.rules.waits import Wait
from controllers.telemetry.step_stats import drop_token_stats, parts_by_name, split_source_key
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry
from gcore.ledger.records.job import Move, MoveKind, Moves
from gcore.observability.metrics import Metrics, MoveFigures
from gcore.observability.step_metrics import PHASES
from gcore.store.types import StoreMemberStatus, WatchBatch
from gcore.system.clock import Clock
from gcore.types import Version
from placement.assign import split_of

ASK_EVERY_S = 15.0
"""Seconds between two queries of the status of the store's members."""


def show_in_flight(
    metrics: Metrics, mirror: JobMirror, versions: Collection[Version], offered: int, oldest_s: float
) -> None:
    """Set the gauges of this controller's prompts in flight (being generated or scored) and of its offered groups
    (finished, not in a step yet).

    `versions`: for each prompt in flight, the oldest weights that generated for it. `offered`: number of offered
    groups. `oldest_s`: age of the oldest prompt in flight in seconds.
    """
    if mirror.job is None or mirror.head is None:
        return
    job, head = mirror.job.record.full_name, mirror.head.record
    metrics.groups_in_flight.labels(job).set(len(versions))
    metrics.groups_offered.labels(job).set(offered)
    metrics.oldest_seconds.labels(job).set(oldest_s)
    metrics.oldest_steps.labels(job).set(max((head.step - version.step for version in versions), default=0))


def show_waits(metrics: Metrics, mirror: JobMirror, waiting: Sequence[Wait], waits: Timers, now: float) -> None:
    """Set the gauge of the longest present wait for each cause, in seconds. `waits`: since when each wait lasts; `now`:
    monotonic seconds."""
    if mirror.job is None:
        return
    seconds: dict[str, float] = {}
    for wait in waiting:
        held = now - waits.since.get(wait.key, now)
        seconds[wait.cause] = max(seconds.get(wait.cause, 0.0), held)
    metrics.show_waits(mirror.job.record.full_name, seconds)


def count_checkpoints(metrics: Metrics, action: Action, view: JobView) -> None:
    """After a completed action, count the checkpoints that it registered, removed from the record, or reported as
    failed."""
    match action:
        case RegisterCheckpoint():
            metrics.checkpoints.labels("registered").inc()
        case RetainCheckpoints() if view.mirror.checkpoints is not None:
            metrics.checkpoints.labels("forgotten").inc(len(view.mirror.checkpoints.record.entries) - len(action.kept))
        case PostWarning() if action.topic == CHECKPOINT_TROUBLE:
            metrics.checkpoints.labels("failed").inc()


def count_moves(metrics: Metrics, action: Action) -> None:
    """If the action wrote a placement change (move), count it by kind and state. Counters of the other kinds are
    created with 0."""
    if isinstance(action, WriteMove):
        for kind in MoveKind:
            metrics.moves.labels(kind.value, action.proposal.move.state)
        metrics.moves.labels(action.proposal.move.kind.value, action.proposal.move.state).inc()


def show_job(metrics: Metrics, mirror: JobMirror, batch: WatchBatch, me: str) -> None:
    """Set the job's gauges from its records, and add the log entries in `batch` that this controller wrote to the
    counters.

    `me`: this controller's incarnation. Log entries from a full listing are not counted, because they may have been
    counted before.
    """
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
            stats = drop_token_stats(entry.stats)
            metrics.show_stats(job, {"groups_lacking": 0.0} | stats)
            _show_sources(metrics, job, mirror, stats)
            metrics.show_parts(job, parts_by_name(entry.stats))
        if entry.writer == me and not batch.reset:
            for name, phase in PHASES.items():
                if name in entry.stats:
                    metrics.step_seconds.labels(phase).observe(entry.stats[name])
            for ended in entry.delta:
                metrics.prompt_outcomes.labels(ended.kind).inc()


def _show_sources(metrics: Metrics, job: str, mirror: JobMirror, stats: Mapping[str, float]) -> None:
    """Set the gauges of each data source from the metrics of a step. A single source gets the numbers of the step."""
    assert mirror.head is not None
    found = [(split, value) for key, value in stats.items() if (split := split_source_key(key)) is not None]
    for (name, source), value in found:
        metrics.show_source(job, source, {name: value})
    sources = list(mirror.head.record.tally.sources)
    if not found and len(sources) == 1:
        metrics.show_source(job, sources[0], stats)


def show_placement(metrics: Metrics, before: JobMirror, after: JobMirror) -> None:
    """If the placement changed, set its gauges: slots per pool, the newest move of each kind with its effect, and the
    expected step time.

    `before`, `after`: the job's records before and after the change.
    """
    if after.job is None:
        return
    job = after.job.record.full_name
    if after.plan is not None and after.plan is not before.plan:
        split = split_of(after.plan.record)
        metrics.show_split(job, {"rollout": split.rollout, "reward": split.reward, "train": split.train})
    if after.movings is before.movings:
        return
    for kind, move in newest_moves(after.moves).items():
        metrics.show_move(job, kind, move_figures(move))
    if (expected := expected_step_s(after.moves)) is not None:
        metrics.expected.labels(job).set(expected)


def newest_moves(moves: Moves) -> dict[str, Move]:
    """The newest move of each kind, by kind. Only moves that were made, or that a dry run would have made, count."""
    return {move.kind.value: move for move in moves.moves if move.state in ("done", "would")}


def move_figures(move: Move) -> MoveFigures:
    """Gain (reduction of the step time) and cost of a move in seconds, each as expected and as measured; None: unknown."""
    outcome = move.outcome
    expected = move.gain_s
    if move.before_s is not None and move.expected_s is not None:
        expected = move.before_s - move.expected_s
    gained = took = None
    if outcome is not None:
        took = outcome.took_s
        if outcome.before_s is not None and outcome.step_s is not None:
            gained = outcome.before_s - outcome.step_s
    return MoveFigures(expected, gained, move.cost_s, took)


def expected_step_s(moves: Moves) -> float | None:
    """The step time in seconds that the placement policy expected at its newest decision, with or without a move; None
    if unknown."""
    told = [(move.time, move.expected_s) for move in moves.moves if move.expected_s is not None]
    told += [(stay.time, stay.expected_s) for stay in moves.stays if stay.expected_s is not None]
    return max(told, default=(0.0, None), key=lambda one: one[0])[1]


class JobStoreSize:
    """Counts the keys and bytes of one job in the store, from the changes of its records.

    Remembers the size of each key, so its memory grows with the number of keys, which is bounded.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self.bytes = 0

    @property
    def keys(self) -> int:
        """Number of keys of the job in the store."""
        return len(self._sizes)

    def note(self, batch: WatchBatch) -> None:
        """Update the counts from a batch of record changes; a full listing replaces them."""
        if batch.reset:
            self._sizes, self.bytes = {}, 0
        for event in batch.events:
            self.bytes -= self._sizes.pop(event.kv.key, 0)
            if event.kind == "put":
                size = self._sizes[event.kv.key] = len(event.kv.key.encode()) + len(event.kv.value)
                self.bytes += size

    def show(self, metrics: Metrics, job: str) -> None:
        """Set the gauges of the job's keys and bytes. `job`: its full name."""
        metrics.job_keys.labels(job).set(self.keys)
        metrics.job_bytes.labels(job).set(self.bytes)


async def watch_members(
    standing: Callable[[], Awaitable[Mapping[str, StoreMemberStatus]]], metrics: Metrics, clock: Clock
) -> None:
    """Publish size and alarms of each etcd member as metrics every `ASK_EVERY_S` seconds, until cancelled.

    `standing`: queries the members; those that do not respond are missing in its result.
    """
    while True:
        metrics.show_members(await standing())
        await clock.sleep(ASK_EVERY_S)
