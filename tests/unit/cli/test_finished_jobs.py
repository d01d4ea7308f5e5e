"""A command that starts a job with the name of a finished one reports that, or that the job continues, and shows how to start from its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.cli.commands.run import begin_job
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.load import parse_spec
from gcore.config.spec import JobSpec
from gcore.errors import UsageError

FINISHED = pb.Job(
    uid="u0",
    name="sums",
    namespace="team",
    state=pb.JOB_STATE_SUCCEEDED,
    step=4,
    steps=4,
    checkpoint="/runs/u0/checkpoints/0-4",
)

NEW = pb.Job(uid="u1", name="sums", namespace="team")


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    tree = {
        "name": "sums",
        "namespace": "team",
        "model": {"path": "first"},
        "data": {"path": "train.jsonl"},
        "flow": {"steps": 8},
        "rollout": {"max_new_tokens": 4},
    }
    return parse_spec(tree)


class Cluster:
    """A cluster with finished jobs."""

    def __init__(self, created: pb.Job, *finished: pb.Job) -> None:
        self.created, self.finished = created, finished

    async def create_job(self, spec_json: str, *, request_id: str, mode: int) -> pb.Job:
        return self.created

    async def list_jobs(self, *, namespace: str, states: tuple[int, ...], name_prefix: str, limit: int) -> list[pb.Job]:
        assert (namespace, states, name_prefix) == ("team", (pb.JOB_STATE_SUCCEEDED,), "sums")
        if not self.finished:
            raise UsageError("controllers of this version tell no list")
        return list(self.finished)


async def said(cluster: Cluster, spec: JobSpec, capsys: pytest.CaptureFixture[str], *, new: bool = False) -> str:
    job = await begin_job(cluster, spec, request_id="r", new=new)  # type: ignore[arg-type]
    assert job is cluster.created
    return capsys.readouterr().err


async def test_of_a_finished_job_it_is_said_that_this_is_a_new_one_and_how_to_begin_with_its_weights(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    other = pb.Job(uid="u9", name="sums-again", namespace="team", state=pb.JOB_STATE_SUCCEEDED)
    assert await said(Cluster(NEW, other, FINISHED), spec, capsys) == (
        "Job team/sums (u0) has finished all its steps (4), so this is a new job. To continue the finished job from its last "
        "checkpoint, raise flow.steps or flow.epochs and change nothing else. To start a new job with its weights: "
        "`gcore export u0 --to DIR`, then --set model.path=DIR.\n"
    )


async def test_of_a_finished_job_that_goes_on_it_is_said_how_far(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    going_on = pb.Job(uid="u0", name="sums", namespace="team", state=pb.JOB_STATE_QUEUED, step=4)
    assert await said(Cluster(going_on, FINISHED), spec, capsys) == (
        "Job team/sums (u0) finished 4 steps before and continues from its last checkpoint up to 8 steps. Use --new for a new job.\n"
    )


@pytest.mark.parametrize(
    ("cluster", "new"),
    [
        pytest.param(Cluster(NEW, FINISHED), True, id="a new one was asked for"),
        pytest.param(Cluster(NEW), False, id="it cannot be asked"),
        pytest.param(Cluster(FINISHED, FINISHED), False, id="the same request again"),
        pytest.param(Cluster(pb.Job(uid="u1", name="sums", step=2), FINISHED), False, id="one that goes on"),
    ],
)
async def test_otherwise_nothing_is_said(
    cluster: Cluster, new: bool, spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await said(cluster, spec, capsys, new=new) == ""
