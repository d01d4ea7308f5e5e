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


def within(result: Result) -> str:
    """How far each way of lending is from the best, at each cost."""
    ways = {
        "on the best split, by the rule or with nothing lent, whichever is shorter": "best split",
        "on any split, by the rule": "rule",
        "on any split, with nothing lent": "nothing lent",
    }
    rows = [
        (words if not number else "", f"{cost} s", *(f"{one[name][key]:.1f}" for key in ("p50", "mean", "p95", "most")))
        for words, name in ways.items()
        for number, (cost, one) in enumerate(result["costs"].items())
    ]
    head = ("longer than the best lending, %", "a change", "p50", "mean", "p95", "most")
    took = ", ".join(f"{one['seconds']:g}" for one in result["costs"].values())
    return (
        f"{table(head, rows)}\n\n{result['cases']} batches on {result['replicas']} replicas, looked at {result['moments']} times. The best lending on "
        f"the best split takes {took} s at the middle."
    )
