"""`gcore context set|use|list|remove`: the clusters that a person talks to, in their own file. Asks none of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from controllers.cli.answers import Output
from controllers.cli.options import Format
from gcore.errors import UsageError

EXAMPLES = """
[bold]Examples[/bold]

gcore context set lab --address gpu-1.lab:7500,gpu-2.lab:7500 --ca lab-ca.pem --token-file lab.token

gcore context use lab

gcore context list
"""
SET_EXAMPLES = """
[bold]Examples[/bold]

gcore context set lab --address gpu-1.lab:7500 --ca lab-ca.pem --token-file lab.token

[dim]With a certificate, at the port for these:[/dim]  gcore context set lab --address gpu-1.lab:7501 --ca ada/ca.pem --cert ada/cert.pem --key ada/key.pem
"""
USE_EXAMPLES = """
[bold]Examples[/bold]

gcore context use lab
"""
LIST_EXAMPLES = """
[bold]Examples[/bold]

gcore context list
"""
REMOVE_EXAMPLES = """
[bold]Examples[/bold]

gcore context remove lab
"""

app = typer.Typer(
    help="The clusters that you talk to: where they answer, their authority, and what you show of yourself.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the context.")]


@app.command("set", epilog=SET_EXAMPLES)
def set_(
    name: Name,
    address: Annotated[str, typer.Option(help="host:port of a controller, or several with commas.")],
    ca: Annotated[Path | None, typer.Option(help="The cluster's authority, a PEM file.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file with your token, which nobody else can read.")] = None,
    cert: Annotated[Path | None, typer.Option(help="Your certificate, instead of a token.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
) -> None:
    """Name a cluster, or say anew where it is. The first one is the current one."""
    from controllers.cli.finding import addresses_in
    from gcore import contexts

    if not contexts.NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is no name", where="NAME", fix="Take letters, digits and ._- inside")
    whole = {
        key_name: str(path.absolute())
        for key_name, path in {"ca": ca, "token_file": token_file, "cert": cert, "key": key}.items()
        if path is not None
    }
    file = contexts.file_of(os.environ)
    known = contexts.load(file)
    made = contexts.Context(addresses=addresses_in(address), **whole)
    changed = known.model_copy(update={"contexts": {**known.contexts, name: made}, "current": known.current or name})
    contexts.reach({contexts.CONFIG: str(file), contexts.CONTEXT: name}, known=changed)  # what is wrong is told now
    contexts.save(file, changed)
    typer.echo(f"{name}  {' '.join(made.addresses)}{'  current' if changed.current == name else ''}")


@app.command("use", epilog=USE_EXAMPLES)
def use(name: Name) -> None:
    """Have commands talk to this cluster, where no other is named and none is up on this machine."""
    from gcore import contexts

    file = contexts.file_of(os.environ)
    known = contexts.load(file)
    contexts.named(known, name, file)
    contexts.save(file, known.model_copy(update={"current": name}))
    typer.echo(f"{name}  current")


@app.command("list", epilog=LIST_EXAMPLES)
def list_(output: Format = Output.TABLE) -> None:
    """The clusters that are known."""
    from gcore import contexts

    known = contexts.load(contexts.file_of(os.environ))
    if output.is_for_programs:
        typer.echo(
            output.text(
                {
                    "current": known.current,
                    "contexts": {name: {"addresses": list(one.addresses)} for name, one in known.contexts.items()},
                }
            )
        )
        return
    for name, one in sorted(known.contexts.items()):
        typer.echo(f"{'*' if name == known.current else ' '} {name}  {' '.join(one.addresses)}")


@app.command("remove", epilog=REMOVE_EXAMPLES)
def remove(name: Name) -> None:
    """Forget a cluster. Its files stay."""
    from gcore import contexts

    file = contexts.file_of(os.environ)
    known = contexts.load(file)
    contexts.named(known, name, file)
    left = {other: one for other, one in known.contexts.items() if other != name}
    current = None if known.current == name else known.current
    contexts.save(file, known.model_copy(update={"contexts": left, "current": current}))
    typer.echo(f"{name}  removed")
