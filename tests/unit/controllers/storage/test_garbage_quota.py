"""A run's disk quota: how it stands, what is told when, and that the job is paused and not ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.storage.garbage import (
    BYTES_PER_GIB,
    MEASURE_S,
    MOST_NODES,
    DiskQuota,
    DiskUsage,
    QuotaLevel,
    disk_bytes,
    measure_disk_usage,
)
from gcore.errors import StoreUnavailable
from gcore.testing import FakeClock

RUN = Path("/runs/a-1")


@given(st.integers(0, 1 << 50), st.floats(0.001, 1e6))
def test_nearly_full_comes_before_over_and_each_says_what_to_do(taken: int, quota: float) -> None:
    found = measure_disk_usage(taken, quota, RUN)
    if taken > quota * BYTES_PER_GIB:
        assert found.level is QuotaLevel.OVER
        assert "paused" in found.sentence
        assert "gcore resume" in found.sentence
    elif taken >= 0.9 * quota * BYTES_PER_GIB:
        assert found.level is QuotaLevel.NEARLY
        assert "no more samples" in found.sentence
    else:
        assert found == DiskUsage(QuotaLevel.FREE)
    assert not found.sentence or "limits.disk_gib" in found.sentence


class Measured:
    """A quota of 10 GiB over a folder that takes what is said next."""

    def __init__(self, *gib: float, members: int = 1) -> None:
        self.sizes = list(gib)
        self.told: list[QuotaLevel] = []
        self.said: list[str] = []
        self.pauses = 0
        self.store_is_away = False
        self.clock = FakeClock()
        self.quota = DiskQuota(RUN, 10.0, lambda: members, self._show, self._pause, self.clock, self._measure)

    def _measure(self, folder: Path) -> int:
        assert folder == RUN
        return int(self.sizes.pop(0) * BYTES_PER_GIB)

    def _show(self, found: DiskUsage) -> None:
        self.told.append(found.level)
        self.said.append(found.sentence)

    async def _pause(self) -> None:
        if self.store_is_away:
            raise StoreUnavailable("away")
        self.pauses += 1

    async def looks(self) -> None:
        while self.sizes:
            await self.quota.look()


async def test_each_level_is_told_once_and_only_beyond_the_quota_is_the_job_paused() -> None:
    run = Measured(1, 2, 9.5, 9.6, 10.5, 11, 3)
    await run.looks()
    assert run.told == [QuotaLevel.NEARLY, QuotaLevel.OVER, QuotaLevel.FREE]
    assert run.said[-1].endswith("has room again")
    assert run.pauses == 2


async def test_a_store_that_is_away_is_asked_again_at_the_next_look() -> None:
    run = Measured(11, 11)
    run.store_is_away = True
    await run.quota.look()
    run.store_is_away = False
    await run.quota.look()
    assert (run.told, run.pauses) == ([QuotaLevel.OVER], 1)


@pytest.mark.parametrize(("members", "times"), [(0, 1), (1, 1), (4, 4), (500, MOST_NODES)])
def test_the_more_nodes_measure_the_more_rarely_each_does(members: int, times: int) -> None:
    assert Measured(members=members).quota.rest_s == MEASURE_S * times


def test_everything_below_the_folder_counts_hidden_files_too_and_links_are_not_followed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / "checkpoints" / "0-1").mkdir(parents=True)
    elsewhere.write_bytes(b"x" * 10_000_000)
    (run / "checkpoints" / "0-1" / "model").write_bytes(b"x" * 100_000)
    (run / ".draft").write_bytes(b"x" * 50_000)
    (run / "link").symlink_to(elsewhere)
    assert 150_000 <= disk_bytes(run) < 300_000
    assert disk_bytes(tmp_path / "none") == 0
