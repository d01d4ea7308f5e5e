"""Agents in processes of their own over HTTP: each kind of faulty agent has a bounded cost, and no response hangs or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plug_in_package import installer

from controllers.flow.episodes import AgentEndpoint, AgentEpisodes, EpisodeRequest, new_episode_pool, new_episode_runner
from controllers.inference.rules import Affinity
from gcore.config import parse_spec
from gcore.config.rollout import AgentSpec
from gcore.errors import EngineError
from gcore.plugins import PluginFault
from gcore.reward.api import RewardError
from gcore.rollout.agents.server import try_agent
from gcore.rollout.client import SamplingParams
from gcore.rollout.environments.api import ENVIRONMENT
from gcore.system.clock import SystemClock
from gcore.system.process import identify_process, is_running
from gcore.types import FinishReason, Prompt, PromptRef, Sample, Version, VersionSpan
from gcore.worker.sandbox.pool import PoolStatus

CODE = """
import asyncio, ctypes, json, os, sys, threading, time, urllib.error, urllib.request

def post(rollout, body, path="/chat/completions"):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(rollout.base_url + path, raw, {"authorization": "Bearer " + rollout.api_key})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def say(rollout, messages, words, **more):
    messages.append({"role": "user", "content": words})
    status, told = post(rollout, {"messages": messages, **more})
    assert status == 200, told["error"]["code"]
    messages.append(told["choices"][0]["message"])
    return messages[-1]["content"]

def odd(rollout):
    how, messages = rollout.options["how"], []
    if how == "hang at once":
        time.sleep(1000)
    if how == "silent":
        return 1.0
    if how == "garbage":
        return sum(post(rollout, body)[0] == 400 for body in (b"{", {}, {"messages": 3}, {"messages": [], "n": 2}))
    say(rollout, messages, rollout.fields["question"])
    if how == "hang":
        while True:
            pass
    if how == "nonsense":
        os.write(int(sys.argv[1]), b'{"said": "by whom?"}\\n')
        return 0.25
    if how == "raise":
        raise KeyError("no mood")
    if how == "raise once" and not os.path.exists(rollout.options["mark"]):
        open(rollout.options["mark"], "w").close()
        raise KeyError("no mood")
    if how == "exit":
        sys.exit("enough")
    if how == "segfault":
        ctypes.string_at(0)
    if how == "hoard":
        return len([bytearray(1 << 20) for _ in range(10_000)])
    if how == "words":
        return "a lot"
    if how == "nan":
        return float("nan")
    if how == "insist":
        while True:
            say(rollout, messages, "more")
    if how == "catch":
        try:
            while True:
                say(rollout, messages, "more")
        except AssertionError as error:
            return 0.25 if str(error) == "rollout_limit" else 0.0
    if how == "edit":
        messages[0] = {"role": "user", "content": "what I never asked"}
        say(rollout, messages, "more")
    if how == "too much":
        say(rollout, messages, "more", max_tokens=100_000)
    if how == "children":
        if os.fork() == 0:
            time.sleep(1000)
        time.sleep(1000)
    if how == "thread":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        return os.getpid()
    if how == "brief thread":
        threading.Thread(target=time.sleep, args=(0.02,)).start()
        return os.getpid()
    if how == "child":
        os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
        return os.getpid()
    if how == "environment":
        assert os.environ["OPENAI_BASE_URL"] == rollout.base_url and os.environ["OPENAI_API_KEY"] == rollout.api_key
    if how == "pid":
        return os.getpid()
    print("what an agent prints is no answer", flush=True)
    return 0.5

async def soft(rollout):
    if rollout.options["how"] == "hang":
        await asyncio.sleep(1000)
    messages = []
    await asyncio.to_thread(say, rollout, messages, rollout.fields["question"])
    await asyncio.to_thread(say, rollout, messages, "and then")
    return rollout.seed % 5
