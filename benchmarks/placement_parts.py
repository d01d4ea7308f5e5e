"""Parts of docs/placement-simulation.md that say how long decisions take, and how far lending by the rule is from the best lending."""

from __future__ import annotations

from page_form import Result, table


def decisions(result: Result) -> str:
    """What a decision takes, case by case."""
    head = ("slots", "splits", "of the processor, ms: p50", "p99", "most", "of these the event loop: p50", "p99")
    names = ("cpu_p50_ms", "cpu_p99_ms", "cpu_most_ms", "loop_p50_ms", "loop_p99_ms")
    rows = [
        (case, f"{one['splits']:,}", *(f"{one[name]:.1f}" for name in names)) for case, one in result["cases"].items()
    ]
    count = {one["decisions"] for one in result["cases"].values()}
    return f"{table(head, rows)}\n\nOf {', '.join(map(str, sorted(count)))} decisions each."
