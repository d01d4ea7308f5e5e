"""Prompts with pictures: from entries and a model's processor to short and expanded tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from picture_files import encoded, picture
from picture_models import token_ids, write_picture_model
from prompt_sources import spec_tree

from controllers.flow.job_data import make_job_data
from controllers.job.preparation import check_processor
from gcore.config import parse_spec
from gcore.config.spec import eval_sources, training_sources
from gcore.data.dataset import DataChanged
from gcore.data.pictures import PlacedPictures, place_pictures
from gcore.data.stream import JobPrompts, PromptFiltered, check_lengths, identify_data, open_prompts
from gcore.errors import DataError, SpecError
from gcore.ledger.records.job import JobRecord
from gcore.media.placeholders import PictureRule
from gcore.types import Group, Medium, Prompt, PromptRef, Sample, Version, VersionSpan

IDS = token_ids()
PAD, START, END = IDS["<|image_pad|>"], IDS["<|vision_start|>"], IDS["<|vision_end|>"]


class Folder:
    """A folder with data, pictures, a model and a spec."""

    def __init__(self, path: Path, **model: Any) -> None:
        self.path = path
        self.model = write_picture_model(path / "model", **model)
        self.data = path / "data.jsonl"
        for name, size in {"a.png": (40, 24), "b.jpg": (200, 100), "c.png": (16, 16)}.items():
            (path / name).write_bytes(encoded(picture(*size), "JPEG" if name.endswith("jpg") else "PNG"))

    def write(self, *entries: dict[str, Any]) -> None:
        self.data.write_text("".join(json.dumps({"answer": "7"} | entry) + "\n" for entry in entries))

    def spec(self, *, chat: bool = True, sections: dict[str, Any] | None = None, **data: Any) -> Any:
        given = {"path": str(self.data), "images": "images", "shards": 1} | data
        tree = spec_tree(given, **(sections or {}))
        return parse_spec(tree | {"model": {"path": str(self.model), "chat": chat, "max_length": 4096}})

    def open(self, **spec: Any) -> JobPrompts:
        return open_prompts(self.spec(**spec), self.path / "cache", self.model)

    def first(self, **spec: Any) -> Prompt:
        return self.open(**spec).stream.sources[0].prompt(0, PromptRef(0, 0, 0))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def image(path: str | None = None) -> dict[str, Any]:
    return {"type": "image"} if path is None else {"type": "image", "image": path}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


# --- where pictures are


@pytest.mark.parametrize(
    ("prompt", "listed", "expected", "names"),
    [
        ("Hi", [], "Hi", []),
        ("<image>Hi", ["a"], [[image(), text("Hi")]], ["a"]),
        ("<image><image>", ["a", "b"], [[image(), image()]], ["a", "b"]),
        (" <image>\nHi<image> ", ["a", "b"], [[text(" "), image(), text("\nHi"), image(), text(" ")]], ["a", "b"]),
        (["Hi", "<image>?"], ["a"], ["Hi", [image(), text("?")]], ["a"]),
        ([[image(), text("Hi")]], ["a"], [[image(), text("Hi")]], ["a"]),
        ([[image("x"), text("Hi<image>")]], ["a"], [[image(), text("Hi"), image()]], ["x", "a"]),
        ([[image(), image("x"), image()]], ["a", "b"], [[image(), image(), image()]], ["a", "x", "b"]),
        ([[text("Hi") | {"image": None}]], [], [[text("Hi")]], []),
        ([[image() | {"text": None}]], ["a"], [[image()]], ["a"]),
    ],
)
def test_markers_and_parts_of_messages_take_the_pictures_in_order(
    prompt: Any, listed: list[str], expected: Any, names: list[str]
) -> None:
    def messages(contents: Any) -> Any:
        return contents if isinstance(contents, str) else [{"role": "user", "content": one} for one in contents]

    placed = place_pictures(messages(prompt), listed, "<image>", None)
    assert placed == PlacedPictures(messages(expected), tuple(names))


def test_markers_of_a_plain_text_prompt_become_the_models_text() -> None:
    assert place_pictures("a[p]b[p]", ["x", "y"], "[p]", "<V>") == ("a<V>b<V>", ("x", "y"))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("prompt", "listed", "message"),
    [
        ("<image>", [], "has 1 image marker, but the entry has 0 pictures"),
        ("Hi", ["a", "b"], "has 0 image markers, but the entry has 2 pictures"),
        ("<image><image>", ["a"], "has 2 image markers, but the entry has 1 picture.*Write <image> once for each"),
    ],
)
def test_another_number_of_markers_than_pictures_is_refused(
    prompt: str, listed: list[str], message: str, chat: bool
) -> None:
    with pytest.raises(DataError, match=message):
        place_pictures(prompt, listed, "<image>", None if chat else "<V>")


# --- prompts


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_has_expanded_tokens_short_tokens_and_the_files_of_its_pictures(folder: Folder, chat: bool) -> None:
    folder.write({"prompt": "<image>Which of <image>?", "images": ["a.png", "./b.jpg"]})
    prompt = folder.first(chat=chat)
    rule = PictureRule.load(folder.model)
    assert [one._replace(sha256="") for one in prompt.pictures] == [
        (str(folder.path / "a.png"), "", 24, 40, 32, 32, 3 * 32 * 32),  # round(24/16) = 2 and round(40/16) = 2, to even
        (str(folder.path / "b.jpg"), "", 100, 200, 64, 128, 3 * 64 * 128),
    ]
    assert all(len(one.sha256) == 64 for one in prompt.pictures)
    assert prompt.request_ids.count(PAD) == 2
    assert prompt.token_ids.count(PAD) == 4 + 32
    assert prompt.token_ids == rule.expand_request(prompt.request_ids, [(24, 40), (100, 200)])
    assert prompt.text.count("<|vision_start|><|image_pad|><|vision_end|>") == 2
    assert ("<|im_start|>user" in prompt.text) == chat
    assert prompt.media == ()
    first = prompt.request_ids.index(PAD)
    assert (prompt.request_ids[first - 1], prompt.request_ids[first + 1]) == (START, END)


def test_messages_with_parts_and_own_paths_are_the_same_prompt_as_a_marker(folder: Folder) -> None:
    entries: list[dict[str, Any]] = [
        {"prompt": "<image>Hi", "images": "a.png"},
        {"prompt": [{"role": "user", "content": "<image>Hi"}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [image(), text("Hi")]}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [image("a.png"), text("Hi")]}]},
        {"prompt": [{"role": "user", "content": [image("a.png"), text("Hi")]}], "images": []},
    ]
    folder.write(*entries)
    source = folder.open().stream.sources[0]
    prompts = [source.prompt(number, PromptRef(0, 0, 0)) for number in range(len(entries))]
    assert len({(prompt.text, prompt.token_ids, prompt.request_ids, prompt.pictures) for prompt in prompts}) == 1
    assert len(prompts[0].pictures) == 1


def test_entries_without_pictures_are_as_in_a_source_without_pictures(folder: Folder) -> None:
    folder.write({"prompt": "Hi"}, {"prompt": "Hi", "images": None}, {"prompt": "Hi", "images": []})
    source = folder.open().stream.sources[0]
    plain = folder.first(images=None)
    for number in range(3):
        prompt = source.prompt(number, PromptRef(0, 0, 0))
        assert (prompt.text, prompt.token_ids, prompt.request_ids, prompt.pictures) == (
            plain.text,
            plain.token_ids,
            (),
            (),
        )


def test_a_template_that_supports_only_text_gets_the_models_own_picture_text(folder: Folder) -> None:
    (folder.path / "text.jinja").write_text("{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}")
    folder.write({"prompt": "<image>Hi", "images": "a.png"})
    prompt = folder.first(template=str(folder.path / "text.jinja"))
    assert prompt.text == "[<|vision_start|><|image_pad|><|vision_end|>Hi]"
    assert prompt.token_ids.count(PAD) == 4


def test_a_template_that_leaves_pictures_out_fails_the_prompt(folder: Folder) -> None:
    (folder.path / "parts.jinja").write_text(
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] or '' }}{% endfor %}{% endfor %}"
    )
    folder.write({"prompt": "<image>Hi", "images": "a.png"})
    with pytest.raises(DataError, match="0 placeholders, but 1 picture"):
        folder.first(template=str(folder.path / "parts.jinja"))


def test_filters_and_limits_count_the_expanded_tokens(folder: Folder) -> None:
    folder.write({"prompt": "<image>", "images": "b.jpg"}, {"prompt": "<image>", "images": "a.png"})
    with pytest.raises(PromptFiltered, match="longer than max_prompt_tokens"):
        folder.first(chat=False, max_prompt_tokens=33)
    assert len(folder.first(chat=False, max_prompt_tokens=34).token_ids) == 34
    source = folder.open(chat=False, max_prompt_tokens=33).stream.sources[0]
    assert check_lengths(source).longest == 6
    with pytest.raises(DataError, match="has 34 tokens, but at most 26 leave room"):
        open_prompts(
            parse_spec(folder.spec(chat=False).model_dump() | {"model": {"path": str(folder.model), "max_length": 30}}),
            folder.path / "cache",
            folder.model,
        ).stream.sources[0].prompt(0, PromptRef(0, 0, 0))


def test_bounds_of_the_spec_and_of_a_source_change_the_size(folder: Folder) -> None:
    folder.write({"prompt": "<image>", "images": "b.jpg"})
    change_processor(folder.model, size={"shortest_edge": 16 * 16, "longest_edge": 320 * 320})
    assert folder.first(max_pixels=32 * 32).pictures[0].target_width == 32
    assert folder.first(min_pixels=160 * 160, max_pixels=320 * 320).pictures[0][4:6] == (128, 240)
    with pytest.raises(DataError, match=r"entry 0: no size for a picture of 200x100.*Lower data\.min_pixels"):
        folder.first(min_pixels=64 * 64, max_pixels=64 * 64)
    source = {"name": "s", "path": str(folder.data), "max_pixels": 16 * 16, "image_marker": "<image>"}
    spec = {"path": None, "sources": [source], "image_marker": "[p]", "max_pixels": 32 * 32}
    assert folder.first(**spec).pictures[0][4:6] == (16, 16)


def test_another_number_of_markers_fails_the_prompt_with_its_entry(folder: Folder) -> None:
    folder.write({"prompt": "<image>", "images": "a.png"}, {"prompt": "<image><image>", "images": "a.png"})
    opened = folder.open()
    with pytest.raises(DataError, match=r"data\.jsonl, entry 1: the prompt has 2 image markers, but the entry has 1"):
        opened.stream.sources[0].prompt(1, PromptRef(0, 0, 1))
    with pytest.raises(DataError, match="image markers"):
        check_lengths(opened.stream.sources[0])
    with pytest.raises(
        DataError, match=r"0 pictures, because its field 'files' is missing or null\. Correct data\.images"
    ):
        folder.first(images="files")


def test_a_literal_placeholder_in_the_text_fails_the_prompt(folder: Folder) -> None:
    folder.write({"prompt": "<image> <|image_pad|>", "images": "a.png"})
    with pytest.raises(DataError, match="entry 0: the prompt has 2 placeholders, but 1 picture"):
        folder.first()


# --- opening


@pytest.mark.parametrize("chat", [True, False])
def test_a_forgotten_setting_of_pictures_fails_prompts_with_markers(folder: Folder, chat: bool) -> None:
    """Otherwise the model would read the marker as text, and see no picture."""
    folder.write({"prompt": "<image>How many? <image>", "images": ["a.png", "c.png"]}, {"prompt": "2 + 5"})
    with pytest.raises(DataError, match=r"entry 0: the prompt has 2 image markers, but data\.images is not set"):
        folder.first(images=None, chat=chat)
    opened = folder.open(images=None, chat=chat).stream.sources[0]
    assert opened.prompt(1, PromptRef(0, 0, 1)).text
    assert "<image>" in folder.first(images=None, chat=chat, image_marker="<picture>").text


def test_a_literal_placeholder_fails_the_prompt_of_a_job_without_pictures(folder: Folder) -> None:
    folder.write({"prompt": "How many? <|image_pad|>"})
    with pytest.raises(DataError, match=r"entry 0: the prompt has 1 placeholder, but 0 pictures"):
        folder.first(images=None, chat=False)


def test_a_processor_that_cuts_pictures_into_several_does_not_matter_without_pictures(tmp_path: Path) -> None:
    folder = Folder(tmp_path, family="smolvlm")
    change_processor(folder.model, do_image_splitting=True)
    folder.write({"prompt": "2 + 5"}, {"prompt": "<image>"}, {"prompt": "<global-img>"})
    opened = folder.open(images=None, chat=False, image_marker="[picture]").stream.sources[0]
    assert opened.prompt(0, PromptRef(0, 0, 0)).text == "2 + 5"
    for entry, message in ((1, "has 1 placeholder, but 0 pictures"), (2, "contains '<global-img>'")):
        with pytest.raises(DataError, match=message):
            opened.prompt(entry, PromptRef(0, 0, entry))


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_vision_model_without_its_processor_is_trained_on_text(folder: Folder, name: str) -> None:
    (folder.model / name).unlink(missing_ok=True)
    folder.write({"prompt": "2 + 5"})
    assert folder.first(images=None, chat=False).text == "2 + 5"


def test_a_marker_of_a_video_fails_the_prompt(folder: Folder) -> None:
    folder.write({"prompt": "<image><video>What happens?", "images": ["a.png"], "videos": ["a.mp4"]})
    with pytest.raises(DataError, match=r"entry 0: the prompt contains <video>, but videos are not supported"):
        folder.first()


def test_a_literal_placeholder_fails_the_prompt_of_a_source_without_pictures_too(folder: Folder) -> None:
    """An engine or a train rank takes each placeholder for a picture, and would fail."""
    folder.write({"prompt": "<image>?", "images": ["a.png"]})
    (folder.path / "text.jsonl").write_text(
        '{"prompt": "a <|image_pad|>?", "answer": "7"}\n{"prompt": "b", "answer": "7"}\n'
    )
    sources = [
        {"name": "seen", "path": str(folder.data), "images": "images"},
        {"name": "plain", "path": str(folder.path / "text.jsonl")},
    ]
    plain = folder.open(path=None, images=None, sources=sources).stream.sources[1]
    with pytest.raises(DataError, match=r"entry 0: the prompt has 1 placeholder, but 0 pictures"):
        plain.prompt(0, PromptRef(0, 0, 0))
    assert plain.prompt(1, PromptRef(0, 0, 1)).pictures == ()


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min_pixels": 15 * 16}, r"min_pixels \(240\) is below the 256 of the model's processor"),
        ({"max_pixels": 96 * 97}, r"max_pixels \(9312\) is above the 9216 of the model's processor"),
    ],
)
def test_bounds_beyond_those_of_the_processor_are_refused(folder: Folder, bounds: dict[str, int], message: str) -> None:
    """Engines and ranks run the processor, which would resize the pictures again."""
    folder.write({"prompt": "<image>?", "images": ["a.png"]})
    with pytest.raises(DataError, match=message):
        folder.open(**bounds)


def test_a_processor_that_cuts_pictures_into_several_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, family="smolvlm")
    folder.write({"prompt": "<image>?", "images": ["a.png"]})
    change_processor(folder.model, do_image_splitting=True)
    with pytest.raises(DataError, match=r"do_image_splitting.*Set do_image_splitting: false"):
        folder.open(chat=False)
    change_processor(folder.model, do_image_splitting=False)
    assert len(folder.open(chat=False).stream.sources[0].prompt(0, PromptRef(0, 0, 0)).pictures) == 1


def test_the_digest_of_the_data_changes_with_a_picture_and_not_with_its_time(folder: Folder) -> None:
    folder.write({"prompt": "<image>", "images": "a.png"})
    spec = folder.spec(sections={"eval": {"path": str(folder.data)}})
    first = open_prompts(spec, folder.path / "cache", folder.model).identity
    assert identify_data(spec, folder.path / "other") == first
    (folder.path / "a.png").touch()
    assert identify_data(spec, folder.path / "cache") == first
    (folder.path / "a.png").write_bytes(encoded(picture(41, 24)))
    second = identify_data(spec, folder.path / "cache")
    assert second.digest != first.digest
    assert second.held_out != first.held_out
    plain = folder.spec(images=None)
    (folder.path / "a.png").write_bytes(encoded(picture(42, 24)))
    assert identify_data(plain, folder.path / "cache").digest == identify_data(plain, folder.path / "other").digest


def test_missing_pictures_are_reported_with_their_entries_before_anything_starts(folder: Folder) -> None:
    folder.write(
        {"prompt": "<image>", "images": "a.png"},
        {"prompt": "<image>", "images": ["no.png"]},
        {"prompt": [{"role": "user", "content": [image("../up.png")]}]},
    )
    with pytest.raises(DataError) as caught:
        folder.open()
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 pictures cannot be used"
    assert "data.jsonl, entry 1: " in lines[1]
    assert "no.png: the picture does not exist" in lines[1]
    assert "entry 2: " in lines[2]
    assert "outside the data's folder" in lines[2]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"prompt": "<image>", "images": 3}, "field 'images' is a number.*list of texts, or one path"),
        ({"prompt": "<image>", "images": ["a.png", None]}, "a list whose item 2 is null, not a path"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": {}}]}]}, "'image' is not a path"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "only parts of type 'text' and 'image'"),
    ],
)
def test_entries_of_another_form_are_refused_when_the_data_are_read(
    folder: Folder, entry: dict[str, Any], message: str
) -> None:
    folder.write({"prompt": "Hi"}, entry)
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}"):
        folder.open()


def test_without_images_in_the_spec_parts_of_type_image_are_refused(folder: Folder) -> None:
    folder.write({"prompt": [{"role": "user", "content": [image("a.png")]}]})
    folder.open()
    with pytest.raises(DataError, match="only parts of type 'text' are supported"):
        folder.open(images=None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "preprocessor_config.json").unlink(), "data, source 'data': .*has no processor"),
        (lambda model: (model / "config.json").write_text('{"model_type": "qwen3"}'), "has no vision part"),
    ],
)
def test_a_model_that_cannot_see_is_refused_before_data_are_read(
    folder: Folder, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder.model)
    with pytest.raises(DataError, match=message):
        folder.open()
    folder.write({"prompt": "Hi"})
    assert folder.first(images=None).token_ids


def test_the_pictures_of_an_entry_are_those_of_its_prompt(folder: Folder) -> None:
    folder.write({"prompt": "<image>Hi<image>", "images": ["a.png", "b.jpg"]}, {"prompt": "Hi"})
    source = folder.open().stream.sources[0]
    seen, blind = (source.pictures_of(source.dataset.entry(number)) for number in range(2))
    assert seen == source.prompt(0, PromptRef(0, 0, 0)).pictures
    assert [Path(one.path).name for one in seen] == ["a.png", "b.jpg"]
    assert blind == ()


# --- spec


def test_a_spec_without_pictures_is_written_as_before(folder: Folder) -> None:
    new = {"images", "image_marker", "min_pixels", "max_pixels"}
    source = {"name": "s", "path": "x.jsonl"}
    sections = {"eval": {"sources": [{"name": "held", "path": "y.jsonl"}]}}
    spec = parse_spec(spec_tree({"sources": [source], "shards": 1}, **sections))
    tree = json.loads(spec.model_dump_json())
    assert not new & tree["data"].keys()
    assert not new & tree["data"]["sources"][0].keys()
    assert not new & tree["eval"]["sources"][0].keys()
    assert not new & spec.model_dump()["data"].keys()


def test_sources_and_held_out_sets_inherit_from_data_and_are_written_back(folder: Folder) -> None:
    own = {"images": "pics", "image_marker": "[p]", "min_pixels": 5, "max_pixels": 6}
    sources = [{"name": "s", "path": "x.jsonl"}, {"name": "t", "path": "x.jsonl"} | own]
    sections = {"eval": {"sources": [{"name": "held", "path": "y.jsonl"}, {"name": "other", "path": "y.jsonl"} | own]}}
    data = {"sources": sources, "images": "images", "max_pixels": 9, "shards": 1}
    spec = parse_spec(spec_tree(data, **sections))
    assert parse_spec(json.loads(spec.model_dump_json())) == spec
    for found in (training_sources(spec), eval_sources(spec)):
        assert [(one.images, one.image_marker, one.min_pixels, one.max_pixels) for one in found] == [
            ("images", "<image>", None, 9),
            ("pics", "[p]", 5, 6),
        ]


def test_contradicting_bounds_and_an_empty_marker_are_refused() -> None:
    for wrong, message in (
        ({"min_pixels": 9, "max_pixels": 8}, r"min_pixels \(9\)"),
        ({"image_marker": ""}, "image_m"),
    ):
        with pytest.raises(SpecError, match=message):
            parse_spec(spec_tree({"path": "x.jsonl", "images": "images", **wrong}))


# --- a node with another processor


@pytest.mark.parametrize(
    ("name", "value"), [("image_mean", [0.1, 0.1, 0.1]), ("resample", 2), ("max_pixels", 4096), ("patch_size", 16)]
)
def test_each_setting_of_the_processor_counts(folder: Folder, name: str, value: Any) -> None:
    before = PictureRule.load(folder.model).settings
    change_processor(folder.model, **{name: value})
    config = json.loads((folder.model / "config.json").read_text())
    if name in config["vision_config"]:  # otherwise the model is refused
        config["vision_config"][name] = value
        (folder.model / "config.json").write_text(json.dumps(config))
    assert PictureRule.load(folder.model).settings != before


def change_processor(model: Path, **settings: Any) -> None:
    file = model / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_node_with_another_processor_waits_for_the_right_files(folder: Folder) -> None:
    folder.write({"prompt": "<image>Hi", "images": ["a.png"]})
    prompts = folder.open()
    known = {"uid": "u", "name": "j", "spec": {}, "run_dir": "r", "created": 0.0, "prompts": 1}
    job = JobRecord(**known, picture_settings=prompts.picture_settings)
    assert len(prompts.picture_settings) == 64
    check_processor(job, prompts, folder.model)
    change_processor(folder.model, image_mean=[0.1, 0.1, 0.1])  # as many tokens, other tensors
    check_processor(JobRecord(**known), folder.open(), folder.model)  # of a release that did not record it
    with pytest.raises(DataChanged, match=r"model: the settings of the model's image processor differ.*Copy preproc"):
        check_processor(job, folder.open(), folder.model)


def test_jobs_without_pictures_record_no_processor(folder: Folder) -> None:
    folder.write({"prompt": "Hi"})
    assert folder.open(images=None).picture_settings == ""


def test_a_group_whose_pictures_are_not_those_of_its_tokens_is_not_trained(folder: Folder) -> None:
    """A rank would end its world with every try."""
    folder.write({"prompt": "<image>Hi", "images": ["a.png"]})
    spec = folder.spec()
    scorer: Any = None
    data = make_job_data(spec, "u", folder.open(), scorer)
    prompt = folder.first()
    (shown,) = prompt.pictures
    medium = Medium("picture", "0" * 64, 9, (shown.target_height, shown.target_width, 3), "uint8")
    smaller = medium._replace(shape=(16, 16, 3))
    sample = Sample((5, 6), (-0.1, -0.1), "x", "stop", (VersionSpan(Version(0, 0), 0, 2),), reward=1.0)
    right = Group(prompt.ref, prompt.token_ids, (sample, replace(sample, reward=0.0)), media=(medium,))
    array = Medium("trajectory", "1" * 64, 9, (3,), "float32")
    assert data.why_untrainable(right) is None
    assert data.why_untrainable(replace(right, media=(medium, array))) is None
    for media in ((), (medium, medium), (smaller,)):
        assert "the group's pictures are not those of its tokens" in str(
            data.why_untrainable(replace(right, media=media))
        )
    tool = replace(sample, output=sample.output._replace(media=(medium,)))
    assert "are not those of its tokens" in str(data.why_untrainable(replace(right, samples=(sample, tool))))


def test_a_prompt_with_more_pictures_than_engines_take_is_refused(folder: Folder) -> None:
    folder.write(
        {"prompt": "<image>" * 256, "images": ["a.png"] * 256}, {"prompt": "<image>" * 257, "images": ["a.png"] * 257}
    )
    source = folder.open().stream.sources[0]
    assert len(source.prompt(0, PromptRef(0, 0, 0)).pictures) == 256
    with pytest.raises(DataError, match="the prompt has 257 pictures; the maximum is 256"):
        source.prompt(1, PromptRef(0, 0, 1))
