"""Rules of housekeeping: register and unregister checkpoints, prune the log, begin data epochs, and delete keys that
are no longer needed.

The safety of a step does not depend on these rules. They keep the store small and remove checkpoints of steps that were
rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controllers.rules.actions import (
    BeginEpoch,
    ForgetEvaluations,
    Intent,
    PostWarning,
    PruneLog,
    RegisterCheckpoint,
    RetainCheckpoints,
    SweepKeys,
)
from controllers.rules.replication import archive_records, archived_entries, archived_evaluations, is_safe
from controllers.rules.view import SETTLE_S, JobView
from gcore.ledger import chain
from gcore.ledger import statistics as epochs
from gcore.ledger.records.chain import Checkpoint, Head
from gcore.ledger.retention import MOST_SWEPT, Retention, keep_reasons, superfluous_evaluations, superfluous_keys
from gcore.ledger.selection import is_ancestor, resumable_checkpoints
from gcore.ledger.transactions import MOST_PRUNED

CHECKPOINT_TROUBLE = "checkpoint"
"""Topic of the warning about a failed checkpoint write."""

FOLDER_TROUBLE = "folder"
"""Topic of the warning about another failed write of a train rank to the run's folder."""

KEEP_LOG, PRUNE_AT = 64, 32
"""Number of newest log entries that stay in the store, and number of older ones at which they are moved to the run's
folder."""


def register_and_forget_checkpoints(view: JobView) -> Iterator[Intent]:
    """Register checkpoints that are complete on disk, and unregister those that the retention settings of the spec no
    longer keep."""
    head, mirror = view.head, view.mirror
    assert mirror.checkpoints is not None
    known = mirror.checkpoints.record.entries
    # Only newer ones are registered: an older one may have been deleted already.
    sources = (mirror.head, mirror.checkpoints)
    newest = view.remembered.get(
        "newest checkpoint", sources, lambda: max((c.step for c in resumable_checkpoints(head, known)), default=0)
    )
    for version, saved in view.saved.items():
        if version.step <= newest or not is_ancestor(head, version) or not is_safe(view, version, saved.digest):
            continue
        for seq, entry in mirror.log.items():
            record = entry.record
            if record.kind == "train" and (record.lineage, record.step) == version and record.cursors is not None:
                checkpoint = Checkpoint(
                    lineage=version.lineage, step=version.step, seq=seq, file=saved.file, digest=saved.digest
                )
                yield Intent(RegisterCheckpoint(checkpoint), f"register {version}", view.turn(f"register {version}"))
    # The watch delivers records in order: a controller that sees a later checkpoint sees the earlier evaluations.
    kept = view.remembered.get("kept", (*sources, mirror.evaluations), lambda: _kept(view, head, known))
    forgotten = [c.seq for c in known if c not in kept]
    if forgotten:
        # The topic names what is deleted: what is kept changes with every checkpoint, which would restart the delay each time.
        topic = f"forget {min(forgotten)}"
        yield Intent(RetainCheckpoints(kept), topic, view.turn(topic), after=SETTLE_S)


def _kept(view: JobView, head: Head, known: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """The registered checkpoints that the retention settings of the spec keep."""
    evaluations = (stored.record for stored in view.mirror.evaluations.values())
    return tuple(keep_reasons(head, known, Retention.of(view.spec, head, evaluations)))


def warn_of_disks(view: JobView) -> Iterator[Intent]:
    """Warn the user about failing writes of train ranks: of a checkpoint, and of other files in the run's folder, for
    which a step waits."""
    writing = view.writing
    if writing is not None and writing.error:
        then = (
            "the next due checkpoint is the next attempt" if writing.over else "the write is retried until it succeeds"
        )
        sentence = f"the checkpoint of step {writing.version.step} could not be written ({writing.error}); {then}"
        yield from _warn_once(view, CHECKPOINT_TROUBLE, sentence, f"warn {writing.version}")
    if view.hindered:
        yield from _warn_once(view, FOLDER_TROUBLE, view.hindered, f"warn {view.head.version}")


def _warn_once(view: JobView, topic: str, sentence: str, turn: str) -> Iterator[Intent]:
    """Post a warning unless the newest warning of its topic says the same. `turn`: topic by which the peer that posts
    it is selected."""
    known = view.mirror.troubles.get(topic)
    if known is None or known.record.sentence != sentence:
        yield Intent(PostWarning(topic, sentence), f"warn {sentence}", view.turn(turn))


def prune_log(view: JobView) -> Iterator[Intent]:
    """Move old log entries from the store to the run's folder, many at a time, so that the store stays bounded."""
    mirror = view.mirror
    assert mirror.checkpoints is not None
    known = view.checkpoints
    sources = (mirror.head, mirror.checkpoints, mirror.log)
    old = view.remembered.get(
        "prunable", sources, lambda: chain.prunable_entries(view.head, known, view.log, keep=KEEP_LOG)
    )
    if len(old) < PRUNE_AT:
        return
    ripe = archived_entries(view, old[:MOST_PRUNED])
    if len(ripe) >= PRUNE_AT:
        topic = f"prune {ripe[0]}"
        yield Intent(PruneLog(ripe), topic, view.turn(topic), after=SETTLE_S)
    else:
        yield from archive_records(view, seqs=tuple(old[:PRUNE_AT]))


def begin_epochs(view: JobView) -> Iterator[Intent]:
    """Begin the data epoch that is needed next, in a job with a curriculum: record the statistics from which all peers
    compute the same order."""
    head = view.head
    if view.spec.data.curriculum is None or view.is_over:
        return
    epoch = epochs.needed_epoch(view.due, view.epochs)
    if epoch is None:
        return
    known = view.checkpoints
    forgotten = epochs.superfluous_epochs(view.rules.shape, head, known, view.log, view.epochs)
    topic = f"epoch {epoch} {head.lineage}"
    yield Intent(BeginEpoch(epochs.make_epoch_record(head, epoch, view.epochs), forgotten), topic, view.turn(topic))


FORGET_AT = 8
"""Number of old evaluations at which they are moved from the store to the run's folder."""


def sweep_old_worlds(view: JobView) -> Iterator[Intent]:
    """Delete what is no longer needed after a change of the train world: claims and rendezvous keys of earlier worlds,
    parts of evaluations, discarded checkpoints, and warnings of nodes that are gone."""
    mirror = view.mirror
    sources = (mirror.head, mirror.claims, mirror.rendezvous, mirror.eval_parts, mirror.troubles, view.nodes)
    swept = view.remembered.get(
        "swept",
        sources,
        lambda: superfluous_keys(view.head, mirror.worlds, mirror.eval_parts, mirror.troubles, view.nodes),
    )
    if swept:
        topic = f"sweep {view.head.version} {view.head.world}"
        yield Intent(SweepKeys(swept), topic, view.turn(topic), after=SETTLE_S)


def archive_evaluations(view: JobView) -> Iterator[Intent]:
    """Move old evaluations from the store to the run's folder, several at a time."""
    known = view.mirror.checkpoints
    assert known is not None
    if len(view.mirror.evaluations) < FORGET_AT:
        return
    old = superfluous_evaluations(view.head, known.record.entries, view.mirror.evaluations, view.spec.best_metric)
    if len(old) < FORGET_AT:
        return
    ripe = archived_evaluations(view, old[:MOST_SWEPT])
    if len(ripe) >= FORGET_AT:
        topic = f"forget evaluation {ripe[0]}"
        yield Intent(ForgetEvaluations(ripe), topic, view.turn(topic), after=SETTLE_S)
    else:
        yield from archive_records(view, evaluations=old[:FORGET_AT])
