"""`gcore nodes`, `drain`, `shards` and `usage`: the cluster's nodes, who has what of a stream, and what was used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controllers.cli.answers import Output, console
from controllers.cli.job_verbs import call, examples
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home, JobName, Namespace, NodeName
from controllers.cli.view_text import visible
from gcore.errors import UsageError

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb

NODES_EXAMPLES = """
[bold]Examples[/bold]

gcore nodes

[dim]With the workers on them:[/dim]  gcore nodes --workers
"""
DRAIN_EXAMPLES = """
[bold]Examples[/bold]

gcore drain gpu-07

[dim]Use it again:[/dim]  gcore drain gpu-07 --undo
"""
SHARDS_EXAMPLES = examples("shards")
USAGE_EXAMPLES = """
[bold]Examples[/bold]

gcore usage

gcore usage --by namespace --by job --since 2026-11-01 --until 2026-11-30

[dim]Hours of slots by pool, for a script:[/dim]  gcore usage --by pool -o json
"""
HOUR_S = 3600.0


def nodes(
    workers: Annotated[bool, typer.Option("--workers", "-w", help="The engines and train ranks on them, too.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """The nodes that are there, what each of their slots is used for, and what is wrong with them."""
    reply = call(lambda client: client.list_nodes(), address, home)
    if output.is_for_programs:
        tree: dict[str, Any] = {"nodes": [node_tree(node) for node in reply.nodes]}
        if workers:
            tree["workers"] = [worker_tree(one) for one in reply.workers]
        typer.echo(output.text(tree))
        return
    rows = [
        (visible(node.name), standing_of(node), str(len(node.slots)), used_by(node), visible(node.address))
        for node in reply.nodes
    ]
    table(("NODE", "STATE", "SLOTS", "USED BY", "ADDRESS"), rows)
    if workers:
        typer.echo()
        found = [
            (visible(w.instance), w.role, visible(w.node), visible(w.slot), visible(w.job_uid), visible(w.state))
            for w in reply.workers
        ]
        table(("WORKER", "ROLE", "NODE", "SLOTS", "JOB", "STATE"), found)


def drain(
    node: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Have every job leave a node at its next commit, and place nothing there until that is undone. It outlives the daemon's end."""
    found = call(lambda client: client.drain_node(node, undo=undo), address, home)
    if output.is_for_programs:
        typer.echo(output.text(node_tree(found)))
    elif undo:
        typer.echo(f"Node {visible(found.name)} is used again.")
    else:
        used = used_by(found)
        still = f"; still used by {used}" if used != "-" else "; nothing is on it"
        typer.echo(f"Node {visible(found.name)} is being left{still}.")


def shards(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """Who has which shards of a job's prompt stream, and the first prompt of each without an outcome."""
    found = call(lambda client: client.list_shards(job), address, home)
    if output.is_for_programs:
        typer.echo(output.text([shard_tree(one) for one in found]))
        return
    rows = [
        (
            str(one.shard),
            visible(one.node) or "nobody",
            str(one.data_epoch),
            f"{one.seq}/{one.length}",
            str(one.ahead),
        )
        for one in found
    ]
    table(("SHARD", "NODE", "EPOCH", "AT", "DONE AHEAD"), rows)


def usage(
    by: Annotated[
        list[str] | None, typer.Option(help="namespace, job, owner or pool. Repeatable; default: namespace.")
    ] = None,
    since: Annotated[str, typer.Option(help="From this day on (UTC): 2026-11-01, or 30d for so long ago.")] = "",
    until: Annotated[str, typer.Option(help="Until this day, which is included.")] = "",
    namespace: Namespace = "",
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Hours of slots (accelerators) that jobs had, and of these, hours at work; from the books, also of jobs that were deleted."""
    from controllers.cli.stream_verbs import time_given
    from gcore.clock import SystemClock

    now = SystemClock().wall()
    begin = time_given(since, now) if since else 0.0
    end = time_given(until, now) if until else 0.0
    if end and end < begin:
        raise UsageError(f"--until {until} is before --since {since}", fix="Turn them round")
    names = by or ["namespace"]
    found = call(lambda client: client.get_usage(by=names, since=begin, until=end, namespace=namespace), address, home)
    if output.is_for_programs:
        typer.echo(output.text([usage_tree(one) for one in found]))
        return
    rows = [
        (
            *(visible(one.by.get(name, "")) or "-" for name in names),
            f"{one.slot_seconds / HOUR_S:,.2f}",
            f"{one.busy_seconds / HOUR_S:,.2f}",
            f"{one.busy_seconds / one.slot_seconds:.0%}" if one.slot_seconds else "-",
        )
        for one in found
    ]
    total, busy = sum(one.slot_seconds for one in found), sum(one.busy_seconds for one in found)
    if len(rows) > 1:
        blank = [""] * (len(names) - 1)
        share = f"{busy / total:.0%}" if total else "-"
        rows.append(("all", *blank, f"{total / HOUR_S:,.2f}", f"{busy / HOUR_S:,.2f}", share))
    table((*(name.upper() for name in names), "SLOT-HOURS", "AT WORK", "SHARE"), rows, numbers=3)


def standing_of(node: pb.Node) -> str:
    """`ready`, `being left`, and how many of its slots are sick."""
    state = "being left" if node.draining else "ready"
    return f"{state}, {len(node.sick)} sick: {visible('; '.join(node.sick), 200)}" if node.sick else state


def used_by(node: pb.Node) -> str:
    """`08d8f27366e5 3, 4 free`: how many slots each job has."""
    counts: dict[str, int] = {}
    for use in node.uses:
        counts[use.job_uid] = counts.get(use.job_uid, 0) + 1
    return ", ".join(f"{visible(uid) or 'another'} {count}" for uid, count in sorted(counts.items())) or "-"


def node_tree(node: pb.Node) -> dict[str, Any]:
    """For JSON."""
    return {
        "name": node.name,
        "incarnation": node.incarnation,
        "address": node.address,
        "slots": list(node.slots),
        "draining": node.draining,
        "sick": list(node.sick),
        "uses": {use.slot: use.job_uid for use in node.uses},
    }


def worker_tree(one: pb.WorkerInfo) -> dict[str, Any]:
    """For JSON."""
    fields = ("instance", "node", "role", "job_uid", "state", "address", "pid", "slot")
    return {name: getattr(one, name) for name in fields}


def shard_tree(one: pb.Shard) -> dict[str, Any]:
    """For JSON."""
    fields = ("shard", "node", "incarnation", "data_epoch", "seq", "length", "ahead")
    return {name: getattr(one, name) for name in fields}


def usage_tree(one: pb.Usage) -> dict[str, Any]:
    """For JSON."""
    return {**dict(sorted(one.by.items())), "slot_seconds": one.slot_seconds, "busy_seconds": one.busy_seconds}


def table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, numbers: int = 0) -> None:
    """Print it. The last `numbers` columns are numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place >= len(headings) - numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)
