"""Rewards with judges: their values, and responses that no judge can judge."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fake_judges import FakeJudge, RecordingObserver

from controllers.flow.evaluation import part_total, score_answers
from controllers.flow.job_data import JobData, SourcePipeline, rewards_of, sampling_of
from gcore.config import JobSpec, parse_spec
from gcore.config.reward import RewardPart, RewardSpec, VerdictSpec
from gcore.config.spec import training_sources
from gcore.data.stream import PromptStream
from gcore.errors import EngineError, EngineUnreachable, SpecError
from gcore.plugins import plugin_trace
from gcore.reward.api import PictureFile, Response, RewardError, RewardResult, Scored
from gcore.reward.judges.judge import Judge, Judgement
from gcore.reward.judges.parsers import CheckedParser
from gcore.reward.judges.types import JudgeAway, JudgeError
from gcore.reward.pool import DirectScorer
from gcore.reward.scorer import ResponseNotJudged, Scorer, reward_functions
from gcore.rollout.api import PicturesUnavailable
from gcore.testing import FakeClock
from gcore.types import Medium, PictureRef, Prompt, PromptRef, Sample, Version, VersionSpan

PROMPT = Prompt(PromptRef(0, 0, 0), "6*7=", (1,), {"answer": "42"})
HEAD = Version(0, 0)
TEMPLATE = "{{ prompt }} {{ response }}"


def judge_tree(name: str = "tutor", **more: Any) -> dict[str, Any]:
    verdict = {"parser": "words", "words": {"yes": 1.0, "no": 0.0}}
    return {"name": name, "model": {"path": "j"}, "template": TEMPLATE, "verdict": verdict, "tries": 1} | more


def job(reward: dict[str, Any], *judges: dict[str, Any]) -> JobSpec:
    return parse_spec(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 1},
            "rollout": {"max_new_tokens": 4},
            "judges": list(judges),
            "reward": reward,
        }
    )


def says(question: str, seed: int) -> str:
    return "yes" if question.endswith(("42", "43")) else "no" if question[-1].isdigit() else "well"


class Court:
    """The rewards of a job whose judges answer by a function: 42 and 43 are right, what is no number they cannot say."""

    def __init__(self, spec: JobSpec, failures: Sequence[JudgeError | None] = ()) -> None:
        self.spec = spec
        self.clock = FakeClock()
        self.fake = FakeJudge(says, self.clock, failures=failures)
        judges = {one.name: Judge.of(one, self.fake, RecordingObserver(), self.clock) for one in spec.judges}
        self.rewards = Scorer(DirectScorer(), judges)

    async def score(self, *responses: str) -> tuple[Scored, ...]:
        shown = [Response(text, 1) for text in responses]
        return await self.clock.run(self.rewards.score(self.spec.reward, PROMPT, shown))

    def pipeline(self, media: Any = None) -> SourcePipeline:
        (source,) = training_sources(self.spec)
        return SourcePipeline(source, sampling_of(self.spec, source), self.rewards, media)


def sample(text: str) -> Sample:
    return Sample((7,), (0.0,), text, "stop", (VersionSpan(HEAD, 0, 1),))


async def test_a_judge_alone_is_the_reward_and_shown_under_its_name() -> None:
    court = Court(job({"judge": "tutor"}, judge_tree()))
    assert await court.score("42", "7") == (
        RewardResult(1.0, (("tutor", 1.0),)),
        RewardResult(0.0, (("tutor", 0.0),)),
    )


async def test_responses_have_the_files_of_their_prompts_pictures_while_they_are_scored(tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(b"42")
    picture = PictureRef("/data/a.png", "ab" * 32, 1, 1, 1, 1)
    held: list[str] = []

    class Media:
        @contextlib.asynccontextmanager
        async def files(self, prompt: Prompt) -> AsyncIterator[tuple[PictureFile, ...]]:
            held.append(prompt.text)
            yield (PictureFile(str(path)),)
            held.append("released")

    class Rules:
        async def warm(self) -> None: ...

        async def score(self, spec: Any, fields: Any, responses: Sequence[Response]) -> tuple[Scored, ...]:
            assert "released" not in held
            return tuple(RewardResult(float(one.pictures[0].read_bytes() == one.encode())) for one in responses)

    court = Court(job({"name": "exact"}))
    court.rewards = Scorer(Rules(), {})
    shown = replace(PROMPT, pictures=(picture,))
    results = await court.clock.run(court.pipeline(Media()).scored(shown, [sample("42"), sample("7")]))
    assert [one.value for one in results] == [1.0, 0.0]
    assert held == [PROMPT.text, "released"]


def with_pictures(text: str, *names: str) -> Sample:
    media = tuple(Medium("picture", name, 4, (1, 2, 3), "uint8") for name in names)
    return Sample(output=sample(text).output._replace(media=media), finish_reason="stop")


class ToolMedia:
    """Stands for the media of a job; the store has the pictures of `there`, as files whose bytes are their names'."""

    def __init__(self, folder: Path, *there: bytes) -> None:
        self.folder = folder
        self.stored_now: list[str] = []
        self.names = [hashlib.sha256(one).hexdigest() for one in there]
        for name, content in zip(self.names, there, strict=True):
            (folder / name).write_bytes(content)

    def picture_files(self, media: Sequence[Medium]) -> tuple[PictureFile, ...]:
        return tuple(PictureFile(str(self.folder / one.sha256), one.sha256, *one.shape[:2]) for one in media)

    @contextlib.asynccontextmanager
    async def stored(self, media: Sequence[Medium]) -> AsyncIterator[None]:
        if any(one.sha256 not in self.names for one in media):
            raise PicturesUnavailable("a picture was lost", fix="Again")
        self.stored_now += [one.sha256 for one in media]
        yield
        self.stored_now.clear()


