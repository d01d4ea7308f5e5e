"""Writes the tables of figures in docs from benchmarks/results/*.json, so that no figure there is typed by hand.

    make bench-page

A page keeps its words; each part between `<!-- NAME -->` and `<!-- /NAME -->` is made anew from the result of that name.
A test compares the pages with the results.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT

DOCS = ROOT / "docs"
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


def copies(result: Result) -> str:
    """What copies in memory cost a step, and what a start from them saves."""
    starts = result["start_seconds"]
    rows = [
        ["copies of a step, s", spread(result["copies_seconds"], "{:.3f}")],
        ["its update, s", spread(result["update_seconds"], "{:.3f}")],
        ["copied, GB a second", spread(result["gigabytes_per_second"])],
        ["start of a world from copies, s", spread(starts["copies"])],
        ["start of a world from a checkpoint, s", spread(starts["checkpoint"])],
    ]
    size = f"{result['model']}: {result['copied_bytes'] / 1e6:.0f} MB in each node's memory a step"
    return f"{table(['', 'median (least–most)'], rows)}\n\n{size}; {result['what']}."


def stream(result: Result) -> str:
    """Steps in parts beside whole ones."""
    pairs = result["pairs"]

    def all_of(kind: str, name: str) -> Result:
        found = [one for pair in pairs for one in pair[kind][name]]
        return {"median": statistics.median(found), "least": min(found), "most": max(found)}

    rows = [
        [
            {"whole": "as a whole", "streamed": "in parts"}[kind],
            spread(result[f"{kind}_step_seconds"], "{:.0f}"),
            spread(all_of(kind, "collect_seconds"), "{:.0f}"),
            spread(all_of(kind, "train_seconds"), "{:.1f}"),
            spread(all_of(kind, "parts"), "{:.0f}"),
        ]
        for kind in ("whole", "streamed")
    ]
    head = ["the step is trained", "a step, s", "until its batch is whole, s", "from then to its commit, s", "parts"]
    what = f"{result['what']}; the same responses in both, {len(pairs)} alternating pairs"
    faster = f"In parts a step is {spread(result['ratio'])} times as fast."
    return f"{table(head, rows)}\n\n{faster} {what}. **Engines and ranks are emulated**: they compute nothing; seconds are emulated ones."


def calculator(result: Result) -> str:
    """What a tool is worth, seed by seed."""
    runs = {(run["kind"], run["seed"]): run for run in result["runs"]}
    rows = []
    for seed in sorted({seed for _, seed in runs}):
        asks, guesses = runs["with_tool", seed], runs["without_tool", seed]
        rows.append(
            [
                str(seed),
                *(f"{run[f'accuracy_{when}']:.1%}" for run in (asks, guesses) for when in ("before", "after")),
                f"{100 * result['above'][str(seed)]:.1f}",
            ]
        )
    head = ["seed", "before, with the tool", "after", "before, without it", "after", "points above"]
    seconds = sorted(run["seconds"] for run in result["runs"] if run["kind"] == "with_tool")
    return f"{table(head, rows)}\n\n{result['what']}; with the tool {seconds[0]:.0f} to {seconds[-1]:.0f} s a run."


def judge(result: Result) -> str:
    """Learning from a judge alone: what it takes for right, and what is."""
    rows = [
        [
            str(number + 1),
            f"{run['seconds']:.0f}",
            f"{run['accuracy_before']:.1%}",
            f"{run['accuracy_after']:.1%}",
            f"{run['judged_after']:.1%}",
            run["audit"],
        ]
        for number, run in enumerate(result["runs"])
    ]
    head = ["run", "s", "sums right before", "after", "the judge says, after", "audit"]
    told = (
        f"{result['what']}; median {result['seconds']['median']:.0f} s (goal: under {result['goal_seconds']:.0f}), "
        f"{statistics.median(run['accuracy_after'] for run in result['runs']):.1%} right (goal: {result['goal_accuracy']:.0%})."
    )
    return f"{table(head, rows)}\n\n{told}"


def asynchrony(result: Result) -> str:
    """Rollouts that run ahead beside rollouts that wait."""
    rows = []
    for kind, name in (("strict", "waits for the weights"), ("ahead", "runs ahead")):
        runs = [pair[kind] for pair in result["pairs"]]
        steps = [statistics.median(run["step_seconds"]) for run in runs]
        rows.append(
            [
                name,
                f"{statistics.median(steps):.2f} ({min(steps):.2f}–{max(steps):.2f})",
                f"{statistics.median(run['wait_for_batch_s'] for run in runs):.1f}",
                f"{statistics.median(run['wait_for_weights_s'] for run in runs):.1f}",
                f"{spread(result[f'{kind}_accuracy'], '{:.1%}')}",
            ]
        )
    head = [
        "rollout",
        "a step, s",
        "ranks waited for batches, s a run",
        "engines waited for weights, s a run",
        "accuracy",
    ]
    faster = f"Running ahead, a run is {spread(result['ratio'])} times as fast"
    return f"{table(head, rows)}\n\n{faster}: {result['what']}; {len(result['pairs'])} alternating pairs."


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


def sim(result: Result) -> str:
    """What the seeds were, and what became of them."""
    whole, bare = result["whole_clusters"], result["bare_protocol"]
    rows = [
        ["seeds, each in both simulations", f"{result['seeds']:,}"],
        ["seeds that failed", f"{len(result['failed_seeds'])}"],
        ["whole clusters: faults", f"{whole['faults']:,}"],
        ["whole clusters: steps committed", f"{whole['steps']:,}"],
        ["whole clusters: rollbacks", f"{whole['rollbacks']:,}"],
        ["whole clusters: revisions of the store, each looked at", f"{whole['store_revisions']:,}"],
        ["whole clusters: hours of made-up time", f"{whole['virtual_hours']:,.0f}"],
        ["bare protocol: steps committed", f"{bare['steps']:,}"],
    ]
    return table(["", "in all"], rows)


def mutations(result: Result) -> str:
    """What notices each."""
    rows = [
        f"| {row['mutation']} | {row['caught_by'].partition('[')[0] or '**nothing**'} |" for row in result["mutations"]
    ]
    missed = len(result["not_noticed"])
    said = f"{len(rows)} mutations, {result['noticed_by_simulation']} noticed by a simulation already, {missed} by nothing."
    return "\n".join(["| taken out | noticed by |", "|---|---|", *rows]) + f"\n\n{said}"


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


def chaos(result: Result) -> str:
    """A line a fault, and how soon a killed controller's prompts are in a commit again."""
    rows = [
        f"| `{row['fault']}` | {row['what']} | {row['passed']} of {row['runs']} | {row['rollbacks']} |"
        for row in result["faults"]
    ]
    table_ = "\n".join(["| row | what | passed | rollbacks |", "|---|---|---:|---:|", *rows])
    found = result["recovery_of_a_killed_controller"]
    recovered = (
        f"Recovery after a controller's death, {found['count']} times: median {found['median_s']} s, 95th percentile "
        f"{found['p95_s']} s, at most {found['most_s']} s; the lease is {found['lease_ttl_s']} s, the goal {found['goal_p95_s']} s."
    )
    commits = Counter(run["commit"] for run in result["runs"]).most_common()
    made_at = f"{len(result['runs'])} runs: {', '.join(f'{count} at {commit}' for commit, count in commits)}."
    return f"{table_}\n\n{made_at} {recovered}"


