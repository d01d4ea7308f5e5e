"""Commands about nodes and slots: `gcore nodes`, `workers`, `drain`, `shards`, `usage`, `quota`, `gc`, `up` and
`down`.

`gc` reads the daemon's configuration, and from the store which jobs have ended. It needs no running daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controllers.cli.options import (
    CLUSTER,
    DEFAULT_CONTROLLERS,
    DEFAULT_HOME,
    DEFAULT_SLOTS,
    FLEET,
    JOBS,
    Address,
    Controllers,
    Format,
    Home,
    JobName,
    Namespace,
    NodeName,
    SglangPython,
    Slots,
    VllmPython,
    call_cluster,
    command,
    verb_examples,
    was_given,
)
from controllers.cli.output import Output, message_tree, printable_cells, printable_text
from controllers.cli.terminal import display, rows_table, say
from gcore.errors import GcoreError, Unreachable, UsageError
from gcore.system.clock import SystemClock

if TYPE_CHECKING:
    from controllers.storage.garbage import DeletionReport
    from controllers.storage.rules import GarbageDecision
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.jobs import JobsClient
    from gcore.config.local_cluster import LocalClusterState
    from gcore.config.node import NodeConfig


HOUR_S = 3600.0
LOOK_S = 1.0
"""Seconds between two requests while a command waits for a node."""

WORKER = ("instance", "node", "role", "job_uid", "state", "address", "pid", "slot")
SHARD = ("shard", "node", "incarnation", "data_epoch", "seq", "length", "ahead")


@command("nodes", FLEET, "gcore nodes", "[dim]With the workers on them:[/dim]  gcore nodes --workers")
def nodes(
    workers: Annotated[bool, typer.Option("--workers", "-w", help="Also list engines and train ranks.")] = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """List the nodes: state, slots, the jobs that use them, and unhealthy slots."""
    reply = call_cluster(lambda client: client.list_nodes(), address, home)
    if output.is_for_programs:
        tree: dict[str, Any] = {"nodes": [node_tree(node) for node in reply.nodes]}
        if workers:
            tree["workers"] = [message_tree(one, *WORKER) for one in reply.workers]
        typer.echo(output.text(tree))
        return
    rows = [
        (
            printable_text(node.name),
            node_status(node),
            str(len(node.slots)),
            slot_usage(node),
            printable_text(node.address),
        )
        for node in reply.nodes
    ]
    print_table(("NODE", "STATE", "SLOTS", "USED BY", "ADDRESS"), rows)
    if workers:
        typer.echo()
        found = [printable_cells(w.instance, w.role, w.node, w.slot, w.job_uid, w.state) for w in reply.workers]
        print_table(("WORKER", "ROLE", "NODE", "SLOTS", "JOB", "STATE"), found)


@command(
    "drain",
    FLEET,
    "gcore drain gpu-07",
    "[dim]Do not wait until it is drained:[/dim]  gcore drain gpu-07 --no-wait",
    "[dim]Undo:[/dim]  gcore drain gpu-07 --undo",
)
def drain(
    node: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="Stop draining and use the node again.")] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait",
            help="Wait until no job uses the node (default), or return at once. Output as json or yaml always returns at once.",
        ),
    ] = True,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Drain a node: jobs leave it at their next commit, and the scheduler places no new work there until --undo.

    Prints that the node is draining and which jobs still use it, then waits and prints that it is drained. Ctrl-C ends
    the wait; the node continues to drain. It stays drained when its daemon restarts.
    """

    async def ask(client: JobsClient) -> pb.Node:
        found = await client.drain_node(node, undo=undo)
        if not output.is_for_programs:
            say(drain_sentence(found))
            if wait and not undo:
                await _until_drained(client, found)
        return found

    found = call_cluster(ask, address, home)
    if output.is_for_programs:
        typer.echo(output.text(node_tree(found)))


async def _until_drained(client: JobsClient, node: pb.Node) -> None:
    """Wait until no job uses the node, and print each change. Raises GcoreError if another user undoes the draining."""
    clock, said = SystemClock(), drain_sentence(node)
    while node.uses:
        await clock.sleep(LOOK_S)
        reply = await client.list_nodes()
        gone = type(node)(name=node.name, draining=True)  # a node whose daemon has ended is not listed
        node = next((one for one in reply.nodes if one.name == node.name), gone)
        if not node.draining:
            raise GcoreError(f"node {node.name!r} is no longer draining: another user undid it", fix="Drain it again")
        if (sentence := drain_sentence(node)) != said:
            say(sentence)
            said = sentence


def drain_sentence(node: pb.Node) -> str:
    """A sentence that says whether a node is available, draining (and for which jobs), or drained."""
    name, used = printable_text(node.name), slot_usage(node)
    if not node.draining:
        return f"Node {name} is available again."
    if used != "-":
        return f"Node {name} is draining; it is still used by {used}."
    return f"Node {name} is drained; " + ("no job uses it." if node.incarnation else "its daemon does not run.")


