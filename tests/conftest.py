"""For all tests: a real etcd, skips that count as failures where everything can be installed, patient properties.

No example of a property is judged by how long it took, because machines are shared.
"""

import asyncio
import os
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings

from gcore.clock import SystemClock
from gcore.store.launcher import LocalEtcd

settings.register_profile("gcore", deadline=None, max_examples=int(os.environ.get("GCORE_EXAMPLES", "25")))
settings.load_profile("gcore")

# What a shell starts in the background ignores SIGINT, and so would every command that a test means to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The simulator's loops take longer to compile than the small jobs of tests take without; one test compiles them, in another process.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

REQUIRE_ALL = os.environ.get("GCORE_REQUIRE_ALL", "") not in ("", "0")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEtcd]:
    """One etcd for all tests of this process (each xdist worker is one). A test keeps to a prefix of its own."""
    folder: Path = tmp_path_factory.mktemp("etcd")
    # In a thread, because the first test that asks for it may already run in an event loop.
    with ThreadPoolExecutor(1) as thread:
        starting = LocalEtcd.start(folder / "data", log_file=folder / "log", clock=SystemClock())
        local = thread.submit(asyncio.run, starting).result()
        try:
            yield local
        finally:
            thread.submit(asyncio.run, local.stop()).result()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test is a failed one, if GCORE_REQUIRE_ALL is set."""
    report = yield
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though GCORE_REQUIRE_ALL is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """So is a module that skips itself."""
    report = yield
    if REQUIRE_ALL and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, though GCORE_REQUIRE_ALL is set: {report.longrepr}"
    return report
