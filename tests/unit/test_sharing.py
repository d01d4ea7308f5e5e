"""A cluster that `gcore run` has started, and others who use it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controllers.cli import sharing
from controllers.cli.sharing import following
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import Unreachable, UsageError
from gcore.testing import FakeClock


def quiet(_: str) -> None:
    """Says nothing."""


def test_whoever_is_alone_may_end_the_cluster_and_whoever_is_not_may_not(tmp_path: Path) -> None:
    home, clock = tmp_path / "home", FakeClock()
    with following(home, clock, say=quiet) as first:
        with following(home, clock, say=quiet):
            assert not first.is_alone()
        assert first.is_alone()


def test_the_last_of_several_ends_it(tmp_path: Path) -> None:
    clock = FakeClock()
    with following(tmp_path, clock, say=quiet) as second:
        with following(tmp_path, clock, say=quiet) as first:
            assert not first.is_alone()
        assert second.is_alone()


class Jobs:
    """A cluster's answer."""

    def __init__(self, *jobs: pb.Job) -> None:
        self.jobs = list(jobs)

    def __call__(self, *_: Any, **__: Any) -> Jobs:
        return self

    async def __aenter__(self) -> Jobs:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def list_jobs(self) -> list[pb.Job]:
        """All of them."""
        if not self.jobs:
            raise Unreachable("nobody answers")
        return self.jobs


def job(name: str, created: float, state: int = pb.JOB_STATE_RUNNING) -> pb.Job:
    return pb.Job(uid=f"u-{name}", name=name, state=state, created=created, spec_json="{}")


@pytest.mark.parametrize(
    ("jobs", "others"),
    [
        pytest.param([job("own", 2.0)], (), id="its own"),
        pytest.param([job("own", 2.0), job("other", 3.0)], ("other",), id="one handed in since"),
        pytest.param([job("own", 2.0), job("other", -3.0)], (), id="one that was interrupted before"),
        pytest.param([job("own", 2.0), job("other", 3.0, pb.JOB_STATE_FAILED)], (), id="one that has ended"),
        pytest.param([], (), id="nobody answers"),
    ],
)
def test_a_job_that_somebody_handed_in_meanwhile_keeps_the_cluster_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[pb.Job], others: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sharing, "JobsClient", Jobs(*jobs))
    monkeypatch.setattr(sharing, "find_addresses", lambda *_: ("h:1",))
    clock = FakeClock()
    with following(tmp_path, clock, say=quiet) as share:
        shift = share._began
        for one in jobs:
            one.created += shift
        with asyncio.Runner() as runner:
            assert share.others(tmp_path, "u-own", runner) == others


def test_a_home_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write there"), following(tmp_path / "file", FakeClock(), say=quiet):
        pass
