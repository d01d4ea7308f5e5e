"""Commands about jobs: `gcore list`, `describe`, `audit`, `cancel`, `pause`, `resume`, `retry`, `update`, `delete` and `eval`.

Each makes one or a few requests to the job API.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.options import (
    DEFAULT_HOME,
    JOBS,
    Address,
    Format,
    Home,
    JobName,
    Namespace,
    call_cluster,
    check_utf8,
    command,
    run_of_home,
    verb_examples,
)
from controllers.cli.output import (
    Output,
    audit_rows,
    audit_tree,
    format_time,
    job_rows,
    job_snapshot,
    job_tree,
    jobs_table,
    message_tree,
    printable_text,
)
from controllers.cli.terminal import BAD, GOOD, STATE_COLOURS, Pairs, display, say
from gcore.errors import GcoreError, Unreachable, UsageError, did_you_mean
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.jobs import JobsClient
    from gcore.observability.events import JobEvent


@command(
    "list",
    JOBS,
    "gcore list",
    "gcore list --state running --state queued --namespace research",
    "gcore list --address 10.0.0.7:7700 -o json",
)
def list_jobs(
    state: Annotated[
        list[str] | None, typer.Option(help="Only jobs in this state, such as running or queued. Repeatable.")
    ] = None,
    namespace: Namespace = "",
    name: Annotated[str, typer.Option(help="Only jobs whose name starts with this.", callback=check_utf8)] = "",
    limit: Annotated[int | None, typer.Option(min=1, max=100_000, help="Only the newest N. Default: all.")] = None,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """List the jobs of the cluster that you may see, newest first."""
    states = [parse_state(one) for one in state or ()]
    found = call_cluster(
        lambda client: client.list_jobs(namespace=namespace, states=states, name_prefix=name, limit=limit),
        address,
        home,
    )
    jobs = [job_snapshot(job) for job in found]
    if output.is_for_programs:
        typer.echo(output.text([job_tree(job) for job in jobs]))
    else:
        display(jobs_table(jobs))


def parse_state(word: str) -> int:
    """The API's number of a job state given by name, such as "running". Raises UsageError."""
    from gcore.api.v1 import jobs_pb2 as pb

    known = {name.removeprefix("JOB_STATE_").lower(): number for name, number in pb.JobState.items() if number}
    if word.lower() not in known:
        near = did_you_mean(word.lower(), known)
        raise UsageError(
            f"{word[:40]!r} is not a job state{near or '.'}", where="--state", fix=f"Use one of {', '.join(known)}"
        )
    return known[word.lower()]


