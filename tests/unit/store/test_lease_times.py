"""The inequality of a lease's times: valid times, a daemon's errors about others, and the guarantee that follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config import NodeConfig
from gcore.errors import LeaseLost, StoreUnavailable, UsageError
from gcore.store.session import Session
from gcore.store.types import LeaseTimes
from gcore.testing import FakeClock

NODE = {"node": "n", "home": "h", "etcd": {"endpoints": ["127.0.0.1:1"]}, "slots": ["cpu:0"], "run_root": "r"}


def written(folder: Path, **more: object) -> Path:
    file = folder / "node.json"
    file.write_text(json.dumps({**NODE, **more}))
    return file


@given(st.integers(1, 3600))
def test_default_times_fit_any_lease(ttl: int) -> None:
    assert LeaseTimes.of(ttl).check("here").needed_s < ttl


def test_the_inequality_is_tick_and_two_calls_and_a_retry_and_a_margin() -> None:
    times = LeaseTimes.of(5, tick_s=1.0, call_s=1.0, margin_s=1.0)
    assert times.needed_s == 1.0 + 2 * 1.0 + 0.5 + 1.0
    assert times.check("here") is times


@pytest.mark.parametrize(
    "times",
    [{"lease_tick_s": 3.0}, {"lease_call_s": 2.0}, {"lease_margin_s": 2.0}, {"lease_ttl_s": 2, "lease_call_s": 0.7}],
    ids=["tick", "call", "margin", "lease"],
)
def test_a_daemon_whose_times_do_not_fit_says_so_in_one_sentence_and_does_not_start(
    tmp_path: Path, times: dict[str, float]
) -> None:
    file = written(tmp_path, **times)
    with pytest.raises(
        UsageError, match=r"lease_tick_s \+ 2 x lease_call_s .* would end the lease\. Raise lease_ttl_s"
    ) as said:
        NodeConfig.load(file)
    assert str(said.value).startswith(f"{file}: ")


def test_the_daemon_itself_ends_with_the_sentence_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "controllers.daemon", "--home", str(tmp_path)]
    file = written(tmp_path, lease_call_s=2.5)
    ended = subprocess.run([*command, "--config", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "gcore-controller: " in ended.stderr
    assert "lease_call_s" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_exactly_as_much_as_the_lease_is_too_much() -> None:
    with pytest.raises(UsageError):
        LeaseTimes.of(4, tick_s=1.0, call_s=1.0, margin_s=0.6).check("here")


class SlowStore:
    """A lease on a server of its own clock: each renewal takes its whole time, and one of them is lost."""

    def __init__(self, clock: FakeClock, times: LeaseTimes, lost: int) -> None:
        self.clock, self.times, self.lost = clock, times, lost
        self.ends = clock.monotonic() + times.ttl_s
        self.calls = 0

    async def grant(self, ttl: int) -> int:
        return 1

    async def keep_alive(self, lease: int) -> float:
        self.calls += 1
        if self.calls == self.lost:
            await self.clock.sleep(self.times.call_s)
            raise StoreUnavailable("lost")
        if self.clock.monotonic() >= self.ends:
            raise LeaseLost("ended")
        self.ends = self.clock.monotonic() + self.times.ttl_s
        await self.clock.sleep(self.times.call_s)
        return float(self.times.ttl_s)


@given(
    st.integers(1, 30),
    st.floats(0.01, 0.9),
    st.floats(0.01, 0.9),
    st.integers(1, 4),
)
async def test_a_lease_whose_times_fit_outlives_slow_renewals_and_a_lost_one(
    ttl: int, tick: float, call: float, lost: int
) -> None:
    times = LeaseTimes.of(ttl, tick_s=tick * ttl, call_s=call * ttl, margin_s=0.0)
    if times.needed_s > ttl - 1e-6:  # what is equal but for rounding is too much
        return
    clock = FakeClock()
    store = SlowStore(clock, times, lost)
    session = await Session.open(store, clock=clock, ttl=ttl, interval_s=times.tick_s)  # type: ignore[arg-type]
    import asyncio

    running = asyncio.ensure_future(session.run())
    await clock.advance(ttl * 6.0)
    assert not session.lost.is_set()
    assert session.alive(clock.monotonic())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
