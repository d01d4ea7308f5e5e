"""The `gcore` command: registers the command modules and handles errors.

A `GcoreError` is printed on standard error and sets the exit code, and so is an error of the machine, such as a full disk. Any other
exception is a bug in gcore and shows its traceback. Commands import their dependencies when they run, so that `--help` is fast. No module here imports torch at the top.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Annotated

import typer

from controllers.cli.commands import (  # noqa: F401 (importing a module registers its commands)
    access,
    checkpoints,
    cluster,
    doctor,
    jobs,
    placement,
    plan,
    run,
    specs,
    streams,
)
from controllers.cli.options import ACCESS, JOBS, app
from controllers.cli.output import prepare_hint
from controllers.cli.terminal import say
from gcore import __version__
from gcore.errors import GcoreError, UsageError
from gcore.system.process import accept_signals

__all__ = ["app", "main"]

LOCAL_EXTRAS = "train,engine,local,math"
"""What a machine that trains needs beside gcore itself."""

app.add_typer(access.certs_app, name="certs", rich_help_panel=ACCESS)
app.add_typer(access.token_app, name="token", rich_help_panel=ACCESS)
app.add_typer(access.context_app, name="context", rich_help_panel=ACCESS)
app.add_typer(placement.app, name="placement", rich_help_panel=JOBS)


def interrupt_on_sigterm() -> None:
    """Handle SIGTERM like Ctrl-C, so that every command shuts down cleanly.

    The handler raises SIGINT. If SIGINT is ignored (as in a background job of a script), SIGINT is blocked until the handler unblocks it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _raise_interrupt)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise SIGINT. asyncio then cancels the main task; a KeyboardInterrupt raised inside another task would show a traceback."""
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
            metavar="NAME", envvar="GCORE_CONTEXT", help="The context (cluster) to use; see `gcore context list`."
        ),
    ] = None,
) -> None:
    """Reinforcement-learning post-training of language models on a cluster without a head node."""
    if context is not None:
        os.environ["GCORE_CONTEXT"] = context


PATH_FIX = "Name another path, or change the rights of its folders"
ROOM_FIX = "Make room, or use another disk"
OPEN_FIX = "Raise the limit (`ulimit -n`), or end other programs"
MACHINE_FIXES: Mapping[int, str] = {
    **dict.fromkeys((errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.EROFS), PATH_FIX),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ROOM_FIX),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), OPEN_FIX),
    errno.EIO: "Check the disk: see `dmesg`",
}
"""What to do about errors of the system that say something about the machine or a path, not about gcore, by `errno`."""


def machine_error(error: OSError) -> GcoreError | None:
    """An error of the machine or of a path that the user gave, as a sentence; None for another error of the system."""
    fix = MACHINE_FIXES.get(error.errno or 0)
    if fix is None:
        return None
    kind = UsageError if fix == PATH_FIX else GcoreError
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else None
    return kind(f"the system refused an operation ({error.strerror})", where=where, fix=fix)


def report_error(error: GcoreError) -> None:
    """Print the error and exit with its code."""
    sentence = " ".join(str(error).split())
    say(f"gcore: {sentence}{prepare_hint(sentence)}", err=True, indent="  ")
    sys.exit(error.exit_code)


def main() -> None:
    """Run the console script."""
    accept_signals()
    interrupt_on_sigterm()
    try:
        app()
    except GcoreError as error:
        report_error(error)
    except OSError as error:
        known = machine_error(error)
        if known is None:
            raise
        report_error(known)
    except ModuleNotFoundError as error:
        extras = extras_with(error.name or "")
        if not extras:
            raise
        say(f"gcore: package {error.name} is not installed. Run pip install 'gcore[{extras}]'", err=True)
        sys.exit(1)


def extras_with(package: str) -> str:
    """The extras of gcore that bring an optional package, separated by commas; empty for other packages."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    optional = (one for one in map(Requirement, requires("gcore") or ()) if one.marker is not None)
    return LOCAL_EXTRAS if package in {one.name.replace("-", "_") for one in optional} else ""


if __name__ == "__main__":
    main()
