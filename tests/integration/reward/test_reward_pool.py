"""Rewards in processes of their own: what hangs, dies or is wrong costs its own response, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gcore.config.reward import RewardSpec, ScoringSpec
from gcore.errors import GcoreError
from gcore.plugins import PluginFault
from gcore.reward.api import Response, RewardError, RewardResult
from gcore.reward.pool import RewardPool
from gcore.system.clock import SystemClock
from gcore.system.process import CannotStart, is_running, process_status
from gcore.worker.sandbox.pool import PoolStatus
from gcore.worker.sandbox.process import SandboxProcess

CODE = """
import ctypes, os, sys, threading, time
from pathlib import Path
from gcore.reward import RewardResult

def score(response, fields, spec):
    word, _, rest = response.partition(" ")
    if word == "hang":
        while True:
            pass
    if word == "sleep":
        time.sleep(float(rest))
    if word == "segfault":
        ctypes.string_at(0)
    if word == "exit":
        os._exit(3)
    if word == "once":  # kills the first process that sees it, as what an earlier response left behind would
        if not Path(rest).exists():
            Path(rest).touch()
            os._exit(4)
    if word == "hoard":
        return RewardResult(len([bytearray(1 << 20) for _ in range(10_000)]))
    if word == "raise":
        raise ValueError(rest)
    if word == "fork":
        return RewardResult(1.0 if os.fork() else 7.0)
    if word == "write":
        os.write(int(sys.argv[1]), b"[7.0, []]\\n")
    if word == "nan":
        return RewardResult(float("nan"))
    if word == "print":
        print(rest, flush=True)
    if word == "pid":
        return RewardResult(os.getpid())
    if word == "main":
        return RewardResult(threading.current_thread() is threading.main_thread())
    if word == "modules":
        return RewardResult(sum(name.split(".")[0] in ("torch", "grpc", "transformers", "controllers") for name in sys.modules))
    if word == "tokens":
        return RewardResult(response.tokens, (("truncated", response.truncated),))
    return RewardResult(len(response) + fields.get("bonus", 0), (("letters", len(response)),))
"""
Opened = Callable[..., AbstractAsyncContextManager[RewardPool]]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, points: str = "odd = pack_odd:score") -> None:
    """A package with rewards, where processes that are started find it."""
    info = folder / "pack_odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pack-odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gcore.rewards]\n{points}\n")
    (folder / "pack_odd.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A pool with the odd reward, and no process left behind."""
    install(tmp_path / "odd", monkeypatch, CODE)

    @asynccontextmanager
    async def open_pool(workers: int = 1, memory_mb: int = 4096, **reward: Any) -> AsyncIterator[RewardPool]:
        errors: list[RewardError] = []
        spec = RewardSpec(name="odd", **{"timeout_s": 30.0, **reward})
        scoring = ScoringSpec(workers=workers, memory_mb=memory_mb)
        pool = RewardPool({"data": spec}, scoring, SystemClock(), errors.append)
        pool.spec, pool.errors = spec, errors  # type: ignore[attr-defined]
        await pool.warm()
        pids = pool.pids
        try:
            yield pool
        finally:
            await pool.close()
        assert all(process_status(pid) is None for pid in pids)

    return open_pool


async def score(pool: RewardPool, *texts: str, **fields: Any) -> tuple[RewardResult | RewardError, ...]:
    return await pool.score(pool.spec, fields, [Response(text, len(text)) for text in texts])  # type: ignore[attr-defined]


async def test_a_group_is_scored_in_order_by_another_process(opened: Opened) -> None:
    async with opened() as pool:
        results = await score(pool, "a", "bb", "", "ccc", bonus=10)
        assert [r.value for r in results if isinstance(r, RewardResult)] == [11, 12, 10, 13]
        assert results[1] == RewardResult(12.0, (("letters", 2.0),))
        (pid,) = await score(pool, "pid")
        assert isinstance(pid, RewardResult)
        assert int(pid.value) == pool.pids[0] != os.getpid()


async def test_texts_that_json_or_a_line_could_stumble_over_arrive_as_they_are(opened: Opened) -> None:
    odd = ['"\n\r\u2028\x00\\', "\ud800 half a pair", "é" * 100_000, ""]
    async with opened() as pool:
        results = await score(pool, *odd)
        assert [r.value for r in results if isinstance(r, RewardResult)] == [len(text) for text in odd]


async def test_a_reward_runs_in_a_main_thread_and_its_process_has_loaded_nothing_heavy(opened: Opened) -> None:
    async with opened() as pool:
        assert await score(pool, "main", "modules") == (RewardResult(1.0), RewardResult(0.0))


