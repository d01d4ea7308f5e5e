"""The `gcore` command: the commands there are, and how an error ends.

A `GcoreError` is printed as one sentence on standard error and sets the exit code. Anything else is a defect of gcore and
shows its traceback. Commands import what they need when they run, so that `--help` is fast; nothing here imports torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from controllers.cli.commands import (
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
from controllers.cli.options import INTERRUPTED, verb_examples
from controllers.cli.output import prepare_hint, with_program_name
from gcore import __version__
from gcore.errors import GcoreError

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

app = typer.Typer(
    name="gcore",
    help="Reinforcement-learning post-training of language models on a cluster without a head node.",
    epilog=ENDINGS,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_RUN, _JOBS, _FLEET, _CLUSTER, _FILES = "Run", "Jobs", "Cluster", "Local cluster", "Specs and models"
_ACCESS = "Access"


def _add_command(name: str, call: Callable[..., None], examples: str, panel: str) -> None:
    """Register a command. One that is interrupted ends with 130, as shells do."""

    @functools.wraps(call)
    def interruptible(*args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        except KeyboardInterrupt:
            typer.echo("gcore: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    app.command(name, epilog=examples, rich_help_panel=panel)(interruptible)


_add_command("init", specs.init, specs.INIT_EXAMPLES, _RUN)
_add_command("run", run.run, run.RUN_EXAMPLES, _RUN)
_add_command("submit", run.submit, run.SUBMIT_EXAMPLES, _RUN)
_add_command("list", jobs.list_jobs, jobs.LIST_EXAMPLES, _JOBS)
_add_command("describe", jobs.describe, verb_examples("describe"), _JOBS)
_add_command("events", streams.events, streams.EVENTS_EXAMPLES, _JOBS)
_add_command("logs", streams.logs, streams.LOGS_EXAMPLES, _JOBS)
_add_command("cancel", jobs.cancel, jobs.CANCEL_EXAMPLES, _JOBS)
_add_command("pause", jobs.pause, jobs.PAUSE_EXAMPLES, _JOBS)
_add_command("resume", jobs.resume, jobs.RESUME_EXAMPLES, _JOBS)
_add_command("retry", jobs.retry, jobs.RETRY_EXAMPLES, _JOBS)
_add_command("update", jobs.update, jobs.UPDATE_EXAMPLES, _JOBS)
_add_command("eval", jobs.evaluate, jobs.EVAL_EXAMPLES, _JOBS)
_add_command("delete", jobs.delete, jobs.DELETE_EXAMPLES, _JOBS)
_add_command("samples", streams.samples, streams.SAMPLES_EXAMPLES, _JOBS)
_add_command("checkpoints", checkpoints.checkpoints, checkpoints.CHECKPOINTS_EXAMPLES, _JOBS)
_add_command("audit", jobs.audit, verb_examples("audit"), _JOBS)
_add_command("top", placement.top, placement.TOP_EXAMPLES, _JOBS)
_add_command("trace", placement.trace, placement.TRACE_EXAMPLES, _JOBS)
app.add_typer(access.certs_app, name="certs", rich_help_panel=_ACCESS)
app.add_typer(access.token_app, name="token", rich_help_panel=_ACCESS)
app.add_typer(access.context_app, name="context", rich_help_panel=_ACCESS)
_add_command("whoami", access.whoami, access.WHOAMI_EXAMPLES, _ACCESS)
_add_command("shards", cluster.shards, cluster.SHARDS_EXAMPLES, _JOBS)
_add_command("nodes", cluster.nodes, cluster.NODES_EXAMPLES, _FLEET)
_add_command("drain", cluster.drain, cluster.DRAIN_EXAMPLES, _FLEET)
_add_command("usage", cluster.usage, cluster.USAGE_EXAMPLES, _FLEET)
_add_command("quota", cluster.quota, cluster.QUOTA_EXAMPLES, _FLEET)
app.add_typer(placement.app, name="placement", rich_help_panel=_JOBS)
_add_command("export", checkpoints.export, checkpoints.EXPORT_EXAMPLES, _FILES)
_add_command("up", cluster.up, cluster.UP_EXAMPLES, _CLUSTER)
_add_command("down", cluster.down, cluster.DOWN_EXAMPLES, _CLUSTER)
_add_command("doctor", doctor.doctor, doctor.DOCTOR_EXAMPLES, _CLUSTER)
_add_command("gc", cluster.gc, cluster.GC_EXAMPLES, _CLUSTER)
_add_command("validate", specs.validate, specs.VALIDATE_EXAMPLES, _FILES)
_add_command("plan", plan.plan, plan.PLAN_EXAMPLES, _FILES)
_add_command("simulate", plan.simulate, plan.SIMULATE_EXAMPLES, _FILES)
_add_command("schema", specs.schema, specs.SCHEMA_EXAMPLES, _FILES)
_add_command("prepare", specs.prepare, specs.PREPARE_EXAMPLES, _FILES)


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
