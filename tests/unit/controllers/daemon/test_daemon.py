"""The shutdown of a daemon waits for its tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from controllers.daemon.daemon import LEAVE_WITHIN_S, Daemon
from controllers.daemon.keeper import STOPPING
from gcore.config import NodeConfig
from gcore.store.reference import StoreRef
from gcore.testing import FakeClock


class LeavingDaemon(Daemon):
    """With one job, which has not been handed over."""

    def __init__(self, home: Path) -> None:
        self.time = FakeClock()
        config = NodeConfig(
            node="node-0",
            home=str(home),
            etcd=StoreRef(endpoints=("nowhere",)),
            slots=("cpu:0",),
            run_root=str(home / "runs"),
            local_cluster=True,
        )
        super().__init__(config, self.time)
        self.job = SimpleNamespace(leave=lambda: None, has_handed_over=False, is_ending=True)
        self._own.runners["u"] = self.job  # type: ignore[assignment]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / STOPPING).touch()
    return tmp_path


async def test_a_cluster_that_is_ended_waits_for_the_last_step_of_an_ended_job(home: Path) -> None:
    daemon = LeavingDaemon(home)
    leaving = asyncio.create_task(daemon.depart())
    await daemon.time.advance(1.0)
    assert not leaving.done()
    daemon.job.is_ending = False
    await daemon.time.advance(1.0)
    assert leaving.done()


async def test_it_waits_no_longer_than_whoever_ends_it(home: Path) -> None:
    daemon = LeavingDaemon(home)
    leaving = asyncio.create_task(daemon.depart())
    await daemon.time.advance(LEAVE_WITHIN_S + 1.0)
    assert leaving.done()
