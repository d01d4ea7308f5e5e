"""The `gcore` command: the modules of its commands, and how an error ends.

A `GcoreError` is printed as one sentence on standard error and sets the exit code. Anything else is a defect of gcore and
shows its traceback. Commands import what they need when they run, so that `--help` is fast; nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
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
from controllers.cli.output import prepare_hint, with_program_name
from gcore import __version__
from gcore.errors import GcoreError

__all__ = ["app", "main"]

app.add_typer(access.certs_app, name="certs", rich_help_panel=ACCESS)
app.add_typer(access.token_app, name="token", rich_help_panel=ACCESS)
app.add_typer(access.context_app, name="context", rich_help_panel=ACCESS)
app.add_typer(placement.app, name="placement", rich_help_panel=JOBS)


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
    try:
        app()
    except GcoreError as error:
        sentence = " ".join(str(error).split())
        typer.echo("gcore: " + with_program_name(sentence + prepare_hint(sentence)), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
