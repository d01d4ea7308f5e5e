"""Creating a job from the command line: whoever waits long is told what for.

Before a job is created, a controller reads and checks its data and the small files of its model. That is done at once if it
was done before, and takes minutes for large data that are new.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client import JobsClient

QUIET_S = 3.0
"""So long nothing is said."""
NOTICE = "The controller reads and checks the data before it creates the job; the first time, large data take minutes."


async def create_job(client: JobsClient, spec_json: str, *, request_id: str, mode: pb.StartMode) -> pb.Job:
    """`JobsClient.create_job`, with a sentence on standard error when it takes long. Raises GcoreError."""
    creating = asyncio.ensure_future(client.create_job(spec_json, request_id=request_id, mode=mode))
    try:
        done, _ = await asyncio.wait({creating}, timeout=QUIET_S)
        if not done:
            typer.echo(NOTICE, err=True)
        return await creating
    finally:
        creating.cancel()
