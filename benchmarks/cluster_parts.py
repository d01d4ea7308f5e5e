"""The parts of pages that tell of what is around the computing: starting, waiting, agreeing, and the tails of a step.

Each function makes the Markdown of one benchmark's result. Nothing here reads a file; `page` does.
"""

from __future__ import annotations

from page_form import Result, spread, table


def startup(result: Result) -> str:
    """Seconds until something is there."""
    rows = [
        [f"{what}: {name.removesuffix('_s').replace('_', ' ')}", spread(values)]
        for what, found in result["seconds"].items()
        for name, values in found.items()
    ]
    return table(["what", "s"], rows)


def idle(result: Result) -> str:
    """The largest process of each kind."""
    words = {"fresh": "just come up", "workers_waiting": "workers wait", "after_a_job": "after a job"}
    rows = []
    for situation, rows_found in result["processes"].items():
        for kind in sorted({row["process"] for row in rows_found}):
            mine = [row for row in rows_found if row["process"] == kind]
            most = [max(row[name] for row in mine) for name in ("rss_mb", "pss_mb", "anonymous_mb", "share_of_a_core")]
            rows.append([f"{words[situation]}: {kind}", *(f"{n:.0f}" for n in most[:3]), f"{most[3]:.2%}"])
    return table(["process", "RSS, MB", "PSS, MB", "anonymous, MB", "of a core"], rows)


def control_plane(result: Result) -> str:
    """What agreeing costs many controllers, beside emulated engines and ranks."""
    goals = result["goals"]
    rows = [
        ["a step, s", spread(result["seconds"]), ""],
        ["seal, s", spread(result["seal_s"], "{:.3f}"), ""],
        ["ready, s", spread(result["ready_s"], "{:.3f}"), ""],
        ["commit, s", spread(result["commit_s"], "{:.3f}"), ""],
        ["the three together, s", spread(result["agreeing_s"], "{:.3f}"), f"under {goals['agreeing_s']:.1f}"],
        ["the three, of the step", spread(result["share"], "{:.2%}"), f"under {goals['share_of_step']:.0%}"],
        [
            "writes to the store, a controller",
            spread(result["writes"], "{:.1f}"),
            f"under {goals['writes_per_controller_and_step']:.0f}",
        ],
        ["exchange of samples, s", spread(result["exchange_s"], "{:.3f}"), ""],
    ]
    used = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in result["processor_s_per_step"].items())
    what = f"{result['controllers']} controllers, {result['engines']:,} emulated engines; audit clean, {result['audit']['trained']:,} prompts trained"
    return (
        f"{table(['', 'median (least–most)', 'goal'], rows)}\n\n{what}; processor time of a step on this machine's "
        f"cores, s: {used}. **Engines and ranks are emulated**: they compute nothing."
    )


def submit(result: Result) -> str:
    """Jobs submitted by many at once, beside bare guarded puts."""
    rows = [
        [name, *(f"{result[key][f'{quantile}_ms']:,.0f}" for quantile in ("p50", "p99", "max"))]
        for name, key in (("CreateJob", "create_job"), ("a guarded put", "guarded_put"))
    ]
    said = (
        f"{result['calls']:,} calls from {result['clients']} clients, {result['calls_per_second']:.0f} a second, with "
        f"{result['distinct_request_ids']} distinct request ids: {result['jobs']} jobs, {result['missing']} missing, {result['doubled']} "
        f"doubled. The 99th percentile is {result['p99_times_a_put']:.1f} times a put's (goal: at most {result['limit']:.0f})."
    )
    return f"{table(['', 'median, ms', '99th percentile, ms', 'most, ms'], rows)}\n\n{said}"


def tails(result: Result) -> str:
    """What each mechanism does to a step's time, and how well lengths are expected."""
    rows = [
        [
            f"{case['mechanism']}; {case['regime']}",
            spread(case["off_s"], "{:.0f}"),
            spread(case["on_s"], "{:.0f}"),
            f"{spread(case['ratio'])} ×",
        ]
        for case in result["cases"]
    ]
    told = (
        f"{result['pairs']} pairs of the same seed: {result['controllers']} controllers, {result['engines']} engines, "
        f"{result['groups']} groups of {result['samples']}. **Engines and ranks are emulated, and their seconds made up**: the "
        "machine and its load change nothing."
    )
    found = {(one["likeness"], one["siblings"]): one["error_beside_the_mean"] for one in result["expectations"]}
    counts = sorted({siblings for _, siblings in found})
    errors = [
        [f"{likeness:g}", *(f"{found[likeness, count]:.2f} ×" for count in counts)]
        for likeness in sorted({likeness for likeness, _ in found})
    ]
    head = ["correlation within a prompt", *(f"{count} sibling{'s' * (count > 1)}" for count in counts)]
    steps = table(["setting; where", "a step without, s", "with, s", "with beside without"], rows)
    why = "The mean absolute error of an expected length, beside that of the source's mean:"
    return f"{steps}\n\n{told}\n\n{why}\n\n{table(head, errors)}"
