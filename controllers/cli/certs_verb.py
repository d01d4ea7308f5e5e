"""`gcore certs init|issue|show|renew|trust`: a private authority and the certificates of nodes, users and etcd."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output
from controllers.cli.options import Format

if TYPE_CHECKING:
    from datetime import datetime

    from gcore.tls.authority import Seen

EXAMPLES = """
[bold]Examples[/bold]

gcore certs init --authority certs

gcore certs issue node-1 --host node-1.cluster,10.0.0.1 --authority certs

gcore certs issue ada --for user --role admin --authority certs

gcore certs show certs/node-1
"""

app = typer.Typer(
    help="A private authority, and the certificates of nodes, users and etcd.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Authority = Annotated[Path, typer.Option(help="Folder of the authority. Whoever reads its ca-key.pem is everybody.")]
DEFAULT_AUTHORITY = Path("certs")
INIT_EXAMPLES = """
[bold]Examples[/bold]

gcore certs init

gcore certs init --authority /secure/gcore-ca --name "gcore research" --days 3650
"""
ISSUE_EXAMPLES = """
[bold]Examples[/bold]

[dim]A daemon:[/dim]  gcore certs issue node-1 --host node-1.cluster,10.0.0.1

[dim]An admin:[/dim]  gcore certs issue ada --for user --role admin

[dim]A researcher:[/dim]  gcore certs issue bob --for user --role submitter --namespace vision

[dim]A member of etcd:[/dim]  gcore certs issue etcd-1 --for etcd --host etcd-1.cluster
"""
SHOW_EXAMPLES = """
[bold]Examples[/bold]

gcore certs show certs/node-1

gcore certs show certs/ca.pem -o json
"""
RENEW_EXAMPLES = """
[bold]Examples[/bold]

gcore certs renew certs/node-1

[dim]From a timer, only what ends soon:[/dim]  gcore certs renew certs/node-1 certs/node-2 --within-days 30
"""

TRUST_EXAMPLES = """
[bold]Examples[/bold]

gcore certs trust certs/node-1 certs/node-2 --authority new-certs

[dim]Once everything is renewed by it:[/dim]  gcore certs trust certs/node-1 certs/node-2 --authority new-certs --only
"""


@app.command("init", epilog=INIT_EXAMPLES)
def init(
    authority: Authority = DEFAULT_AUTHORITY,
    name: Annotated[str, typer.Option(help="What the authority is called.")] = "gcore",
    days: Annotated[int, typer.Option(help="How long it lasts.")] = 3650,
) -> None:
    """Make an authority, and the cluster's key of engines. One that is there stays."""
    from gcore.tls.folder import CA, CA_KEY, ENGINES, make_authority

    make_authority(authority, name, days=days, now=_now())
    typer.echo(f"{authority / CA}      who trusts it trusts what it signs; give it to everybody")
    typer.echo(f"{authority / CA_KEY}  signs; keep it off the nodes")
    typer.echo(f"{authority / ENGINES}  the engines' keys follow from it; nodes get it with their certificates")


@app.command("issue", epilog=ISSUE_EXAMPLES)
def issue(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The node's name as in its configuration, or the user's.")
    ],
    purpose: Annotated[str, typer.Option("--for", help="node, user or etcd.")] = "node",
    host: Annotated[
        list[str] | None, typer.Option(help="Where the server is reached: hosts and IP addresses. Repeatable.")
    ] = None,
    role: Annotated[str, typer.Option(help="A user's: viewer, submitter or admin.")] = "",
    namespace: Annotated[list[str] | None, typer.Option(help="A user's. Repeatable; an admin has all.")] = None,
    days: Annotated[int, typer.Option(help="How long it lasts.")] = 90,
    authority: Authority = DEFAULT_AUTHORITY,
    to: Annotated[Path | None, typer.Option(help="Folder to make; default: NAME in the authority's.")] = None,
) -> None:
    """Issue a certificate, into a folder of its own with its key and the authority's certificate."""
    from gcore.errors import UsageError
    from gcore.tls.folder import Wanted, hosts_of, issue_into

    if purpose not in ("node", "user", "etcd"):
        raise UsageError(f"there is nothing called {purpose!r}", where="--for", fix="Use node, user or etcd")
    kind = "node" if purpose == "node" else "user" if purpose == "user" else "etcd"
    wanted = Wanted(kind, name, hosts_of(host or []), role, tuple(namespace or ()), days)  # type: ignore[arg-type]
    folder = to or authority / name
    made = issue_into(folder, authority, wanted, _now())
    typer.echo(f"{folder}  until {made.ends:%Y-%m-%d}")


