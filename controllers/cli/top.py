"""`gcore top`: what a job's slots do, again and again: by state and cause, pools, the step, what holds steps up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output, as_json, console, snapshot
from controllers.cli.job_verbs import call
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, utf8
from gcore.errors import GcoreError, UsageError

if TYPE_CHECKING:
    from controllers.cli.top_view import Top
    from gcore.client import JobsClient

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
    """
    from rich.live import Live
    from rich.text import Text

    from controllers.cli.top_view import shown, tree
    from gcore.clock import SystemClock

    if output is Output.JSON and not once:
        raise UsageError("-o json is for a single look", fix="Give --once too")
    screen, clock = console(), SystemClock()
    if once or not screen.is_terminal:
        found = call(lambda client: look(client, job), address, home)
        if output is Output.JSON:
            typer.echo(as_json(tree(found)))
        else:
            screen.print(shown(found))
        return

    async def watch(client: JobsClient) -> None:
        found = await look(client, job)
        with Live(shown(found), console=screen, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while found.state in ("PENDING", "RUNNING"):
                await clock.sleep(LOOK_S)
                try:
                    found = await look(client, found.uid)
                except GcoreError as error:
                    live.update(Text(f"{error}; it is asked again"), refresh=True)
                else:
                    live.update(shown(found), refresh=True)

    call(watch, address, home)


async def look(client: JobsClient, job: str | None) -> Top:
    """A job now. Raises UsageError where there is none."""
    from controllers.cli.top_view import Top
    from gcore.ledger.books import StepBook

    if job is None:
        jobs = [snapshot(one) for one in await client.list_jobs()]
        running = [one for one in jobs if one.state in ("PENDING", "RUNNING")] or jobs
        if not running:
            raise UsageError("there is no job", fix="Start one with `gcore run` or `gcore submit`")
        job = running[-1].uid
    message, books = await asyncio.gather(client.get_job(job), client.get_books(job))
    found = snapshot(message)
    read = {book.node: StepBook.model_validate_json(book.book_json) for book in books}
    return Top(found.name, found.uid, found.state, found.step, found.of_steps, read)
