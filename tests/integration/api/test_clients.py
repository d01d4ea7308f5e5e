"""`gcore.Client` and `gcore.AsyncClient` against scripted controllers, as a script or a notebook uses them."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncGenerator, Iterator

import grpc
import pytest
from api_in_thread import served
from fake_jobs import FakeJobs, Script

import gcore
from gcore.api.v1 import jobs_pb2 as pb
from gcore.client import WaitPolicy
from gcore.client.client import AsyncClient, Client
from gcore.client.models import Listing, Node, html_table
from gcore.errors import NotAllowed, Unreachable, UsageError
from gcore.observability.events import JobEvent

QUICK = WaitPolicy(call_s=5.0, quiet_s=0.2, probe_s=0.5, retry_s=0.02, lost_s=3.0)


@pytest.fixture
def script() -> Script:
    """A job with events, lines and steps."""
    job = pb.Job(uid="u1", name="sums", state=pb.JOB_STATE_RUNNING, reason="<b>bold</b>", step=2, steps=9)
    made = Script(job)
    made.events = [JobEvent(n, float(n), "step", f"event {n}") for n in (1, 2, 3)]
    made.lines = [pb.LogLine(instance="train-n-1", node="n", role="train", rank=0, text="one", time=5.0)]
    made.steps = [pb.StepMetrics(lineage=0, step=n, values={"reward": n / 10}) for n in (1, 2)]
    made.shards = [pb.Shard(shard=0, node="n", length=3)]
    made.usages = [pb.Usage(by={"namespace": "default"}, slot_seconds=7200, busy_seconds=1800)]
    made.nodes.nodes.add(name="n", address="h:1", slots=["cpu:0"]).uses.add(slot="cpu:0", job_uid="u1")
    return made


@pytest.fixture
def servers(script: Script) -> Iterator[list[FakeJobs]]:
    """Two controllers."""
    with served(script, 2) as found:
        yield found


@pytest.fixture
def cluster(servers: list[FakeJobs]) -> Iterator[Client]:
    """A client of both."""
    with gcore.Client([one.address for one in servers], patience=QUICK) as client:
        yield client


def test_every_verb_answers_with_something_typed(cluster: Client, script: Script) -> None:
    job = cluster.submit({"name": "sums"}, request_id="r1")
    assert (job.uid, job.state, job.has_ended, job.ended) == ("u1", "RUNNING", False, None)
    assert script.requests[0].request_id == "r1"
    assert cluster.get("sums") == cluster.get(job) == cluster.list(states=["running"])[0]
    assert [event.sequence for event in cluster.events(job, follow=False)] == [1, 2, 3]
    assert [event.sequence for event in cluster.events(job, newest=1, follow=False)] == [3]
    assert [(one.step, one["reward"]) for one in cluster.metrics(job)] == [(1, 0.1), (2, 0.2)]
    (line,) = cluster.logs(job, role="train", rank=0)
    assert (str(line), line.rank, line.time) == ("train-n-1  one", 0, 5.0)
    assert cluster.shards(job)[0].length == 3
    assert cluster.nodes()[0].uses == {"cpu:0": "u1"}
    assert cluster.usage()[0].slot_hours == 2.0
    assert cluster.drain("n").draining
    assert cluster.evaluate(job) == 3
    assert cluster.update(job, priority=4).priority == 4
    assert cluster.pause(job).state == "PAUSED"
    assert cluster.resume(job).state == "RUNNING"
    assert cluster.audit(job).clean
    assert cluster.cancel(job, drain=True).has_ended
    assert cluster.wait(job).state == "CANCELLED"
    cluster.delete(job, files=True)
    assert script.deleted


def test_both_clients_have_the_same_verbs_with_the_same_arguments() -> None:
    def verbs(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert verbs(Client) == verbs(AsyncClient)


CALLED = {
    "CreateJob": "submit", "GetJob": "get", "ListJobs": "list", "WatchJob": "events", "StreamLogs": "logs", "StreamMetrics": "metrics",
    "UpdateJob": "update", "PauseJob": "pause", "ResumeJob": "resume", "CancelJob": "cancel", "DeleteJob": "delete", "RunEval": "evaluate",
    "ListShards": "shards", "AuditJob": "audit", "GetSamples": "samples", "GetBooks": "books", "ListCheckpoints": "checkpoints",
    "GetPlacement": "placement", "PinPlacement": "pin", "ListNodes": "nodes", "DrainNode": "drain", "GetUsage": "usage",
    "GetQuotas": "quotas", "SetQuota": "set_quota",
}  # fmt: skip


def test_there_is_a_verb_for_every_call_of_the_api() -> None:
    assert CALLED.keys() == {one.name for one in pb.DESCRIPTOR.services_by_name["Jobs"].methods}
    assert not [verb for verb in CALLED.values() if not hasattr(AsyncClient, verb)]


def test_methods_that_return_api_messages_forward_their_arguments(
    cluster: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def answering(name: str, answer: object) -> None:
        async def call(*words: object) -> object:
            asked.append((name, *words))
            return answer

        monkeypatch.setattr(cluster._inner.jobs, name, call)

    one, placed, quota = pb.CheckpointInfo(step=4), pb.PlacementReply(uid="u1"), [pb.Quota(namespace="a", slots=2)]
    answering("list_checkpoints", pb.ListCheckpointsReply(checkpoints=[one]))
    answering("get_books", [pb.BookOfNode()])
    answering("get_placement", placed)
    answering("pin_placement", placed)
    answering("get_quotas", quota)
    answering("set_quota", quota)
    assert list(cluster.checkpoints("sums")) == [one]
    assert cluster.books("sums", step=3) == [pb.BookOfNode()]
    assert cluster.placement("sums") == cluster.pin(pb.PinPlacementRequest(job="sums")) == placed
    assert cluster.quotas() == cluster.set_quota("a", 2) == quota
    assert asked == [
        ("list_checkpoints", "sums"),
        ("get_books", "sums", 3),
        ("get_placement", "sums"),
        ("pin_placement", pb.PinPlacementRequest(job="sums")),
        ("get_quotas",),
        ("set_quota", "a", 2),
    ]


def test_a_stream_goes_on_from_another_controller(cluster: Client, script: Script, servers: list[FakeJobs]) -> None:
    got = []
    for event in cluster.events("sums"):
        got.append(event.sequence)
        if event.sequence == 3:
            servers[0].hush()
            script.play(
                [JobEvent(4, 4.0, "step", data={"step": 4}), JobEvent(5, 5.0, "state", data={"state": "FAILED"})]
            )
    assert got == [1, 2, 3, 4, 5]


def test_an_iterator_that_is_dropped_closes_its_stream(cluster: Client, servers: list[FakeJobs]) -> None:
    events = cluster.events("sums")
    assert next(events).sequence == 1
    events.close()
    assert cluster.get("sums").uid == "u1"


def test_interrupting_a_stream_is_an_interruption_and_closes_it(
    cluster: Client, servers: list[FakeJobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()

    async def slowly_left(*_: object, **__: object) -> AsyncGenerator[JobEvent, None]:
        try:
            yield JobEvent(1, 0.0, "note", "one", {})
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            left.set()

    main = threading.main_thread().ident
    assert main is not None
    monkeypatch.setattr(cluster._inner, "events", slowly_left)
    with pytest.raises(KeyboardInterrupt):
        list(cluster.events("sums"))
    assert left.wait(10)


def test_a_notebook_with_a_loop_of_its_own_uses_the_same_client(cluster: Client) -> None:
    async def cell() -> str:
        return cluster.get("sums").name

    assert asyncio.run(cell()) == "sums"


async def test_the_asynchronous_client_has_its_streams_as_iterators(servers: list[FakeJobs]) -> None:
    async with gcore.AsyncClient(servers[0].address, patience=QUICK) as cluster:
        job = await cluster.get("sums")
        assert [event.sequence async for event in cluster.events(job, follow=False)] == [1, 2, 3]
        assert [one.step async for one in cluster.metrics(job, after_step=1)] == [2]


def test_notebook_html_is_escaped(cluster: Client) -> None:
    shown = cluster.get("sums")._repr_html_()
    assert "&lt;b&gt;bold&lt;/b&gt;" in shown
    assert "<b>" not in shown
    assert "<td" in cluster.nodes()._repr_html_()
    assert Listing[Node]()._repr_html_() == "<em>none</em>"
    assert "<script>" not in html_table(("<script>",), [("<script>",)])


def test_errors_carry_what_the_api_told_programs(cluster: Client, script: Script) -> None:
    with pytest.raises(UsageError) as error:
        cluster.get("nothing")
    assert error.value.refusal.code is grpc.StatusCode.NOT_FOUND
    script.refusal = (grpc.StatusCode.PERMISSION_DENIED, "a viewer may not")
    with pytest.raises(NotAllowed, match="a viewer may not") as denied:
        cluster.cancel("sums")
    assert denied.value.exit_code == 4
    with pytest.raises(UsageError, match="not a job state"):
        cluster.list(states=["sleeping"])


def test_a_client_that_finds_no_cluster_says_what_to_do(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCORE_CONFIG", f"{tmp_path}/none.yaml")
    monkeypatch.delenv("GCORE_ADDRESS", raising=False)
    with pytest.raises(Unreachable, match="gcore up"):
        gcore.Client(home=f"{tmp_path}/nowhere")


def test_a_client_that_is_closed_twice_is_closed(servers: list[FakeJobs]) -> None:
    client = gcore.Client(servers[0].address)
    client.close()
    client.close()
