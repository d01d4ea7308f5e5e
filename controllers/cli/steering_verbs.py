"""`gcore cancel`, `pause`, `resume`, `retry`, `update`, `delete` and `eval`: what people do to a job. Thin callers of the job API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output, job_tree, snapshot
from controllers.cli.job_verbs import call, examples
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, JobName
from controllers.cli.view_text import visible
from gcore.errors import UsageError

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb

CANCEL_EXAMPLES = """
[bold]Examples[/bold]

gcore cancel arithmetic

[dim]With a checkpoint, at its next commit:[/dim]  gcore cancel arithmetic --drain
"""
UPDATE_EXAMPLES = """
[bold]Examples[/bold]

gcore update arithmetic --priority 10

gcore update arithmetic --slots-min 2 --slots-max 8

[dim]As many as there are:[/dim]  gcore update arithmetic --slots-max 0
"""
DELETE_EXAMPLES = """
[bold]Examples[/bold]

gcore delete arithmetic

[dim]With its checkpoints and everything else in its folder:[/dim]  gcore delete 08d8f27366e5 --files --yes
"""
PAUSE_EXAMPLES, RESUME_EXAMPLES = examples("pause"), examples("resume")
RETRY_EXAMPLES, EVAL_EXAMPLES = examples("retry"), examples("eval")
MOST_SLOTS = 1_000_000


def cancel(
    job: JobName,
    drain: Annotated[
        bool, typer.Option("--drain", help="At its next commit, with a checkpoint; default: at once.")
    ] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """End a job for good. One that has ended stays as it is."""
    _tell(call(lambda client: client.cancel_job(job, drain=drain), address, home), output)


def pause(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Have a job give its slots back at its next commit, with a checkpoint, and begin nothing until it is resumed."""
    _tell(call(lambda client: client.pause_job(job), address, home), output)


def resume(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Have a paused job go on as soon as there are slots for it."""
    _tell(call(lambda client: client.resume_job(job), address, home), output)


def retry(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Begin a job that has ended once more: a new job with the same spec and name.

    Repeating the command makes no second one, and one of that name that has not ended goes on.
    """
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client import ENDED, JobsClient, job_state_name

    async def again(client: JobsClient) -> pb.Job:
        old = await client.get_job(job)
        if old.state not in ENDED:
            raise UsageError(
                f"job {old.name!r} ({old.uid}) is {job_state_name(old.state)}: it has not ended",
                fix="`gcore resume` goes on with a paused one; `gcore cancel` ends one",
            )
        # Not as a new one at any price: that would end another job which was given the name since.
        return await client.create_job(old.spec_json, request_id=f"retry-{old.uid}", mode=pb.START_MODE_RESUME)

    _tell(call(again, address, home), output)


def update(
    job: JobName,
    priority: Annotated[
        int | None, typer.Option(min=-1000, max=1000, help="The higher, the sooner; it takes slots of those below it.")
    ] = None,
    slots_min: Annotated[
        int | None, typer.Option("--slots-min", min=1, max=MOST_SLOTS, help="With fewer slots it does not run.")
    ] = None,
    slots_max: Annotated[
        int | None, typer.Option("--slots-max", min=0, max=MOST_SLOTS, help="More it does not take; 0: all there are.")
    ] = None,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Change what may change while a job runs: its priority, and how many slots it takes."""
    given = {"priority": priority, "slots_min": slots_min, "slots_max": slots_max}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise UsageError("nothing is said that is to change", fix="Give --priority, --slots-min or --slots-max")
    _tell(call(lambda client: client.update_job(job, changes), address, home), output)


def delete(
    job: JobName,
    files: Annotated[
        bool, typer.Option("--files", help="Its run's folder too, with all checkpoints. There is no way back.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
) -> None:
    """Forget a job that has ended: its records, and with [bold]--files[/bold] its run's folder. Its name is free then.

    What it has used stays in `gcore usage`.
    """
    found = snapshot(call(lambda client: client.get_job(job), address, home))
    if files and not yes:
        typer.confirm(
            f"Delete {found.run_dir} with all checkpoints of job {found.full_name} ({found.uid})?", abort=True
        )
    call(lambda client: client.delete_job(found.uid, files=files), address, home)
    left = "" if files or not found.run_dir else f"; its folder {found.run_dir} stays"
    typer.echo(f"Job {visible(found.full_name)} ({found.uid}) is forgotten{left}.")


def eval_(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Have the newest weights of a running job evaluated, out of turn. The result is an event, and stands in its metrics."""
    reply = call(lambda client: client.run_eval(job), address, home)
    if output.is_for_programs:
        typer.echo(output.text({"step": reply.step, "lineage": reply.lineage}))
    else:
        typer.echo(
            f"The weights of step {reply.step} (lineage {reply.lineage}) are evaluated as soon as they are there."
        )


def _tell(job: pb.Job, output: Output) -> None:
    found = snapshot(job)
    if output.is_for_programs:
        typer.echo(output.text(job_tree(found)))
    else:
        why = f": {visible(found.reason, 300)}" if found.reason else ""
        typer.echo(f"Job {visible(found.full_name)} ({found.uid}) is {found.state}{why}.".replace("..", "."))
