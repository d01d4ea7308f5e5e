"""What a shell completes: names of jobs and of nodes, as a controller of the cluster tells them.

A shell waits for it at each press of the key: so it asks for a moment only, and when nothing answers there is nothing to complete. It
never says a word of its own.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gcore.errors import GcoreError

if TYPE_CHECKING:
    from gcore.client import JobsClient

WITHIN_S = 1.0
MOST = 100


def complete_job(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Jobs whose name begins so, the newest first, each with its state."""
    if "/" in incomplete:
        return []

    async def ask(client: JobsClient) -> list[tuple[str, str]]:
        from gcore.client import job_state_name

        jobs = await client.list_jobs(name_prefix=incomplete, limit=MOST)
        return [(job.name, f"{job_state_name(job.state)}, {job.uid}") for job in reversed(jobs)]

    return list(dict(_ask(context, ask)).items())[::-1]


def complete_node(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Nodes whose name begins so, each with its slots."""

    async def ask(client: JobsClient) -> list[tuple[str, str]]:
        nodes = (await client.list_nodes()).nodes
        return [(node.name, " ".join(node.slots)) for node in nodes if node.name.startswith(incomplete)]

    return _ask(context, ask)


def _ask(
    context: typer.Context, what: Callable[[JobsClient], Awaitable[list[tuple[str, str]]]]
) -> list[tuple[str, str]]:
    import asyncio

    from controllers.cli.finding import find_cluster
    from gcore.client import JobsClient, Patience
    from gcore.clock import SystemClock

    address = context.params.get("address") or os.environ.get("GCORE_ADDRESS")
    home = Path(context.params.get("home") or os.environ.get("GCORE_HOME") or ".gcore")

    async def talk() -> list[tuple[str, str]]:
        patience, cluster = Patience(call_s=WITHIN_S, probe_s=WITHIN_S), find_cluster(address, home)
        reached = JobsClient(cluster.addresses, clock=SystemClock(), patience=patience, connector=cluster.connector)
        async with reached as client:
            return await asyncio.wait_for(what(client), WITHIN_S)

    try:
        return asyncio.run(talk())
    except (GcoreError, OSError, TimeoutError, ValueError):
        return []