async def test_a_reward_knows_how_many_tokens_a_response_has_and_whether_it_was_cut_off(opened: Opened) -> None:
    async with opened() as pool:
        (result,) = await pool.score(pool.spec, {}, [Response("tokens", 7, True)])  # type: ignore[attr-defined]
        assert result == RewardResult(7.0, (("truncated", 1.0),))


async def test_a_response_that_takes_too_long_fails_alone_and_its_process_is_replaced(opened: Opened) -> None:
    async with opened(timeout_s=1.0) as pool:
        (before,) = pool.pids
        group, other = await asyncio.gather(score(pool, "a", "hang", "ccc"), score(pool, "dddd"))
        assert [getattr(r, "value", None) for r in group] == [1, None, 3]
        assert str(group[1]).startswith("reward 'odd' took longer than 1 s (reward.timeout_s)")
        assert other == (RewardResult(4.0, (("letters", 4.0),)),)
        assert pool.pids != (before,)
        assert process_status(before) is None


async def test_a_hanging_response_does_not_keep_other_processes_from_scoring(opened: Opened) -> None:
    async with opened(workers=2, timeout_s=3.0) as pool:
        hanging = asyncio.create_task(score(pool, "hang"))
        for _ in range(20):
            assert await score(pool, "a") == (RewardResult(1.0, (("letters", 1.0),)),)
        assert not hanging.done()
        (result,) = await hanging
        assert isinstance(result, RewardError)


async def test_the_event_loop_goes_on_while_a_reward_computes(opened: Opened) -> None:
    async with opened(timeout_s=1.0) as pool:
        turns = 0
        scoring = asyncio.create_task(score(pool, "hang"))
        while not scoring.done():
            turns += 1
            await asyncio.sleep(0.01)
        assert turns > 20


async def test_what_takes_too_long_is_worth_what_the_spec_says_and_a_part_tells(opened: Opened) -> None:
    async with opened(timeout_s=0.5, timeout_value=-1.0) as pool:
        assert await score(pool, "hang") == (RewardResult(-1.0, (("timed_out", 1.0),)),)
        assert await score(pool, "exit") == (RewardResult(-1.0, (("killed", 1.0),)),)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        pytest.param("segfault", "killed by SIGSEGV", id="segfault"),
        pytest.param("exit", "ended by itself with exit code 3", id="os._exit"),
    ],
)
async def test_a_response_that_kills_its_process_fails_alone(opened: Opened, text: str, how: str) -> None:
    async with opened() as pool:
        assert await score(pool, "a") == (RewardResult(1.0, (("letters", 1.0),)),)
        group = await score(pool, "bb", text, "ccc")
        assert [getattr(r, "value", None) for r in group] == [2, None, 3]
        assert how in str(group[1])


@pytest.mark.parametrize("bad", ["hang", "exit"])
async def test_in_a_batch_of_quick_responses_only_the_bad_one_is_lost(opened: Opened, bad: str) -> None:
    async with opened(timeout_s=1.0) as pool:
        for _ in range(5):  # until the pool has learned that they are quick, and sends many at once
            await score(pool, *["a"] * 200)
        for place in (0, 1, 20, 39):
            texts = ["a" * (1 + n % 3) for n in range(40)]
            texts[place] = bad
            results = await score(pool, *texts)
            assert isinstance(results[place], RewardError)
            good = [r.value if isinstance(r, RewardResult) else None for n, r in enumerate(results) if n != place]
            assert good == [len(text) for n, text in enumerate(texts) if n != place]


async def test_a_response_is_not_blamed_for_what_another_left_behind(opened: Opened, tmp_path: Path) -> None:
    async with opened() as pool:
        results = await score(pool, "a", f"once {tmp_path / 'seen'}", "ccc")
        assert [getattr(r, "value", None) for r in results] == [1, len(f"once {tmp_path / 'seen'}"), 3]


async def test_a_response_that_takes_all_memory_fails_alone(opened: Opened) -> None:
    async with opened(memory_mb=256) as pool:
        hoard, after = await score(pool, "hoard", "bb")
        assert "MemoryError" in str(hoard)
        assert after == RewardResult(2.0, (("letters", 2.0),))


async def test_a_reward_that_raises_is_told_with_its_own_traceback(opened: Opened) -> None:
    async with opened() as pool:
        (error,) = await score(pool, "raise one\ntwo")
        assert isinstance(error, RewardError)
        assert str(error) == "reward 'odd' raised ValueError: one. Correct the reward"
        assert "pack_odd.py" in error.trace
        assert "raise ValueError(rest)" in error.trace
        assert "gcore/reward" not in error.trace
        assert pool.errors == [error]  # type: ignore[attr-defined]


