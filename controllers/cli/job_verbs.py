"""`gcore submit`, `list`, `describe`, `cancel` and `audit`: thin callers of the job API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from controllers.cli.answers import (
    Output,
    as_json,
    audit_rows,
    audit_tree,
    console,
    job_rows,
    job_tree,
    jobs_table,
    pairs_table,
    snapshot,
)
from controllers.cli.called import as_called
from controllers.cli.finding import find_addresses
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, JobName, New, Plain, Set, SpecFile
from gcore.errors import Unreachable

if TYPE_CHECKING:
    from gcore.client import JobsClient

T = TypeVar("T")
INTERRUPTED = 130

SUBMIT_EXAMPLES = """
[bold]Examples[/bold]

gcore submit examples/arithmetic/grpo.yaml

gcore submit grpo.yaml --set train.learning_rate=1e-4 --set flow.steps=200 --follow

[dim]From a script, which may repeat it safely:[/dim]  gcore submit grpo.yaml --request-id nightly-17 -o json
"""
LIST_EXAMPLES = """
[bold]Examples[/bold]

gcore list

gcore list --address 10.0.0.7:7700 -o json
"""


def examples(verb: str) -> str:
    """The epilog of a verb that takes a job."""
    return f"""
[bold]Examples[/bold]

gcore {verb} arithmetic

gcore {verb} arithmetic --address 10.0.0.7:7700 -o json
"""


def submit(
    spec: SpecFile,
    set_: Set = None,
    new: New = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job until it has ended.")] = False,
    request_id: Annotated[str | None, typer.Option(help="Names the request: repeating it finds the same job.")] = None,
    plain: Plain = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Hand a job to a cluster that is up. With [bold]--follow[/bold] the exit code is the job's.

    With -o json the answer is the job, or with --follow its events, one a line.
    """
    import uuid

    from controllers.cli.creating import create_job
    from controllers.cli.following import record
    from controllers.cli.model_words import trust_warning
    from controllers.cli.screens import JsonScreen, Screen, choose_screen
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.clock import SystemClock
    from gcore.config import load_spec
    from gcore.errors import JobFailed

    clock = SystemClock()
    begun = clock.monotonic()
    loaded = load_spec(spec, set_ or ())
    if (warning := trust_warning(loaded.model)) is not None:
        typer.echo(warning, err=True)
    spec_json = loaded.model_dump_json()
    submitted = ""
    mode = pb.START_MODE_NEW if new else pb.START_MODE_RESUME
    request = request_id or uuid.uuid4().hex

    async def create_and_follow(client: JobsClient) -> None:
        nonlocal submitted
        job = snapshot(await create_job(client, spec_json, request_id=request, mode=mode))
        submitted = job.uid
        if output is Output.TABLE:
            typer.echo(f"Job {job.name} ({job.uid}) is {job.state}; its folder is {job.run_dir}.")
        elif not follow:
            typer.echo(as_json(job_tree(job)))
        if follow:
            as_lines = output is Output.JSON
            screen: Screen = JsonScreen(console()) if as_lines else choose_screen(console(), clock, plain=plain)
            ended = await record(client, job, screen, clock, begun=begun)
            if ended.state != "SUCCEEDED":
                raise JobFailed(f"job {ended.job} is {ended.state}: {ended.reason}", fix="See `gcore describe`")

    try:
        call(create_and_follow, address, home)
    except KeyboardInterrupt:
        if not submitted:
            raise
        hint = f"`gcore describe {submitted}` shows how it stands, `gcore cancel {submitted}` ends it."
        typer.echo(as_called(f"No longer watching; job {loaded.name} goes on. {hint}"), err=True)
        raise typer.Exit(INTERRUPTED) from None


def list_(home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """All jobs of the cluster."""
    jobs = [snapshot(job) for job in call(lambda client: client.list_jobs(), address, home)]
    if output is Output.JSON:
        typer.echo(as_json([job_tree(job) for job in jobs]))
    else:
        console().print(jobs_table(jobs))


def describe(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """How a job stands, who works on which shards, what it waits for since when, its last rollback and newest warnings."""
    from gcore.clock import SystemClock

    found = snapshot(call(lambda client: client.get_job(job), address, home))
    if output is Output.JSON:
        typer.echo(as_json(job_tree(found)))
    else:
        console().print(pairs_table(job_rows(found, SystemClock().wall())))


def cancel(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """End a job for good. One that has ended stays as it is."""
    found = snapshot(call(lambda client: client.cancel_job(job), address, home))
    if output is Output.JSON:
        typer.echo(as_json(job_tree(found)))
    else:
        typer.echo(f"Job {found.name} ({found.uid}) is {found.state}.")


def audit(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Recompute a job's accounts from its log and the ranks' receipts. Ends with 1 if they do not add up.

    Where no cluster is up, a run that ended in this home is audited from its folder.
    """
    try:
        report = call(lambda client: client.audit_job(job), address, home)
    except Unreachable as error:
        if address is not None:
            raise
        from controllers.cli.summary import finished_run
        from controllers.service.audits import audit_of_folder, report_of, run_of

        run_dir = run_of(home / "runs", job) or Path(finished_run(home, job, error)["folder"])
        report = report_of(audit_of_folder(run_dir))
    if output is Output.JSON:
        typer.echo(as_json(audit_tree(report)))
    else:
        console().print(pairs_table(audit_rows(report)))
    if not report.clean:
        raise typer.Exit(1)


def call(what: Callable[[JobsClient], Awaitable[T]], address: str | None, home: Path) -> T:
    """Run one conversation with the cluster."""
    import asyncio

    from gcore.client import JobsClient
    from gcore.clock import SystemClock

    addresses = find_addresses(address, home)

    async def talk() -> T:
        async with JobsClient(addresses, clock=SystemClock()) as client:
            return await what(client)

    return asyncio.run(talk())
