"""The table and the picture in docs/use/algorithms.md#the-flows match the committed result."""

from __future__ import annotations

import xml.dom.minidom
from itertools import pairwise

import pytest

from benchmarks import report
from benchmarks.harness import read_result
from benchmarks.report import FLOWS_PICTURE, flows_picture

PAGE = report.DOCS / "use" / "algorithms.md"


def test_page_and_picture_say_what_the_result_says() -> None:
    assert report.renewed("use/algorithms.md", PAGE.read_text()) == PAGE.read_text(), "run `make bench-page`"
    assert flows_picture(read_result("flows")) == FLOWS_PICTURE.read_text(), "run `make bench-page`"


def test_every_run_reached_its_goal() -> None:
    for run in read_result("flows")["runs"]:
        assert run["reaches_goal"] == (run["accuracy_after"] - run["accuracy_before"] >= 0.20)
        assert run["reaches_goal"], run["flow"]
        assert run["curve"][0][0] == 0
        assert run["curve"][-1][0] == run["steps"]


def test_a_figure_that_was_changed_by_hand_is_found() -> None:
    result, text = read_result("flows"), PAGE.read_text()
    first = f"{result['runs'][0]['accuracy_after']:.1%}"
    forged = text.replace(first, "100.0%", 1)
    assert forged != text
    assert report.renewed("use/algorithms.md", forged) == text


def test_the_picture_is_well_formed_and_labels_do_not_overlap() -> None:
    curve = [[0, 0.4], [40, 0.9]]
    runs = [{"flow": f"flow{n}", "curve": [*curve[:1], [40, 0.9 + n / 1000]]} for n in range(7)]
    tree = xml.dom.minidom.parseString(flows_picture({"runs": runs}))
    names = [t for t in tree.getElementsByTagName("text") if t.firstChild.data.startswith("flow")]
    heights = sorted(float(t.getAttribute("y")) for t in names)
    assert len(heights) == 7
    assert all(b - a >= 13.9 for a, b in pairwise(heights))


def test_a_page_without_its_part_is_refused() -> None:
    with pytest.raises(SystemExit, match="0 times"):
        report.renewed("use/algorithms.md", "nothing")
