"""Rewards in processes of their own: batches, sources, blame and pace.

`tests/contract/worker` covers the behaviour of all process pools.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import resource
import signal
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gcore.config.reward import RewardSpec, ScoringSpec
from gcore.plugins import PluginFault
from gcore.reward.api import Response, RewardError, RewardResult
from gcore.reward.pool import RewardPool
from gcore.system.clock import SystemClock
from gcore.system.process import process_status
from gcore.worker.sandbox.pool import PoolStatus

CODE = """
import os, sys, threading, time
from pathlib import Path
from gcore.reward import RewardResult

def score(response, fields, spec):
    word, _, rest = response.partition(" ")
    if word == "hang":
        while True:
            pass
    if word == "sleep":
        time.sleep(float(rest))
    if word == "exit":
        os._exit(3)
    if word == "once":  # kills the first process that sees it, as what an earlier response left behind would
        if not Path(rest).exists():
            Path(rest).touch()
            os._exit(4)
    if word == "raise":
        raise ValueError(rest)
    if word == "fork":
        return RewardResult(1.0 if os.fork() else 7.0)
    if word == "write":
        os.write(int(sys.argv[1]), b"[[7.0, []]]\\n")
    if word == "nan":
        return RewardResult(float("nan"))
    if word == "pid":
        return RewardResult(os.getpid())
    if word == "main":
        return RewardResult(threading.current_thread() is threading.main_thread())
    if word == "modules":
        return RewardResult(sum(name.split(".")[0] in ("torch", "grpc", "transformers", "controllers") for name in sys.modules))
    if word == "pictures":
        return RewardResult(sum(len(path.read_bytes()) for path in response.pictures), (("count", len(response.files)),))
    if word == "shown":
        return RewardResult(sum(len(path.read_bytes()) for path in response.tool_pictures), (("prompt", len(response.pictures)),))
    if word == "" and response.picture_file is not None:
        return RewardResult(len(response.picture.read_bytes()), (("tokens", response.tokens is None),))
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
    async def open_pool(
        workers: int = 1, memory_mb: int = 4096, start_timeout_s: float = 120.0, **reward: Any
    ) -> AsyncIterator[RewardPool]:
        errors: list[RewardError] = []
        spec = RewardSpec(name="odd", **{"timeout_s": 30.0, **reward})
        scoring = ScoringSpec(workers=workers, memory_mb=memory_mb, start_timeout_s=start_timeout_s)
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


async def test_a_reward_runs_in_a_main_thread_and_its_process_has_loaded_nothing_heavy(opened: Opened) -> None:
    async with opened() as pool:
        assert await score(pool, "main", "modules") == (RewardResult(1.0), RewardResult(0.0))


async def test_a_reward_knows_how_many_tokens_a_response_has_and_whether_it_was_cut_off(opened: Opened) -> None:
    async with opened() as pool:
        (result,) = await pool.score(pool.spec, {}, [Response("tokens", 7, True)])  # type: ignore[attr-defined]
        assert result == RewardResult(7.0, (("truncated", 1.0),))


