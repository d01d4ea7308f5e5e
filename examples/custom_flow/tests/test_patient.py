"""The contract kit, and what these four do beyond it."""

from __future__ import annotations

from gcore.testing.contracts import check_filter, check_flow, check_reward
from gcore.testing.flows import Asked
from gcore.testing.training import check_advantage

ENTRIES = [{"prompt": f"{number}+5=", "answer": str(number + 5)} for number in range(10, 20)]


async def test_the_flow_keeps_its_promises_and_draws_once_where_an_answer_is_right() -> None:
    def near(asked: Asked) -> str:
        return str(int(asked.prompt.fields["answer"]) + asked.index)  # the first is right

    cluster = await check_flow("patient", ENTRIES, near)
    assert sum(asked.prompt.ref == (0, 0, 0) for asked in cluster.asked) == 4


async def test_it_draws_twice_where_nothing_is_right() -> None:
    cluster = await check_flow("patient", ENTRIES, lambda asked: str(90 + asked.index))
    assert sum(asked.prompt.ref == (0, 0, 0) for asked in cluster.asked) == 8


def test_the_reward_gives_something_for_being_near() -> None:
    check_reward("close", ENTRIES, right=["15", "16"], wrong=["16", "0", "", "fifteen"])


def test_the_filter_wants_two_different_answers() -> None:
    check_filter("two_answers", ENTRIES)


def test_the_estimator_does_not_depend_on_how_samples_are_dealt() -> None:
    check_advantage("against_median")
