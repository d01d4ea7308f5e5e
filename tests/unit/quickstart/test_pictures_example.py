"""The example of generated pictures: its prompts, its rule, and a pipeline that engines load."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gcore.errors import DataError
from gcore.media.pictures import encode_png
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.plugins import PluginFile, load_plugin_file
from gcore.quickstart.pictures import EVAL_ENTRIES, TRAIN_ENTRIES, PicturesExample, prepare_pictures
from gcore.quickstart.pictures_model import draw_pictures, encode_prompts, generate_pictures, load_painter
from gcore.quickstart.pictures_task import (
    COLOURS,
    PLACES,
    PROMPTS,
    SIDE,
    PicturePrompt,
    PictureShares,
    make_entries,
    picture_parts,
)
from gcore.reward.api import RewardResult

ROOT = Path(__file__).parents[3]
RULES = ROOT / "examples" / "pictures" / "rules.py"


def drawn(prompts: list[PicturePrompt]) -> Any:
    """Right pictures of these prompts, [n, SIDE, SIDE, 3] uint8."""
    names = list(COLOURS)
    colours = torch.tensor([names.index(one.colour) for one in prompts])
    places = torch.tensor([PLACES.index(one.place) for one in prompts])
    states = draw_pictures(colours, places).permute(0, 2, 3, 1)
    return (((states + 1) / 2).clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def score(picture: Any, prompt: PicturePrompt, folder: Path) -> RewardResult:
    """What the example's rule returns for a picture [height, width, 3], uint8."""
    file = folder / "picture.png"
    file.write_bytes(encode_png(picture))
    rule = load_plugin_file(PluginFile(RULES, "right_picture"), "reward.file")
    found = rule(SimpleNamespace(picture=file), {"colour": prompt.colour, "place": prompt.place})
    assert isinstance(found, RewardResult)
    return found


def test_a_picture_is_right_for_its_own_prompt_only(tmp_path: Path) -> None:
    for prompt, picture in zip(PROMPTS, drawn(list(PROMPTS)), strict=True):
        for asked in PROMPTS:
            colour, place = float(asked.colour == prompt.colour), float(asked.place == prompt.place)
            assert score(picture, asked, tmp_path) == RewardResult(
                colour * place, (("colour", colour), ("place", place))
            )


@pytest.mark.parametrize("value", [0, 127, 255])
def test_a_picture_of_one_grey_is_wrong_in_both_parts(value: int, tmp_path: Path) -> None:
    plain = np.full((SIDE, SIDE, 3), value, np.uint8)
    for prompt in PROMPTS:
        assert score(plain, prompt, tmp_path) == RewardResult(0.0, (("colour", 0.0), ("place", 0.0)))


