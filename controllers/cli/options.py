"""The command `gcore` and its panels, options that several commands share, the choice of the cluster, and completion in the shell.

A command talks to the controllers of `--address`, else of the named context, else of the local cluster in its home, else of the
current context. Completion asks a controller for at most a second, completes nothing when none answers, and prints nothing.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from controllers.cli.output import Output
from gcore.errors import GcoreError, Unreachable, UsageError
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from gcore.client.calls import WaitPolicy
    from gcore.client.contexts import ClusterAddress
    from gcore.client.jobs import JobsClient

WITHIN_S = 1.0
MOST = 100


def complete_job(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Jobs whose name begins so, the newest first, each with its state."""
    if "/" in incomplete:
        return []

    async def ask(client: JobsClient) -> list[tuple[str, str]]:
        from gcore.client.calls import job_state_name

        jobs = await client.list_jobs(name_prefix=incomplete, limit=MOST)
        return [(job.name, f"{job_state_name(job.state)}, {job.uid}") for job in reversed(jobs)]

    return list(dict(_ask(context, ask)).items())[::-1]


def complete_node(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Nodes whose name begins so, each with its slots."""

    async def ask(client: JobsClient) -> list[tuple[str, str]]:
        nodes = (await client.list_nodes()).nodes
        return [(node.name, " ".join(node.slots)) for node in nodes if node.name.startswith(incomplete)]

    return _ask(context, ask)


def _ask(
    context: typer.Context, what: Callable[[JobsClient], Awaitable[list[tuple[str, str]]]]
) -> list[tuple[str, str]]:
    from gcore.client.calls import WaitPolicy

    address = context.params.get("address") or os.environ.get("GCORE_ADDRESS")
    home = Path(context.params.get("home") or os.environ.get("GCORE_HOME") or ".gcore")

    async def soon(client: JobsClient) -> list[tuple[str, str]]:
        return await asyncio.wait_for(what(client), WITHIN_S)

    try:
        return call_cluster(soon, address, home, WaitPolicy(call_s=WITHIN_S, probe_s=WITHIN_S))
    except (GcoreError, OSError, TimeoutError, ValueError):
        return []


def check_utf8(word: str | None) -> str | None:
    """The word, if it can be sent to a controller. Raises UsageError: the shell may hand over any bytes."""
    try:
        (word or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{word!a} is not UTF-8 text", fix="Type it again, or copy it from `gcore list`") from error
    return word


Home = Annotated[Path, typer.Option(envvar="GCORE_HOME", help="Folder of the local cluster: its state, logs and runs.")]

Address = Annotated[
    str | None,
    typer.Option(
        envvar="GCORE_ADDRESS",
        help="host:port of a controller, or several with commas; default: those of the local cluster that is up, else of the context.",
    ),
]

Controllers = Annotated[int, typer.Option(help="Daemons on this machine.")]

Slots = Annotated[
    str,
    typer.Option(
        help="Slots of this machine, dealt out to the daemons: cpu:N or cuda:N. emulated:N computes nothing; for tests and benchmarks only."
    ),
]

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Replace a field: section.field=value. Repeatable. A path is relative to the spec's folder, as in the spec.",
    ),
]

New = Annotated[bool, typer.Option("--new", help="Always a new job; one of that name that has not ended is ended.")]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="How the answer is printed.")]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="A job spec, a YAML file.")]

JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="A job's name, NAMESPACE/NAME or uid.", callback=check_utf8, autocompletion=complete_job
    ),
]

NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="A node's name.", callback=check_utf8, autocompletion=complete_node)
]

Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Only this one; default: all that you may see.")]

SglangPython = Annotated[
    Path | None,
    typer.Option(
        envvar="GCORE_SGLANG_PYTHON",
        help="Python that has SGLang, or its environment's folder, for rollout.engine: sglang; default: .venv-sglang.",
    ),
]

DEFAULT_HOME = Path(".gcore")
DEFAULT_CONTROLLERS = 2
DEFAULT_SLOTS = "cpu:2"


def find_cluster(address: str | None, home: Path) -> ClusterAddress:
    """Where a cluster answers, and how to talk to it. Raises UsageError, and Unreachable if none is up in `home` and no other is known."""
    from gcore.client.contexts import choose_cluster

    if address is not None:
        return choose_cluster(os.environ, parse_addresses(address))
    from gcore.config.local_cluster import LocalClusterState, read_owner_key

    local = LocalClusterState.load(home)
    found = choose_cluster(os.environ, local=local is not None)
    if found.addresses:
        return found
    return replace(choose_cluster(os.environ, find_addresses(None, home), local=True), owner_key=read_owner_key(home))


def find_addresses(address: str | None, home: Path) -> tuple[str, ...]:
    """host:port of every controller that may be asked. `address`: one or several, separated by commas.

    Raises UsageError for an address that is none, Unreachable if no cluster is up in `home`.
    """
    if address is not None:
        return parse_addresses(address)
    from gcore.config.local_cluster import FILE_NAME, LocalClusterState  # not for --help

    cluster = LocalClusterState.load(home)
    if cluster is None:
        kept = " (what `gcore run` started ended with it; its jobs are kept)" if (home / "runs").is_dir() else ""
        raise Unreachable(
            "no cluster is up here",
            where=str((home / FILE_NAME).absolute()),
            fix=f"Start one with `gcore up`{kept}, or name a controller with --address host:port",
        )
    return cluster.addresses


def parse_addresses(text: str) -> tuple[str, ...]:
    """`host:port`, or several with commas. Raises UsageError."""
    return tuple(_checked(part.strip()) for part in text.split(","))


def _checked(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r} is no address", where="--address", fix="For example --address 10.0.0.7:7700")
    return address


T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., None])
INTERRUPTED = 130

ENDINGS = """
[bold]Exit codes[/bold]

[bold]0[/bold]  it worked

[bold]1[/bold]  the job failed or was cancelled, or its audit found violations

[bold]2[/bold]  the command, the spec or a file it names is wrong; nothing was started

[bold]3[/bold]  no controller, or no store, answered

[bold]4[/bold]  you are not known there, or may not do this

[bold]130[/bold]  interrupted; the same command goes on

[bold]First steps[/bold]

gcore doctor

gcore init sorting
"""

RUN, JOBS, FLEET, CLUSTER = "Run", "Jobs", "Cluster", "Local cluster"
FILES, ACCESS = "Specs and models", "Access"
"""Panels of the help."""

ORDER = (
    "demo",
    "init",
    "run",
    "submit",
    "list",
    "describe",
    "events",
    "logs",
    "cancel",
    "pause",
    "resume",
    "retry",
    "update",
    "eval",
    "delete",
    "samples",
    "checkpoints",
    "audit",
    "top",
    "trace",
    "whoami",
    "shards",
    "nodes",
    "workers",
    "drain",
    "usage",
    "quota",
    "export",
    "up",
    "down",
    "doctor",
    "gc",
    "validate",
    "plan",
    "simulate",
    "schema",
    "prepare",
    "certs",
    "token",
    "context",
    "placement",
)
"""Of the commands in the help, whichever module was imported first."""


class OrderedCommands(TyperGroup):
    """The commands of `gcore` in their order."""

    def list_commands(self, ctx: Any) -> list[str]:
        """By `ORDER`."""
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    name="gcore",
    cls=OrderedCommands,
    help="Reinforcement-learning post-training of language models on a cluster without a head node.",
    epilog=ENDINGS,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str, panel: str, *lines: str) -> Callable[[Function], Function]:
    """Make a function a command of `gcore`. Its help ends with the examples `lines`. One that is interrupted ends with 130, as shells do."""

    def add(call: Function) -> Function:
        @functools.wraps(call)
        def interruptible(*args: Any, **options: Any) -> None:
            try:
                call(*args, **options)
            except KeyboardInterrupt:
                typer.echo("gcore: interrupted", err=True)
                raise typer.Exit(INTERRUPTED) from None

        app.command(name, epilog=examples(*lines), rich_help_panel=panel)(interruptible)
        return call

    return add


def examples(*commands: str) -> str:
    """The epilog of a command's help: a line for each of `commands`."""
    return "\n\n".join(("\n[bold]Examples[/bold]", *commands)) + "\n"


def verb_examples(verb: str) -> tuple[str, str]:
    """Examples of a verb that takes a job."""
    return f"gcore {verb} arithmetic", f"gcore {verb} arithmetic --address 10.0.0.7:7700 -o json"


def command_group(purpose: str, epilog: str) -> typer.Typer:
    """An application whose commands are called behind its name."""
    return typer.Typer(
        help=purpose,
        no_args_is_help=True,
        rich_markup_mode="rich",
        epilog=epilog,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def call_cluster(
    what: Callable[[JobsClient], Awaitable[T]], address: str | None, home: Path, patience: WaitPolicy | None = None
) -> T:
    """Run one conversation with the cluster."""
    from gcore.client.jobs import JobsClient

    cluster = find_cluster(address, home)

    async def talk() -> T:
        reached = JobsClient(
            cluster.addresses,
            clock=SystemClock(),
            patience=patience,
            connector=cluster.connector,
            owner_key=cluster.owner_key,
        )
        async with reached as client:
            return await what(client)

    return asyncio.run(talk())


def run_of_home(job: str, address: str | None, home: Path, error: Unreachable) -> dict[str, str]:
    """The run of that job that ended in `home`, as `describe_finished_run` finds it: it is read where no cluster is up.

    Raises GcoreError; `error`, which is why no cluster answered, if one was named by its address.
    """
    from controllers.cli.view.summary import describe_finished_run

    if address is not None:
        raise error
    return describe_finished_run(home, job, error)
