"""`gcore validate`, `schema`, `prepare` and `export`: the verbs about files."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output, as_json, console
from controllers.cli.called import PREPARED
from controllers.cli.extent_words import so_far
from controllers.cli.options import (
    DEFAULT_CONTROLLERS,
    DEFAULT_HOME,
    DEFAULT_SLOTS,
    Address,
    Controllers,
    Format,
    Home,
    JobName,
    Set,
    Slots,
    SpecFile,
)
from gcore.errors import Unreachable, UsageError
from gcore.prepare import NAMES

if TYPE_CHECKING:
    from controllers.service.checking import CheckedJob
    from gcore.config import JobSpec

VALIDATE_EXAMPLES = """
[bold]Examples[/bold]

gcore validate examples/arithmetic/grpo.yaml

gcore validate grpo.yaml --set train.ranks=4 --controllers 4 --slots cuda:8 -o json
"""
SCHEMA_EXAMPLES = """
[bold]Example[/bold]

gcore schema > job.schema.json
"""
PREPARE_EXAMPLES = """
[bold]Examples[/bold]

gcore prepare arithmetic --to .cache/examples/arithmetic

[dim]A judge of its answers:[/dim]  gcore prepare arithmetic-judge

[dim]A model that can ask a calculator:[/dim]  gcore prepare calculator
"""
EXPORT_EXAMPLES = """
[bold]Examples[/bold]

gcore export arithmetic --to ./trained

[dim]The one that its evaluations found best:[/dim]  gcore export arithmetic --best --to ./trained

[dim]The one of a step:[/dim]  gcore export arithmetic --step 200 --to ./at-200

[dim]One of several jobs of that name:[/dim]  gcore export 08d8f27366e5 --to ./trained
"""

PREPARED_UNDER = Path(PREPARED)


def validate(
    spec: SpecFile,
    set_: Set = None,
    controllers: Controllers = DEFAULT_CONTROLLERS,
    slots: Slots = DEFAULT_SLOTS,
    home: Home = DEFAULT_HOME,
    sample: Annotated[
        int | None, typer.Option(min=2, help="Prompts of each source whose tokens are counted; default: all.")
    ] = None,
    output: Format = Output.TABLE,
) -> None:
    """Check a spec and everything it names; print it resolved, its data, and every process that would be started."""
    import yaml
    from rich.table import Table

    from controllers.cli.data_words import first_prompt, histogram, lengths_title, notes, source_tree, sources_table
    from controllers.cli.model_words import download_sentence, download_tree, trust_warning
    from controllers.cli.processes import processes_of
    from controllers.service.capability import missing_here
    from gcore.config import load_spec
    from gcore.models.resolve import ask_hub

    loaded = load_spec(spec, set_ or ())
    processes_of(loaded, controllers, slots, None)  # too few slots are told before anything is read
    checked = check_files(loaded, home, sample)
    processes = processes_of(loaded, controllers, slots, checked.models)
    prompts = checked.prompts.prompts
    answer = ask_hub(loaded.model.path, trust_remote_code=loaded.model.trust_remote_code)
    if (warning := trust_warning(loaded.model)) is not None:
        typer.echo(warning, err=True)
    if (missing := missing_here(loaded)) is not None:
        typer.echo(missing, err=True)
    tree = loaded.model_dump(mode="json")
    if output.is_for_programs:
        download = download_tree(answer) if answer is not None else None
        sources = [source_tree(source) for source in checked.sources]
        shown = {"spec": tree, "processes": processes, "prompts": prompts, "sources": sources, "download": download}
        typer.echo(output.text(shown))
        return
    typer.echo(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    console().print(sources_table(checked.sources))
    typer.echo()
    for note in notes(checked.sources):
        typer.echo(note)
    for source in checked.sources:
        typer.echo(f"{first_prompt(source)}\n")
        typer.echo(lengths_title(source))
        for line in histogram(source.lengths):
            typer.echo(f"  {line}")
        typer.echo()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("PROCESS", "NODE", "SLOT"):
        table.add_column(heading)
    for process in processes:
        table.add_row(process["process"], process["node"], process["slot"])
    console().print(table)
    if answer is not None:
        typer.echo(f"\n{download_sentence(loaded.model.path, answer)}")
    typer.echo(f"\n{spec} is valid: {prompts} prompts, {so_far(loaded.flow, prompts)}.")


def schema() -> None:
    """The JSON schema of a job spec: every field with its meaning, unit and default."""
    from gcore.config import JobSpec

    typer.echo(as_json(JobSpec.model_json_schema()))


def prepare(
    example: Annotated[str, typer.Argument(metavar="EXAMPLE", help="What to prepare: " + ", ".join(NAMES) + ".")],
    to: Annotated[Path | None, typer.Option(help="Folder; default: .cache/examples/EXAMPLE.")] = None,
) -> None:
    """Make an example's data and its warm-started model, or the judge of one. Done already: returns at once."""
    # Trains a small model: the one verb that needs the train extra, and only while it runs.
    from gcore.prepare.examples import EXAMPLES

    if example not in EXAMPLES:
        raise UsageError(f"there is no example {example!r}", where="prepare", fix=f"Known: {', '.join(EXAMPLES)}")
    folder = to or PREPARED_UNDER / example
    typer.echo(f"Preparing {example} in {folder} ...")
    there = EXAMPLES[example](folder, 0)
    typer.echo(f"{example} is prepared in {folder}: {there}.")


