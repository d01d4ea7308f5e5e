"""Staged weights are looked up off the event loop: a folder that hangs or fails is reported and ends nothing."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import running_job

from controllers.changes import ChangeSignal
from controllers.job import effects as job_effects
from controllers.storage.run_folder import StagedWeightsMonitor, staged_versions
from gcore.ledger.retention import SweptKeys
from gcore.ledger.transactions import TxnOutcome
from gcore.models.layout import FIRST
from gcore.system.clock import SystemClock
from gcore.types import Version

NEXT = Version(0, 1)


class Folder:
    """One that answers when the test lets it, with what the test says."""

    def __init__(self) -> None:
        self.there: frozenset[Version] = frozenset({FIRST})
        self.error: OSError | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.looks = 0

    def look(self, folder: Path) -> frozenset[Version]:
        self.looks += 1
        self.answers.wait()
        if self.error is not None:
            raise self.error
        return self.there


class Job:
    """What looks, what it wants, and what it says."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.changes, self.wanted = folder, ChangeSignal(), FIRST
        self.told: list[str] = []
        self.staged = StagedWeightsMonitor(
            Path("/mnt/runs/j"),
            "b",
            lambda: self.wanted,
            self.changes,
            self._hold,
            self.changes.notify,
            SystemClock(),
            folder.look,
            answer_s=0.0,
        )

    def _hold(self, topic: str, sentence: str) -> None:
        if (self.told or [""])[-1] != sentence:
            self.told.append(sentence)
            self.changes.notify()

    def want(self, version: Version) -> None:
        self.wanted = version
        self.changes.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        await asyncio.wait_for(self.changes.until(condition), 60)


async def test_a_folder_that_hangs_holds_nobody_up_and_is_told(tmp_path: Path) -> None:
    folder = Folder()
    job = Job(folder)
    running = asyncio.create_task(job.staged.run())
    try:
        folder.answers.clear()
        job.want(NEXT)
        await job.until(lambda: bool(job.told))  # which could not be reached if the event loop were held up
        assert job.told[0].startswith(
            "b: the run's folder /mnt/runs/j has not responded for 0 s; engines on this node get no new"
        )
        assert folder.looks == 1, "one thread hangs, not one for each look"
        assert job.staged.versions == {FIRST}
        folder.there = frozenset({FIRST, NEXT})
        folder.answers.set()
        await job.until(lambda: NEXT in job.staged.versions)
        assert job.told[-1] == ""
    finally:
        folder.answers.set()
        running.cancel()


async def test_a_folder_that_fails_is_told_and_looked_at_again() -> None:
    folder = Folder()
    job = Job(folder)
    running = asyncio.create_task(job.staged.run())
    try:
        folder.error = OSError(errno.ESTALE, "Stale file handle")
        job.want(NEXT)
        await job.until(lambda: any("cannot be read (Stale file handle)" in one for one in job.told))
        folder.there, folder.error = frozenset({NEXT}), None
        await job.until(lambda: NEXT in job.staged.versions)
    finally:
        running.cancel()


async def test_known_weights_are_not_looked_up() -> None:
    folder = Folder()
    job = Job(folder)
    running = asyncio.create_task(job.staged.run())
    for _ in range(5):
        job.changes.notify()
        await asyncio.sleep(0)
    assert folder.looks == 0
    running.cancel()


def test_the_versions_are_those_of_whole_folders(tmp_path: Path) -> None:
    for name in ("0-3", "1-4", ".1-5.w.tmp", "notes"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    assert staged_versions(tmp_path) == {FIRST, Version(0, 3), Version(1, 4)}


@pytest.mark.parametrize("deed", ["retain_checkpoints", "sweep_keys"])
async def test_a_folder_that_cannot_be_listed_is_told_and_nothing_is_forgotten(
    deed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(folder: Path) -> frozenset[Version]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(job_effects, "versions_in", stale)
    told: dict[str, str] = {}
    effects: Any = SimpleNamespace(replicator=None, run_dir=Path("run"), tell=told.__setitem__)
    action: Any = SimpleNamespace(kept=(), swept=SweptKeys())
    done = await getattr(job_effects, deed)(action, running_job(), effects)
    assert done.outcome is TxnOutcome.UNKNOWN
    assert "cannot be read (Stale file handle)" in told["checkpoints"]
