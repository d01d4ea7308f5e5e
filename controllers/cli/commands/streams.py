"""`gcore logs`, `gcore events` and `gcore samples`: worker logs, job events, and the samples that a step was trained on.

Ctrl-C only stops following. A hint says how to continue.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controllers.cli.options import (
    DEFAULT_HOME,
    INTERRUPTED,
    JOBS,
    Address,
    Format,
    Home,
    JobName,
    call_cluster,
    check_utf8,
    command,
    run_of_home,
)
from controllers.cli.output import Output, format_time, printable_text
from controllers.cli.terminal import say, stdout_console
from controllers.cli.view.screens import event_text
from gcore.errors import Unreachable, UsageError
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.jobs import JobsClient


_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = 16 * 1024
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")]


@command(
    "logs",
    JOBS,
    "gcore logs arithmetic",
    "gcore logs arithmetic --role train --rank 0 --tail 20 --follow",
    "[dim]Logs of workers that have exited:[/dim]  gcore logs arithmetic --previous --since 10m",
)
def logs(
    job: JobName,
    role: Annotated[str, typer.Option(help="Only workers of this role: rollout, reward or train. Default: all.")] = "",
    rank: Annotated[int | None, typer.Option(min=0, help="Only this train rank.")] = None,
    node: Annotated[str, typer.Option(help="Only workers on this node.", callback=check_utf8)] = "",
    instance: Annotated[
        str, typer.Option(help="Only this worker; `gcore nodes --workers` lists them.", callback=check_utf8)
    ] = "",
    since: Annotated[
        str, typer.Option(help="Only newer lines: 90s, 10m, 2h or 1d (ago), or a time such as 2026-11-23T12:00.")
    ] = "",
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Workers that have exited.")] = False,
    follow: Follow = False,
    tail: Annotated[int, typer.Option(min=0, max=100_000, help="Only the last N lines of each worker; 0: all.")] = 0,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Print the logs of a job's workers, one worker after the other. Each line begins with the worker's name."""
    from gcore.api.v1 import jobs_pb2 as pb

    request = pb.StreamLogsRequest(
        job=job,
        role=role,
        rank=rank,
        node=node,
        instance=instance,
        since=parse_time(since, SystemClock().wall()) if since else 0.0,
        previous=previous,
        follow=follow,
        tail=tail,
    )

    async def read(client: JobsClient) -> None:
        said = False
        async with aclosing(client.stream_logs(request)) as lines:
            async for line in lines:
                said = True
                typer.echo(format_log_line(line, output))
        if not said:
            say(_nothing(job, previous=previous), err=True)

    _until_interrupted(read, lambda: f"`gcore logs {job} --follow --tail 10` continues", address, home)


