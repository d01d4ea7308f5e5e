"""`gcore up` and `gcore down`."""

from __future__ import annotations

from typing import Annotated

import typer

from controllers.cli.answers import Output, as_json
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
    home: Home = DEFAULT_HOME,
    controllers: Controllers = DEFAULT_CONTROLLERS,
    slots: Slots = DEFAULT_SLOTS,
    port: Annotated[int | None, typer.Option(help="Port of the first daemon's API; the others follow.")] = None,
    etcd_port: Annotated[int | None, typer.Option(help="Port of the local etcd.")] = None,
    sglang_python: SglangPython = None,
    output: Format = Output.TABLE,
) -> None:
    """Start a cluster on this machine: an etcd and several daemons. Returns when all are ready."""
    import asyncio

    from controllers.cli import local
    from controllers.cli.called import as_called
    from gcore.clock import SystemClock
    from gcore.rollout.sglang.environment import find_python

    request = local.UpRequest(home, controllers, slots, port, etcd_port, find_python(sglang_python))
    result = asyncio.run(
        local.up(request, clock=SystemClock(), say=lambda what: typer.echo(what, err=output is Output.JSON))
    )
    if output is Output.JSON:
        typer.echo(as_json(result.cluster.model_dump(mode="json")))
        return
    cluster = result.cluster
    typer.echo(f"The cluster in {cluster.home} is {'up' if result.started else 'already up'}.")
    for one in cluster.controllers:
        missing = "  does not answer" if one.name in result.absent else ""
        typer.echo(f"  {one.name}  {one.address}  metrics {one.metrics_address}  {' '.join(one.slots)}{missing}")
    typer.echo(f"  etcd    {cluster.etcd.endpoint}  {cluster.etcd.binary}")
    if not result.started and (len(cluster.controllers), len(cluster.slots)) != (controllers, _count(slots)):
        typer.echo(as_called("It has other controllers or slots than asked for; `gcore down` first to change that."))


def down(home: Home = DEFAULT_HOME) -> None:
    """End the cluster of this machine: daemons, workers and etcd. Data, logs and runs stay; unfinished jobs can go on."""
    from controllers.cli import local
    from gcore.clock import SystemClock

    ended = local.down(home, clock=SystemClock())
    killed = f", {ended.killed} of them killed" if ended.killed else ""
    typer.echo(
        f"{ended.ended} processes have ended{killed}." if ended.ended else f"Nothing was up in {home.resolve()}."
    )


def _count(slots: str) -> int:
    number = slots.partition(":")[2]
    return int(number) if number.isdigit() else 0
