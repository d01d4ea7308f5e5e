"""`gcore certs`, `token`, `context` and `whoami`: certificates, user tokens, and the clusters that a user connects to.

`certs` works on the folder of a private certificate authority (CA), `context` on a file of the user. Neither contacts a cluster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from controllers.cli.options import (
    ACCESS,
    DEFAULT_HOME,
    Address,
    Format,
    Home,
    command,
    command_group,
    examples,
)
from controllers.cli.output import Output, message_tree
from controllers.cli.terminal import say
from gcore.errors import UsageError, explain_os_errors
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from gcore.api.authority import CertificateInfo
    from gcore.client.jobs import AccessClient


certs_app = command_group(
    "Manage a private certificate authority (CA) and the certificates of nodes, users and etcd.",
    examples(
        "gcore certs init --authority certs",
        "gcore certs issue node-1 --host node-1.cluster,10.0.0.1 --authority certs",
        "gcore certs issue ada --for user --role admin --authority certs",
        "gcore certs show certs/node-1",
    ),
)

Authority = Annotated[
    Path, typer.Option(help="Folder of the CA. Anyone who can read its ca-key.pem can impersonate every node and user.")
]
DEFAULT_AUTHORITY = Path("certs")


@certs_app.command(
    "init",
    epilog=examples(
        "gcore certs init", 'gcore certs init --authority /secure/gcore-ca --name "gcore research" --days 3650'
    ),
)
def create_authority(
    authority: Authority = DEFAULT_AUTHORITY,
    name: Annotated[str, typer.Option(help="Name of the CA.")] = "gcore",
    days: Annotated[int, typer.Option(help="Validity in days.")] = 3650,
) -> None:
    """Create a certificate authority and the cluster's engine key. An existing CA is never overwritten."""
    from gcore.api.authority import CA, CA_KEY, ENGINES, make_authority

    make_authority(authority, name, days=days, now=_now())
    say(f"{authority / CA}      public CA certificate; distribute it to all nodes and users")
    say(f"{authority / CA_KEY}  private signing key; keep it off the nodes")
    say(f"{authority / ENGINES}  secret from which engine keys are derived; nodes get it with their certificates")


@certs_app.command(
    "issue",
    epilog=examples(
        "[dim]A daemon:[/dim]  gcore certs issue node-1 --host node-1.cluster,10.0.0.1",
        "[dim]An admin:[/dim]  gcore certs issue ada --for user --role admin",
        "[dim]A researcher:[/dim]  gcore certs issue bob --for user --role submitter --namespace vision",
        "[dim]A member of etcd:[/dim]  gcore certs issue etcd-1 --for etcd --host etcd-1.cluster",
    ),
)
def issue_node_certificate(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the node (as in its configuration) or of the user.")
    ],
    purpose: Annotated[str, typer.Option("--for", help="node, user or etcd.")] = "node",
    host: Annotated[
        list[str] | None, typer.Option(help="Host names and IP addresses of the server. Repeatable.")
    ] = None,
    role: Annotated[str, typer.Option(help="Role of a user: viewer, submitter or admin.")] = "",
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace of a user. Repeatable. An admin has all namespaces.")
    ] = None,
    days: Annotated[int, typer.Option(help="Validity in days.")] = 90,
    authority: Authority = DEFAULT_AUTHORITY,
    to: Annotated[Path | None, typer.Option(help="New folder. Default: NAME in the folder of the CA.")] = None,
) -> None:
    """Issue a certificate. Writes a folder with the certificate, its key and the CA certificate."""
    from gcore.api.authority import CertificateRequest, issue_certificate_into, parse_hosts

    if purpose not in ("node", "user", "etcd"):
        raise UsageError(f"{purpose!r} is not a kind of certificate", where="--for", fix="Use node, user or etcd")
    wanted = CertificateRequest(purpose, name, parse_hosts(host or []), role, tuple(namespace or ()), days)  # type: ignore[arg-type]
    folder = to or authority / name
    made = issue_certificate_into(folder, authority, wanted, _now())
    typer.echo(f"{folder}  valid until {made.ends:%Y-%m-%d}")