def placement_pairs(result: Result) -> str:
    """`dynamic` placement beside the best fixed plan, on real cores."""
    rows = [[name, f"{seconds:.1f}"] for name, seconds in result["fixed_seconds"].items()]
    moves = sum(len(pair["dynamic"]["moves"]) for pair in result["pairs"])
    said = (
        f"{result['what']}; the best fixed plan: {result['best_fixed']}. `dynamic` is {spread(result['ratio'])} times as fast (goal: at least "
        f"{result['goal_ratio']}); {len(result['pairs'])} alternating pairs, in which it moved {moves} times; right at the end "
        f"{spread(result['dynamic_accuracy'], '{:.1%}')}, with the fixed plan {spread(result['fixed_accuracy'], '{:.1%}')}."
    )
    return f"{table(['fixed plan', 'from the first commit to the last, s'], rows)}\n\n{said}"


Parts = dict[str, Callable[[Result], str]]
PAGES: dict[str, Parts] = {
    "simulation.md": {
        "sim": sim,
        "mutations": mutations,
    },
    "chaos.md": {
        "chaos": chaos,
    },
    "first-placement.md": {
        "memory": memory,
    },
    "performance.md": {
        "demo": demo,
        "engine": engine,
        "trainer": trainer,
        "checkpoints": checkpoints,
        "grpo_step": grpo_step,
        "rewards": rewards,
        "startup": startup,
        "idle": idle,
        "control_plane": control_plane,
        "tails": tails,
        "judge": judge,
        "placement_pairs": placement_pairs,
        "asynchrony": asynchrony,
        "stream": stream,
    },
    "../examples/calculator/README.md": {
        "calculator": calculator,
    },
}
"""What is made of each page, by its path from docs."""


def made(name: str, page: str, results: Path = RESULTS) -> str:
    """The page of that name with all its tables made anew."""
    for key, part in PAGES[name].items():
        result = json.loads((results / f"{key}.json").read_text())
        block = f"<!-- {key} -->\n\n{part(result)}\n\n{taken(result)}\n\n<!-- /{key} -->"
        page, count = re.subn(rf"<!-- {key} -->.*?<!-- /{key} -->", lambda _, b=block: b, page, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"docs/{name}: the part {key} is there {count} times, not once")
    return page


def main() -> None:
    """Write them."""
    for name in PAGES:
        file = DOCS / name
        file.write_text(made(name, file.read_text()))
        print(file)


if __name__ == "__main__":
    main()
