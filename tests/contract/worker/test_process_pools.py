"""Pools of processes that run third-party code: a call that hangs, crashes or exhausts memory costs only its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import process_pools
import pytest
from plug_in_package import installer
from process_pools import CODE, POOLS, Limits, ProcessPool

from gcore.errors import GcoreError
from gcore.plugins import PluginFault
from gcore.system.process import CannotStart, identify_process, is_running, wait_process_ended
from gcore.worker.sandbox.process import SandboxProcess

Make = Callable[..., ProcessPool]
Open = Callable[..., AbstractAsyncContextManager[ProcessPool]]


@pytest.fixture(params=sorted(POOLS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def made(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A pool with some foreign code, of which nothing runs yet."""

    def make(code: str = CODE, **limits: Any) -> ProcessPool:
        pool = POOLS[kind](Limits(**limits))
        installer(tmp_path, monkeypatch, pool.group)("odd_code", f"odd = odd_code:{pool.function}", code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "odd_code"))
        return pool

    return make


@pytest.fixture
def opened(made: Make) -> Open:
    """A warm pool; when it is closed, none of its processes is left."""

    @asynccontextmanager
    async def open_pool(**limits: Any) -> AsyncIterator[ProcessPool]:
        pool = made(**limits)
        await pool.warm()
        running = [identify_process(process.pid) for process in pool.processes]
        try:
            yield pool
        finally:
            running += [identify_process(process.pid) for process in pool.processes]
            await pool.close()
        assert not any(process is not None and is_running(process) for process in running)

    return open_pool


async def test_calls_are_answered_by_one_other_process_that_stays(opened: Open) -> None:
    async with opened() as pool:
        (process,) = pool.processes
        assert [await pool.ask(text) for text in ("a", "pid", "bb", "pid")] == [1, process.pid, 2, process.pid]
        assert process.pid != os.getpid()


async def test_texts_that_json_or_a_line_could_stumble_over_arrive_as_they_are(opened: Open) -> None:
    async with opened() as pool:
        for text in ('"\n\r\u2028\x00\\', "\ud800 half a pair", "é" * 60_000, ""):
            assert await pool.ask(text) == len(text)


async def test_a_call_that_hangs_fails_alone_and_its_process_is_replaced(opened: Open) -> None:
    async with opened(timeout_s=1.0) as pool:
        (before,) = pool.processes
        identity = identify_process(before.pid)
        one, hung, other = await asyncio.gather(pool.ask("a"), pool.ask("hang"), pool.ask("dddd"))
        assert (one, other) == (1, 4)
        assert str(hung).startswith(pool.too_long)
        assert before not in pool.processes
        assert identity is not None
        assert await asyncio.to_thread(wait_process_ended, identity, 30.0)


async def test_a_call_that_hangs_does_not_keep_other_processes_from_answering(opened: Open) -> None:
    async with opened(workers=2, timeout_s=3.0) as pool:
        await pool.ask("a")
        hanging = asyncio.create_task(pool.ask("hang"))
        assert [await pool.ask("a") for _ in range(20)] == [1] * 20
        assert not hanging.done()
        assert "took longer than 3 s" in str(await hanging)


async def test_the_event_loop_goes_on_while_foreign_code_computes(opened: Open) -> None:
    async with opened(timeout_s=1.0) as pool:
        await pool.ask("a")
        turns = 0
        hanging = asyncio.create_task(pool.ask("hang"))
        while not hanging.done():
            turns += 1
            await asyncio.sleep(0.01)
        assert turns > 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("segfault", "{0.killed}"),
        ("exit", "{0.exited}"),
        ("hoard", "'odd' raised MemoryError"),
        ("raise one", "'odd' raised ValueError: one"),
    ],
)
async def test_a_call_that_kills_its_process_or_raises_is_blamed_and_fails_alone(
    opened: Open, text: str, words: str
) -> None:
    async with opened(memory_mb=256) as pool:
        one, bad, other = await asyncio.gather(pool.ask("a"), pool.ask(text), pool.ask("ccc"))
        assert (one, other) == (1, 3)
        assert words.format(pool) in str(bad)
        assert await pool.ask("bb") == 2


async def test_output_of_third_party_code_is_no_answer(opened: Open) -> None:
    async with opened() as pool:
        assert await pool.ask("print [1,[]]") == len("print [1,[]]")


async def test_a_process_that_foreign_code_forked_does_not_answer_in_its_place(opened: Open) -> None:
    async with opened() as pool:
        assert [await pool.ask(text) for text in ("fork", "bb", "fork", "ccc")] == [1, 2, 1, 3]


async def test_the_answer_to_a_caller_that_has_gone_is_not_the_next_ones(opened: Open) -> None:
    async with opened() as pool:
        gone = asyncio.create_task(pool.ask("sleep 0.5"))
        await asyncio.sleep(0.2)
        gone.cancel()
        assert await pool.ask("mine") == 4


async def test_a_call_whose_caller_has_gone_before_its_turn_is_not_made(opened: Open, tmp_path: Path) -> None:
    async with opened() as pool:
        first = asyncio.create_task(pool.ask("sleep 0.3"))
        gone = asyncio.create_task(pool.ask(f"touch {tmp_path / 'seen'}"))
        await asyncio.sleep(0.1)
        gone.cancel()
        await first
        assert await pool.ask("a") == 1
        assert not (tmp_path / "seen").exists()


