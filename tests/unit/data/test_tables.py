"""Parquet files and saved datasets are checked, read, named and reported like JSONL, without pyarrow in the process."""

from __future__ import annotations

import datetime
import decimal
import fcntl
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gcore.config.reward import RewardSpec
from gcore.data import tables
from gcore.data.dataset import DataChanged, Dataset
from gcore.errors import DataError
from gcore.reward.api import find_reward

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(7)]
CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def write_parquet(path: Path, rows: list[dict[str, Any]] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path, **options)
    return path


def save_dataset(folder: Path, rows: list[dict[str, Any]], *, shards: int = 1, batch: int = 3, **state: Any) -> Path:
    """As `datasets.Dataset.save_to_disk` writes it: Arrow streams, and a state that names them."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    table = pa.Table.from_pylist(rows)
    for number, name in enumerate(names):
        part = table.slice(
            number * len(rows) // shards, (number + 1) * len(rows) // shards - number * len(rows) // shards
        )
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(part, max_chunksize=batch)
    known = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": None}
    (folder / "state.json").write_text(json.dumps(known | state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def save_splits(folder: Path, splits: dict[str, list[dict[str, Any]]]) -> Path:
    """As `datasets.DatasetDict.save_to_disk` writes it."""
    for name, rows in splits.items():
        save_dataset(folder / name, rows, _split=name)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def open_dataset(path: Path, cache: Path, **options: Any) -> Dataset:
    given = {"prompt_field": "prompt", "answer_fields": ("answer",), "cache_dir": cache} | options
    return Dataset.open(path, **given)


def error_of(path: Path, cache: Path, **options: Any) -> DataError:
    def unfinished() -> set[str]:
        return {file.name for file in cache.glob(".*") if file.suffix in (".part", ".index")}

    before = unfinished()
    with pytest.raises(DataError) as caught:
        open_dataset(path, cache, **options)
    assert caught.value.where
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    assert unfinished() == before, "a failed build leaves nothing half behind"
    return caught.value


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# --- reading


def test_the_same_rows_have_the_same_entries_and_digest_in_every_format_and_cut(tmp_path: Path, cache: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    write_parquet(tmp_path / "parts" / "b.parquet", table.slice(3))
    write_parquet(tmp_path / "parts" / "a.parquet", table.slice(0, 3))
    places = [
        write_parquet(tmp_path / "one.parquet", ROWS),
        write_parquet(tmp_path / "many.parquet", ROWS, row_group_size=2, compression="zstd"),
        tmp_path / "parts",
        save_dataset(tmp_path / "saved", ROWS),
        save_dataset(tmp_path / "shards", ROWS, shards=3, batch=1),
    ]
    digests = set()
    for place in places:
        with open_dataset(place, cache) as dataset:
            assert list(dataset) == ROWS
            digests.add(dataset.digest)
    assert len(digests) == 1
    with open_dataset(write_parquet(tmp_path / "other.parquet", [*ROWS[:-1], ROWS[0]]), cache) as other:
        assert other.digest not in digests


def test_values_are_what_json_would_have_said(tmp_path: Path, cache: Path) -> None:
    schema = pa.schema(
        [
            ("prompt", CHAT),
            ("answer", pa.int64()),
            ("share", pa.float32()),
            ("half", pa.float16()),
            ("good", pa.bool_()),
            ("none", pa.null()),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("day", pa.date32()),
            ("at", pa.timestamp("ns", tz="UTC")),
            ("price", pa.decimal128(9, 2)),
            ("names", pa.map_(pa.string(), pa.int32())),
            ("deep", pa.list_(pa.struct([("a", pa.int8()), ("when", pa.date32())]))),
            ("large", pa.large_string()),
        ]
    )
    row = {
        "prompt": [{"role": "user", "content": 'ü漢🙂 "\n'}],
        "answer": 2**53 + 1,
        "share": 0.5,
        "half": 0.25,
        "good": True,
        "none": None,
        "kind": "k",
        "day": datetime.date(2024, 2, 29),
        "at": datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC),
        "price": decimal.Decimal("3.50"),
        "names": [("x", 1)],
        "deep": [{"a": 1, "when": datetime.date(2024, 1, 1)}],
        "large": "l",
    }
    path = write_parquet(tmp_path / "all.parquet", pa.Table.from_pylist([row], schema=schema))
    entry = open_dataset(path, cache).entry(0)
    assert entry.pop("at").startswith("2024-02-29 01:02:03")
    said = {"day": "2024-02-29", "price": "3.50", "names": {"x": 1}, "deep": [{"a": 1, "when": "2024-01-01"}]}
    assert entry == {name: value for name, value in (row | said).items() if name != "at"}


def test_fields_that_other_rows_have_are_not_there_as_null_within_messages(tmp_path: Path, cache: Path) -> None:
    # A column of objects has every field in every row; a template asks whether a field is there.
    call = {"type": "function", "function": {"name": "add"}}
    rows = [
        {"prompt": [{"role": "user", "content": "x", "tool_calls": None}], "answer": 1, "note": None},
        {"prompt": [{"role": "assistant", "content": None, "tool_calls": [call]}], "answer": 2, "note": "n"},
    ]
    entries = list(open_dataset(write_parquet(tmp_path / "chat.parquet", rows), cache))
    assert entries[0] == {"prompt": [{"role": "user", "content": "x"}], "answer": 1, "note": None}
    assert entries[1]["prompt"] == [{"role": "assistant", "tool_calls": [call]}]


json_like = st.fixed_dictionaries(
    {
        "prompt": st.text(st.characters(exclude_categories=("Cs",)), min_size=1),
        "answer": st.integers(-(2**63), 2**63 - 1),
        "share": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "tags": st.lists(st.text(st.characters(exclude_categories=("Cs",))), max_size=3),
    }
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(json_like, min_size=1, max_size=9))
def test_table_rows_round_trip(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    schema = pa.schema(
        [("prompt", pa.string()), ("answer", pa.int64()), ("share", pa.float64()), ("tags", pa.list_(pa.string()))]
    )
    path = write_parquet(tmp_path / "rows.parquet", pa.Table.from_pylist(rows, schema=schema), row_group_size=4)
    with (tmp_path / "said").open("w") as out:
        assert tables.write_rows("parquet", [path], tmp_path / "lines", out) == tables.WrittenRows([len(rows)], {})
    assert [json.loads(line) for line in (tmp_path / "lines").read_bytes().split(b"\n")[:-1]] == rows


@pytest.mark.large
def test_a_million_rows_in_one_row_group_are_read_at_random_with_little_memory(tmp_path: Path) -> None:
    count = 1_000_000
    table = pa.table({"prompt": pa.array([f"{i} + 1 is" for i in range(count)]), "answer": pa.array(range(count))})
    path = write_parquet(tmp_path / "big.parquet", table)
    assert pq.ParquetFile(path).num_row_groups == 1
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from gcore.data.dataset import Dataset\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "d = Dataset.open(sys.argv[1], prompt_field='prompt', answer_fields=('answer',), cache_dir=Path(sys.argv[2]))\n"
        "wrong = [i for i in range(0, len(d), 997) if d.entry(i * 7919 % len(d))['answer'] != i * 7919 % len(d)]\n"
        "own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "reader = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(len(d), wrong, 'pyarrow' in sys.modules, own >> 10, reader >> 10)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(tmp_path / "cache")], capture_output=True, text=True, check=True
    )
    length, wrong, has_arrow, own, reader = done.stdout.split()
    assert (length, wrong, has_arrow) == (str(count), "[]", "False")
    assert int(own) < 60, "MiB that the reading process grew by"
    assert int(reader) < 300, "MiB of the process that made the copy"


# --- what lies there


def test_splits_are_told_apart(tmp_path: Path, cache: Path) -> None:
    saved = save_splits(tmp_path / "saved", {"train": ROWS[:5], "test": ROWS[5:]})
    hub = tmp_path / "hub"
    for name, rows in (("train-00000-of-00002", ROWS[:2]), ("train-00001-of-00002", ROWS[2:5])):
        write_parquet(hub / f"{name}.parquet", rows)
    write_parquet(hub / "test-00000-of-00001.parquet", ROWS[5:])
    for place in (saved, hub):
        assert list(open_dataset(place, cache, split="train")) == ROWS[:5]
        assert list(open_dataset(place, cache, split="test")) == ROWS[5:]
        assert "several splits (test, train). Name one" in str(error_of(place, cache))
        assert "no split 'dev', only test, train" in str(error_of(place, cache, split="dev"))
    assert len(open_dataset(saved / "train", cache)) == 5
    assert len(open_dataset(saved / "train", cache, split="train")) == 5
    only = save_splits(tmp_path / "only", {"train": ROWS})
    assert len(open_dataset(only, cache)) == len(ROWS), "one split needs no name"


@pytest.mark.parametrize("declared", ["auto", "jsonl"])
def test_a_jsonl_file_has_no_split(tmp_path: Path, cache: Path, declared: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n")
    assert "has no splits, but split is 'train'" in str(error_of(path, cache, format=declared, split="train"))


@pytest.mark.parametrize("declared", ["auto", "jsonl", "parquet", "hf"])
@pytest.mark.parametrize("name", ["data", "data.jsonl", "data.parquet"])
def test_missing_data_are_reported_before_a_wrong_format_or_split(
    tmp_path: Path, cache: Path, declared: str, name: str
) -> None:
    error = str(error_of(tmp_path / name, cache, format=declared, split="train"))
    assert "no such file or directory" in error
    assert "has no split" not in error


def test_a_parquet_file_is_known_by_its_content_whatever_its_name(tmp_path: Path, cache: Path) -> None:
    assert len(open_dataset(write_parquet(tmp_path / "data", ROWS), cache)) == len(ROWS)
    assert "has no split" in str(error_of(write_parquet(tmp_path / "one.parquet", ROWS), cache, split="train"))


def test_files_beside_the_parquet_files_of_a_folder_are_left_out(tmp_path: Path, cache: Path) -> None:
    write_parquet(tmp_path / "data" / "rows.parquet", ROWS)
    write_parquet(tmp_path / "data" / "deeper" / "rows.parquet", ROWS)
    (tmp_path / "data" / "README.md").write_text("x")
    assert len(open_dataset(tmp_path / "data", cache)) == len(ROWS)


def test_a_link_to_a_file_that_is_gone_is_missed_and_not_passed_over(tmp_path: Path, cache: Path) -> None:
    write_parquet(tmp_path / "data" / "a.parquet", ROWS)
    link = tmp_path / "data" / "b.parquet"
    link.symlink_to(tmp_path / "blobs" / "gone")
    error = error_of(tmp_path / "data", cache)
    assert "cannot read the file (no such file" in str(error)
    assert error.where == str(link)


@pytest.mark.parametrize("declared", ["auto", "jsonl", "parquet", "hf"])
def test_a_path_that_the_system_does_not_let_us_look_at_is_a_sentence(
    tmp_path: Path, cache: Path, declared: str
) -> None:
    assert "cannot read the file (file name too long)" in str(error_of(tmp_path / ("n" * 300), cache, format=declared))


# --- mistakes: the sentences of JSONL, with the row

BAD: list[Any] = [
    pytest.param({"question": "x", "answer": 1}, "no field 'prompt', only 'question', 'answer'", id="no prompt"),
    pytest.param({"prompt": "", "answer": 1}, "'prompt' is empty", id="an empty prompt"),
    pytest.param({"prompt": None, "answer": 1}, "'prompt' is null", id="null as prompt"),
    pytest.param({"prompt": 7, "answer": 1}, "'prompt' is a number", id="a number as prompt"),
    pytest.param({"prompt": {"a": "b"}, "answer": 1}, "'prompt' is an object", id="an object as prompt"),
    pytest.param({"prompt": ["x"], "answer": 1}, "item 1 is a string, not a chat message", id="no message"),
    pytest.param({"prompt": [{"role": "user"}], "answer": 1}, "no text in 'content'", id="no content"),
    pytest.param({"prompt": "x"}, "no field 'answer', only 'prompt'", id="no answer"),
    pytest.param({"prompt": "x", "answer": None}, "'answer' is null", id="null as answer"),
]


def test_large_rows_are_written_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "d.parquet", [{"prompt": f"{i}" * 1000, "answer": i} for i in range(10)])
    tables.write_rows("parquet", [path], tmp_path / "whole", io.StringIO())
    sizes: list[int] = []
    real = tables._as_lines

    def noted(batch: Any, *where: Any) -> bytes:
        sizes.append(batch.num_rows)
        return real(batch, *where)

    monkeypatch.setattr(tables, "_as_lines", noted)
    monkeypatch.setattr(tables, "PIECE_BYTES", 4000)
    assert tables.write_rows("parquet", [path], tmp_path / "pieces", io.StringIO()) == tables.WrittenRows([10], {})
    assert sum(sizes) == 10
    assert max(sizes) == 3
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_row_is_told_with_its_number(tmp_path: Path, cache: Path, bad: dict[str, Any], message: str) -> None:
    # A column has one type: what is empty or null stands below a value of that type.
    rows = [{**bad, "prompt": "good", "answer": 1}, bad] if message.endswith(("is empty", "is null")) else [bad]
    path = write_parquet(tmp_path / "data.parquet", rows)
    error = error_of(path, cache)
    assert message in str(error)
    assert error.where == f"{path}, row {len(rows) - 1}"
    saved = save_dataset(tmp_path / "saved", rows)
    assert error_of(saved, cache).where == f"{saved}, row {len(rows) - 1}"
    assert message in str(error_of(saved, cache))


def test_a_bad_row_of_several_files_is_told_with_its_file(tmp_path: Path, cache: Path) -> None:
    write_parquet(tmp_path / "data" / "a.parquet", ROWS[:3])
    second = write_parquet(tmp_path / "data" / "b.parquet", [ROWS[3], {"prompt": "", "answer": 1}])
    assert error_of(tmp_path / "data", cache).where == f"{second}, row 1"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        pytest.param(
            pa.array([1.0, float("nan")]), "column 'x' cannot be read (NaN or Infinity is not JSON)", id="NaN"
        ),
        pytest.param(pa.array([1.0, float("-inf")]), "NaN or Infinity is not JSON", id="infinity"),
        pytest.param(pa.array([b"ok", b"\xff"]).view(pa.string()), "column 'x' cannot be read ('utf", id="not UTF-8"),
    ],
)
def test_a_value_that_json_cannot_say_is_told_with_column_and_row(
    tmp_path: Path, cache: Path, column: pa.Array, message: str
) -> None:
    table = pa.table({"prompt": ["a", "b"], "answer": [1, 2], "x": column})
    path = write_parquet(tmp_path / "data.parquet", table)
    for used in ({"answer_fields": ("x",)}, {"columns": ["x"]}):
        error = error_of(path, cache, **used)
        assert message in str(error)
        assert error.where == f"{path}, row 1"
    with open_dataset(path, cache) as data:
        assert [entry["answer"] for entry in data] == [1, 2]
        assert "row 1" in data.left_out["x"]
    assert message in str(error_of(path, cache, columns=["x"]))  # the copy without it does not hide why


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param(pa.binary(), "column 'x' holds binary data, which JSON cannot represent", id="binary"),
        pytest.param(pa.struct([("bytes", pa.large_binary())]), "holds binary data", id="an image"),
        pytest.param(pa.list_(pa.duration("s")), "holds values of the type duration[s]", id="durations"),
    ],
)
def test_a_column_that_json_cannot_say_is_refused_before_anything_is_read(
    tmp_path: Path, cache: Path, kind: pa.DataType, message: str
) -> None:
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.int64()), ("x", kind)])
    path = write_parquet(tmp_path / "data.parquet", schema.empty_table())
    assert message in str(error_of(path, cache, columns=["x"]))
    table = pa.table({"prompt": ["a"], "answer": [1], "x": pa.nulls(1, kind)})
    with open_dataset(write_parquet(tmp_path / "unused.parquet", table), cache) as data:
        assert list(data) == [{"prompt": "a", "answer": 1}]
        assert list(data.left_out) == ["x"]


def test_only_the_columns_that_a_source_names_are_read(tmp_path: Path, cache: Path) -> None:
    table = pa.table({"prompt": ["a"], "answer": [1], "x": [2], "y": [3]})
    path = write_parquet(tmp_path / "data.parquet", table)
    lines = tmp_path / "data.jsonl"
    lines.write_text('{"prompt": "a", "answer": 1, "x": 2, "y": NaN}\n')
    for file in (path, lines):
        with open_dataset(file, cache, columns=["x"]) as data:
            assert list(data) == [{"prompt": "a", "answer": 1, "x": 2}]


def test_a_field_that_is_no_json_and_that_is_not_used_is_left_out(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": 1, "x": NaN, "y": "\\ud800", "z": 3}\n')
    with open_dataset(path, cache) as data:
        assert list(data) == [{"prompt": "a", "answer": 1, "z": 3}]
    assert "NaN is not JSON" in str(error_of(path, cache, columns=["x"]))
    assert "a lone surrogate" in str(error_of(path, cache, columns=["y"]))


SHAPES = json.loads((Path(__file__).parents[2] / "data" / "prompts" / "shapes.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_data_in_the_shape_of_another_trainer_are_read_as_they_are(
    tmp_path: Path, cache: Path, name: str, kind: str
) -> None:
    shape = SHAPES[name]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in shape["rows"]))
    else:
        write_parquet(path, pa.Table.from_pylist(shape["rows"]))
    reward = RewardSpec(name=shape["reward"], answer=shape["answer"])
    with Dataset.open(path, prompt_field=shape["prompt"], answer_fields=reward.answers, cache_dir=cache) as data:
        rule = find_reward(shape["reward"])
        values = [rule(shape["responses"][number], entry, reward).value for number, entry in enumerate(data)]
    assert values == [1.0] * len(shape["rows"])


def test_two_columns_of_one_name_are_refused(tmp_path: Path, cache: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([2])], ["prompt", "answer", "answer"])
    assert "two columns have the name 'answer'" in str(error_of(write_parquet(tmp_path / "d.parquet", table), cache))


DAMAGE: list[Any] = [
    pytest.param("d.parquet", lambda p: p.write_bytes(p.read_bytes()[:-9]), "is not a Parquet file, or is damaged", id="cut"),
    pytest.param("d.parquet", lambda p: p.write_bytes(b"PAR1"), "is not a Parquet file", id="only the magic"),
    pytest.param("d.parquet", lambda p: p.write_text("{}"), "is not a Parquet file", id="another content"),
    pytest.param("d.parquet", lambda p: p.write_bytes(b""), "is not a Parquet file", id="empty"),
    pytest.param("d.parquet", lambda p: p.unlink(), "cannot read the file (no such file", id="gone"),
    pytest.param("saved", lambda p: (p / "state.json").unlink(), "contains neither Parquet files nor a dataset", id="no state"),
    pytest.param("saved", lambda p: (p / "state.json").write_text("{"), "cannot read the file", id="state cut off"),
    pytest.param("saved", lambda p: (p / "state.json").write_text("[]"), "does not contain a JSON object", id="state a list"),
    pytest.param("saved", lambda p: (p / "state.json").write_text("{}"), "lists no data files", id="state empty"),
    pytest.param(
        "saved",
        lambda p: (p / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}'),
        "lists no data files",
        id="a file elsewhere",
    ),
    pytest.param(
        "saved", lambda p: (p / "state.json").write_text('{"_data_files": 5}'), "lists no data files", id="no list"
    ),
    pytest.param("saved", lambda p: next(p.glob("*.arrow")).unlink(), "cannot read the file", id="no data file"),
    pytest.param("saved", lambda p: next(p.glob("*.arrow")).write_bytes(b"ARROW1"), "is not an Arrow file", id="no Arrow"),
    pytest.param(
        "saved",
        lambda p: (q := next(p.glob("*.arrow"))).write_bytes(q.read_bytes()[:-200]),
        "is not an Arrow file as `datasets` saves it, or is damaged",
        id="Arrow cut off",
    ),
    pytest.param("splits", lambda p: (p / "dataset_dict.json").write_text("{}"), "lists no splits", id="no splits"),
    pytest.param(
        "splits", lambda p: (p / "dataset_dict.json").write_text('{"splits": []}'), "lists no splits", id="empty splits"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_damaged_tables_are_reported_in_a_sentence(
    tmp_path: Path, cache: Path, name: str, damage: Any, message: str
) -> None:
    path = tmp_path / name
    if name == "d.parquet":
        write_parquet(path, ROWS)
    elif name == "saved":
        save_dataset(path, ROWS)
    else:
        save_splits(path, {"train": ROWS})
    damage(path)
    assert message in str(error_of(path, cache))


@pytest.mark.parametrize("declared", ["parquet", "hf"])
def test_a_declared_format_that_is_not_there_is_told(tmp_path: Path, cache: Path, declared: str) -> None:
    (tmp_path / "folder").mkdir()
    wanted = {"parquet": "contains no Parquet files", "hf": "is not a dataset saved by `datasets`"}[declared]
    assert wanted in str(error_of(tmp_path / "folder", cache, format=declared))


def test_a_saved_order_of_rows_that_is_not_read_is_refused_and_not_passed_over(tmp_path: Path, cache: Path) -> None:
    path = save_dataset(tmp_path / "old", ROWS, _indices_files=[{"filename": "indices.arrow"}])
    assert "with a separate file for the order of its rows" in str(error_of(path, cache))


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_data_without_rows_are_refused(tmp_path: Path, cache: Path, kind: str) -> None:
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.int64())])
    if kind == "parquet":
        path = write_parquet(tmp_path / "d.parquet", schema.empty_table())
    else:
        path = save_dataset(tmp_path / "d", ROWS)
        with pa.OSFile(str(next(path.glob("*.arrow"))), "wb") as sink, pa.ipc.new_stream(sink, schema):
            pass
    assert "the data contain no prompts" in str(error_of(path, cache))


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    with pytest.raises(DataError, match=r"cannot store a copy of d\.parquet there \(not a directory\)"):
        open_dataset(path, tmp_path / "file" / "cache")


def test_a_reader_that_dies_is_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "pyarrow.py").write_text("raise ImportError('pyarrow is broken')")
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    error = error_of(path, cache)
    assert "the process that reads the data failed (ImportError: pyarrow is broken)" in str(error)


# --- the copy


def made(path: Path, cache: Path, **options: Any) -> int:
    """Whether opening reads the rows, 1 or 0: only then is progress up to all rows reported."""
    calls: list[tuple[int, int]] = []
    open_dataset(path, cache, progress=lambda done, total: calls.append((done, total)), **options).close()
    return int((len(ROWS), len(ROWS)) in calls)


def test_the_copy_is_made_once_and_serves_other_fields_too(tmp_path: Path, cache: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    assert [made(path, cache), made(path, cache), made(path, cache, answer_fields=())] == [1, 0, 0]
    with pytest.raises(DataError, match="no field 'question'"):
        open_dataset(path, cache, prompt_field="question")


def test_changed_data_get_a_new_copy_in_the_old_ones_place(tmp_path: Path, cache: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    before = open_dataset(path, cache)
    files = sorted(cache.iterdir())
    write_parquet(path, ROWS[:3])
    after = open_dataset(path, cache)
    assert (len(before), len(after)) == (7, 3)
    assert before.digest != after.digest
    assert before.entry(6) == ROWS[6], "who has the old copy open keeps it"
    assert sorted(cache.iterdir()) == files


def test_one_changed_file_of_several_is_noticed(tmp_path: Path, cache: Path) -> None:
    saved = save_dataset(tmp_path / "d", ROWS, shards=2)
    assert [made(saved, cache), made(saved, cache)] == [1, 0]
    os.utime(saved / "data-00001-of-00002.arrow", ns=(1, 1))
    assert made(saved, cache) == 1


@pytest.mark.parametrize("damage", ["rows cut", "rows gone", "manifest cut", "manifest of another version"])
def test_a_damaged_copy_is_made_again(tmp_path: Path, cache: Path, damage: str) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    assert made(path, cache) == 1
    rows, manifest = next(cache.glob(".*.rows")), next(cache.glob(".*.copy"))
    if damage == "rows gone":
        rows.unlink()
    elif damage == "rows cut":
        rows.write_bytes(rows.read_bytes()[:-5])
    elif damage == "manifest cut":
        manifest.write_bytes(manifest.read_bytes()[:-5])
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 0}))
    assert made(path, cache) == 1
    assert list(open_dataset(path, cache)) == ROWS


def test_a_copy_that_is_damaged_while_it_is_used_is_told(tmp_path: Path, cache: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    dataset = open_dataset(path, cache)
    copy = next(cache.glob(".*.rows"))
    with copy.open("r+b") as file:
        file.truncate(40)
    with pytest.raises(DataChanged, match=r"d\.parquet, row 3: .*changed or damaged.*Remove the copy of the data"):
        dataset.entry(3)


def test_data_that_change_while_they_are_read_are_told(tmp_path: Path, cache: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    with pytest.raises(DataError, match="changed while gcore read them"):
        open_dataset(path, cache, progress=lambda done, total: os.utime(path, ns=(1, 1)))


def test_concurrent_readers_wait_for_one_conversion(tmp_path: Path, cache: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(made(path, cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == [0, 0, 0, 1]


def test_a_half_written_copy_of_a_process_that_was_killed_is_in_nobodys_way(tmp_path: Path, cache: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    open_dataset(path, cache).close()
    rows = next(cache.glob(".*.rows"))
    part = rows.with_suffix(".part")
    rows.rename(part)
    assert made(path, cache) == 1
    assert not part.exists()


MAKER = """
import sys
from pathlib import Path
from gcore.data.dataset import find_or_make_copy
from gcore.data.dataset import find_files
path, cache, sys.executable = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
find_or_make_copy(find_files(path, "auto", None), None, cache)
"""


def test_lock_is_held_while_the_writer_of_a_killed_maker_runs(tmp_path: Path, cache: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    for pipe in ("begun", "end"):
        os.mkfifo(tmp_path / pipe)
    writer = tmp_path / "writer"
    writer.write_text(f"#!/bin/sh\necho x > {tmp_path}/begun\nread x < {tmp_path}/end\n")
    writer.chmod(0o755)
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(path), str(cache), str(writer)])
    (tmp_path / "begun").read_text()  # waits for the writer
    maker.kill()
    maker.wait()
    with next(cache.glob(".*.lock")).open("w") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (tmp_path / "end").write_text("x")
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert made(path, cache) == 1
