"""The pages of figures say what the results say."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "page", raising=False)
    return importlib.import_module("page")


def test_their_tables_are_those_of_the_committed_results(page: Any) -> None:
    for name in page.PAGES:
        written = (page.DOCS / name).read_text()
        assert page.made(name, written) == written, "run `make bench-page`"


def test_every_result_has_its_place_on_a_page(page: Any) -> None:
    # docs/flows.md, dynamic-sampling.md, and both in placement-simulation.md
    elsewhere = {"flows", "issue_ahead", "placement", "placement_unseen"}
    placed = {part for parts in page.PAGES.values() for part in parts}
    assert {file.stem for file in page.RESULTS.glob("*.json")} - elsewhere == placed


def test_a_figure_that_was_changed_by_hand_is_found(page: Any) -> None:
    written = (page.DOCS / "performance.md").read_text()
    place = written.index("| run |")
    forged = written[:place] + written[place:].replace("| clean |", "| dirty |", 1)
    assert forged != written
    assert page.made("performance.md", forged) == written


def test_a_page_without_a_part_is_refused(page: Any) -> None:
    with pytest.raises(SystemExit, match="the part demo is there 0 times"):
        page.made("performance.md", "nothing")
