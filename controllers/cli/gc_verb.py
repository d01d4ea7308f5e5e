"""`gcore gc`: what lies on this node and is not needed any more, and deleting it, as its daemon does now and then.

Reads the daemon's own configuration, and asks the store itself which jobs have ended: it works while the daemon is away.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output, console
from controllers.cli.options import DEFAULT_HOME, Format, Home
from controllers.cli.view_text import visible
from gcore.errors import GcoreError, Unreachable

if TYPE_CHECKING:
    from controllers.clearing import Cleared
    from controllers.garbage import Verdict
    from gcore.config import NodeConfig

GC_EXAMPLES = """
[bold]Examples[/bold]

[dim]What would go, and what stays for which reason:[/dim]  gcore gc --dry-run

[dim]On a node of a cluster:[/dim]  gcore gc --config /etc/gcore/node.yaml
"""
GIB = 1 << 30

Configuration = Annotated[
    Path | None, typer.Option("--config", help="A daemon's configuration; default: that of the local cluster's.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")]


def gc(
    config: Configuration = None, home: Home = DEFAULT_HOME, dry_run: DryRun = False, output: Format = Output.TABLE
) -> None:
    """Delete what is not needed any more on this node, by the `gc` section of its daemon's configuration.

    Nothing that an unfinished job uses is ever deleted.
    """
    import asyncio

    cleared = asyncio.run(_cleared(_configuration(config, home), dry_run=dry_run))
    if output.is_for_programs:
        typer.echo(output.text([_tree(one) for one in cleared.verdicts]))
    else:
        _print(cleared.verdicts, dry_run=dry_run)
    if cleared.problems:
        raise GcoreError("; ".join(cleared.problems), fix="Delete them as their owner, or let the daemon do it")


def _configuration(config: Path | None, home: Path) -> NodeConfig:
    from gcore.config import NodeConfig
    from gcore.config.cluster import LocalCluster

    if config is not None:
        return NodeConfig.load(config)
    cluster = LocalCluster.load(home)
    if cluster is None:
        raise Unreachable(
            "no cluster is up here",
            where=str(home),
            fix="Start one with `gcore up`, or name a daemon's file with --config",
        )
    return NodeConfig.load(Path(cluster.controllers[0].config_file))


async def _cleared(config: NodeConfig, *, dry_run: bool) -> Cleared:
    from controllers.clearing import Cleared, clear, look
    from controllers.garbage import judged
    from gcore.clock import SystemClock
    from gcore.store.connecting import connect

    clock = SystemClock()
    store = await connect(config.etcd, clock)
    try:
        now = clock.wall()
        verdicts = judged(await look(config, store, now), config.gc, now)
        return Cleared(verdicts) if dry_run else await clear(store, verdicts, clock)
    finally:
        await store.close()


def _tree(verdict: Verdict) -> dict[str, object]:
    found = verdict.found
    return {
        "kind": found.kind,
        "path": str(found.path),
        "bytes": found.bytes,
        "used": found.used,
        "goes": verdict.goes,
        "why": verdict.why,
    }


def _print(verdicts: tuple[Verdict, ...], *, dry_run: bool) -> None:
    from rich.table import Table

    going = [one for one in verdicts if one.goes]
    if verdicts:
        table = Table(box=None, pad_edge=False)
        for name in ("", "kind", "GiB", "path", "why"):
            table.add_column(name, justify="right" if name == "GiB" else "left")
        for one in verdicts:
            size = f"{one.found.bytes / GIB:.3f}" if one.found.bytes or one.goes else ""
            verb = ("goes" if dry_run else "gone") if one.goes else "stays"
            table.add_row(verb, one.found.kind, size, visible(str(one.found.path)), visible(one.why))
        console().print(table)
    what = "would be deleted" if dry_run else "deleted"
    typer.echo(f"{len(going)} of {len(verdicts)} {what}, {sum(one.found.bytes for one in going) / GIB:.3f} GiB.")
