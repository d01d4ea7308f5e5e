"""Fixtures and hooks for all tests: a real etcd, the mark `needs` for system tools, skips that count as failures, patient properties.

No example of a property is judged by how long it took, because machines are shared. What torch draws in a test or a shared
fixture depends on its name alone, not on the tests that ran before it in the same process.
"""

import asyncio
import gc
import os
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from system_tools import LEFT_OUT, closing_line, missing, record, require_all, tool

from gcore.store.etcd import LocalEtcd
from gcore.system.clock import SystemClock

# Each commit is checked with the same examples; long checks, which ask for more (GCORE_EXAMPLES), draw others each time.
EXAMPLES = os.environ.get("GCORE_EXAMPLES")
settings.register_profile("gcore", deadline=None, max_examples=int(EXAMPLES or 25), derandomize=not EXAMPLES)
settings.load_profile("gcore")

# What a shell starts in the background ignores SIGINT, and so would every command that a test means to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The simulator's loops take longer to compile than the small jobs of tests take without; one test compiles them, in another process.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

NEEDS = "needs"
"""The mark of tests that need tools of the machine, and the property of a report that names those that are missing."""
KEPT_FOR_MAKE = os.environ.pop(LEFT_OUT, "")
"""The file in which `make test` collects what its calls of pytest leave out. A pytest that a test starts has no part in it."""


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
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what lives to the end: the tests and all that they import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a test whose tools are not on this machine."""
    absent = missing(tool(name) for mark in item.iter_markers(NEEDS) for name in mark.args)
    if absent:
        item.user_properties.append((NEEDS, [one.name for one in absent]))
        pytest.skip("; ".join(one.advice for one in absent))
    _seed_torch(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Give a shared fixture the same draws whichever test asks for it first, and leave that test its own."""
    torch = sys.modules.get("torch")
    if fixturedef.scope == "function" or torch is None:
        return (yield)
    state = torch.get_rng_state()
    _seed_torch(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]")
    try:
        return (yield)
    finally:
        torch.set_rng_state(state)


def _seed_torch(name: str) -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(zlib.crc32(name.encode()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Say after everything else which tests were left out, or keep it for the closing line of `make test`."""
    yield
    skipped = terminalreporter.stats.get("skipped", ())
    left_out = [names for report in skipped for key, names in report.user_properties if key == NEEDS]
    if left_out and KEPT_FOR_MAKE:
        record(Path(KEPT_FOR_MAKE), left_out)
    elif left_out:
        terminalreporter.write_line(closing_line(left_out))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test is a failed one, if GCORE_REQUIRE_ALL is set."""
    report = yield
    if require_all() and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though GCORE_REQUIRE_ALL is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """So is a module that skips itself."""
    report = yield
    if require_all() and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, though GCORE_REQUIRE_ALL is set: {report.longrepr}"
    return report
