"""`gcore top`: what a job's slots do, again and again: by state and cause, pools, the step, what holds steps up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output, console, snapshot
from controllers.cli.job_verbs import call
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, utf8
from gcore.errors import GcoreError, Unreachable, UsageError

if TYPE_CHECKING:
    from controllers.cli.top_view import Top
    from gcore.client import JobsClient
    from gcore.ledger.books import StepBook
    from gcore.ledger.books_file import BookLine

TOP_EXAMPLES = """
[bold]Examples[/bold]

gcore top

gcore top arithmetic --address 10.0.0.7:7700

gcore top arithmetic --once -o json
"""
LOOK_S = 1.0


def top(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="A job's name or uid; default: the one that runs.", callback=utf8),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once and end, for scripts.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """What a job's slots do: how many of them at what, what the idle ones wait for, and what holds steps up.

    Looks until the job has ended, or until Ctrl-C. Any controller answers.

    Where no cluster is up, the last step of a run that ended in this home is shown from its folder.
    """
    from rich.live import Live
    from rich.text import Text

    from controllers.cli.top_view import shown, tree
    from controllers.cli.view_state import ENDED_STATES
    from gcore.clock import SystemClock

    if output.is_for_programs and not once:
        raise UsageError("-o json and yaml are for a single look", fix="Give --once too")
    screen, clock = console(), SystemClock()

    async def watch(client: JobsClient) -> None:
        found = await look(client, job)
        with Live(shown(found), console=screen, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while found.state not in ENDED_STATES:
                await clock.sleep(LOOK_S)
                try:
                    found = await look(client, found.uid)
                except GcoreError as error:
                    live.update(Text(f"{error}; it is asked again"), refresh=True)
                else:
                    live.update(shown(found), refresh=True)

    try:
        if screen.is_terminal and not once:
            call(watch, address, home)
            return
        found = call(lambda client: look(client, job), address, home)
    except Unreachable as error:
        if address is not None:
            raise
        found = left(home, job, error)
    if output.is_for_programs:
        typer.echo(output.text(tree(found)))
    else:
        screen.print(shown(found))


async def look(client: JobsClient, job: str | None) -> Top:
    """A job now. Raises UsageError where there is none."""
    from controllers.cli.top_view import Top
    from gcore.ledger.books import StepBook
    from gcore.ledger.books_file import parse

    if job is None:
        jobs = [snapshot(one) for one in await client.list_jobs()]
        running = [one for one in jobs if one.state in ("PENDING", "RUNNING")] or jobs
        if not running:
            raise UsageError("there is no job", fix="Start one with `gcore run` or `gcore submit`")
        job = running[-1].uid
    message, books = await asyncio.gather(client.get_job(job), client.get_books(job))
    found = snapshot(message)
    read = {book.node: StepBook.model_validate_json(book.book_json) for book in books}
    if not read and found.ended:  # the daemons that booked it are gone, and the store keeps nothing for others
        with contextlib.suppress(UsageError):
            lines = [parse(book.book_json) for book in await client.get_books(found.uid, found.step)]
            read = {line.node: line.book for line in lines if line is not None}
    return Top(found.name, found.uid, found.state, found.step, found.of_steps, read)


def left(home: Path, job: str | None, error: Unreachable) -> Top:
    """The last step of a run that ended, as its folder has it. `job` None: the run that booked last. Raises GcoreError."""
    from controllers.cli.summary import finished_run
    from controllers.cli.top_view import Top
    from controllers.service.described import described_run
    from gcore.ledger.books_file import FOLDER, newest

    if job is None:
        last = max((home / "runs").glob(f"*/{FOLDER}"), key=lambda one: one.stat().st_mtime, default=None)
        if last is None:
            raise error
        job = last.parent.name.rpartition("-")[2]
    run = finished_run(home, job, error)
    folder = Path(run["folder"])
    try:
        told = described_run(folder)
        lines = [newest(folder, file.stem) for file in sorted((folder / FOLDER).glob("*.jsonl"))]
    except OSError as wrong:
        raise GcoreError(f"the run's folder cannot be read ({wrong.strerror or wrong})", where=str(folder)) from wrong
    books = _of_the_last_step([line for line in lines if line is not None])
    found = None if told is None else snapshot(told)
    step = max((book.version.step for book in books.values()), default=0)
    state, step, steps = ("ENDED", step, str(step)) if found is None else (found.state, found.step, found.of_steps)
    return Top(run["job"], run["uid"], state, step, steps, books, str(folder))


def _of_the_last_step(lines: list[BookLine]) -> Mapping[str, StepBook]:
    last = max((line.book.version for line in lines), default=None)
    return {line.node: line.book for line in lines if line.book.version == last}
