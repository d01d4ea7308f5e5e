"""The notebook of examples/notebook is run by a real Jupyter kernel in an empty folder: own data, own model, own reward."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from controllers.cli.local import home_processes

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(900)]
NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook" / "own_run.ipynb"
LEARNED = 0.8
"""Reward of the last step; random weights have about 0.07."""


def run_notebook(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outputs of the code cells."""
    import nbclient
    import nbformat

    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(folder / ".ipython"))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        book, timeout=860, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [cell.outputs for cell in book.cells]


def texts(outputs: list[Any]) -> str:
    """All that a cell shows as text."""
    return "".join(one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in outputs)


def test_the_notebook_trains_a_model_with_a_reward_of_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    checks = ['float(run.metrics()["reward"].iloc[-1])', "type(run.metrics()).__name__"]
    outputs = run_notebook(cells + checks, tmp_path, monkeypatch)
    progress = texts(outputs[3])
    assert "step 40 committed (reward" in progress
    assert "\x1b" not in progress
    assert "SUCCEEDED" in outputs[3][-1]["data"]["text/html"]
    assert any("image/png" in one.get("data", {}) for one in outputs[5])
    assert "text/html" in outputs[6][-1]["data"] or "ScoredResponse(" in texts(outputs[6])
    assert float(texts(outputs[-2])) > LEARNED
    assert texts(outputs[-1]) == "'DataFrame'"
    printed = texts([one for one in outputs[7] if one.get("name") == "stdout"])  # transformers draws its bar on stderr
    assert printed.splitlines() == ["ef d:dddd"]
    assert (tmp_path / "trained" / "model.safetensors").is_file()
    assert home_processes(tmp_path / ".gcore") == ()


def test_functions_of_cells_are_copied_or_refused_in_a_real_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = run_notebook(
        [
            "from gcore.client.function_source import function_source\nfrom gcore.errors import UsageError\n"
            "import dataclasses, enum\nclass Color(enum.Enum):\n    RED = 1\n@dataclasses.dataclass\nclass Point:\n    x: int = 1",
            "class Color(enum.Enum):\n    RED = 7",
            "clean = lambda s: s.strip()\ndef helper(r): return 1",
            "def helper(r): return len(clean(r)) + Color.RED.value + Point().x",
            "def score(r): return helper(r)\n",
            "import sys, types\n"
            "names = sys.modules.setdefault('copy_of_it', types.ModuleType('copy_of_it')).__dict__\n"
            "exec(function_source(score), names); print(names['score'](' ab '), score(' ab '))",
            "def magic(r):\n    %time x = 1\n    return x",
            "try:\n    function_source(magic)\nexcept UsageError as error:\n    print(error)",
            "%%time\ndef timed(r): return 1",
            "try:\n    print(function_source(timed))\nexcept UsageError as error:\n    print(error)",
        ],
        tmp_path,
        monkeypatch,
    )
    assert texts(outputs[5]).split() == ["10", "10"]
    assert "uses notebook magics" in texts(outputs[7])
    assert "the source of 'timed' is not known" in texts(outputs[9]) or "def timed(r): return 1" in texts(outputs[9])
    assert os.listdir(tmp_path) in ([], [".ipython"])