def export(
    job: JobName,
    to: Annotated[Path, typer.Option(help="Folder that is new: gets a Hugging Face model.")],
    home: Home = DEFAULT_HOME,
    address: Address = None,
    best: Annotated[
        bool, typer.Option("--best", help="Not the newest checkpoint: the best by the spec's checkpoint.best.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Not the newest checkpoint: that of this step.", min=1, max=2**31 - 1)
    ] = None,
) -> None:
    """Copy the model of a job's newest checkpoint, of its best, or of a step's, ready for `from_pretrained` and for serving.

    A name means the newest job of that name; a uid means that one. Where no cluster is up, what `gcore run` finished in
    this home is found by its summary.
    """
    if best and step is not None:
        raise UsageError("--best and --step name two checkpoints", fix="Give one of them")
    found = _exportable(job, home, address, best=best) if step is None else _of_step(job, home, address, step)
    folder = found.checkpoint
    from controllers.cli.brought import on_this_machine
    from controllers.cli.checkpoints_verb import digest_of
    from gcore.weights.layout import CheckpointDamaged, copy_model

    digest = digest_of(folder, found.uid, home, address) if found.digest is None else found.digest
    try:
        with on_this_machine(folder, found.uid, home, address, to) as here:
            copy_model(here, to, digest)
    except CheckpointDamaged as error:
        others = (
            f"`gcore checkpoints {found.uid}` lists the others; `gcore export {found.uid} --step N` takes one of them"
        )
        raise CheckpointDamaged(error.what, where=error.where, fix=others) from error
    except OSError as error:
        raise UsageError(
            f"the model cannot be written here ({error.strerror or error})",
            where=str(to),
            fix="Name a folder that can be made, with room for the model",
        ) from error
    typer.echo(f"The model of job {found.name} ({found.uid}){found.by} is in {to}; {found.what} is {folder}.")


@dataclass(frozen=True, slots=True)
class _Exportable:
    """A job's newest checkpoint, or its best. `by`: how the job was found, if not by asking the cluster. `digest`: as it was
    registered, empty if the records do not say; None: they were not asked."""

    name: str
    uid: str
    checkpoint: Path
    by: str = ""
    what: str = "its checkpoint"
    digest: str | None = None


def _exportable(job: str, home: Path, address: str | None, *, best: bool) -> _Exportable:
    from controllers.cli.answers import best_line, snapshot
    from controllers.cli.job_verbs import call
    from controllers.cli.summary import finished_run

    try:
        found = snapshot(call(lambda client: client.get_job(job), address, home))
        name, uid, checkpoint, by = found.name, found.uid, found.checkpoint, ""
        best_words = best_line(found.best) if found.best is not None else ""
        best_checkpoint = found.best.checkpoint if found.best is not None else ""
    except Unreachable as error:
        if address is not None:
            raise
        summary = finished_run(home, job, error)
        name, uid, checkpoint = summary["job"], summary["uid"], summary["checkpoint"]
        best_words, best_checkpoint = summary.get("best", ""), summary.get("best_checkpoint", "")
        by = f", found in {home / 'runs'} because no cluster is up,"
    if best:
        if not best_words:
            raise UsageError(
                f"job {job!r} ({uid}) has no best checkpoint: nothing on its chain was evaluated, or checkpoint.best is none",
                fix="Export the newest one, without --best",
            )
        if not best_checkpoint:
            raise UsageError(
                f"the best of job {job!r} ({uid}) is no checkpoint ({best_words})",
                fix="Export the newest one, without --best",
            )
        return _Exportable(
            name, uid, Path(best_checkpoint), by, f"its best checkpoint ({best_words.partition(': ')[0]})"
        )
    if not checkpoint:
        raise UsageError(f"job {job!r} ({uid}) has no checkpoint yet", fix="Wait for one, or lower checkpoint.every")
    return _Exportable(name, uid, Path(checkpoint), by)


def _of_step(job: str, home: Path, address: str | None, step: int) -> _Exportable:
    from controllers.cli.checkpoints_verb import checkpoint_at, find_checkpoints

    found = find_checkpoints(job, home, address)
    checkpoint = checkpoint_at(found, step)
    reply, what = found.reply, f"its checkpoint of step {step}"
    return _Exportable(reply.name, reply.uid, Path(checkpoint.folder), found.by, what, checkpoint.digest)


def check_files(spec: JobSpec, home: Path, sample: int | None) -> CheckedJob:
    """What a controller checks when a job is submitted, with all prompts counted."""
    from controllers.cli.data_words import progress_bar
    from controllers.service.checking import check_submission

    with tempfile.TemporaryDirectory(prefix="gcore-validate-") as scratch, progress_bar() as progress:
        # A home that is there already keeps the index; a check alone leaves nothing behind.
        folder = home if home.is_dir() else Path(scratch)
        return check_submission(spec, folder / "runs", folder / "cache", sample=sample, progress=progress)
