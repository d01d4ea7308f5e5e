"""A job's sources as the API reports them, from head's tally and the newest evaluation; and its best checkpoint. Pure."""

from __future__ import annotations

from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.ancestry import resumable
from gcore.ledger.evaluation import best_of
from gcore.ledger.job import Evaluation
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import SourceTally


def source_reports(mirror: JobMirror) -> list[pb.SourceReport]:
    """Every source of which anything is known, by name."""
    tallies = mirror.head.record.tally.sources if mirror.head is not None else {}
    evaluation = newest_evaluation(mirror)
    scores = evaluation.by_source if evaluation is not None else {}
    shown_only = mirror.job is not None and mirror.job.record.spec.get("train", {}).get("loss") == "sft"
    reports = []
    for name in sorted(tallies.keys() | scores.keys()):
        tally = tallies.get(name, SourceTally())
        report = pb.SourceReport(name=name, trained=tally.kept, filtered=tally.filtered, failed=tally.failed)
        if tally.kept and not shown_only:  # demonstrations are not scored
            report.mean_reward = tally.reward / tally.kept
        if tally.samples:
            report.mean_length = tally.tokens / tally.samples
            report.truncated = tally.truncated / tally.samples
        if name in scores:
            score = scores[name]
            report.accuracy = score.accuracy
            report.metrics.update(score.metrics)
            report.eval_samples, report.eval_unscored = score.samples, score.unscored
        reports.append(report)
    return reports


def best_checkpoint(mirror: JobMirror, metric: str | None) -> pb.BestCheckpoint | None:
    """The best evaluated state on head's chain, and where its checkpoint lies; None if there is none."""
    if mirror.job is None or mirror.head is None:
        return None
    head, evaluations = mirror.head.record, [stored.record for stored in mirror.evaluations.values()]
    best = best_of(head, evaluations, metric)
    if best is None:
        return None
    known = mirror.checkpoints.record.entries if mirror.checkpoints is not None else ()
    file = next((c.file for c in resumable(head, known) if c.step == best.version.step and c.file), "")
    return pb.BestCheckpoint(
        step=best.version.step,
        lineage=best.version.lineage,
        metric=best.metric,
        value=best.value,
        checkpoint=f"{mirror.job.record.run_dir}/{file}" if file else "",
    )


def newest_evaluation(mirror: JobMirror) -> Evaluation | None:
    """The last one that was written down."""
    newest = max(mirror.evaluations.values(), key=lambda stored: stored.revision, default=None)
    return newest.record if newest is not None else None
