"""`gcore samples`: what a step was trained on, as a person reads it, or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controllers.cli.answers import Output, console
from controllers.cli.job_verbs import call
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, JobName, utf8
from gcore.errors import Unreachable, UsageError

SAMPLES_EXAMPLES = """
[bold]Examples[/bold]

gcore samples arithmetic

gcore samples arithmetic --step 12 --best --limit 2

gcore samples arithmetic --source sums --worst -o json
"""
DEFAULT_LIMIT, MOST = 3, 2**31 - 1


def samples(
    job: JobName,
    step: Annotated[
        int | None, typer.Option(help="The step; default: the newest that has samples.", min=1, max=MOST)
    ] = None,
    source: Annotated[str, typer.Option(help="Only prompts of this source.", callback=utf8)] = "",
    best: Annotated[bool, typer.Option("--best", help="The highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    limit: Annotated[
        int, typer.Option(help="At most so many prompts; 0: all that are kept.", min=0, max=MOST)
    ] = DEFAULT_LIMIT,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Prompts that a step was trained on, with their responses, reward parts and advantages.

    Where no cluster is up, those of a run that ended in this home are read from its folder.
    """
    from controllers.cli.samples_view import groups_tree, show_groups
    from gcore.api.v1 import jobs_pb2 as pb

    if best and worst:
        raise UsageError("--best and --worst are two orders", fix="Give one of them")
    order = pb.SAMPLE_ORDER_BEST if best else pb.SAMPLE_ORDER_WORST if worst else pb.SAMPLE_ORDER_UNSPECIFIED
    try:
        found = call(
            lambda client: client.get_samples(job, step=step, source=source, order=order, limit=limit), address, home
        )
    except Unreachable as error:
        if address is not None:
            raise
        from controllers.cli.summary import finished_run
        from controllers.service.samples import samples_of_folder

        run_dir = Path(finished_run(home, job, error)["folder"])
        request = pb.GetSamplesRequest(job=job, step=step, source=source, order=order, limit=limit)
        found = list(samples_of_folder(run_dir, request))
    if output.is_for_programs:
        typer.echo(output.text(groups_tree(found)))
    else:
        show_groups(console(), found)
