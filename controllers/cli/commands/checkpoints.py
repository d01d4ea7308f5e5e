"""`gcore checkpoints` and `gcore export`: list a job's checkpoints with the reason why each is kept, and copy the model of one.

If the nodes of the job share no folder, `export` fetches the checkpoint from a node that has it and verifies it before the copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.options import (
    DEFAULT_HOME,
    FILES,
    JOBS,
    Address,
    Format,
    Home,
    JobName,
    call_cluster,
    command,
    run_of_home,
)
from controllers.cli.output import Output, format_seconds, message_tree, printable_text
from controllers.cli.terminal import Rows, display, rows_table, say
from gcore.errors import Unreachable, UsageError
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb


@command(
    "export",
    FILES,
    "gcore export arithmetic --to ./trained",
    "[dim]The best checkpoint by evaluation:[/dim]  gcore export arithmetic --best --to ./trained",
    "[dim]The checkpoint of a step:[/dim]  gcore export arithmetic --step 200 --to ./at-200",
    "[dim]A job by its uid:[/dim]  gcore export 08d8f27366e5 --to ./trained",
)
def export(
    job: JobName,
    to: Annotated[Path, typer.Option(help="New folder for the Hugging Face model.")],
    home: Home = DEFAULT_HOME,
    address: Address = None,
    best: Annotated[
        bool, typer.Option("--best", help="Use the best checkpoint by checkpoint.best of the spec, not the newest.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Use the checkpoint of this step, not the newest.", min=1, max=2**31 - 1)
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Copy the adapter alone, for PEFT (jobs with train.lora).")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Folder of the adapter's base model, or of the pipeline whose network was trained. Default: where the job found it.",
        ),
    ] = None,
) -> None:
    """Copy the model of a checkpoint, ready for `from_pretrained` and for serving. Default: the newest checkpoint.

    An adapter (train.lora) is merged with its base model, unless `--adapter` is given. For a policy that generates pictures the whole
    pipeline is written, with the trained network.

    A name selects the newest job of that name; a uid selects exactly one job. If no cluster is running, finished runs in the home folder
    are searched.
    """
    if best and step is not None:
        raise UsageError("--best and --step exclude each other", fix="Give only one of them")
    if adapter and base is not None:
        raise UsageError(
            "--adapter and --base exclude each other: an adapter alone is not merged", fix="Give only one of them"
        )
    if base is not None and not base.strip():
        raise UsageError("--base is empty", fix="Name the folder of the base model, or leave --base out")
    found = _exportable(job, home, address, best=best) if step is None else _of_step(job, home, address, step)
    folder = found.checkpoint
    from gcore.models.export import copy_model
    from gcore.models.layout import CheckpointDamaged

    digest = checkpoint_digest(folder, found.uid, home, address) if found.digest is None else found.digest
    try:
        with local_checkpoint(folder, found.uid, home, address, to) as here:
            copy_model(here, to, digest, adapter=adapter, base=None if base is None else Path(base))
    except CheckpointDamaged as error:
        others = (
            f"List the others with `gcore checkpoints {found.uid}`; export one with `gcore export {found.uid} --step N`"
        )
        raise CheckpointDamaged(error.what, where=error.where, fix=others) from error
    except OSError as error:
        raise UsageError(
            f"the model cannot be written here ({error.strerror or error})",
            where=str(to),
            fix="Choose a folder that can be created, on a disk with space for the model",
        ) from error
    copied = "adapter" if adapter else "model"
    say(f"The {copied} of job {found.name} ({found.uid}){found.by} is in {to}; {found.what} is {folder}.")


@dataclass(frozen=True, slots=True)
class _Exportable:
    """The checkpoint to export. `by` and `what`: phrases for the success message that say where the job was found, if
    not through a cluster, and which checkpoint this is. `digest`: registered digest of its manifest; empty if none is
    recorded; None if not looked up yet."""

    name: str
    uid: str
    checkpoint: Path
    by: str = ""
    what: str = "its checkpoint"
    digest: str | None = None


def _exportable(job: str, home: Path, address: str | None, *, best: bool) -> _Exportable:
    """Find the checkpoint to export: the newest one of a job, or with `best` the best by evaluation. Raises GcoreError."""
    from controllers.cli.view.summary import describe_job

    by = ""
    try:
        found = describe_job(call_cluster(lambda client: client.get_job(job), address, home))
    except Unreachable as error:
        found, by = run_of_home(job, address, home, error), _found_in(home)
    name, uid, words = found["job"], found["uid"], found.get("best", "")
    if not best:
        if not found["checkpoint"]:
            fix = "Wait for the first checkpoint, or lower checkpoint.every"
            raise UsageError(f"job {job!r} ({uid}) has no checkpoint yet", fix=fix)
        return _Exportable(name, uid, Path(found["checkpoint"]), by)
    fix = "Export the newest checkpoint, without --best"
    if not words:
        why = "none of its steps was evaluated, or checkpoint.best is none"
        raise UsageError(f"job {job!r} ({uid}) has no best checkpoint: {why}", fix=fix)
    if not found["best_checkpoint"]:
        raise UsageError(f"the best step of job {job!r} ({uid}) has no checkpoint ({words})", fix=fix)
    what = f"its best checkpoint ({words.partition(': ')[0]})"
    return _Exportable(name, uid, Path(found["best_checkpoint"]), by, what)


def _found_in(home: Path) -> str:
    return f", found in {home / 'runs'} because no cluster is running,"


def _of_step(job: str, home: Path, address: str | None, step: int) -> _Exportable:
    found = find_checkpoints(job, home, address)
    checkpoint = select_checkpoint(found, step)
    reply, what = found.reply, f"its checkpoint of step {step}"
    return _Exportable(reply.name, reply.uid, Path(checkpoint.folder), found.by, what, checkpoint.digest)


FIELDS = ("step", "lineage", "folder", "bytes", "written", "kept", "problem", "nodes")
WIDEST = 400
"""Maximum characters of a folder or a reason in the table; JSON has all."""


@command("checkpoints", JOBS, "gcore checkpoints arithmetic", "gcore checkpoints arithmetic -o json")
def checkpoints(
    job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE
) -> None:
    """List the checkpoints of a job: step, size, age, and why each is kept. `gcore export --step` copies the model of one.

    If no cluster is running, the checkpoints of a finished run are read from its folder.
    """
    found = find_checkpoints(job, home, address).reply
    if output.is_for_programs:
        typer.echo(output.text([message_tree(one, *FIELDS) for one in found.checkpoints]))
    elif not found.checkpoints:
        say(f"Job {found.name} ({found.uid}) has no checkpoint yet.")
    else:
        display(_table(found, SystemClock().wall()))


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    """The checkpoints of a job. `by`: phrase that says where the job was found; empty if the cluster reported it."""

    reply: pb.ListCheckpointsReply
    by: str = ""


def find_checkpoints(job: str, home: Path, address: str | None) -> CheckpointListing:
    """List the checkpoints of a job that the cluster registered; if no cluster is running, those in its run folder.
    Raises GcoreError."""
    try:
        return CheckpointListing(call_cluster(lambda client: client.list_checkpoints(job), address, home))
    except Unreachable as error:
        from controllers.api.run_reader import checkpoints_of_folder

        run = run_of_home(job, address, home, error)
        reply = checkpoints_of_folder(Path(run["folder"]), run["job"], run["uid"])
        return CheckpointListing(reply, _found_in(home))


def select_checkpoint(found: CheckpointListing, step: int) -> pb.CheckpointInfo:
    """Select the checkpoint of a step. If rollbacks left several, prefer one that is kept, then the one of the newest
    lineage.

    Raises UsageError if there is none.
    """
    job = found.reply
    there = [one for one in job.checkpoints if one.step == step]
    if there:
        return max(there, key=lambda one: (bool(one.kept), one.lineage))
    steps = sorted({one.step for one in job.checkpoints})
    known = f"it has checkpoints of steps {', '.join(map(str, steps))}" if steps else "it has none yet"
    raise UsageError(
        f"job {job.name!r} ({job.uid}) has no checkpoint of step {step}; {known}",
        fix="See `gcore checkpoints`. checkpoint.every and checkpoint.keep_every set which checkpoints are written and kept",
    )


def checkpoint_digest(folder: Path, uid: str, home: Path, address: str | None) -> str:
    """The registered digest of the manifest of checkpoint `folder`; empty if not recorded. Raises GcoreError."""
    listed = find_checkpoints(uid, home, address).reply.checkpoints
    return next((one.digest for one in listed if Path(one.folder).name == folder.name), "")


def _table(found: pb.ListCheckpointsReply, now: float) -> Rows:
    numbers, rows = ("STEP", "LINEAGE", "SIZE", "AGE"), []
    for one in found.checkpoints:
        age = format_seconds(max(now - one.written, 0.0)) if one.written else "-"
        kept = ", ".join(one.kept) or "-"
        words = f"{kept}; damaged: {one.problem}" if one.problem else kept
        words = f"{words}; on {', '.join(one.nodes)}" if one.nodes else words
        texts = (printable_text(words, WIDEST), printable_text(one.folder, WIDEST))
        rows.append((str(one.step), str(one.lineage), format_size(one.bytes), age, *texts))
    return rows_table((*numbers, "KEPT", "FOLDER"), rows, right=numbers)


def format_size(count: int) -> str:
    """Format a size in bytes: `12.3 MB`; `-` for 0 (unknown)."""
    if not count:
        return "-"
    unit, size = next(((u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if count >= s), ("KB", 1e3))
    return f"{count / size:.1f} {unit}"


@contextlib.contextmanager
def local_checkpoint(folder: Path, job: str, home: Path, address: str | None, near: Path) -> Iterator[Path]:
    """Yield the checkpoint `folder` itself, or a copy fetched into the parent of `near`, which is removed after the block.

    Raises GcoreError, and OSError if the copy does not fit.
    """
    if folder.is_dir():
        yield folder
        return
    fetch = _fetcher(folder, job, home, address)
    near.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{near.name}.", suffix=".tmp", dir=near.parent))
    try:
        yield fetch(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetcher(folder: Path, job: str, home: Path, address: str | None) -> Callable[[Path], Path]:
    """Return a function that copies the checkpoint `folder` of a job into a local folder, from one of the nodes that
    have it.

    Raises GcoreError if the cluster lists no node for it.
    """
    from controllers.storage.peer_files import PeerFiles, fetch_from_first
    from gcore.client.contexts import find_cluster
    from gcore.models.layout import verify_checkpoint

    found = find_checkpoints(job, home, address).reply
    nodes = next((list(one.nodes) for one in found.checkpoints if Path(one.folder).name == folder.name), [])
    if not nodes:
        raise UsageError(
            "the checkpoint is not on this machine",
            where=str(folder),
            fix="Run this on a machine where the storage is mounted",
        )
    connector = find_cluster(address, home).connector
    addresses = {
        node.name: node.address for node in call_cluster(lambda client: client.list_nodes(), address, home).nodes
    }

    def fetch(scratch: Path) -> Path:
        files = PeerFiles(found.uid, scratch, owner="export", connector=connector)

        async def from_peer(peer: str) -> None:
            await files.folder(peer, f"checkpoints/{folder.name}", verify_checkpoint, durable=False)

        fetched = asyncio.run(fetch_from_first(addresses, nodes, from_peer))
        if not fetched.source:
            raise UsageError(
                f"the checkpoint is on {', '.join(nodes)}, but none of them sent it ({fetched.why or 'they are not running'})",
                where=str(folder),
                fix="Try again when one of these nodes is running",
            )
        return scratch / "checkpoints" / folder.name

    return fetch
