"""Filters: kept prompts, errors of a filter, and a record of every filtered prompt."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plug_in_package import Install, installer

from controllers.changes import ChangeSignal
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.peer import JobPeer
from controllers.flow.step import JobBatch, JobStep
from controllers.telemetry.events import EventLog
from controllers.telemetry.notices import PluginErrorLog
from gcore.config.train import FilterSpec
from gcore.data.order import shard_lengths
from gcore.errors import SpecError
from gcore.flows import FilterError, find_filters
from gcore.flows.filters import CheckedFilter, apply_filters, has_signal, length, reward_band, signal, try_filters
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.selection import StreamRules
from gcore.plugins import PluginFault
from gcore.reward import RewardError
from gcore.store.keys import JobKeys
from gcore.store.types import WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.testing.flows import group_of, make_spec
from gcore.types import Group, Outcome, Prompt, PromptRef, Version

KEYS = JobKeys("u")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return installer(tmp_path, monkeypatch, "gcore.filters")


# --- those that come with gcore


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        pytest.param((1.0, 0.0), True, id="two values"),
        pytest.param((0.1 + 0.2, 0.3), False, id="the same up to rounding"),
        pytest.param((1e9, 1e9), False, id="large and the same"),
        pytest.param((0.0, 2e-6), True, id="just above the tolerance"),
        pytest.param((1.0,), False, id="only one"),
    ],
)
def test_signal_keeps_groups_that_say_which_was_better(rewards: tuple[float, ...], kept: bool) -> None:
    assert (signal(group_of(rewards), {}, {}) is None) == kept


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.floats(-100, 100))
def test_signal_does_not_change_when_a_constant_is_added(rewards: list[float], constant: float) -> None:
    spread = max(rewards) - min(rewards)
    if spread == 0 or spread > 1e-3:  # around the tolerance rounding decides
        assert has_signal(group_of(rewards)) == has_signal(group_of([reward + constant for reward in rewards]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"low": 0.2, "high": 0.8}, None),
        ({"low": 0.6}, "its mean reward is below 0.6"),
        ({"high": 0.4}, "its mean reward is above 0.4"),
        ({"low": 0.5, "high": 0.5}, None),
    ],
    ids=str,
)
def test_a_reward_band_looks_at_the_mean(options: dict[str, float], reason: str | None) -> None:
    assert reward_band(group_of((0.0, 1.0)), {}, options) == reason


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.floats(-10, 10), st.floats(-10, 10))
def test_a_band_keeps_exactly_what_is_in_it(rewards: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    mean = math.fsum(rewards) / len(rewards)
    assert (reward_band(group_of(rewards), {}, {"low": low, "high": high}) is None) == (low <= mean <= high)


def test_length_looks_at_every_response() -> None:
    group = group_of((0.0, 1.0))  # 11 tokens each
    assert length(group, {}, {"least": 11, "most": 11}) is None
    assert length(group, {}, {"least": 12}) == "a response is shorter than 12 tokens"
    assert length(group, {}, {"most": 10}) == "a response is longer than 10 tokens"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("signal", {"low": 1}, "has no option 'low'. Known options: none"),
        ("reward_band", {"lo": 1}, "has no option 'lo'. Known options: low, high"),
        ("reward_band", {}, "has no bound"),
        ("reward_band", {"low": "x"}, "is 'x', which is not a number"),
        ("reward_band", {"low": True}, "is True, which is not a number"),
        ("reward_band", {"low": 2, "high": 1}, "keeps nothing"),
        ("length", {"max": 3}, "has no option 'max'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_there_is_a_job(name: str, options: dict[str, Any], said: str) -> None:
    filters = find_filters([FilterSpec(name=name, options=options)])
    with pytest.raises(SpecError, match=said) as caught:
        try_filters(filters, 4, {})
    assert caught.value.where == "flow.filters"


def test_signal_on_groups_of_one_is_refused_before_there_is_a_job() -> None:
    with pytest.raises(SpecError, match=r"flow\.samples_per_prompt is 1"):
        try_filters(find_filters([FilterSpec(name="signal")]), 1, {})


# --- plug-ins


def test_a_name_nobody_has_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"flow\.filters: no filter is called 'signel', did you mean 'signal'"):
        find_filters([FilterSpec(name="signel")])


def test_the_first_that_refuses_names_the_reason() -> None:
    filters = find_filters([FilterSpec(name="reward_band", options={"high": 0.9}), FilterSpec(name="signal")])
    assert apply_filters(filters, group_of((1.0, 1.0)), {}) == Outcome("filtered", "its mean reward is above 0.9")
    assert apply_filters(filters, group_of((0.5, 0.5)), {}) == Outcome("filtered", "all its rewards are the same")
    group = group_of((0.0, 1.0))
    assert apply_filters(filters, group, {}) is group


def test_a_filter_sees_the_entry_and_its_options() -> None:
    def easy(group: Group, fields: Any, options: Any) -> str | None:
        return "too easy" if fields["level"] < options["least"] else None

    found = CheckedFilter("easy", easy, {"least": 3})
    assert found.refuses(group_of((0.0,)), {"level": 2}) == "too easy"
    assert found.refuses(group_of((0.0,)), {"level": 3}) is None


@pytest.mark.parametrize("bad", [True, False, 0, "", " ", ["x"]], ids=repr)
def test_invalid_filter_result_is_an_error(bad: Any) -> None:
    with pytest.raises(FilterError, match="neither None nor a sentence"):
        CheckedFilter("mine", lambda group, fields, options: bad, {}).refuses(group_of((0.0,)), {})


def test_raising_filter_is_refused_before_the_job_starts_with_its_traceback(install: Install) -> None:
    install("filt_a", "mine = filt_a:mine", "def mine(group, fields, options):\n    return fields['nothing']\n")
    filters = find_filters([FilterSpec(name="mine")])
    with pytest.raises(PluginFault, match="filter 'mine' raised KeyError: 'nothing'") as caught:
        try_filters(filters, 2, {"prompt": "x"})
    assert "return fields['nothing']" in caught.value.trace


# --- in a job


class Job:
    """A peer of which the filters, the holdings and the records of faults matter."""

    def __init__(self, *filters: CheckedFilter) -> None:
        self.clock = FakeClock()
        self.cluster = MemoryCluster(self.clock)
        self.store = MemoryStore(self.cluster)
        self.head = chain.base_entry(2, "w", ChainWriter("a", "n")).head
        self.buffer, self.changes = GroupBuffer(), ChangeSignal()
        self.faults = PluginErrorLog(self.store, KEYS, "n")
        self._filters, self._passed_filters = filters, set[PromptRef]()
        self.data = SimpleNamespace(spec=make_spec(), why_untrainable=lambda group: None)
        self.step = JobStep(self, Version(0, 0))  # type: ignore[arg-type]

    def look(self) -> Any:
        rules = StreamRules(shard_lengths(8, 2), 4, 2)
        return SimpleNamespace(
            me="a",
            rules=rules,
            head=self.head,
            mirror=SimpleNamespace(head=SimpleNamespace(record=self.head), has_ended=False),
        )

    filter = JobPeer.filter
    check_filtered = JobPeer.check_filtered

    async def produce(self, group: Group, *, ask: bool = True) -> None:
        prompt = Prompt(group.ref, "text", (1,), {}, "data")

        async def production() -> Group | Outcome:
            return await self.filter(prompt, group) if ask else group  # type: ignore[arg-type]

        await self._start(prompt, production())

    async def fail(self, ref: PromptRef, reason: str) -> None:
        async def production() -> Group | Outcome:
            raise RewardError(reason)

        await self._start(Prompt(ref, "text", (1,), {}, "data"), production())

    async def _start(self, prompt: Prompt, production: Coroutine[Any, Any, Group | Outcome]) -> None:
        batch = JobBatch(self, self.step)  # type: ignore[arg-type]
        self.step.hand_out(prompt)
        batch.start(production)
        await self.changes.until(lambda: prompt.ref not in self.buffer.in_flight)
        await asyncio.sleep(0)

    async def events(self) -> list[Any]:
        """The events that a follower gets."""
        await self.faults.finish()
        listing = self.cluster.listing(KEYS.prefix)
        batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
        events = EventLog(KEYS)
        events.note(JobMirror(KEYS), batch, JobMirror(KEYS).fold(batch), 0.0)
        return sorted(events.events, key=lambda event: event.message)


async def test_refused_groups_are_filtered_with_a_reason_and_others_are_held() -> None:
    job = Job(CheckedFilter("signal", signal, {}))
    await job.produce(group_of((1.0, 1.0)))
    (outcome,) = job.buffer.outcomes.values()
    assert (outcome.kind, outcome.reason) == ("filtered", "all its rewards are the same")
    other = Job(CheckedFilter("signal", signal, {}))
    await other.produce(group_of((1.0, 0.0)))
    assert len(other.buffer.offers) == 1
    assert not other._passed_filters


async def test_a_filter_that_raises_fails_the_prompt_and_its_traceback_is_an_event(install: Install) -> None:
    install("filt_b", "broken = filt_b:broken", "def broken(group, fields, options):\n    return 1 / 0\n")
    job = Job(*find_filters([FilterSpec(name="broken")]))
    await job.produce(group_of((1.0, 0.0)))
    (outcome,) = job.buffer.outcomes.values()
    assert outcome.kind == "failed"
    assert outcome.reason.startswith("filter 'broken' raised ZeroDivisionError: division by zero")
    (event,) = await job.events()
    assert "filter 'broken' raised ZeroDivisionError" in event.message
    assert "in broken" in json.loads(event.data_json)["trace"]


async def test_why_prompts_fail_is_an_event_once_for_each_reason_also_without_a_traceback() -> None:
    job = Job()
    for position, reason in enumerate(("it gave nan", "it gave nan", "it has no answer")):
        await job.fail(PromptRef(0, 0, position), reason)
    assert len(job.buffer.outcomes) == 3
    assert [(event.kind, event.message) for event in await job.events()] == [
        ("fault", "it gave nan"),
        ("fault", "it has no answer"),
    ]


async def test_filtered_group_makes_no_event() -> None:
    job = Job(CheckedFilter("signal", signal, {}))
    await job.produce(group_of((1.0, 1.0)))
    assert await job.events() == []


async def test_a_flow_that_does_not_ask_the_filters_of_the_spec_ends_with_a_sentence() -> None:
    job = Job(CheckedFilter("signal", signal, {}))
    await job.produce(group_of((1.0, 0.0)), ask=False)
    with pytest.raises(SpecError, match=r"flow 'grpo' trains a group without applying flow\.filters"):
        job.buffer.in_flight.raise_defect()
    without = Job()
    await without.produce(group_of((1.0, 0.0)), ask=False)
    without.buffer.in_flight.raise_defect()


@pytest.mark.filterwarnings("error")
def test_an_asynchronous_filter_is_reported_in_a_sentence_without_a_warning() -> None:
    async def late(group: Any, fields: Any, options: Any) -> None:
        return None

    with pytest.raises(FilterError, match="a coroutine, because it is written with `async def`, neither None nor"):
        CheckedFilter("late", late, {}).refuses(None, {})  # type: ignore[arg-type]
    gc.collect()
