"""What every subject of the Jobs service stands on: the records, who calls, and how a job that a request names is found.

A job of a namespace that the caller may not see is not there for it: whoever asks learns no more than of a name that was never
given. Answers nothing itself.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from controllers.service.access import caller, may_see
from controllers.service.described import described, with_news
from controllers.service.queued import stand
from controllers.service.records import StoredJobs
from controllers.service.refusals import JobNotFound, bad_field
from controllers.service.room import StreamRoom
from controllers.waiting import waiting_for
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.clock import Clock
from gcore.config.api import ApiConfig
from gcore.ledger.mirror import JobMirror

if TYPE_CHECKING:  # imported when there is a job: see controllers.wire
    from controllers.job import JobRunner
    from controllers.service.submission import Submissions

LONGEST_NAME = 256
"""Characters of a job's name, uid or namespace in a request."""


class JobsDesk(jobs_pb2_grpc.JobsServicer):
    """The parts that the subjects share."""

    def __init__(
        self,
        jobs: StoredJobs,
        submissions: Callable[[], Awaitable[Submissions]],
        runner: Callable[[str], JobRunner | None],
        clock: Clock,
        trouble: Callable[[], str] = str,
        room: StreamRoom | None = None,
    ) -> None:
        """`trouble`: why the store cannot be brought back, if that is known here. `room`: for how many streams; None: as usual."""
        self.trouble = trouble
        self._jobs = jobs
        self._submissions = submissions
        self._runner = runner
        self._clock = clock
        self._room = room or StreamRoom(ApiConfig().streams)

    async def _find(self, name: str) -> str:
        """The uid of the job that a request names. Raises JobNotFound, BadFields, StoreUnavailable."""
        if not name:
            raise bad_field("job", "no job is named", "Name it by its uid, NAMESPACE/NAME or NAME")
        if len(name) > LONGEST_NAME:
            raise bad_field("job", f"{name[:40]!r}... is longer than a name can be", "`gcore list` shows the jobs")
        uid = await self._jobs.find(name, caller().home)
        if uid is None or not may_see(await self._jobs.namespace(uid)):
            raise JobNotFound(f"there is no job {name!r}", fix="`gcore list` shows the jobs there are")
        return uid

    async def _mirror(self, name: str) -> JobMirror:
        """The job that a request names, as it stands."""
        return await self._jobs.mirror(await self._find(name))

    async def _describe(self, uid: str, *, quick: bool = False) -> pb.Job:
        """How a job stands. `quick`: without its place among those that wait, which may have to be waited for itself."""
        mirror = await self._jobs.mirror(uid)
        message = with_news(described(mirror), mirror)
        await stand(self._jobs, [message], await self._jobs.shares(), quick=quick)
        runner = self._runner(uid)
        if runner is not None and runner.is_working:
            now, wall = self._clock.monotonic(), self._clock.wall()
            for wait in waiting_for(runner.look()):
                since = wall - (now - runner.waits.since.get(wait.key, now))
                message.waiting.add(who=runner.node, what=wait.what, since=since)
        return message

    def _looking(self, uid: str) -> Callable[[], Awaitable[JobMirror]]:
        return functools.partial(self._jobs.mirror, uid)
