"""A judge: questions, tries, votes and pairs give values or a reason for their absence; and statistics for users."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from fake_judges import FakeClassifier, FakeJudge, RecordingObserver
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import JudgeSpec
from gcore.errors import SpecError
from gcore.reward.judges.judge import Judge, Judgement, vote_seed
from gcore.reward.judges.types import ChatCall, JudgeAway, JudgeError, JudgeLate, ScoreCall
from gcore.system.clock import FIRST_DELAY_S, LONGEST_DELAY_S, retry_delay
from gcore.testing import FakeClock
from gcore.types import Prompt, PromptRef

T = TypeVar("T")
PROMPT = Prompt(PromptRef(0, 0, 0), "q", (1,), {"answer": 3})
POINTWISE, PAIRWISE = "{{ prompt }} {{ response }}", "{{ prompt }} {{ first }} {{ second }}"
AWAY, LONG = JudgeAway("no engine"), JudgeError("too long")


def spec(**told: Any) -> JudgeSpec:
    base = {"name": "tutor", "model": {"path": "m"}, "template": POINTWISE}
    if told.get("mode") == "pairwise":
        base["template"] = PAIRWISE
    return JudgeSpec.model_validate(base | told)


def last_word(question: str, seed: int) -> str:
    return question.split()[-1]


class Court:
    """A judge with all that it needs."""

    def __init__(
        self,
        told: JudgeSpec,
        answer: Callable[[str, int], str] = last_word,
        ask: ChatCall | ScoreCall | None = None,
        **fake: Any,
    ) -> None:
        self.clock = FakeClock()
        self.fake = FakeJudge(answer, self.clock, **fake)
        self.heard = RecordingObserver()
        self.judge = Judge.of(told, ask or self.fake, self.heard, self.clock)

    async def value(self, response: str) -> Judgement:
        return await self.run(self.judge.value(PROMPT, response))

    async def values(self, *responses: str) -> tuple[Judgement | JudgeError, ...]:
        return await self.run(self.judge.values(PROMPT, responses))

    async def run(self, judged: Awaitable[T]) -> T:
        return await self.clock.run(judged)


def numbers(judged: Sequence[Judgement | JudgeError]) -> list[float | str]:
    return [one.value if isinstance(one, Judgement) else one.what for one in judged]


async def test_a_response_is_worth_what_the_judge_writes() -> None:
    court = Court(spec(), delay_s=lambda question: 2.0)
    assert await court.value("0.75") == Judgement(0.75, 1, 0)
    assert [one.question for one in court.fake.asked] == ["q 0.75"]
    assert court.heard == RecordingObserver(asked_of=[(2.0, 2, 1)], verdicts=[0.75])


async def test_responses_are_judged_at_the_same_time_each_with_its_own_reason() -> None:
    court = Court(spec(), delay_s=lambda question: 2.0)
    judged = await court.values("0.5", "hm", "1", "7")
    assert numbers(judged) == [
        0.5,
        "the answer cannot be read: it contains no number",
        1.0,
        "the answer cannot be read: 7 is not between 0 and 1",
    ]
    assert court.clock.monotonic() == 1002.0
    assert court.heard.examples == ["hm", "7"]


async def test_the_same_response_is_judged_once() -> None:
    court = Court(spec(), delay_s=lambda question: 1.0)
    assert numbers(await court.values("1", "1", "0", "1")) == [1.0, 1.0, 0.0, 1.0]
    assert await court.value("0") == Judgement(0.0, 1, 0)
    assert len(court.fake.asked) == 2
    assert court.heard.known == 3
    assert sorted(court.heard.verdicts) == [0.0, 1.0]


async def test_votes_are_asked_at_once_each_with_its_seed_and_the_mean_counts() -> None:
    seeds = [vote_seed("tutor", "q 1", vote) for vote in range(4)]
    said = dict(zip(seeds, ["1", "0.5", "hm", "0"], strict=True))
    court = Court(spec(votes=4, temperature=1.0), lambda question, seed: said[seed])
    assert await court.value("1") == Judgement(0.5, 3, 1, "hm")
    assert [one.seeds for one in court.fake.asked] == [tuple(seeds)]
    assert court.heard.examples == ["hm"]
    assert court.heard.asked_of == [(0.0, 8, 4)]


async def test_a_judge_that_is_away_is_asked_again_later_and_later_with_the_same_seeds() -> None:
    court = Court(spec(tries=3), failures=[AWAY, AWAY])
    assert (await court.value("1")).value == 1.0
    assert len({(one.question, one.seeds) for one in court.fake.asked}) == 1
    assert len(court.fake.asked) == 3
    assert court.clock.monotonic() == pytest.approx(1000.0 + retry_delay(1) + retry_delay(2))
    assert court.heard.failures == ["away", "away"]


async def test_a_judge_that_stays_away_is_given_up_after_its_tries_and_asked_anew_the_next_time() -> None:
    court = Court(spec(tries=2), failures=[AWAY, AWAY])
    with pytest.raises(JudgeAway, match="no engine"):
        await court.value("1")
    assert (await court.value("1")).value == 1.0
    assert court.heard.failures == ["away", "away"]


async def test_permanent_failures_are_not_retried() -> None:
    court = Court(spec(tries=5), failures=[LONG])
    assert numbers(await court.values("1", "1")) == ["too long"] * 2
    with pytest.raises(JudgeError, match="too long"):
        await court.value("1")
    assert len(court.fake.asked) == 1
    assert court.heard == RecordingObserver(failures=["refused"], known=2)
    court.judge.forget(PROMPT.ref)
    assert (await court.value("1")).value == 1.0


async def test_of_so_many_prompts_alone_it_is_remembered_what_cannot_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcore.reward.judges.judge.MOST_IN_VAIN", 2)
    court = Court(spec())
    for seq in (0, 1, 2, 2, 1, 0):
        prompt = replace(PROMPT, ref=PromptRef(0, 0, seq), text=str(seq))
        await court.run(court.judge.values(prompt, ["hm"]))
    assert [one.question for one in court.fake.asked] == ["0 hm", "1 hm", "2 hm", "0 hm"]


async def test_an_answer_that_comes_too_late_is_asked_for_again_and_told_as_such() -> None:
    court = Court(spec(tries=3), failures=[JudgeLate("no answer"), AWAY, None], delay_s=lambda question: 1.0)
    assert (await court.value("1")).value == 1.0
    assert court.clock.monotonic() == pytest.approx(1000.0 + 3 + retry_delay(1) + retry_delay(2))
    assert court.heard.failures == ["timeout", "away"]
    assert court.heard.asked_of == [(pytest.approx(1.0), 2, 1)]


async def test_a_judge_is_full_while_as_many_questions_are_open_as_it_may_have() -> None:
    court = Court(spec(queue=2), delay_s=lambda question: 50.0)
    judging = [asyncio.create_task(court.judge.value(PROMPT, response)) for response in ("0", "0", "1")]
    await court.clock.advance(1.0)
    assert court.judge.is_full
    assert court.fake.open == 2, "the same question is open once"
    await court.clock.advance(60.0)
    await asyncio.gather(*judging)
    assert not court.judge.is_full


async def test_a_question_between_two_tries_is_open() -> None:
    court = Court(spec(queue=1, tries=3), failures=[AWAY] * 2)
    judging = asyncio.create_task(court.judge.value(PROMPT, "1"))
    await court.clock.advance(retry_delay(1) / 2)
    assert (court.fake.open, court.judge.is_full) == (0, True)
    await court.clock.advance(retry_delay(1) + retry_delay(2))
    await judging
    assert not court.judge.is_full


async def test_cancellation_leaves_no_open_question() -> None:
    court = Court(spec(), delay_s=lambda question: 50.0)
    judging = asyncio.create_task(court.judge.values(PROMPT, ["1", "0"]))
    await court.clock.advance(1.0)
    assert court.fake.open == 2
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert court.fake.open == 0
    assert (await court.value("1")).value == 1.0


async def test_an_entry_that_the_template_does_not_take_is_told_and_nothing_is_asked() -> None:
    court = Court(spec(template="{{ response }} {{ fields.solution }}"))
    with pytest.raises(JudgeError, match="there is no field 'solution'; the fields are 'answer'"):
        await court.value("1")
    assert court.fake.asked == []


async def test_too_few_answers_are_an_error() -> None:
    async def mute(question: str, seeds: Sequence[int], pictures: Any) -> tuple[Any, ...]:
        return ()

    with pytest.raises(JudgeError, match="returned 0 answers; 1 were requested"):
        await Court(spec(), ask=mute).value("1")


async def test_a_classifier_gives_its_number_as_it_is() -> None:
    court = Court(spec(kind="classifier"))
    classifier = FakeClassifier(lambda question: -3.5, court.clock, delay_s=lambda question: 1.0, failures=[AWAY])
    judge = Judge.of(spec(kind="classifier"), classifier, court.heard, court.clock)
    assert await court.run(judge.value(PROMPT, "1")) == Judgement(-3.5, 1, 0)
    assert [one.question for one in classifier.asked] == ["q 1", "q 1"]
    assert court.heard == RecordingObserver(asked_of=[(1.0, 2, 0)], failures=["away"], verdicts=[-3.5])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e39], ids=str)
async def test_a_classifiers_number_is_finite(number: float) -> None:
    clock, heard = FakeClock(), RecordingObserver()
    judge = Judge.of(spec(kind="classifier"), FakeClassifier(lambda question: number, clock), heard, clock)
    with pytest.raises(JudgeError, match="not finite"):
        await clock.run(judge.value(PROMPT, "1"))
    assert heard.verdicts == []


def prefers(better: Callable[[str, str], float]) -> Callable[[str, int], str]:
    return lambda question, seed: str(better(*question.split()[1:]))


def larger(first: str, second: str) -> float:
    return 0.5 + 0.5 * ((first > second) - (first < second))


async def test_a_pairwise_judge_is_asked_about_every_pair_in_both_orders_at_the_same_time() -> None:
    court = Court(spec(mode="pairwise"), prefers(larger), delay_s=lambda question: 1.0)
    judged = await court.values("a", "c", "b")
    assert judged == (Judgement(0.0, 4, 0), Judgement(1.0, 4, 0), Judgement(0.5, 4, 0))
    assert sorted(one.question for one in court.fake.asked) == sorted(
        f"q {x} {y}" for x in "abc" for y in "abc" if x != y
    )
    assert court.clock.monotonic() == 1001.0
    assert court.heard.shares == [0.0]


async def test_with_opponents_only_so_many_are_asked_about() -> None:
    court = Court(spec(mode="pairwise", opponents=2), prefers(larger))
    await court.values(*"abcdefgh")
    assert len(court.fake.asked) == 8 * 2


async def test_a_judge_that_prefers_a_place_disagrees_with_itself() -> None:
    court = Court(spec(mode="pairwise"), lambda question, seed: "1")
    assert numbers(await court.values("a", "b", "c")) == [0.5, 0.5, 0.5]
    assert court.heard.shares == [1.0]


async def test_responses_with_the_same_text_are_equal_and_nobody_is_asked() -> None:
    court = Court(spec(mode="pairwise"), lambda question, seed: "1")
    assert numbers(await court.values("a", "a")) == [0.5, 0.5]
    assert court.fake.asked == []
    assert court.heard.shares == []  # nothing was asked, so nothing was contradicted
    assert numbers(await court.values("a", "a", "b")) == [0.5, 0.5, 0.5]
    assert len(court.fake.asked) == 2


async def test_a_pair_of_which_one_order_cannot_be_read_counts_by_the_other() -> None:
    court = Court(spec(mode="pairwise"), lambda question, seed: "0.75" if question == "q a b" else "hm")
    assert await court.values("a", "b") == (Judgement(0.75, 1, 0), Judgement(0.25, 1, 0))
    assert court.heard.shares == []


async def test_a_response_none_of_whose_pairs_can_be_read_is_an_error_and_the_others_are_not() -> None:
    court = Court(spec(mode="pairwise"), lambda question, seed: "hm" if "c" in question else "1")
    values = numbers(await court.values("a", "b", "c"))
    assert values[:2] == [0.5, 0.5]
    assert "the answer cannot be read" in str(values[2])


async def test_a_pair_that_could_not_be_asked_about_takes_both_its_responses() -> None:
    def away(question: str, seed: int) -> str:
        if question == "q a b":
            raise AWAY
        return "1"

    judged = await Court(spec(mode="pairwise", tries=1), away).values("a", "b", "c")
    assert [isinstance(one, JudgeAway) for one in judged] == [True, True, False]


async def test_one_response_alone_cannot_be_compared() -> None:
    court = Court(spec(mode="pairwise"))
    (alone,) = await court.values("a")
    assert isinstance(alone, JudgeError)
    assert "the group has one response" in str(alone)
    assert await court.values() == ()
    with pytest.raises(RuntimeError, match="cannot score a single response"):
        await court.value("a")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        pytest.param({"template": "{{ reply }}"}, r"^judges\.2\.template: line 1", id="template"),
        pytest.param({"verdict": {"parser": "wrods"}}, r"^judges\.2\.verdict\.parser: .*'words'", id="parser"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_with_its_key(told: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Judge.of(spec(**told), FakeJudge(last_word, FakeClock()), RecordingObserver(), FakeClock(), where="judges.2")


@given(st.text(max_size=20), st.text(), st.integers(0, 63))
def test_a_seed_is_always_the_same_63_bits_and_another_for_another_vote(judge: str, question: str, vote: int) -> None:
    seed = vote_seed(judge, question, vote)
    assert 0 <= seed < 1 << 63
    assert seed == vote_seed(judge, question, vote)
    assert len({seed, vote_seed(judge, question, vote + 1), vote_seed(judge, question + "?", vote)}) == 3
    assert seed != vote_seed(judge + "x", question, vote)


def test_seeds_of_today_are_those_of_tomorrow() -> None:
    assert vote_seed("tutor", "12+7=19?", 0) == SEED_OF_TUTOR


SEED_OF_TUTOR = 5466993238604442438
"""A job that goes on under a newer gcore gets the same verdicts."""


def test_tries_are_spaced_more_and_more_up_to_a_limit() -> None:
    assert [retry_delay(tries) for tries in (1, 2, 5, 6, 1000)] == [FIRST_DELAY_S, 0.4, 3.2, LONGEST_DELAY_S, 5.0]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        pytest.param(
            {"verdict": {"parser": "words", "words": {"bad": -1}}},
            "'bad' has value -1, which is not between least",
            id="word",
        ),
        pytest.param({"verdict": {"options": {"each": 1}}}, "parser: number has no options", id="options"),
        pytest.param({"mode": "pairwise", "verdict": {"most": 10}}, "set verdict.scale: true", id="pairwise, to 10"),
        pytest.param({"mode": "pairwise", "verdict": {"least": -1}}, "gives -1 to 1", id="pairwise, from -1"),
    ],
)
def test_a_verdict_that_could_never_be_is_refused_in_the_spec(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**told)


def test_a_pairwise_verdict_of_another_range_is_scaled() -> None:
    assert spec(mode="pairwise", verdict={"least": 1, "most": 5, "scale": True}).verdict.most == 5
