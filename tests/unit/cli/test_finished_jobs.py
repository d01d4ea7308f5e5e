"""A command that begins a job of the name of a finished one says so, and how to begin with that one's weights."""

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
    """A cluster with one job, or none."""

    def __init__(self, known: pb.Job | None, created: str) -> None:
        self.known, self.created = known, created

    async def get_job(self, name: str) -> pb.Job:
        if self.known is None:
            raise UsageError("there is no such job", where=name)
        assert name == "team/sums"
        return self.known

    async def create_job(self, spec_json: str, *, request_id: str, mode: int) -> pb.Job:
        return pb.Job(uid=self.created)


async def said(known: pb.Job | None, created: str, spec: JobSpec, capsys: pytest.CaptureFixture[str]) -> str:
    job = await begin_job(Cluster(known, created), spec, request_id="r", new=False)  # type: ignore[arg-type]
    assert job.uid == created
    return capsys.readouterr().err


async def test_a_finished_job_of_that_name_is_not_gone_on_with_and_its_weights_are_named(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await said(FINISHED, "u1", spec, capsys) == (
        "Job team/sums (u0) has finished all 4 steps. This is a new one of that name, which begins with first; "
        "--set model.path=/runs/u0/checkpoints/0-4 begins with its weights.\n"
    )


@pytest.mark.parametrize(
    ("known", "created"),
    [
        pytest.param(None, "u1", id="the first of that name"),
        pytest.param(FINISHED, "u0", id="the same request again"),
        pytest.param(pb.Job(uid="u0", name="sums", state=pb.JOB_STATE_RUNNING), "u0", id="one that goes on"),
        pytest.param(pb.Job(uid="u0", name="sums", state=pb.JOB_STATE_FAILED), "u1", id="one that failed"),
    ],
)
async def test_otherwise_nothing_is_said(
    known: pb.Job | None, created: str, spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await said(known, created, spec, capsys) == ""
