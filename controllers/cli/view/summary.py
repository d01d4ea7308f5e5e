"""The summary of a run: `summary.json` in its run folder, and a table for people.

Groups per controller come from the audit, which counts them in the log; without an audit, from the events.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from controllers.cli.output import (
    MOST_VIOLATIONS,
    best_line,
    format_measures,
    format_seconds,
    job_snapshot,
    printable_text,
)
from controllers.cli.terminal import BAD, GOOD, STATE_COLOURS, Pairs, program_name
from controllers.cli.view.live import find_bottleneck, usual_waits, waits_line
from controllers.cli.view.state import (
    ENDED_STATES,
    AnswerPoint,
    BestPoint,
    EvalPoint,
    JobSnapshot,
    SourceFigures,
    ViewState,
    finite_or_none,
    get_count,
    get_text,
)
from gcore.errors import StoreUnavailable, Unreachable, explain_os_errors
from gcore.ledger import archive
from gcore.observability.contact_sheet import SHEET_FILE
from gcore.schema import UnreadableRecord
from gcore.system.files import replace_file
from gcore.types import CHECKPOINTS

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.config.spec import JobSpec

FILE_NAME = "summary.json"

ENDED_FILES = (FILE_NAME, archive.COPY_FOLDER)
"""Files of an ended run: a summary, or a copy of its records if no command followed the run to its end."""

SUCCEEDED = "SUCCEEDED"
REWARD_STEPS = 5
"""Maximum number of steps at each end whose mean training reward is shown."""


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The result of an audit. `violations`: sentences; empty: the audit is clean. `groups_by_node`: trained groups by
    the node that generated them."""

    violations: tuple[str, ...] = ()
    groups_by_node: tuple[tuple[str, int], ...] = ()

    @property
    def clean(self) -> bool:
        """Whether there are no violations."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """Results of one data source: its prompts by outcome, means over its trained groups, and its first and last
    evaluation. None: not measured."""

    trained: int
    filtered: int
    failed: int
    mean_reward: float | None
    mean_length: float | None
    truncated: float | None
    eval_accuracy_before: float | None
    eval_accuracy_after: float | None
    eval_before: dict[str, float] = dataclasses.field(default_factory=dict)
    """`mean@N`, `pass@1` and `pass@K` of the evaluation set of that name in the first evaluation."""
    eval_after: dict[str, float] = dataclasses.field(default_factory=dict)
    eval_unscored: int = 0
    """Responses of the last evaluation that could not be scored."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a run. Accuracies are 0 to 1, times in seconds. None: not measured."""

    job: str
    uid: str
    state: str
    reason: str
    steps: int
    lineage: int
    rollbacks: int
    eval_accuracy_before: float | None
    eval_accuracy_after: float | None
    wall_seconds: float
    """Duration of the command, including the start of the cluster."""
    job_seconds: float | None
    """From the creation of the job to its end, including interruptions."""
    tokens_per_second: float | None
    controllers: int
    groups_by_controller: dict[str, int]
    audit: str | list[str]
    """"clean" or the violations."""
    run_dir: str
    checkpoint: str
    best: BestPoint | None
    """The best evaluated step with its checkpoint folder."""
    sources: dict[str, SourceSummary]
    answers_before: tuple[AnswerPoint, ...]
    answers_after: tuple[AnswerPoint, ...]
    waits: dict[str, float]
    """Median waits of a step in seconds, by their names in `metrics.jsonl`."""
    bottleneck: str
    """The phase of a step that train ranks or engines wait for the longest; empty if unknown."""
    eval_reward_before: float | None = None
    """Mean reward over all sets. None if rewards are only 0 and 1: then it equals the accuracy. The same holds for `eval_reward_after`."""
    eval_reward_after: float | None = None
    train_reward_first: float | None = None
    """Mean training reward of the first `train_reward_steps` steps; `train_reward_last`: of the last ones."""
    train_reward_last: float | None = None
    train_reward_steps: int = 0
    pictures_per_second: float | None = None
    """Of a policy that generates pictures, which has no `tokens_per_second`."""

    @property
    def succeeded(self) -> bool:
        """Whether the job succeeded and its audit found no violation."""
        return self.state == SUCCEEDED and self.audit == "clean"


