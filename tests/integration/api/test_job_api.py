"""The job API on real daemons: every controller answers for the whole cluster."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from typing import Any

import pytest
from cluster_run import gcore

from gcore.api.v1 import jobs_pb2 as pb
from gcore.client import JobsClient
from gcore.config.local_cluster import LocalClusterState
from gcore.errors import UsageError
from gcore.quickstart.arithmetic import prepare_arithmetic
from gcore.system.clock import SystemClock

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A spec whose model has learned nothing."""
    folder = tmp_path_factory.mktemp("example") / "arithmetic"
    prepare_arithmetic(folder, progress=False, warm_updates=1, must_fit=False)
    return {
        "name": "api",
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "train.jsonl")},
        "flow": {"steps": 1000},
        "rollout": {"max_new_tokens": 4},
    }


def ask(cluster: LocalClusterState, question: Any, *, first: int = 0) -> Any:
    async def asked() -> Any:
        addresses = (*cluster.addresses[first:], *cluster.addresses[:first])
        async with JobsClient(addresses, clock=SystemClock()) as client:
            return await question(client)

    return asyncio.run(asked())


def create(
    cluster: LocalClusterState, tree: dict[str, Any], request: str, mode: int = pb.START_MODE_RESUME, **kw: int
) -> pb.Job:
    return ask(cluster, lambda c: c.create_job(json.dumps(tree), request_id=request, mode=mode), **kw)


def cancel(cluster: LocalClusterState, job: str) -> pb.Job:
    return ask(cluster, lambda c: c.cancel_job(job))


def test_a_repeated_request_finds_its_job_at_any_controller(cluster: LocalClusterState, tree: dict[str, Any]) -> None:
    tree = tree | {"name": "repeated"}
    first = create(cluster, tree, "r1")
    assert create(cluster, tree, "r1", pb.START_MODE_NEW, first=1).uid == first.uid
    assert ask(cluster, lambda c: c.get_job("repeated"), first=1).uid == first.uid
    assert first.uid in {job.uid for job in ask(cluster, lambda c: c.list_jobs(), first=1)}
    assert cancel(cluster, "repeated").state == pb.JOB_STATE_CANCELLED
    assert create(cluster, tree, "r1").uid == first.uid
    with pytest.raises(UsageError, match=r"'r1' was used for job 'repeated', whose spec differs \(flow\.steps"):
        create(cluster, tree | {"flow": {"steps": 999}}, "r1", first=1)


def test_the_same_spec_goes_on_and_a_changed_one_is_refused(cluster: LocalClusterState, tree: dict[str, Any]) -> None:
    tree = tree | {"name": "again"}
    first = create(cluster, tree, "a1")
    assert create(cluster, tree, "a2").uid == first.uid
    changed = tree | {"flow": {"steps": 999}}
    with pytest.raises(UsageError, match=r"flow\.steps.*--new"):
        create(cluster, changed, "a3")
    second = create(cluster, changed, "a4", pb.START_MODE_NEW)
    assert second.uid != first.uid
    assert ask(cluster, lambda c: c.get_job(first.uid)).state == pb.JOB_STATE_CANCELLED
    cancel(cluster, "again")
    assert create(cluster, changed, "a5").uid != second.uid
    cancel(cluster, "again")


def test_a_new_spec_that_is_refused_does_not_end_the_old_job(cluster: LocalClusterState, tree: dict[str, Any]) -> None:
    tree = tree | {"name": "kept"}
    first = create(cluster, tree, "k1")
    with pytest.raises(UsageError, match=r"nowhere\.jsonl: cannot read the file"):
        create(cluster, tree | {"data": {"path": "/nowhere.jsonl"}}, "k2", pb.START_MODE_NEW)
    assert ask(cluster, lambda c: c.get_job("kept")).uid == first.uid
    assert ask(cluster, lambda c: c.get_job("kept")).state != pb.JOB_STATE_CANCELLED
    cancel(cluster, "kept")


def test_events_are_the_same_from_every_controller_and_end_with_the_job(
    cluster: LocalClusterState, tree: dict[str, Any]
) -> None:
    """Events from the point where both controllers know the job: a later one may have missed its first state, which is overwritten."""
    tree = tree | {"name": "events"}
    create(cluster, tree, "e1")
    heard: list[list[tuple[int, str]]] = [[], []]

    async def follow(client: JobsClient, told: list[tuple[int, str]]) -> None:
        async for event in client.follow("events"):
            told.append((event.sequence, event.kind))

    async def both() -> None:
        async with (
            JobsClient(cluster.addresses[:1], clock=SystemClock()) as one,
            JobsClient(cluster.addresses[1:], clock=SystemClock()) as other,
        ):
            following = [asyncio.create_task(follow(*each)) for each in zip((one, other), heard, strict=True)]
            while not all(heard):
                await SystemClock().sleep(0.1)
            await one.cancel_job("events")
            await asyncio.gather(*following)

    asyncio.run(both())
    first, second = heard
    known = max(first[0], second[0])
    assert known[1] == "state"
    assert [event for event in first if event >= known] == [event for event in second if event >= known]
    assert len(first) > 1
    assert first[-1] == second[-1]
    assert first[-1][1] == "state"


