"""The contract kit finds each broken promise: each plug-in here breaks one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plug_in_package import installer

from gcore.reward.api import Response
from gcore.testing import contracts as contract
from gcore.testing.contracts import ContractBroken, check_curriculum, check_filter, check_flow, check_reward

ENTRIES = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(6)]
LOOP = """
from dataclasses import replace
from gcore.flows import flow
from gcore.types import Outcome

def loop(produce, train=True, publish=True, steps=None, collect=True):
    async def flow(peer):
        number = 0
        async for step in peer.steps():
            if collect:
                async with step.collect() as batch:
                    async for prompt in peer.prompts(step):
                        batch.start(produce(peer, step, prompt))
            if train:
                await step.train()
            if publish:
                await step.publish()
            number += 1
            if number == steps:
                return
    return flow

async def whole(peer, step, prompt):
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))

async def no_filter(peer, step, prompt):
    return await peer.score(prompt, await peer.rollout(prompt))

async def swallows(peer, step, prompt):
    try:
        return await whole(peer, step, prompt)
    except Exception as error:
        raise RuntimeError("gave up") from error

async def nan(peer, step, prompt):
    group = await peer.score(prompt, await peer.rollout(prompt))
    bad = tuple(replace(s, reward=float("nan")) for s in group.samples)
    return await peer.filter(prompt, replace(group, samples=bad))

async def empty(peer, step, prompt):
    group = await peer.score(prompt, await peer.rollout(prompt))
    return await peer.filter(prompt, replace(group, samples=()))

async def lonely(peer, step, prompt):
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt, 1)))

async def nothing(peer, step, prompt):
    return Outcome("filtered", "on principle")

good = loop(whole)
unfiltered = loop(no_filter)
untrained = loop(whole, train=False, publish=False)
unpublished = loop(whole, publish=False)
early = loop(whole, steps=1)
uncollected = loop(whole, collect=False)
greedy_handler = loop(swallows)
not_a_number = loop(nan)
no_samples = loop(empty)
group_of_one = loop(lonely)
filters_all = loop(nothing)

async def gathers(peer):
    async for step in peer.steps():
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(whole(peer, step, prompt))
        assert await step.sum("peers", 1) == 2
        assert len(await step.gather("names", [peer.name])) == 2
        await step.train()
        await step.publish()

async def waits_alone(peer):
    async for step in peer.steps():
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(whole(peer, step, prompt))
        if peer.name == "peer-0":
            await step.gather("lonely", 1)
        await step.train()
        await step.publish()
"""
REWARDS = """
import itertools
from gcore.reward import RewardError, RewardResult
turns = itertools.count()

def check(spec, *known):
    for option in spec.options:
        if option not in known:
            raise RewardError(f"no option {option!r}")

def good(response, fields, spec):
    check(spec)
    if spec.answer not in fields:
        raise RewardError("no answer")
    return RewardResult(float(response == fields[spec.answer]))

def painted(response, fields, spec):
    check(spec)
    if spec.answer not in fields:
        raise RewardError("no answer")
    return RewardResult(float(response.picture.read_text() == fields[spec.answer]))

def lenient(response, fields, spec):
    return RewardResult(float(response == fields.get("answer")))

def fickle(response, fields, spec):
    check(spec)
    return RewardResult(float(next(turns)))

def brittle(response, fields, spec):
    check(spec)
    return RewardResult(float(response))

def accident(response, fields, spec):
    check(spec)
    return RewardResult(float(response == fields[spec.answer]))

def backwards(response, fields, spec):
    check(spec)
    return RewardResult(float(response != fields.get(spec.answer)))
"""
FILTERS = """
import itertools
from gcore.flows import FilterError
turns = itertools.count()

def check(options):
    for option in options:
        raise FilterError(f"no option {option!r}")

def good(group, fields, options):
    check(options)
    return None if len(group.samples) > 1 else "it has one sample"

def lenient(group, fields, options):
    return None

def truth(group, fields, options):
    check(options)
    return True

def divides(group, fields, options):
    check(options)
    return "x" if 1 / (len(group.samples) - 1) > 9 else None

def fickle(group, fields, options):
    check(options)
    return f"turn {next(turns)}"
"""
CURRICULA = """
import itertools
from gcore.data.curriculum import CurriculumError
turns = itertools.count()

def check(view):
    for option in view.options:
        raise CurriculumError(f"no option {option!r}")

def good(view):
    check(view)
    return lambda source, fields: len(fields["prompt"])

def lenient(view):
    return None

def fickle(view):
    check(view)
    return lambda source, fields: next(turns)
