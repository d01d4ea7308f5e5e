"""Which jobs there are, the newest first, in pages. Reads a few keys of the jobs on a page, and nothing of all others.

Every job has one request key, written with it and never again, so the revisions at which request keys came to be are the order in
which jobs were created. A page token says behind which of them the next page begins, and is bound to the request that it was given
for: another filter, or another caller's namespaces, is refused. A page may have fewer jobs than were asked for, even none, where
many had to be passed over, or where their specs are large; only an empty token says that there are no more.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from dataclasses import dataclass

from controllers.service.access import caller
from controllers.service.described import described
from controllers.service.namespaces import check_namespace
from controllers.service.queued import stand
from controllers.service.records import StoredJobs, Unreadable
from controllers.service.refusals import bad_field
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.mirror import JobMirror
from gcore.schema import UnreadableRecord

DEFAULT_SIZE, MOST_ON_A_PAGE = 100, 1000
MOST_LOOKED_AT = 2000
"""Jobs that one call looks at: behind a filter that few pass there may be very many."""
MOST_BYTES = 16 << 20
"""Of an answer: a page ends with the job that takes it there. Specs may be long, and an answer that is too large reaches nobody."""
AT_ONCE = 32
"""Jobs that are read at the same time."""
LONGEST_FILTER = 256
_AGAIN = "Ask for the first page again, without a token"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of all jobs is asked for. `namespaces` None: all."""

    size: int
    before: int | None
    namespace: str
    states: frozenset[int]
    name_prefix: str
    namespaces: frozenset[str] | None

    def has(self, job: pb.Job) -> bool:
        """Whether a job is among them."""
        namespace = job.namespace  # empty: its record cannot be read, and only who may see all is told so
        return (
            (self.namespaces is None or namespace in self.namespaces)
            and (not self.namespace or namespace == self.namespace)
            and (not self.states or job.state in self.states)
            and job.name.startswith(self.name_prefix)
        )

    @property
    def binding(self) -> str:
        """Names the list that a token belongs to."""
        seen = None if self.namespaces is None else sorted(self.namespaces)
        said = json.dumps(["ListJobs", self.namespace, sorted(self.states), self.name_prefix, seen])
        return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:16]

    def token(self, before: int) -> str:
        """What the next page is asked for with."""
        return base64.urlsafe_b64encode(json.dumps([before, self.binding]).encode()).decode()


def wanted(request: pb.ListJobsRequest, namespaces: frozenset[str] | None) -> Wanted:
    """What a request asks for. Raises BadFields."""
    if request.page_size < 0:
        raise bad_field("page_size", f"{request.page_size} is negative", f"Ask for 1 to {MOST_ON_A_PAGE}, or 0 for 100")
    for field in ("namespace", "name_prefix"):
        if len(getattr(request, field)) > LONGEST_FILTER:
            raise bad_field(field, f"is longer than {LONGEST_FILTER} characters")
    unknown = [state for state in request.states if state not in pb.JobState.values() or not state]
    if unknown:
        known = ", ".join(name for name, number in pb.JobState.items() if number)
        raise bad_field("states", f"{unknown[0]} is no state", f"There are {known}")
    size = min(request.page_size or DEFAULT_SIZE, MOST_ON_A_PAGE)
    first = Wanted(size, None, request.namespace, frozenset(request.states), request.name_prefix, namespaces)
    if not request.page_token:
        return first
    before = _begin(request.page_token, first.binding)
    return Wanted(size, before, first.namespace, first.states, first.name_prefix, namespaces)


def _begin(token: str, binding: str) -> int:
    """Raises BadFields for a token that is none, or another list's."""
    wrong = bad_field("page_token", "is none of this API's", _AGAIN)
    try:
        tree = json.loads(base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True))
    except (ValueError, RecursionError) as error:
        raise wrong from error
    match tree:
        case [int(before), str(bound)] if 0 < before < 2**63 and not isinstance(before, bool):
            if bound != binding:
                raise bad_field("page_token", "belongs to another list, with other filters or another caller's", _AGAIN)
            return before
    raise wrong


async def list_jobs(jobs: StoredJobs, request: pb.ListJobsRequest) -> pb.ListJobsReply:
    """A page. Raises BadFields, NamespaceNotFound, StoreUnavailable."""
    ask, shares = wanted(request, caller().namespaces), await jobs.shares()
    found: list[pb.Job] = []
    before, looked, taken = ask.before, 0, 0
    while True:
        limit = min(max(ask.size, AT_ONCE), MOST_LOOKED_AT - looked)
        named = await jobs.newest(limit, before)
        for start in range(0, len(named), AT_ONCE):
            some = named[start : start + AT_ONCE]
            read = await asyncio.gather(*(jobs.summary(uid) for uid, _ in some))
            told = [None if one is None else listed(one) for one in read]
            await stand(jobs, [job for job in told if job is not None], shares)
            for (_, revision), job in zip(some, told, strict=True):
                looked, before = looked + 1, revision
                if job is not None and ask.has(job):
                    found.append(job)
                    taken += job.ByteSize()
                if len(found) == ask.size or looked == MOST_LOOKED_AT or taken >= MOST_BYTES:
                    return pb.ListJobsReply(jobs=found, next_page_token=ask.token(revision))
        if len(named) < limit:
            if ask.namespace and not found and ask.before is None:
                await check_namespace(jobs.store, ask.namespace)
            return pb.ListJobsReply(jobs=found)


def listed(one: JobMirror | Unreadable) -> pb.Job:
    """A job as the list has it."""
    if isinstance(one, JobMirror):
        try:
            return described(one)
        except UnreadableRecord as error:
            name = "" if one.job is None else one.job.record.name
            one = Unreadable(one.keys.uid, name, str(error))
    return pb.Job(uid=one.uid, name=one.name, state=pb.JOB_STATE_UNSPECIFIED, reason=one.why)