@certs_app.command("show", epilog=examples("gcore certs show certs/node-1", "gcore certs show certs/ca.pem -o json"))
def show_certificate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate file, or a folder with one.")],
    output: Format = Output.TABLE,
) -> None:
    """Show the owner, the purpose and the validity of a certificate."""
    from gcore.api.authority import inspect_certificate

    found, now = inspect_certificate(file), _now()
    tree = _certificate_tree(found, now)
    if output.is_for_programs:
        typer.echo(output.text(tree))
        return
    for key, value in tree.items():
        shown = " ".join(value) if isinstance(value, list) else VALUES.get(value, value)
        typer.echo(f"{LABELS.get(key, key):<12}{shown}")


LABELS = {"of": "type", "is": "status", "serves": "serverAuth", "calls": "clientAuth"}
VALUES = {"good": "valid", "not yet good": "not yet valid", "an authority": "CA", "nobody of gcore": "not of gcore"}
"""How the table of `certs show` prints the keys and values of its JSON."""


@certs_app.command(
    "renew",
    epilog=examples(
        "gcore certs renew certs/node-1",
        "[dim]From a timer, only those that expire soon:[/dim]  gcore certs renew certs/node-1 certs/node-2 --within-days 30",
    ),
)
def renew_certificates(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders that `gcore certs issue` wrote.")],
    authority: Authority = DEFAULT_AUTHORITY,
    within_days: Annotated[
        int | None, typer.Option(help="Only certificates that expire within this many days.")
    ] = None,
    days: Annotated[int | None, typer.Option(help="Validity in days. Default: as before.")] = None,
) -> None:
    """Renew certificates with new keys and unchanged names. Daemons reload them automatically. If one renewal fails, the others are still
    renewed."""
    from gcore.api.authority import renew_certificate

    problems = []
    for folder in folders:
        try:
            made = renew_certificate(folder, authority, within_days=within_days, days=days, now=_now())
        except UsageError as error:
            problems.append(error)
            continue
        typer.echo(f"{folder}  not due" if made is None else f"{folder}  valid until {made.ends:%Y-%m-%d}")
    if len(problems) > 1:
        raise UsageError(
            f"{len(problems)} of {len(folders)} certificates were not renewed: {' '.join(map(str, problems))}"
        )
    if problems:
        raise problems[0]


@certs_app.command(
    "trust",
    epilog=examples(
        "gcore certs trust certs/node-1 certs/node-2 --authority new-certs",
        "[dim]After all certificates were renewed:[/dim]  gcore certs trust certs/node-1 certs/node-2 --authority new-certs --only",
    ),
)
def trust_authority(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders that `gcore certs issue` wrote.")],
    authority: Authority = DEFAULT_AUTHORITY,
    only: Annotated[bool, typer.Option("--only", help="Trust only this CA, and no other any more.")] = False,
) -> None:
    """Make folders trust an additional CA. This is the first step of replacing a CA."""
    from gcore.api.authority import add_trust

    for folder in folders:
        count = add_trust(folder, authority, only=only)
        typer.echo(f"{folder}  trusts {count} CA{'' if count == 1 else 's'}")


def _now() -> datetime:
    return datetime.fromtimestamp(SystemClock().wall(), UTC)


def _certificate_tree(found: CertificateInfo, now: datetime) -> dict[str, str | list[str]]:
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


T = TypeVar("T")
DAY_S = 86400.0
TOKEN = ("id", "name", "role", "namespaces", "created", "expires", "created_by")


token_app = command_group(
    "Manage user tokens. A token has a role, namespaces and an expiry date.",
    examples(
        "gcore token create bob --role submitter --namespace vision --days 30 --to bob.token",
        "gcore token list",
        "gcore token revoke k3j9x2m4q8w1",
    ),
)

To = Annotated[Path | None, typer.Option(help="File to write the token to (mode 0600). Default: print it.")]


