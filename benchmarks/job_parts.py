"""The parts of pages that tell of whole jobs: how long a run takes, and what it has learned at its end.

Each function makes the Markdown of one benchmark's result. Nothing here reads a file; `page` does.
"""

from __future__ import annotations

import statistics

from page_form import Result, spread, table


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


def placement_live(result: Result) -> str:
    """Policies on emulated slots, with lengths that drift and a judge that becomes slow."""
    rows = [
        [
            f"`{name}`",
            spread(row["seconds"], "{:.0f}"),
            f"{row['step_seconds_before']:.1f}",
            f"{row['step_seconds_after']:.1f}",
            f"{row['moves']}",
            f"{row['lent']}",
            f"{result['seconds_by_best_static'][name]:.2f}",
        ]
        for name, row in result["policies"].items()
    ]
    head = [
        "policy (rollout, judge and train slots to begin with)",
        f"{result['steps'] - 1} steps, s",
        "a step before the judge is slow, s",
        "and after, s",
        "moves between steps",
        "and within",
        "beside the best static split",
    ]
    expected = result["policies"].get("dynamic:16:12:4", {}).get("expected_by_measured")
    said = f"{result['what'].rstrip('.')}; the best static split in hindsight is `{result['best_static']}`."
    if expected is not None:
        said += (
            f" What `dynamic` expected of a step after each of its moves was {spread(expected)} times what the steps after it took "
            f"({expected['count']} move{'s' * (expected['count'] != 1)})."
        )
    foretold, off = (
        result["policies"].get("dynamic:16:12:4", {}).get(name) for name in ("foretold_by_measured", "foretold_off")
    )
    if foretold is not None:
        said += (
            f" Of the steps before which it moved nothing it expected {spread(foretold)} times what they took; one step was off by "
            f"{off['median']:.0%} on average."
        )
    errors = [row["largest_error_of_books"] for row in result["policies"].values() if row["largest_error_of_books"]]
    books = f" The largest error of any node's books in any step is {max(errors):.2%}." if errors else ""
    told = f"{table(head, rows)}\n\n{said}{books} **Engines and ranks are emulated**: they compute nothing; seconds are emulated ones."
    accounts = [run["account"] for run in result["runs"] if run["moves"] and run.get("account")]
    if not accounts:
        return told
    lines = "\n".join(accounts[0]).strip()
    return f"{told}\n\nThe account of `dynamic`'s first run, in its own seconds, without what was lent within steps:\n\n```text\n{lines}\n```"
