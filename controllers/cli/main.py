"""The `gcore` command: the modules of its commands, and how an error ends.

A `GcoreError` is printed as one sentence on standard error and sets the exit code. Anything else is a defect of gcore and
shows its traceback. Commands import what they need when they run, so that `--help` is fast; nothing here imports torch.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from controllers.cli.commands import (  # noqa: F401 (importing a module registers its commands)
    access,
    checkpoints,
    cluster,
    demo,
    doctor,
    jobs,
    placement,
    plan,
    run,
    specs,
    streams,
)
from controllers.cli.options import ACCESS, JOBS, app
from controllers.cli.output import prepare_hint, with_program_name
from gcore import __version__
from gcore.errors import GcoreError
from gcore.system.process import accept_signals

__all__ = ["app", "main"]

app.add_typer(access.certs_app, name="certs", rich_help_panel=ACCESS)
app.add_typer(access.token_app, name="token", rich_help_panel=ACCESS)
app.add_typer(access.context_app, name="context", rich_help_panel=ACCESS)
app.add_typer(placement.app, name="placement", rich_help_panel=JOBS)


def interrupt_on_sigterm() -> None:
    """Handle SIGTERM as Ctrl-C, so that every command ends in order.

    The handler raises SIGINT. Where SIGINT is ignored, as in a script's background, it is blocked instead, and the handler unblocks it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _raise_interrupt)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise SIGINT: asyncio cancels the main task for it, while a KeyboardInterrupt inside another task would show a traceback."""
    signal.raise_signal(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gcore {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", envvar="GCORE_CONTEXT", help="The cluster to talk to, as `gcore context` names it."
        ),
    ] = None,
) -> None:
    """Reinforcement-learning post-training of language models on a cluster without a head node."""
    if context is not None:
        os.environ["GCORE_CONTEXT"] = context


def main() -> None:
    """The console script."""
    accept_signals()
    interrupt_on_sigterm()
    try:
        app()
    except GcoreError as error:
        sentence = " ".join(str(error).split())
        typer.echo("gcore: " + with_program_name(sentence + prepare_hint(sentence)), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
