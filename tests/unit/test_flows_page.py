"""The table and the curves of docs/flows.md are those of the result that is committed."""

from __future__ import annotations

import importlib
import json
import sys
import xml.dom.minidom
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("flows_page", "page", "measured"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("flows_page")


def test_page_and_picture_say_what_the_result_says(made: Any) -> None:
    result = json.loads(made.RESULT.read_text())
    assert made.page(made.PAGE.read_text(), result) == made.PAGE.read_text(), "run benchmarks/flows_page.py"
    assert made.picture(result) == made.PICTURE.read_text(), "run benchmarks/flows_page.py"


def test_every_run_reached_its_goal(made: Any) -> None:
    for run in json.loads(made.RESULT.read_text())["runs"]:
        assert run["reaches_goal"] == (run["accuracy_after"] - run["accuracy_before"] >= 0.20)
        assert run["reaches_goal"], run["flow"]
        assert run["curve"][0][0] == 0
        assert run["curve"][-1][0] == run["steps"]


def test_a_figure_that_was_changed_by_hand_is_found(made: Any) -> None:
    result, text = json.loads(made.RESULT.read_text()), made.PAGE.read_text()
    first = f"{result['runs'][0]['accuracy_after']:.1%}"
    forged = text.replace(first, "100.0%", 1)
    assert forged != text
    assert made.page(forged, result) == text


def test_the_picture_is_well_formed_and_names_do_not_lie_on_each_other(made: Any) -> None:
    curve = [[0, 0.4], [40, 0.9]]
    runs = [{"flow": f"flow{n}", "curve": [*curve[:1], [40, 0.9 + n / 1000]]} for n in range(7)]
    tree = xml.dom.minidom.parseString(made.picture({"runs": runs}))
    names = [t for t in tree.getElementsByTagName("text") if t.firstChild.data.startswith("flow")]
    heights = sorted(float(t.getAttribute("y")) for t in names)
    assert len(heights) == 7
    assert all(b - a >= 13.9 for a, b in pairwise(heights))


def test_a_page_without_its_part_is_refused(made: Any) -> None:
    with pytest.raises(SystemExit, match="0 times"):
        made.page("nothing", {"runs": []} | {"what": ""})
