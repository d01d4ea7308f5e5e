"""The guide to the first own run and the notebook have the same program."""

from __future__ import annotations

import json

from documents import ROOT, blocks


def test_the_page_has_the_code_of_the_notebook() -> None:
    book = json.loads((ROOT / "examples" / "notebook" / "own_run.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    shown = [block.text for block in blocks(ROOT / "docs" / "start" / "own-run.md", "python")]
    data, model, reward, call = (block.rstrip("\n") for block in shown)
    assert [data, model, reward] == cells[:3]
    assert cells[3].removesuffix("\nrun") in call
    assert all(cell["outputs"] == [] for cell in book["cells"] if cell["cell_type"] == "code")