@token_app.command(
    "create",
    epilog=examples(
        "gcore token create bob --role submitter --namespace vision --to bob.token",
        "[dim]For Prometheus, which reads all metrics:[/dim]  gcore token create prometheus --role viewer --namespace '*' --days 365 --to prometheus.token",
    ),
)
def create_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the user. The API call log shows it.")],
    role: Annotated[str, typer.Option(help="viewer, submitter or admin.")] = "submitter",
    namespace: Annotated[list[str] | None, typer.Option(help="Repeatable; '*' means all. An admin has all.")] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Validity in days.")] = 90,
    to: To = None,
    address: Address = None,
    home: Home = DEFAULT_HOME,
    output: Format = Output.TABLE,
) -> None:
    """Create a token. Its secret is shown only once, by this command."""
    spaces = namespace or ([] if role == "admin" else ["default"])
    if to is not None and to.exists():
        raise UsageError("the file exists", where=str(to), fix="Give another file with --to")
    made = _call(lambda client: client.create_token(name, role, spaces, days * DAY_S), address, home)
    if to is not None:
        write_secret(to, made.secret)
    if output.is_for_programs:
        typer.echo(
            output.text(
                message_tree(made.token, *TOKEN) | ({"token": made.secret} if to is None else {"file": str(to)})
            )
        )
        return
    typer.echo(
        f"{made.token.id}  {name}  {role}  {' '.join(made.token.namespaces)}  valid until {_day(made.token.expires)}"
    )
    typer.echo(made.secret if to is None else str(to))


@token_app.command("list", epilog=examples("gcore token list -o json"))
def list_tokens(address: Address = None, home: Home = DEFAULT_HOME, output: Format = Output.TABLE) -> None:
    """List the tokens, without their secrets."""
    found = _call(lambda client: client.list_tokens(), address, home).tokens
    if output.is_for_programs:
        typer.echo(output.text([message_tree(one, *TOKEN) for one in found]))
        return
    now = SystemClock().wall()
    for one in found:
        until = f"valid until {_day(one.expires)}" if one.expires > now else f"expired {_day(one.expires)}"
        typer.echo(
            f"{one.id}  {one.name}  {one.role}  {' '.join(one.namespaces)}  {until}  created by {one.created_by or '?'}"
        )


@token_app.command("revoke", epilog=examples("gcore token revoke k3j9x2m4q8w1"))
def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Token ID, as in `gcore token list`.")],
    address: Address = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Revoke a token. It is invalid immediately."""
    gone = _call(lambda client: client.revoke_token(token_id), address, home).token
    typer.echo(f"{gone.id}  {gone.name}  revoked")


@token_app.command(
    "first-admin",
    epilog=examples("[dim]For auth.admin_token_file of every daemon:[/dim]  gcore token first-admin --to admin.token"),
)
def create_first_admin(to: Annotated[Path, typer.Option(help="File to write (mode 0600).")]) -> None:
    """Create the token for auth.admin_token_file. It has the admin role while the daemons' configuration names its file. Contacts no cluster."""
    from gcore.api.tokens import new_token

    if to.exists():
        raise UsageError("the file exists", where=str(to), fix="Give another file with --to")
    write_secret(to, new_token().text)
    say(f"{to}  set auth.admin_token_file of every daemon to this file")


@command("whoami", ACCESS, "gcore whoami", "gcore whoami -o json")
def whoami(address: Address = None, home: Home = DEFAULT_HOME, output: Format = Output.TABLE) -> None:
    """Show the user, role and namespaces that the cluster assigns to you."""
    me = _call(lambda client: client.who_am_i(), address, home)
    if output.is_for_programs:
        typer.echo(output.text(message_tree(me, "name", "role", "namespaces", "namespace")))
        return
    typer.echo(f"{me.name or '(no authentication)'}  {me.role}  {' '.join(me.namespaces)}")


