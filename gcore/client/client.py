"""The clients for people: `gcore.AsyncClient` for asynchronous programs, `gcore.Client` for scripts and notebooks.

```python
async with gcore.AsyncClient() as cluster:
    job = await cluster.submit("grpo.yaml", set=["flow.steps=40"])
    async for event in cluster.events(job):
        print(event.kind, event.message)

cluster = gcore.Client()
job = cluster.submit("grpo.yaml")
for event in cluster.events(job):
    print(event.kind, event.message)
cluster.list(states=["RUNNING"])        # a notebook shows a table
```

Without an address a client talks to the cluster that the command line talks to: of GCORE_ADDRESS, of the named or current context, of the local
cluster in `home`. A job is named by a `Job`, its uid, `NAMESPACE/NAME` or `NAME`. Errors are gcore's (`gcore.errors`); their
`refusal` has what the API says to programs. A stream continues at another controller when its own dies.
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
from gcore.client.calls import WaitPolicy, find_cluster
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
T = TypeVar("T")
P = ParamSpec("P")


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
        found = find_cluster(address, Path(home), os.environ)
        self.jobs = JobsClient(
            found.addresses,
            clock=clock or SystemClock(),
            patience=patience,
            connector=found.connector,
            owner_key=found.owner_key,
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


def blocking(
    verb: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """The same verb of `Client`: it returns when the answer is there."""

    @functools.wraps(verb)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
        work: Coroutine[Any, Any, T] = getattr(client._inner, verb.__name__)(*args, **options)
        return client._run(work)

    return call


def streaming(
    verb: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    """The same stream of `Client`, as an iterator that blocks. One that is not read to its end is closed with its iterator."""

    @functools.wraps(verb)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> Generator[T, None, None]:
        source: AsyncGenerator[T, None] = getattr(client._inner, verb.__name__)(*args, **options)
        return client._stream(source)

    return call


class Client:
    """The verbs of `AsyncClient`, run by a thread of its own, so that it also works where an event loop runs already, as in a notebook.

    Interrupting a call (Ctrl-C, the stop button) ends the call and nothing that the cluster does. Close it, or use it as a context manager;
    its thread ends with the process in any case.
    """

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
