"""Two trees are compared by the figures that both results have."""

from __future__ import annotations

from benchmarks import run
from benchmarks.harness import Benchmark


def test_figures_are_named_by_their_path_and_a_spread_counts_by_its_median() -> None:
    result = {
        "date": "now",
        "load_before": 3.0,
        "met": True,
        "cases": [
            {"case": "equal", "ratio": {"median": 1.5, "least": 1.0, "most": 2.0, "count": 3}, "pairs": [[1, 2]]}
        ],
    }
    assert run.figures(result) == {"cases / 0 equal / ratio": 1.5}


def test_a_ratio_is_of_what_is_on_both_sides_of_every_pair_and_differs() -> None:
    pairs = [
        {
            "this": {"a": 2.0, "b": 1.0, "zero": 1.0, "same": 4.0},
            "other": {"a": 1.0, "c": 1.0, "zero": 0.0, "same": 4.0},
        },
        {
            "this": {"a": 3.0, "b": 1.0, "zero": 1.0, "same": 4.0},
            "other": {"a": 1.0, "c": 1.0, "zero": 0.0, "same": 4.0},
        },
    ]
    assert run.ratios(pairs) == {"a": {"median": 2.5, "least": 2.0, "most": 3.0, "count": 2}}


def test_the_other_side_gets_the_benchmarks_own_options_only() -> None:
    words = ["--pairs", "3", "--case", "equal", "--compare=abc", "--out", "x.json", "--threads", "2"]
    assert run.own_words(words) == ["--case", "equal", "--threads", "2"]


def test_every_name_of_the_command_is_a_benchmark_of_its_module() -> None:
    for name in run.MODULES:
        found = run.benchmark_named(name)
        assert isinstance(found, Benchmark)
        assert found.name == name
