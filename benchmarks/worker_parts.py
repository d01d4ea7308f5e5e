"""The parts of pages that tell of what workers compute: engines, ranks, checkpoints, rewards, and the memory that they take.

Each function makes the Markdown of one benchmark's result. Nothing here reads a file; `page` does.
"""

from __future__ import annotations

from page_form import Result, spread, table


def engine(result: Result) -> str:
    """The torch engine beside `generate`."""
    rows = [
        [
            case["what"],
            f"{spread(case['ratio'])} ×",
            "" if case["goal_ratio"] is None else f"{case['goal_ratio']} ×",
            f"{case['engine_tokens_per_second']['median']:,.0f}",
            f"{case['generate_tokens_per_second']['median']:,.0f}",
            f"{case['largest_logprob_error']:.1e}",
        ]
        for case in result["cases"]
    ]
    head = [
        "requests",
        "engine is faster by",
        "goal",
        "engine tok/s",
        "generate tok/s",
        "largest error of a log-probability",
    ]
    return table(head, rows)


def trainer(result: Result) -> str:
    """An optimizer step beside the plain loop."""
    rows = [
        [
            f"{case['samples']} samples, {case['case']}",
            str(case["ranks"]),
            f"{spread(case['ratio'])} ×",
            f"{spread(case['cpu_ratio'])} ×",
            f"{case['plain_seconds']['median']:.3f}",
            f"{case['gcore_seconds']['median']:.3f}",
            f"{case['gcore_padding']['median']:.1%}",
            f"{case['losses_apart_at_most']:.1e}",
        ]
        for case in result["cases"]
    ]
    head = ["batch", "ranks (threads)", "gcore is faster by", "by processor time", "plain s", "gcore s", "padding"]
    return table([*head, "losses differ by at most"], rows)


def checkpoints(result: Result) -> str:
    """What a checkpoint costs the steps, by how it is written."""
    words = {"beside": "written beside the steps", "within": "written within its step", "none": "none is due"}
    added = result["added_seconds"]

    def more(kind: str, key: str) -> str:
        return "" if kind == "none" else spread(added[f"{key}_{kind}_less_none"])

    rows = [
        [
            words[kind],
            spread(numbers["first_step"]),
            more(kind, "first_step"),
            spread(numbers["round"]),
            more(kind, "round"),
        ]
        for kind, numbers in result["kinds"].items()
    ]
    head = ["checkpoint", "its step, s", "more than none", f"{result['steps_of_a_round']} steps, s", "more than none"]
    size = f"{result['model']}: {result['checkpoint_bytes'] / 1e6:.0f} MB; load of the machine before: {result['load_before']}"
    return f"{table(head, rows)}\n\n{size}."


def rewards(result: Result) -> str:
    """Scoring in processes of its own beside scoring directly, and programs."""
    rows = [
        [
            "in the caller's own process" if where == "direct" else f"in {where} of its own",
            spread(numbers["calls_per_second"], "{:,.0f}"),
            spread(numbers["controller_us_per_call"], "{:.0f}"),
            spread(numbers["group_alone_ms"]),
        ]
        for where, numbers in result["rule"].items()
    ]
    head = ["a rule", "responses a second", "the caller's µs for each", "one group alone, ms"]
    code = result["code"]
    programs = spread(code["programs_per_second"], "{:.0f}")
    proof = spread(code["proof_ms"], "{:.0f}")
    return f"{table(head, rows)}\n\nPrograms in the box: {programs} a second; to prove that the box holds, {proof} ms, once."


def memory(result: Result) -> str:
    """What is estimated beside what real processes take."""
    rows = [
        [
            case["case"],
            f"{case['parameters'] / 1e6:.1f}",
            f"{case['measured_mb']:,.0f}",
            f"{case['estimated_mb']:,.0f}",
            f"{case['error']:+.0%}",
        ]
        for case in result["cases"]
    ]
    of = {kind: [case["error"] for case in result["cases"] if _counts(case, kind)] for kind in ("rank", "engine")}
    said = "; ".join(f"{kind}s {min(errors):+.0%} to {max(errors):+.0%}" for kind, errors in of.items())
    head = ["process", "parameters, 10^6", "measured MB", "estimated MB", "error"]
    return f"{table(head, rows)}\n\nErrors of models of 8 million parameters and more: {said}."


def _counts(case: Result, kind: str) -> bool:
    return bool(case["what"] == kind and case["parameters"] > 5e6)
