"""The client for people who write asynchronous programs: `gcore.AsyncClient`.

```python
async with gcore.AsyncClient() as cluster:
    job = await cluster.submit("grpo.yaml", set=["flow.steps=40"])
    async for event in cluster.events(job):
        print(event.kind, event.message)
```

Without an address it talks to the cluster that the command line talks to: of GCORE_ADDRESS, of the named or current context, of the local
cluster in `home`. A job is named by a `Job`, its uid, `NAMESPACE/NAME` or `NAME`. Errors are gcore's (`gcore.errors`), and carry what the API
told programs in `refusal`. Streams go on from another controller when theirs dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, TypeVar

from gcore.api.v1 import jobs_pb2 as pb
from gcore.client.calls import WaitPolicy
from gcore.client.jobs import JobsClient
from gcore.client.models import (
    Job,
    Listing,
    LogLine,
    Node,
    Shard,
    StepMetrics,
    Usage,
    parse_job,
    parse_line,
    parse_node,
)
from gcore.errors import UsageError
from gcore.observability.events import JobEvent
from gcore.system.clock import Clock, SystemClock

JobRef = Job | str


HOUR_S = 3600.0


class AsyncClient:
    """Use it as an async context manager, or close it. It belongs to the event loop in which it is used."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        home: str | Path = ".gcore",
        patience: WaitPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`address`: host:port of a controller, or several. Raises UsageError, and Unreachable if no cluster is known."""
        from gcore.client.calls import find_cluster

        found = find_cluster(address, Path(home), os.environ)
        self.jobs = JobsClient(
            found.addresses, clock=clock or SystemClock(), patience=patience, connector=found.connector
        )
        """The API's own messages, for what is not here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.jobs.close()

    async def submit(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        set: Sequence[str] = (),
        new: bool = False,
        request_id: str | None = None,
    ) -> Job:
        """Hand a job in: a spec file, or a spec as a mapping. `set`: `section.field=value`, as the command line takes them, of a file.

        `request_id`: repeating it finds the same job. Raises SpecError, UsageError.
        """
        if isinstance(spec, Mapping):
            if set:
                raise UsageError("fields of a mapping are changed in the mapping", fix="Leave `set` out")
            spec_json = json.dumps(dict(spec))
        else:
            from gcore.config.load import dump_explicit, load_spec

            spec_json = dump_explicit(load_spec(Path(spec), set))
        mode = pb.START_MODE_NEW if new else pb.START_MODE_RESUME
        name = request_id or uuid.uuid4().hex
        return parse_job(await self.jobs.create_job(spec_json, request_id=name, mode=mode))

    async def get(self, job: JobRef) -> Job:
        """How a job stands now."""
        return parse_job(await self.jobs.get_job(_name(job)))

    async def list(
        self, *, states: Iterable[str] = (), namespace: str = "", name_prefix: str = "", limit: int | None = None
    ) -> Listing[Job]:
        """The jobs that you may see, the newest first."""
        numbers = []
        for state in states:
            if (word := f"JOB_STATE_{state.upper()}") not in pb.JobState.keys():  # noqa: SIM118 - no mapping
                raise UsageError(f"{state!r} is no state", fix="For example RUNNING, QUEUED or FAILED")
            numbers.append(pb.JobState.Value(word))
        found = await self.jobs.list_jobs(namespace=namespace, states=numbers, name_prefix=name_prefix, limit=limit)
        return Listing(parse_job(one) for one in found)

    async def cancel(self, job: JobRef, *, drain: bool = False) -> Job:
        """End a job, with `drain` at its next commit."""
        return parse_job(await self.jobs.cancel_job(_name(job), drain=drain))

    async def pause(self, job: JobRef) -> Job:
        """Have a job give its slots back at its next commit."""
        return parse_job(await self.jobs.pause_job(_name(job)))

    async def resume(self, job: JobRef) -> Job:
        """Have it go on as soon as there are slots."""
        return parse_job(await self.jobs.resume_job(_name(job)))

    async def update(
        self, job: JobRef, *, priority: int | None = None, slots_min: int | None = None, slots_max: int | None = None
    ) -> Job:
        """Change what may change while it runs. `slots_max` 0: as many as there are."""
        given = {"priority": priority, "slots_min": slots_min, "slots_max": slots_max}
        changes = {name: value for name, value in given.items() if value is not None}
        return parse_job(await self.jobs.update_job(_name(job), changes))

    async def delete(self, job: JobRef, *, files: bool = False) -> None:
        """Forget a job that has ended, and with `files` its run's folder."""
        await self.jobs.delete_job(_name(job), files=files)

    async def evaluate(self, job: JobRef) -> int:
        """Have the newest weights evaluated; of which step they will be."""
        return int((await self.jobs.run_eval(_name(job))).step)

    async def wait(self, job: JobRef) -> Job:
        """Until the job has ended; how it ended. Look at its `state`."""
        found = await self.get(job)
        async with aclosing(self.events(found)) as events:
            async for _ in events:
                pass
        return await self.get(found.uid)

    async def events(
        self, job: JobRef, *, after: int = 0, newest: int = 0, follow: bool = True
    ) -> AsyncGenerator[JobEvent, None]:
        """What happened to a job, each event once, until it has ended; without `follow` until now."""
        async with aclosing(self.jobs.follow(_name(job), after=after, newest=newest, follow=follow)) as events:
            async for event in events:
                yield event

    async def metrics(
        self, job: JobRef, *, after_step: int = 0, names: Sequence[str] = (), follow: bool = False
    ) -> AsyncGenerator[StepMetrics, None]:
        """The numbers of each step, in the order of the chain."""
        stream = self.jobs.follow_metrics(_name(job), after_step=after_step, names=names, follow=follow)
        async with aclosing(stream) as steps:
            async for one in steps:
                yield StepMetrics(one.lineage, one.step, dict(one.values))

    async def logs(
        self,
        job: JobRef,
        *,
        role: str = "",
        rank: int | None = None,
        node: str = "",
        since: float = 0.0,
        tail: int = 0,
        previous: bool = False,
        follow: bool = False,
    ) -> AsyncGenerator[LogLine, None]:
        """What a job's workers wrote."""
        request = pb.StreamLogsRequest(
            job=_name(job), role=role, rank=rank, node=node, since=since, tail=tail, previous=previous, follow=follow
        )
        async with aclosing(self.jobs.stream_logs(request)) as lines:
            async for line in lines:
                yield parse_line(line)

    async def shards(self, job: JobRef) -> Listing[Shard]:
        """Who has which shards, and how far each is."""
        found = await self.jobs.list_shards(_name(job))
        return Listing(Shard(one.shard, one.node, one.data_epoch, one.seq, one.length, one.ahead) for one in found)

    async def nodes(self) -> Listing[Node]:
        """The nodes that are there."""
        return Listing(parse_node(one) for one in (await self.jobs.list_nodes()).nodes)

    async def drain(self, node: str, *, undo: bool = False) -> Node:
        """Have every job leave a node at its next commit; or use it again."""
        return parse_node(await self.jobs.drain_node(node, undo=undo))

    async def usage(
        self, *, by: Sequence[str] = ("namespace",), since: float = 0.0, until: float = 0.0, namespace: str = ""
    ) -> Listing[Usage]:
        """Hours of slots by namespace, job, owner or pool."""
        found = await self.jobs.get_usage(by=by, since=since, until=until, namespace=namespace)
        return Listing(Usage(dict(one.by), one.slot_seconds / HOUR_S, one.busy_seconds / HOUR_S) for one in found)

    async def samples(
        self, job: JobRef, *, step: int | None = None, source: str = "", limit: int = 0
    ) -> Sequence[pb.SampleGroup]:
        """What a step was trained on, as far as it is kept."""
        return await self.jobs.get_samples(_name(job), step=step, source=source, limit=limit)

    async def audit(self, job: JobRef) -> pb.AuditReport:
        """Have a job's accounts recomputed."""
        return await self.jobs.audit_job(_name(job))

    async def checkpoints(self, job: JobRef) -> Sequence[pb.CheckpointInfo]:
        """A job's registered checkpoints, the newest first."""
        return (await self.jobs.list_checkpoints(_name(job))).checkpoints

    async def books(self, job: JobRef, *, step: int | None = None) -> Sequence[pb.BookOfNode]:
        """What a job's slots did in a step, node by node; without one, in the newest steps."""
        return await self.jobs.get_books(_name(job), step)

    async def placement(self, job: JobRef) -> pb.PlacementReply:
        """How a job's slots are shared out between its pools, and its newest moves."""
        return await self.jobs.get_placement(_name(job))

    async def pin(self, request: pb.PinPlacementRequest) -> pb.PlacementReply:
        """Fix something of a job's placement, or let it go."""
        return await self.jobs.pin_placement(request)

    async def quotas(self) -> Sequence[pb.Quota]:
        """The most slots that the jobs of each namespace may have together, and what they have."""
        return await self.jobs.get_quotas()

    async def set_quota(self, namespace: str, slots: int | None) -> Sequence[pb.Quota]:
        """Set a namespace's quota, or take it away (None)."""
        return await self.jobs.set_quota(namespace, slots)


