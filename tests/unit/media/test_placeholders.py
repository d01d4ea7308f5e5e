"""Tokens of pictures: as transformers' own processors count and write them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from picture_files import decoded, encoded
from picture_models import picture_tokenizer, processor_settings, token_ids, write_picture_model
from PIL import Image
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from gcore.errors import DataError
from gcore.media.model_files import media_token_ids
from gcore.media.pictures import normalize_picture
from gcore.media.placeholders import PictureRule, SmartResizeRule
from gcore.models.vision import media_token_ids as loaded_media_token_ids

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
IDS = token_ids()
SIDES = st.integers(2, 3000)


@pytest.fixture(scope="module")
def rule_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PictureRule]:
    known: dict[str, PictureRule] = {}

    def load(family: str) -> PictureRule:
        if family not in known:
            known[family] = PictureRule.load(write_picture_model(tmp_path_factory.mktemp(family), family))
        return known[family]

    return load


def blank(height: int, width: int) -> Image.Image:
    return Image.new("RGB", (width, height), (9, 99, 199))


# --- Qwen-VL


@settings(deadline=None, max_examples=200)
@given(
    *(SIDES, SIDES),
    st.sampled_from([(14, 2), (16, 2), (8, 2), (8, 1), (14, 4)]),
    st.sampled_from([(56 * 56, 28 * 28 * 1280), (65536, 16777216), (256, 4096), (1, 10**9), (3136, 3137)]),
)
def test_sizes_are_those_of_smart_resize_and_stay_so(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int, shape: tuple[int, int], bounds: tuple[int, int]
) -> None:
    patch, merge = shape
    factor = patch * merge
    folder = tmp_path_factory.getbasetemp() / f"qwen-{patch}-{merge}"
    if not folder.exists():
        write_picture_model(folder, patch=patch, merge=merge)
    rule = PictureRule.load(folder, min_pixels=bounds[0], max_pixels=bounds[1])
    assert isinstance(rule, SmartResizeRule)
    kwargs = {"factor": factor, "min_pixels": bounds[0], "max_pixels": bounds[1]}
    try:
        once = smart_resize(height, width, **kwargs)
        twice = smart_resize(*once, **kwargs)
    except ValueError:
        with pytest.raises(DataError, match="more than 200 times as long"):
            rule.target_size(height, width)
        return
    try:
        target = rule.target_size(height, width)
    except DataError:
        assert once != twice, "only a size that the processor would change again may be refused"
        return
    assert smart_resize(*target, **kwargs) == target
    assert once != twice or target == once
    assert rule.grid(height, width) == (target[0] // patch, target[1] // patch)
    assert rule.token_count(height, width) == target[0] * target[1] // factor**2 == len(rule.picture_ids(*target))


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 400), st.integers(2, 400), st.sampled_from(QWEN))
def test_the_processor_makes_as_many_patches_of_a_picture_before_and_after_its_resize(
    rule_of: Callable[..., PictureRule], height: int, width: int, family: str
) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    rule = rule_of(family)
    processor = Qwen2VLImageProcessorPil(**processor_settings(family)[0])
    canonical, medium = normalize_picture(encoded(blank(height, width)), rule.target_size)
    for picture in (blank(height, width), decoded(canonical)):
        out = processor(picture, return_tensors="np")
        _, rows, columns = out["image_grid_thw"][0]
        assert (rows * 8, columns * 8) == medium.shape[:2] == rule.target_size(height, width)
        assert rows * columns // 4 == rule.token_count(height, width)


def test_the_processor_does_not_resize_a_canonical_picture_again(rule_of: Callable[..., PictureRule]) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 45, 3), dtype=np.uint8))
    processor = Qwen2VLImageProcessorPil(**processor_settings("qwen3_vl")[0])
    canonical, _ = normalize_picture(encoded(noise), rule_of("qwen3_vl").target_size)
    out, kept = (
        processor(decoded(canonical), do_resize=do, return_tensors="np")["pixel_values"] for do in (True, False)
    )
    assert np.array_equal(out, kept)


def test_bounds_of_the_spec_replace_those_of_the_processor(tmp_path: Path) -> None:
    folder = write_picture_model(tmp_path)
    own = PictureRule.load(folder)
    assert own.target_size(1000, 1000) == (96, 96)
    assert own.target_size(2, 2) == (16, 16)
    bounded = PictureRule.load(folder, min_pixels=32 * 32, max_pixels=64 * 64)
    assert bounded.target_size(1000, 1000) == (64, 64)
    assert bounded.target_size(2, 2) == (32, 32)
    with pytest.raises(DataError, match=r"min_pixels \(10000\) is above max_pixels \(9216\)"):
        PictureRule.load(folder, min_pixels=10_000)


@pytest.mark.parametrize(
    "settings_",
    [
        {"min_pixels": 1024, "max_pixels": 4096},
        {"size": {"min_pixels": 1024, "max_pixels": 4096}},
        {"size": {"shortest_edge": 1024, "longest_edge": 4096}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 1024, "max_pixels": 4096},
    ],
)
def test_every_form_of_a_processors_bounds_is_read(tmp_path: Path, settings_: dict[str, Any]) -> None:
    write_picture_model(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 8, "merge_size": 2} | settings_))
    rule = PictureRule.load(tmp_path)
    assert (rule.target_size(1000, 1000), rule.target_size(2, 2)) == ((64, 64), (32, 32))


def test_a_token_that_the_configuration_leaves_out_is_that_of_its_family(tmp_path: Path) -> None:
    rule = PictureRule.load(write_picture_model(tmp_path / "a"))
    assert rule.picture_text == "<|vision_start|><|image_pad|><|vision_end|>"
    config = json.loads((tmp_path / "a/config.json").read_text())
    del config["image_token_id"]  # transformers may save only what differs from its defaults
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    rule = PictureRule.load(tmp_path / "a")
    assert rule.placeholder_id == 151_655
    with pytest.raises(DataError, match="the tokenizer has no token 151655"):
        _ = rule.picture_text


# --- all families

FAMILIES = (*QWEN, "llava", "gemma3", "idefics3", "smolvlm")


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_the_media_tokens_of_a_configuration_are_those_of_the_loaded_model(family: str) -> None:
    defaults = AutoConfig.for_model(family)
    assert media_token_ids({"model_type": family, "vision_config": {}}) == loaded_media_token_ids(defaults)
    assert media_token_ids(defaults.to_dict()) == loaded_media_token_ids(defaults)
    other = AutoConfig.for_model(family, image_token_id=9)
    assert media_token_ids(json.loads(other.to_json_string())) == loaded_media_token_ids(other)
    assert 9 in loaded_media_token_ids(other)


def test_a_media_token_that_is_null_does_not_exist() -> None:
    named = {"model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 7, "video_token_id": None}
    assert media_token_ids(named) == (7, 151_652)


PLACEHOLDERS = {"llava": "<image>", "idefics3": "<image>", "smolvlm": "<image>", "gemma3": "<start_of_image>"}


TOKENIZER = picture_tokenizer()


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.tuples(st.integers(2, 300), st.integers(2, 300)), max_size=4),
    st.data(),
)
def test_runs_are_the_inverse_of_expand(
    rule_of: Callable[..., PictureRule], family: str, sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    rule = rule_of(family)
    texts = data.draw(st.lists(st.sampled_from(["", "a", " b\n", "\n\n"]), min_size=len(sizes) + 1, max_size=5))
    apart = family in QWEN and data.draw(st.booleans())
    marker = rule.picture_text if apart else PLACEHOLDERS.get(family, "<|image_pad|>")
    text = "".join(before + marker for before, _ in zip(texts, sizes, strict=False)) + texts[-1]
    short = encode(text)
    ids = rule.expand(short, sizes)
    ranges = rule.runs(ids, sizes)
    assert [ids[start:end] for start, end in ranges] == [rule.picture_ids(*size) for size in sizes]
    assert [end - start for start, end in ranges] == [rule.token_count(*size) for size in sizes]
    if apart or family not in QWEN:
        assert rule.runs(ids) == ranges, "the sizes are not needed"
    if family != "gemma3":  # where newlines join
        back = list(ids)
        for start, end in reversed(ranges):
            back[start:end] = [rule.placeholder_id]
        assert tuple(back) == short
    assert not sizes or rule.image_token_id in ids
    request = rule.request_ids(short, sizes)
    assert rule.expand_request(request, sizes) == ids
    counts = iter(rule.picture_ids(*size).count(rule.image_token_id) for size in sizes)
    repeated = [[token] * next(counts) if token == rule.image_token_id else [token] for token in request]
    assert tuple(itertools.chain(*repeated)) == ids, "as engines repeat it"
    assert all(rule.target_size(*rule.target_size(*size)) == rule.target_size(*size) for size in sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_number_of_placeholders_or_expanded_ids_are_refused(
    rule_of: Callable[..., PictureRule], family: str
) -> None:
    rule = rule_of(family)
    marker = encode(PLACEHOLDERS.get(family, "<|image_pad|>"))
    with pytest.raises(DataError, match="has 1 placeholder, but 2 pictures"):
        rule.expand(marker, [(40, 40)] * 2)
    with pytest.raises(DataError, match="has 2 placeholders, but 0 pictures"):
        rule.expand(marker * 2, [])
    ids = rule.expand(marker, [(400, 300)])
    assert len(ids) > 1
    with pytest.raises(DataError, match=r"placeholders, but 1 picture|text contains"):
        rule.expand(ids, [(400, 300)])
    request = rule.request_ids(marker, [(400, 300)])
    for wrong in ([], [(400, 300)] * 2):
        with pytest.raises(DataError, match="placeholder"):
            rule.expand_request(request, wrong)
    with pytest.raises(DataError, match="picture"):
        rule.runs(ids, [(400, 300)] * 2)
    with pytest.raises(DataError, match="picture"):
        rule.runs(ids[:-2], [(400, 300)])
    if family in QWEN:
        with pytest.raises(DataError, match="picture"):
            rule.runs(ids, [(40, 400)])


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_marks_around_pictures_that_a_model_writes_alone_are_no_picture(
    rule_of: Callable[..., PictureRule], family: str
) -> None:
    rule = rule_of(family)
    fake, whole = encode("<fake_token_around_image>"), encode("<global-img>")
    for text in (fake, whole, fake + whole, whole + fake, fake * 2):
        assert rule.runs(text, []) == ()
        assert rule.runs(text) == ()
    ids = rule.expand(encode("<image>"), [(40, 40)])
    end = len(fake) + len(ids)
    assert rule.runs((*fake, *ids, *fake, *whole), [(40, 40)]) == ((len(fake), end),)
    for cut in (ids[1:], ids[:-1], ids[:-3], ids[:3]):
        with pytest.raises(DataError, match="picture"):
            rule.runs(cut, [(40, 40)])


def test_text_that_reads_as_a_video_is_refused(rule_of: Callable[..., PictureRule]) -> None:
    with pytest.raises(DataError, match=r"contains '<\|video_pad\|>'.*videos are not supported"):
        rule_of("qwen3_vl").expand(encode("a<|video_pad|>b"), [])


# --- against transformers' processors


def fast_tokenizer(**named: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=picture_tokenizer(), pad_token="<|im_end|>", extra_special_tokens=named
    )


def idefics3() -> Any:
    images, own = processor_settings("idefics3")
    return Idefics3Processor(Idefics3ImageProcessorPil(**images), fast_tokenizer(), **own)


def llava() -> Any:
    images, own = processor_settings("llava")
    return LlavaProcessor(LlavaImageProcessorPil(**images), fast_tokenizer(), **own)


def gemma3() -> Any:
    images, own = processor_settings("gemma3")
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    return Gemma3Processor(Gemma3ImageProcessorPil(**images), fast_tokenizer(**tokens), **own)


SHAPES = [(40, 40), (20, 90), (300, 41), (128, 128), (33, 130), (7, 200), (64, 32), (127, 63)]


@pytest.mark.parametrize(("family", "make"), [("idefics3", idefics3), ("llava", llava), ("gemma3", gemma3)])
@pytest.mark.parametrize("text", ["{}", "a\n{}\nb", "{}\n\n{}", "\n{}{} c"])
def test_expanded_ids_are_those_of_the_models_own_processor(
    rule_of: Callable[..., PictureRule], family: str, make: Callable[[], Any], text: str
) -> None:
    rule, processor = rule_of(family), make()
    for height, width in SHAPES:
        filled = text.format(*[PLACEHOLDERS[family]] * 2)
        pictures = [blank(height, width)] * text.count("{}")
        sizes = [(height, width)] * len(pictures)
        theirs = processor(text=[filled], images=[pictures], add_special_tokens=False)
        assert rule.expand(encode(filled), sizes) == tuple(theirs["input_ids"][0])
        canonical = [blank(*rule.target_size(height, width))] * len(pictures)
        again = processor(text=[filled], images=[canonical], add_special_tokens=False)
        assert again["input_ids"] == theirs["input_ids"], "a resized picture has the same tokens"


def test_llava_without_a_crop_or_with_the_count_in_its_configuration(tmp_path: Path) -> None:
    write_picture_model(tmp_path, "llava")
    (tmp_path / "processor_config.json").unlink()
    assert PictureRule.load(tmp_path).token_count(40, 50) == 9
    (tmp_path / "processor_config.json").write_text(json.dumps({"patch_size": 8}))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 16, "width": 32}, "do_center_crop": False})
    )
    rule = PictureRule.load(tmp_path)
    assert (rule.token_count(40, 50), rule.target_size(40, 50)) == (8, (16, 32))


# --- refused folders


def edit(name: str, **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    ("family", "damage", "message"),
    [
        (
            "qwen3_vl",
            edit("config.json", vision_config=None),
            r"no vision part \(model_type 'qwen3_vl'\).*data\.images",
        ),
        ("qwen3_vl", edit("config.json", model_type="chameleon"), "not supported for models of the type 'chameleon'"),
        ("qwen3_vl", lambda folder: (folder / "preprocessor_config.json").unlink(), "has no processor"),
        ("qwen3_vl", edit("preprocessor_config.json", do_resize=False), "do_resize is false"),
        ("qwen3_vl", edit("preprocessor_config.json", patch_size=16), "patch_size is 16, but the model's is 8"),
        ("qwen3_vl", edit("preprocessor_config.json", merge_size=4), "spatial_merge_size is 4, but the model's is 2"),
        ("qwen3_vl", edit("preprocessor_config.json", patch_size="8"), "patch_size is '8', not a positive whole"),
        ("qwen3_vl", lambda folder: (folder / "config.json").unlink(), "not a model: it has no config.json"),
        ("qwen3_vl", shutil.rmtree, "the model folder does not exist"),
        (
            "qwen3_vl",
            edit("preprocessor_config.json", temporal_patch_size=1),
            "temporal_patch_size is 1, but the model's is 2",
        ),
        ("qwen3_vl", edit("preprocessor_config.json", image_std=[0.5, 0, 0.5]), "image_std contains 0"),
        (
            "llava",
            edit("preprocessor_config.json", image_mean=[0.5, 0.5]),
            r"image_mean is \[0\.5, 0\.5\], not three numbers",
        ),
        ("gemma3", edit("preprocessor_config.json", image_std="x"), "image_std is 'x', not three numbers"),
        ("qwen3_vl", lambda folder: (folder / "preprocessor_config.json").write_text("[1]"), "not contain a JSON obj"),
        ("gemma3", edit("preprocessor_config.json", do_pan_and_scan=True), "do_pan_and_scan is true"),
        ("gemma3", edit("processor_config.json", image_seq_length=5), "is 5, but the model's mm_tokens_per_image is 4"),
        ("llava", edit("preprocessor_config.json", do_pad=True), "do_pad is true"),
        ("smolvlm", edit("processor_config.json", image_seq_len=5), "is 5, but the model makes 4 tokens"),
    ],
)
def test_a_folder_that_does_not_describe_pictures_is_refused(
    tmp_path: Path, family: str, damage: Callable[[Path], object], message: str
) -> None:
    folder = write_picture_model(tmp_path, family)
    damage(folder)
    with pytest.raises(DataError, match=message):
        PictureRule.load(folder)


def test_bounds_are_refused_where_the_processor_has_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Remove data\.min_pixels"):
        PictureRule.load(write_picture_model(tmp_path, "gemma3"), max_pixels=100)


def test_the_settings_of_the_processor_may_be_in_one_file(tmp_path: Path) -> None:
    for family in FAMILIES:
        rules = [
            PictureRule.load(write_picture_model(tmp_path / f"{family}{nested}", family, nested=nested))
            for nested in (False, True)
        ]
        assert len({rule.picture_ids(100, 60) for rule in rules}) == 1


@pytest.mark.parametrize(
    ("family", "patches"), [("qwen3_vl", 4 * 6), ("llava", 3 * 3), ("gemma3", 16), ("smolvlm", 16)]
)
def test_patches_of_a_picture_follow_from_its_size_or_the_towers(tmp_path: Path, family: str, patches: int) -> None:
    folder = write_picture_model(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] = {"image_size": 24 if family == "llava" else 32} | config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert PictureRule.load(folder).patch_count(32, 48) == patches