@command(
    "events",
    JOBS,
    "gcore events arithmetic --tail 20",
    "gcore events arithmetic --follow",
    "[dim]For a program, continuing after an event:[/dim]  gcore events arithmetic --after 83120 --follow -o json",
)
def events(
    job: JobName,
    after: Annotated[int, typer.Option(min=0, help="Only events with a greater sequence number.")] = 0,
    kind: Annotated[list[str] | None, typer.Option(help="Only events of this kind, such as step. Repeatable.")] = None,
    tail: Annotated[
        int, typer.Option(min=0, max=10_000, help="Only the last N; 0: all that the controller keeps.")
    ] = 0,
    follow: Follow = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Print the events of a job, oldest first, each once and with its sequence number. -o json includes the data of each event."""
    last = after
    wanted = frozenset(kind or ())

    async def read(client: JobsClient) -> None:
        nonlocal last
        stream: AsyncGenerator[Any, None] = client.follow(job, after=after, newest=tail, follow=follow)
        async with aclosing(stream) as found:
            async for event in found:
                last = event.sequence
                if wanted and event.kind not in wanted:
                    continue
                if output.is_for_programs:
                    typer.echo(event_text(event, output))
                else:
                    what = printable_text(event.message, 500)
                    say(
                        f"{event.sequence:>9}  {format_time(event.time)}  {printable_text(event.kind):<10}  {what}",
                        indent="  ",
                    )

    def hint() -> str:
        return f"job {job} continues. `gcore events {job} --after {last} --follow` shows the next events"

    _until_interrupted(read, hint, address, home)


def parse_time(text: str, now: float) -> float:
    """Parse `10m` (ago) or an ISO time into seconds since the epoch. Raises UsageError."""
    ago = _AGO.fullmatch(text.strip())
    if ago is not None:
        return max(0.0, now - float(ago[1]) * _UNITS[ago[2]])
    try:
        found = datetime.fromisoformat(text.strip())
        return max(0.0, (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{text[:40]!r} is not a time", where="--since", fix="For example: --since 10m or --since 2026-11-23T12:00"
        ) from error


def _nothing(job: str, *, previous: bool) -> str:
    """The hint for an empty response: which other commands may show logs."""
    if previous:
        return f"No exited worker of job {job} has matching log lines. `gcore logs {job}` shows the running workers."
    return (
        f"No running worker of job {job} has matching log lines. `gcore nodes --workers` lists the workers; "
        f"`gcore logs {job} --previous` shows those that have exited."
    )


def format_log_line(line: pb.LogLine, output: Output) -> str:
    """A log line as printed: complete for programs, without control characters (which a model may write) for people."""
    if not output.is_for_programs:
        who = f"rank {line.rank} on {line.node}" if line.HasField("rank") else line.instance or line.node
        return f"{printable_text(who)}  {printable_text(line.text, LONGEST)}"
    tree: dict[str, Any] = {"instance": line.instance, "node": line.node, "role": line.role}
    if line.HasField("rank"):
        tree["rank"] = line.rank
    tree |= {"time": line.time, "text": line.text}
    return f"---\n{output.text(tree)}" if output is Output.YAML else json.dumps(tree, ensure_ascii=False)


def _until_interrupted(
    read: Callable[[JobsClient], Awaitable[None]], hint: Callable[[], str], address: str | None, home: Path
) -> None:
    try:
        call_cluster(read, address, home)
    except KeyboardInterrupt:
        say(f"Stopped following; {hint()}.", err=True)
        raise typer.Exit(INTERRUPTED) from None


DEFAULT_LIMIT, MOST = 3, 2**31 - 1


@command(
    "samples",
    JOBS,
    "gcore samples arithmetic",
    "gcore samples arithmetic --step 12 --best --limit 2",
    "gcore samples arithmetic --source sums --worst -o json",
)
def samples(
    job: JobName,
    step: Annotated[
        int | None, typer.Option(help="The step. Default: the newest that has samples.", min=1, max=MOST)
    ] = None,
    source: Annotated[str, typer.Option(help="Only prompts of this source.", callback=check_utf8)] = "",
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    limit: Annotated[
        int, typer.Option(help="Maximum number of prompts; 0: all that were kept.", min=0, max=MOST)
    ] = DEFAULT_LIMIT,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Print prompts that a step was trained on, with their responses, reward parts and advantages.

    If no cluster is running, the samples of a finished run are read from its folder.
    """
    from controllers.cli.view.data import groups_tree, show_groups
    from gcore.api.v1 import jobs_pb2 as pb

    if best and worst:
        raise UsageError("--best and --worst exclude each other", fix="Give only one of them")
    order = pb.SAMPLE_ORDER_BEST if best else pb.SAMPLE_ORDER_WORST if worst else pb.SAMPLE_ORDER_UNSPECIFIED
    try:
        found = call_cluster(
            lambda client: client.get_samples(job, step=step, source=source, order=order, limit=limit), address, home
        )
    except Unreachable as error:
        from controllers.api.run_reader import samples_of_folder

        run_dir = Path(run_of_home(job, address, home, error)["folder"])
        request = pb.GetSamplesRequest(job=job, step=step, source=source, order=order, limit=limit)
        found = list(samples_of_folder(run_dir, request))
    if output.is_for_programs:
        typer.echo(output.text(groups_tree(found)))
    else:
        show_groups(stdout_console(), found)
