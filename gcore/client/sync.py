"""The client for scripts and notebooks: `gcore.Client`, with the verbs of `gcore.AsyncClient`, which it has run in a thread of its own.

```python
cluster = gcore.Client()
job = cluster.submit("grpo.yaml")
for event in cluster.events(job):
    print(event.kind, event.message)
cluster.list(states=["RUNNING"])        # a notebook shows a table
```

So it can be used where an event loop runs already, as in a notebook. Interrupting a call (Ctrl-C, the stop button) ends the call, and
nothing that the cluster does. A stream that is not read to its end is closed with its iterator.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from gcore.api.v1 import jobs_pb2 as pb
from gcore.client.aio import AsyncClient, JobRef
from gcore.client.models import Job, Listing, LogLine, Node, Shard, StepMetrics, Usage
from gcore.client.patience import Patience
from gcore.events import JobEvent

T = TypeVar("T")


class Client:
    """Close it, or use it as a context manager; its thread ends with the process in any case."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        home: str | Path = ".gcore",
        patience: Patience | None = None,
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


async def _made(address: str | Sequence[str] | None, home: str | Path, patience: Patience | None) -> AsyncClient:
    return AsyncClient(address, home=home, patience=patience)