@command("shards", JOBS, *verb_examples("shards"))
def shards(job: JobName, home: Home = DEFAULT_HOME, address: Address = None, output: Format = Output.TABLE) -> None:
    """List the shards of a job's prompt stream: the node that generates for each, and its first prompt without an outcome."""
    found = call_cluster(lambda client: client.list_shards(job), address, home)
    if output.is_for_programs:
        typer.echo(output.text([message_tree(one, *SHARD) for one in found]))
        return
    rows = [
        printable_cells(one.shard, one.node or "-", one.data_epoch, f"{one.seq}/{one.length}", one.ahead)
        for one in found
    ]
    print_table(("SHARD", "NODE", "EPOCH", "POSITION", "DONE AHEAD"), rows)


@command(
    "usage",
    FLEET,
    "gcore usage",
    "gcore usage --by namespace --by job --since 2026-11-01 --until 2026-11-30",
    "[dim]Slot-hours by pool, for a script:[/dim]  gcore usage --by pool -o json",
)
def usage(
    by: Annotated[
        list[str] | None,
        typer.Option(help="Group by namespace, job, owner or pool. Repeatable. Default: namespace."),
    ] = None,
    since: Annotated[str, typer.Option(help="First day (UTC): 2026-11-01, or 30d for 30 days ago.")] = "",
    until: Annotated[str, typer.Option(help="Last day (included).")] = "",
    namespace: Namespace = "",
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Show the slot-hours (accelerator hours) that jobs held, and how many of them were busy. Includes deleted jobs."""
    from controllers.cli.commands.streams import parse_time

    now = SystemClock().wall()
    begin = parse_time(since, now) if since else 0.0
    end = parse_time(until, now) if until else 0.0
    if end and end < begin:
        raise UsageError(f"--until {until} is before --since {since}", fix="Swap the two")
    names = by or ["namespace"]
    found = call_cluster(
        lambda client: client.get_usage(by=names, since=begin, until=end, namespace=namespace), address, home
    )
    if output.is_for_programs:
        typer.echo(output.text([usage_tree(one) for one in found]))
        return
    rows = [
        (
            *(printable_text(one.by.get(name, "")) or "-" for name in names),
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
    print_table((*(name.upper() for name in names), "SLOT-HOURS", "BUSY", "UTILIZATION"), rows, numbers=3)


def node_status(node: pb.Node) -> str:
    """The state of a node as text: `ready`, `draining` or `drained`, then its unhealthy slots: `ready, 1 unhealthy:
    ...`."""
    state = "ready" if not node.draining else "draining" if node.uses else "drained"
    return f"{state}, {len(node.sick)} unhealthy: {printable_text('; '.join(node.sick), 200)}" if node.sick else state


def slot_usage(node: pb.Node) -> str:
    """How many slots of the node each job has, by uid: `08d8f27366e5 3, 1c77a2e0b951 1`; `-` if none has any."""
    counts: dict[str, int] = {}
    for use in node.uses:
        counts[use.job_uid] = counts.get(use.job_uid, 0) + 1
    return ", ".join(f"{printable_text(uid) or 'another job'} {count}" for uid, count in sorted(counts.items())) or "-"


def node_tree(node: pb.Node) -> dict[str, Any]:
    """A node as a JSON object. `uses`: the uid of the job that has each slot, by slot name."""
    tree = message_tree(node, "name", "incarnation", "address", "slots", "draining", "sick")
    return {**tree, "uses": {use.slot: use.job_uid for use in node.uses}}


def usage_tree(one: pb.Usage) -> dict[str, Any]:
    """One row of slot usage as a JSON object: the values of its grouping keys, held and busy slot-seconds."""
    return {**dict(sorted(one.by.items())), "slot_seconds": one.slot_seconds, "busy_seconds": one.busy_seconds}


def print_table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, numbers: int = 0) -> None:
    """Print a table. The last `numbers` columns are right-aligned."""
    display(rows_table(headings, rows, right=headings[len(headings) - numbers :]))


GIB = 1 << 30

Configuration = Annotated[
    Path | None, typer.Option("--config", help="A daemon's configuration file. Default: that of the local cluster.")
]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")]


@command(
    "gc",
    CLUSTER,
    "[dim]What would be deleted, what is kept, and why:[/dim]  gcore gc --dry-run",
    "[dim]On a node of a cluster:[/dim]  gcore gc --config /etc/gcore/node.yaml",
)
def gc(
    config: Configuration = None, home: Home = DEFAULT_HOME, dry_run: DryRun = False, output: Format = Output.TABLE
) -> None:
    """Delete files on this node that are no longer needed, by the rules in the `gc` section of its daemon's configuration.

    Files of unfinished jobs are never deleted.
    """
    cleared = asyncio.run(_cleared(_configuration(config, home), dry_run=dry_run))
    if output.is_for_programs:
        typer.echo(output.text([_tree(one) for one in cleared.verdicts]))
    else:
        _print(cleared.verdicts, dry_run=dry_run)
    if cleared.problems:
        raise GcoreError("; ".join(cleared.problems), fix="Delete them as their owner, or let the daemon delete them")


def _configuration(config: Path | None, home: Path) -> NodeConfig:
    from gcore.config.local_cluster import LocalClusterState
    from gcore.config.node import NodeConfig

    if config is not None:
        return NodeConfig.load(config)
    cluster = LocalClusterState.load(home)
    if cluster is None:
        raise Unreachable(
            "no local cluster is running",
            where=str(home),
            fix="Start one with `gcore up`, or give a daemon's configuration file with --config",
        )
    return NodeConfig.load(Path(cluster.controllers[0].config_file))


async def _cleared(config: NodeConfig, *, dry_run: bool) -> DeletionReport:
    from controllers.storage.garbage import DeletionReport, delete_garbage, find_garbage
    from controllers.storage.rules import decide_garbage
    from gcore.store.reference import connect_store

    clock = SystemClock()
    store = await connect_store(config.etcd, clock)
    try:
        now = clock.wall()
        verdicts = decide_garbage(await find_garbage(config, store, now), config.gc, now)
        return DeletionReport(verdicts) if dry_run else await delete_garbage(store, verdicts, clock)
    finally:
        await store.close()


def _tree(verdict: GarbageDecision) -> dict[str, object]:
    found = verdict.found
    return {
        "kind": found.kind,
        "path": str(found.path),
        "bytes": found.bytes,
        "used": found.used,
        "goes": verdict.goes,
        "why": verdict.why,
    }


def _print(verdicts: tuple[GarbageDecision, ...], *, dry_run: bool) -> None:
    going = [one for one in verdicts if one.goes]
    rows = [
        printable_cells(
            ("delete" if dry_run else "deleted") if one.goes else "keep",
            one.found.kind,
            f"{one.found.bytes / GIB:.3f}" if one.found.bytes or one.goes else "",
            one.found.path,
            one.why,
        )
        for one in verdicts
    ]
    if verdicts:
        display(rows_table(("", "kind", "GiB", "path", "why"), rows, right=("GiB",)))
    what = "would be deleted" if dry_run else "deleted"
    say(f"{len(going)} of {len(verdicts)} entries {what}, {sum(one.found.bytes for one in going) / GIB:.3f} GiB.")


@command(
    "up",
    CLUSTER,
    "[dim]Two daemons with one CPU core each:[/dim]  gcore up",
    "[dim]Four daemons on a machine with eight GPUs:[/dim]  gcore up --controllers 4 --slots cuda:8",
    "[dim]A second cluster:[/dim]  gcore up --home /tmp/other",
)
def up(
    context: typer.Context,
    home: Home = DEFAULT_HOME,
    controllers: Controllers = DEFAULT_CONTROLLERS,
    slots: Slots = DEFAULT_SLOTS,
    port: Annotated[
        int | None, typer.Option(help="API port of the first daemon; the others use the next ports.")
    ] = None,
    etcd_port: Annotated[int | None, typer.Option(help="Port of the local etcd.")] = None,
    sglang_python: SglangPython = None,
    vllm_python: VllmPython = None,
    output: Format = Output.TABLE,
) -> None:
    """Start a cluster on this machine: etcd and several daemons. Returns when all are ready.

    A running cluster is not changed. If it differs from the given options, the exit code is 2.
    """

    from controllers.cli import local
    from gcore.engines.environments import SGLANG, VLLM

    pythons = (SGLANG.find(sglang_python), VLLM.find(vllm_python))
    request = local.UpRequest(home, controllers, slots, port, etcd_port, *pythons)
    result = asyncio.run(
        local.start_cluster(request, clock=SystemClock(), say=lambda what: say(what, err=output.is_for_programs))
    )
    cluster = result.cluster
    if output.is_for_programs:
        typer.echo(output.text(cluster.model_dump(mode="json")))
    else:
        say(f"The cluster in {cluster.home} is {'running' if result.started else 'already running'}.")
        for one in cluster.controllers:
            missing = "  does not respond" if one.name in result.absent else ""
            say(
                f"  {one.name}  {one.address}  metrics {one.metrics_address}  {' '.join(one.slots)}{missing}",
                indent="  ",
            )
        say(f"  etcd    {cluster.etcd.endpoint}  {cluster.etcd.binary}")
        say(f"Page: {cluster.page}")
    if not result.started:
        given = {name for name in context.params if was_given(context, name)}
        check_cluster_matches(cluster, given, controllers, local.deal_slots(slots, 1)[0])


def check_cluster_matches(
    cluster: LocalClusterState, given: Collection[str], controllers: int, slots: tuple[str, ...]
) -> None:
    """Check that a running cluster matches the options that the user gave (`given`). Raises UsageError."""
    has = []
    if "controllers" in given and len(cluster.controllers) != controllers:
        has.append(f"{len(cluster.controllers)} controllers, not {controllers}")
    if "slots" in given and cluster.slots != slots:
        has.append(f"the slots {' '.join(cluster.slots)}")
    if has:
        raise UsageError(
            f"the running cluster has {', and '.join(has)}",
            where=cluster.home,
            fix="Stop it with `gcore down`, then start it with the new options",
        )


@command("down", CLUSTER, "gcore down", "gcore down --home /tmp/other")
def down(home: Home = DEFAULT_HOME) -> None:
    """Stop the local cluster: daemons, workers and etcd. Data, logs and runs are kept, and unfinished jobs can be continued."""
    from controllers.cli import local

    ended = local.stop_cluster(home, clock=SystemClock())
    killed = f" ({ended.killed} of them killed)" if ended.killed else ""
    say(
        f"Stopped {ended.ended} processes{killed}. Unfinished jobs continue when the cluster starts again."
        if ended.ended
        else f"No cluster was running in {local.real_path(home)}."
    )


@command(
    "workers",
    FLEET,
    "gcore workers",
    "[dim]Stop workers without a daemon, before a backup is restored:[/dim]  gcore workers --end",
)
def workers(
    end: Annotated[
        bool, typer.Option("--end", help="Stop workers whose daemon is not running, with their child processes.")
    ] = False,
    home: Annotated[Path | None, typer.Option(help="Only workers of the cluster or node in this folder.")] = None,
    output: Format = Output.TABLE,
) -> None:
    """List your engine and train-rank processes on this machine. Reads the process table; needs no daemon and no store."""
    from controllers.cli import local

    found = local.local_workers()
    if home is not None:
        found = tuple(one for one in found if one.home == local.real_path(home))
    left = sorted({one.home for one in found if not one.has_daemon})
    ended = local.end_leftover_workers(left, clock=SystemClock()) if end else None
    if output.is_for_programs:
        rows = [
            {"instance": one.instance, "pid": one.process.pid, "home": str(one.home), "left_over": not one.has_daemon}
            for one in found
        ]
        typer.echo(output.text({"workers": rows, "ended": 0 if ended is None else ended.ended}))
        return
    if ended is not None:
        killed = f" ({ended.killed} of them killed)" if ended.killed else ""
        say(f"Stopped {ended.ended} processes{killed}." if left else "All workers have a running daemon.")
        return
    cells = [
        printable_cells(one.instance, one.process.pid, str(one.home), "-" if one.has_daemon else "orphaned")
        for one in found
    ]
    print_table(("WORKER", "PID", "HOME", "STATE"), cells)


NO_LIMIT = "none"


@command(
    "quota",
    FLEET,
    "gcore quota",
    "[dim]At most 8 slots for all jobs of a namespace:[/dim]  gcore quota research 8",
    "[dim]Remove the limit:[/dim]  gcore quota research none",
)
def quota(
    namespace: Annotated[
        str, typer.Argument(help="Namespace whose quota is set. Without it, all quotas are shown.")
    ] = "",
    slots: Annotated[str, typer.Argument(help="Maximum slots of all its jobs together, or none for no limit.")] = "",
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Show the slot quotas and usage of namespaces, or set a quota. Jobs release slots above the quota after their current step."""
    if not namespace:
        found = call_cluster(lambda client: client.get_quotas(), address, home)
    else:
        most = parse_slots(namespace, slots)
        found = call_cluster(lambda client: client.set_quota(namespace, most), address, home)
    if output.is_for_programs:
        typer.echo(output.text([message_tree(one, "namespace", "slots", "used", "jobs") for one in found]))
        return
    rows = [
        printable_cells(one.namespace, one.slots if one.HasField("slots") else "-", one.used, one.jobs) for one in found
    ]
    print_table(("NAMESPACE", "QUOTA", "USED", "JOBS"), rows, numbers=3)


def parse_slots(namespace: str, text: str) -> int | None:
    """Parse the SLOTS argument of `gcore quota`; None: no limit. `namespace`: for the message. Raises UsageError."""
    if text == NO_LIMIT:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UsageError(
            f"{text!r} is not a number of slots" if text else f"the quota of namespace {namespace!r} is missing",
            where="SLOTS",
            fix=f"Give a number, or {NO_LIMIT}: gcore quota {namespace} 8",
        )
    return int(text)