async def test_responses_have_the_files_of_the_pictures_of_their_own_tools_while_they_are_scored(
    tmp_path: Path,
) -> None:
    media = ToolMedia(tmp_path, b"one", b"two")
    one, two = media.names

    class Rules:
        async def warm(self) -> None: ...

        async def score(self, spec: Any, fields: Any, responses: Sequence[Response]) -> tuple[Scored, ...]:
            assert media.stored_now == [one, two, two]
            assert not any(one.pictures for one in responses)
            shown = [b" ".join(path.read_bytes() for path in one.tool_pictures) for one in responses]
            return tuple(RewardResult(float(text == b"one two")) for text in shown)

    court = Court(job({"name": "exact"}))
    court.rewards = Scorer(Rules(), {})
    scored = court.pipeline(media).scored(PROMPT, [with_pictures("a", one, two), with_pictures("a", two), sample("a")])
    assert [one.value for one in await court.clock.run(scored)] == [1.0, 0.0, 0.0]
    assert media.stored_now == []


async def test_a_lost_picture_of_a_tool_has_the_prompt_sampled_again(tmp_path: Path) -> None:
    media = ToolMedia(tmp_path)
    court = Court(job({"judge": "tutor"}, judge_tree()))
    lost = with_pictures("42", "ab" * 32)
    with pytest.raises(EngineError, match="a picture was lost"):
        await court.clock.run(court.pipeline(media).scored(PROMPT, [lost]))
    await court.clock.run(court.pipeline(media).judge_early(PROMPT, lost))
    assert court.fake.asked == []


@pytest.mark.parametrize(("name", "whose"), [("files", "the prompt"), ("tool_files", "a tool")])
def test_a_picture_that_is_missing_or_has_other_bytes_is_an_error_of_the_response(
    tmp_path: Path, name: str, whose: str
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"picture")
    given: dict[str, Any] = {name: [(str(file), hashlib.sha256(b"picture").hexdigest())]}
    response = Response("48", **given)
    assert (response.pictures, response.tool_pictures) == (((file,), ()) if name == "files" else ((), (file,)))
    file.write_bytes(b"changed")
    with pytest.raises(RewardError, match=f"a picture of {whose} has other bytes"):
        _ = (response.pictures, response.tool_pictures)
    file.unlink()
    with pytest.raises(RewardError, match=f"cannot read a picture of {whose}"):
        _ = (response.pictures, response.tool_pictures)


