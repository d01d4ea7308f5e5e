"""Writes the tables of docs/performance.md from benchmarks/results/*.json, so that no figure there is typed by hand.

    make bench-page

The page keeps its words; each part between `<!-- NAME -->` and `<!-- /NAME -->` is made anew from the result of that name.
A test compares the page with the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT

PAGE = ROOT / "docs" / "performance.md"
Result = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Result, form: str = "{:.2f}") -> str:
    """Median, and least to most in brackets."""
    middle, least, most = (form.format(values[name]) for name in ("median", "least", "most"))
    return f"{middle} ({least}–{most})"


def taken(result: Result) -> str:
    """Where and when."""
    versions = ", ".join(f"{name} {number}" for name, number in result.get("versions", {}).items())
    where = f"{result['machine']}; {result['date'][:10]}, commit {result['commit']}"
    return f"*{where}{f'; {versions}' if versions else ''}.*"


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


def grpo_step(result: Result) -> str:
    """A whole step beside TRL's, and where gcore's time goes."""
    sides = ("gcore", "trl 1 x 2", "trl 2 x 1")
    rows = [
        [
            str(case["tokens"]),
            *(spread(case["seconds"][side], "{:.3f}") for side in sides),
            f"{spread(case['times_faster_than_trl'])} ×",
        ]
        for case in result["cases"]
    ]
    head = ["tokens a response", "gcore, s", "TRL, 1 process × 2 threads, s", "TRL, 2 processes × 1 thread, s"]
    compared = table([*head, "gcore is faster than the better of both by"], rows)
    names = {
        "publish_s": "publish",
        "collect_s": "collect",
        "exchange_s": "exchange",
        "train_s": "train",
        "update_seconds": "of it: forward, backward, update",
        "saving_seconds": "of it: weights written",
    }
    phases = [
        [str(case["tokens"]), *(f"{case['gcore_phases'][name]['median']:.3f}" for name in names)]
        for case in result["cases"]
    ]
    return f"{compared}\n\n{table(['tokens a response', *names.values()], phases)}"


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


def demo(result: Result) -> str:
    """The whole demo."""
    rows = [
        [
            str(number),
            f"{run['seconds']}",
            f"{run['eval_accuracy_before']:.1%}",
            f"{run['eval_accuracy_after']:.1%}",
            f"{run['tokens_per_second']:,.0f}",
            run["audit"],
        ]
        for number, run in enumerate(result["runs"], 1)
    ]
    return table(["run", "s", "accuracy before", "after", "tokens/s", "audit"], rows)


PARTS: dict[str, Callable[[Result], str]] = {
    "demo": demo,
    "engine": engine,
    "trainer": trainer,
    "checkpoints": checkpoints,
    "grpo_step": grpo_step,
    "rewards": rewards,
    "startup": startup,
    "idle": idle,
}


def made(page: str, results: Path = RESULTS) -> str:
    """The page with all its tables made anew."""
    for name, part in PARTS.items():
        result = json.loads((results / f"{name}.json").read_text())
        block = f"<!-- {name} -->\n\n{part(result)}\n\n{taken(result)}\n\n<!-- /{name} -->"
        page, count = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, b=block: b, page, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{PAGE}: the part {name} is there {count} times, not once")
    return page


def main() -> None:
    """Write it."""
    PAGE.write_text(made(PAGE.read_text()))
    print(PAGE)


if __name__ == "__main__":
    main()