def test_noise_is_never_right(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    noise = draw.integers(0, 256, (100, SIDE, SIDE, 3), dtype=np.uint8)
    for number, picture in enumerate(noise):
        assert score(picture, PROMPTS[number % len(PROMPTS)], tmp_path).value == 0


def test_two_bright_quadrants_are_wrong(tmp_path: Path) -> None:
    one, other = drawn([PicturePrompt("red", "northwest"), PicturePrompt("blue", "southeast")])
    both = np.where(np.arange(SIDE)[:, None, None] < SIDE // 2, one, other)
    assert score(both, PicturePrompt("red", "northwest"), tmp_path).value == 0


def test_a_dark_or_another_shade_of_the_colour_is_wrong(tmp_path: Path) -> None:
    prompt = PicturePrompt("red", "northwest")
    for shade, parts in (((0.3, -0.7, -0.7), (0.0, 0.0)), ((0.8, 0.1, 0.1), (0.0, 1.0))):
        (picture,) = drawn([prompt])
        picture[: SIDE // 2, : SIDE // 2] = np.round((np.array(shade) + 1) * 127.5)
        found = score(picture, prompt, tmp_path)
        assert (found.value, dict(found.parts)) == (0.0, dict(zip(("colour", "place"), parts, strict=True)))


def test_the_measure_of_the_warm_start_is_the_rule_of_the_example(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    prompts = [PROMPTS[place] for place in draw.integers(len(PROMPTS), size=200)]
    clean = drawn(make_entries(200, 2)).astype(float)
    faded = (clean - 127.5) * draw.uniform(0.2, 1.0, (200, 1, 1, 1)) + 127.5 + draw.normal(0, 40, clean.shape)
    pictures = faded.clip(0, 255).round().astype(np.uint8)
    colours, places = picture_parts(pictures, prompts)
    assert 0 < colours.mean() < 1
    assert 0 < places.mean() < 1
    for picture, prompt, colour, place in zip(pictures, prompts, colours, places, strict=True):
        parts = (("colour", float(colour)), ("place", float(place)))
        assert score(picture, prompt, tmp_path) == RewardResult(float(colour and place), parts)


def test_rule_and_measure_agree_where_a_quadrant_is_exactly_half_as_bright(tmp_path: Path) -> None:
    prompt, half = PicturePrompt("red", "northwest"), SIDE // 2
    draw = np.random.default_rng(3)
    for _ in range(100):
        picture = np.full((3, SIDE, SIDE), 30, np.uint8).transpose(1, 2, 0)  # in memory as torch has it
        first = draw.integers(180, 255, (half, half))
        first[0, 0] -= first.sum() % 2
        second = draw.integers(140, 150, half * half)
        middle = 127.5 * half * half  # the sum of a quadrant that is neither bright nor dark
        np.add.at(second, draw.integers(second.size, size=int((first.sum() + middle) / 2 - second.sum())), 1)
        picture[:half, :half, 0], picture[half:, half:, 0] = first, second.reshape(half, half)
        colours, places = picture_parts(picture[None], [prompt])
        assert dict(score(picture, prompt, tmp_path).parts) == {"colour": colours.item(), "place": places.item()}


def test_entries_go_through_all_prompts_in_changing_order() -> None:
    entries = make_entries(TRAIN_ENTRIES, 3)
    assert set(Counter(entries).values()) == {TRAIN_ENTRIES // len(PROMPTS)}
    rounds = [tuple(entries[i : i + len(PROMPTS)]) for i in range(0, TRAIN_ENTRIES, len(PROMPTS))]
    assert all(set(one) == set(PROMPTS) for one in rounds)
    assert len(set(rounds)) == len(rounds)
    assert entries == make_entries(TRAIN_ENTRIES, 3) != make_entries(TRAIN_ENTRIES, 4)


def test_a_start_fits_if_it_is_careless_but_better_than_chance() -> None:
    assert PictureShares(0.3, 0.55, 0.6).fit
    assert not PictureShares(0.1, 0.55, 0.6).fit
    assert not PictureShares(0.5, 0.7, 0.7).fit
    assert not PictureShares(0.25, 0.9, 0.27).fit


@pytest.fixture(scope="module", params=["pictures", "pictures-ddim"])
def example(request: pytest.FixtureRequest) -> PicturesExample:
    found: PicturesExample = request.param
    return found


@pytest.fixture(scope="module")
def prepared(example: PicturesExample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example") / example
    return prepare_pictures(folder, example, progress=False, warm_updates=2, must_fit=False).folder


def test_a_prepared_folder_has_prompts_with_colour_and_place(prepared: Path) -> None:
    for name, count in (("train", TRAIN_ENTRIES), ("eval", EVAL_ENTRIES)):
        entries = [json.loads(line) for line in (prepared / f"{name}.jsonl").read_text().splitlines()]
        assert len(entries) == count
        assert all(entry["prompt"] == f"{entry['colour']} {entry['place']}" for entry in entries)
        assert set(Counter(entry["prompt"] for entry in entries).values()) == {count // len(PROMPTS)}


def test_engines_load_the_prepared_pipeline_and_encode_prompts_as_the_warm_start_does(prepared: Path) -> None:
    pipeline = ImagePipeline.load(prepared / "model", guidance=1.0, dtype=torch.float32, device="cpu")
    painter = load_painter(prepared / "model")
    with torch.no_grad():
        condition = encode_prompts(painter, PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        found = pipeline.condition(prompt.prompt)
        assert set(found) == set(condition)
        for name, rows in condition.items():
            assert torch.allclose(found[name][0], rows[number], atol=1e-6)
    assert len({tuple(row) for row in condition["embeds"].flatten(1).tolist()}) == len(PROMPTS)
    levels, shape = pipeline.levels(10, (3, SIDE, SIDE)), pipeline.files.state_shape(SIDE, SIDE)
    assert pipeline.files.side == SIDE
    states = torch.randn(len(PROMPTS), *shape, generator=torch.Generator().manual_seed(5))
    for index in range(10):
        conditions = [pipeline.condition(one.prompt) for one in PROMPTS]
        at = torch.full((len(PROMPTS),), levels[index])
        with torch.no_grad():
            found = pipeline.network.predict(states, at, conditions)
        states = pipeline.schedule.step("ode", states, found, levels, index, 0.0).mean
    shown = generate_pictures(painter, PROMPTS, torch.Generator().manual_seed(5))
    assert (shown.int() - pipeline.decode(states).int()).abs().max() <= 1


def test_a_prepared_folder_is_reused_and_says_what_the_model_can_do(
    example: PicturesExample, prepared: Path, tmp_path: Path
) -> None:
    again = prepare_pictures(prepared, example, progress=False, warm_updates=2, must_fit=False)
    assert again.cached
    assert 0 <= again.manifest.right_share <= min(again.manifest.colour_share, again.manifest.place_share)
    with pytest.raises(DataError, match=r"of pictures right \(wanted 20% to 40%\)"):
        prepare_pictures(tmp_path / "other", example, progress=False, warm_updates=2)


def test_a_folder_of_the_other_example_is_not_reused(example: PicturesExample, prepared: Path) -> None:
    other: PicturesExample = "pictures" if example == "pictures-ddim" else "pictures-ddim"
    with pytest.raises(DataError, match=f"other than the prepared example {other}"):
        prepare_pictures(prepared, other, progress=False, warm_updates=2, must_fit=False)
