"""`gcore up` and `gcore down`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output
from controllers.cli.options import (
    DEFAULT_CONTROLLERS,
    DEFAULT_HOME,
    DEFAULT_SLOTS,
    Controllers,
    Format,
    Home,
    SglangPython,
    Slots,
)
from gcore.errors import UsageError

if TYPE_CHECKING:
    from gcore.config.cluster import LocalCluster

UP_EXAMPLES = """
[bold]Examples[/bold]

[dim]Two daemons with a CPU core each:[/dim]  gcore up

[dim]Four on one machine with eight GPUs:[/dim]  gcore up --controllers 4 --slots cuda:8

[dim]A second cluster beside the first:[/dim]  gcore up --home /tmp/other
"""
DOWN_EXAMPLES = """
[bold]Examples[/bold]

gcore down

gcore down --home /tmp/other
"""


def up(
    context: typer.Context,
    home: Home = DEFAULT_HOME,
    controllers: Controllers = DEFAULT_CONTROLLERS,
    slots: Slots = DEFAULT_SLOTS,
    port: Annotated[int | None, typer.Option(help="Port of the first daemon's API; the others follow.")] = None,
    etcd_port: Annotated[int | None, typer.Option(help="Port of the local etcd.")] = None,
    sglang_python: SglangPython = None,
    output: Format = Output.TABLE,
) -> None:
    """Start a cluster on this machine: an etcd and several daemons. Returns when all are ready.

    One that is up already stays as it is; if it is not as the options say, this ends with 2.
    """
    import asyncio

    from controllers.cli import local
    from gcore.clock import SystemClock
    from gcore.rollout.sglang.environment import find_python

    request = local.UpRequest(home, controllers, slots, port, etcd_port, find_python(sglang_python))
    result = asyncio.run(
        local.up(request, clock=SystemClock(), say=lambda what: typer.echo(what, err=output.is_for_programs))
    )
    cluster = result.cluster
    if output.is_for_programs:
        typer.echo(output.text(cluster.model_dump(mode="json")))
    else:
        typer.echo(f"The cluster in {cluster.home} is {'up' if result.started else 'already up'}.")
        for one in cluster.controllers:
            missing = "  does not answer" if one.name in result.absent else ""
            typer.echo(f"  {one.name}  {one.address}  metrics {one.metrics_address}  {' '.join(one.slots)}{missing}")
        typer.echo(f"  etcd    {cluster.etcd.endpoint}  {cluster.etcd.binary}")
    if not result.started:
        given = {name for name in context.params if _was_given(context, name)}
        check_as_asked(cluster, given, controllers, local.deal_slots(slots, 1)[0])


def check_as_asked(cluster: LocalCluster, given: Collection[str], controllers: int, slots: tuple[str, ...]) -> None:
    """Whether a cluster that is up already has what was asked for in so many words (`given`). Raises UsageError."""
    has = []
    if "controllers" in given and len(cluster.controllers) != controllers:
        has.append(f"{len(cluster.controllers)} controllers and not {controllers}")
    if "slots" in given and cluster.slots != slots:
        has.append(f"the slots {' '.join(cluster.slots)}")
    if has:
        raise UsageError(
            f"the cluster that is up has {', and '.join(has)}",
            where=cluster.home,
            fix="`gcore down` first to change that",
        )


def _was_given(context: typer.Context, name: str) -> bool:
    """Whether somebody named the option, or its variable, so that it is not the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def down(home: Home = DEFAULT_HOME) -> None:
    """End the cluster of this machine: daemons, workers and etcd. Data, logs and runs stay; unfinished jobs can go on."""
    from controllers.cli import local
    from gcore.clock import SystemClock

    ended = local.down(home, clock=SystemClock())
    killed = f", {ended.killed} of them killed" if ended.killed else ""
    typer.echo(
        f"{ended.ended} processes have ended{killed}." if ended.ended else f"Nothing was up in {home.resolve()}."
    )
