"""The table of moved tests: rows that the script finds itself, and wrong rows."""

from __future__ import annotations

from tools.map_tests import Suite, mapped, problems, shortened

OLD = Suite.of(
    [
        ("tests/unit/test_old.py", "def test_a():\n    assert one(1)\n\ndef test_b():\n    assert two(2)\n"),
        (
            "tests/unit/test_odd.py",
            "class TestC:\n    def test_c(self):\n        check(3)\n\n    def test_gone(self):\n        pass\n",
        ),
        ("tests/unit/test_long.py", "def test_old_name():\n    made = build(4)\n    assert made.size == 4\n"),
    ]
)
NEW = Suite.of(
    [
        ("tests/unit/a/test_new.py", "def test_a():\n    assert one(1)\n\ndef test_b():\n    assert two(2)\n"),
        ("tests/unit/test_odd.py", "class TestC:\n    def test_c(self):\n        check(3)\n"),
        ("tests/unit/a/test_long.py", "def test_new_name():\n    made = build(5)\n    assert made.size == 4\n"),
    ]
)
GONE = "tests/unit/test_odd.py::TestC::test_gone"


def test_tests_are_found_where_they_are_by_name_or_by_what_they_do() -> None:
    assert shortened(mapped(OLD, NEW, {})) == {
        "tests/unit/test_old.py::*": ("moved", "tests/unit/a/test_new.py::*"),
        "tests/unit/test_odd.py::*": ("kept", "tests/unit/test_odd.py::*"),
        "tests/unit/test_long.py::test_old_name": ("moved", "tests/unit/a/test_long.py::test_new_name"),
    }


def test_a_test_without_a_place_is_a_problem_until_a_row_says_what_became_of_it() -> None:
    rows = shortened(mapped(OLD, NEW, {}))
    assert [problem for problem in problems(OLD, NEW, rows) if GONE in problem]
    by_hand = {GONE: ("deleted", "its subject is gone")}
    assert list(problems(OLD, NEW, shortened(mapped(OLD, NEW, by_hand)))) == []


def test_a_row_of_a_place_that_is_not_there_is_a_problem() -> None:
    rows = shortened(mapped(OLD, NEW, {GONE: ("merged-into", "tests/unit/test_odd.py::test_d")}))
    assert list(problems(OLD, NEW, rows)) == [
        f"{GONE}: there is no tests/unit/test_odd.py::test_d: run `python -m tools.map_tests --write` or correct the row"
    ]
