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

from controllers.cli import (
    certs_verb,
    checkpoints_verb,
    cluster_verbs,
    context_verbs,
    doctor_verb,
    file_verbs,
    fleet_verbs,
    gc_verb,
    init_verb,
    job_verbs,
    placement_verbs,
    plan_verb,
    quota_verb,
    run_verb,
    samples_verb,
    simulate_verb,
    steering_verbs,
    stream_verbs,
    submit_verb,
    token_verbs,
    trace,
)
from controllers.cli import top as top_verb
from controllers.cli.called import as_called, prepared_by
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
            raise typer.Exit(run_verb.INTERRUPTED) from None

    app.command(name, epilog=examples, rich_help_panel=panel)(interruptible)


_verb("init", init_verb.init, init_verb.INIT_EXAMPLES, _RUN)
_verb("run", run_verb.run, run_verb.RUN_EXAMPLES, _RUN)
_verb("submit", submit_verb.submit, submit_verb.SUBMIT_EXAMPLES, _RUN)
_verb("list", job_verbs.list_, job_verbs.LIST_EXAMPLES, _JOBS)
_verb("describe", job_verbs.describe, job_verbs.examples("describe"), _JOBS)
_verb("events", stream_verbs.events, stream_verbs.EVENTS_EXAMPLES, _JOBS)
_verb("logs", stream_verbs.logs, stream_verbs.LOGS_EXAMPLES, _JOBS)
_verb("cancel", steering_verbs.cancel, steering_verbs.CANCEL_EXAMPLES, _JOBS)
_verb("pause", steering_verbs.pause, steering_verbs.PAUSE_EXAMPLES, _JOBS)
_verb("resume", steering_verbs.resume, steering_verbs.RESUME_EXAMPLES, _JOBS)
_verb("retry", steering_verbs.retry, steering_verbs.RETRY_EXAMPLES, _JOBS)
_verb("update", steering_verbs.update, steering_verbs.UPDATE_EXAMPLES, _JOBS)
_verb("eval", steering_verbs.eval_, steering_verbs.EVAL_EXAMPLES, _JOBS)
_verb("delete", steering_verbs.delete, steering_verbs.DELETE_EXAMPLES, _JOBS)
_verb("samples", samples_verb.samples, samples_verb.SAMPLES_EXAMPLES, _JOBS)
_verb("checkpoints", checkpoints_verb.checkpoints, checkpoints_verb.CHECKPOINTS_EXAMPLES, _JOBS)
_verb("audit", job_verbs.audit, job_verbs.examples("audit"), _JOBS)
_verb("top", top_verb.top, top_verb.TOP_EXAMPLES, _JOBS)
_verb("trace", trace.trace, trace.TRACE_EXAMPLES, _JOBS)
app.add_typer(certs_verb.app, name="certs", rich_help_panel=_ACCESS)
app.add_typer(token_verbs.app, name="token", rich_help_panel=_ACCESS)
app.add_typer(context_verbs.app, name="context", rich_help_panel=_ACCESS)
_verb("whoami", token_verbs.whoami, token_verbs.WHOAMI_EXAMPLES, _ACCESS)
_verb("shards", fleet_verbs.shards, fleet_verbs.SHARDS_EXAMPLES, _JOBS)
_verb("nodes", fleet_verbs.nodes, fleet_verbs.NODES_EXAMPLES, _FLEET)
_verb("drain", fleet_verbs.drain, fleet_verbs.DRAIN_EXAMPLES, _FLEET)
_verb("usage", fleet_verbs.usage, fleet_verbs.USAGE_EXAMPLES, _FLEET)
_verb("quota", quota_verb.quota, quota_verb.QUOTA_EXAMPLES, _FLEET)
app.add_typer(placement_verbs.app, name="placement", rich_help_panel=_JOBS)
_verb("export", file_verbs.export, file_verbs.EXPORT_EXAMPLES, _FILES)
_verb("up", cluster_verbs.up, cluster_verbs.UP_EXAMPLES, _CLUSTER)
_verb("down", cluster_verbs.down, cluster_verbs.DOWN_EXAMPLES, _CLUSTER)
_verb("doctor", doctor_verb.doctor, doctor_verb.DOCTOR_EXAMPLES, _CLUSTER)
_verb("gc", gc_verb.gc, gc_verb.GC_EXAMPLES, _CLUSTER)
_verb("validate", file_verbs.validate, file_verbs.VALIDATE_EXAMPLES, _FILES)
_verb("plan", plan_verb.plan, plan_verb.PLAN_EXAMPLES, _FILES)
_verb("simulate", simulate_verb.simulate, simulate_verb.SIMULATE_EXAMPLES, _FILES)
_verb("schema", file_verbs.schema, file_verbs.SCHEMA_EXAMPLES, _FILES)
_verb("prepare", file_verbs.prepare, file_verbs.PREPARE_EXAMPLES, _FILES)


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
        typer.echo("gcore: " + as_called(said + prepared_by(said)), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
