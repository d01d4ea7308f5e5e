"""A job's sources as the API reports them: from head's tally and the newest evaluation. Pure."""

from __future__ import annotations

from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.job import Evaluation
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import SourceTally


def source_reports(mirror: JobMirror) -> list[pb.SourceReport]:
    """Every source of which anything is known, by name."""
    tallies = mirror.head.record.tally.sources if mirror.head is not None else {}
    evaluation = newest_evaluation(mirror)
    scores = evaluation.by_source if evaluation is not None else {}
    reports = []
    for name in sorted(tallies.keys() | scores.keys()):
        tally = tallies.get(name, SourceTally())
        report = pb.SourceReport(name=name, trained=tally.kept, filtered=tally.filtered, failed=tally.failed)
        if tally.kept:
            report.mean_reward = tally.reward / tally.kept
        if tally.samples:
            report.mean_length = tally.tokens / tally.samples
            report.truncated = tally.truncated / tally.samples
        if name in scores:
            report.accuracy = scores[name].accuracy
        reports.append(report)
    return reports


def newest_evaluation(mirror: JobMirror) -> Evaluation | None:
    """The last one that was written down."""
    newest = max(mirror.evaluations.values(), key=lambda stored: stored.revision, default=None)
    return newest.record if newest is not None else None
