"""Rewards of pictures that the policy generates: what they get, and what they say if they need text."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from controllers.flow.job_data import SourcePipeline, make_response
from gcore.config import parse_spec
from gcore.config.reward import TEXT_REWARDS, JudgeSpec, RewardSpec, picture_reward_problems
from gcore.errors import EngineError, SpecError
from gcore.media.pictures import inspect_picture
from gcore.reward.api import CheckedReward, PictureFile, Response, RewardError, RewardResult, Scored, is_picture
from gcore.reward.pool import trial_response
from gcore.reward.scorer import Scorer
from gcore.rollout.api import PicturesUnavailable
from gcore.types import (
    DenoisingTrajectory,
    Medium,
    PictureRef,
    Prompt,
    PromptRef,
    Sample,
    Version,
    VersionSpan,
)

PROMPT = Prompt(PromptRef(0, 0, 0), "a red square", (1,), {"prompt": "a red square"})
SPEC = RewardSpec(name="own")


def drawn(content: bytes, *, kinds: Sequence[str] = ("trajectory", "decoded", "embeds")) -> Sample:
    """A picture with these bytes, as the engine returns it."""
    name = hashlib.sha256(content).hexdigest()
    media = tuple(Medium(kind, name if kind == "decoded" else "ab" * 32, 4, (8, 16, 3), "uint8") for kind in kinds)  # type: ignore[arg-type]
    spans = (VersionSpan(Version(0, 0), 0, 1),)
    return Sample(output=DenoisingTrajectory((0,), (1.0, 0.5), (-1.0,), spans, 7, media), finish_reason="stop")


class Media:
    """Stands for the media of a job, whose store has these pictures."""

    def __init__(self, folder: Path, *pictures: bytes) -> None:
        self.folder = folder
        self.stored_now: list[Medium] = []
        for content in pictures:
            (folder / hashlib.sha256(content).hexdigest()).write_bytes(content)

    def generated_picture(self, media: Sequence[Medium]) -> PictureFile:
        (one,) = [one for one in media if one.kind == "decoded"]
        return PictureFile(str(self.folder / one.sha256), one.sha256, *one.shape[:2])

    @contextlib.asynccontextmanager
    async def stored(self, media: Sequence[Medium]) -> AsyncIterator[None]:
        if not all((self.folder / one.sha256).exists() for one in media):
            raise PicturesUnavailable("a picture was lost", fix="Again")
        self.stored_now += media
        yield
        self.stored_now.clear()


class Rules:
    """A reward function that says how many bytes a picture has."""

    def __init__(self, media: Media) -> None:
        self.media = media

    async def warm(self) -> None: ...

    async def score(self, spec: Any, fields: Any, responses: Sequence[Response]) -> tuple[Scored, ...]:
        assert [one.kind for one in self.media.stored_now] == ["decoded"] * len(responses)
        assert all(one == "" and one.tokens is None and not one.truncated for one in responses)
        return tuple(RewardResult(float(len(one.picture.read_bytes()))) for one in responses)


async def test_a_reward_gets_the_picture_and_only_its_blob_is_held(tmp_path: Path) -> None:
    media = Media(tmp_path, b"one", b"three")
    source: Any = type("Source", (), {"reward": SPEC})()
    pipeline = SourcePipeline(source, Any, Scorer(Rules(media), {}), media)  # type: ignore[arg-type]
    results = await pipeline.scored(PROMPT, [drawn(b"three"), drawn(b"one")])
    assert [one.value for one in results] == [5.0, 3.0]
    assert media.stored_now == []
    with pytest.raises(EngineError, match="a picture was lost"):
        await pipeline.scored(PROMPT, [drawn(b"gone")])


def test_a_response_of_text_is_no_picture() -> None:
    text = make_response(Sample((7,), (0.0,), "hi", "stop", (VersionSpan(Version(0, 0), 0, 1),)))
    assert not is_picture(text)
    assert text.tokens == 1
    with pytest.raises(RewardError, match="the policy writes text, so its response is no picture"):
        _ = text.picture


def test_a_picture_with_other_bytes_is_an_error_of_the_response(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"picture")
    response = Response("", picture_file=(str(file), hashlib.sha256(b"picture").hexdigest(), 8, 16))
    assert response.picture == file
    assert response.pictures == response.tool_pictures == ()
    file.write_bytes(b"changed")
    with pytest.raises(RewardError, match="a picture of the policy has other bytes"):
        _ = response.picture
    file.unlink()
    with pytest.raises(RewardError, match="cannot read a picture of the policy"):
        _ = response.picture


def last_word(response: str, fields: Any, spec: Any) -> float:
    return float(response.split()[-1])


def last_words(responses: list[str]) -> list[float]:
    return [float(response.split()[-1]) for response in responses]


last_words.batch = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("reward", [last_word, last_words])
def test_a_reward_that_reads_a_picture_as_text_fails_with_that_reason(reward: Any) -> None:
    checked = CheckedReward("own", reward)
    (of_picture,) = checked.score_group([Response("", picture_file=("a.png",))], {}, SPEC)
    (of_text,) = checked.score_group([Response("")], {}, SPEC)
    assert isinstance(of_picture, RewardError)
    assert isinstance(of_text, RewardError)
    assert of_picture.what == f"{of_text.what} on a generated picture, which has no text"
    assert of_picture.fix == "Open response.picture, or correct the reward"
    assert of_picture.trace == of_text.trace != ""
    assert of_text.fix == "Correct the reward"


JUDGE = {"name": "eye", "model": {"path": "m"}, "images": True, "template": "{{ prompt }}{{ response }}"}
BLIND = {**JUDGE, "images": False}


@pytest.mark.parametrize(
    ("reward", "judges", "why"),
    [
        (
            {},
            [],
            r"reward 'numeric' of source 'data' reads text, but the policy generates pictures; use a reward of your own",
        ),
        ({"parts": [{"name": "red.py:red"}, {"name": "length"}]}, [], "reward 'length' of source 'data' reads text"),
        ({"judge": "eye"}, [BLIND], r"judge 'eye' sees no pictures, .*; set judges\.0\.images: true"),
        (
            {"judge": "eye"},
            [{**JUDGE, "on_error": {"fallback": "exact"}}],
            r"judges\.0\.on_error\.fallback is 'exact', which reads text",
        ),
    ],
)
def test_a_reward_of_texts_is_refused_for_a_policy_that_generates_pictures(
    reward: dict[str, Any], judges: list[dict[str, Any]], why: str
) -> None:
    made = [JudgeSpec.model_validate(judge) for judge in judges]
    (said,) = picture_reward_problems([("data", RewardSpec.model_validate(reward))], made)
    assert re.match(why, said)


def test_a_reward_that_opens_pictures_and_a_judge_that_sees_them_are_accepted() -> None:
    fallback = JudgeSpec.model_validate({**JUDGE, "on_error": {"fallback": "red.py:red"}})
    rewards = [{"name": "red.py:red"}, {"judge": "eye"}, {"parts": [{"name": "red.py:red"}, {"judge": "eye"}]}]
    given = [("data", RewardSpec.model_validate(reward)) for reward in rewards]
    assert not list(picture_reward_problems(given, [fallback]))


def job(**more: Any) -> dict[str, Any]:
    """A job whose policy generates pictures."""
    tree: dict[str, Any] = {"name": "t", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
    rollout = {"engine": "diffusers", "diffusion": {}}
    return tree | {"rollout": rollout, "train": {"clip_low": 1e-4, "clip_high": 1e-4}} | more


def test_a_spec_of_a_policy_that_generates_pictures_names_rewards_that_see_them() -> None:
    with pytest.raises(SpecError, match="reward 'numeric' of source 'data' reads text"):
        parse_spec(job())
    own = {"name": "red.py:red"}
    assert parse_spec(job(reward=own)).reward.name == "red.py:red"
    assert parse_spec(job(reward={"judge": "eye"}, judges=[JUDGE])).judges[0].images
    sources = [{"name": "a", "path": "d", "reward": own}]
    assert parse_spec(job(data={"sources": sources}))
    with pytest.raises(SpecError, match="reward 'math' of source 'b' reads text"):
        parse_spec(job(data={"sources": [*sources, {"name": "b", "path": "d", "reward": {"name": "math"}}]}))


def test_all_built_in_rewards_read_text() -> None:
    built_in = {point.name for point in entry_points(group="gcore.rewards") if point.value.startswith("gcore.")}
    assert built_in == TEXT_REWARDS


def test_a_trial_shows_rewards_a_picture_of_the_size_that_the_policy_generates(tmp_path: Path) -> None:
    (tmp_path / "data.png").write_bytes(b"of the prompt")
    of_prompt = PictureRef(str(tmp_path / "data.png"), hashlib.sha256(b"of the prompt").hexdigest(), 1, 1, 1, 1)
    response = trial_response([of_prompt], (24, 32), tmp_path)
    facts = inspect_picture(response.picture)
    assert (facts.format, facts.height, facts.width, facts.plain) == ("PNG", 24, 32, True)
    assert [path.read_bytes() for path in response.pictures] == [b"of the prompt"]
    assert response.tokens is None
    text = trial_response([], None, tmp_path)
    assert not is_picture(text)
    assert (text, text.tokens, text.environment) == ("", 0, 0.0)