def write_secret(file: Path, secret: str) -> None:
    """Write a secret to a file with mode 0600. Raises UsageError."""
    from gcore.system.files import replace_file

    with explain_os_errors("cannot be written", UsageError, where=file, fix="Give another file with --to"):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, secret.encode() + b"\n", mode=0o600)


def _call(what: Callable[[AccessClient], Awaitable[T]], address: str | None, home: Path) -> T:
    from gcore.client.contexts import find_cluster
    from gcore.client.jobs import AccessClient

    cluster = find_cluster(address, home)

    async def talk() -> T:
        async with AccessClient(cluster.addresses, clock=SystemClock(), connector=cluster.connector) as client:
            return await what(client)

    return asyncio.run(talk())


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


context_app = command_group(
    "Manage contexts. A context is a cluster with its addresses, its CA and your credentials.",
    examples(
        "gcore context set lab --address gpu-1.lab:7500,gpu-2.lab:7500 --ca lab-ca.pem --token-file lab.token",
        "gcore context use lab",
        "gcore context list",
    ),
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


@context_app.command(
    "set",
    epilog=examples(
        "gcore context set lab --address gpu-1.lab:7500 --ca lab-ca.pem --token-file lab.token",
        "[dim]With a certificate, on the mutual TLS port:[/dim]  gcore context set lab --address gpu-1.lab:7501 --ca ada/ca.pem --cert ada/cert.pem --key ada/key.pem",
    ),
)
def set_context(
    name: Name,
    address: Annotated[str, typer.Option(help="host:port of a controller, or several, separated by commas.")],
    ca: Annotated[Path | None, typer.Option(help="CA certificate of the cluster (PEM file).")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with your token, readable only by you.")] = None,
    cert: Annotated[Path | None, typer.Option(help="Your certificate, instead of a token.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of the certificate.")] = None,
) -> None:
    """Create or change a context. The first context becomes the current one."""
    from gcore.client import contexts

    if not contexts.NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is not a valid name",
            where="NAME",
            fix="Use letters and digits, with . _ - only between them",
        )
    whole = {
        key_name: str(path.absolute())
        for key_name, path in {"ca": ca, "token_file": token_file, "cert": cert, "key": key}.items()
        if path is not None
    }
    file = contexts.contexts_file(os.environ)
    known = contexts.load_contexts(file)
    made = contexts.Context(addresses=contexts.parse_addresses(address), **whole)
    changed = known.model_copy(update={"contexts": {**known.contexts, name: made}, "current": known.current or name})
    contexts.choose_cluster(
        {contexts.CONFIG: str(file), contexts.CONTEXT: name}, known=changed
    )  # Check the context before it is saved.
    contexts.save_contexts(file, changed)
    typer.echo(f"{name}  {' '.join(made.addresses)}{'  current' if changed.current == name else ''}")


@context_app.command("use", epilog=examples("gcore context use lab"))
def use_context(name: Name) -> None:
    """Make this the current context. Commands use it unless another cluster is given or a local one is running."""
    from gcore.client import contexts

    file = contexts.contexts_file(os.environ)
    known = contexts.load_contexts(file)
    contexts.find_context(known, name, file)
    contexts.save_contexts(file, known.model_copy(update={"current": name}))
    typer.echo(f"{name}  current")


@context_app.command("list", epilog=examples("gcore context list"))
def list_contexts(output: Format = Output.TABLE) -> None:
    """List the contexts."""
    from gcore.client import contexts

    known = contexts.load_contexts(contexts.contexts_file(os.environ))
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


@context_app.command("remove", epilog=examples("gcore context remove lab"))
def remove_context(name: Name) -> None:
    """Delete a context. The files that it names are kept."""
    from gcore.client import contexts

    file = contexts.contexts_file(os.environ)
    known = contexts.load_contexts(file)
    contexts.find_context(known, name, file)
    left = {other: one for other, one in known.contexts.items() if other != name}
    current = None if known.current == name else known.current
    contexts.save_contexts(file, known.model_copy(update={"contexts": left, "current": current}))
    typer.echo(f"{name}  removed")
