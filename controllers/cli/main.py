"""The `gcore` command: which verbs there are, and how an error ends.

A `GcoreError` is one sentence on standard error and its exit code; anything else is a defect of gcore and shows its
traceback. Verbs import what they need when they run, so that help is quick and nothing here ever imports torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from controllers.cli.commands import access as certs_verb
from controllers.cli.commands import checkpoints as checkpoints_verb
from controllers.cli.commands import cluster as fleet_verbs
from controllers.cli.commands import doctor as doctor_verb
from controllers.cli.commands import jobs as job_verbs
from controllers.cli.commands import placement as top_verb
from controllers.cli.commands import plan as plan_verb
from controllers.cli.commands import run as run_verb
from controllers.cli.commands import specs as init_verb
from controllers.cli.commands import streams as stream_verbs
from controllers.cli.commands.checkpoints import EXPORT_EXAMPLES, export
from controllers.cli.options import prepare_hint, verb_examples, with_program_name
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


_ACCESS = "Access"


_RUN, _JOBS, _FLEET, _CLUSTER, _FILES = "Run", "Jobs", "Cluster", "Local cluster", "Specs and models"


def _verb(name: str, call: Callable[..., None], examples: str, panel: str) -> None:
    """Register a verb. One that is interrupted ends with 130, as shells do."""

    @functools.wraps(call)
    def interruptible(*args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        except KeyboardInterrupt:
            typer.echo("gcore: interrupted", err=True)
            raise typer.Exit(run_verb.EXIT_INTERRUPTED) from None

    app.command(name, epilog=examples, rich_help_panel=panel)(interruptible)


_verb("init", init_verb.init, init_verb.INIT_EXAMPLES, _RUN)


_verb("run", run_verb.run, run_verb.RUN_EXAMPLES, _RUN)


_verb("submit", run_verb.submit, run_verb.SUBMIT_EXAMPLES, _RUN)


_verb("list", job_verbs.list_jobs, job_verbs.LIST_EXAMPLES, _JOBS)


_verb("describe", job_verbs.describe, verb_examples("describe"), _JOBS)


_verb("events", stream_verbs.events, stream_verbs.EVENTS_EXAMPLES, _JOBS)


_verb("logs", stream_verbs.logs, stream_verbs.LOGS_EXAMPLES, _JOBS)


_verb("cancel", job_verbs.cancel, job_verbs.CANCEL_EXAMPLES, _JOBS)


_verb("pause", job_verbs.pause, job_verbs.PAUSE_EXAMPLES, _JOBS)


_verb("resume", job_verbs.resume, job_verbs.RESUME_EXAMPLES, _JOBS)


_verb("retry", job_verbs.retry, job_verbs.RETRY_EXAMPLES, _JOBS)


_verb("update", job_verbs.update, job_verbs.UPDATE_EXAMPLES, _JOBS)


_verb("eval", job_verbs.evaluate, job_verbs.EVAL_EXAMPLES, _JOBS)


_verb("delete", job_verbs.delete, job_verbs.DELETE_EXAMPLES, _JOBS)


_verb("samples", stream_verbs.samples, stream_verbs.SAMPLES_EXAMPLES, _JOBS)


_verb("checkpoints", checkpoints_verb.checkpoints, checkpoints_verb.CHECKPOINTS_EXAMPLES, _JOBS)


_verb("audit", job_verbs.audit, verb_examples("audit"), _JOBS)


_verb("top", top_verb.top, top_verb.TOP_EXAMPLES, _JOBS)


_verb("trace", top_verb.trace, top_verb.TRACE_EXAMPLES, _JOBS)


app.add_typer(certs_verb.certs_app, name="certs", rich_help_panel=_ACCESS)


app.add_typer(certs_verb.token_app, name="token", rich_help_panel=_ACCESS)


app.add_typer(certs_verb.context_app, name="context", rich_help_panel=_ACCESS)


_verb("whoami", certs_verb.whoami, certs_verb.WHOAMI_EXAMPLES, _ACCESS)


_verb("shards", fleet_verbs.shards, fleet_verbs.SHARDS_EXAMPLES, _JOBS)


_verb("nodes", fleet_verbs.nodes, fleet_verbs.NODES_EXAMPLES, _FLEET)


_verb("drain", fleet_verbs.drain, fleet_verbs.DRAIN_EXAMPLES, _FLEET)


_verb("usage", fleet_verbs.usage, fleet_verbs.USAGE_EXAMPLES, _FLEET)


_verb("quota", fleet_verbs.quota, fleet_verbs.QUOTA_EXAMPLES, _FLEET)


app.add_typer(top_verb.app, name="placement", rich_help_panel=_JOBS)


_verb("export", export, EXPORT_EXAMPLES, _FILES)


_verb("up", fleet_verbs.up, fleet_verbs.UP_EXAMPLES, _CLUSTER)


_verb("down", fleet_verbs.down, fleet_verbs.DOWN_EXAMPLES, _CLUSTER)


_verb("doctor", doctor_verb.doctor, doctor_verb.DOCTOR_EXAMPLES, _CLUSTER)


_verb("gc", fleet_verbs.gc, fleet_verbs.GC_EXAMPLES, _CLUSTER)


_verb("validate", init_verb.validate, init_verb.VALIDATE_EXAMPLES, _FILES)


_verb("plan", plan_verb.plan, plan_verb.PLAN_EXAMPLES, _FILES)


_verb("simulate", plan_verb.simulate, plan_verb.SIMULATE_EXAMPLES, _FILES)


_verb("schema", init_verb.schema, init_verb.SCHEMA_EXAMPLES, _FILES)


_verb("prepare", init_verb.prepare, init_verb.PREPARE_EXAMPLES, _FILES)


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
        said = " ".join(str(error).split())
        typer.echo("gcore: " + with_program_name(said + prepare_hint(said)), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
