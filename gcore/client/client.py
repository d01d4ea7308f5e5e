"""Python clients of a cluster: `gcore.AsyncClient` for asynchronous programs, `gcore.Client` for scripts and notebooks.

```python
async with gcore.AsyncClient() as cluster:
    job = await cluster.submit("grpo.yaml", set=["flow.steps=40"])
    async for event in cluster.events(job):
        print(event.kind, event.message)

cluster = gcore.Client()
job = cluster.submit("grpo.yaml")
for event in cluster.events(job):
    print(event.kind, event.message)
cluster.list(states=["RUNNING"])        # displayed as a table in a notebook
```

Without an address, a client uses the same cluster as the command line: GCORE_ADDRESS, the named or current context, or the local cluster in
`home`. Methods identify a job by a `Job`, its uid, `NAMESPACE/NAME` or `NAME`. They raise errors of `gcore.errors`, whose `refusal` holds the
API's structured reason. When a controller dies, a stream continues at another one.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from gcore.api.v1 import jobs_pb2 as pb
from gcore.client.calls import WaitPolicy
from gcore.client.contexts import ADDRESS, find_cluster, find_local_cluster
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
from gcore.config.local_cluster import local_home
from gcore.errors import UsageError
from gcore.observability.events import JobEvent
from gcore.system.clock import Clock, SystemClock

JobRef = Job | str
HOUR_S = 3600.0
T = TypeVar("T")
P = ParamSpec("P")


class AsyncClient:
    """Asynchronous client. Use it as an async context manager or close it, and use it in one event loop only."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        home: str | Path | None = None,
        patience: WaitPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`address`: host:port of one or several controllers; None: GCORE_ADDRESS. `home`: folder of a local cluster,
        which is used if no `address` is given; None: a context, or the local cluster in GCORE_HOME, else in `.gcore`.

        Raises UsageError; raises Unreachable if no cluster is known."""
        if address is None and home is not None:
            found = find_local_cluster(local_home(home))
        else:
            found = find_cluster(address or os.environ.get(ADDRESS) or None, local_home(home))
        self.jobs = JobsClient(
            found.addresses,
            clock=clock or SystemClock(),
            patience=patience,
            connector=found.connector,
            owner_key=found.owner_key,
        )
        """The low-level client, for API calls that this class does not have."""

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
        """Submit a job from a spec file or a mapping. `set`: overrides `section.field=value` of a file, as on the
        command line.

        `new`: always create a new job; an unfinished one of that name is cancelled. `request_id`: a repeated request
        with the same ID returns the same job. Raises SpecError, UsageError.
        """
        if isinstance(spec, Mapping):
            if set:
                raise UsageError(
                    "`set` applies to a spec file, but the spec is a mapping",
                    fix="Change the mapping and leave `set` out",
                )
            spec_json = json.dumps(dict(spec))
        else:
            from gcore.config.load import dump_explicit, load_spec

            spec_json = dump_explicit(load_spec(Path(spec), set))
        mode = pb.START_MODE_NEW if new else pb.START_MODE_RESUME
        name = request_id or uuid.uuid4().hex
        return parse_job(await self.jobs.create_job(spec_json, request_id=name, mode=mode))

    async def get(self, job: JobRef) -> Job:
        """Return a job as it is now."""
        return parse_job(await self.jobs.get_job(_name(job)))

    async def list(
        self, *, states: Iterable[str] = (), namespace: str = "", name_prefix: str = "", limit: int | None = None
    ) -> Listing[Job]:
        """Return the jobs that the caller may see, newest first. `states`: only these, such as "RUNNING"; `limit`: at
        most this many."""
        numbers = []
        for state in states:
            if (word := f"JOB_STATE_{state.upper()}") not in pb.JobState.keys():  # noqa: SIM118 - no mapping
                raise UsageError(f"{state!r} is not a job state", fix="Use, for example, RUNNING, QUEUED or FAILED")
            numbers.append(pb.JobState.Value(word))
        found = await self.jobs.list_jobs(namespace=namespace, states=numbers, name_prefix=name_prefix, limit=limit)
        return Listing(parse_job(one) for one in found)

    async def cancel(self, job: JobRef, *, drain: bool = False) -> Job:
        """Cancel a job: immediately, or with `drain` at its next commit, with a checkpoint."""
        return parse_job(await self.jobs.cancel_job(_name(job), drain=drain))

    async def pause(self, job: JobRef) -> Job:
        """Pause a job. It writes a checkpoint and releases its slots at its next commit; `resume` continues it."""
        return parse_job(await self.jobs.pause_job(_name(job)))

    async def resume(self, job: JobRef) -> Job:
        """Resume a paused job. It continues as soon as slots are available."""
        return parse_job(await self.jobs.resume_job(_name(job)))

    async def update(
        self, job: JobRef, *, priority: int | None = None, slots_min: int | None = None, slots_max: int | None = None
    ) -> Job:
        """Change priority and slot limits of a running job; None: unchanged. `slots_max` 0: no limit."""
        given = {"priority": priority, "slots_min": slots_min, "slots_max": slots_max}
        changes = {name: value for name, value in given.items() if value is not None}
        return parse_job(await self.jobs.update_job(_name(job), changes))

    async def delete(self, job: JobRef, *, files: bool = False) -> None:
        """Delete the records of an ended job, and with `files` also its run folder with all checkpoints."""
        await self.jobs.delete_job(_name(job), files=files)

    async def evaluate(self, job: JobRef) -> int:
        """Request an evaluation of the newest weights on the held-out prompts. Returns the step of these weights, not
        the result."""
        return int((await self.jobs.run_eval(_name(job))).step)

    async def wait(self, job: JobRef) -> Job:
        """Wait until the job has ended and return it. Raises no error if it failed: check its `state`."""
        found = await self.get(job)
        async with aclosing(self.events(found)) as events:
            async for _ in events:
                pass
        return await self.get(found.uid)

    async def events(
        self, job: JobRef, *, after: int = 0, newest: int = 0, follow: bool = True
    ) -> AsyncGenerator[JobEvent, None]:
        """Yield each event of a job once, in order, until the job has ended; without `follow` only past events.

        `after`: only events with a higher sequence number. `newest`: only this many of the past events; 0: all.
        """
        async with aclosing(self.jobs.follow(_name(job), after=after, newest=newest, follow=follow)) as events:
            async for event in events:
                yield event

    async def metrics(
        self, job: JobRef, *, after_step: int = 0, names: Sequence[str] = (), follow: bool = False
    ) -> AsyncGenerator[StepMetrics, None]:
        """Yield the metrics of each step after `after_step`, in the order of commits; with `follow` until the job has
        ended.

        After a rollback, steps appear again with a higher lineage. `names`: only these metrics; empty: all.
        """
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
        """Yield lines from the logs of a job's workers (engines and train ranks).

        `role`, `rank`, `node`: only of these workers. `since`: only newer lines, in seconds since the epoch. `tail`:
        only the last lines of each worker; 0: all. `previous`: workers that have exited.
        """
        request = pb.StreamLogsRequest(
            job=_name(job), role=role, rank=rank, node=node, since=since, tail=tail, previous=previous, follow=follow
        )
        async with aclosing(self.jobs.stream_logs(request)) as lines:
            async for line in lines:
                yield parse_line(line)

    async def shards(self, job: JobRef) -> Listing[Shard]:
        """Return the shards of the job's prompt stream: which node generates for each, and its first prompt without an
        outcome."""
        found = await self.jobs.list_shards(_name(job))
        return Listing(Shard(one.shard, one.node, one.data_epoch, one.seq, one.length, one.ahead) for one in found)

    async def nodes(self) -> Listing[Node]:
        """Return the nodes of the cluster."""
        return Listing(parse_node(one) for one in (await self.jobs.list_nodes()).nodes)

    async def drain(self, node: str, *, undo: bool = False) -> Node:
        """Drain a node: every job leaves it at its next commit, and no new work starts there. `undo`: use the node
        again."""
        return parse_node(await self.jobs.drain_node(node, undo=undo))

    async def usage(
        self, *, by: Sequence[str] = ("namespace",), since: float = 0.0, until: float = 0.0, namespace: str = ""
    ) -> Listing[Usage]:
        """Return the slot-hours that jobs held and used, grouped by the keys `by`: namespace, job, owner or pool.

        `since`, `until`: seconds since the epoch; 0: no limit.
        """
        found = await self.jobs.get_usage(by=by, since=since, until=until, namespace=namespace)
        return Listing(Usage(dict(one.by), one.slot_seconds / HOUR_S, one.busy_seconds / HOUR_S) for one in found)

    async def samples(
        self, job: JobRef, *, step: int | None = None, source: str = "", limit: int = 0
    ) -> Sequence[pb.SampleGroup]:
        """Return the stored samples (prompts with responses and rewards) of `step`; None: of the newest step that has
        some. `limit`: prompts; 0: all."""
        return await self.jobs.get_samples(_name(job), step=step, source=source, limit=limit)

    async def audit(self, job: JobRef) -> pb.AuditReport:
        """Audit a job: compare its log with the receipts of the train ranks (what each rank trained)."""
        return await self.jobs.audit_job(_name(job))

    async def checkpoints(self, job: JobRef) -> Sequence[pb.CheckpointInfo]:
        """Return a job's registered checkpoints, newest first."""
        return (await self.jobs.list_checkpoints(_name(job))).checkpoints

    async def books(self, job: JobRef, *, step: int | None = None) -> Sequence[pb.BookOfNode]:
        """Return the slot accounting of a step (what each slot spent its time on), per node; without `step`, of the
        newest steps."""
        return await self.jobs.get_books(_name(job), step)

    async def placement(self, job: JobRef) -> pb.PlacementReply:
        """Return a job's placement (which pool each slot serves: rollout, reward or train), and its newest changes."""
        return await self.jobs.get_placement(_name(job))

    async def pin(self, request: pb.PinPlacementRequest) -> pb.PlacementReply:
        """Pin a part of a job's placement, so that the policy does not change it, or release the pin."""
        return await self.jobs.pin_placement(request)

    async def quotas(self) -> Sequence[pb.Quota]:
        """Return the slot quota of each namespace and its current use."""
        return await self.jobs.get_quotas()

    async def set_quota(self, namespace: str, slots: int | None) -> Sequence[pb.Quota]:
        """Set the maximum number of slots for all jobs of a namespace together; None removes it. Returns all quotas."""
        return await self.jobs.set_quota(namespace, slots)