async def test_a_reward_that_is_no_number_is_an_error(opened: Opened) -> None:
    async with opened() as pool:
        (error,) = await score(pool, "nan")
        assert "not finite in float32" in str(error)


async def test_what_a_reward_prints_does_not_disturb_it(opened: Opened) -> None:
    async with opened() as pool:
        assert isinstance((await score(pool, "print [1,[]]"))[0], RewardResult)


async def test_many_responses_are_spread_over_the_processes(opened: Opened) -> None:
    async with opened(workers=2) as pool:
        results = await asyncio.gather(*(score(pool, *["pid"] * 8) for _ in range(50)))
        pids = {int(r.value) for group in results for r in group if isinstance(r, RewardResult)}
        assert pids == set(pool.pids)


async def test_who_has_gone_is_not_scored_for(opened: Opened, tmp_path: Path) -> None:
    async with opened() as pool:
        first = asyncio.create_task(score(pool, "sleep 0.3"))
        gone = asyncio.create_task(score(pool, f"once {tmp_path / 'seen'}"))
        await asyncio.sleep(0.1)
        gone.cancel()
        await first
        await score(pool, "a")
        assert not (tmp_path / "seen").exists()


async def test_processes_that_are_killed_from_outside_are_replaced(opened: Opened) -> None:
    async with opened() as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        assert await score(pool, "a") == (RewardResult(1.0, (("letters", 1.0),)),)
        assert pool.pids != (pid,)


@pytest.mark.parametrize(
    ("code", "said", "trace"),
    [
        pytest.param("import json\njson.loads('{')\n", "JSONDecodeError", "pack_odd.py", id="raises at import"),
        pytest.param("", "has no attribute 'score'", "", id="lacks the function"),
        pytest.param("import os\nos._exit(7)\n", "ended by itself with exit code 7", "", id="ends the process"),
        pytest.param(
            "def score(r, f, s): ...\ndef start(s): raise OSError('no compiler')\nscore.start = start\n",
            "raised OSError: no compiler while it was started",
            "pack_odd.py",
            id="cannot start",
        ),
    ],
)
async def test_a_reward_that_cannot_be_had_is_told_before_anything_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str, trace: str
) -> None:
    install(tmp_path, monkeypatch, code)
    pool = RewardPool({"sums": RewardSpec(name="odd")}, ScoringSpec(workers=2), SystemClock())
    with pytest.raises(Exception, match=said) as caught:
        await pool.warm()
    assert pool.pids == ()
    if isinstance(caught.value, PluginFault):
        assert "of source 'sums'" in str(caught.value)
        assert trace in caught.value.trace
    await pool.close()


async def test_an_unknown_reward_is_refused_with_the_nearest_name_and_the_source(opened: Opened) -> None:
    pool = RewardPool({"letters": RewardSpec(name="exacct")}, ScoringSpec(), SystemClock())
    with pytest.raises(
        PluginFault, match=r"reward\.name of source 'letters': no reward is called 'exacct', did you mean 'exact'"
    ):
        await pool.warm()


async def test_sources_have_rewards_of_their_own_composed_ones_too(opened: Opened) -> None:
    sums = RewardSpec()
    both = RewardSpec(
        compose="gate",
        parts=({"name": "regex", "label": "form", "options": {"pattern": ".*!"}}, {"name": "odd", "weight": 0.5}),  # type: ignore[arg-type]
    )
    pool = RewardPool({"sums": sums, "both": both}, ScoringSpec(), SystemClock())
    try:
        assert await pool.score(sums, {"answer": "4"}, [Response("4")]) == (RewardResult(1.0, (("correct", 1.0),)),)
        shouted, said = await pool.score(both, {}, [Response("oh!"), Response("oh")])
        assert shouted == RewardResult(1.5, (("form", 1.0), ("odd", 3.0), ("odd.letters", 3.0)))
        assert said == RewardResult(0.0, (("form", 0.0), ("odd", 2.0), ("odd.letters", 2.0)))
    finally:
        await pool.close()


