"""Third-party policies: whatever they do, the planner gets a decision or an error sentence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controllers.planning.planner import MOST_IDLE, MOST_NAME, PolicyFailed, PolicyRunner, check_decision
from placement.policies.base import Decision, Situation, SwitchCosts
from placement.slots import Split, SplitBounds

SITUATION = Situation(SplitBounds(4, train_sizes=(1,)), None, (), SwitchCosts(1.0, 2.0), None)
GOOD = Decision(Split("coexisting", 2, 1, 1), "why")


class Of:
    """A policy with scripted behaviour."""

    def __init__(self, plan: Callable[[], Any]) -> None:
        self._plan = plan

    def plan(self, situation: Situation) -> Decision:
        found: Decision = self._plan()
        return found


def raising(error: BaseException) -> Callable[[], Any]:
    def plan() -> Any:
        raise error

    return plan


async def test_policy_decision_is_returned() -> None:
    assert await PolicyRunner().ask_policy(Of(lambda: GOOD), SITUATION) == GOOD


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no idea"), StopIteration(), asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(3)],
    ids=lambda error: type(error).__name__,
)
async def test_policy_exception_becomes_a_sentence(error: BaseException) -> None:
    consulting = PolicyRunner()
    with pytest.raises(PolicyFailed, match=type(error).__name__):
        await consulting.ask_policy(Of(raising(error)), SITUATION)
    assert await consulting.ask_policy(Of(lambda: GOOD), SITUATION) == GOOD


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError(), SystemExit(3), RuntimeError("half \ud800 of it\nand more")],
    ids=lambda e: type(e).__name__,
)
async def test_exception_of_a_policys_constructor_becomes_a_sentence(error: BaseException) -> None:
    consulting = PolicyRunner()
    with pytest.raises(PolicyFailed, match=type(error).__name__) as caught:
        await consulting.make_policy(raising(error))
    assert len(caught.value.what.splitlines()) == 1
    assert caught.value.__cause__ is error, "the log has its traceback"
    with pytest.raises(PolicyFailed, match="'object', which has no method plan"):
        await consulting.make_policy(object)
    made = Of(lambda: GOOD)
    assert await consulting.make_policy(lambda: made) is made


class Silent(Exception):
    """Fails to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("in the middle")


async def test_an_error_that_cannot_say_what_it_is_is_told_by_its_name() -> None:
    with pytest.raises(PolicyFailed, match=r"^Silent$"):
        await PolicyRunner().ask_policy(Of(raising(Silent())), SITUATION)


async def test_a_policy_whose_making_hangs_holds_up_nobody() -> None:
    may_end, consulting = threading.Event(), PolicyRunner(limit_s=0.05)
    with pytest.raises(PolicyFailed, match="has not returned within"):
        await consulting.make_policy(lambda: may_end.wait(30.0))
    may_end.set()


async def test_a_policy_that_hangs_is_left_and_not_asked_again_before_it_has_answered() -> None:
    may_end, consulting = threading.Event(), PolicyRunner(limit_s=0.05)
    hangs = Of(lambda: may_end.wait(30.0) and GOOD)
    with pytest.raises(PolicyFailed, match="has not returned within"):
        await consulting.ask_policy(hangs, SITUATION)
    with pytest.raises(PolicyFailed, match="from its previous call"):
        await consulting.ask_policy(Of(lambda: GOOD), SITUATION)
    assert consulting._thread is not None
    assert consulting._thread.daemon, "a process ends without it"
    may_end.set()
    await asyncio.to_thread(consulting._thread.join)
    consulting._limit_s = 30.0
    assert await consulting.ask_policy(Of(lambda: GOOD), SITUATION) == GOOD


def made(**more: Any) -> Any:
    return replace(GOOD, **more)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(None, id="nothing"),
        pytest.param({"split": GOOD.split}, id="a mapping"),
        pytest.param(made(split=(2, 1, 1)), id="a split of another kind"),
        pytest.param(made(split=Split("coexist", 2, 1, 1)), id="a mode that is none"),  # type: ignore[arg-type]
        pytest.param(made(split=Split("coexisting", 2.0, 1, 1)), id="parts of slots"),  # type: ignore[arg-type]
        pytest.param(made(split=Split("coexisting", True, 1, 1)), id="truth for a number"),
        pytest.param(made(split=Split("coexisting", -1, 4, 1)), id="fewer slots than none"),
        pytest.param(made(split=Split("coexisting", 10**5000, 1, 1)), id="slots that cannot be told of"),
        pytest.param(made(reason=None), id="no reason"),
        pytest.param(made(idle=[1, 2]), id="idle that is a list"),
        pytest.param(made(idle={"rollout": "much"}), id="idle in words"),
        pytest.param(made(idle={1: 0.5}), id="idle by number"),
        pytest.param(made(idle={str(n): 0.5 for n in range(MOST_IDLE + 1)}), id="idle of many"),
        pytest.param(made(idle={"p" * (MOST_NAME + 1): 0.5}), id="idle of a pool with no end of a name"),
        pytest.param(made(expected_s="soon"), id="seconds in words"),
        pytest.param(made(cost_s=float("nan")), id="a cost that is no number"),
        pytest.param(made(gain_s=float("inf")), id="a gain without end"),
    ],
)
def test_invalid_decisions_are_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(PolicyFailed):
        check_decision(given)


def test_a_reason_that_cannot_be_written_down_is_mended() -> None:
    check_decision(made(reason="half \ud800 of it")).reason.encode()


def test_decision_is_copied_from_the_policys_objects() -> None:
    idle = {"rollout": 0.5}
    found = check_decision(made(idle=idle))
    idle["rollout"] = float("nan")
    assert found.idle == {"rollout": 0.5}
