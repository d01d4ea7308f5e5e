"""The `gcore` application, options that several commands share, and shell completion.

Completion waits at most one second for a controller. On an error it offers no completions and prints nothing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from controllers.cli.output import Output
from gcore.errors import GcoreError, Unreachable, UsageError
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from gcore.client.calls import WaitPolicy
    from gcore.client.jobs import JobsClient

WITHIN_S = 1.0
"""Timeout of a shell completion in seconds."""

MOST = 100
"""Maximum number of jobs that a shell completion offers."""


def complete_job(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete a job name: matching jobs, newest first, each with its state."""
    if "/" in incomplete:
        return []

    async def ask(client: JobsClient) -> list[tuple[str, str]]:
        from gcore.client.calls import job_state_name

        jobs = await client.list_jobs(name_prefix=incomplete, limit=MOST)
        return [(job.name, f"{job_state_name(job.state)}, {job.uid}") for job in reversed(jobs)]

    return list(dict(_ask(context, ask)).items())[::-1]


def complete_node(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete a node name: matching nodes, each with its slots."""

    async def ask(client: JobsClient) -> list[tuple[str, str]]:
        nodes = (await client.list_nodes()).nodes
        return [(node.name, " ".join(node.slots)) for node in nodes if node.name.startswith(incomplete)]

    return _ask(context, ask)


def _ask(
    context: typer.Context, what: Callable[[JobsClient], Awaitable[list[tuple[str, str]]]]
) -> list[tuple[str, str]]:
    """Query the cluster with `what` for a shell completion: (name, description) pairs; empty on an error or after
    `WITHIN_S` seconds."""
    from gcore.client.calls import WaitPolicy
    from gcore.config.local_cluster import local_home

    address = context.params.get("address") or os.environ.get("GCORE_ADDRESS")
    home = local_home(context.params.get("home"))

    async def soon(client: JobsClient) -> list[tuple[str, str]]:
        return await asyncio.wait_for(what(client), WITHIN_S)

    try:
        return call_cluster(soon, address, home, WaitPolicy(call_s=WITHIN_S, probe_s=WITHIN_S))
    except (GcoreError, OSError, TimeoutError, ValueError):
        return []


def check_utf8(word: str | None) -> str | None:
    """Return the word if it is valid UTF-8. Raises UsageError: a shell may pass any bytes."""
    try:
        (word or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{word!a} is not valid UTF-8", fix="Type the name again, or copy it from `gcore list`"
        ) from error
    return word


Home = Annotated[Path, typer.Option(envvar="GCORE_HOME", help="Folder of the local cluster: state, logs and runs.")]

Address = Annotated[
    str | None,
    typer.Option(
        envvar="GCORE_ADDRESS",
        help="host:port of a controller, or several, separated by commas. Default: the running local cluster, else the current context (`gcore context`).",
    ),
]

Controllers = Annotated[int, typer.Option(help="Number of daemons on this machine.")]

Slots = Annotated[
    str,
    typer.Option(
        help="Slots of this machine, divided among the daemons: cpu:N or cuda:N. emulated:N only simulates compute, for tests and benchmarks."
    ),
]

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a field of the spec: section.field=value. Repeatable. Paths are relative to the spec's folder.",
    ),
]

New = Annotated[
    bool, typer.Option("--new", help="Always create a new job. An unfinished job of the same name is cancelled.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Print lines instead of the live view.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="Output format: table, json or yaml.")]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="A job spec (YAML file).")]

JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Job name, NAMESPACE/NAME or uid.", callback=check_utf8, autocompletion=complete_job
    ),
]

NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="Node name.", callback=check_utf8, autocompletion=complete_node)
]

Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Only this namespace. Default: all that you may see.")
]

SglangPython = Annotated[
    Path | None,
    typer.Option(
        envvar="GCORE_SGLANG_PYTHON",
        help="Python interpreter or virtual environment that has SGLang, for rollout.engine: sglang. Default: .venv-sglang.",
    ),
]

VllmPython = Annotated[
    Path | None,
    typer.Option(
        envvar="GCORE_VLLM_PYTHON",
        help="Python interpreter or virtual environment that has vLLM, for rollout.engine: vllm. Default: .venv-vllm.",
    ),
]

DEFAULT_HOME = Path(".gcore")
DEFAULT_CONTROLLERS = 2
DEFAULT_SLOTS = "cpu:2"


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the user gave the option or its environment variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., None])
INTERRUPTED = 130

ENDINGS = """
[bold]Exit codes[/bold]

[bold]0[/bold]  success

[bold]1[/bold]  the job failed or was cancelled, or its audit found violations

[bold]2[/bold]  the command, the spec or a file that it names is wrong; nothing was started

[bold]3[/bold]  no controller or no store responded

[bold]4[/bold]  not authenticated, or not permitted

[bold]130[/bold]  interrupted; the same command continues

[bold]First steps[/bold]

gcore doctor

gcore init sorting
"""

RUN, JOBS, FLEET, CLUSTER = "Run", "Jobs", "Cluster", "Local cluster"
FILES, ACCESS = "Specs and models", "Access"
"""Panels of the help text."""

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
"""Order of the commands in the help text, independent of the order of imports."""


class OrderedCommands(TyperGroup):
    """The command group of `gcore`, listed in a fixed order."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Command names sorted by `ORDER`."""
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
    """Register a function as a command of `gcore`. Its help ends with the examples `lines`. An interrupted command exits with 130, as in shells."""

    def add(call: Function) -> Function:
        @functools.wraps(call)
        def interruptible(*args: Any, **options: Any) -> None:
            try:
                call(*args, **options)
            except KeyboardInterrupt:
                typer.echo("gcore: interrupted", err=True)
                raise typer.Exit(INTERRUPTED) from None

        # Line breaks of the source would be printed; the terminal wraps the paragraphs.
        paragraphs = inspect.cleandoc(call.__doc__ or "").split("\n\n")
        interruptible.__doc__ = "\n\n".join(" ".join(one.split()) for one in paragraphs)
        app.command(name, epilog=examples(*lines), rich_help_panel=panel)(interruptible)
        return call

    return add


def examples(*commands: str) -> str:
    """The text below a command's help: one line for each of the example `commands`."""
    return "\n\n".join(("\n[bold]Examples[/bold]", *commands)) + "\n"


def verb_examples(verb: str) -> tuple[str, str]:
    """Two examples for the help of the command `verb`, whose argument is a job."""
    return f"gcore {verb} arithmetic", f"gcore {verb} arithmetic --address 10.0.0.7:7700 -o json"


def command_group(purpose: str, epilog: str) -> typer.Typer:
    """Create the typer application of a group of subcommands, such as `gcore certs`. `purpose`: its help text;
    `epilog`: the text below."""
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
    """Connect to the cluster, await `what(client)` and return its result.

    `address`, `home`: see `find_cluster`. `patience`: timeouts of the client; None: the defaults. Raises GcoreError.
    """
    from gcore.client.contexts import find_cluster
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
    """Find a finished run of `job` in the folder `home` and return its description (see `describe_finished_run`). Used
    if no cluster responds.

    `error`: why the cluster did not respond; it is raised if the user gave an address. Raises GcoreError if there is no
    such run.
    """
    from controllers.cli.view.summary import describe_finished_run

    if address is not None:
        raise error
    return describe_finished_run(home, job, error)
