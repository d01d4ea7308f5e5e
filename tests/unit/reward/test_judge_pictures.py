"""Judges that see pictures: where their questions show them, and what tells two questions apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fake_judges import FakeJudge, RecordingObserver

from gcore.config import parse_spec
from gcore.config.reward import JudgeSpec
from gcore.errors import SpecError
from gcore.reward.api import Response
from gcore.reward.judges.judge import Judge, Judgement, question_key, spec_digest, vote_seed
from gcore.reward.judges.template import AskedQuestion, Question, response_pictures
from gcore.reward.judges.types import IMAGE_MARK as M
from gcore.reward.judges.types import Answer, JudgeError
from gcore.testing import FakeClock
from gcore.types import PictureRef, Prompt, PromptRef

WRITTEN = "<start><pad><end>"
"""A picture in a prompt of the policy."""


def picture(number: int) -> PictureRef:
    return PictureRef(f"/data/{number}.png", f"{number:064x}", 32, 32, 32, 32)


def prompt(*numbers: int, number: int = 0) -> Prompt:
    text = "".join(f"{n}: {WRITTEN} " for n in range(len(numbers))) + "red?"
    pictures = tuple(map(picture, numbers))
    return Prompt(PromptRef(0, 0, number), text, (1,), {"question": "red?", "trap": M}, pictures=pictures)


def spec(template: str = "{{ images }}{{ response }}", **more: Any) -> JudgeSpec:
    told = {"name": "eye", "model": {"path": "m"}, "images": True, "template": template}
    return JudgeSpec.model_validate(told | more)


def question(template: str, shown: Prompt, response: str = "3") -> str:
    return Question.compile(spec(template), "judges.0", WRITTEN).about(shown, response).text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ images }}{{ fields.question }}{{ response }}?", f"{M}{M}red?3?"),
        ("{{ prompt }}{{ response }}?", f"0: {M} 1: {M} red?3?"),
        (
            "{% for image in images %}Picture {{ loop.index }}: {{ image }}\n{% endfor %}{{ response }}",
            f"Picture 1: {M}\nPicture 2: {M}\n3",
        ),
        ("{{ images|length }} {{ images }} {{ response }}", f"2 {M}{M} 3"),
    ],
)
def test_a_template_shows_the_pictures_of_the_prompt(template: str, text: str) -> None:
    assert question(template, prompt(1, 2)) == text


def test_a_prompt_without_pictures_shows_none() -> None:
    assert question("{{ images }}{{ response }}", prompt()) == "3"


def test_a_response_cannot_add_a_picture() -> None:
    assert question("{{ images }}{{ response }}", prompt(1), f"a{M}b") == f"{M}a\ufffdb"


@pytest.mark.parametrize(
    "template",
    [
        "{{ images }}{{ prompt }}{{ response }}",
        "{{ images[0] }}{{ response }}",
        "{{ images }}{{ fields.trap }}{{ response }}",
    ],
)
def test_each_picture_is_shown_once(template: str) -> None:
    with pytest.raises(JudgeError, match=r"shows \d pictures, but the prompt has 2"):
        question(template, prompt(1, 2))


def test_a_pairwise_judge_sees_the_pictures_too() -> None:
    pairs = Question.compile(spec("{{ images }} {{ first }} {{ second }}", mode="pairwise"), "judges.0", WRITTEN)
    assert pairs.between(prompt(1), f"1{M}", "2").text == f"{M} 1\ufffd 2"


def shown_by(question: AskedQuestion) -> list[int]:
    """The numbers of its pictures."""
    return [int(one.sha256, 16) for one in question.pictures]


def answer(text: str, *numbers: int) -> Response:
    """A response in which tools returned these pictures."""
    return Response(text, tool_files=[(f"/blobs/{n}", f"{n:064x}", 8, 16) for n in numbers])


@pytest.mark.parametrize(
    ("template", "text", "shown"),
    [
        ("{{ images }}{{ response }}.", f"{M}3{M}{M}.", [1, 8, 9]),
        ("{{ images }}{{ response }}: {{ response_images }}.", f"{M}3: {M}{M}.", [1, 8, 9]),
        ("{{ response_images }} {{ prompt }} {{ response }}", f"{M}{M} 0: {M} red? 3", [8, 9, 1]),
        (
            "{% for image in response_images %}{{ loop.index }}{{ image }}{% endfor %}{{ response }}{{ images }}",
            f"1{M}2{M}3{M}",
            [8, 9, 1],
        ),
    ],
)
def test_a_template_shows_the_pictures_of_tools_behind_the_response_or_where_it_says(
    template: str, text: str, shown: list[int]
) -> None:
    asked = Question.compile(spec(template), "judges.0", WRITTEN).about(prompt(1), answer("3", 8, 9))
    assert asked.text == text
    assert shown_by(asked) == shown
    assert asked.pictures[shown.index(9)] == PictureRef("/blobs/9", f"{9:064x}", 8, 16, 8, 16)


@pytest.mark.parametrize(
    "template",
    [
        "{{ images }}{{ response }}{{ response_images[0] }}",
        "{{ images }}{{ response }}{{ response }}",
        "{{ images }}{{ response[0] }}",
    ],
)
def test_each_picture_of_a_tool_is_shown_once(template: str) -> None:
    with pytest.raises(JudgeError, match=r"shows \d pictures, but 'response' has 2.*by {{ response_images }}"):
        Question.compile(spec(template), "judges.0", WRITTEN).about(prompt(1), answer("3", 8, 9))


def test_fields_with_a_character_reserved_for_pictures_are_refused() -> None:
    template = "{{ images }}{{ response }}{{ fields.note }}"
    shown = Prompt(PromptRef(0, 0, 0), "", (1,), {"note": "\ufdd2"}, pictures=(picture(1),))
    with pytest.raises(JudgeError, match=r"the entry's fields have characters .* Remove U\+FDD0 to U\+FDD2"):
        Question.compile(spec(template), "judges.0", WRITTEN).about(shown, answer("3", 8))


def test_a_pairwise_judge_sees_which_response_has_which_picture() -> None:
    template = "{{ images }}A: {{ first }} B: {{ second }}"
    pairs = Question.compile(spec(template, mode="pairwise"), "judges.0", WRITTEN)
    asked = pairs.between(prompt(1), answer("1", 8), answer("2\ufdd1\ufdd2", 9))
    assert asked.text == f"{M}A: 1{M} B: 2\ufffd\ufffd{M}"
    assert shown_by(asked) == [1, 8, 9]
    template = "{{ second_images }}{{ first_images }}{{ images }} {{ first }} {{ second }}"
    pairs = Question.compile(spec(template, mode="pairwise"), "judges.0", WRITTEN)
    assert shown_by(pairs.between(prompt(1), answer("1", 8), answer("2", 9))) == [9, 8, 1]


def drawn(number: int) -> Response:
    """A response that is a picture which the policy generated."""
    return Response("", picture_file=(f"/blobs/{number}", f"{number:064x}", 8, 16))


@pytest.mark.parametrize(
    "template", ["{{ prompt }} by {{ response }}.", "{{ fields.question }} by {{ response_images }}."]
)
def test_a_generated_picture_is_shown_in_the_place_of_the_response(template: str) -> None:
    asked = Question.compile(spec(template), "judges.0", generates=True).about(prompt(), drawn(8))
    assert asked == (f"red? by {M}.", (PictureRef("/blobs/8", f"{8:064x}", 8, 16, 8, 16),))


@pytest.mark.parametrize("template", ["{{ first }} or {{ second }}", "{{ first_images }} or {{ second_images }}"])
def test_a_pairwise_judge_sees_two_generated_pictures_in_both_orders(template: str) -> None:
    pairs = Question.compile(spec(template, mode="pairwise"), "judges.0", generates=True)
    for first, second in ((8, 9), (9, 8)):
        asked = pairs.between(prompt(), drawn(first), drawn(second))
        assert (asked.text, shown_by(asked)) == (f"{M} or {M}", [first, second])


@pytest.mark.parametrize("template", ["{{ response }}{{ response }}", "{{ response }}{{ response_images[1:] }}"])
def test_a_generated_picture_is_shown_once(template: str) -> None:
    with pytest.raises(JudgeError, match=r"shows [02] pictures, but 'response' has 1.*by {{ response }}"):
        Question.compile(spec(template), "judges.0", generates=True).about(prompt(), drawn(8))


def test_a_template_without_the_generated_picture_is_refused() -> None:
    with pytest.raises(SpecError, match="does not show 'response'"):
        Question.compile(spec("{{ prompt }}"), "judges.0", generates=True)
    with pytest.raises(SpecError, match="does not show 'second'"):
        Question.compile(spec("{{ first }}", mode="pairwise"), "judges.0", generates=True)


def test_a_judge_without_images_sees_no_pictures_of_tools() -> None:
    plain = Question.compile(spec("{{ response }}", images=False), "judges.0")
    assert plain.about(prompt(1), answer("3", 8)) == ("3", ())


def test_a_template_that_shows_no_picture_is_refused() -> None:
    with pytest.raises(SpecError, match="does not show the pictures"):
        Question.compile(spec("{{ fields.question }}{{ response }}"), "judges.0")


def test_a_judge_that_sees_no_pictures_has_no_images_in_its_template() -> None:
    with pytest.raises(SpecError, match="unknown name 'images'"):
        Question.compile(spec("{{ images }}{{ response }}", images=False), "judges.0")


class Court:
    def __init__(self, **told: Any) -> None:
        self.clock = FakeClock()
        self.fake = FakeJudge(lambda question, seed: "1", self.clock)
        generates = told.pop("generates", False)
        made = spec(**({"verdict": {"most": 9}} | told))
        text = "" if generates else WRITTEN
        self.judge = Judge.of(made, self.fake, RecordingObserver(), self.clock, picture_text=text, generates=generates)

    async def judge_all(self, *prompts: Prompt) -> None:
        for one in prompts:
            await self.clock.run(self.judge.value(one, "3"))


async def test_equal_questions_about_other_pictures_are_other_questions() -> None:
    court = Court()
    await court.judge_all(prompt(1), prompt(2, number=1), prompt(1, number=2))
    assert [one.question for one in court.fake.asked] == [f"{M}3", f"{M}3"]
    assert court.fake.shown == [(picture(1),), (picture(2),)]
    assert court.fake.asked[0].seeds != court.fake.asked[1].seeds


async def test_equal_responses_with_unlike_pictures_of_tools_are_other_questions() -> None:
    court = Court()
    for response in (answer("3", 8), answer("3", 9), answer("3", 8)):
        await court.clock.run(court.judge.value(prompt(1), response))
    (eight,), (nine,) = response_pictures(answer("3", 8)), response_pictures(answer("3", 9))
    assert court.fake.shown == [(picture(1), eight), (picture(1), nine)]


@pytest.mark.parametrize(("images", "asked"), [(True, 2), (False, 0)])
async def test_responses_with_equal_text_are_compared_if_a_judge_sees_that_their_pictures_differ(
    images: bool, asked: int
) -> None:
    template = "{{ first }} or {{ second }}" + ("{{ images }}" if images else "")
    court = Court(mode="pairwise", images=images, template=template, verdict={"most": 1})
    await court.clock.run(court.judge.values(prompt(1), [answer("3", 8), answer("3", 9)]))
    assert len(court.fake.asked) == asked
    await court.clock.run(court.judge.values(prompt(1), [answer("3", 8), answer("3", 8)]))
    assert len(court.fake.asked) == asked


class BetterPicture(FakeJudge):
    """Prefers the picture with the lower number."""

    async def __call__(
        self, question: str, seeds: Sequence[int], pictures: tuple[PictureRef, ...] = ()
    ) -> tuple[Answer, ...]:
        await super().__call__(question, seeds, pictures)
        first, second = (int(one.sha256, 16) for one in pictures)
        return (Answer(str(float(first < second)), 1, 1, truncated=False),)


async def test_the_win_rate_of_a_generated_picture_is_that_of_all_pairs_of_its_group() -> None:
    court = Court(mode="pairwise", template="{{ first }} or {{ second }}", verdict={"most": 1}, generates=True)
    asked = court.judge._ask = BetterPicture(lambda question, seed: "", court.clock)
    values = await court.clock.run(court.judge.values(prompt(), [drawn(8), drawn(9), drawn(10), drawn(10)]))
    assert [one.value for one in values if isinstance(one, Judgement)] == pytest.approx([1.0, 2 / 3, 1 / 6, 1 / 6])
    assert len(asked.asked) == 6  # each pair of unlike pictures once in each order


async def test_a_judge_without_images_is_shown_no_picture() -> None:
    court = Court(images=False, template="{{ fields.question }}{{ response }}")
    await court.judge_all(prompt(1), prompt(2, number=1))
    assert court.fake.shown == [()]


def test_keys_and_seeds_without_pictures_stay_as_they_were() -> None:
    digest = spec_digest(spec(images=False))
    assert "images" not in spec(images=False).model_dump()
    assert question_key(digest, "q") == hashlib.blake2b(digest + b"q", digest_size=16).digest()
    assert (
        question_key(digest, "q", (picture(1),))
        != question_key(digest, "q")
        != question_key(digest, "q", (picture(2),))
    )
    assert (
        vote_seed("eye", "q", 0)
        == int.from_bytes(hashlib.blake2b(b'["eye", "q", 0]', digest_size=8).digest(), "little") >> 1
    )
    assert len({vote_seed("eye", "q", 0, shown) for shown in ((), (picture(1),), (picture(2),))}) == 3


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"model": None, "adapter": "a"}, "adapters support no pictures"),
        ({"kind": "classifier", "serving": {"engine": "sglang"}}, "images needs serving.engine: torch, not sglang"),
        (
            {"kind": "classifier", "serving": {"engine": "hf"}},
            "classifier needs serving.engine: torch or sglang, not hf",
        ),
        ({"serving": {"engine": "hf"}}, "images needs serving.engine: torch, not hf"),
        ({"serving": {"engine": "vllm"}}, "images needs serving.engine: torch, not vllm"),
    ],
)
def test_judges_that_cannot_see_pictures_are_refused_by_name(more: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        spec(**more)


def test_a_judge_that_sees_pictures_needs_prompts_with_pictures() -> None:
    judge = spec().model_dump(mode="json", exclude_unset=True)
    tree = {
        "name": "t",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 1},
        "rollout": {"max_new_tokens": 4},
    }
    tree |= {"judges": [judge], "reward": {"judge": "eye"}}
    with pytest.raises(SpecError, match=r"judges.0.images is set, but the prompts have no pictures; set data.images"):
        parse_spec(tree)
    assert parse_spec(tree | {"data": {"path": "d", "images": "images"}}).judges[0].images
