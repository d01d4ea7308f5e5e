"""A request with an unknown name gets an error and no empty answer."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from builders import stored
from listed_jobs import create

from controllers.api.edge.access import Caller, Role, acting_as
from controllers.api.edge.errors import NamespaceNotFound
from controllers.api.jobs import JobsService
from controllers.api.store_reader import StoreReader, check_namespace
from controllers.changes import ChangeSignal
from gcore.api.tokens import TokenRecord
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry
from gcore.ledger.records.cluster import Quotas
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.ledger.usage import NodeUsage, PoolSeconds
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

EVE = Caller("eve", Role.VIEWER, frozenset({"research"}))
USAGE = NodeUsage(day=1, uid="u", job="sums", namespace="used", pools={"train": PoolSeconds(slot_s=1)})
TOKEN = TokenRecord(
    id="t", name="bob", role="viewer", namespaces=("tokened",), sha256="0" * 64, created=0.0, expires=1e9
)


class Ended(Exception):
    """As gRPC ends a call."""


class Context:
    """Keeps what a call was refused with."""

    refused: tuple[str, str] = ("OK", "")

    async def abort(self, code: Any, said: str, trailing: Any = ()) -> None:
        self.refused = code.name, said
        raise Ended


def service(store: MemoryStore, runner: Any = None) -> JobsService:
    async def submissions() -> Any:
        raise AssertionError("nothing is submitted")

    return JobsService(StoreReader(store), submissions, lambda uid: runner, FakeClock())


async def new_store() -> MemoryStore:
    """A job that has ended, in the namespace `default`; a quota, a token and what was used, of others."""
    store = MemoryStore(MemoryCluster(FakeClock()))
    await create(store, "e", "ended", JobPhase.FAILED)
    await store.transact(
        (),
        (
            Put(keys.QUOTAS, Quotas(slots={"limited": 4}).encode()),
            Put(keys.token("t"), TOKEN.encode()),
            Put(keys.name("one", "busy"), b"u9"),
            Put(keys.usage("n", 1, "u"), USAGE.encode()),
        ),
    )
    return store


async def asked(method: Any, request: Any) -> tuple[tuple[str, str], list[Any]]:
    """How the call ended, and what it answered."""
    context, answers = Context(), list[Any]()
    with suppress(Ended):
        answer = method(request, context)
        if hasattr(answer, "__aiter__"):
            answers.extend([one async for one in answer])
        else:
            answers.append(await answer)
    return context.refused, answers


@pytest.mark.parametrize("namespace", ["default", "limited", "tokened", "busy", "used"])
async def test_a_namespace_is_there_while_anything_is_of_it(namespace: str) -> None:
    store = await new_store()
    await check_namespace(store, namespace, {"used"})
    for verb, request in (
        ("GetUsage", pb.GetUsageRequest(namespace=namespace, since=1e9)),
        ("ListJobs", pb.ListJobsRequest(namespace=namespace)),
    ):
        if (verb, namespace) != ("ListJobs", "used"):  # what only was used is no job's any more
            assert (await asked(getattr(service(store), verb), request))[0] == ("OK", "")


@pytest.mark.parametrize("verb", ["GetUsage", "ListJobs"])
async def test_a_namespace_that_nobody_uses_is_not_there_and_the_nearest_is_told(verb: str) -> None:
    store = await new_store()
    ask = getattr(service(store), verb)
    request = getattr(pb, f"{verb}Request")
    (code, said), _ = await asked(ask, request(namespace="limitd"))
    assert (code, "there is no namespace 'limitd', did you mean 'limited'?" in said) == ("NOT_FOUND", True)
    with acting_as(EVE):
        assert (await asked(ask, request(namespace="research")))[0] == ("OK", "")  # hers, though nothing is in it
        # Another's is as absent as none, and what there is, is not hinted at.
        told = [await asked(ask, request(namespace=name)) for name in ("limited", "limitd")]
    assert [code for (code, _), _ in told] == ["NOT_FOUND", "NOT_FOUND"]
    assert told[0][0][1].replace("limited", "X") == told[1][0][1].replace("limitd", "X")


async def test_unreadable_records_name_no_namespace() -> None:
    store = await new_store()
    await store.transact((), (Put(keys.QUOTAS, b"{"), Put(keys.token("t"), b"{")))
    for namespace in ("limited", "tokened"):
        with pytest.raises(NamespaceNotFound):
            await check_namespace(store, namespace)


def step(number: int, **stats: float) -> LogEntry:
    return LogEntry(
        seq=number, parent=None, kind="train", lineage=0, step=number, world="w", nonce=f"n{number}", stats=stats
    )


async def test_numbers_of_a_name_that_no_step_has_told_are_refused_once_there_is_a_step() -> None:
    store = await new_store()
    metrics = service(store).StreamMetrics
    request = pb.StreamMetricsRequest(job="e", names=["rewrad"])
    assert await asked(metrics, request) == (("OK", ""), [])  # the job told none: who knows which it would have
    await store.transact((), (Put(JobKeys("e").log(1), step(1, reward=0.5).encode()),))
    (code, said), answers = await asked(metrics, request)
    assert (code, answers) == ("INVALID_ARGUMENT", [])
    assert "names: 'rewrad' is not a metric of this job's steps so far, did you mean 'reward'?" in said
    ended, answers = await asked(metrics, pb.StreamMetricsRequest(job="e", names=["reward", "kl"]))
    assert (ended, [dict(one.values) for one in answers]) == (("OK", ""), [{"reward": 0.5}])


async def test_a_stream_that_began_before_the_first_step_is_told_with_it() -> None:
    store = await new_store()
    await create(store, "n", "new")
    job_keys, changes = JobKeys("n"), ChangeSignal()
    mirror = JobMirror(job_keys, status=stored(JobStatus(phase=JobPhase.FAILED)), log={1: stored(step(1, reward=0.5))})
    runner = SimpleNamespace(changes=changes, closed=False, mirror=mirror)
    metrics = service(store, runner).StreamMetrics
    (code, _), answers = await asked(metrics, pb.StreamMetricsRequest(job="new", names=["rewrad"], follow=True))
    assert (code, answers) == ("INVALID_ARGUMENT", [])
    ended, answers = await asked(metrics, pb.StreamMetricsRequest(job="new", names=["reward"], follow=True))
    assert (ended, [dict(one.values) for one in answers]) == (("OK", ""), [{"reward": 0.5}])


@pytest.mark.parametrize("ask", [{"node": "n9"}, {"instance": "train-n9-aaaaaaaa"}])
async def test_logs_of_a_node_and_of_a_worker_that_nobody_knows_are_not_there(ask: dict[str, str]) -> None:
    store = await new_store()
    (code, said), _ = await asked(service(store).StreamLogs, pb.StreamLogsRequest(job="e", **ask))
    assert code == "NOT_FOUND"
    assert next(iter(ask.values())) in said
