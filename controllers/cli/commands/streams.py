"""`gcore logs`, `gcore events` and `gcore samples`: worker logs, job events, and the samples that a step was trained on.

Ctrl-C only stops following. A hint says how to continue.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
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
from gcore.errors import Unreachable, UsageError, explain_os_errors
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from controllers.cli.view.state import ViewState
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.jobs import JobsClient
    from gcore.observability.contact_sheet import SheetSection


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


DEFAULT_LIMIT, SHEET_LIMIT, MOST = 3, 16, 2**31 - 1


@command(
    "samples",
    JOBS,
    "gcore samples arithmetic",
    "gcore samples arithmetic --step 12 --best --limit 2",
    "gcore samples arithmetic --source sums --worst -o json",
    "[dim]Held-out responses, as the evaluation of step 20 displays them:[/dim]  gcore samples arithmetic --held-out --step 20",
    "[dim]Generated pictures of two steps in one file:[/dim]  gcore samples pictures --step 1 --step 30 --sheet sheet.png",
)
def samples(
    job: JobName,
    step: Annotated[
        list[int] | None,
        typer.Option(help="The step. Repeatable. Default: the newest that has samples.", min=0, max=MOST),
    ] = None,
    source: Annotated[str, typer.Option(help="Only prompts of this source.", callback=check_utf8)] = "",
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of prompts; 0: all that were kept. Default: 3; 16 with --sheet; all with --held-out.",
            min=0,
            max=MOST,
        ),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="The responses that evaluations display, instead of those of training.")
    ] = False,
    sheet: Annotated[
        Path | None,
        typer.Option(
            help="Draw the generated pictures into this PNG file, those of several steps side by side. With --held-out, "
            "default of --step: the first, the best and the newest evaluation."
        ),
    ] = None,
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
    if held_out:
        if best or worst or source:
            raise UsageError("--held-out shows what an evaluation displays", fix="Omit --best, --worst and --source")
        _show_held_out(job, step or (), sheet, limit or 0, (address, home), output)
        return
    if limit is None:
        limit = DEFAULT_LIMIT if sheet is None else SHEET_LIMIT
    order = pb.SAMPLE_ORDER_BEST if best else pb.SAMPLE_ORDER_WORST if worst else pb.SAMPLE_ORDER_UNSPECIFIED
    requests = [
        pb.GetSamplesRequest(job=job, step=one, source=source, order=order, limit=limit)
        for one in dict.fromkeys(step or (None,))
    ]
    found = _read_samples(requests, address, home)
    if sheet is not None:
        from controllers.cli.view.data import samples_section

        _write_sheet(sheet, job, [samples_section(groups) for groups in found], output)
    elif output.is_for_programs:
        trees = [groups_tree(groups) for groups in found]
        typer.echo(output.text(trees[0] if len(trees) == 1 else trees))
    else:
        for groups in found:
            show_groups(stdout_console(), groups)


def _read_samples(
    requests: Sequence[pb.GetSamplesRequest], address: str | None, home: Path
) -> list[Sequence[pb.SampleGroup]]:
    """The samples of each request, from the cluster, or from the folder of a finished run if there is no cluster."""

    async def read(client: JobsClient) -> list[Sequence[pb.SampleGroup]]:
        return [await client.read_samples(request) for request in requests]

    try:
        return call_cluster(read, address, home)
    except Unreachable as error:
        from controllers.api.run_reader import samples_of_folder

        run_dir = Path(run_of_home(requests[0].job, address, home, error)["folder"])
        return [list(samples_of_folder(run_dir, request)) for request in requests]


def _show_held_out(
    job: str, steps: Sequence[int], sheet: Path | None, limit: int, where: tuple[str | None, Path], output: Output
) -> None:
    from controllers.cli.view.data import choose_evaluations, evaluation_tree, held_out_sheet, show_evaluation

    state = _read_events(job, *where)
    chosen = [one.limited(limit) for one in choose_evaluations(state, steps, ends=sheet is not None)]
    if sheet is not None:
        _write_sheet(sheet, job, [held_out_sheet(chosen)], output)
    elif output.is_for_programs:
        trees = [evaluation_tree(one) for one in chosen]
        typer.echo(output.text(trees[0] if len(trees) == 1 else trees))
    else:
        for one in chosen:
            show_evaluation(stdout_console(), one)


def _read_events(job: str, address: str | None, home: Path) -> ViewState:
    """The state of a job after its events, and its best step."""
    from controllers.cli.output import job_snapshot
    from controllers.cli.view.state import ViewState

    async def read(client: JobsClient) -> ViewState:
        state = ViewState()
        async with aclosing(client.follow(job, follow=False)) as found:
            async for event in found:
                state = state.apply(event)
        return state.observe(job_snapshot(await client.get_job(job)))

    try:
        return call_cluster(read, address, home)
    except Unreachable as error:
        from controllers.api.job_messages import describe_run
        from controllers.api.run_reader import events_of_folder

        run_dir = Path(run_of_home(job, address, home, error)["folder"])
        state = ViewState()
        for event in events_of_folder(run_dir):
            state = state.apply(event)
        message = describe_run(run_dir)
        return state if message is None else state.observe(job_snapshot(message))


def _write_sheet(file: Path, job: str, sections: Sequence[SheetSection], output: Output) -> None:
    """Draw the pictures of `sections` into a file. Raises UsageError if there are none, or if none can be read here."""
    from gcore.observability.contact_sheet import draw_sheet
    from gcore.system.files import replace_file

    pictures = [one for section in sections for card in section.cards for one in card.pictures]
    if not pictures:
        raise UsageError(
            f"job {job!r} has no generated pictures there", fix="Draw a sheet of a job that generates some"
        )
    readable = sum(one.file is not None and one.file.is_file() for one in pictures)
    if not readable:
        raise UsageError(
            f"none of {len(pictures)} pictures can be read on this machine",
            where=next((str(one.file) for one in pictures if one.file is not None), ""),
            fix="They were deleted (samples.picture_mib), or the run folder is on another machine: run the command there",
        )
    drawn = draw_sheet(job, sections)
    with explain_os_errors("cannot write the sheet", UsageError, where=file, fix="Name a file in a writable folder"):
        replace_file(file, drawn)
    if output.is_for_programs:
        typer.echo(output.text({"sheet": str(file), "pictures": readable}))
    else:
        say(f"Drew {readable} of {len(pictures)} pictures in {file}.")
