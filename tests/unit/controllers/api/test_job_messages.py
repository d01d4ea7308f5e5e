"""Changes of a job's claim, the state of a job without slots, and deletion of a job, in the API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from heard_cluster import heard
from listed_jobs import SPEC, create

from controllers.api.edge.access import Caller, Role, acting_as
from controllers.api.edge.errors import BadFields
from controllers.api.job_messages import add_claim, end_change, list_jobs, pause_change, update_change
from controllers.api.jobs import JobsService, remove_folder
from controllers.api.store_reader import StoreReader
from controllers.cluster.mirror import ClusterMirror
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config import parse_spec
from gcore.config.base import MOST_SLOTS
from gcore.errors import GcoreError, SpecError
from gcore.ledger.records.cluster import Claim, QueuePosition, Share, Shares
from gcore.ledger.records.job import JobPhase, JobRecord, NodeRecord
from gcore.schema import NEWEST_VERSION
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.worker.records import WorkerRecord
from placement.shares import ClusterSlots, queue_jobs

HERE = {"n0": ("cpu:0", "cpu:1")}


def asked(**fields: Any) -> pb.UpdateJobRequest:
    return pb.UpdateJobRequest(update_mask=FieldMask(paths=list(fields)), **fields)


def test_only_what_the_mask_names_is_changed_and_in_whole_engines() -> None:
    claim = Claim(priority=3, least=2, most=8, unit=4)
    assert update_change(asked(priority=-7))(claim) == claim.model_copy(update={"priority": -7})
    assert update_change(asked(slots_min=5))(claim).least == 8
    assert update_change(asked(slots_max=0))(claim).most is None
    dotted = pb.UpdateJobRequest(update_mask=FieldMask(paths=["scheduling.priority"]), priority=1)
    assert update_change(dotted)(claim).priority == 1


WRONG = {
    "nothing": (pb.UpdateJobRequest(), ["update_mask"]),
    "what cannot change": (pb.UpdateJobRequest(update_mask=FieldMask(paths=["priorty"])), ["update_mask"]),
    "too high": (asked(priority=1001), ["priority"]),
    "no slots at least": (asked(slots_min=0), ["slots_min"]),
    "fewer than none at most": (asked(slots_max=-1, slots_min=-1), ["slots_min", "slots_max"]),
}


@pytest.mark.parametrize(("request_", "fields"), WRONG.values(), ids=WRONG)
def test_invalid_changes_name_the_fields(request_: pb.UpdateJobRequest, fields: list[str]) -> None:
    with pytest.raises(BadFields) as error:
        update_change(request_)
    assert [one.field for one in error.value.violations] == fields


def test_bounds_that_do_not_go_together_are_refused_whichever_was_there_first() -> None:
    with pytest.raises(BadFields, match="slots_max"):
        update_change(asked(slots_max=1))(Claim(least=2))
    with pytest.raises(BadFields, match="slots_min"):
        update_change(asked(slots_min=9))(Claim(most=8))


TOO_MANY: dict[str, dict[str, Any]] = {
    "slots_min": {"scheduling": {"slots_min": MOST_SLOTS + 1}},
    "slots_max": {"scheduling": {"slots_max": 10**12}},
    "ranks": {"train": {"ranks": 10**13}},
    "pools": {"placement": {"policy": "static", "train": 10**13, "reward": 1}},
}


@pytest.mark.parametrize("section", TOO_MANY.values(), ids=TOO_MANY)
def test_more_slots_than_any_cluster_has_are_no_jobs_to_ask_for(section: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="less than or equal to 1000000"):
        parse_spec(SPEC | {"name": "s"} | section)


async def test_a_claim_of_any_size_hides_no_job_of_the_list() -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    for uid in ("u1", "u2"):
        await create(store, uid, uid)
    claim = Claim(least=10**12, most=10**15)
    await store.transact(
        (), (Put(JobKeys("u1").active, claim.encode(NEWEST_VERSION)), Put(keys.SHARES, Shares().encode(NEWEST_VERSION)))
    )
    reply = await list_jobs(StoreReader(store), pb.ListJobsRequest())
    assert [job.uid for job in reply.jobs] == ["u2", "u1"]
    assert reply.jobs[1].slots_min == reply.jobs[1].slots_max == 2**31 - 1


def test_a_job_that_ends_keeps_its_first_reason() -> None:
    assert end_change("b")(end_change("a")(Claim())).ends == "a"


def share(granted: Any = None, held: Any = None) -> Shares:
    return Shares(jobs={"u": Share(granted=granted or {}, held=held or {})})


STANDINGS: dict[str, tuple[Claim, Shares, Any, str]] = {
    "it runs": (Claim(), share(HERE, HERE), pb.JOB_STATE_RUNNING, "training"),
    "it waits": (Claim(least=2), share(), pb.JOB_STATE_QUEUED, "waiting for 2 slots"),
    "it waits and is told why": (Claim(), share(), pb.JOB_STATE_QUEUED, "3 are wanted"),
    "it gives back": (
        Claim(),
        share(None, HERE),
        pb.JOB_STATE_RUNNING,
        "gives its slots to other jobs at its next commit",
    ),
    "it pauses": (
        Claim(paused=True),
        share(None, HERE),
        pb.JOB_STATE_RUNNING,
        "it pauses at its next commit; it still has to release 2 slots",
    ),
    "it is paused": (Claim(paused=True), share(), pb.JOB_STATE_PAUSED, "paused"),
    "it ends": (Claim(ends="enough"), share(HERE, HERE), pb.JOB_STATE_RUNNING, "ends at its next commit (enough)"),
}


@pytest.mark.parametrize(("claim", "shares", "state", "reason"), STANDINGS.values(), ids=STANDINGS)
def test_a_job_stands_as_its_records_and_its_slots_say(claim: Claim, shares: Shares, state: Any, reason: str) -> None:
    queue = {"u": QueuePosition(2, reason)} if reason == "3 are wanted" else {}
    job = add_claim(pb.Job(uid="u", state=pb.JOB_STATE_RUNNING, reason="training"), claim, shares, queue)
    assert job.state == state
    assert reason in job.reason
    assert job.queue_position == 2 * len(queue)


def test_a_job_that_has_ended_claims_nothing() -> None:
    job = pb.Job(uid="u", state=pb.JOB_STATE_FAILED, reason="no luck")
    assert add_claim(job, None, share()) == pb.Job(uid="u", state=pb.JOB_STATE_FAILED, reason="no luck")


class Context:
    """Of a call."""

    async def abort(self, code: grpc.StatusCode, words: str, metadata: Any = ()) -> None:
        raise Refused(code, words)


class Refused(Exception):
    """The error of a refused call."""


class Api:
    """The service over a store in memory with a job that waits and one that has ended."""

    def __init__(self) -> None:
        self.store = MemoryStore(MemoryCluster(FakeClock()))
        self.cluster: ClusterMirror | None = None
        jobs = StoreReader(self.store, cluster=lambda: self.cluster)
        self.service = JobsService(jobs, None, lambda uid: None, FakeClock())  # type: ignore[arg-type]

    async def ready(self) -> Api:
        await create(self.store, "u", "waits")
        await create(self.store, "e", "ended", JobPhase.FAILED)
        node = NodeRecord(name="n0", incarnation="n0.a", address="h:1", slots=("cpu:0", "cpu:1"), pid=1)
        reads = Put(keys.readable_version("n0"), str(NEWEST_VERSION).encode())
        shares = Put(keys.SHARES, share(HERE, HERE).encode())
        await self.store.transact((), (Put(keys.node("n0"), node.encode()), reads, shares))
        self.cluster = await heard(self.store)
        return self

    async def ask(self, verb: str, request: Any) -> Any:
        return await getattr(self.service, verb)(request, Context())

    async def refused(self, verb: str, request: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(Refused) as error:
            await self.ask(verb, request)
        code, words = error.value.args
        return code, words


Code = grpc.StatusCode


async def test_a_job_is_paused_resumed_changed_and_cancelled_by_its_claim() -> None:
    api = await Api().ready()
    await api.ask("PauseJob", pb.PauseJobRequest(job="waits"))
    claim = await StoreReader(api.store).claim("u")
    assert claim is not None
    assert claim.record.paused
    await api.ask("ResumeJob", pb.ResumeJobRequest(job="waits"))
    job = await api.ask("UpdateJob", _named(asked(priority=9, slots_max=2)))
    assert (job.priority, job.slots_max, job.slots) == (9, 2, 2)
    drained = await api.ask("CancelJob", pb.CancelJobRequest(job="waits", mode=pb.CANCEL_MODE_DRAIN))
    assert "ends at its next commit (cancelled on request)" in drained.reason


def _named(request: pb.UpdateJobRequest, job: str = "waits") -> pb.UpdateJobRequest:
    request.job = job
    return request


@pytest.mark.parametrize(
    ("verb", "request_"),
    [("PauseJob", pb.PauseJobRequest), ("ResumeJob", pb.ResumeJobRequest)],
    ids=["pause", "resume"],
)
async def test_a_job_that_has_ended_is_not_steered(verb: str, request_: Any) -> None:
    api = await Api().ready()
    code, words = await api.refused(verb, request_(job="ended"))
    assert code is Code.FAILED_PRECONDITION
    assert "has ended" in words


def folder(under: Path) -> Path:
    run_dir = under / "ended-e"
    (run_dir / "checkpoints").mkdir(parents=True)
    return run_dir


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


async def test_a_job_that_has_ended_is_forgotten_and_its_name_is_free(tmp_path: Path) -> None:
    api = await Api().ready()
    run_dir = folder(tmp_path)
    kv = await api.store.get(JobKeys("e").job)
    assert kv is not None
    record = JobRecord.decode(kv.value, kv.key).model_copy(update={"run_dir": str(run_dir)})
    await api.store.transact((), (Put(kv.key, record.encode()),))
    await api.ask("DeleteJob", pb.DeleteJobRequest(job="ended", files=True))
    assert names(tmp_path) == []
    assert (await api.store.list(JobKeys("e").prefix)).kvs == ()
    assert await api.store.get(keys.name("ended")) is None
    assert await api.store.get(keys.request("r-e")) is None
    assert (await api.refused("DeleteJob", pb.DeleteJobRequest(job="ended")))[0] is Code.NOT_FOUND
    assert await api.store.get(keys.name("waits")) is not None, "other jobs are left alone"


async def test_the_newer_job_of_a_name_keeps_it_when_the_older_is_forgotten() -> None:
    api = await Api().ready()
    await create(api.store, "n", "ended")
    await api.ask("DeleteJob", pb.DeleteJobRequest(job="e"))
    named = await api.store.get(keys.name("ended"))
    assert named is not None
    assert named.value == b"n"


async def test_a_job_that_is_at_work_is_not_forgotten() -> None:
    api = await Api().ready()
    code, words = await api.refused("DeleteJob", pb.DeleteJobRequest(job="waits"))
    assert (code, "has not ended" in words) == (Code.FAILED_PRECONDITION, True)
    worker = WorkerRecord(instance="w", node="n0", role="rollout", job_uid="e", slot="cpu:0", pid=1, pid_started=1)
    await api.store.transact((), (Put(keys.worker("w"), worker.encode()),))
    code, words = await api.refused("DeleteJob", pb.DeleteJobRequest(job="ended"))
    assert (code, "1 workers" in words) == (Code.FAILED_PRECONDITION, True)


def test_a_folder_that_is_not_the_runs_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with pytest.raises(GcoreError, match="not deleted"):
        remove_folder(tmp_path / "home", "e")
    assert (tmp_path / "home").is_dir()
    remove_folder(tmp_path / "gone-e", "e")
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "run-e").symlink_to(target)
    remove_folder(tmp_path / "run-e", "e")
    assert target.is_dir()


async def test_a_node_is_drained_and_used_again() -> None:
    api = await Api().ready()
    with acting_as(Caller("ada", Role.ADMIN)):
        node = await api.ask("DrainNode", pb.DrainNodeRequest(node="n0"))
    assert (node.name, node.draining) == ("n0", True)
    assert {use.slot: use.job_uid for use in node.uses} == {"cpu:0": "u", "cpu:1": "u"}
    assert (await StoreReader(api.store).pool())[0] == {"n0"}
    assert not (await api.ask("DrainNode", pb.DrainNodeRequest(node="n0", undo=True))).draining
    assert (await StoreReader(api.store).pool())[0] == frozenset()
    assert (await api.refused("DrainNode", pb.DrainNodeRequest(node="nowhere")))[0] is Code.NOT_FOUND
    away = Shares(jobs={"u": Share(granted={"away": ("cpu:0",)}, held={"away": ("cpu:0",)})})
    await api.store.transact((), (Put(keys.SHARES, away.encode()),))
    gone = await api.ask("DrainNode", pb.DrainNodeRequest(node="away"))
    assert (gone.draining, gone.incarnation) == (True, ""), "its daemon has ended, and may return"
    assert (await api.refused("DrainNode", pb.DrainNodeRequest()))[0] is Code.INVALID_ARGUMENT


async def test_jobs_that_wait_say_at_which_place_and_what_they_need() -> None:
    api = await Api().ready()
    await create(api.store, "w1", "first")
    await create(api.store, "w2", "second")
    await api.ask("UpdateJob", pb.UpdateJobRequest(job="w2", update_mask=FieldMask(paths=["priority"]), priority=5))
    listed = {job.uid: job for job in (await api.ask("ListJobs", pb.ListJobsRequest())).jobs}
    first = await api.ask("GetJob", pb.GetJobRequest(job="w1"))
    assert first.state == pb.JOB_STATE_QUEUED
    assert first.queue_position == listed["w1"].queue_position > 0
    assert first.reason.startswith("it needs 1 slot")


async def test_queue_positions_are_computed_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    api, made = await Api().ready(), list[int]()

    def counted(there: ClusterSlots, claims: Mapping[str, Claim], shares: Shares) -> Mapping[str, QueuePosition]:
        made.append(len(claims))
        return queue_jobs(there, claims, shares)

    await api.ask("UpdateJob", _named(asked(slots_min=2)))
    monkeypatch.setattr("controllers.cluster.mirror.queue_jobs", counted)
    for number in range(30):
        await create(api.store, f"w{number:02d}", f"job-{number}")
    asking = [api.ask("GetJob", pb.GetJobRequest(job=f"w{number:02d}")) for number in range(30)]
    listing = [api.ask("ListJobs", pb.ListJobsRequest()) for _ in range(10)]
    jobs = await asyncio.gather(*asking, *listing)
    assert [job.queue_position for job in jobs[:30]] == list(range(1, 31))
    assert made == [31], "of all of them, and once"
    changed = await api.ask("UpdateJob", _named(asked(priority=-1), "w00"))
    assert changed.queue_position == 30, "whoever has changed something is told what came of it"
    listed = {job.uid: job for job in (await api.ask("ListJobs", pb.ListJobsRequest())).jobs}
    assert (listed["w29"].queue_position, listed["w00"].queue_position) == (29, 30)
    assert made == [31, 31]


async def test_a_daemon_that_hears_nothing_of_the_cluster_tells_of_jobs_all_the_same() -> None:
    api = await Api().ready()
    await create(api.store, "w1", "first")
    api.cluster = None
    job = await api.ask("GetJob", pb.GetJobRequest(job="w1"))
    assert (job.state, job.queue_position, job.reason) == (pb.JOB_STATE_QUEUED, 0, "waiting for 1 slot")


async def test_slot_owners_are_visible_only_to_permitted_users() -> None:
    api = await Api().ready()
    with acting_as(Caller("eve", Role.VIEWER, frozenset({"research"}))):
        (node,) = (await api.ask("ListNodes", pb.ListNodesRequest())).nodes
        assert {use.slot: use.job_uid for use in node.uses} == {"cpu:0": "", "cpu:1": ""}
        assert (await api.refused("GetJob", pb.GetJobRequest(job="u")))[0] is Code.NOT_FOUND


def test_pausing_twice_is_pausing_once() -> None:
    assert pause_change(yes=True)(pause_change(yes=True)(Claim())) == Claim(paused=True)
