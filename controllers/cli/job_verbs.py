"""`gcore list`, `describe` and `audit`: thin callers of the job API, and what all such verbs stand on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from controllers.cli.answers import (
    Output,
    audit_rows,
    audit_tree,
    console,
    job_rows,
    job_tree,
    jobs_table,
    moment,
    pairs_table,
    snapshot,
)
from controllers.cli.finding import find_cluster
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, JobName, Namespace, utf8
from controllers.cli.view_text import visible
from gcore.errors import GcoreError, Unreachable, UsageError
from gcore.nearest import did_you_mean

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client import JobsClient
    from gcore.events import JobEvent

T = TypeVar("T")
INTERRUPTED = 130

LIST_EXAMPLES = """
[bold]Examples[/bold]

gcore list

gcore list --state running --state queued --namespace research

gcore list --address 10.0.0.7:7700 -o json
"""


def examples(verb: str) -> str:
    """The epilog of a verb that takes a job."""
    return f"""
[bold]Examples[/bold]

gcore {verb} arithmetic

gcore {verb} arithmetic --address 10.0.0.7:7700 -o json
"""


def list_(
    state: Annotated[
        list[str] | None, typer.Option(help="Only in this state, such as running or queued. Repeatable.")
    ] = None,
    namespace: Namespace = "",
    name: Annotated[str, typer.Option(help="Only those whose name begins so.", callback=utf8)] = "",
    limit: Annotated[int | None, typer.Option(min=1, max=100_000, help="The newest so many; default: all.")] = None,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """The jobs of the cluster that you may see, the newest first."""
    states = [state_number(one) for one in state or ()]
    found = call(
        lambda client: client.list_jobs(namespace=namespace, states=states, name_prefix=name, limit=limit),
        address,
        home,
    )
    jobs = [snapshot(job) for job in found]
    if output.is_for_programs:
        typer.echo(output.text([job_tree(job) for job in jobs]))
    else:
        console().print(jobs_table(jobs))


def state_number(word: str) -> int:
    """Of a state as a person writes it. Raises UsageError."""
    from gcore.api.v1 import jobs_pb2 as pb

    known = {name.removeprefix("JOB_STATE_").lower(): number for name, number in pb.JobState.items() if number}
    if word.lower() not in known:
        near = did_you_mean(word.lower(), known)
        raise UsageError(
            f"{word[:40]!r} is no state{near or '.'}", where="--state", fix=f"There are {', '.join(known)}"
        )
    return known[word.lower()]


def describe(
    job: JobName,
    events: Annotated[int, typer.Option(min=0, max=1000, help="How many of its last events are shown.")] = 5,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """How a job stands: state and slots, what it waits for since when, shards, placement, last events and rollback, newest warnings."""
    from gcore.clock import SystemClock

    async def look(client: JobsClient) -> tuple[pb.Job, pb.PlacementReply | None, list[JobEvent]]:
        found = await client.get_job(job)
        placement, last = None, []
        with contextlib.suppress(UsageError):  # a controller of an earlier version
            placement = await client.get_placement(found.uid)
        if events:
            with contextlib.suppress(GcoreError):  # a controller that is not on the job yet; the rest is told
                last = [event async for event in client.follow(found.uid, newest=events, follow=False)]
        return found, placement, last

    message, placement, last = call(look, address, home)
    found = snapshot(message)
    if output.is_for_programs:
        tree = job_tree(found)
        tree["events"] = [json.loads(event.to_line()) for event in last]
        typer.echo(output.text(tree))
        return
    rows = job_rows(found, SystemClock().wall())
    if placement is not None and placement.plan:
        from controllers.cli.placement_words import shown_rows

        rows |= {f"placement: {name}": value for name, value in shown_rows(placement).items() if name != "job"}
    for event in last[-events:] if events else []:
        rows[f"event {event.sequence}"] = f"{moment(event.time)}: {visible(event.message, 200)}"
    console().print(pairs_table(rows))


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
    if output.is_for_programs:
        typer.echo(output.text(audit_tree(report)))
    else:
        console().print(pairs_table(audit_rows(report)))
    if not report.clean:
        raise typer.Exit(1)


def call(what: Callable[[JobsClient], Awaitable[T]], address: str | None, home: Path) -> T:
    """Run one conversation with the cluster."""
    import asyncio

    from gcore.client import JobsClient
    from gcore.clock import SystemClock

    cluster = find_cluster(address, home)

    async def talk() -> T:
        async with JobsClient(cluster.addresses, clock=SystemClock(), connector=cluster.connector) as client:
            return await what(client)

    return asyncio.run(talk())