@command("describe", JOBS, *verb_examples("describe"))
def describe(
    job: JobName,
    events: Annotated[int, typer.Option(min=0, max=1000, help="Number of recent events to show.")] = 5,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Show a job in detail: state, slots, wait reports, shards, placement, recent events, last rollback and newest warnings."""

    async def look(client: JobsClient) -> tuple[pb.Job, pb.PlacementReply | None, list[JobEvent]]:
        found = await client.get_job(job)
        placement, last = None, []
        with contextlib.suppress(UsageError):  # A controller of an older version does not know this request.
            placement = await client.get_placement(found.uid)
        if events:
            with contextlib.suppress(GcoreError):  # A controller that does not serve the job yet has no events.
                last = [event async for event in client.follow(found.uid, newest=events, follow=False)]
        return found, placement, last

    message, placement, last = call_cluster(look, address, home)
    found = job_snapshot(message)
    if output.is_for_programs:
        tree = job_tree(found)
        tree["events"] = [json.loads(event.to_line()) for event in last]
        typer.echo(output.text(tree))
        return
    rows = job_rows(found, SystemClock().wall())
    if placement is not None and placement.plan:
        from controllers.cli.view.placement import placement_rows

        rows |= {f"placement: {name}": value for name, value in placement_rows(placement).items() if name != "job"}
    for event in last[-events:] if events else []:
        rows[f"event {event.sequence}"] = f"{format_time(event.time)}: {printable_text(event.message, 200)}"
    display(Pairs(rows, {"state": STATE_COLOURS.get(found.state, "")}))


@command("audit", JOBS, *verb_examples("audit"))
def audit(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Audit a job: compare its log with the receipts of the train ranks. The exit code is 1 if they disagree.

    If no cluster is running, a finished run is audited from its folder.
    """
    try:
        report = call_cluster(lambda client: client.audit_job(job), address, home)
    except Unreachable as error:
        if address is not None:
            raise
        from controllers.api.run_reader import audit_of_folder, audit_report, find_run

        run_dir = find_run(home / "runs", job) or Path(run_of_home(job, address, home, error)["folder"])
        report = audit_report(audit_of_folder(run_dir))
    if output.is_for_programs:
        typer.echo(output.text(audit_tree(report)))
    else:
        display(Pairs(audit_rows(report), {"verdict": GOOD if report.clean else BAD}))
    if not report.clean:
        raise typer.Exit(1)


MOST_SLOTS = 1_000_000


@command(
    "cancel",
    JOBS,
    "gcore cancel arithmetic",
    "[dim]After a checkpoint at the next commit:[/dim]  gcore cancel arithmetic --drain",
)
def cancel(
    job: JobName,
    drain: Annotated[
        bool, typer.Option("--drain", help="Cancel at the next commit, with a checkpoint. Default: immediately.")
    ] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Cancel a job permanently. A job that has ended is not changed."""
    _tell(call_cluster(lambda client: client.cancel_job(job, drain=drain), address, home), output)


@command("pause", JOBS, *verb_examples("pause"))
def pause(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Pause a job: at its next commit it writes a checkpoint and releases its slots. `gcore resume` continues it."""
    _tell(call_cluster(lambda client: client.pause_job(job), address, home), output)


@command("resume", JOBS, *verb_examples("resume"))
def resume(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Resume a paused job. It continues as soon as slots are free."""
    _tell(call_cluster(lambda client: client.resume_job(job), address, home), output)


@command("retry", JOBS, *verb_examples("retry"))
def retry(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Run an ended job again: create a new job with the same spec and name.

    It is safe to repeat: while a job of that name has not ended, no new job is created and that job goes on.
    """
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.calls import ENDED, job_state_name

    async def again(client: JobsClient) -> pb.Job:
        old = await client.get_job(job)
        if old.state not in ENDED:
            raise UsageError(
                f"job {old.name!r} ({old.uid}) is {job_state_name(old.state)}: it has not ended",
                fix="Use `gcore resume` for a paused job, or `gcore cancel` to end it first",
            )
        # Not START_MODE_NEW: that would cancel another job which has been given the name since.
        return await client.create_job(old.spec_json, request_id=f"retry-{old.uid}", mode=pb.START_MODE_RESUME)

    _tell(call_cluster(again, address, home), output)


@command(
    "update",
    JOBS,
    "gcore update arithmetic --priority 10",
    "gcore update arithmetic --slots-min 2 --slots-max 8",
    "[dim]No upper limit:[/dim]  gcore update arithmetic --slots-max 0",
)
def update(
    job: JobName,
    priority: Annotated[
        int | None,
        typer.Option(min=-1000, max=1000, help="Jobs with a higher priority run first and may preempt others."),
    ] = None,
    slots_min: Annotated[
        int | None, typer.Option("--slots-min", min=1, max=MOST_SLOTS, help="Minimum number of slots to run.")
    ] = None,
    slots_max: Annotated[
        int | None, typer.Option("--slots-max", min=0, max=MOST_SLOTS, help="Maximum number of slots; 0: no limit.")
    ] = None,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Change the priority or the slot limits of a job while it runs."""
    given = {"priority": priority, "slots_min": slots_min, "slots_max": slots_max}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise UsageError("no change is given", fix="Give --priority, --slots-min or --slots-max")
    _tell(call_cluster(lambda client: client.update_job(job, changes), address, home), output)


@command(
    "delete",
    JOBS,
    "gcore delete arithmetic",
    "[dim]With its run folder and all checkpoints:[/dim]  gcore delete 08d8f27366e5 --files --yes",
)
def delete(
    job: JobName,
    files: Annotated[
        bool, typer.Option("--files", help="Also delete its run folder with all checkpoints. Cannot be undone.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
) -> None:
    """Delete an ended job: its records, and with [bold]--files[/bold] also its run folder. Its name can then be used again.

    Its slot usage stays in `gcore usage`.
    """
    found = job_snapshot(call_cluster(lambda client: client.get_job(job), address, home))
    if files and not yes:
        typer.confirm(
            f"Delete {found.run_dir} with all checkpoints of job {found.full_name} ({found.uid})?", abort=True
        )
    call_cluster(lambda client: client.delete_job(found.uid, files=files), address, home)
    left = "" if files or not found.run_dir else f"; its run folder {found.run_dir} is kept"
    say(f"Job {printable_text(found.full_name)} ({found.uid}) is deleted{left}.")


@command("eval", JOBS, *verb_examples("eval"))
def evaluate(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Request an evaluation of a running job's newest weights. The result appears as an event and in its metrics."""
    reply = call_cluster(lambda client: client.run_eval(job), address, home)
    if output.is_for_programs:
        typer.echo(output.text(message_tree(reply, "step", "lineage")))
    else:
        say(f"The weights of step {reply.step} (lineage {reply.lineage}) will be evaluated when the engines have them.")


def _tell(job: pb.Job, output: Output) -> None:
    found = job_snapshot(job)
    if output.is_for_programs:
        typer.echo(output.text(job_tree(found)))
    else:
        why = f": {printable_text(found.reason, 300)}" if found.reason else ""
        say(f"Job {printable_text(found.full_name)} ({found.uid}) is {found.state}{why}.".replace("..", "."))
