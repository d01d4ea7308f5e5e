"""`gcore placement`, `gcore top` and `gcore trace`: the placement of a job with its reasons, and the slot accounting of
a step.

The placement says which slot serves which pool (rollout, reward, train). A move is a change of it. A period without
moves (`HoldPeriod`) joins the consecutive steps after which the policy changed nothing.

`view/placement` renders the responses. If no cluster is running, moves and slot accounting of a finished run are read
from its folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from controllers.cli.options import (
    DEFAULT_HOME,
    JOBS,
    Address,
    Format,
    Home,
    JobName,
    call_cluster,
    check_utf8,
    command,
    command_group,
    examples,
    run_of_home,
)
from controllers.cli.output import Output, job_snapshot
from controllers.cli.terminal import Pairs, display, say, stdout_console
from controllers.cli.view.state import ENDED_STATES
from gcore.errors import GcoreError, Unreachable, UsageError, explain_os_errors
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from controllers.cli.view.placement import JobTop
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.jobs import JobsClient
    from gcore.ledger.records.job import HoldPeriod, Move
    from gcore.ledger.records.slot_accounting import AccountLine, StepAccount

Told = TypeVar("Told")


app = command_group(
    "Show which slots (accelerators) serve generation, judges and training, and why they moved; or pin their numbers.",
    examples(
        "gcore placement show arithmetic",
        "gcore placement explain arithmetic --last 3",
        "gcore placement pin arithmetic --freeze",
    ),
)

MOST_SLOTS = 1_000_000
Last = Annotated[int | None, typer.Option("--last", min=1, help="Only the newest N moves.")]


@app.command("show", epilog=examples("gcore placement show arithmetic", "gcore placement show arithmetic -o json"))
def show_placement(
    job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE
) -> None:
    """Show the current placement of a job: pools, nodes, policy and pins."""
    from controllers.cli.view.placement import placement_rows, placement_tree, slots_table

    try:
        reply = call_cluster(lambda client: client.get_placement(job), address, home)
    except Unreachable as error:
        run = run_of_home(job, address, home, error)
        raise Unreachable(
            f"{error.what}, and job {run['job']!r} has ended, so it has no placement",
            where=error.where,
            fix="Use `gcore placement explain`, `gcore placement history` or `gcore trace`: they read the run folder",
        ) from error
    if output.is_for_programs:
        typer.echo(output.text(placement_tree(reply)))
        return
    display(Pairs(placement_rows(reply)))
    if reply.plan:
        display(slots_table(reply))


@app.command(
    "explain", epilog=examples("gcore placement explain arithmetic", "gcore placement explain arithmetic --last 3")
)
def explain_placement(
    job: JobName, last: Last = None, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE
) -> None:
    """Explain the placement: each move with its expected and measured effect, and why there was no move after other steps.

    For steps without a move: the saving of the best other split, and why it was not chosen.
    """
    from controllers.cli.view.placement import history_tree, placement_story

    known = _known(job, home, address)
    moves = known.moves if last is None else known.moves[-last:]
    left_out = len(known.moves) - len(moves)
    stays = [one for one in known.stays if not left_out or one.time >= moves[0].time]
    if output.is_for_programs:
        typer.echo(output.text(history_tree(moves, stays)))
        return
    for line in placement_story(known.name, known.reply, moves, left_out, stays):
        say(line, indent="  ")


@app.command(
    "history", epilog=examples("gcore placement history arithmetic", "gcore placement history arithmetic -o json")
)
def show_history(
    job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE
) -> None:
    """List every move of a job, one a line, oldest first."""
    from controllers.cli.view.placement import history_table, move_tree

    known = _known(job, home, address)
    if output.is_for_programs:
        typer.echo(output.text([move_tree(move) for move in known.moves]))
    elif not known.moves:
        say(f"Job {known.name} has no moves.")
    else:
        display(history_table(known.moves))


@app.command(
    "pin",
    epilog=examples(
        "gcore placement pin arithmetic --freeze",
        "gcore placement pin arithmetic --reward 4",
        "gcore placement pin arithmetic --release",
    ),
)
def pin_placement(
    job: JobName,
    freeze: Annotated[bool, typer.Option("--freeze", help="Allow no more moves.")] = False,
    rollout: Annotated[int | None, typer.Option(help="Number of slots of the rollout pool.")] = None,
    reward: Annotated[int | None, typer.Option(help="Number of slots of the reward pool.")] = None,
    train: Annotated[int | None, typer.Option(help="Number of slots of the train pool.")] = None,
    release: Annotated[bool, typer.Option("--release", help="Remove all pins.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Pin parts of a job's placement, or remove the pins. The policy obeys the pins from the next step on."""
    from controllers.cli.view.placement import pin_words, placement_tree
    from gcore.api.v1 import jobs_pb2 as pb

    for name, size in (("--rollout", rollout), ("--reward", reward), ("--train", train)):
        if size is not None and not 1 <= size <= MOST_SLOTS:
            raise UsageError(f"{name} {size} is not a valid number of slots", fix=f"Give 1 to {MOST_SLOTS:,}")
    request = pb.PinPlacementRequest(
        job=job, freeze=freeze, rollout=rollout, reward=reward, train=train, release=release
    )
    reply = call_cluster(lambda client: client.pin_placement(request), address, home)
    if output.is_for_programs:
        typer.echo(output.text(placement_tree(reply)))
    else:
        say(f"Job {reply.name}: {pin_words(reply)}.", indent="  ")


