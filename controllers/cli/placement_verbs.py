"""`gcore placement show|explain|history|pin`: which slot serves which pool, why, and what a person fixes of it.

Thin callers of the job API; what they say is `controllers.cli.placement_words`'. A run that has ended, with no cluster up, is told of
from its folder, as far as that says it: its moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from controllers.cli.answers import Output, console, pairs_table
from controllers.cli.job_verbs import call
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, JobName
from gcore.errors import GcoreError, Unreachable, UsageError

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.ledger.placing import Move, Stay

Told = TypeVar("Told")

EXAMPLES = """
[bold]Examples[/bold]

gcore placement show arithmetic

gcore placement explain arithmetic --last 3

gcore placement pin arithmetic --freeze
"""

app = typer.Typer(
    help="Which slot serves which pool, why, and what came of each move; fix something of it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SHOW_EXAMPLES = """
[bold]Examples[/bold]

gcore placement show arithmetic

gcore placement show arithmetic -o json
"""
EXPLAIN_EXAMPLES = """
[bold]Examples[/bold]

gcore placement explain arithmetic

gcore placement explain arithmetic --last 3
"""
HISTORY_EXAMPLES = """
[bold]Examples[/bold]

gcore placement history arithmetic

gcore placement history arithmetic -o json
"""
PIN_EXAMPLES = """
[bold]Examples[/bold]

gcore placement pin arithmetic --freeze

gcore placement pin arithmetic --reward 4

gcore placement pin arithmetic --release
"""
MOST_SLOTS = 1_000_000
Last = Annotated[int | None, typer.Option("--last", min=1, help="Only so many moves, the newest.")]


@app.command("show", epilog=SHOW_EXAMPLES)
def show(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """How a job's slots are shared out now: pools, nodes, who plans, what is fixed."""
    from controllers.cli.placement_words import shown_rows, shown_tree, slots_table

    try:
        reply = call(lambda client: client.get_placement(job), address, home)
    except Unreachable as error:
        raise _over(error, home, job) if address is None else error from error
    if output.is_for_programs:
        typer.echo(output.text(shown_tree(reply)))
        return
    console().print(pairs_table(shown_rows(reply)))
    if reply.plan:
        console().print(slots_table(reply))


@app.command("explain", epilog=EXPLAIN_EXAMPLES)
def explain(
    job: JobName, last: Last = None, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE
) -> None:
    """Why slots are where they are: each move, with what was expected and what came of it, and why nothing moved.

    Of steps after which nothing moved: what the best other split would have saved, and why it was not taken.
    """
    from controllers.cli.placement_words import account, told_tree

    known = _known(job, home, address)
    moves = known.moves if last is None else known.moves[-last:]
    left_out = len(known.moves) - len(moves)
    stays = [one for one in known.stays if not left_out or one.time >= moves[0].time]
    if output.is_for_programs:
        typer.echo(output.text(told_tree(moves, stays)))
        return
    for line in account(known.name, known.reply, moves, left_out, stays):
        typer.echo(line)


@app.command("history", epilog=HISTORY_EXAMPLES)
def history(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Every move of a job, a line each, oldest first."""
    from controllers.cli.placement_words import history_table, move_tree

    known = _known(job, home, address)
    if output.is_for_programs:
        typer.echo(output.text([move_tree(move) for move in known.moves]))
    elif not known.moves:
        typer.echo(f"Nothing has moved in job {known.name}.")
    else:
        console().print(history_table(known.moves))


@app.command("pin", epilog=PIN_EXAMPLES)
def pin(
    job: JobName,
    freeze: Annotated[bool, typer.Option("--freeze", help="Nothing moves any more.")] = False,
    rollout: Annotated[int | None, typer.Option(help="So many slots roll out.")] = None,
    reward: Annotated[int | None, typer.Option(help="So many slots judge.")] = None,
    train: Annotated[int | None, typer.Option(help="So many slots train.")] = None,
    release: Annotated[bool, typer.Option("--release", help="Let all that was fixed go again.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Fix something of a job's placement, which its policy then obeys from the next step on; or let it go again."""
    from controllers.cli.placement_words import pin_words, shown_tree
    from gcore.api.v1 import jobs_pb2 as pb

    for name, size in (("--rollout", rollout), ("--reward", reward), ("--train", train)):
        if size is not None and not 1 <= size <= MOST_SLOTS:
            raise UsageError(f"{name} {size} is no number of slots", fix=f"Give 1 to {MOST_SLOTS:,}")
    request = pb.PinPlacementRequest(
        job=job, freeze=freeze, rollout=rollout, reward=reward, train=train, release=release
    )
    reply = call(lambda client: client.pin_placement(request), address, home)
    typer.echo(output.text(shown_tree(reply)) if output.is_for_programs else f"Job {reply.name}: {pin_words(reply)}.")


@dataclass(frozen=True, slots=True)
class Known:
    """A job's moves and the stretches without any, and its placement, if a cluster is up."""

    name: str
    moves: tuple[Move, ...]
    stays: tuple[Stay, ...]
    reply: pb.PlacementReply | None


def _over(error: Unreachable, home: Path, job: str) -> Unreachable:
    """Where the job has ended and left its folder: what can be read from that. Raises GcoreError, as `finished_run` does."""
    from controllers.cli.summary import finished_run

    run = finished_run(home, job, error)
    return Unreachable(
        f"{error.what}, and job {run['job']!r} has ended: nothing is placed any more",
        where=error.where,
        fix="`gcore placement explain` and `history` and `gcore trace` read its folder",
    )


def _known(job: str, home: Path, address: str | None) -> Known:
    """All moves of a job: the run's folder has those that the store keeps no more. Raises GcoreError."""
    from controllers.moves_file import NAME, moves_in, stays_in

    try:
        reply = call(lambda client: client.get_placement(job), address, home)
    except Unreachable as error:
        if address is not None:
            raise
        from controllers.cli.summary import finished_run

        run = finished_run(home, job, error)
        file = Path(run["folder"]) / NAME
        return Known(run["job"], tuple(_read(moves_in, file)), tuple(_read(stays_in, file)), None)
    return Known(reply.name, all_moves(reply), all_stays(reply), reply)


def all_moves(reply: pb.PlacementReply) -> tuple[Move, ...]:
    """Those that the store keeps, and from the run's folder, where it can be seen from here, those before them. Raises GcoreError."""
    from controllers.cli.placement_words import moves_of
    from controllers.moves_file import NAME, moves_in

    stored = moves_of(reply)
    kept = [] if stored.total == len(stored.moves) else _read(moves_in, Path(reply.folder) / NAME)
    newest = {(move.generation, move.time): move for move in (*kept, *stored.moves)}
    return tuple(sorted(newest.values(), key=lambda move: (move.time, move.generation)))


def all_stays(reply: pb.PlacementReply) -> tuple[Stay, ...]:
    """The same of the stretches in which nothing moved, each as it is known last: the end of a job's last one stands in its folder only."""
    from controllers.cli.placement_words import moves_of
    from controllers.moves_file import NAME, stays_in

    kept: list[Stay] = []
    with contextlib.suppress(OSError):  # what the store has says enough
        kept = stays_in(Path(reply.folder) / NAME)
    known = sorted((*kept, *moves_of(reply).stays), key=lambda stay: stay.time)
    newest = {stay.began: stay for stay in known}
    return tuple(newest[began] for began in sorted(newest))


def _read(what: Callable[[Path], list[Told]], file: Path) -> list[Told]:
    try:
        return what(file)
    except OSError as error:
        raise GcoreError(f"the moves cannot be read ({error.strerror or error})", where=str(file)) from error
