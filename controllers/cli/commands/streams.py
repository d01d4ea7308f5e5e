"""`gcore logs`, `gcore events` and `gcore samples`: what workers wrote, what happened to a job, and what a step was trained on.

Ctrl-C ends the following and nothing else; a hint says how to continue.
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
from controllers.cli.output import Output, format_time, printable_text, stdout_console, with_program_name
from controllers.cli.view.screens import event_text
from gcore.errors import Unreachable, UsageError
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.jobs import JobsClient


_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = 16 * 1024
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until the job has ended.")]


@command(
    "logs",
    JOBS,
    "gcore logs arithmetic",
    "gcore logs arithmetic --role train --rank 0 --tail 20 --follow",
    "[dim]Of workers that are gone:[/dim]  gcore logs arithmetic --previous --since 10m",
)
def logs(
    job: JobName,
    role: Annotated[str, typer.Option(help="rollout, reward or train; default: all.")] = "",
    rank: Annotated[int | None, typer.Option(min=0, help="Of train ranks, this one.")] = None,
    node: Annotated[str, typer.Option(help="On this node.", callback=check_utf8)] = "",
    instance: Annotated[str, typer.Option(help="Of this worker; `gcore nodes` names them.", callback=check_utf8)] = "",
    since: Annotated[
        str, typer.Option(help="Written later: 90s, 10m, 2h, 1d ago, or a time such as 2026-11-23T12:00.")
    ] = "",
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Of workers that are gone.")] = False,
    follow: Follow = False,
    tail: Annotated[int, typer.Option(min=0, max=100_000, help="The last so many lines of each worker; 0: all.")] = 0,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """What a job's workers wrote to their logs, worker by worker; each line begins with the worker's name."""
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
            typer.echo(with_program_name(_nothing(job, previous=previous)), err=True)

    _until_interrupted(read, lambda: f"`gcore logs {job} --follow --tail 10` goes on", address, home)


@command(
    "events",
    JOBS,
    "gcore events arithmetic --tail 20",
    "gcore events arithmetic --follow",
    "[dim]For a program, going on where it was:[/dim]  gcore events arithmetic --after 83120 --follow -o json",
)
def events(
    job: JobName,
    after: Annotated[int, typer.Option(min=0, help="Only events with a greater number.")] = 0,
    kind: Annotated[list[str] | None, typer.Option(help="Only events of this kind, such as step. Repeatable.")] = None,
    tail: Annotated[int, typer.Option(min=0, max=10_000, help="The last so many; 0: all that are remembered.")] = 0,
    follow: Follow = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """What happened to a job, the oldest first, each event once and with its number; -o json has all that each tells."""
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
                    typer.echo(
                        f"{event.sequence:>9}  {format_time(event.time)}  {printable_text(event.kind):<10}  {what}"
                    )

    def hint() -> str:
        return f"job {job} goes on. `gcore events {job} --after {last} --follow` goes on with the next"

    _until_interrupted(read, hint, address, home)


def parse_time(text: str, now: float) -> float:
    """Seconds since the epoch of `10m` (ago), or of a time. Raises UsageError."""
    ago = _AGO.fullmatch(text.strip())
    if ago is not None:
        return max(0.0, now - float(ago[1]) * _UNITS[ago[2]])
    try:
        found = datetime.fromisoformat(text.strip())
        return max(0.0, (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{text[:40]!r} is no time", where="--since", fix="For example --since 10m, or --since 2026-11-23T12:00"
        ) from error


def _nothing(job: str, *, previous: bool) -> str:
    """For who asked for logs and got none: an empty answer says not whether there is nobody, or nobody of that kind."""
    if previous:
        return f"No worker of job {job} that is gone wrote what was asked for. `gcore logs {job}` shows those that are there."
    return (
        f"No worker of job {job} that is there wrote what was asked for. `gcore nodes --workers` lists them; "
        f"`gcore logs {job} --previous` shows those that are gone."
    )


def format_log_line(line: pb.LogLine, output: Output) -> str:
    """A line as it is printed: a program gets all of it, a person no control characters that a model may have written."""
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
        typer.echo(with_program_name(f"Stopped looking; {hint()}."), err=True)
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
        int | None, typer.Option(help="The step; default: the newest that has samples.", min=1, max=MOST)
    ] = None,
    source: Annotated[str, typer.Option(help="Only prompts of this source.", callback=check_utf8)] = "",
    best: Annotated[bool, typer.Option("--best", help="The highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    limit: Annotated[
        int, typer.Option(help="At most so many prompts; 0: all that are kept.", min=0, max=MOST)
    ] = DEFAULT_LIMIT,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Prompts that a step was trained on, with their responses, reward parts and advantages.

    Where no cluster is up, those of a run that ended in this home are read from its folder.
    """
    from controllers.cli.view.data import groups_tree, show_groups
    from gcore.api.v1 import jobs_pb2 as pb

    if best and worst:
        raise UsageError("--best and --worst are two orders", fix="Give one of them")
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