@dataclass(frozen=True, slots=True)
class PlacementHistory:
    """The placement changes of a job (`moves`) and its periods without a change (`stays`). `reply`: its current
    placement; None without a cluster."""

    name: str
    moves: tuple[Move, ...]
    stays: tuple[HoldPeriod, ...]
    reply: pb.PlacementReply | None


def _known(job: str, home: Path, address: str | None) -> PlacementHistory:
    """Collect all moves and periods without moves of a job, from the cluster and its run folder, or only from the
    folder without a cluster.

    The run folder also has those that the store no longer keeps. Raises GcoreError.
    """
    from controllers.planning.history import NAME, read_moves, read_stays

    try:
        reply = call_cluster(lambda client: client.get_placement(job), address, home)
    except Unreachable as error:
        run = run_of_home(job, address, home, error)
        file = Path(run["folder"]) / NAME
        return PlacementHistory(
            run["job"], tuple(_read_folder(read_moves, file)), tuple(_read_folder(read_stays, file)), None
        )
    return PlacementHistory(reply.name, collect_moves(reply), collect_stays(reply), reply)


def collect_moves(reply: pb.PlacementReply) -> tuple[Move, ...]:
    """All moves, oldest first: those in the store (`reply`), and the earlier ones from the run folder. Raises
    GcoreError if it cannot be read."""
    from controllers.cli.view.placement import moves_of
    from controllers.planning.history import NAME, read_moves

    stored = moves_of(reply)
    kept = [] if stored.total == len(stored.moves) else _read_folder(read_moves, Path(reply.folder) / NAME)
    newest = {(move.generation, move.time): move for move in (*kept, *stored.moves)}
    return tuple(sorted(newest.values(), key=lambda move: (move.time, move.generation)))


def collect_stays(reply: pb.PlacementReply) -> tuple[HoldPeriod, ...]:
    """The periods without moves, oldest first, from the store and the run folder. A period grows with each step, so the
    newest version counts.

    Only the run folder has the end of the last period.
    """
    from controllers.cli.view.placement import moves_of
    from controllers.planning.history import NAME, read_stays

    kept: list[HoldPeriod] = []
    with contextlib.suppress(OSError):  # The periods in the store are sufficient.
        kept = read_stays(Path(reply.folder) / NAME)
    known = sorted((*kept, *moves_of(reply).stays), key=lambda stay: stay.time)
    newest = {stay.began: stay for stay in known}
    return tuple(newest[began] for began in sorted(newest))