def summarize(state: ViewState, job: JobSnapshot, audit: AuditVerdict, wall_seconds: float) -> Summary:
    """Summarize an ended job. `state`: computed from its events; `job`: its last state from the API; `wall_seconds`:
    duration of the command."""
    groups = dict(audit.groups_by_node) or state.groups_by_node
    before, after = state.eval_before, state.eval_after
    waits = usual_waits(state.points)
    rewards = [point.stats["reward"] for point in state.points if "reward" in point.stats]
    some = max(1, min(REWARD_STEPS, len(rewards) // 2))
    return Summary(
        job=job.name,
        uid=job.uid,
        state=job.state,
        reason=job.reason,
        steps=job.step,
        lineage=job.lineage,
        rollbacks=state.rollbacks,
        eval_accuracy_before=state.accuracy_before,
        eval_accuracy_after=state.accuracy_after,
        eval_reward_before=before.mean_reward if before and state.is_graded else None,
        eval_reward_after=after.mean_reward if after and state.is_graded else None,
        train_reward_first=round(fmean(rewards[:some]), 4) if rewards else None,
        train_reward_last=round(fmean(rewards[-some:]), 4) if rewards else None,
        train_reward_steps=some if rewards else 0,
        wall_seconds=round(wall_seconds, 3),
        job_seconds=round(job.ended - job.created, 3) if job.ended and job.created else None,
        tokens_per_second=state.tokens_per_second,
        pictures_per_second=state.pictures_per_second,
        waits={name: round(value, 3) for name, value in waits.items()},
        bottleneck=find_bottleneck(waits),
        controllers=len(groups.keys() | {node.name for node in state.nodes}),
        groups_by_controller=dict(sorted(groups.items())),
        audit="clean" if audit.clean else list(audit.violations),
        run_dir=job.run_dir,
        checkpoint=job.checkpoint,
        best=job.best,
        sources={source.name: _source(state, source) for source in job.sources},
        answers_before=before.samples if before else (),
        answers_after=after.samples if after else (),
    )


def _source(state: ViewState, source: SourceFigures) -> SourceSummary:
    before, after = state.eval_before, state.eval_after
    return SourceSummary(
        trained=source.trained,
        filtered=source.filtered,
        failed=source.failed,
        mean_reward=source.mean_reward,
        mean_length=source.mean_length,
        truncated=source.truncated,
        eval_accuracy_before=before.by_source.get(source.name) if before else None,
        eval_accuracy_after=after.by_source.get(source.name) if after else None,
        eval_before=_metrics(before, source.name),
        eval_after=_metrics(after, source.name),
        eval_unscored=source.eval_unscored,
    )


def _metrics(point: EvalPoint | None, name: str) -> dict[str, float]:
    found = point.sets.get(name) if point else None
    return dict(sorted(found.metrics.items())) if found is not None else {}


def write_summary(summary: Summary, run_dir: Path) -> Path:
    """Write the summary to `summary.json` in the run folder, atomically, and return its path. Raises GcoreError."""
    path = run_dir / FILE_NAME
    with explain_os_errors("cannot write the summary", where=path, fix="Make the run folder writable"):
        replace_file(path, (json.dumps(dataclasses.asdict(summary), indent=2, ensure_ascii=False) + "\n").encode())
    return path


def summary_table(summary: Summary, page: str = "") -> Pairs:
    """The result of a run for people. `page`: the address of the job's page; empty if the cluster has stopped."""
    rows = summary_rows(summary) | ({"page": page} if page else {})
    audit = GOOD if summary.audit == "clean" else BAD
    return Pairs(rows, {"job": STATE_COLOURS.get(summary.state, ""), "audit": audit})


def next_commands(summary: Summary, again: str, longer: str, options: Sequence[str] = ()) -> dict[str, str]:
    """The commands that a user may need next, by their purpose.

    `again`, `longer`: the commands that run the job again, and with more steps. `options`: those that name the cluster or its home folder.
    """

    def command(verb: str, *words: str) -> str:
        return shlex.join((program_name(), verb, summary.uid, *words, *options))

    shown = {}
    if summary.checkpoint:
        target = f"{summary.job.rpartition('/')[2]}-{summary.uid}"
        shown["export the model"] = command("export", "--to", target)
        if summary.best is not None and summary.best.checkpoint not in ("", summary.checkpoint):
            shown["export the best"] = command("export", "--best", "--to", f"{target}-best")
    if summary.steps:
        shown["look at pictures" if summary.pictures_per_second is not None else "read responses"] = command("samples")
    if summary.state == SUCCEEDED:
        shown["train longer"] = longer
    shown["run again" if summary.state in ENDED_STATES else "continue"] = again
    return shown


def summary_rows(summary: Summary) -> dict[str, str]:
    """The rows of `summary_table`, by name."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    def mean(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    # If rewards are only 0 and 1, the mean reward equals the accuracy.
    graded = summary.eval_reward_before is not None or summary.eval_reward_after is not None
    rewards = (
        (summary.eval_reward_before, summary.eval_reward_after)
        if graded
        else (summary.eval_accuracy_before, summary.eval_accuracy_after)
    )
    groups = ", ".join(f"{printable_text(name)} {count}" for name, count in summary.groups_by_controller.items())

    def words(one: SourceSummary) -> str:
        """Describe a source, which may be for training, evaluation or both."""
        before, after = one.eval_accuracy_before, one.eval_accuracy_after
        evaluated = f"{share(before)} → {share(after)}" if before is not None or after is not None else ""
        # Further metrics, from the last evaluation.
        evaluated = ", ".join(
            [evaluated, *format_measures(one.eval_after or one.eval_before, before if after is None else after)]
        )
        if one.eval_unscored:
            evaluated += f", {one.eval_unscored} responses not scored"
        evaluated = evaluated.removeprefix(", ")
        trained = "" if evaluated and not one.trained else f"{one.trained} trained"
        return ", ".join(part for part in (trained, evaluated) if part)

    sources = "; ".join(f"{printable_text(name)} {words(one)}" for name, one in summary.sources.items())
    shown = {
        "job": f"{printable_text(summary.job)} ({summary.uid}) {summary.state}"
        + (f": {printable_text(summary.reason, 300)}" if summary.reason else ""),
        "reward": _reward_words(summary),
        "held-out accuracy": f"{share(summary.eval_accuracy_before)} before, {share(summary.eval_accuracy_after)} after",
        "mean reward": f"{mean(rewards[0])} before, {mean(rewards[1])} after, held out",
        "groups trained": groups or "-",
        "steps": f"{summary.steps}"
        + (f", {summary.rollbacks} rollback{'s' * (summary.rollbacks > 1)}" if summary.rollbacks else "")
        + f", {format_seconds(summary.wall_seconds)} wall time",
        "speed": _speed_words(summary),
        "waits": waits_line(summary.waits) or "-",
        "audit": summary.audit if isinstance(summary.audit, str) else _first_of(summary.audit),
        "run folder": summary.run_dir,
    }
    if len(summary.sources) > 1:
        shown["sources"] = sources
    if summary.best is not None:
        shown["best"] = best_line(summary.best)
    if summary.state != SUCCEEDED:
        shown["logs"] = f"{summary.run_dir}/logs"
    if summary.checkpoint:
        shown["checkpoint"] = summary.checkpoint
    if (sheet := Path(summary.run_dir) / SHEET_FILE).is_file():
        shown["contact sheet"] = str(sheet)
    return shown


def _speed_words(summary: Summary) -> str:
    if summary.pictures_per_second is not None:
        return f"{summary.pictures_per_second:,.1f} pictures/s"
    return "-" if summary.tokens_per_second is None else f"{summary.tokens_per_second:,.0f} tokens/s"


def _reward_words(summary: Summary) -> str:
    """The mean training reward as text: `0.312 in the first 5 steps, 0.934 in the last 5`."""
    first, last, count = summary.train_reward_first, summary.train_reward_last, summary.train_reward_steps
    if first is None or last is None:
        return "-"
    if summary.steps <= 1:
        return f"{last:.3f}"
    steps = "step" if count == 1 else f"{count} steps"
    return f"{first:.3f} in the first {steps}, {last:.3f} in the last {steps}"


def _first_of(violations: list[str]) -> str:
    more = len(violations) - MOST_VIOLATIONS
    return "; ".join(violations[:MOST_VIOLATIONS] + ([f"and {more} more ({FILE_NAME} has all)"] if more > 0 else []))


def finished_jobs(runs: Path) -> list[str]:
    """The job names of the finished runs under `runs`, without duplicates."""
    return sorted({tree["job"] for _, tree in _summaries(runs)})


def describe_finished_run(home: Path, job: str, unreachable: Unreachable) -> dict[str, str]:
    """Describe the newest finished run of `job` in `home` (keys as in `find_summary`), when no cluster responds
    (`unreachable`).

    Raises Unreachable if there is no such finished run; the message lists the finished jobs. Also raises it if a newer
    job of that name has not finished: only a cluster knows its state, and silently using the older job would be wrong.
    If a cluster is running but its store is unavailable, the message does not advise to start one.
    """
    is_up = isinstance(unreachable, StoreUnavailable)
    found = find_summary(home / "runs", job) or _without_summary(home / "runs", job)
    newer = find_newer_unfinished_run(home / "runs", job) if found is not None and job == found["job"] else None
    if found is not None and newer is not None:
        what = f"the newest job {job!r} ({newer}) has not finished, and {unreachable.what}"
        first = "Try again when the store is available" if is_up else "Start the cluster with `gcore up`"
        fix = f"{first}, or use the older, finished job by its uid: {found['uid']}"
        raise Unreachable(what, where=str(home), fix=fix) from unreachable
    if found is None and is_up:
        raise unreachable
    if found is None and (left := find_unfinished_run(home / "runs", job)) is not None:
        what = f"job {left[0]!r} ({left[1]}) has not finished, and {unreachable.what}"
        etcd = home / "etcd"
        fix = (
            "Continue it with `gcore up`, or with `gcore run` and its spec"
            if etcd.is_dir()
            else f"Its records were in {etcd}, which no longer exists: restore it from a backup, or start a new job with `gcore run`"
        )
        raise Unreachable(what, where=str(home), fix=fix) from unreachable
    if found is None:
        finished = finished_jobs(home / "runs")
        known = f" (finished jobs: {', '.join(map(repr, finished))})" if finished else ""
        what = f"{unreachable.what}, and there is no finished job {job!r}{known}"
        raise Unreachable(what, where=str(home), fix=unreachable.fix) from unreachable
    return found


def _without_summary(runs: Path, job: str) -> dict[str, str] | None:
    """Describe an ended run that has no summary file, from the copy of its records (keys as in `find_summary`).

    None if there is no copy, or if it is damaged.
    """
    from controllers.api.job_messages import describe_run
    from controllers.api.run_reader import find_run

    run_dir = find_run(runs, job)
    try:
        told = describe_run(run_dir) if run_dir is not None else None
    except (OSError, UnreadableRecord):
        return None
    return None if told is None else describe_job(told)


def describe_job(message: pb.Job) -> dict[str, str]:
    """Describe a job that the API returned as a mapping with the same keys as that of `find_summary`."""
    found = {"job": message.name, "uid": message.uid, "checkpoint": message.checkpoint, "folder": message.run_dir}
    best = job_snapshot(message).best
    return found if best is None else found | {"best": best_line(best), "best_checkpoint": best.checkpoint}


def find_unfinished_run(runs: Path, job: str) -> tuple[str, str] | None:
    """Name and uid of the newest unfinished run of that name or uid; None if there is none."""
    uid = find_newer_unfinished_run(runs, job)
    if uid is not None:
        return job, uid
    for folder in runs.glob(f"*-{glob.escape(_stem(job))}"):
        name, _, uid = folder.name.rpartition("-")
        if uid == job and folder.is_dir() and not any((folder / one).exists() for one in ENDED_FILES):
            return name, uid
    return None


def _stem(job: str) -> str:
    """The prefix of the run folders of a job name (`controllers.api.submission.submit.run_name`)."""
    return job.replace("/", ".")


def find_newer_unfinished_run(runs: Path, job: str) -> str | None:
    """The uid of an unfinished run of that name that was active later than all finished ones; None if there is none."""
    at_work: list[tuple[float, bool, str]] = []
    for folder in runs.glob(f"{glob.escape(_stem(job))}-*"):
        name, _, uid = folder.name.rpartition("-")
        ended = tuple(folder / one for one in ENDED_FILES)
        last = next((path for path in (*ended, folder / "events.jsonl") if path.exists()), folder)
        with contextlib.suppress(OSError):
            if name == _stem(job) and folder.is_dir():
                at_work.append((last.stat().st_mtime, last in ended, uid))
    newest = max(at_work, default=None)
    return None if newest is None or newest[1] else newest[2]


def find_summary(runs: Path, job: str) -> dict[str, str] | None:
    """Describe the newest finished run of that name or uid under `runs`; None if there is none.

    Keys: `job`, `uid`, `checkpoint`, `folder`, and if it has a best step, `best` (text) and `best_checkpoint` (empty: none).
    """
    found = [pair for pair in _summaries(runs) if job in (pair[1]["job"], pair[1]["uid"])]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _summaries(runs: Path) -> Iterator[tuple[float, dict[str, str]]]:
    """Yield for each finished run the time of its summary file (seconds since the epoch), and its description as in
    `find_summary`."""
    for path in runs.glob(f"*/{FILE_NAME}"):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            changed = path.stat().st_mtime
        except (OSError, ValueError):
            continue
        if isinstance(tree, dict):
            found = {key: str(tree.get(key, "")) for key in ("job", "uid", "checkpoint")}
            found["folder"] = str(path.parent)
            found["checkpoint"] = _lying_now(found["checkpoint"], path.parent)
            best = _best(tree.get("best"))
            if best is not None:
                best = dataclasses.replace(best, checkpoint=_lying_now(best.checkpoint, path.parent))
                found |= {"best": best_line(best), "best_checkpoint": best.checkpoint}
            yield changed, found


def _lying_now(checkpoint: str, run_dir: Path) -> str:
    """The current path of a checkpoint folder: the run folder may have been moved since the summary was written."""
    then = Path(checkpoint)
    return str(run_dir / CHECKPOINTS / then.name) if then.parent.name == CHECKPOINTS else checkpoint


def _best(tree: object) -> BestPoint | None:
    """Parse the best evaluated step (`best`) of `summary.json`; None if absent or malformed."""
    if not isinstance(tree, dict):
        return None
    step, value = get_count(tree, "step"), finite_or_none(tree.get("value"))
    if step is None or value is None:
        return None
    return BestPoint(step, get_text(tree, "metric"), value, get_text(tree, "checkpoint"))


def longer_command(words: Sequence[str], spec: JobSpec) -> str:
    """The command line `words` with twice the steps (or data epochs), which continues the finished job."""
    field = "steps" if spec.flow.steps is not None else "epochs"
    count = spec.flow.steps or spec.flow.epochs or 1
    option, value = ("--steps", str(2 * count)) if words[:1] == ["demo"] else ("--set", f"flow.{field}={2 * count}")
    kept: list[str] = []
    left = iter(word for word in words if word != "--new")
    for word in left:
        name, equals, given = word.partition("=")
        if name != option:
            kept.append(word)
            continue
        given = given if equals else next(left, "")
        if option == "--set" and not given.startswith(f"flow.{field}="):
            kept += [option, given]
    return shlex.join((program_name(), *kept, option, value))
