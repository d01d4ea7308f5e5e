"""Messages to systemd: socket, content and time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.daemon.daemon import ServiceNotifier
from gcore.system.daemon import ServiceManager, clear_environment
from gcore.testing import FakeClock


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


def heard(listening: socket.socket) -> list[str]:
    said = []
    while True:
        try:
            said.append(listening.recv(4096).decode())
        except BlockingIOError:
            return said


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({}, ServiceManager(), id="not under systemd"),
        pytest.param({"NOTIFY_SOCKET": "/run/n"}, ServiceManager("/run/n"), id="no watchdog"),
        pytest.param({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "3000000"}, ServiceManager("@n", 3.0), id="watchdog"),
        pytest.param(
            {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "3", "WATCHDOG_PID": "7"}, ServiceManager("/n", 3e-6), id="mine"
        ),
        pytest.param(
            {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "3", "WATCHDOG_PID": "8"}, ServiceManager("/n"), id="another's"
        ),
        pytest.param({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "soon"}, ServiceManager("/n"), id="no number"),
        pytest.param({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "0"}, ServiceManager("/n"), id="never"),
        pytest.param({"NOTIFY_SOCKET": "vsock:2:1"}, ServiceManager(), id="another kind of socket"),
        pytest.param({"WATCHDOG_USEC": "3000000"}, ServiceManager(), id="nobody to tell"),
    ],
)
def test_service_manager_comes_from_the_environment(environment: Mapping[str, str], expected: ServiceManager) -> None:
    assert ServiceManager.from_environment(environment, 7) == expected


@given(st.dictionaries(st.sampled_from(["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"]), st.text(max_size=30)))
def test_no_environment_does_harm(environment: dict[str, str]) -> None:
    found = ServiceManager.from_environment(environment, 7)
    assert found.watchdog_s is None or found.watchdog_s > 0


def test_a_message_is_one_datagram_and_a_status_is_one_line(tmp_path: Path, manager: socket.socket) -> None:
    ServiceManager(str(tmp_path / "notify")).tell("READY=1", "STATUS=one\nSTOPPING=1")
    assert heard(manager) == ["READY=1\nSTATUS=one STOPPING=1"]


def test_a_name_without_a_file_is_reached_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        name = f"gcore-test-{os.getpid()}"
        listening.bind(f"\0{name}")
        listening.setblocking(False)
        ServiceManager(f"@{name}").tell("READY=1")
        assert heard(listening) == ["READY=1"]


def test_a_manager_that_is_gone_or_does_not_read_is_not_waited_for(tmp_path: Path, manager: socket.socket) -> None:
    ServiceManager(str(tmp_path / "nobody")).tell("READY=1")
    for _ in range(10_000):
        ServiceManager(str(tmp_path / "notify")).tell("STATUS=" + "x" * 300)
    assert 0 < len(heard(manager)) < 10_000


def test_workers_do_not_inherit_the_line() -> None:
    environment = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    clear_environment(environment)
    assert environment == {"PATH": "/bin"}


class Told:
    """A daemon's `ServiceNotifier`, and what its health service would answer."""

    def __init__(self, folder: Path, watchdog_s: float | None = None) -> None:
        self.health: list[bool] = []
        self.clock = FakeClock()
        self.notifying = ServiceNotifier(ServiceManager(str(folder / "notify"), watchdog_s), self._set, self.clock)

    async def _set(self, ready: bool) -> None:
        self.health.append(ready)


async def test_ready_is_said_once_and_health_says_each_change(tmp_path: Path, manager: socket.socket) -> None:
    told = Told(tmp_path)
    for ready, status in ((False, "waits"), (True, "ready"), (False, "waits again"), (True, "ready again")):
        await told.notifying.say(ready, status)
    assert told.health == [False, True, False, True]
    assert heard(manager) == ["STATUS=waits", "READY=1\nSTATUS=ready", "STATUS=waits again", "STATUS=ready again"]


async def test_a_daemon_that_stops_is_never_ready_again(tmp_path: Path, manager: socket.socket) -> None:
    told = Told(tmp_path)
    await told.notifying.say(True, "ready")
    await told.notifying.stopping("handing over 1 jobs")
    await told.notifying.say(True, "ready")
    told.notifying.reloading()
    told.notifying.reloaded("x")
    assert told.health == [True, False, False]
    assert heard(manager) == ["READY=1\nSTATUS=ready", "STOPPING=1\nSTATUS=handing over 1 jobs"]


async def test_a_reload_is_told_with_its_time_and_its_end_but_not_before_ready(
    tmp_path: Path, manager: socket.socket
) -> None:
    told = Told(tmp_path)
    told.notifying.reloading()
    told.notifying.reloaded("too early")
    await told.notifying.say(True, "ready")
    await told.clock.advance(12.5)
    told.notifying.reloading()
    told.notifying.reloaded("reloaded its files")
    micros = int(told.clock.monotonic() * 1e6)
    assert heard(manager) == [
        "READY=1\nSTATUS=ready",
        f"RELOADING=1\nMONOTONIC_USEC={micros}",
        "READY=1\nSTATUS=reloaded its files",
    ]


async def test_the_watchdog_is_fed_thrice_within_its_limit(tmp_path: Path, manager: socket.socket) -> None:
    import asyncio

    told = Told(tmp_path, watchdog_s=3.0)
    feeding = asyncio.ensure_future(told.notifying.feed_watchdog())
    await told.clock.advance(2.5)
    assert heard(manager) == ["WATCHDOG=1"] * 3
    feeding.cancel()
    await Told(tmp_path).notifying.feed_watchdog()
    assert heard(manager) == []
