"""The tables on the pages match the committed results."""

import pytest

from benchmarks import report
from benchmarks.harness import RESULTS

PAGES = {part.page for part in report.PARTS}


def test_their_tables_are_those_of_the_committed_results() -> None:
    assert report.outdated() == [], "run `make bench-page`"


def test_every_result_has_its_place_on_a_page() -> None:
    elsewhere = {"placement_unseen", "check", "release", "sim_pictures", "sim_generated"}
    """In the part of placement; in bounds.json; on the status page; on the status page."""
    placed = {part.result for part in report.PARTS}
    assert {file.stem for file in RESULTS.glob("*.json")} - elsewhere == placed


def test_every_part_is_on_its_page_between_marks() -> None:
    for part in report.PARTS:
        text = (report.DOCS / part.page).read_text()
        assert text.count(f"<!-- {part.result} -->") == text.count(f"<!-- /{part.result} -->") == 1, part


def test_a_figure_that_was_changed_by_hand_is_found() -> None:
    written = (report.DOCS / "reference" / "performance.md").read_text()
    place = written.index("| run |")
    forged = written[:place] + written[place:].replace("| clean |", "| dirty |", 1)
    assert forged != written
    assert report.renewed("reference/performance.md", forged) == written


def test_a_page_without_a_part_is_refused() -> None:
    with pytest.raises(SystemExit, match="the part demo is there 0 times"):
        report.renewed("reference/performance.md", "nothing")
