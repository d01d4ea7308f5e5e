"""examples/geo3k: the specs are valid, and the drawn problems load in the data set's format."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from gcore.config import load_spec
from gcore.reward import find_reward

EXAMPLE = Path(__file__).parents[3] / "examples" / "geo3k"


def _load_program() -> Any:
    spec = importlib.util.spec_from_file_location("geo3k_prepare", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


geo3k = _load_program()


@pytest.mark.parametrize("name", ["eight-gpus.yaml", "tiny.yaml"])
def test_specs_read_train_and_test_split_of_one_folder(name: str) -> None:
    spec = load_spec(EXAMPLE / name)
    assert (spec.data.path, spec.data.split, spec.eval.split) == (spec.eval.path, "train", "test")
    assert (spec.data.prompt, spec.data.images, spec.train.freeze) == ("problem", "images", ("vision",))


def test_prepared_files_have_the_columns_of_the_data_set(tmp_path: Path) -> None:
    assert geo3k.main(["--to", str(tmp_path / "to")]) == 0
    rows = pyarrow.parquet.read_table(tmp_path / "to" / "data" / "train-00000-of-00001.parquet").to_pylist()
    held_out = pyarrow.parquet.read_table(tmp_path / "to" / "data" / "test-00000-of-00001.parquet").to_pylist()
    assert {tuple(row) for row in rows} == {("images", "problem", "answer")}
    assert len({row["images"][0]["bytes"] for row in rows + held_out}) == 80, "no triangle is there twice"
    assert (tmp_path / "to" / "model" / "chat_template.jinja").exists()


def test_other_folders_stay_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    assert geo3k.main(["--to", str(tmp_path)]) == 2
    assert "the folder has other content" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_reward_compares_the_last_box_with_the_answer() -> None:
    spec = load_spec(EXAMPLE / "tiny.yaml").reward
    reward = find_reward(spec.name)
    for row in geo3k.problems(8, 0):
        assert reward(f"So x is \\boxed{{{row['answer']}}}.", row, spec).value == 1.0
        assert reward("So x is \\boxed{1}.", row, spec).value == 0.0
