"""Checkpoints are registered and forgotten, the log is kept short, data epochs begin, and keys that are no longer needed are swept.

No step needs these rules to be safe. That the store stays within its bounds, and that checkpoints of discarded branches leave the run's
folder, rests on them.
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
"""Topic of the warning about a checkpoint that cannot be written."""

FOLDER_TROUBLE = "folder"
"""Topic of the warning about anything else that a train rank writes into the run's folder."""

KEEP_LOG, PRUNE_AT = 64, 32
"""Newest log entries that stay in the store, and how many older ones make a prune worth while."""


def register_and_forget_checkpoints(view: JobView) -> Iterator[Intent]:
    """Checkpoints on disk are registered, then old ones are forgotten."""
    head, mirror = view.head, view.mirror
    assert mirror.checkpoints is not None
    known = mirror.checkpoints.record.entries
    # Only ever a newer one: an older one may have been forgotten already, and its files be gone.
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
    # The watch brings records in their order: who sees the checkpoints of later steps sees the evaluations before them.
    kept = view.remembered.get("kept", (*sources, mirror.evaluations), lambda: _kept(view, head, known))
    forgotten = [c.seq for c in known if c not in kept]
    if forgotten:
        # Called by what goes, not by what stays: that changes with every new checkpoint, and nothing would ever be ripe.
        topic = f"forget {min(forgotten)}"
        yield Intent(RetainCheckpoints(kept), topic, view.turn(topic), after=SETTLE_S)


def _kept(view: JobView, head: Head, known: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """The checkpoints of `known` that the policy keeps."""
    evaluations = (stored.record for stored in view.mirror.evaluations.values())
    return tuple(keep_reasons(head, known, Retention.of(view.spec, head, evaluations)))


def warn_of_disks(view: JobView) -> Iterator[Intent]:
    """Warn of failed writes: a checkpoint, which costs no step, and files that a step waits for."""
    writing = view.writing
    if writing is not None and writing.error:
        then = "the next one is tried when it is due" if writing.over else "it is tried again until the disk takes it"
        sentence = f"the checkpoint of step {writing.version.step} could not be written ({writing.error}); {then}"
        yield from _told(view, CHECKPOINT_TROUBLE, sentence, f"warn {writing.version}")
    if view.hindered:
        yield from _told(view, FOLDER_TROUBLE, view.hindered, f"warn {view.head.version}")


def _told(view: JobView, topic: str, sentence: str, turn: str) -> Iterator[Intent]:
    known = view.mirror.troubles.get(topic)
    if known is None or known.record.sentence != sentence:
        yield Intent(PostWarning(topic, sentence), f"warn {sentence}", view.turn(turn))


def prune_log(view: JobView) -> Iterator[Intent]:
    """The store holds a bounded stretch of the log; what is older goes to the run's folder, many entries at a time."""
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
    """With a curriculum, a data epoch begins when its statistics are fixed, once for all peers: by whoever needs it."""
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
"""How many evaluations make a trip to the run's folder worth while."""


def sweep_old_worlds(view: JobView) -> Iterator[Intent]:
    """After each change of the train world: its claims and rendezvous, parts of evaluations, and checkpoints that were cut off;
    and what nodes that are gone have told."""
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
    """Old evaluations move to the run's folder, several at a time."""
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
