"""Following a job: its events to a screen and to the run's folder, until it has ended, and there its summary.

Beside the events the API is asked now and then what the job waits for, so that a view that stands still says why. That
asking may fail, and the view then says that and why; the events may not (`JobsClient.follow` goes from controller to
controller). Events that the run's folder does not take wait, and are written when it takes them: a run is not ended by a file
that is for people.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from pathlib import Path

import typer

from controllers.cli.answers import snapshot
from controllers.cli.record import EventFile
from controllers.cli.screens import Screen
from controllers.cli.summary import AuditVerdict, Summary, summarize, write
from controllers.cli.view_points import JobSnapshot
from gcore.client import JobsClient
from gcore.clock import Clock
from gcore.errors import GcoreError

ASK_S = 1.0


async def follow(
    client: JobsClient, job: JobSnapshot, screen: Screen, clock: Clock, *, run_dir: Path | None
) -> JobSnapshot:
    """Show `job` until it has ended, and return how it then stands.

    `run_dir`: where `events.jsonl` is written; None: nowhere. Raises GcoreError.
    """
    screen.observe(job)
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(EventFile(run_dir)) if run_dir is not None else None
        stack.enter_context(screen.open())
        asking = asyncio.create_task(_ask(client, job.uid, screen, clock))
        try:
            async with aclosing(client.follow(job.uid)) as events:
                async for event in events:
                    if record is not None:
                        screen.trouble("the record", record.offer(event), clock.wall())
                    screen.show(event)
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        ended = snapshot(await client.get_job(job.uid))
        screen.observe(ended)
    return ended


async def record(client: JobsClient, job: JobSnapshot, screen: Screen, clock: Clock, *, begun: float) -> Summary:
    """Show `job` until it has ended, and sum it up; its events and the summary are written to its folder, where that is on this machine.

    `begun`: when the command began, by the monotonic clock. Raises GcoreError.
    """
    run_dir = _visible_here(Path(job.run_dir))
    ended = await follow(client, job, screen, clock, run_dir=run_dir)
    summary = summarize(screen.state, ended, await audit(client, ended.uid), clock.monotonic() - begun)
    if run_dir is not None:
        write(summary, run_dir)
    return summary


def _visible_here(run_dir: Path) -> Path | None:
    """The run's folder, if this machine sees the storage that it is on; a cluster elsewhere may have its own."""
    if run_dir.parent.is_dir():
        return run_dir
    typer.echo(f"{run_dir} is not on this machine, so no events and no summary are written.", err=True)
    return None


async def audit(client: JobsClient, job: str) -> AuditVerdict:
    """The audit's verdict on a job that has ended; that it could not be made is a violation too."""
    try:
        report = await client.audit_job(job)
    except GcoreError as error:
        return AuditVerdict(violations=(f"the audit could not be made: {error}",))
    violations = tuple(report.violations) or (() if report.clean else ("the audit is not clean",))
    return AuditVerdict(violations, tuple(sorted(report.groups_by_node.items())))


async def _ask(client: JobsClient, uid: str, screen: Screen, clock: Clock) -> None:
    while True:
        await clock.sleep(ASK_S)
        try:
            screen.observe(snapshot(await client.get_job(uid)))
        except GcoreError as error:
            screen.trouble("the cluster", str(error), clock.wall())
        else:
            screen.trouble("the cluster", "", clock.wall())
