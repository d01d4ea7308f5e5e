"""The page of figures says what the results say."""

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


def test_its_tables_are_those_of_the_committed_results(page: Any) -> None:
    assert page.made(page.PAGE.read_text()) == page.PAGE.read_text(), "run `make bench-page`"


def test_every_result_has_its_place_on_the_page(page: Any) -> None:
    elsewhere = {"flows", "issue_ahead"}  # docs/flows.md, docs/dynamic-sampling.md
    assert {file.stem for file in page.RESULTS.glob("*.json")} - elsewhere == set(page.PARTS)


def test_a_figure_that_was_changed_by_hand_is_found(page: Any) -> None:
    written = page.PAGE.read_text()
    place = written.index("| run |")
    forged = written[:place] + written[place:].replace("| clean |", "| dirty |", 1)
    assert forged != written
    assert page.made(forged) == written


def test_a_page_without_a_part_is_refused(page: Any) -> None:
    with pytest.raises(SystemExit, match="the part demo is there 0 times"):
        page.made("nothing")