def _name(job: JobRef) -> str:
    return job.uid if isinstance(job, Job) else job


# -------------------- sync
# The client for scripts and notebooks: `gcore.Client`, with the verbs of `gcore.AsyncClient`, which it has run in a thread of its own.
#
# ```python
# cluster = gcore.Client()
# job = cluster.submit("grpo.yaml")
# for event in cluster.events(job):
#     print(event.kind, event.message)
# cluster.list(states=["RUNNING"])        # a notebook shows a table
# ```
#
# So it can be used where an event loop runs already, as in a notebook. Interrupting a call (Ctrl-C, the stop button) ends the call, and
# nothing that the cluster does. A stream that is not read to its end is closed with its iterator.

T = TypeVar("T")


class Client:
    """Close it, or use it as a context manager; its thread ends with the process in any case."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        home: str | Path = ".gcore",
        patience: WaitPolicy | None = None,
    ) -> None:
        """As `AsyncClient`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gcore client", daemon=True)
        self._thread.start()
        try:
            self._inner = self._run(_made(address, home, patience))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and end the thread. A second time does nothing."""
        if not self._loop.is_closed():
            self._run(self._inner.close())
            self._stop()

    def submit(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        set: Sequence[str] = (),
        new: bool = False,
        request_id: str | None = None,
    ) -> Job:
        """See `AsyncClient.submit`."""
        return self._run(self._inner.submit(spec, set=set, new=new, request_id=request_id))

    def get(self, job: JobRef) -> Job:
        """See `AsyncClient.get`."""
        return self._run(self._inner.get(job))

    def list(
        self, *, states: Iterable[str] = (), namespace: str = "", name_prefix: str = "", limit: int | None = None
    ) -> Listing[Job]:
        """See `AsyncClient.list`."""
        return self._run(self._inner.list(states=states, namespace=namespace, name_prefix=name_prefix, limit=limit))

    def cancel(self, job: JobRef, *, drain: bool = False) -> Job:
        """See `AsyncClient.cancel`."""
        return self._run(self._inner.cancel(job, drain=drain))

    def pause(self, job: JobRef) -> Job:
        """See `AsyncClient.pause`."""
        return self._run(self._inner.pause(job))

    def resume(self, job: JobRef) -> Job:
        """See `AsyncClient.resume`."""
        return self._run(self._inner.resume(job))

    def update(
        self, job: JobRef, *, priority: int | None = None, slots_min: int | None = None, slots_max: int | None = None
    ) -> Job:
        """See `AsyncClient.update`."""
        return self._run(self._inner.update(job, priority=priority, slots_min=slots_min, slots_max=slots_max))

    def delete(self, job: JobRef, *, files: bool = False) -> None:
        """See `AsyncClient.delete`."""
        self._run(self._inner.delete(job, files=files))

    def evaluate(self, job: JobRef) -> int:
        """See `AsyncClient.evaluate`."""
        return self._run(self._inner.evaluate(job))

    def wait(self, job: JobRef) -> Job:
        """See `AsyncClient.wait`."""
        return self._run(self._inner.wait(job))

    def events(
        self, job: JobRef, *, after: int = 0, newest: int = 0, follow: bool = True
    ) -> Generator[JobEvent, None, None]:
        """See `AsyncClient.events`."""
        return self._stream(self._inner.events(job, after=after, newest=newest, follow=follow))

    def metrics(
        self, job: JobRef, *, after_step: int = 0, names: Sequence[str] = (), follow: bool = False
    ) -> Generator[StepMetrics, None, None]:
        """See `AsyncClient.metrics`."""
        return self._stream(self._inner.metrics(job, after_step=after_step, names=names, follow=follow))

    def logs(
        self,
        job: JobRef,
        *,
        role: str = "",
        rank: int | None = None,
        node: str = "",
        since: float = 0.0,
        tail: int = 0,
        previous: bool = False,
        follow: bool = False,
    ) -> Generator[LogLine, None, None]:
        """See `AsyncClient.logs`."""
        return self._stream(
            self._inner.logs(
                job, role=role, rank=rank, node=node, since=since, tail=tail, previous=previous, follow=follow
            )
        )

    def shards(self, job: JobRef) -> Listing[Shard]:
        """See `AsyncClient.shards`."""
        return self._run(self._inner.shards(job))

    def nodes(self) -> Listing[Node]:
        """See `AsyncClient.nodes`."""
        return self._run(self._inner.nodes())

    def drain(self, node: str, *, undo: bool = False) -> Node:
        """See `AsyncClient.drain`."""
        return self._run(self._inner.drain(node, undo=undo))

    def usage(
        self, *, by: Sequence[str] = ("namespace",), since: float = 0.0, until: float = 0.0, namespace: str = ""
    ) -> Listing[Usage]:
        """See `AsyncClient.usage`."""
        return self._run(self._inner.usage(by=by, since=since, until=until, namespace=namespace))

    def samples(
        self, job: JobRef, *, step: int | None = None, source: str = "", limit: int = 0
    ) -> Sequence[pb.SampleGroup]:
        """See `AsyncClient.samples`."""
        return self._run(self._inner.samples(job, step=step, source=source, limit=limit))

    def audit(self, job: JobRef) -> pb.AuditReport:
        """See `AsyncClient.audit`."""
        return self._run(self._inner.audit(job))

    def checkpoints(self, job: JobRef) -> Sequence[pb.CheckpointInfo]:
        """See `AsyncClient.checkpoints`."""
        return self._run(self._inner.checkpoints(job))

    def books(self, job: JobRef, *, step: int | None = None) -> Sequence[pb.BookOfNode]:
        """See `AsyncClient.books`."""
        return self._run(self._inner.books(job, step=step))

    def placement(self, job: JobRef) -> pb.PlacementReply:
        """See `AsyncClient.placement`."""
        return self._run(self._inner.placement(job))

    def pin(self, request: pb.PinPlacementRequest) -> pb.PlacementReply:
        """See `AsyncClient.pin`."""
        return self._run(self._inner.pin(request))

    def quotas(self) -> Sequence[pb.Quota]:
        """See `AsyncClient.quotas`."""
        return self._run(self._inner.quotas())

    def set_quota(self, namespace: str, slots: int | None) -> Sequence[pb.Quota]:
        """See `AsyncClient.set_quota`."""
        return self._run(self._inner.set_quota(namespace, slots))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stream(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        reading: asyncio.Task[Any] | None = None

        async def step() -> tuple[bool, T | None]:
            nonlocal reading
            reading = asyncio.current_task()
            try:
                return True, await anext(source)
            except StopAsyncIteration:
                return False, None

        async def close() -> None:
            # A read that was interrupted is mostly cancelled by now, and may not be over yet.
            if reading is not None and not reading.done():
                if not reading.cancelling():
                    reading.cancel()
                await asyncio.wait({reading})
            await source.aclose()

        try:
            while True:
                there, one = self._run(step())
                if not there:
                    return
                yield one  # type: ignore[misc]
        finally:
            if not self._loop.is_closed():
                self._run(close())

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _made(address: str | Sequence[str] | None, home: str | Path, patience: WaitPolicy | None) -> AsyncClient:
    return AsyncClient(address, home=home, patience=patience)
