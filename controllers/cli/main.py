"""The `gcore` command: which verbs there are, and how an error ends.

A `GcoreError` is one sentence on standard error and its exit code; anything else is a defect of gcore and shows its
traceback. Verbs import what they need when they run, so that help is quick and nothing here ever imports torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from controllers.cli import cluster_verbs, file_verbs, job_verbs, run_verb
from gcore import __version__
from gcore.errors import GcoreError

ENDINGS = """
[bold]Exit codes[/bold]

[bold]0[/bold]  it worked

[bold]1[/bold]  the job failed or was cancelled, or its audit found violations

[bold]2[/bold]  the command, the spec or a file it names is wrong; nothing was started

[bold]3[/bold]  no controller, or no store, answered

[bold]130[/bold]  interrupted; the same command goes on

[bold]First steps[/bold]

gcore prepare arithmetic

gcore run examples/arithmetic/grpo.yaml
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

_RUN, _JOBS, _CLUSTER, _FILES = "Run", "Jobs", "Local cluster", "Specs and models"

app.command("run", epilog=run_verb.RUN_EXAMPLES, rich_help_panel=_RUN)(run_verb.run)
app.command("submit", epilog=job_verbs.SUBMIT_EXAMPLES, rich_help_panel=_RUN)(job_verbs.submit)
app.command("list", epilog=job_verbs.LIST_EXAMPLES, rich_help_panel=_JOBS)(job_verbs.list_)
app.command("describe", epilog=job_verbs.examples("describe"), rich_help_panel=_JOBS)(job_verbs.describe)
app.command("cancel", epilog=job_verbs.examples("cancel"), rich_help_panel=_JOBS)(job_verbs.cancel)
app.command("audit", epilog=job_verbs.examples("audit"), rich_help_panel=_JOBS)(job_verbs.audit)
app.command("export", epilog=file_verbs.EXPORT_EXAMPLES, rich_help_panel=_FILES)(file_verbs.export)
app.command("up", epilog=cluster_verbs.UP_EXAMPLES, rich_help_panel=_CLUSTER)(cluster_verbs.up)
app.command("down", epilog=cluster_verbs.DOWN_EXAMPLES, rich_help_panel=_CLUSTER)(cluster_verbs.down)
app.command("validate", epilog=file_verbs.VALIDATE_EXAMPLES, rich_help_panel=_FILES)(file_verbs.validate)
app.command("schema", epilog=file_verbs.SCHEMA_EXAMPLES, rich_help_panel=_FILES)(file_verbs.schema)
app.command("prepare", epilog=file_verbs.PREPARE_EXAMPLES, rich_help_panel=_FILES)(file_verbs.prepare)


@app.callback()
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Reinforcement-learning post-training of language models on a cluster without a head node."""
    if version:
        typer.echo(f"gcore {__version__}")
        raise typer.Exit


def main() -> None:
    """The console script."""
    try:
        app()
    except GcoreError as error:
        typer.echo("gcore: " + " ".join(str(error).split()), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