async def test_judges_and_functions_are_composed_as_any_parts() -> None:
    parts = [{"name": "exact", "weight": 0.5}, {"judge": "tutor", "weight": 2}, {"judge": "other", "label": "second"}]
    court = Court(job({"parts": parts}, judge_tree(), judge_tree("other")))
    right, judged_right, wrong = await court.score("42", "43", "7")
    assert isinstance(right, RewardResult)
    assert right.value == 3.5
    assert dict(right.parts) == {"exact": 1.0, "tutor": 1.0, "second": 1.0} | {
        name: value for name, value in right.parts if name.startswith("exact.")
    }
    assert [one.value for one in (judged_right, wrong) if isinstance(one, RewardResult)] == [3.0, 0.0]


async def test_standardised_parts_compare_a_group_in_training_and_add_up_in_evaluation() -> None:
    parts = [{"name": "exact", "weight": 3}, {"judge": "tutor"}]
    court = Court(job({"parts": parts, "compose": "standardised"}, judge_tree()))
    pipeline, samples = court.pipeline(), [sample("42"), sample("43"), sample("7")]
    trained = await court.clock.run(pipeline.scored(PROMPT, samples))
    z = math.sqrt(1 / 3)  # deviations of one and of two of three responses
    assert [one.value for one in trained] == pytest.approx([6 * z + z, -3 * z + z, -3 * z - 2 * z])
    shown = [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    assert [(dict(one.parts)["exact"], dict(one.parts)["tutor"]) for one in trained] == shown
    evaluated = await court.clock.run(replace(pipeline, evaluates=True).scored(PROMPT, samples))
    assert [one.value for one in evaluated] == [4.0, 1.0, 0.0]


@pytest.mark.parametrize(("on_error", "again"), [("retry", True), ("fail_group", False)])
async def test_a_response_that_cannot_be_judged_is_never_worth_nothing(on_error: str, again: bool) -> None:
    court = Court(job({"judge": "tutor"}, judge_tree(on_error=on_error)))
    judged, odd = await court.score("42", "what")
    assert judged == RewardResult(1.0, (("tutor", 1.0),))
    assert isinstance(odd, ResponseNotJudged)
    assert (odd.again, odd.away) == (again, False)
    assert odd.what.startswith("judge 'tutor': the answer cannot be read")
    pipeline = court.pipeline()
    with pytest.raises(EngineError if again else RewardError, match="judge 'tutor'"):
        await court.clock.run(pipeline.scored(PROMPT, [sample("42"), sample("what")]))


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        pytest.param(judge_tree(template="{{ response }} {{ fields.hint }}"), "there is no field 'hint'", id="field"),
        pytest.param(judge_tree(verdict={"parser": "odd"}), "verdict parser 'odd' raised", id="parser"),
        pytest.param(
            judge_tree(mode="pairwise", template="{{ first }} {{ second }}"), "the group has one response", id="alone"
        ),
    ],
)
async def test_a_prompt_fails_at_once_where_no_other_response_to_it_could_be_judged(
    judge: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(answer: str, spec: VerdictSpec) -> float:
        raise ZeroDivisionError(answer)

    own = CheckedParser("odd", odd)
    if judge["verdict"]["parser"] == "odd":
        monkeypatch.setattr("gcore.reward.judges.judge.find_parser", lambda name, where: own)
    court = Court(job({"judge": "tutor"}, judge))
    with pytest.raises(RewardError, match=why) as raised:
        await court.clock.run(court.pipeline().scored(PROMPT, [sample("42")]))
    assert ("ZeroDivisionError: yes" in plugin_trace(raised.value)) == (judge["verdict"]["parser"] == "odd"), (
        "for the event"
    )


async def test_another_reward_scores_in_place_of_a_judge_where_the_spec_names_one() -> None:
    spec = job({"judge": "tutor"}, judge_tree(on_error={"fallback": "length", "options": {"limit": 3}}))
    court = Court(spec, failures=[None, JudgeAway("no engine")])
    first, second, third = await court.score("42", "7", "what")
    assert [one.value for one in (first, second, third) if isinstance(one, RewardResult)] == [1.0, 1.0, 1.0]
    assert rewards_of(spec) == {"data": RewardSpec(name="length", options={"limit": 3})}


async def test_a_judge_that_cannot_be_asked_says_nothing_of_an_evaluated_answer() -> None:
    spec = job({"judge": "tutor"}, judge_tree(on_error="fail_group"))
    pipeline = Court(spec, failures=[JudgeAway("no engine")]).pipeline()
    court = Court(spec)
    with pytest.raises(EngineUnreachable, match="no engine"):
        await FakeClock().run(score_answers(pipeline, 1.0, PROMPT, [sample("42")], HEAD))
    (mark,) = await court.clock.run(score_answers(court.pipeline(), 1.0, PROMPT, [sample("what")], HEAD))
    assert not mark.shown.correct
    assert mark.shown.unscored.startswith("judge 'tutor': the answer cannot be read")


@pytest.mark.parametrize("on_error", ["retry", "fail_group", {"fallback": "length", "options": {"limit": 3}}], ids=str)
async def test_a_judge_that_is_only_shown_makes_no_right_answer_wrong(on_error: Any) -> None:
    parts = [{"name": "exact", "label": "right"}, {"judge": "tutor", "label": "judged", "weight": 0}]
    court = Court(
        job({"parts": parts}, judge_tree(on_error=on_error)), [JudgeAway("no engine"), JudgeError("too long")]
    )
    pipeline, samples = court.pipeline(), [sample("42"), sample("7"), sample("43")]
    marks = await court.clock.run(score_answers(pipeline, 1.0, PROMPT, samples, HEAD))
    assert [(one.shown.correct, one.shown.unscored) for one in marks] == [(True, ""), (False, ""), (False, "")]
    assert marks[2].parts == {"right": 0.0, "judged": 1.0}
    if on_error == "retry":
        assert [dict(one.parts) for one in marks[:2]] == [{"right": 1.0}, {"right": 0.0}]
        assert part_total("judged", marks) == 3.0
        assert part_total("right", marks) == 1.0
    assert [one.value for one in await court.clock.run(pipeline.scored(PROMPT, samples))] == [1.0, 0.0, 0.0]


async def test_with_min_a_judge_of_no_weight_decides_and_so_must_judge() -> None:
    parts = [{"name": "exact"}, {"judge": "tutor", "weight": 0}]
    (odd,) = await Court(job({"parts": parts, "compose": "min"}, judge_tree()), [JudgeError("too long")]).score("42")
    assert isinstance(odd, ResponseNotJudged)


async def test_an_error_of_one_part_is_the_responses_and_says_which_part() -> None:
    parts = [{"name": "exact", "answer": "missing"}, {"judge": "tutor"}]
    (error,) = await Court(job({"parts": parts}, judge_tree())).score("42")
    assert isinstance(error, RewardError)
    assert error.what.startswith("part 'exact': the prompt's entry has no answer")


async def test_early_verdict_is_not_requested_again() -> None:
    parts = [{"name": "exact"}, {"judge": "tutor"}]
    court = Court(job({"parts": parts}, judge_tree()))
    pipeline = court.pipeline()
    assert pipeline.has_judges
    await court.clock.run(pipeline.judge_early(PROMPT, sample("42")))
    assert [one.question for one in court.fake.asked] == ["6*7= 42"]
    await court.clock.run(pipeline.scored(PROMPT, [sample("42"), sample("7")]))
    assert [one.question for one in court.fake.asked] == ["6*7= 42", "6*7= 7"]
    await court.clock.run(pipeline.judge_early(PROMPT, sample("what")))  # its error is told when the group is scored


async def test_failed_early_judging_is_retried_only_when_the_prompt_is_issued_again() -> None:
    court = Court(job({"judge": "tutor"}, judge_tree()))
    pipeline, odd = court.pipeline(), [sample("what"), sample("what")]
    await court.clock.run(pipeline.judge_early(PROMPT, sample("what")))
    for times in (1, 2):
        with pytest.raises(EngineError, match="the answer cannot be read"):
            await court.clock.run(pipeline.scored(PROMPT, odd))
        assert len(court.fake.asked) == times
        pipeline.forget(PROMPT)


async def test_a_judge_that_fails_early_leaves_the_others_to_finish() -> None:
    spec = job({"parts": [{"judge": "tutor"}, {"judge": "other"}]}, judge_tree(), judge_tree("other"))
    court = Court(spec, [JudgeError("too long"), None])
    waits = iter((1.0, 5.0))
    court.fake.delay_s = lambda question: next(waits)
    await court.clock.run(court.pipeline().judge_early(PROMPT, sample("42")))
    assert await court.clock.run(court.rewards.judges["other"].values(PROMPT, ["42"])) == (Judgement(1.0, 1, 0),)
    assert len(court.fake.asked) == 2


async def test_a_question_that_could_not_be_put_early_is_put_again() -> None:
    court = Court(job({"judge": "tutor"}, judge_tree()), [JudgeAway("no engine")])
    pipeline = court.pipeline()
    await court.clock.run(pipeline.judge_early(PROMPT, sample("42")))
    assert [one.value for one in await court.clock.run(pipeline.scored(PROMPT, [sample("42")]))] == [1.0]


async def test_no_prompt_is_begun_while_a_judge_has_all_the_questions_that_it_may_have() -> None:
    court = Court(job({"judge": "tutor"}, judge_tree(queue=1)))
    court.fake.delay_s = lambda question: 5.0
    pipeline = court.pipeline()
    data = JobData(court.spec, "u", cast(PromptStream, None), {"data": pipeline}, evaluation=(), evaluated={})
    assert not data.is_held_back
    judging = asyncio.create_task(pipeline.judge_early(PROMPT, sample("42")))
    await court.clock.advance(1.0)
    assert data.is_held_back
    await court.clock.advance(10.0)
    await judging
    assert not data.is_held_back


def test_the_functions_of_a_reward_are_its_parts_and_what_scores_instead_of_judges() -> None:
    fallback = judge_tree(on_error={"fallback": "regex", "options": {"pattern": "x"}})
    spec = job({"parts": [{"name": "exact"}, {"judge": "tutor"}], "answer": "solution"}, fallback)
    assert reward_functions(spec.reward, {one.name: one for one in spec.judges}) == (
        RewardSpec(name="exact", answer="solution"),
        RewardSpec(name="regex", options={"pattern": "x"}, answer="solution"),
    )
    assert reward_functions(RewardSpec(), {}) == (RewardSpec(),)
    with pytest.raises(ValueError, match="is a judge"):
        spec.reward.of_part(RewardPart(judge="tutor"))


def test_judge_needs_no_answer_field() -> None:
    spec = job({"parts": [{"name": "exact", "answer": "solution"}, {"judge": "tutor"}]}, judge_tree())
    assert spec.reward.answers == ("solution",)
    assert replace(training_sources(job({"judge": "tutor"}, judge_tree()))[0]).reward.answers == ()


@pytest.mark.parametrize(
    ("reward", "judges", "why"),
    [
        ({"judge": "tuter"}, [judge_tree()], "did you mean 'tutor'"),
        ({"judge": "tutor"}, [], "the spec has no judges"),
        ({"name": "exact"}, [judge_tree()], "not used by any reward"),
        ({"judge": "tutor"}, [judge_tree(), judge_tree()], "two judges have the same name"),
        ({"judge": "tutor", "name": "exact"}, [judge_tree()], "only one of judge, name"),
        ({"parts": [{"weight": 2}]}, [], "neither is set"),
        ({"parts": [{"judge": "tutor", "name": "exact"}]}, [judge_tree()], "both is given|both"),
        ({"parts": [{"judge": "tutor", "answer": "x"}]}, [judge_tree()], "leave options and answer out"),
        ({"judge": "tutor"}, [judge_tree(votes=3)], "votes is 3 with temperature 0"),
        ({"judge": "tutor"}, [judge_tree(model=None)], "none is set"),
        ({"judge": "tutor"}, [judge_tree(opponents=2)], "opponents need"),
        ({"judge": "tutor"}, [judge_tree(kind="classifier")], "verdict needs kind: generative"),
    ],
    ids=[
        "unknown",
        "no-judges",
        "idle",
        "twice",
        "judge-and-name",
        "empty-part",
        "part-with-both",
        "answer-for-a-judge",
        "greedy-votes",
        "no-model",
        "opponents",
        "classifier",
    ],
)
def test_judges_that_cannot_be_are_refused_with_a_sentence(
    reward: dict[str, Any], judges: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(SpecError, match=why):
        job(reward, *judges)
