"""`gcore submit`: hands a job to a cluster that is up, and follows it or waits for it if that is wanted.

With a request id it may be repeated safely: the same id finds the same job. Whoever stops following (Ctrl-C) stops nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output, console, job_tree, snapshot
from controllers.cli.called import as_called
from controllers.cli.job_verbs import INTERRUPTED, call
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, New, Plain, Set, SpecFile
from gcore.errors import JobFailed, UsageError

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client import JobsClient
    from gcore.config import JobSpec

SUBMIT_EXAMPLES = """
[bold]Examples[/bold]

gcore submit examples/arithmetic/grpo.yaml

gcore submit grpo.yaml --set train.learning_rate=1e-4 --set flow.steps=200 --follow

[dim]Check it, and submit nothing:[/dim]  gcore submit grpo.yaml --dry-run

[dim]From a script, which may repeat it safely:[/dim]  gcore submit grpo.yaml --request-id nightly-17 --wait -o json
"""


def submit(
    spec: SpecFile,
    set_: Set = None,
    new: New = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job until it has ended.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the job has ended, and show nothing until then.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the spec and all it names, as a controller would; submit nothing.")
    ] = False,
    request_id: Annotated[str | None, typer.Option(help="Names the request: repeating it finds the same job.")] = None,
    plain: Plain = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Hand a job to a cluster that is up. With [bold]--follow[/bold] or [bold]--wait[/bold] the exit code is the job's.

    With -o json the answer is the job, or with --follow its events, one a line.
    """
    import uuid

    from controllers.cli.model_words import trust_warning
    from gcore.config import load_spec

    if follow and wait:
        raise UsageError("--follow and --wait both wait for the job's end", fix="Give one of them")
    loaded = load_spec(spec, set_ or ())
    if (warning := trust_warning(loaded.model)) is not None:
        typer.echo(warning, err=True)
    if dry_run:
        _check(loaded, home, output)
        return
    submission = _Submission(
        loaded, request_id or uuid.uuid4().hex, new=new, follow=follow, wait=wait, plain=plain, output=output
    )
    try:
        call(submission.run, address, home)
    except KeyboardInterrupt:
        if not submission.uid:
            raise
        uid = submission.uid
        come_back = f"`gcore events {uid} --follow` goes on watching, `gcore describe {uid}` shows how it stands, "
        hint = f"{come_back}`gcore cancel {uid}` ends it."
        typer.echo(as_called(f"No longer watching; job {loaded.name} goes on. {hint}"), err=True)
        raise typer.Exit(INTERRUPTED) from None


class _Submission:
    """One command's. `uid`: of the job, once there is one."""

    def __init__(
        self, spec: JobSpec, request: str, *, new: bool, follow: bool, wait: bool, plain: bool, output: Output
    ) -> None:
        self.uid = ""
        self._spec = spec
        self._request = request
        self._new = new
        self._follow = follow
        self._wait = wait
        self._plain = plain
        self._output = output

    async def run(self, client: JobsClient) -> None:
        """Raises JobFailed if the job was waited for, and failed or was cancelled."""
        from controllers.cli.creating import create_job
        from gcore.api.v1 import jobs_pb2 as pb
        from gcore.config import as_said

        mode = pb.START_MODE_NEW if self._new else pb.START_MODE_RESUME
        job = await create_job(client, as_said(self._spec), request_id=self._request, mode=mode)
        self.uid = job.uid
        if self._output is Output.TABLE:
            found = snapshot(job)
            typer.echo(f"Job {found.name} ({found.uid}) is {found.state}; its folder is {found.run_dir}.")
        if self._follow:
            await self._watch(client, job)
        else:
            if self._wait:
                async for _ in client.follow(job.uid):
                    pass
                job = await client.get_job(job.uid)
            self._tell(job)

    async def _watch(self, client: JobsClient, job: pb.Job) -> None:
        from controllers.cli.following import record
        from controllers.cli.screens import JsonScreen, Screen, choose_screen
        from gcore.clock import SystemClock

        clock = SystemClock()
        screen: Screen = choose_screen(console(), clock, plain=self._plain)
        if self._output.is_for_programs:
            screen = JsonScreen(console(), self._output)
        ended = await record(client, snapshot(job), screen, clock, begun=clock.monotonic())
        if ended.state != "SUCCEEDED":
            raise JobFailed(f"job {ended.job} is {ended.state}: {ended.reason}", fix="See `gcore describe`")

    def _tell(self, job: pb.Job) -> None:
        found = snapshot(job)
        if self._output.is_for_programs:
            typer.echo(self._output.text(job_tree(found)))
        elif self._wait:
            typer.echo(f"Job {found.name} ({found.uid}) is {found.state}: {found.reason}.")
        if self._wait and found.state != "SUCCEEDED":
            raise JobFailed(f"job {found.name} is {found.state}: {found.reason}", fix="See `gcore describe`")


def _check(spec: JobSpec, home: Home, output: Output) -> None:
    """What a controller would refuse is refused here. Raises GcoreError."""
    from controllers.cli.file_verbs import check_files

    checked = check_files(spec, home, None)
    if output.is_for_programs:
        typer.echo(output.text(spec.model_dump(mode="json")))
    else:
        typer.echo(
            f"The spec of job {spec.name} is valid, with {checked.prompts.prompts} prompts. Nothing was submitted."
        )