"""
HEAD = Version(0, 3)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=40)


class ChatLetters:
    """A token is a character; 0 ends an answer. Messages stand behind each other, each of them ended."""

    chat, max_length = True, 500

    def render(self, value: Sequence[Any], fields: Any = None) -> str:
        return "".join(f"{m['role'][0]}:{m['content']}\n" for m in value) + "a:"

    def continued(self, messages: Sequence[Any], answer: int, fields: Any, *, said: Sequence[int]) -> str:
        return "\n" + self.render(messages[answer + 1 :])

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_behind(self, before: Sequence[int], text: str) -> tuple[int, ...]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(one) for one in ids if one)


class Engines:
    """Two engines in turn, unless a response has a seat; each answer follows from its seed."""

    def __init__(self, *, reason: FinishReason = "stop", fails: int = 0, slow_s: float = 0.0) -> None:
        self.asked: list[SimpleNamespace] = []
        self._reason, self._fails, self._slow_s = reason, fails, slow_s

    async def generate(
        self,
        version: Version,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        seeds: Sequence[int],
        rid: str,
        follow: Any = None,
        decode: Any = None,
        *,
        seat: Affinity,
    ) -> tuple[Sample, ...]:
        last, seat.instance = seat.instance, seat.instance or f"e{len(self.asked) % 2}"
        before = ChatLetters().decode(prompts[0])
        self.asked.append(SimpleNamespace(before=before, rid=rid, on=seat.instance, last=last, seed=seeds[0]))
        if len(self.asked) <= self._fails:
            raise EngineError("it broke")
        await SystemClock().sleep(self._slow_s)
        ids = (*map(ord, f"by {seeds[0] % 97}"), 0)[: params.max_new_tokens]
        span = VersionSpan(version, 0, len(ids))
        return (Sample(ids, (-1.0,) * len(ids), "", self._reason, (span,)),)


Open = Callable[..., AbstractAsyncContextManager[tuple[AgentEpisodes, AgentEndpoint, list[str]]]]


@pytest.fixture
def acting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    install = installer(tmp_path, monkeypatch, "gcore.agents")
    install("odd_agents", "odd = odd_agents:odd\nsoft = odd_agents:soft\nbad = odd_agents:none", CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "odd_agents"))

    @asynccontextmanager
    async def opened(engines: Engines, **section: Any) -> AsyncIterator[tuple[AgentEpisodes, AgentEndpoint, list[str]]]:
        told: list[str] = []
        section = {"name": "odd", "workers": 2, "time_limit_s": 20, "memory_mb": 256, "max_turns": 3} | section
        spec = parse_spec(
            {
                "name": "job",
                "model": {"path": "m", "chat": True},
                "data": {"path": "d"},
                "flow": {"steps": 3},
                "rollout": {"max_new_tokens": 40},
                "agent": section | {"max_tokens": 120},
            }
        )
        clock = SystemClock()
        stage = new_episode_pool(spec, clock, lambda what, trace: told.append(what))
        assert isinstance(stage, AgentEndpoint)
        made = new_episode_runner(spec, engines, stage, clock, lambda what, trace: told.append(what))  # type: ignore[arg-type]
        assert isinstance(made, AgentEpisodes)
        try:
            yield made, stage, told
        finally:
            await stage.close()

    return opened


def conversation() -> EpisodeRequest:
    prompt = Prompt(PromptRef(0, 0, 0), "6*7=", tuple(map(ord, "6*7=")), {"question": "6*7="}, "data")
    opened: Any = SimpleNamespace(renderer=ChatLetters(), pictures=None)
    return EpisodeRequest(HEAD, prompt, opened, PARAMS)


async def test_agents_run_side_by_side_each_on_the_engine_that_knows_it(acting: Open) -> None:
    engines, ended = Engines(), list[int]()
    async with acting(engines, name="soft", options={"how": "well"}) as (made, _, told):
        samples = await made.side_by_side(conversation(), (5, 6, 7), "r", lambda number, _: ended.append(number))
        again = await made.side_by_side(conversation(), (5, 6, 7), "s")
    assert samples == again, "the same seeds make the same responses"
    assert [dict(sample.reward_parts)[ENVIRONMENT] for sample in samples] == [0.0, 1.0, 2.0]
    assert sorted(ended) == [0, 1, 2]
    assert not told
    first = "u:6*7=\na:"
    for seed, sample in zip((5, 6, 7), samples, strict=True):
        assert sample.prompt_ids == tuple(map(ord, first))
        assert sample.text.startswith(f"by {seed}\nu:and then\na:by ")
        assert (sample.finish_reason, len(sample.observed)) == ("stop", 1)
    later = [one for one in engines.asked if one.before != first]
    assert len(later) == 6
    assert all(one.last == one.on for one in later)
    assert len({one.rid for one in engines.asked}) == 12


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "raised KeyError: 'no mood'"),
        ("exit", "raised SystemExit: enough"),
        ("segfault", "ended its process"),
        ("hoard", "raised MemoryError"),
        ("words", "returned 'a lot', which is not a number"),
        ("nan", "not finite in float32"),
        ("nonsense", "wrote an invalid message to the controller"),
        ("silent", "received no response"),
        ("garbage", "received no response"),
        ("edit", "raised AssertionError: history_changed"),
        ("too much", "raised AssertionError: unsupported_parameter"),
    ],
)
async def test_a_bad_agent_costs_its_prompt_and_the_next_one_runs(acting: Open, how: str, words: str) -> None:
    async with acting(Engines(), options={"how": how}, workers=1) as (made, _, told):
        with pytest.raises(RewardError, match=words) as caught:
            await made.side_by_side(conversation(), (5,), "r")
        assert "agent 'odd'" in caught.value.what
        if how == "raise":
            assert "odd_agents.py" in caught.value.trace
        assert bool(told) == (how in ("garbage", "edit", "too much")), "what was refused is told besides"
        made._spec = made._spec.model_copy(update={"options": {"how": "environment"}})
        (well,) = await made.side_by_side(conversation(), (6,), "s")
        assert dict(well.reward_parts)[ENVIRONMENT] == 0.5


@pytest.mark.parametrize(("name", "how"), [("odd", "hang at once"), ("odd", "hang"), ("soft", "hang")])
async def test_an_agent_that_hangs_is_ended_and_its_address_with_it(acting: Open, name: str, how: str) -> None:
    async with acting(Engines(), name=name, options={"how": how}, time_limit_s=1.0, workers=1) as (made, stage, _):
        with pytest.raises(RewardError, match="took longer than 1 s without the policy's time"):
            await made.side_by_side(conversation(), (5,), "r")
        assert not stage.endpoint._served


async def test_time_that_the_policy_takes_does_not_count(acting: Open) -> None:
    async with acting(Engines(slow_s=1.5), options={"how": "well"}, time_limit_s=1.0) as (made, _, _told):
        (sample,) = await made.side_by_side(conversation(), (5,), "r")
    assert sample.text == "by 5"


async def test_an_agent_that_asks_beyond_its_limits_is_cut_off_and_what_it_has_is_kept(acting: Open) -> None:
    async with acting(Engines(), options={"how": "insist"}) as (made, _, told):
        (sample,) = await made.side_by_side(conversation(), (5,), "r")
        assert (sample.finish_reason, sample.text.count("by "), sample.reward_parts) == ("length", 3, ())
        made._spec = made._spec.model_copy(update={"options": {"how": "catch"}})
        (sample,) = await made.side_by_side(conversation(), (5,), "r")
        assert (sample.finish_reason, dict(sample.reward_parts)) == ("length", {ENVIRONMENT: 0.25})
        assert not told


async def test_an_agent_that_fails_is_tried_again_from_another_seed_if_the_spec_says_so(
    acting: Open, tmp_path: Path
) -> None:
    options = {"how": "raise once", "mark": str(tmp_path / "mark")}
    engines = Engines()
    async with acting(engines, options=options, on_error="retry") as (made, _, told):
        (sample,) = await made.side_by_side(conversation(), (5,), "r")
    assert dict(sample.reward_parts)[ENVIRONMENT] == 0.5
    assert len(told) == 1
    assert len({one.seed for one in engines.asked}) == 2


async def test_an_engine_that_fails_is_the_callers_to_ask_again(acting: Open) -> None:
    async with acting(Engines(fails=1), options={"how": "well"}) as (made, _, told):
        with pytest.raises(EngineError, match="it broke"):
            await made.side_by_side(conversation(), (5,), "r")
        assert not told
    async with acting(Engines(reason="abort"), options={"how": "well"}) as (made, _, _):
        with pytest.raises(EngineError, match="aborted"):
            await made.side_by_side(conversation(), (5,), "r")


async def test_a_production_that_is_given_up_ends_its_agents_and_all_they_started(acting: Open) -> None:
    async with acting(Engines(), options={"how": "children"}, workers=1) as (made, stage, _):
        doing = asyncio.create_task(made.side_by_side(conversation(), (5, 6), "r"))
        async with asyncio.timeout(30):
            while not stage.endpoint._served or not any(one._dialogue for one in stage.endpoint._served.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        (process,) = stage.pool._crew._running
        known = identify_process(process.pid)
        assert stage.waits == PoolStatus(1, 0, "1 response waits for a free process of agent 'odd'")
        doing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doing
        assert not stage.endpoint._served
        await asyncio.gather(*stage.pool._crew._ending)
        assert known is None or not is_running(known)


async def test_in_an_evaluation_what_fails_is_not_scored_and_the_others_are(acting: Open) -> None:
    async with acting(Engines(), options={"how": "raise"}) as (made, _, _):
        found = await made.each([conversation()] * 2, (5, 6), "r")
    assert all(isinstance(one, RewardError) for one in found)


async def test_a_process_is_used_again(acting: Open) -> None:
    async with acting(Engines(), options={"how": "pid"}, workers=1) as (made, _, _):
        samples = await made.side_by_side(conversation(), (5, 6, 7), "r")
    assert len({sample.reward_parts for sample in samples}) == 1


@pytest.mark.parametrize(("how", "processes"), [("thread", 2), ("child", 2), ("brief thread", 1)])
async def test_an_agent_that_leaves_something_running_has_its_process_replaced(
    acting: Open, how: str, processes: int
) -> None:
    async with acting(Engines(), options={"how": how}, workers=1) as (made, _, told):
        samples = await made.side_by_side(conversation(), (5, 6), "r")
    assert len({sample.reward_parts for sample in samples}) == processes
    assert told == []


async def test_an_agent_that_a_node_does_not_have_fails_the_job_in_its_own_words(acting: Open) -> None:
    async with acting(Engines(), name="missing") as (made, _, _):
        with pytest.raises(PluginFault, match="no agent is called 'missing'"):
            await made.side_by_side(conversation(), (5,), "r")


def test_an_agent_that_cannot_be_had_is_told_before_there_is_a_job(acting: Open) -> None:
    try_agent(AgentSpec(name="odd"))
    with pytest.raises(PluginFault, match="no agent is called 'od'"):
        try_agent(AgentSpec(name="od"))
    with pytest.raises(PluginFault, match="bad"):
        try_agent(AgentSpec(name="bad"))