async def test_a_reward_opens_the_pictures_of_the_prompt_with_verified_bytes(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(b"pixels")
    files = [(str(path), hashlib.sha256(b"pixels").hexdigest())]
    changed, gone = [(str(path), "ab" * 32)], [(str(tmp_path / "gone"), "")]
    async with opened() as pool:
        given = [Response("pictures", files=one) for one in (files, files * 2, (), changed, gone)]
        results = await pool.score(pool.spec, {}, given)  # type: ignore[attr-defined]
        assert [one.value for one in results[:3] if isinstance(one, RewardResult)] == [6, 12, 0]
        assert [one.what for one in results[3:] if isinstance(one, RewardError)] == [
            "a picture of the prompt has other bytes than its SHA-256 says",
            "cannot read a picture of the prompt (No such file or directory)",
        ]


async def test_a_reward_opens_the_pictures_that_tools_returned_in_its_response(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(b"pixels")
    good, changed = [(str(path), hashlib.sha256(b"pixels").hexdigest(), 8, 16)], [(str(path), "ab" * 32, 8, 16)]
    async with opened() as pool:
        pairs = (((), good), (good, good * 2), (good, ()), ((), changed))
        given = [Response("shown", files=of_prompt, tool_files=of_tools) for of_prompt, of_tools in pairs]
        results = await pool.score(pool.spec, {}, given)  # type: ignore[attr-defined]
        assert results[:3] == tuple(
            RewardResult(value, (("prompt", count),)) for value, count in ((6, 0.0), (12, 1.0), (0, 1.0))
        )
        assert isinstance(results[3], RewardError)
        assert results[3].what == "a picture of a tool has other bytes than its SHA-256 says"


async def test_a_reward_opens_the_picture_that_the_policy_generated(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(b"pixels")
    good, changed = (str(path), hashlib.sha256(b"pixels").hexdigest(), 8, 16), (str(path), "ab" * 32, 8, 16)
    async with opened() as pool:
        given = [Response("", picture_file=one) for one in (good, changed)]
        found, damaged = await pool.score(pool.spec, {}, given)  # type: ignore[attr-defined]
        assert found == RewardResult(6.0, (("tokens", 1.0),))
        assert isinstance(damaged, RewardError)
        assert damaged.what == "a picture of the policy has other bytes than its SHA-256 says"


async def test_timed_out_reward_has_the_configured_value_and_a_part_that_says_so(opened: Opened) -> None:
    async with opened(timeout_s=0.5, timeout_value=-1.0) as pool:
        await score(pool, "a")
        assert await score(pool, "hang") == (RewardResult(-1.0, (("timed_out", 1.0),)),)
        assert await score(pool, "exit") == (RewardResult(-1.0, (("killed", 1.0),)),)


@pytest.mark.parametrize(
    ("bad", "how"), [("hang", "took longer than 1 s"), ("exit", "which was ended by itself with exit code 3")]
)
async def test_in_a_batch_of_quick_responses_only_the_bad_one_is_lost(opened: Opened, bad: str, how: str) -> None:
    async with opened(timeout_s=1.0) as pool:
        for _ in range(5):  # until the pool has learned that they are quick, and sends many at once
            await score(pool, *["a"] * 200)
        for place in (0, 1, 20, 39):
            texts = ["a" * (1 + n % 3) for n in range(40)]
            texts[place] = bad
            results = await score(pool, *texts)
            assert how in str(results[place])
            good = [r.value if isinstance(r, RewardResult) else None for n, r in enumerate(results) if n != place]
            assert good == [len(text) for n, text in enumerate(texts) if n != place]


async def test_the_first_call_of_a_process_may_take_longer_than_a_response(opened: Opened) -> None:
    async with opened(timeout_s=0.3) as pool:
        (result,) = await score(pool, "sleep 1")
        assert isinstance(result, RewardResult)
        (result,) = await score(pool, "sleep 1")
        assert "took longer than 0.3 s (reward.timeout_s)" in str(result)
        (result,) = await score(pool, "sleep 1")  # in a fresh process, where it may load again
        assert isinstance(result, RewardResult)


async def test_a_first_call_that_takes_too_long_is_told_where_to_load(opened: Opened) -> None:
    async with opened(timeout_s=0.2, start_timeout_s=3) as pool:
        (result,) = await score(pool, "hang")
        assert re.search(r"took longer than 3 s in its first call in a process; load libraries in `start`", str(result))


async def test_an_entry_is_checked_without_a_response() -> None:
    pool = RewardPool({"data": RewardSpec(name="numeric")}, ScoringSpec(), SystemClock())
    try:
        (good,) = await pool.score(RewardSpec(name="numeric"), {"answer": "2"}, [None])
        (bad,) = await pool.score(RewardSpec(name="numeric"), {"answer": "two"}, [None])
    finally:
        await pool.close()
    assert good == RewardResult(0.0)
    assert "'two' in field 'answer' is not a number" in str(bad)


async def test_a_response_is_not_blamed_for_what_another_left_behind(opened: Opened, tmp_path: Path) -> None:
    async with opened() as pool:
        results = await score(pool, "a", f"once {tmp_path / 'seen'}", "ccc")
        assert [getattr(r, "value", None) for r in results] == [1, len(f"once {tmp_path / 'seen'}"), 3]


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


async def test_processes_that_are_killed_from_outside_are_replaced(opened: Opened) -> None:
    async with opened() as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        assert await score(pool, "a") == (RewardResult(1.0, (("letters", 1.0),)),)
        assert pool.pids != (pid,)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param("import json\njson.loads('{')\n", "JSONDecodeError", id="raises at import"),
        pytest.param(
            "def score(r, f, s): ...\ndef start(s): raise OSError('no compiler')\nscore.start = start\n",
            "raised OSError: no compiler in start",
            id="cannot start",
        ),
    ],
)
async def test_a_reward_that_cannot_be_had_is_told_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    install(tmp_path, monkeypatch, code)
    pool = RewardPool({"sums": RewardSpec(name="odd")}, ScoringSpec(workers=2), SystemClock())
    with pytest.raises(PluginFault, match=said) as caught:
        await pool.warm()
    assert pool.pids == ()
    assert "of source 'sums'" in str(caught.value)
    assert "pack_odd.py" in caught.value.trace
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
    assert re.fullmatch(r"reward 'odd' takes \S+ s per response, \d+ times the usual .* s", said[0])
    assert pool.scoring == PoolStatus(0, 11, "0 responses wait to be scored by reward ")


BATCH = """
import os, time
import gcore

@gcore.batch_reward
def group(responses, bonus):
    if "hang" in responses:
        time.sleep(1000)
    if "exit" in responses:
        os._exit(3)
    if "raise" in responses:
        raise ValueError("no group")
    return [len(responses) + value for value in bonus]

def score(response, fields, spec):
    return len(response)
"""


@asynccontextmanager
async def batch_pool(folder: Path, monkeypatch: pytest.MonkeyPatch, **reward: Any) -> AsyncIterator[RewardPool]:
    install(folder, monkeypatch, BATCH, "odd = pack_odd:group\nplain = pack_odd:score")
    spec = RewardSpec(name="odd", **{"timeout_s": 30.0, **reward})
    errors: list[RewardError] = []
    rewards = {"data": spec, "other": RewardSpec(name="plain")}
    pool = RewardPool(rewards, ScoringSpec(workers=2), SystemClock(), errors.append)
    pool.spec, pool.errors = spec, errors  # type: ignore[attr-defined]
    try:
        yield pool
    finally:
        await pool.close()


async def test_a_group_goes_to_a_batch_reward_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batch_pool(tmp_path, monkeypatch) as pool:
        sizes = [1, 2, 100, 3, 8] * 4
        groups = await asyncio.gather(*(score(pool, *["a"] * size, bonus=0.5) for size in sizes))
        for size, group in zip(sizes, groups, strict=True):
            assert group == (RewardResult(size + 0.5),) * size
        plain = await pool.score(RewardSpec(name="plain"), {}, [Response("a"), Response("bb")])
        assert plain == (RewardResult(1.0), RewardResult(2.0))
        assert await pool.score(pool.spec, {"bonus": 0}, [None]) == (RewardResult(0.0),)  # type: ignore[attr-defined]


async def test_a_group_that_hangs_kills_its_process_or_raises_fails_whole_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_pool(tmp_path, monkeypatch, timeout_s=1.0) as pool:
        await score(pool, "a", bonus=0)
        bad = [score(pool, "a", word, "b", bonus=0) for word in ("hang", "exit", "raise")]
        good = [score(pool, "a", "b", bonus=1) for _ in range(8)]
        hung, ended, raised, *fine = await asyncio.gather(*bad, *good)
        assert fine == [(RewardResult(3.0),) * 2] * 8
        for found, said in ((hung, "took longer than"), (ended, "exit code 3"), (raised, "ValueError: no group")):
            assert len(found) == 3
            assert all(said in str(one) for one in found)
        assert len(pool.errors) == 1  # type: ignore[attr-defined]


async def test_a_group_that_takes_too_long_is_worth_what_the_spec_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_pool(tmp_path, monkeypatch, timeout_s=0.5, timeout_value=-1.0) as pool:
        await score(pool, "a", bonus=0)
        assert await score(pool, "hang", "a", bonus=0) == (RewardResult(-1.0, (("timed_out", 1.0),)),) * 2
