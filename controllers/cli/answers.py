"""The job API's answers as a person, or a program, reads them: tables and JSON.

JSON goes out whole, with the names of the API; tables hold what fits. Text that a spec or a model wrote is shown through
`visible`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from controllers.cli.outputs import Output as Output
from controllers.cli.outputs import as_json as as_json
from controllers.cli.view_points import (
    BestPoint,
    JobSnapshot,
    NodeView,
    RollbackPoint,
    SourceFigures,
    Wait,
    WarningPoint,
)
from controllers.cli.view_text import measure, seconds, source_line, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gcore.api.v1 import jobs_pb2 as pb


MOST_VIOLATIONS = 20
"""Violations that a table shows; JSON has all."""
PIPE_WIDTH = 1000
"""Columns of an output that is no terminal: whoever reads it there wants whole lines, not 80 columns."""


def console() -> Console:
    """Standard output."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=PIPE_WIDTH)


def snapshot(job: pb.Job) -> JobSnapshot:
    """The API's job, as the views take it."""
    from gcore.client import job_state_name

    try:
        spec = json.loads(job.spec_json) if job.spec_json else {}
    except ValueError:
        spec = {}
    return JobSnapshot(
        name=job.name,
        uid=job.uid,
        state=job_state_name(job.state),
        reason=job.reason,
        step=job.step,
        steps=job.steps,
        lineage=job.lineage,
        run_dir=job.run_dir,
        checkpoint=job.checkpoint,
        created=job.created,
        ended=job.ended,
        spec=spec if isinstance(spec, dict) else {},
        shares=tuple(NodeView(s.node, True, tuple(s.shards)) for s in job.shares),
        waiting=tuple(Wait(w.who, w.what, w.since) for w in job.waiting),
        sources=tuple(_source(report) for report in job.sources),
        best=_best(job.best) if job.HasField("best") else None,
        warnings=tuple(WarningPoint(w.topic, w.node, w.sentence, w.time) for w in job.warnings),
        rollback=_rollback(job.rollback) if job.HasField("rollback") else None,
        namespace=job.namespace or "default",
        owner=job.owner,
        priority=job.priority,
        slots=job.slots,
        slots_min=job.slots_min,
        slots_max=job.slots_max,
        queue_position=job.queue_position,
    )


def _best(best: pb.BestCheckpoint) -> BestPoint:
    return BestPoint(best.step, best.metric, best.value, best.checkpoint, best.lineage)


def _rollback(rollback: pb.LastRollback) -> RollbackPoint:
    return RollbackPoint(rollback.step, rollback.lineage, rollback.reason)


def _source(report: pb.SourceReport) -> SourceFigures:
    return SourceFigures(
        name=report.name,
        trained=report.trained,
        filtered=report.filtered,
        failed=report.failed,
        mean_reward=report.mean_reward if report.HasField("mean_reward") else None,
        mean_length=report.mean_length if report.HasField("mean_length") else None,
        truncated=report.truncated if report.HasField("truncated") else None,
        accuracy=report.accuracy if report.HasField("accuracy") else None,
        metrics=dict(sorted(report.metrics.items())),
        eval_samples=report.eval_samples,
        eval_unscored=report.eval_unscored,
    )


def job_tree(job: JobSnapshot) -> dict[str, Any]:
    """For JSON."""
    tree = dataclasses.asdict(job)
    tree["shares"] = {node.name: list(node.shards) for node in job.shares}
    return tree


def audit_tree(report: pb.AuditReport) -> dict[str, Any]:
    """For JSON."""
    return {
        "clean": report.clean,
        "violations": list(report.violations),
        "findings": [{"kind": one.kind, "sentence": one.sentence, "refs": list(one.refs)} for one in report.findings],
        "steps": report.steps,
        "epochs": report.epochs,
        "issued": report.issued,
        "trained": report.trained,
        "filtered": report.filtered,
        "failed": report.failed,
        "in_flight": report.in_flight,
        "groups_by_node": dict(sorted(report.groups_by_node.items())),
        "lineages": report.lineages,
    }