def test_samples_are_read_at_any_controller_while_a_job_runs_and_after_it_has_ended(
    cluster: LocalClusterState, tree: dict[str, Any]
) -> None:
    tree = tree | {"name": "read", "flow": {"steps": 3, "groups_per_step": 8}, "samples": {"keep": 2, "groups": 2}}
    create(cluster, tree, "s1")

    async def read(client: JobsClient) -> list[pb.SampleGroup]:
        while True:
            try:
                return await client.get_samples("read")
            except UsageError:  # none yet
                await SystemClock().sleep(0.2)

    early = {(group.step, group.lineage) for group in ask(cluster, read)}
    assert early <= {(1, 0), (2, 0), (3, 0)}
    assert len(early) == 1

    async def ended(client: JobsClient) -> None:
        async for _ in client.follow("read"):
            pass

    ask(cluster, ended)
    for first in (0, 1):
        groups = ask(cluster, lambda c: c.get_samples("read"), first=first)
        assert {group.step for group in groups} == {3}
        assert 2 <= len(groups) <= 4
        assert all(response.HasField("advantage") for group in groups for response in group.responses)
        found = ask(cluster, lambda c: c.list_checkpoints("read"), first=first)
        last = found.checkpoints[0]
        assert (found.name, last.step, last.problem) == ("read", 3, "")
        assert "newest" in last.kept
        assert last.bytes > 0
    with pytest.raises(UsageError, match=r"samples of step 1 were removed: samples\.keep is 2.* steps 2-3"):
        ask(cluster, lambda c: c.get_samples("read", step=1))
    shown = gcore("samples", "read", "--step", "3", "--best", "--limit", "1", "--address", cluster.addresses[1])
    assert "step 3, lineage 0: 1 of" in shown.stdout
    assert "response 0: reward" in shown.stdout


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": {"path": "/nowhere"}}, "nowhere"),
    "no data": ({"data": {"path": "/nowhere.jsonl"}}, "nowhere.jsonl"),
    "unknown tracker": ({"tracking": [{"name": "tensorbord"}]}, "did you mean 'tensorboard'?"),
    "unknown reward": ({"reward": {"name": "numerik"}}, "numeric"),
    "unknown flow": ({"flow": {"name": "grp", "steps": 1}}, "grpo"),
    "too many shards": ({"shards": 5000}, "data.shards"),
    "a step too large for the store": (
        {"flow": {"steps": 1, "groups_per_step": 8192, "samples_per_prompt": 16}},
        "groups_per_step",
    ),
    "no room for a response": ({"rollout": {"max_new_tokens": 100000}}, "max_new_tokens"),
    "an unknown key": ({"rolout": {}}, "rollout"),
}


@pytest.mark.parametrize(("change", "expected"), WRONG.values(), ids=WRONG)
def test_invalid_specs_are_refused_in_one_sentence_before_anything_is_written(
    cluster: LocalClusterState, tree: dict[str, Any], change: dict[str, Any], expected: str
) -> None:
    wrong = tree | {"name": "wrong"} | {k: v for k, v in change.items() if k != "shards"}
    if "shards" in change:
        wrong["data"] = tree["data"] | {"shards": change["shards"]}
    with pytest.raises(UsageError, match=re.escape(expected)) as refusal:
        create(cluster, wrong, f"w-{expected}")
    assert "\n" not in str(refusal.value)
    with pytest.raises(UsageError, match="no job"):
        ask(cluster, lambda c: c.get_job("wrong"))


def test_every_controller_shows_its_metrics(cluster: LocalClusterState) -> None:
    for controller in cluster.controllers:
        with urllib.request.urlopen(f"http://{controller.metrics_address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert "gcore_transactions_total" in text
        assert "gcore_build_info" in text


def test_the_nodes_are_listed_with_their_slots(cluster: LocalClusterState) -> None:
    nodes = ask(cluster, lambda c: c.list_nodes()).nodes
    assert {(n.name, tuple(n.slots)) for n in nodes} == {("node-0", ("cpu:0",)), ("node-1", ("cpu:1",))}


def test_a_job_says_what_it_waits_for(cluster: LocalClusterState, tree: dict[str, Any]) -> None:
    tree = tree | {"name": "waiting"}
    create(cluster, tree, "x1")

    async def waits_for_ranks(client: JobsClient) -> bool:
        for _ in range(200):
            waiting = (await client.get_job("waiting")).waiting
            if any("rank 0 on node-0" in wait.what and wait.since > 0 for wait in waiting):
                return True
            await SystemClock().sleep(0.1)
        return False

    assert ask(cluster, waits_for_ranks)
    cancel(cluster, "waiting")
