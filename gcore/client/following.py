"""Streams of a job that outlive the controller that sends them: its events, its steps' numbers, its logs.

A stream goes on from another controller after the last answer seen. Of events, sequence numbers make sure that none is handed out
twice, and the server sends all that are greater, so none is lost; of steps, their places on the chain do the same; of lines of logs,
where each ends in its worker's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from gcore.api.v1 import jobs_pb2 as pb
from gcore.client.calling import Calls, Silent
from gcore.client.patience import ENDED
from gcore.client.refused import FINAL, NO_ANSWER, explain
from gcore.errors import Unreachable
from gcore.events import JobEvent

MOST_REFUSALS = 3
"""Of each controller in a row, for a reason that may pass; then it is told."""


class _Told:
    """What of a job's logs was handed out."""

    def __init__(self) -> None:
        self._places: dict[str, pb.LogPlace] = {}
        """By worker: up to where."""
        self._lines, self._marks, self._ended = False, False, False

    @property
    def is_over(self) -> bool:
        """Whether an end of the stream is the end. A controller of an earlier version does not say."""
        return self._ended or not self._marks

    @property
    def can_go_on(self) -> bool:
        """Whether it is known what was handed out."""
        return self._marks or not self._lines

    def note(self, message: pb.LogLine) -> bool:
        """Whether it is a line."""
        if message.HasField("place"):
            self._places[message.place.instance] = message.place
        is_line = message.mark == pb.LOG_MARK_UNSPECIFIED
        self._lines, self._marks = self._lines or is_line, self._marks or not is_line
        self._ended = message.mark == pb.LOG_MARK_END
        return is_line

    def rest_of(self, request: pb.StreamLogsRequest) -> pb.StreamLogsRequest:
        """What is not handed out yet."""
        asked = pb.StreamLogsRequest()
        asked.CopyFrom(request)
        asked.places = True
        asked.after.extend(self._places.values())
        return asked


class Following(Calls):
    """Follows jobs."""

    async def follow(
        self, job: str, *, after: int = 0, newest: int = 0, follow: bool = True
    ) -> AsyncGenerator[JobEvent, None]:
        """Every event of `job` with a sequence number above `after`, in order, each once, until the job has ended.

        `newest`: of those that are known already only the last so many. Without `follow` only what is known already. Raises Unreachable when no controller answered for `Patience.lost_s`, UsageError when there is no such job.
        """
        last = after

        def begin(stub: Any) -> Any:
            some = newest if last == after else 0
            return stub.WatchJob(pb.WatchJobRequest(job=job, after=last, once=not follow, newest=some))

        async with aclosing(self._resumed("follow the job", job, begin, until_ended=follow)) as messages:
            async for message in messages:
                if message.sequence > last:
                    last = message.sequence
                    yield JobEvent.from_message(message)

    async def follow_metrics(
        self,
        job: str,
        *,
        after_step: int = 0,
        after_lineage: int | None = None,
        names: Sequence[str] = (),
        follow: bool = True,
    ) -> AsyncGenerator[pb.StepMetrics, None]:
        """The numbers of each step after `after_step`, each step once in each lineage; with `follow` until the job has ended."""
        place = None if after_lineage is None else (after_lineage, after_step)

        def begin(stub: Any) -> Any:
            request = pb.StreamMetricsRequest(job=job, after_step=after_step, follow=follow, names=list(names))
            if place is not None:
                request.after_lineage, request.after_step = place
            return stub.StreamMetrics(request)

        what = "read the job's numbers"
        async with aclosing(self._resumed(what, job, begin, until_ended=follow)) as messages:
            async for message in messages:
                at = (message.lineage, message.step)
                if place is None or at > place:
                    place = at
                    yield message

    async def stream_logs(self, request: pb.StreamLogsRequest) -> AsyncGenerator[pb.LogLine, None]:
        """What a job's workers wrote, each line once. Raises Unreachable when no controller answered for `Patience.lost_s`, and if the stream
        breaks behind a line of which its controller, of an earlier version, did not say where it ends."""
        told = _Told()

        def begin(stub: Any) -> Any:
            if not told.can_go_on:
                raise Unreachable(
                    "the controller that read the logs is gone",
                    where=", ".join(self.addresses),
                    fix="Ask again with --since, for what was written after the last line",
                )
            return stub.StreamLogs(told.rest_of(request))

        stream = self._resumed("read the logs", request.job, begin, until_ended=False, is_over=lambda: told.is_over)
        async with aclosing(stream) as messages:
            async for message in messages:
                if told.note(message):
                    yield message

    async def _resumed(
        self,
        what: str,
        job: str,
        begin: Callable[[Any], Any],
        *,
        until_ended: bool = True,
        is_over: Callable[[], bool] = lambda: True,
    ) -> AsyncGenerator[Any, None]:
        """The messages of a stream that is begun again, at another controller, whenever it breaks.

        `until_ended`: it is to last until the job has ended; else its first end in good order is the end, if it `is_over` then.
        """
        self._heard = self._clock.monotonic()
        refused = 0
        while True:
            address = self.addresses[self._current]
            call = begin(self._stub(address))
            brought = False
            try:
                async with aclosing(self._until_silent(call, address)) as messages:
                    async for message in messages:
                        brought, refused = True, 0
                        yield message
                # A controller that shuts down ends its streams in good order too. So only a watch that brings nothing,
                # of a job that has ended, is the end.
                if not until_ended and is_over():
                    return
                if not until_ended:
                    self._turn_from(address)
                elif not brought and (await self._state(job)) in ENDED:
                    return
            except grpc.aio.AioRpcError as error:
                refused += error.code() not in NO_ANSWER
                if error.code() in FINAL or refused >= MOST_REFUSALS * len(self.addresses):
                    raise explain(error, address, what) from error
                self._turn_from(address)
                # One that cannot follow, because the store is away, is there all the same: it is not what is given up on.
                await self._health(address)
            except (Silent, Unreachable):
                self._turn_from(address)
            finally:
                call.cancel()
            if self._clock.monotonic() - self._heard > self._patience.lost_s:
                raise self._nobody(f"no controller has answered for {self._patience.lost_s:.0f} s")
            if not brought:
                await self._clock.sleep(self._patience.retry_s)

    async def _state(self, job: str) -> int:
        found = await self._anywhere("look the job up", lambda s, t: s.GetJob(pb.GetJobRequest(job=job), timeout=t))
        return int(found.state)

    async def _until_silent(self, call: Any, address: str) -> AsyncGenerator[Any, None]:
        """The stream's messages; raises Silent when its controller has stopped answering.

        A machine that vanished, or a process that was stopped, breaks no connection: so a quiet stream is probed.
        """
        messages = aiter(call)
        while True:
            reading: asyncio.Future[Any] = asyncio.ensure_future(anext(messages, None))
            try:
                while not reading.done():
                    quiet = asyncio.ensure_future(self._clock.sleep(self._patience.quiet_s))
                    try:
                        await asyncio.wait({reading, quiet}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        quiet.cancel()
                    if not reading.done() and await self._health(address) is None:
                        raise Silent
                message = reading.result()
            finally:
                reading.cancel()
            self._heard = self._clock.monotonic()
            if message is None:
                return
            yield message