async def test_many_calls_are_spread_over_the_processes_and_no_more_are_started(opened: Open) -> None:
    async with opened(workers=2) as pool:
        pids = set(await asyncio.gather(*(pool.ask("pid") for _ in range(200))))
        assert pids == {process.pid for process in pool.processes}
        assert len(pids) == 2


async def test_each_caller_gets_its_own_answer_whichever_comes_first(opened: Open) -> None:
    async with opened(workers=2) as pool:
        texts = ["sleep 0.3", *("x" * n for n in range(1, 10)), "sleep 0.20", *("y" * n for n in range(20, 30))]
        assert await asyncio.gather(*map(pool.ask, texts)) == [len(text) for text in texts]


async def test_a_process_that_is_killed_from_outside_is_replaced(opened: Open) -> None:
    async with opened() as pool:
        (process,) = pool.processes
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while not process.has_ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await pool.ask("a") == 1
        assert process not in pool.processes


async def test_a_process_that_cannot_be_replaced_is_waited_for_and_it_is_told_why(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as pool:
        for wait in ("reward.pool.WAIT_S", "worker.sandbox.pool.WAIT_S", "worker.sandbox.pool.START_AGAIN_S"):
            monkeypatch.setattr(f"gcore.{wait}", 0.01)
        start, lacking = SandboxProcess.of, True

        async def refused(*arguments: Any) -> SandboxProcess:
            if lacking:
                raise CannotStart("no memory")
            return await start(*arguments)

        monkeypatch.setattr(SandboxProcess, "of", refused)
        assert await pool.ask("a") == 1
        os.kill(pool.processes[0].pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while not pool.processes[0].has_ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        asked = [asyncio.create_task(pool.ask(text)) for text in ("a", "bb")]
        async with asyncio.timeout(10):
            while "(no memory)" not in pool.status.what:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert pool.status.what.startswith("2 responses wait ")
        lacking = False
        assert await asyncio.gather(*asked) == [1, 2]
        assert "no memory" not in pool.status.what


async def test_close_waits_until_what_foreign_code_started_has_ended(opened: Open) -> None:
    async with opened() as pool:
        left = identify_process(int(await pool.ask("leave")))
        assert left is not None
    assert not is_running(left)


async def test_a_caller_that_waits_when_the_pool_is_closed_is_told(opened: Open) -> None:
    async with opened() as pool:
        asked = asyncio.create_task(pool.ask("sleep 60"))
        await asyncio.wait({asked}, timeout=0.1)
    assert pool.when_closed in str(await asked)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        pytest.param("import json\njson.loads('{')\n", PluginFault, "JSONDecodeError", id="raises at import"),
        pytest.param("", PluginFault, "has no attribute '{0.function}'", id="lacks the function"),
        pytest.param(
            "import os\nos._exit(7)\n", CannotStart, "ended by itself with exit code 7", id="ends the process"
        ),
        pytest.param(
            "import time\ntime.sleep(60)\n",
            PluginFault,
            r"\.start_timeout_s: loading the \w+ took longer than 2 s",
            id="takes too long",
        ),
    ],
)
async def test_foreign_code_that_cannot_be_had_is_told_before_anything_is_asked(
    made: Make, code: str, error: type[GcoreError], words: str
) -> None:
    pool = made(code, workers=2, start_timeout_s=2.0 if "sleep" in code else 60.0)
    with pytest.raises(error, match=words.format(pool)) as caught:
        await pool.warm()
    assert pool.processes == ()
    if code.startswith("import json"):
        assert isinstance(caught.value, PluginFault)
        assert "odd_code.py" in caught.value.trace
    await pool.close()


async def test_a_name_that_no_package_provides_is_told_before_anything_is_asked(made: Make) -> None:
    pool = made(name="missing")
    with pytest.raises(PluginFault, match="is called 'missing'"):
        await pool.warm()
    await pool.close()


async def test_warming_that_is_given_up_leaves_no_process(made: Make, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pids")
    tell = f"import os, time\nwith open({str(tmp_path / 'pids')!r}, 'w') as f:\n    f.write(f'{{os.getpid()}} ')\ntime.sleep(60)\n"
    pool = made(tell, workers=2)
    warming = asyncio.create_task(pool.warm())
    pids: set[int] = set()
    while len(pids) < pool.warmed:
        pids |= {int(word) for word in (await asyncio.to_thread((tmp_path / "pids").read_text)).split()}
    warming.cancel()
    await asyncio.wait({warming})
    assert not any(identify_process(pid) for pid in pids)


def test_processes_and_what_they_started_die_with_the_controller(
    kind: str, made: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made()
    monkeypatch.setenv("PYTHONPATH", str(Path(process_pools.__file__).parent), prepend=os.pathsep)
    program = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from process_pools import POOLS, Limits\n"
        "async def main(kept):\n"
        f"    pool = POOLS[{kind!r}](Limits(timeout_s=60.0))\n"
        "    asked = asyncio.create_task(pool.ask(f'keep {kept}'))\n"
        "    while not (kept.exists() and kept.read_text().endswith('\\n')):\n"
        "        await asyncio.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main(Path(sys.argv[1])))\n"
    )
    kept = tmp_path / "kept"
    subprocess.run([sys.executable, "-c", program, kept], check=False, timeout=60)
    for pid in kept.read_text().split():
        left = identify_process(int(pid))
        assert left is None or wait_process_ended(left, 30.0)
