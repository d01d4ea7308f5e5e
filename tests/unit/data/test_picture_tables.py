"""Parquet files and saved datasets that contain pictures: their copies, and the formats of verl and EasyR1."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from picture_files import encoded, picture
from picture_models import token_ids, write_picture_model
from prompt_sources import spec_tree

from gcore.config import parse_spec
from gcore.data.dataset import Dataset
from gcore.data.stream import JobPrompts, check_lengths, identify_data, open_prompts
from gcore.errors import DataError
from gcore.types import Prompt, PromptRef, entry_text

PNG, JPEG, WEBP = (encoded(picture(40 + number, 24), kind) for number, kind in enumerate(("PNG", "JPEG", "WebP")))
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
PAD = token_ids()["<|image_pad|>"]


def name_of(data: bytes, suffix: str) -> str:
    return f"sha256/{hashlib.sha256(data).hexdigest()}.{suffix}"


def write(path: Path, kind: pa.DataType, values: list[Any], **columns: list[Any]) -> Path:
    rows = {"prompt": ["<image>"] * len(values), "answer": ["7"] * len(values)} | columns
    pq.write_table(pa.table({**rows, "images": pa.array(values, kind)}), path)
    return path


def open_dataset(path: Path, cache: Path, **options: Any) -> Dataset:
    given: dict[str, Any] = {"prompt_field": "prompt", "answer_fields": ("answer",), "images": "images"} | options
    return Dataset.open(path, cache_dir=cache, **given)


def of(data: bytes, path: str | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": path}


# --- copies


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.binary(), [PNG], name_of(PNG, "png")),
        (pa.large_binary(), [JPEG], name_of(JPEG, "jpg")),
        (pa.dictionary(pa.int32(), pa.binary()), [PNG], name_of(PNG, "png")),
        (pa.list_(pa.binary()), [[PNG, WEBP]], [name_of(PNG, "png"), name_of(WEBP, "webp")]),
        (IMAGE, [of(PNG, "x.png")], name_of(PNG, "png")),
        (pa.list_(IMAGE), [[of(PNG), of(JPEG)]], [name_of(PNG, "png"), name_of(JPEG, "jpg")]),
        (pa.large_list(pa.struct([("bytes", pa.large_binary())])), [[{"bytes": PNG}]], [name_of(PNG, "png")]),
        (pa.list_(IMAGE), [[{"bytes": None, "path": "a/b.png"}]], ["a/b.png"]),
        (pa.list_(pa.string()), [["a.png"]], ["a.png"]),
        (pa.string(), ["a.png"], "a.png"),
        (pa.list_(IMAGE), [[]], []),
        (pa.list_(IMAGE), [None], None),
        (pa.binary(), [b"no picture"], name_of(b"no picture", "bin")),
    ],
)
def test_pictures_become_files_named_by_their_sha256(tmp_path: Path, kind: Any, values: Any, expected: Any) -> None:
    data = open_dataset(write(tmp_path / "a.parquet", kind, values), tmp_path / "cache")
    assert data.entry(0)["images"] == expected
    names = [expected] if isinstance(expected, str) else expected or []
    written = [name for name in names if name.startswith("sha256/")]
    assert (data.pictures is not None) == bool(written)
    for name in written:
        assert data.pictures is not None
        content = (data.pictures / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() in name


def test_a_copy_is_used_again_until_its_pictures_are_deleted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.binary(), [PNG, PNG, JPEG])
    first = open_dataset(path, tmp_path / "cache")
    assert first.pictures is not None
    files = sorted(file.name for file in (first.pictures / "sha256").iterdir())
    assert len(files) == 2, "equal pictures are one file"
    times = {file: file.stat().st_mtime_ns for file in (first.pictures / "sha256").iterdir()}
    again = open_dataset(path, tmp_path / "cache")
    assert again.digest == first.digest
    assert {file: file.stat().st_mtime_ns for file in times} == times
    shutil.rmtree(first.pictures)
    third = open_dataset(path, tmp_path / "cache")
    assert third.pictures is not None
    assert sorted(file.name for file in (third.pictures / "sha256").iterdir()) == files


def test_the_digest_does_not_depend_on_names_and_cuts(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.parquet", pa.binary(), [PNG, JPEG])
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/x.parquet", pa.binary(), [PNG])
    write(tmp_path / "folder/y.parquet", pa.binary(), [JPEG])
    digests = {open_dataset(path, tmp_path / "cache").digest for path in (whole, tmp_path / "folder")}
    assert len(digests) == 1


def test_without_images_the_column_is_left_out_as_before(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.list_(IMAGE), [[of(PNG)]])
    data = open_dataset(path, tmp_path / "cache", images=None)
    assert "images" not in data.entry(0)
    assert data.left_out == {"images": "it holds binary data"}
    assert "images" in open_dataset(path, tmp_path / "cache").entry(0), "the two copies are apart"


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            pa.list_(IMAGE),
            [[of(PNG)], [{"bytes": None, "path": None}]],
            r"row 1: .*a picture with neither bytes nor pa",
        ),
        (pa.list_(pa.binary()), [[PNG], [PNG, None]], r"row 1: .*null in a list of pictures"),
        (pa.struct([("data", pa.binary())]), [{"data": PNG}], "'images' holds binary data.*bytes and path"),
        (pa.int64(), [3], "field 'images' is a number"),
    ],
)
def test_a_column_of_another_form_is_refused(tmp_path: Path, kind: Any, values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(write(tmp_path / "a.parquet", kind, values), tmp_path / "cache")


# --- jobs


def prompts_of(path: Path, cache: Path, **data: Any) -> JobPrompts:
    model = write_picture_model(cache.parent / "model")
    given = {"path": str(path), "images": "images", "shards": 1} | data
    sections = {"model": {"path": str(model), "chat": True, "max_length": 4096}}
    reward = {"reward": {"name": "exact", "answer": data.pop("answer")}} if "answer" in data else {}
    given.pop("answer", None)
    spec = parse_spec(spec_tree(given, **reward) | sections)
    opened = open_prompts(spec, cache, model)
    assert identify_data(spec, cache) == opened.identity
    return opened


def all_prompts(opened: JobPrompts) -> list[Prompt]:
    source = opened.stream.sources[0]
    return [source.prompt(number, PromptRef(0, 0, number)) for number in range(len(source))]


def test_the_geometry3k_format_of_verl_loads_as_it_is(tmp_path: Path) -> None:
    question = "<image>Find x. You FIRST think. The final answer MUST BE put in \\boxed{}."
    rows = [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": question}],
            "images": [of(data)],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"split": "train", "index": number, "answer": str(number), "question": question},
        }
        for number, data in enumerate((PNG, JPEG, PNG))
    ]
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("images", pa.list_(IMAGE)),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            (
                "extra_info",
                pa.struct([(n, pa.string()) for n in ("split", "answer", "question")] + [("index", pa.int64())]),
            ),
        ]
    )
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    opened = prompts_of(path, tmp_path / "cache", answer="reward_model.ground_truth")
    prompts = all_prompts(opened)
    assert [entry_text(prompt.fields, "reward_model.ground_truth") for prompt in prompts] == ["0", "1", "2"]
    assert "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Find x." in prompts[0].text
    for prompt, data in zip(prompts, (PNG, JPEG, PNG), strict=True):
        (ref,) = prompt.pictures
        assert ref.sha256 == hashlib.sha256(data).hexdigest()
        assert Path(ref.path).read_bytes() == data
        assert prompt.token_ids.count(PAD) == ref.target_height * ref.target_width // 16**2
    assert check_lengths(opened.stream.sources[0]).checked == 3


@pytest.mark.parametrize("saved", [False, True], ids=["parquet", "saved dataset"])
def test_the_geometry3k_format_of_easyr1_loads_as_it_is(tmp_path: Path, saved: bool) -> None:
    rows = [
        {"images": [of(PNG, "img_diagram.png")], "problem": "<image>Find x.", "answer": "3"},
        {"images": [of(PNG), of(WEBP)], "problem": "<image>Left or right?<image>", "answer": "left"},
    ]
    schema = pa.schema([("images", pa.list_(IMAGE)), ("problem", pa.string()), ("answer", pa.string())])
    table = pa.Table.from_pylist(rows, schema=schema)
    path = tmp_path / "data"
    path.mkdir()
    if saved:
        with pa.OSFile(str(path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            stream.write_table(table)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    else:
        pq.write_table(table, path / "train-00000-of-00001.parquet")
    prompts = all_prompts(prompts_of(path, tmp_path / "cache", prompt="problem"))
    assert [len(prompt.pictures) for prompt in prompts] == [1, 2]
    assert prompts[1].request_ids.count(PAD) == 2
    assert prompts[0].pictures[0] == prompts[1].pictures[0]


def test_paths_in_a_table_are_relative_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    rows = [[{"bytes": None, "path": "a.png"}], [of(PNG)]]
    path = write(tmp_path / "a.parquet", pa.list_(IMAGE), rows)
    first, second = all_prompts(prompts_of(path, tmp_path / "cache"))
    assert first.pictures[0].path == str(tmp_path / "a.png")
    assert first.token_ids == second.token_ids
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.parquet, row 0: .*a\.png: the picture does not exist"):
        prompts_of(path, tmp_path / "cache")


def test_a_broken_picture_in_a_table_is_reported_with_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.binary(), [PNG, PNG[:-30], b""])
    with pytest.raises(DataError) as caught:
        prompts_of(path, tmp_path / "cache")
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 pictures cannot be used"
    assert "a.parquet, row 1: " in lines[1]
    assert "a.parquet, row 2: " in lines[2]
    assert "is empty" in lines[2]
