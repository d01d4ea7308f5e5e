"""`gcore token create|list|revoke|first-admin` and `gcore whoami`: tokens of users, and whom a call is taken for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from controllers.cli.answers import Output
from controllers.cli.finding import find_cluster
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home
from gcore.errors import UsageError

if TYPE_CHECKING:
    from gcore.api.v1 import access_pb2 as pb
    from gcore.client.access import AccessClient

T = TypeVar("T")
DAY_S = 86400.0

EXAMPLES = """
[bold]Examples[/bold]

gcore token create bob --role submitter --namespace vision --days 30 --to bob.token

gcore token list

gcore token revoke k3j9x2m4q8w1
"""
CREATE_EXAMPLES = """
[bold]Examples[/bold]

gcore token create bob --role submitter --namespace vision --to bob.token

[dim]For Prometheus, which reads the metrics of all:[/dim]  gcore token create prometheus --role viewer --namespace '*' --days 365 --to prometheus.token
"""
LIST_EXAMPLES = """
[bold]Examples[/bold]

gcore token list -o json
"""
REVOKE_EXAMPLES = """
[bold]Examples[/bold]

gcore token revoke k3j9x2m4q8w1
"""
FIRST_EXAMPLES = """
[bold]Examples[/bold]

[dim]For auth.admin_token_file of every daemon:[/dim]  gcore token first-admin --to admin.token
"""
WHOAMI_EXAMPLES = """
[bold]Examples[/bold]

gcore whoami

gcore whoami -o json
"""

app = typer.Typer(
    help="Tokens of users: with what they may do, where, and until when.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
To = Annotated[
    Path | None, typer.Option(help="File to write the token to, for its owner alone; default: it is printed.")
]


@app.command("create", epilog=CREATE_EXAMPLES)
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; told in the journal of calls.")],
    role: Annotated[str, typer.Option(help="viewer, submitter or admin.")] = "submitter",
    namespace: Annotated[list[str] | None, typer.Option(help="Repeatable; '*' is all. An admin has all.")] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long it lasts.")] = 90,
    to: To = None,
    address: Address = None,
    home: Home = DEFAULT_HOME,
    output: Format = Output.TABLE,
) -> None:
    """Make a token. Its secret is told once, here."""
    spaces = namespace or ([] if role == "admin" else ["default"])
    if to is not None and to.exists():
        raise UsageError("there is a file already", where=str(to), fix="Name another --to")
    made = _call(lambda client: client.create_token(name, role, spaces, days * DAY_S), address, home)
    if to is not None:
        write_secret(to, made.secret)
    if output.is_for_programs:
        typer.echo(output.text(_tree(made.token) | ({"token": made.secret} if to is None else {"file": str(to)})))
        return
    typer.echo(f"{made.token.id}  {name}  {role}  {' '.join(made.token.namespaces)}  until {_day(made.token.expires)}")
    typer.echo(made.secret if to is None else str(to))


@app.command("list", epilog=LIST_EXAMPLES)
def list_(address: Address = None, home: Home = DEFAULT_HOME, output: Format = Output.TABLE) -> None:
    """The tokens there are, without their secrets."""
    from gcore.clock import SystemClock

    found = _call(lambda client: client.list_tokens(), address, home).tokens
    if output.is_for_programs:
        typer.echo(output.text([_tree(one) for one in found]))
        return
    now = SystemClock().wall()
    for one in found:
        until = f"until {_day(one.expires)}" if one.expires > now else f"expired {_day(one.expires)}"
        typer.echo(
            f"{one.id}  {one.name}  {one.role}  {' '.join(one.namespaces)}  {until}  made by {one.created_by or '?'}"
        )


@app.command("revoke", epilog=REVOKE_EXAMPLES)
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")],
    address: Address = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """End a token, at once."""
    gone = _call(lambda client: client.revoke_token(token_id), address, home).token
    typer.echo(f"{gone.id}  {gone.name}  revoked")


@app.command("first-admin", epilog=FIRST_EXAMPLES)
def first_admin(to: Annotated[Path, typer.Option(help="File to write, for its owner alone.")]) -> None:
    """Make the token of auth.admin_token_file: an admin's, for as long as daemons are started with it. Asks no cluster."""
    from gcore.tokens import new_token

    if to.exists():
        raise UsageError("there is a file already", where=str(to), fix="Name another --to")
    write_secret(to, new_token().text)
    typer.echo(f"{to}  name it in auth.admin_token_file of every daemon")


def whoami(address: Address = None, home: Home = DEFAULT_HOME, output: Format = Output.TABLE) -> None:
    """Say whom the cluster takes you for."""
    me = _call(lambda client: client.who_am_i(), address, home)
    tree = {"name": me.name, "role": me.role, "namespaces": list(me.namespaces), "namespace": me.namespace}
    if output.is_for_programs:
        typer.echo(output.text(tree))
        return
    typer.echo(f"{me.name or 'nobody is told apart here'}  {me.role}  {' '.join(me.namespaces)}")


def write_secret(file: Path, secret: str) -> None:
    """For its owner alone. Raises UsageError."""
    from gcore.atomic import whole_file

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole_file(file, secret.encode() + b"\n", mode=0o600)
    except OSError as error:
        raise UsageError(
            f"cannot be written ({error.strerror or error})", where=str(file), fix="Name another --to"
        ) from error


def _call(what: Callable[[AccessClient], Awaitable[T]], address: str | None, home: Path) -> T:
    import asyncio

    from gcore.client.access import AccessClient
    from gcore.clock import SystemClock

    cluster = find_cluster(address, home)

    async def talk() -> T:
        async with AccessClient(cluster.addresses, clock=SystemClock(), connector=cluster.connector) as client:
            return await what(client)

    return asyncio.run(talk())


def _day(seconds: float) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


def _tree(one: pb.TokenInfo) -> dict[str, object]:
    return {
        "id": one.id,
        "name": one.name,
        "role": one.role,
        "namespaces": list(one.namespaces),
        "created": one.created,
        "expires": one.expires,
        "created_by": one.created_by,
    }
