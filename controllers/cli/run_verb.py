"""`gcore run`: up if need be, submit, follow, sum up, and down again if this did the up.

The same command after any interruption goes on where the job stands. A key press (or SIGTERM) ends what this started, in
good order; a second one ends it at once. A cluster that was up before is left as it was, and so is the job on it; one that
others have come to use meanwhile stays up for them.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from controllers.cli.called import program
from controllers.cli.finding import find_cluster
from controllers.cli.options import (
    DEFAULT_CONTROLLERS,
    DEFAULT_HOME,
    DEFAULT_SLOTS,
    Address,
    Controllers,
    Home,
    New,
    Plain,
    Set,
    SglangPython,
    Slots,
    SpecFile,
)
from controllers.cli.presses import FurtherPresses, press
from gcore.errors import GcoreError

if TYPE_CHECKING:
    import asyncio

    from controllers.cli.screens import Screen
    from controllers.cli.sharing import Following
    from controllers.cli.summary import Summary
    from gcore.config import JobSpec
    from gcore.contexts import Reached

INTERRUPTED = 130

RUN_EXAMPLES = """
[bold]Examples[/bold]

gcore run examples/arithmetic/grpo.yaml

[dim]Afresh, and with another learning rate:[/dim]  gcore run grpo.yaml --new --set train.learning_rate=1e-4

[dim]Three controllers on three cores, into a log:[/dim]  gcore run grpo.yaml --controllers 3 --slots cpu:3 --plain > run.log

[dim]On a cluster that is up elsewhere:[/dim]  gcore run grpo.yaml --address 10.0.0.7:7700
"""


@dataclass(frozen=True, slots=True)
class _Run:
    spec: JobSpec
    new: bool
    cluster: Reached
    begun: float


def run(
    spec: SpecFile,
    set_: Set = None,
    new: New = False,
    home: Home = DEFAULT_HOME,
    controllers: Controllers = DEFAULT_CONTROLLERS,
    slots: Slots = DEFAULT_SLOTS,
    plain: Plain = False,
    sglang_python: SglangPython = None,
    address: Address = None,
) -> None:
    """Run a job to its end: start the local cluster if none is up, submit, watch, sum up, and stop what was started.

    An interrupted job goes on; a finished one is run anew. Ctrl-C stops in good order, a second one at once.
    """
    import asyncio

    from controllers.cli import local
    from controllers.cli.answers import console as standard_output
    from controllers.cli.model_words import trust_warning
    from controllers.cli.screens import choose_screen
    from controllers.cli.sharing import following
    from controllers.cli.summary import rows
    from gcore.clock import SystemClock
    from gcore.config import load_spec
    from gcore.rollout.sglang.environment import find_python

    clock = SystemClock()
    begun = clock.monotonic()
    loaded = load_spec(spec, set_ or ())
    if (warning := trust_warning(loaded.model)) is not None:
        typer.echo(warning, err=True)
    signal.signal(signal.SIGTERM, press)
    console = standard_output()
    screen = choose_screen(console, clock, plain=plain)
    started, further, share = False, None, None
    stack = contextlib.ExitStack()
    runner = stack.enter_context(asyncio.Runner())
    try:
        try:
            if address is None:
                python = find_python(sglang_python)
                request = local.UpRequest(home, controllers, slots, sglang_python=python)
                share = stack.enter_context(following(home, clock, say=typer.echo))
                result = runner.run(local.up(request, clock=clock, say=typer.echo))
                started = result.started
            asked = _Run(loaded, new, find_cluster(address, home), begun)
            summary = runner.run(_submit_and_follow(asked, screen))
        except KeyboardInterrupt:
            further = FurtherPresses()
            if address is None and not started:
                _clear_half_started(home)
            started = started and not _is_shared(share, home, screen, runner)
            _say_interrupted(screen, started=started)
            raise typer.Exit(INTERRUPTED) from None
    finally:
        # After a key press that was asked already.
        if started and (further is not None or not _is_shared(share, home, screen, runner)):
            _down(home, further)
        stack.close()
    from controllers.cli.answers import pairs_table

    console.print()
    console.print(pairs_table(rows(summary, again=_again())))
    if not summary.succeeded:
        raise typer.Exit(1)


async def _submit_and_follow(run: _Run, screen: Screen) -> Summary:
    from controllers.cli.answers import snapshot
    from controllers.cli.creating import create_job
    from controllers.cli.following import record
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client import JobsClient
    from gcore.clock import SystemClock
    from gcore.config import as_said

    clock = SystemClock()
    mode = pb.START_MODE_NEW if run.new else pb.START_MODE_RESUME
    async with JobsClient(run.cluster.addresses, clock=clock, connector=run.cluster.connector) as client:
        created = await create_job(client, as_said(run.spec), request_id=uuid.uuid4().hex, mode=mode)
        job = snapshot(created)
        return await record(client, job, screen, clock, begun=run.begun)


def _clear_half_started(home: Path) -> None:
    """`up` cleans up behind itself; this is for a second key press that interrupted that too."""
    from controllers.cli import local
    from gcore.clock import SystemClock
    from gcore.config.cluster import LocalCluster

    with contextlib.suppress(GcoreError):
        if LocalCluster.load(home) is None:
            local.down(home, clock=SystemClock(), grace_s=0)


def _is_shared(share: Following | None, home: Path, screen: Screen, runner: asyncio.Runner) -> bool:
    """Whether others use the cluster that this has started. Says so: it stays up for them."""
    jobs = share.others(home, screen.state.uid, runner) if share is not None else ()
    if share is None or (not jobs and share.is_alone()):
        return False
    who = f"job {', '.join(map(repr, jobs))} runs on it" if jobs else "another `gcore run` uses it"
    typer.echo(f"The cluster stays up, for {who}; `{program()} down` ends it.", err=True)
    return True


def _say_interrupted(screen: Screen, *, started: bool) -> None:
    state = screen.state
    where = f" at step {state.step} of {state.steps}" if state.steps else ""
    if started:
        typer.echo(f"Interrupted{where}; the cluster is being stopped (once more to kill it).", err=True)
        typer.echo(f"The same command goes on from there: {_again()}", err=True)
    elif state.uid:
        typer.echo(
            f"No longer watching{where}; the job goes on, because its cluster stays up. "
            f"The same command watches again, `{program()} cancel {state.uid}` ends it.",
            err=True,
        )
    else:
        typer.echo("Interrupted; nothing was started.", err=True)


def _down(home: Path, further: FurtherPresses | None) -> None:
    """End the cluster; a further key press, also one since the first, kills it."""
    from controllers.cli import local
    from gcore.clock import SystemClock

    try:
        if further is not None:
            further.heed()
        local.down(home, clock=SystemClock())
    except KeyboardInterrupt:
        local.down(home, clock=SystemClock(), grace_s=0)
        raise typer.Exit(INTERRUPTED) from None
    except GcoreError as error:
        # What the run itself has to say matters more; but this must not go unsaid.
        typer.echo(f"gcore: {error}", err=True)


def _again() -> str:
    """The command as it was given, without --new: that would not go on, but begin afresh."""
    return f"{program()} {shlex.join(word for word in sys.argv[1:] if word != '--new')}"
