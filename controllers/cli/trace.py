"""`gcore trace`: a step as a picture: what each slot was at when, the job's phases, the placement's moves with their reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.job_verbs import call
from controllers.cli.options import DEFAULT_HOME, Address, Home, JobName
from gcore.errors import GcoreError, Unreachable, UsageError

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client import JobsClient
    from gcore.ledger.books_file import BookLine
    from gcore.ledger.placing import Move

TRACE_EXAMPLES = """
[bold]Examples[/bold]

gcore trace arithmetic --step 12

gcore trace arithmetic --step 12 --to step.json

[dim]Open the file in https://ui.perfetto.dev or chrome://tracing.[/dim]
"""
MOST = 2**31 - 1


def trace(
    job: JobName,
    step: Annotated[int, typer.Option(help="The step: any that is committed, from 1.", min=1, max=MOST)],
    to: Annotated[
        Path | None, typer.Option(help="The file to write; '-': standard output. Default: JOB-step-N.json.")
    ] = None,
    home: Home = DEFAULT_HOME,
    address: Address = None,
) -> None:
    """Write a step as a trace that Perfetto opens: a track a slot, phases, moves with their reasons.

    Where no cluster is up, that of a run that ended in this home is made from its folder.
    """
    from controllers.cli.trace_events import trace_of

    name, lines, moves = _read(job, step, home, address)
    if not any(line.spans for line in lines.values()):
        raise UsageError(
            f"what is known of step {step} cannot be read", fix="Was it booked by another version of gcore?"
        )
    text = json.dumps(trace_of(name, lines, moves), separators=(",", ":"))
    if to == Path("-"):
        typer.echo(text)
        return
    file = to or Path(f"{name}-step-{step}.json")
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror or error})", where="--to") from error
    slots = sum(len(line.spans) for line in lines.values())
    typer.echo(f"{file}: step {step}, {slots} slots of {len(lines)} nodes. Open it in https://ui.perfetto.dev")


def _read(job: str, step: int, home: Path, address: str | None) -> tuple[str, Mapping[str, BookLine], list[Move]]:
    from controllers.cli.placement_verbs import all_moves
    from controllers.moves_file import NAME, moves_in
    from gcore.ledger.books_file import parse, step_lines

    async def ask(client: JobsClient) -> tuple[pb.PlacementReply, dict[str, BookLine]]:
        books = await client.get_books(job, step)
        lines = {book.node: line for book in books if (line := parse(book.book_json)) is not None}
        return await client.get_placement(job), lines

    try:
        reply, lines = call(ask, address, home)
        return reply.name, lines, list(all_moves(reply))
    except Unreachable as error:
        if address is not None:
            raise
        from controllers.cli.summary import finished_run

        run = finished_run(home, job, error)
        folder = Path(run["folder"])
        try:
            lines = {line.node: line for line in step_lines(folder, step)}
            moves = moves_in(folder / NAME)
        except OSError as wrong:
            raise GcoreError(
                f"the run's folder cannot be read ({wrong.strerror or wrong})", where=str(folder)
            ) from wrong
        if not lines:
            raise UsageError(f"no node has booked step {step} of the run in {folder}", fix=_booked(folder)) from None
        return job, lines, moves


def _booked(folder: Path) -> str:
    """Which steps there are to ask for."""
    from gcore.ledger.books_file import lines_of

    steps = {line.book.version.step for line in lines_of(folder)}
    return f"Booked are steps {min(steps)} to {max(steps)}" if steps else "It ended before a step was booked"
