"""Jobs of other namespaces are invisible to every verb of the job API that names a job."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from controllers.api import streams
from controllers.api.edge.access import Caller, Role, acting_as
from controllers.api.edge.errors import Forbidden, NotFound
from controllers.api.jobs import JobsService
from controllers.api.store_reader import LocalStorage, StoreReader
from controllers.api.submission.submit import Submitter
from controllers.storage.run_folder import LocalRunFolders
from gcore.api.tls import PLAIN
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.config import parse_spec
from gcore.ledger import transactions
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus
from gcore.ledger.transactions import TransactionExecutor
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

SPEC: dict[str, Any] = {
    "name": "secret",
    "namespace": "vision",
    "model": {"path": "/m"},
    "data": {"path": "/d"},
    "flow": {"steps": 9},
    "rollout": {"max_new_tokens": 4},
}
METHODS = {
    one.name: one
    for one in pb.DESCRIPTOR.services_by_name["Jobs"].methods
    if "job" in one.input_type.fields_by_name
    and getattr(JobsService, one.name) is not getattr(jobs_pb2_grpc.JobsServicer, one.name)  # which nothing answers
}
OWN = Caller("ada", Role.SUBMITTER, frozenset({"vision"}))
OTHER = Caller("eve", Role.SUBMITTER, frozenset({"speech", "default"}))
NAMES = ("u1", "secret", "vision/secret", "nothing")


MORE: dict[str, dict[str, Any]] = {"UpdateJob": {"update_mask": {"paths": ["scheduling.priority"]}, "priority": 1}}
"""Without which a request is refused before anything is looked up."""


class Ended(Exception):
    """As gRPC ends a call."""


class Context:
    """Keeps what a call was refused with."""

    def __init__(self) -> None:
        self.refused: tuple[str, str] = ("OK", "")

    async def abort(self, code: Any, said: str, trailing: Any = ()) -> None:
        self.refused = code.name, said
        raise Ended

    def add_done_callback(self, callback: Any) -> None:
        """Nothing is done."""


async def service_of(tmp_path: Path) -> tuple[JobsService, MemoryStore]:
    store, clock = MemoryStore(MemoryCluster(FakeClock())), FakeClock()
    await created(store, tmp_path, "u1", SPEC)
    jobs = StoreReader(store)

    async def submissions() -> Submitter:
        return Submitter(store, jobs, tmp_path, tmp_path, clock)

    return JobsService(jobs, submissions, lambda uid: None, clock), store


async def created(store: MemoryStore, tmp_path: Path, uid: str, tree: dict[str, Any]) -> None:
    spec = parse_spec(tree | {"data": {"path": str(tmp_path / "d.jsonl")}})
    job = JobRecord(
        uid=uid, name=spec.name, spec=spec.model_dump(mode="json"), run_dir=str(tmp_path), created=1.0, prompts=9,
        namespace=spec.namespace, request_id=f"r-{uid}",
    )  # fmt: skip
    pending = JobStatus(phase=JobPhase.PENDING)
    await TransactionExecutor(store, JobKeys(uid)).run(transactions.create(JobKeys(uid), job, pending, 0))


async def asked(service: JobsService, verb: str, request: Any) -> tuple[str, str]:
    context, method = Context(), METHODS[verb]
    try:
        if method.server_streaming:
            async for _ in getattr(service, verb)(request, context):
                break
        else:
            await getattr(service, verb)(request, context)
    except Ended:
        pass
    return context.refused


@pytest.mark.parametrize("verb", sorted(METHODS))
async def test_a_job_of_another_namespace_is_as_absent_as_one_that_never_was(tmp_path: Path, verb: str) -> None:
    service, store = await service_of(tmp_path)
    before = await store.list("")
    made = getattr(pb, METHODS[verb].input_type.name)
    with acting_as(OTHER):
        told = {name: await asked(service, verb, made(job=name, **MORE.get(verb, {}))) for name in NAMES}
    for name, (code, said) in told.items():
        assert code == "NOT_FOUND", (name, code, said)
        assert said.replace(repr(name), "X") == told["nothing"][1].replace("'nothing'", "X")
    assert (await store.list("")).kvs == before.kvs


async def test_its_own_namespace_is_where_a_caller_looks_names_up(tmp_path: Path) -> None:
    service, _ = await service_of(tmp_path)
    with acting_as(OWN):
        for name in ("u1", "secret", "vision/secret"):
            assert await asked(service, "GetJob", pb.GetJobRequest(job=name)) == ("OK", "")


async def test_the_list_has_what_is_the_callers(tmp_path: Path) -> None:
    service, _ = await service_of(tmp_path)
    for one, names in ((OWN, ["secret"]), (OTHER, [])):
        with acting_as(one):
            reply = await service.ListJobs(pb.ListJobsRequest(), Context())
        assert [job.name for job in reply.jobs] == names


async def test_submission_to_a_foreign_namespace_is_refused_and_ends_no_job(tmp_path: Path) -> None:
    _, store = await service_of(tmp_path)
    submissions = Submitter(store, StoreReader(store), tmp_path, tmp_path, FakeClock())
    before = (await store.list("")).kvs
    with acting_as(OTHER), pytest.raises(Forbidden, match="you have no access to namespace 'vision'"):
        await submissions.create("r2", json.dumps(SPEC), True)
    assert (await store.list("")).kvs == before


async def test_a_spec_without_a_namespace_is_for_the_callers_own(tmp_path: Path) -> None:
    _, store = await service_of(tmp_path)
    submissions = Submitter(store, StoreReader(store), tmp_path, tmp_path, FakeClock())
    tree = {key: value for key, value in SPEC.items() if key != "namespace"}
    (tmp_path / "d.jsonl").write_text('{"prompt": "p", "answer": "a"}\n' * 9)
    tree["data"] = {"path": str(tmp_path / "d.jsonl")}
    with acting_as(OWN):
        assert await submissions.create("r2", json.dumps(tree), False) == "u1"  # the one of that name there goes on


async def test_a_runs_files_are_served_to_those_who_may_see_the_job(tmp_path: Path) -> None:
    _, store = await service_of(tmp_path)
    jobs = StoreReader(store, LocalStorage("n", tmp_path, None))  # type: ignore[arg-type]
    with acting_as(OTHER), pytest.raises(NotFound, match="there is no job"):
        await jobs.own_folder("u1")


async def test_the_logs_that_other_nodes_are_asked_for_are_of_the_job_that_its_caller_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, store = await service_of(tmp_path)
    service._jobs = StoreReader(store, LocalStorage("n1", tmp_path, LocalRunFolders(PLAIN)))
    other = JobRecord(uid="u2", name="secret", spec={}, run_dir="/r", created=2.0, prompts=9, request_id="r2")
    keys = JobKeys("u2")
    await TransactionExecutor(store, keys).run(transactions.create(keys, other, JobStatus(phase=JobPhase.PENDING), 0))
    asked_for: list[str] = []

    def of_peer(
        connector: Any, node: str, address: str, request: pb.StreamLogsRequest
    ) -> Callable[[], AsyncGenerator[pb.LogLine, None]]:
        async def lines() -> AsyncGenerator[pb.LogLine, None]:
            with acting_as(Caller("n1", Role.NODE)):  # a peer knows the daemon that asks it, and not for whom
                asked_for.append(await service._find(request.job))
            yield pb.LogLine(node=node)

        return lines

    async def peers(self: StoreReader) -> dict[str, str]:
        return {"n2": "127.0.0.1:1"}

    monkeypatch.setattr(streams, "peer_logs", of_peer)
    monkeypatch.setattr(StoreReader, "is_apart", lambda self, mirror: True)
    monkeypatch.setattr(StoreReader, "peers", peers)
    with acting_as(OWN):
        lines = service.StreamLogs(pb.StreamLogsRequest(job="secret"), Context())
        assert [line.node async for line in lines] == ["n2"]
    assert asked_for == ["u1"]


async def test_a_job_that_has_anothers_uid_for_a_name_is_not_taken_for_it(tmp_path: Path) -> None:
    service, store = await service_of(tmp_path)
    await created(store, tmp_path, "u2", SPEC | {"name": "u1"})
    await created(store, tmp_path, "u3", SPEC | {"name": "u1", "namespace": "speech"})
    admin, eve = Caller("root", Role.ADMIN), Caller("eve", Role.VIEWER, frozenset({"speech"}))
    for one, found in ((OWN, "u1"), (admin, "u1"), (eve, "u3")):
        with acting_as(one):
            job = await service.GetJob(pb.GetJobRequest(job="u1"), Context())
        assert job.uid == found, "what is not there for a caller hides nothing of theirs"


async def test_a_request_id_of_another_namespace_is_taken_and_its_jobs_spec_is_not_told(tmp_path: Path) -> None:
    service, _ = await service_of(tmp_path)
    spec = SPEC | {"namespace": "speech", "data": {"path": str(tmp_path / "d.jsonl")}, "flow": {"steps": 7}}
    asks = pb.CreateJobRequest(request_id="r-u1", spec_json=json.dumps(spec))
    context = Context()
    with acting_as(OTHER), pytest.raises(Ended):
        await service.CreateJob(asks, context)
    code, said = context.refused
    assert (code, "is already used in another namespace" in said, "secret" in said, "steps" in said) == (
        "FAILED_PRECONDITION",
        True,
        False,
        False,
    )
    own = pb.CreateJobRequest(request_id="r-u1", spec_json=json.dumps(spec | {"namespace": "vision"}))
    with acting_as(OWN), pytest.raises(Ended):
        await service.CreateJob(own, context)
    assert "flow.steps" in context.refused[1]
