"""A dataset is checked once as a whole, and then read by position."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.data import jsonl as index_module
from gcore.data.dataset import DataChanged, Dataset
from gcore.errors import DataError

GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'


def write(folder: Path, content: bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def open_dataset(path: Path, **options: Any) -> Dataset:
    return Dataset.open(path, **{"prompt_field": "prompt", "answer_fields": ("answer",), **options})


# --- reading


def test_entries_come_back_as_they_were_written(tmp_path: Path) -> None:
    entries = [{"prompt": f"{i}+ü漢🙂", "answer": i, "more": {"a": [1, None]}} for i in range(1, 300)]
    content = "\n".join(json.dumps(entry, ensure_ascii=bool(i % 2)) for i, entry in enumerate(entries))
    with open_dataset(write(tmp_path, content.encode())) as dataset:
        assert len(dataset) == 299
        assert list(dataset) == entries
        assert dataset.entry(298)["answer"] == 299


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
prompts = st.text(min_size=1) | st.lists(
    st.fixed_dictionaries({"role": st.text(), "content": st.text()}), min_size=1, max_size=3
)
entries = st.builds(lambda more, prompt: {**more, "p": prompt}, st.dictionaries(st.text(), json_values), prompts)


@given(
    st.lists(entries, min_size=1, max_size=12),
    st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n", "\r\n\r\n"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([7, 64, 4096]),
)
def test_json_entries_round_trip_at_any_block_size_and_line_ending(
    written: list[dict[str, Any]], ending: str, ascii_only: bool, mark: bool, block: int
) -> None:
    import tempfile

    lines = [json.dumps(entry, ensure_ascii=ascii_only) for entry in written]
    try:
        content = (b"\xef\xbb\xbf" if mark else b"") + ending.join(lines).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate cannot be written as UTF-8 at all
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "BLOCK_BYTES", block)
        path = write(Path(folder), content)
        if any("\\ud" in line for line in lines) and any(_half_surrogate(entry) for entry in written):
            with pytest.raises(DataError, match="surrogate"):
                Dataset.open(path, prompt_field="p")
            return
        with Dataset.open(path, prompt_field="p") as dataset:
            assert list(dataset) == written


def _half_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def test_blank_lines_are_no_entries_and_do_not_shift_the_lines_of_messages(tmp_path: Path) -> None:
    path = write(tmp_path, b"\n  \n" + GOOD + b"\n\t\n\n" + GOOD + b"\n\n")
    assert len(open_dataset(path)) == 2
    broken = write(tmp_path, b"\n  \n" + GOOD + b"\n" + b"{\n", "broken.jsonl")
    with pytest.raises(DataError, match=r"broken\.jsonl:5"):
        open_dataset(broken)


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    assert len(open_dataset(write(tmp_path, GOOD + GOOD.rstrip()))) == 2


@pytest.mark.parametrize("i", [-1, 3, 10**9])
def test_an_entry_that_is_not_there_is_an_index_error(tmp_path: Path, i: int) -> None:
    with pytest.raises(IndexError, match="have 3 entries"):
        open_dataset(write(tmp_path, GOOD * 3)).entry(i)


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    content = b"".join(json.dumps({"prompt": str(i), "answer": i}).encode() + b"\n" for i in range(2000))
    dataset, wrong = open_dataset(write(tmp_path, content)), []

    def read(start: int) -> None:
        wrong.extend(i for i in range(start, 2000, 4) if dataset.entry(i)["answer"] != i)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- mistakes

BAD: list[Any] = [
    pytest.param(GOOD + b"{'prompt': 1}\n", ":2", "not valid JSON", id="not JSON"),
    pytest.param(GOOD + b'{"prompt": "x", "answer": 1} {}\n', ":2", "Extra data", id="two objects on a line"),
    pytest.param(b'{"prompt":\n"x", "answer": 1}\n', ":1", "not valid JSON", id="an object over two lines"),
    pytest.param(b'{"prompt":"x","answer":[{}\n{}]}\n{"a":1},{"b":2}\n', ":1", "not valid JSON", id="split at a comma"),
    pytest.param(GOOD + b'["prompt"]\n', ":2", "a list, not a JSON object", id="a list"),
    pytest.param(b'"prompt"\n', ":1", "a string, not a JSON object", id="a string"),
    pytest.param(b"3\n", ":1", "a number, not a JSON object", id="a number"),
    pytest.param(b"null\n", ":1", "null, not a JSON object", id="null"),
    pytest.param(
        b'{"question": "x", "answer": 1}\n', ":1", "no field 'prompt', only 'question', 'answer'", id="no prompt"
    ),
    pytest.param(b"{}\n", ":1", "only an empty object", id="an empty object"),
    pytest.param(b'{"prompt": "", "answer": 1}\n', ":1", "'prompt' is empty", id="an empty prompt"),
    pytest.param(b'{"prompt": 7, "answer": 1}\n', ":1", "'prompt' is a number", id="a number as prompt"),
    pytest.param(b'{"prompt": null, "answer": 1}\n', ":1", "'prompt' is null", id="null as prompt"),
    pytest.param(b'{"prompt": false, "answer": 1}\n', ":1", "'prompt' is true or false", id="a truth as prompt"),
    pytest.param(b'{"prompt": {}, "answer": 1}\n', ":1", "'prompt' is an object", id="an object as prompt"),
    pytest.param(b'{"prompt": [], "answer": 1}\n', ":1", "'prompt' is an empty list", id="no messages"),
    pytest.param(b'{"prompt": ["x"], "answer": 1}\n', ":1", "item 1 is a string, not a chat message", id="no message"),
    pytest.param(b'{"prompt": [{"role": "user"}], "answer": 1}\n', ":1", "no text in 'content'", id="no content"),
    pytest.param(
        b'{"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}], "answer": 1}\n',
        ":1",
        "message 1 has no text in 'content': it has a part 1 of type 'image'; only parts of type 'text' are supported",
        id="an image as part",
    ),
    pytest.param(
        b'{"prompt": [{"role": "user", "content": ["x"]}], "answer": 1}\n',
        ":1",
        "part 1 of type 'str'",
        id="a string as part",
    ),
    pytest.param(
        b'{"prompt": [{"role": "user", "content": [{"type": "text"}]}], "answer": 1}\n',
        ":1",
        "without a text",
        id="no text",
    ),
    pytest.param(
        b'{"prompt": [{"role": "user", "content": 3}], "answer": 1}\n',
        ":1",
        "neither text nor a list of text parts",
        id="3",
    ),
    pytest.param(b'{"prompt": [{"role": 1, "content": "x"}], "answer": 1}\n', ":1", "no text in 'role'", id="no role"),
    pytest.param(b'{"prompt": "x"}\n', ":1", "no field 'answer', only 'prompt'", id="no answer"),
    pytest.param(b'{"prompt": "x", "answer": null}\n', ":1", "'answer' is null", id="null as answer"),
    pytest.param(GOOD + b'{"prompt": "x", "answer": NaN}\n', ":2", "NaN is not JSON", id="NaN"),
    pytest.param(GOOD + b'{"prompt": "x", "answer": -Infinity}\n', ":2", "Infinity is not JSON", id="infinity"),
    pytest.param(GOOD + b'{"prompt": "\\ud800", "answer": 1}\n', ":2", "a lone surrogate", id="a lone surrogate"),
    pytest.param(GOOD + b'{"prompt": "\xe4", "answer": 1}\n', ":2", "not UTF-8 text .byte 0xe4", id="Latin-1"),
    pytest.param(GOOD * 2 + GOOD[:20], ":3", "the last line is cut off", id="cut off"),
    pytest.param(GOOD + GOOD[:20] + b"\n", ":2", "not valid JSON", id="cut off in the middle"),
    pytest.param(GOOD + b"[" * 200_000 + b"\n", ":2", "not valid JSON", id="nested without end"),
    pytest.param(
        GOOD + b'{"prompt": "x", "answer": ' + b"9" * 5000 + b"}\n", ":2", "not valid JSON", id="a vast number"
    ),
    pytest.param(b"", "jsonl", "contains no prompts", id="empty"),
    pytest.param(b"\n \n\t\n", "jsonl", "contains no prompts", id="only blank lines"),
    pytest.param(b"\xef\xbb\xbf", "jsonl", "contains no prompts", id="only a byte order mark"),
    pytest.param(b"\x1f\x8b\x08\x00abc", "jsonl", "is compressed .gzip", id="compressed by gzip"),
    pytest.param(b"\x28\xb5\x2f\xfdabc", "jsonl", "is compressed .zstd", id="compressed by zstd"),
    pytest.param(b"\xff\xfe{\x00", ":1", "not UTF-8 text .byte 0xff", id="UTF-16"),
]


@pytest.mark.parametrize(("content", "where", "message"), BAD)
@pytest.mark.parametrize("block", [16, 1 << 20], ids=["small blocks", "large blocks"])
def test_a_mistake_is_told_with_file_line_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, where: str, message: str, block: int
) -> None:
    monkeypatch.setattr(index_module, "BLOCK_BYTES", block)
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value.where).endswith(where)
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["data.jsonl"], "a failed build leaves nothing behind"


def test_the_first_mistake_is_the_one_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=":100001"):
        open_dataset(write(tmp_path, GOOD * 100_000 + b"1\n" + GOOD * 10 + b"\xff\n"))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "MAX_ENTRY_BYTES", 3 << 20)
    with pytest.raises(DataError, match="longer than 3 MiB"):
        open_dataset(write(tmp_path, GOOD + b"x" * (6 << 20)))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot read the file \(no such file"):
        open_dataset(tmp_path / "nowhere.jsonl")


def test_a_folder_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder contains neither Parquet files nor a dataset saved"):
        open_dataset(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        open_dataset(tmp_path / "pipe")


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    blocker = write(tmp_path, b"", "file")
    with pytest.raises(DataError, match="cannot write the index of data"):
        open_dataset(write(tmp_path, GOOD), cache_dir=blocker / "cache")


# --- the index


def builds(path: Path, **options: Any) -> int:
    """How many times opening reads the file through: progress is called only then."""
    calls: list[int] = []
    open_dataset(path, progress=lambda done, total: calls.append(done), **options).close()
    return sum(done == path.stat().st_size for done in calls)


def test_the_index_is_built_once(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD * 5)
    assert [builds(path), builds(path), builds(path)] == [1, 0, 0]


def test_the_index_can_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = write(tmp_path / "a", GOOD * 5)
    assert builds(path, cache_dir=tmp_path / "b" / "c") == 1
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["data.jsonl"]
    assert builds(path, cache_dir=tmp_path / "b" / "c") == 0


def test_another_field_is_another_check(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD * 5)
    assert builds(path) == 1
    assert builds(path, answer_fields=()) == 1
    with pytest.raises(DataError, match="no field 'question'"):
        open_dataset(path, prompt_field="question")


def test_a_changed_file_gets_a_new_index_in_the_old_ones_place(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD * 5)
    before = open_dataset(path)
    files = sorted(tmp_path.iterdir())
    path.write_bytes(GOOD * 7)
    after = open_dataset(path)
    assert (len(before), len(after)) == (5, 7)
    assert before.digest != after.digest
    assert sorted(tmp_path.iterdir()) == files


def test_a_file_of_the_same_size_and_another_time_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD * 5)
    assert builds(path) == 1
    os.utime(path, ns=(1, 1))
    assert builds(path) == 1


@pytest.mark.parametrize("damage", ["cut", "longer", "magic", "empty", "no entries", "gone"])
def test_a_damaged_index_is_built_again(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, GOOD * 5)
    open_dataset(path).close()
    index = next(file for file in tmp_path.iterdir() if file.suffix == ".index")
    raw = index.read_bytes()
    changed = {
        "cut": raw[:-1],
        "longer": raw + b"12345678",
        "magic": b"x" + raw[1:],
        "empty": b"",
        "no entries": raw[:40] + bytes(8) + raw[48:80],
    }
    if damage == "gone":
        index.unlink()
    else:
        index.write_bytes(changed[damage])
    assert builds(path) == 1
    assert list(open_dataset(path)) == [json.loads(GOOD)] * 5


def test_the_digest_names_the_content_wherever_it_lies(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one, other = write(tmp_path, GOOD * 5), write(tmp_path / "a", GOOD * 5, "other.jsonl")
    assert open_dataset(one).digest == open_dataset(other).digest
    assert len(open_dataset(one).digest) == 32


def test_a_file_that_changes_while_it_is_used_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD * 5)
    dataset = open_dataset(path)
    path.write_bytes(GOOD)
    assert dataset.entry(0) == json.loads(GOOD)
    with pytest.raises(DataChanged, match=r"entry 3.*changed or damaged"):
        dataset.entry(3)


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "BLOCK_BYTES", 64)
    path = write(tmp_path, GOOD * 50)
    grown: list[int] = []

    def grow(done: int, total: int) -> None:
        if not grown:
            grown.append(done)
            with path.open("ab") as file:
                file.write(GOOD)

    with pytest.raises(DataError, match="changed while gcore read it"):
        open_dataset(path, progress=grow)


def test_progress_is_told_in_bytes_up_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "BLOCK_BYTES", 64)
    path = write(tmp_path, GOOD * 50)
    seen: list[tuple[int, int]] = []
    open_dataset(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (len(GOOD) * 50, len(GOOD) * 50)
    assert len(seen) > 10


def test_processes_that_build_at_once_all_get_a_whole_index(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD * 20_000)
    program = (
        "import sys; from pathlib import Path; from gcore.data.dataset import Dataset; "
        "d = Dataset.open(Path(sys.argv[1]), prompt_field='prompt'); print(len(d), d.entry(19_999)['answer'])"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["20000 2"] * 3


def test_closing_twice_is_no_error(tmp_path: Path) -> None:
    dataset = open_dataset(write(tmp_path, GOOD))
    dataset.close()
    dataset.close()


def test_the_last_reference_closes_the_file(tmp_path: Path) -> None:
    dataset = open_dataset(write(tmp_path, GOOD))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        del dataset
    assert not [one for one in warned if str(tmp_path) in str(one.message)]


@pytest.mark.large
def test_ten_million_prompts_take_less_than_200_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("wb") as file:
        for _ in range(1000):
            file.write(b'{"prompt":"1+1=","answer":"2"}\n' * 10_000)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gcore.data.dataset import Dataset\n"
        "from gcore.data.order import entry_index\n"
        "from gcore.data.order import shard_lengths\n"
        "from gcore.types import PromptRef\n"
        "d = Dataset.open(Path(sys.argv[1]), prompt_field='prompt', answer_fields=('answer',))\n"
        "shape = shard_lengths(len(d), 64)\n"
        "for seq in range(0, 150_000, 3):  # touches every page of the index\n"
        "    d.entry(entry_index(shape, 1, PromptRef(0, seq % 64, seq)))\n"
        # Not getrusage: its peak begins with that of the process that started this one.
        "peak = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "print(len(d), int(peak.split()[1]) // 1024)\n"
    )
    try:
        result = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, timeout=200
        )
    finally:
        path.unlink()
    entries, megabytes = map(int, result.stdout.split())
    assert entries == 10**7
    assert megabytes < 200