def _name(job: JobRef) -> str:
    return job.uid if isinstance(job, Job) else job


def blocking(
    verb: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Create the method of `Client` that runs an `AsyncClient` method and waits for its result."""

    @functools.wraps(verb)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
        work: Coroutine[Any, Any, T] = getattr(client._inner, verb.__name__)(*args, **options)
        return client._run(work)

    return call


def streaming(
    verb: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    """Create the method of `Client` that reads an `AsyncClient` stream as a blocking iterator. Closing the iterator
    early closes the stream."""

    @functools.wraps(verb)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> Generator[T, None, None]:
        source: AsyncGenerator[T, None] = getattr(client._inner, verb.__name__)(*args, **options)
        return client._stream(source)

    return call


class Client:
    """Blocking client with the methods of `AsyncClient`. It runs them in its own thread, so it also works inside a running event loop, as in a
    notebook.

    Interrupting a call (Ctrl-C, the stop button) ends the call but changes nothing in the cluster. Close the client, or use it as a context
    manager; its thread ends with the process in any case.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        home: str | Path | None = None,
        patience: WaitPolicy | None = None,
    ) -> None:
        """Arguments as in `AsyncClient`."""
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
        """Close the connections and end the thread. A second call does nothing."""
        if not self._loop.is_closed():
            self._run(self._inner.close())
            self._stop()

    submit = blocking(AsyncClient.submit)
    get = blocking(AsyncClient.get)
    list = blocking(AsyncClient.list)
    cancel = blocking(AsyncClient.cancel)
    pause = blocking(AsyncClient.pause)
    resume = blocking(AsyncClient.resume)
    update = blocking(AsyncClient.update)
    delete = blocking(AsyncClient.delete)
    evaluate = blocking(AsyncClient.evaluate)
    wait = blocking(AsyncClient.wait)
    events = streaming(AsyncClient.events)
    metrics = streaming(AsyncClient.metrics)
    logs = streaming(AsyncClient.logs)
    shards = blocking(AsyncClient.shards)
    nodes = blocking(AsyncClient.nodes)
    drain = blocking(AsyncClient.drain)
    usage = blocking(AsyncClient.usage)
    samples = blocking(AsyncClient.samples)
    audit = blocking(AsyncClient.audit)
    checkpoints = blocking(AsyncClient.checkpoints)
    books = blocking(AsyncClient.books)
    placement = blocking(AsyncClient.placement)
    pin = blocking(AsyncClient.pin)
    quotas = blocking(AsyncClient.quotas)
    set_quota = blocking(AsyncClient.set_quota)

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
            # An interrupted read is usually cancelled by now, but may not have finished.
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


async def _made(
    address: str | Sequence[str] | None, home: str | Path | None, patience: WaitPolicy | None
) -> AsyncClient:
    return AsyncClient(address, home=home, patience=patience)