def _read_folder(what: Callable[[Path], list[Told]], file: Path) -> list[Told]:
    with explain_os_errors("the history of moves cannot be read", where=file):
        return what(file)


LOOK_S = 1.0


@command(
    "top", JOBS, "gcore top", "gcore top arithmetic --address 10.0.0.7:7700", "gcore top arithmetic --once -o json"
)
def top(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Job name or uid. Default: the newest running job.", callback=check_utf8),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit, for scripts.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Show the utilization of a job's slots: what they do, what idle slots wait for, and the bottleneck of a step.

    Refreshes until the job ends or until Ctrl-C.

    If no cluster is running, the last step of a finished run is read from its folder.
    """
    from rich.live import Live
    from rich.text import Text

    from controllers.cli.view.placement import render_top, top_tree

    if output.is_for_programs and not once:
        raise UsageError("-o json and -o yaml need --once", fix="Add --once")
    screen, clock = stdout_console(), SystemClock()

    async def watch(client: JobsClient) -> None:
        found = await fetch_top(client, job)
        with Live(render_top(found), console=screen, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while found.state not in ENDED_STATES:
                await clock.sleep(LOOK_S)
                try:
                    found = await fetch_top(client, found.uid)
                except GcoreError as error:
                    live.update(Text(f"{error}; retrying"), refresh=True)
                else:
                    live.update(render_top(found), refresh=True)

    try:
        if screen.is_terminal and not once:
            call_cluster(watch, address, home)
            return
        found = call_cluster(lambda client: fetch_top(client, job), address, home)
    except Unreachable as error:
        found = top_of_run(job, address, home, error)
    if output.is_for_programs:
        typer.echo(output.text(top_tree(found)))
    else:
        display(render_top(found), screen)


async def fetch_top(client: JobsClient, job: str | None) -> JobTop:
    """Fetch the newest slot accounting of a job from the cluster. `job` None: the newest running job, or the newest. Raises UsageError if there
    is no job."""
    from controllers.cli.view.placement import JobTop
    from gcore.ledger.records.slot_accounting import StepAccount, parse_line

    if job is None:
        jobs = [job_snapshot(one) for one in await client.list_jobs()]
        running = [one for one in jobs if one.state in ("PENDING", "RUNNING")] or jobs
        if not running:
            raise UsageError("there is no job", fix="Start one with `gcore run` or `gcore submit`")
        job = running[0].uid
    message, books = await asyncio.gather(client.get_job(job), client.get_books(job))
    found = job_snapshot(message)
    read = {book.node: StepAccount.model_validate_json(book.book_json) for book in books}
    if not read and found.ended:  # The daemons that accounted for it have exited: ask for the last step instead.
        with contextlib.suppress(UsageError):
            lines = [parse_line(book.book_json) for book in await client.get_books(found.uid, found.step)]
            read = {line.node: line.book for line in lines if line is not None}
    pictures = found.generates_pictures
    return JobTop(found.name, found.uid, found.state, found.step, found.of_steps, read, pictures=pictures)


def top_of_run(job: str | None, address: str | None, home: Path, error: Unreachable) -> JobTop:
    """The last step of a finished run, from its folder. `job` None: the run with the newest slot accounting. Raises GcoreError."""
    from controllers.api.job_messages import describe_run
    from controllers.cli.view.placement import JobTop
    from gcore.ledger.records.slot_accounting import FOLDER, newest_line

    if job is None:
        last = max((home / "runs").glob(f"*/{FOLDER}"), key=lambda one: one.stat().st_mtime, default=None)
        if last is None:
            raise error
        job = last.parent.name.rpartition("-")[2]
    run = run_of_home(job, address, home, error)
    folder = Path(run["folder"])
    with explain_os_errors("the run folder cannot be read", where=folder):
        told = describe_run(folder)
        lines = [newest_line(folder, file.stem) for file in sorted((folder / FOLDER).glob("*.jsonl"))]
    books = _of_the_last_step([line for line in lines if line is not None])
    found = None if told is None else job_snapshot(told)
    step = max((book.version.step for book in books.values()), default=0)
    state, step, steps = ("ENDED", step, str(step)) if found is None else (found.state, found.step, found.of_steps)
    pictures = found is not None and found.generates_pictures
    return JobTop(run["job"], run["uid"], state, step, steps, books, str(folder), pictures=pictures)


def _of_the_last_step(lines: list[AccountLine]) -> Mapping[str, StepAccount]:
    last = max((line.book.version for line in lines), default=None)
    return {line.node: line.book for line in lines if line.book.version == last}


MOST = 2**31 - 1


@command(
    "trace",
    JOBS,
    "gcore trace arithmetic --step 12",
    "gcore trace arithmetic --step 12 --to step.json",
    "[dim]Open the file in https://ui.perfetto.dev or chrome://tracing.[/dim]",
)
def trace(
    job: JobName,
    step: Annotated[int, typer.Option(help="A committed step, from 1.", min=1, max=MOST)],
    to: Annotated[
        Path | None, typer.Option(help="Output file; '-': standard output. Default: JOB-step-N.json.")
    ] = None,
    home: Home = DEFAULT_HOME,
    address: Address = None,
) -> None:
    """Write a Perfetto trace of a step: one track per slot, with phases, and moves with their reasons.

    If no cluster is running, the trace of a finished run is built from its folder.
    """
    from controllers.cli.view.placement import build_trace

    name, lines, moves = _read_step(job, step, home, address)
    if not any(line.spans for line in lines.values()):
        raise UsageError(
            f"the slot accounting of step {step} cannot be read",
            fix="Use the version of gcore that wrote it",
        )
    text = json.dumps(build_trace(name, lines, moves), separators=(",", ":"))
    if to == Path("-"):
        typer.echo(text)
        return
    file = to or Path(f"{name}-step-{step}.json")
    with explain_os_errors(f"{file} cannot be written", UsageError, where="--to"):
        file.write_text(text + "\n", encoding="utf-8")
    slots = sum(len(line.spans) for line in lines.values())
    say(f"{file}: step {step}, {slots} slots of {len(lines)} nodes. Open it in https://ui.perfetto.dev")


def _read_step(
    job: str, step: int, home: Path, address: str | None
) -> tuple[str, Mapping[str, AccountLine], list[Move]]:
    from controllers.planning.history import NAME, read_moves
    from gcore.ledger.records.slot_accounting import parse_line, read_step_lines

    async def ask(client: JobsClient) -> tuple[pb.PlacementReply, dict[str, AccountLine]]:
        books = await client.get_books(job, step)
        lines = {book.node: line for book in books if (line := parse_line(book.book_json)) is not None}
        return await client.get_placement(job), lines

    try:
        reply, lines = call_cluster(ask, address, home)
        return reply.name, lines, list(collect_moves(reply))
    except Unreachable as error:
        folder = Path(run_of_home(job, address, home, error)["folder"])
        with explain_os_errors("the run folder cannot be read", where=folder):
            lines = {line.node: line for line in read_step_lines(folder, step)}
            moves = read_moves(folder / NAME)
        if not lines:
            what = f"the run in {folder} has no slot accounting of step {step}"
            raise UsageError(what, fix=_account_lines(folder)) from None
        return job, lines, moves


def _account_lines(folder: Path) -> str:
    """Advice for an error message: which steps of the run in `folder` have slot accounting."""
    from gcore.ledger.records.slot_accounting import read_lines

    steps = {line.book.version.step for line in read_lines(folder)}
    return f"Choose a step from {min(steps)} to {max(steps)}" if steps else "The run ended before any step was recorded"
