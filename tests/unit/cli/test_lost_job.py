"""The message of `gcore run` about a followed job that the store has lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from controllers.cli.commands.run import record_job
from controllers.cli.view.screens import choose_screen
from controllers.cli.view.state import JobSnapshot
from controllers.cli.view.summary import describe_finished_run
from gcore.api.rpc import Refusal
from gcore.errors import Unreachable, UsageError
from gcore.testing import FakeClock


class LosingClient:
    """Refuses every call, for `reason`."""

    def __init__(self, reason: str) -> None:
        self.error = UsageError("there is no job '1a2b'")
        self.error.refusal = Refusal(grpc.StatusCode.NOT_FOUND, "there is no job '1a2b'", reason)

    async def follow(self, job: str) -> AsyncGenerator[Any, None]:
        raise self.error
        yield

    async def get_job(self, job: str) -> Any:
        raise self.error

    async def audit_job(self, job: str) -> Any:
        raise self.error


def job_in(folder: Path) -> JobSnapshot:
    run_dir = folder / "runs" / "sums-1a2b"
    for name in ("0-2", "0-4"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
    return JobSnapshot(name="sums", uid="1a2b", state="RUNNING", run_dir=str(run_dir))


async def test_a_job_that_the_store_has_lost_is_summed_up_as_failed_and_nothing_is_certified(tmp_path: Path) -> None:
    clock, job = FakeClock(), job_in(tmp_path)
    screen = choose_screen(Console(quiet=True), clock, plain=True)
    summary = await record_job(LosingClient("JOB_NOT_FOUND"), job, screen, clock, begun=0.0)  # type: ignore[arg-type]
    newest = f"{job.run_dir}/checkpoints/0-4"
    assert (summary.state, summary.succeeded, summary.checkpoint) == ("FAILED", False, newest)
    assert summary.reason.startswith("the store no longer has the job: there is no job '1a2b'")
    assert f"set model.path to a copy of {newest} without exp_avg* files" in summary.reason
    assert summary.audit == ["the audit failed: there is no job '1a2b'"]
    # Afterwards no command says that the job goes on.
    told = describe_finished_run(tmp_path, "sums", Unreachable("no cluster is up here"))
    assert (told["uid"], told["checkpoint"]) == ("1a2b", newest)


async def test_another_refusal_ends_the_command_as_before(tmp_path: Path) -> None:
    clock = FakeClock()
    screen = choose_screen(Console(quiet=True), clock, plain=True)
    with pytest.raises(UsageError):
        await record_job(LosingClient("BAD_FIELDS"), job_in(tmp_path), screen, clock, begun=0.0)  # type: ignore[arg-type]


def test_finished_run_without_its_etcd_is_not_described_as_resumable(tmp_path: Path) -> None:
    job_in(tmp_path)
    with pytest.raises(Unreachable, match=r"etcd, which no longer exists.*start a new job"):
        describe_finished_run(tmp_path, "sums", Unreachable("no cluster is up here"))
    (tmp_path / "etcd").mkdir()
    with pytest.raises(Unreachable, match="Continue it with `gcore up`"):
        describe_finished_run(tmp_path, "sums", Unreachable("no cluster is up here"))
