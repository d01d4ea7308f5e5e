"""examples/gsm8k: the data set's rows are converted, the specs are valid, and the reward fits both."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gcore.config import load_spec
from gcore.errors import DataError
from gcore.reward import find_reward

EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k"
SPECS = ("one-gpu.yaml", "eight-gpus.yaml", "tiny.yaml")


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("gsm8k_prepare", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gsm8k = loaded()


def entries(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_synthetic_rows_have_the_data_sets_form_and_none_comes_twice(tmp_path: Path) -> None:
    assert gsm8k.prepare(tmp_path / "to", None, tiny_model=False) == {"train": 256, "eval": 32}
    train, held_out = entries(tmp_path / "to" / "train.jsonl"), entries(tmp_path / "to" / "eval.jsonl")
    assert len({entry["prompt"] for entry in train + held_out}) == 288
    assert all(int(entry["answer"]) >= 0 for entry in train)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_files_of_the_data_set_are_read_where_they_lie(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / "main"
    source.mkdir()
    rows = list(gsm8k.synthetic(6, 0)) + [{"question": "A thousand?", "answer": "Sure.\n#### 1,000"}]
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source / f"{name}.parquet")
        else:
            (source / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gsm8k.prepare(tmp_path / "to", tmp_path, tiny_model=False) == {"train": 7, "eval": 7}
    assert entries(tmp_path / "to" / "train.jsonl")[-1] == {"prompt": "A thousand?", "answer": "1000"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param('{"question": "6?", "answer": "6"}\n', "no number behind '####'", id="no marker"),
        pytest.param('{"prompt": "6?"}\n', "row 1: the row has no question", id="other fields"),
        pytest.param("[1]\n", "the row has no question", id="no object"),
        pytest.param("no JSON\n", "cannot read it", id="no JSON"),
    ],
)
def test_foreign_data_is_refused_and_leaves_nothing(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "train.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        gsm8k.prepare(tmp_path / "to", tmp_path / "from", tiny_model=False)
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_a_damaged_parquet_file_and_an_empty_folder_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train\*\.parquet"):
        gsm8k.prepare(tmp_path / "to", tmp_path, tiny_model=False)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot read it"):
        gsm8k.prepare(tmp_path / "to", tmp_path, tiny_model=False)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    with pytest.raises(DataError, match="holds something else"):
        gsm8k.prepare(tmp_path, None, tiny_model=False)
    assert (tmp_path / "precious").read_text() == "precious"


def test_the_hub_is_asked_for_the_data_sets_parquet_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert gsm8k.from_hub("openai/gsm8k") == tmp_path / "main"
    assert asked == [("openai/gsm8k", {"repo_type": "dataset", "allow_patterns": ["main/*.parquet"]})]


def test_a_hub_that_cannot_be_reached_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def download(name: str, **options: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert gsm8k.main(["--hub", "--to", str(tmp_path / "to")]) == 2
    assert "use --from FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_of_the_example_is_valid_and_names_the_prepared_files(name: str) -> None:
    spec = load_spec(EXAMPLE / name)
    assert spec.data.path is not None
    assert spec.eval.path is not None
    prepared = (EXAMPLE.parents[1] / gsm8k.DEFAULT_TO).resolve()
    assert (Path(spec.data.path), Path(spec.eval.path)) == (prepared / "train.jsonl", prepared / "eval.jsonl")
    assert spec.model.chat


def test_the_specs_reward_gives_one_for_every_solution_of_the_data_set() -> None:
    spec = load_spec(EXAMPLE / "one-gpu.yaml").reward
    reward = find_reward(spec.name)
    for row in gsm8k.synthetic(40, 0):
        entry = gsm8k.entry_of(row, "here")
        assert reward(row["answer"], entry, spec).value == 1.0
        assert reward(row["answer"] + "1", entry, spec).value == 0.0
        assert reward(f"It is {entry['answer']}.", entry, spec).value == 0.0
