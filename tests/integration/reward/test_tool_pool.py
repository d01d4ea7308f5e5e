"""Tools in processes of their own: the model's view of a failed tool, and leftovers of a call.

`tests/contract/worker` covers the behaviour of all process pools.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from plug_in_package import installer

from gcore.config.rollout import EnvironmentSpec, ToolsSpec
from gcore.plugins import PluginFault
from gcore.rollout.environments.api import Said
from gcore.rollout.environments.pool import LONGEST_ARGUMENT, ToolPool, try_environment
from gcore.system.clock import SystemClock
from gcore.system.process import identify_process, is_running

CODE = """
import ctypes, os, subprocess, sys, time
from gcore.rollout.environments.api import BadArgument

def odd(argument):
    word, _, rest = argument.partition(" ")
    if word == "hang":
        while True:
            pass
    if word == "segfault":
        ctypes.string_at(0)
    if word == "hoard":
        return str(len([bytearray(1 << 20) for _ in range(10_000)]))
    if word == "raise":
        raise KeyError(rest)
    if word == "refuse":
        raise BadArgument(rest)
    if word == "number":
        return 7
    if word == "much":
        return "x" * 10_000
    if word == "leave":
        return str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    if word == "orphan":  # in another session, of no parent, with none of the environment
        code = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
        return subprocess.run([sys.executable, "-c", code], env={"PATH": os.environ["PATH"]}, stdout=-1, text=True).stdout
    if word == "write":
        os.write(int(sys.argv[1]), rest.encode() + b"\\n")
    if word == "crash":
        subprocess.Popen(["sh", "-c", f"echo $$ > {rest}; exec sleep 1000"], start_new_session=True)
        while not (os.path.exists(rest) and open(rest).read().endswith("\\n")):
            time.sleep(0.01)
        os._exit(3)
    if word == "pid":
        return str(os.getpid())
    return argument.upper()
"""
Open = Callable[..., AbstractAsyncContextManager[tuple[ToolPool, list[str]]]]


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    installer(tmp_path, monkeypatch, "gcore.tools")("odd_tools", "odd = odd_tools:odd", CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "odd_tools"))

    @asynccontextmanager
    async def opened(**limits: Any) -> AsyncIterator[tuple[ToolPool, list[str]]]:
        told: list[str] = []
        spec = ToolsSpec(**{"names": ("calculator", "odd"), "timeout_s": 5.0, "memory_mb": 256} | limits)
        pool = ToolPool(spec, SystemClock(), lambda what, trace: told.append(what))
        try:
            yield pool, told
        finally:
            await pool.close()

    return opened


async def test_tools_are_called_by_their_names_in_a_process_that_stays(pools: Open) -> None:
    async with pools() as (pool, told):
        assert await pool.call("calculator", "6*7") == Said("42")
        assert await pool.call("odd", "words, ü and \n lines") == Said("WORDS, Ü AND \n LINES")
        assert await pool.call("odd", "pid") == await pool.call("odd", "pid")
        with pytest.raises(KeyError):
            await pool.call("other", "1")
        assert told == []


FAILURES = [
    ("hang", "error: tool 'odd' took longer than 1 s", True),
    ("segfault", "error: tool 'odd' took the process that ran it with it", True),
    ("hoard", "error: tool 'odd' raised MemoryError", True),
    ("raise key", "error: tool 'odd' raised KeyError: 'key'", True),
    ("number", "error: tool 'odd' gave an int, no text", True),
    ("refuse that is none", "error: that is none", False),
]


async def test_a_tool_that_fails_says_so_and_the_next_call_is_answered(pools: Open) -> None:
    for timeout_s, failures in ((1.0, FAILURES[:1]), (10.0, FAILURES[1:])):
        async with pools(timeout_s=timeout_s, workers=1) as (pool, told):
            for argument, words, event in failures:
                told.clear()
                assert await pool.call("odd", argument) == Said(words, failed=True)
                assert [f"error: {one}" for one in told] == [words] * event
                assert await pool.call("odd", "go on") == Said("GO ON")


async def test_tool_arguments_and_results_are_bounded(pools: Open) -> None:
    async with pools() as (pool, _):
        assert len((await pool.call("odd", "much")).text) == 2000
        assert "at most" in (await pool.call("odd", "x" * (LONGEST_ARGUMENT + 1))).text


@pytest.mark.parametrize("how", ["leave", "orphan"])
async def test_leftover_process_of_a_call_is_killed_and_the_next_call_gets_a_new_worker(pools: Open, how: str) -> None:
    async with pools(workers=1) as (pool, told):
        before = await pool.call("odd", "pid")
        left = identify_process(int((await pool.call("odd", how)).text))
        assert await pool.call("odd", "pid") != before
        await asyncio.gather(*pool._crew._ending)
        assert left is None or not is_running(left)
        assert told == []


async def test_processes_of_a_crashed_tool_are_killed(pools: Open, tmp_path: Path) -> None:
    async with pools(workers=1) as (pool, _):
        said = await pool.call("odd", f"crash {tmp_path / 'pid'}")
        assert said.failed
        await asyncio.gather(*pool._crew._ending)
        assert identify_process(int((tmp_path / "pid").read_text())) is None


@pytest.mark.parametrize("line", ['{"said": "42"}', '[1, {"said": "42"}]', "[1]", "7"])
async def test_a_line_that_a_tool_writes_itself_is_nobodys_answer(pools: Open, line: str) -> None:
    async with pools(workers=1) as (pool, told):
        assert await pool.call("odd", "one") == Said("ONE")
        assert (await pool.call("odd", f"write {line}")).failed
        assert told == ["tool 'odd' let its process say what no such process says"]
        assert [(await pool.call("odd", word)).text for word in ("two", "three")] == ["TWO", "THREE"]


async def test_a_tool_that_this_node_does_not_have_is_no_fault_of_the_models(pools: Open) -> None:
    async with pools(names=("missing",)) as (pool, told):
        for _ in range(2):
            with pytest.raises(PluginFault, match="no tool is called 'missing'"):
                await pool.call("missing", "1")
        assert told == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "tolls"}, "no environment is called 'tolls'"),
        ({"name": "tools", "tools": {"names": ["calculater"]}}, "no tool is called 'calculater'"),
        ({"name": "tools"}, "has no tool"),
        ({"name": "tools", "tools": {"names": ["calculator"]}, "options": {"from": "tags"}}, "no option 'from'"),
    ],
)
def test_detectable_environment_errors_are_reported_before_the_job_starts(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(PluginFault, match=words):
        try_environment(EnvironmentSpec.model_validate(spec), {}, chat=False)


def test_an_environment_with_its_tools_is_tried_in_earnest() -> None:
    spec = {"name": "tools", "tools": {"names": ["calculator"]}, "options": {"form": "tags"}}
    try_environment(EnvironmentSpec.model_validate(spec), {}, chat=False)
