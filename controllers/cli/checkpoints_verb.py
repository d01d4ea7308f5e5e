"""`gcore checkpoints`: which checkpoints a job has, how large and how old, and why each is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from controllers.cli.answers import Output, console
from controllers.cli.job_verbs import call
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, JobName
from controllers.cli.view_text import seconds, visible
from gcore.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from gcore.api.v1 import jobs_pb2 as pb

CHECKPOINTS_EXAMPLES = """
[bold]Examples[/bold]

gcore checkpoints arithmetic

gcore checkpoints arithmetic -o json
"""
WIDEST = 400
"""Characters of a folder or a reason that are shown; JSON has all."""


def checkpoints(
    job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE
) -> None:
    """The checkpoints of a job: step, size, age, and why each is kept. `gcore export --step` copies the model of one.

    Where no cluster is up, those of a run that ended in this home are read from its folder.
    """
    from gcore.clock import SystemClock

    found = find_checkpoints(job, home, address).reply
    if output.is_for_programs:
        typer.echo(output.text([_tree(one) for one in found.checkpoints]))
    elif not found.checkpoints:
        typer.echo(f"Job {found.name} ({found.uid}) has no checkpoint yet.")
    else:
        console().print(_table(found, SystemClock().wall()))


@dataclass(frozen=True, slots=True)
class FoundCheckpoints:
    """A job's. `by`: how the job was found, if not by asking the cluster."""

    reply: pb.ListCheckpointsReply
    by: str = ""


def find_checkpoints(job: str, home: Path, address: str | None) -> FoundCheckpoints:
    """The registered ones; where no cluster is up, those in the run's folder. Raises GcoreError."""
    try:
        return FoundCheckpoints(call(lambda client: client.list_checkpoints(job), address, home))
    except Unreachable as error:
        if address is not None:
            raise
        from controllers.cli.summary import finished_run
        from controllers.service.checkpoints import checkpoints_of_folder

        run = finished_run(home, job, error)
        reply = checkpoints_of_folder(Path(run["folder"]), run["job"], run["uid"])
        return FoundCheckpoints(reply, f", found in {home / 'runs'} because no cluster is up,")


def checkpoint_at(found: FoundCheckpoints, step: int) -> pb.CheckpointInfo:
    """The one of a step; of several, which rollbacks leave, one that is kept, else the newest lineage's. Raises UsageError."""
    job = found.reply
    there = [one for one in job.checkpoints if one.step == step]
    if there:
        return max(there, key=lambda one: (bool(one.kept), one.lineage))
    steps = sorted({one.step for one in job.checkpoints})
    known = f"there are those of steps {', '.join(map(str, steps))}" if steps else "it has none yet"
    raise UsageError(
        f"job {job.name!r} ({job.uid}) has no checkpoint of step {step}; {known}",
        fix="`gcore checkpoints` lists them; checkpoint.every and checkpoint.keep_every say which there will be",
    )


def digest_of(folder: Path, uid: str, home: Path, address: str | None) -> str:
    """Of the manifest of the job's checkpoint `folder`, as it was registered; empty if the records do not say. Raises GcoreError."""
    listed = find_checkpoints(uid, home, address).reply.checkpoints
    return next((one.digest for one in listed if Path(one.folder).name == folder.name), "")


def _tree(one: pb.CheckpointInfo) -> dict[str, Any]:
    return {
        "step": one.step,
        "lineage": one.lineage,
        "folder": one.folder,
        "bytes": one.bytes,
        "written": one.written,
        "kept": list(one.kept),
        "problem": one.problem,
        "nodes": list(one.nodes),
    }


def _table(found: pb.ListCheckpointsReply, now: float) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("STEP", "LINEAGE", "SIZE", "AGE"):
        table.add_column(heading, justify="right")
    table.add_column("KEPT")
    table.add_column("FOLDER", overflow="fold")
    for one in found.checkpoints:
        age = seconds(max(now - one.written, 0.0)) if one.written else "-"
        kept = ", ".join(one.kept) or "-"
        words = f"{kept}; damaged: {one.problem}" if one.problem else kept
        words = f"{words}; on {', '.join(one.nodes)}" if one.nodes else words
        table.add_row(
            str(one.step),
            str(one.lineage),
            size_of(one.bytes),
            age,
            Text(visible(words, WIDEST)),
            Text(visible(one.folder, WIDEST)),
        )
    return table


def size_of(count: int) -> str:
    """`12.3 MB`; `-` for nothing that can be seen."""
    if not count:
        return "-"
    unit, size = next(((u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if count >= s), ("KB", 1e3))
    return f"{count / size:.1f} {unit}"