@app.command("show", epilog=SHOW_EXAMPLES)
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate, or a folder with one.")],
    output: Format = Output.TABLE,
) -> None:
    """Say whose a certificate is, what it is good for, and until when."""
    from gcore.tls.folder import look

    found, now = look(file), _now()
    tree = _tree(found, now)
    if output.is_for_programs:
        typer.echo(output.text(tree))
        return
    for key, value in tree.items():
        typer.echo(f"{key:<12}{' '.join(value) if isinstance(value, list) else value}")


@app.command("renew", epilog=RENEW_EXAMPLES)
def renew(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders that `issue` made.")],
    authority: Authority = DEFAULT_AUTHORITY,
    within_days: Annotated[int | None, typer.Option(help="Only what ends within so many days.")] = None,
    days: Annotated[int | None, typer.Option(help="How long it lasts; default: as long as before.")] = None,
) -> None:
    """Renew certificates, with new keys, for the names they have. Daemons read them by themselves. One that cannot be renewed keeps
    none of the others from it."""
    from gcore.errors import UsageError
    from gcore.tls.folder import renew_in

    problems = []
    for folder in folders:
        try:
            made = renew_in(folder, authority, within_days=within_days, days=days, now=_now())
        except UsageError as error:
            problems.append(error)
            continue
        typer.echo(f"{folder}  lasts" if made is None else f"{folder}  until {made.ends:%Y-%m-%d}")
    if len(problems) > 1:
        raise UsageError(f"{len(problems)} of {len(folders)} were not renewed: {' '.join(map(str, problems))}")
    if problems:
        raise problems[0]


@app.command("trust", epilog=TRUST_EXAMPLES)
def trust(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders that `issue` made.")],
    authority: Authority = DEFAULT_AUTHORITY,
    only: Annotated[bool, typer.Option("--only", help="It alone, and no other any more.")] = False,
) -> None:
    """Have folders trust an authority besides the one that they trust: the first step to replace one."""
    from gcore.tls.folder import trust_in

    for folder in folders:
        count = trust_in(folder, authority, only=only)
        typer.echo(f"{folder}  trusts {count} authorit{'y' if count == 1 else 'ies'}")


def _now() -> datetime:
    from datetime import UTC, datetime

    from gcore.clock import SystemClock

    return datetime.fromtimestamp(SystemClock().wall(), UTC)


def _tree(found: Seen, now: datetime) -> dict[str, str | list[str]]:
    whose = found.whose
    standing = "good" if found.begins <= now < found.ends else "expired" if now >= found.ends else "not yet good"
    return {
        "name": found.common_name,
        "of": "an authority" if found.is_authority else "nobody of gcore" if whose is None else f"a {whose.kind}",
        "role": "" if whose is None else whose.role,
        "namespaces": [] if whose is None else sorted(whose.namespaces),
        "hosts": list(found.hosts),
        "issuer": found.issuer,
        "begins": found.begins.isoformat(),
        "ends": found.ends.isoformat(),
        "is": standing,
        "serves": "yes" if found.serves else "no",
        "calls": "yes" if found.calls else "no",
        "sha256": found.sha256,
    }