def jobs_table(jobs: Sequence[JobSnapshot]) -> Table:
    """One line a job."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("NAME", "UID", "STATE", "PRIORITY", "SLOTS", "STEP", "CREATED", "REASON"):
        table.add_column(heading, no_wrap=heading != "REASON")
    for job in jobs:
        queued = f" ({job.queue_position})" if job.queue_position else ""
        table.add_row(
            visible(job.full_name),
            visible(job.uid),
            job.state + queued,
            str(job.priority),
            str(job.slots or "-"),
            f"{job.step}/{job.of_steps}",
            moment(job.created) if job.created else "",
            visible(job.reason, 80),
        )
    return table


def pairs_table(rows: Mapping[str, str]) -> Table:
    """Two columns: what, and what it is."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    return table


def job_rows(job: JobSnapshot, now: float) -> dict[str, str]:
    """What `gcore describe` shows. `now`: seconds since the epoch."""
    rows = {
        "job": f"{visible(job.full_name)} ({visible(job.uid)})" + (f", {visible(job.owner)}'s" if job.owner else ""),
        "state": job.state + (f": {visible(job.reason, 300)}" if job.reason else ""),
        "slots": slots_line(job),
        "step": f"{job.step} of {job.of_steps}, lineage {job.lineage}",
        "created": moment(job.created),
    }
    if job.ended:
        rows["ended"] = moment(job.ended)
    rows["run folder"] = job.run_dir
    rows["checkpoint"] = job.checkpoint or "none yet"
    if job.best is not None:
        rows["best"] = best_line(job.best)
    for node in job.shares:
        rows[f"shards of {visible(node.name)}"] = f"{len(node.shards)}: {ranges(node.shards)}"
    for source in job.sources:
        rows[f"source {visible(source.name)}"] = source_line(source)
    for number, wait in enumerate(job.waiting, 1):
        since = seconds(max(0.0, now - wait.since))
        rows[f"waits ({number})"] = f"{visible(wait.who)}: {visible(wait.what, 300)}, for {since}"
    if job.rollback is not None:
        back = job.rollback
        rows["last rollback"] = f"to step {back.step}, lineage {back.lineage}: {visible(back.reason, 300)}"
    for number, warning in enumerate(job.warnings, 1):
        ago = f", {seconds(max(0.0, now - warning.time))} ago" if warning.time else ""
        told = f"{visible(warning.node)}: {visible(warning.sentence, 300)}"
        rows[f"warning ({number})"] = f"{told} ({visible(warning.topic)}{ago})"
    return rows


def slots_line(job: JobSnapshot) -> str:
    """`4 of 2 to 8, priority 0; third in the queue`."""
    most = str(job.slots_max) if job.slots_max else "all there are"
    bounds = f", of {job.slots_min or 1} to {most}" if not job.ended else ""
    queued = f"; number {job.queue_position} of those that wait" if job.queue_position else ""
    return f"{job.slots or 'none'}{bounds}, priority {job.priority}{queued}"


def best_line(best: BestPoint) -> str:
    """`step 32, accuracy 98.5%: FOLDER`."""
    where = best.checkpoint or ("the model it began with" if best.step == 0 else "its checkpoint is being written")
    return f"step {best.step}, {measure(best.metric, best.value)}: {where}"


def audit_rows(report: pb.AuditReport) -> dict[str, str]:
    """What `gcore audit` shows."""
    told = list(report.violations)
    beyond = told.pop() if 0 < len(report.findings) < len(told) else ""  # the audit itself tells no more than so many
    verdict = f"{len(told)} violation{'s' * (len(told) != 1)}" + (f", {beyond}" if beyond else "")
    rows = {
        "verdict": "clean" if report.clean else verdict,
        "steps": f"{report.steps}, lineage {report.lineages}; {report.epochs} whole data epochs",
        "prompts": f"{report.issued} issued: {report.trained} trained, {report.filtered} filtered, "
        f"{report.failed} failed, {report.in_flight} in flight",
    }
    for node, count in sorted(report.groups_by_node.items()):
        rows[f"groups of {visible(node)}"] = str(count)
    for number, violation in enumerate(told[:MOST_VIOLATIONS], 1):
        rows[f"violation {number}"] = visible(violation, 500)
    if len(told) > MOST_VIOLATIONS:
        rows["not shown"] = f"and {len(told) - MOST_VIOLATIONS} more (-o json has {'these' if beyond else 'all'})"
    return rows


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7, 9-10`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(str(end) for end in part) for part in parts) or "none"


def moment(epoch_s: float) -> str:
    """A moment for people, in UTC; "-" for none."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if epoch_s else "-"