def test_processes_die_with_the_controller_that_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, CODE)
    program = (
        "import asyncio, os, signal\n"
        "from gcore.system.clock import SystemClock\n"
        "from gcore.config.reward import RewardSpec, ScoringSpec\n"
        "from gcore.reward.pool import RewardPool\n"
        "from gcore.reward.api import Response\n"
        "async def main():\n"
        "    spec = RewardSpec(name='odd')\n"
        "    pool = RewardPool({'data': spec}, ScoringSpec(workers=2), SystemClock())\n"
        "    await pool.warm()\n"
        "    asyncio.create_task(pool.score(spec, {}, [Response('hang')]))\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(*pool.pids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    for pid in pids:
        found = process_status(pid)
        while found is not None and is_running(found.identity):  # the kernel kills it a moment later
            found = process_status(pid)


async def test_warming_that_is_given_up_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pids")
    tell = f"import os, time\nwith open({str(tmp_path / 'pids')!r}, 'w') as f:\n    f.write(f'{{os.getpid()}} ')\ntime.sleep(60)\n"
    install(tmp_path / "odd", monkeypatch, tell)
    pool = RewardPool({"data": RewardSpec(name="odd")}, ScoringSpec(workers=2), SystemClock())
    warming = asyncio.create_task(pool.warm())
    pids: set[int] = set()
    while len(pids) < 2:
        pids |= {int(word) for word in (await asyncio.to_thread((tmp_path / "pids").read_text)).split()}
    warming.cancel()
    await asyncio.wait({warming})
    assert all(process_status(pid) is None for pid in pids)


async def test_processes_that_cannot_be_replaced_are_waited_for(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as pool:
        monkeypatch.setattr("gcore.reward.pool.WAIT_S", 0.05)
        monkeypatch.setattr("gcore.worker.sandbox.pool.START_AGAIN_S", 0.01)
        start, lacking = SandboxProcess.of, [CannotStart("no memory")] * 4

        async def refused(*arguments: Any) -> SandboxProcess:
            if lacking:
                raise lacking.pop()
            return await start(*arguments)

        said: list[str] = []
        monkeypatch.setattr("gcore.reward.pool.log.warning", lambda *words: said.append(pool.scoring.what))
        monkeypatch.setattr(SandboxProcess, "of", refused)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert await score(pool, "a", "bb") == (
            RewardResult(1.0, (("letters", 1.0),)),
            RewardResult(2.0, (("letters", 2.0),)),
        )
        assert lacking == []
        assert said == ["2 responses wait to be scored by reward 'odd' (no memory)"]
        assert "no memory" not in pool.scoring.what


async def test_a_process_that_a_reward_forked_does_not_answer_in_its_place(opened: Opened) -> None:
    async with opened() as pool:
        one, letters = RewardResult(1.0), RewardResult(1.0, (("letters", 1.0),))
        assert await score(pool, "fork", "a") == (one, letters)
        assert await score(pool, "a", "fork", "a") == (letters, one, letters)


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_responses(opened: Opened) -> None:
    async with opened() as pool:
        await score(pool, "write")
        async with asyncio.timeout(10):
            while not pool._slots[0].process.says_more:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await score(pool, "a") == (RewardResult(1.0, (("letters", 1.0),)),)


async def test_a_controller_without_descriptors_scores_again_once_it_has_some(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as pool:
        monkeypatch.setattr("gcore.reward.pool.WAIT_S", 0.05)
        monkeypatch.setattr("gcore.worker.sandbox.pool.START_AGAIN_S", 0.01)
        warned = asyncio.Event()
        monkeypatch.setattr("gcore.reward.pool.log.warning", lambda *words: warned.set())
        os.kill(pool.pids[0], signal.SIGKILL)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 32, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            scoring = asyncio.create_task(score(pool, "a"))
            await warned.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in held:
                os.close(fd)
        assert await scoring == (RewardResult(1.0, (("letters", 1.0),)),)


async def test_whoever_waits_when_the_pool_is_closed_is_told(opened: Opened) -> None:
    async with opened() as pool:
        scoring = asyncio.create_task(score(pool, "sleep 60", "a"))
        await asyncio.wait({scoring}, timeout=0.05)
    with pytest.raises(GcoreError, match="the rewards of this job are closed"):
        await scoring


async def test_rewards_that_take_too_long_to_load_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "import time\ntime.sleep(60)\n")
    scoring = ScoringSpec(start_timeout_s=0.5)
    pool = RewardPool({"data": RewardSpec(name="odd")}, scoring, SystemClock())
    with pytest.raises(PluginFault, match=r"scoring\.start_timeout_s: to load the rewards took longer than 0\.5 s"):
        await pool.warm()


async def test_a_reward_that_slows_down_is_told_by_what_it_takes_and_what_waits_is_named(opened: Opened) -> None:
    async with opened() as pool:
        said: list[str] = []
        pool._on_pace = said.append
        for _ in range(8):
            await score(pool, "a")
        assert said == []
        slow = asyncio.create_task(score(pool, *["sleep 1"] * 3))
        await asyncio.sleep(0)  # it has been asked
        assert pool.scoring.what == "3 responses wait to be scored by reward 'odd'"
        await slow
    assert len(said) == 1
    assert re.fullmatch(r"reward 'odd' takes \S+ s a response, \d+ times as long as before \(.* s\)", said[0])
    assert pool.scoring == PoolStatus(0, 11, "0 responses wait to be scored by reward ")