"""
FLOWS = (
    "good", "unfiltered", "untrained", "unpublished", "early", "uncollected", "greedy_handler", "not_a_number",
    "no_samples", "group_of_one", "filters_all", "gathers", "waits_alone",
)  # fmt: skip


def points(package: str, names: tuple[str, ...]) -> str:
    return "\n".join(f"kit_{name} = {package}:{name}" for name in names)


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = ("good", "painted", "lenient", "fickle", "brittle", "accident", "backwards")
    filters = ("good", "lenient", "truth", "divides", "fickle")
    installer(tmp_path / "a", monkeypatch, "gcore.flows")("kit_flows", points("kit_flows", FLOWS), LOOP)
    installer(tmp_path / "b", monkeypatch, "gcore.rewards")("kit_rewards", points("kit_rewards", rewards), REWARDS)
    installer(tmp_path / "c", monkeypatch, "gcore.filters")("kit_filters", points("kit_filters", filters), FILTERS)
    put = installer(tmp_path / "d", monkeypatch, "gcore.curricula")
    put("kit_curricula", points("kit_curricula", ("good", "lenient", "fickle")), CURRICULA)


@pytest.mark.parametrize("name", ["good", "gathers"])
async def test_a_flow_that_keeps_its_promises_passes_and_can_be_looked_at(name: str) -> None:
    cluster = await check_flow(f"kit_{name}", ENTRIES)
    assert [len(groups) for groups in cluster.trained] == [4, 4]
    assert {outcome.kind for outcome in cluster.outcomes.values()} <= {"filtered"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unfiltered", "to its batch without calling peer.filter"),
        ("untrained", "ended after 0 of 2 steps|does not wait for step.train|hangs"),
        ("unpublished", "does not wait for step.publish"),
        ("early", "ended after 1 of 2 steps"),
        ("uncollected", "its batch was not collected"),
        ("greedy_handler", "gave up"),
        ("not_a_number", "with a reward of nan"),
        ("no_samples", "without a sample"),
        ("group_of_one", "compares the samples of a group; at least 2"),
        ("filters_all", "does not get its"),
        ("waits_alone", "hangs in step"),
    ],
)
async def test_a_flow_that_breaks_one_is_told_which(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "hangs" in said:  # no other needs to be waited for, and on a busy machine some take a while
        monkeypatch.setattr(contract, "HANGS_S", 1.0)
    with pytest.raises((AssertionError, RuntimeError), match=said):
        await check_flow(f"kit_{name}", ENTRIES)


def test_a_reward_that_keeps_its_promises_passes() -> None:
    check_reward("kit_good", ENTRIES, right=["1", "2"], wrong=["7", ""])


def test_a_reward_of_generated_pictures_is_checked_with_pictures(tmp_path: Path) -> None:
    def picture(text: str) -> Response:
        (tmp_path / text).write_text(text)
        return Response("", picture_file=(str(tmp_path / text),))

    check_reward("kit_painted", ENTRIES, right=[picture("1"), picture("2")], wrong=[picture("7")])
    with pytest.raises(ContractBroken, match="the policy writes text"):
        check_reward("kit_painted", ENTRIES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lenient", "accepts an unknown option"),
        ("fickle", "for the same response and entry"),
        ("brittle", "cannot score the response ''.*nonsense response must get a low score"),
        ("accident", "an entry without 'answer': it fails by accident"),
        ("backwards", r"gives 0\.0 for a right response and 1\.0 for a wrong one"),
    ],
)
def test_a_reward_that_breaks_one_is_told_which(name: str, said: str) -> None:
    right, wrong = (["1"], ["7"]) if name == "backwards" else ([], [])
    with pytest.raises(ContractBroken, match=said):
        check_reward(f"kit_{name}", ENTRIES, right=right, wrong=wrong)


@pytest.mark.parametrize("name", ["numeric", "exact"])
def test_gcores_own_rewards_pass(name: str) -> None:
    check_reward(name, ENTRIES, right=["1", "2"], wrong=["2", "1"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lenient", "accepts an unknown option"),
        ("truth", "returned True, neither None nor a sentence"),
        ("divides", "failed for a group with rewards"),
        ("fickle", "for the same group"),
    ],
)
def test_a_filter_that_breaks_a_promise_is_told_which(name: str, said: str) -> None:
    with pytest.raises(ContractBroken, match=said):
        check_filter(f"kit_{name}", ENTRIES)


@pytest.mark.parametrize(
    ("name", "options"),
    [("kit_good", {}), ("signal", {}), ("reward_band", {"low": 0.1}), ("length", {"most": 5})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_good_filters_and_gcores_own_pass(name: str, options: dict[str, float]) -> None:
    check_filter(name, ENTRIES, options=options)


def test_curricula_are_checked_too() -> None:
    check_curriculum("kit_good", ENTRIES)
    check_curriculum("hard_sources_first", ENTRIES)
    check_curriculum("easy_first", [{**entry, "difficulty": 1} for entry in ENTRIES])
    said: dict[str, Callable[[], None]] = {
        "accepts an unknown option": lambda: check_curriculum("kit_lenient", ENTRIES),
        "for the same entry": lambda: check_curriculum("kit_fickle", ENTRIES),
    }
    for sentence, act in said.items():
        with pytest.raises(ContractBroken, match=sentence):
            act()
