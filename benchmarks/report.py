"""The figures of the documents, made from `results/*.json`: `python -m benchmarks report` (`make bench-page`), with `--check` to compare only.

A page keeps its words; the text between `<!-- RESULT -->` and `<!-- /RESULT -->` is made from the result of that name. `PARTS` lists all of them.
A table is a list of columns, each with a template that is filled with a row: `{ratio:.2f}` writes a spread as `median (least–most)`,
`{seconds.median:.3f}` a figure inside, and numbers as `str.format` does.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, Result, read_result
from benchmarks.pictures import FLOWS_PICTURE, flows_picture
from placement.simulator.scenario import Scenario, read_scenario

DOCS = ROOT / "docs"
SCENARIOS = ROOT / "benchmarks" / "scenarios"
Rows = Iterable[Mapping[str, Any]]
Columns = Sequence[tuple[str, str]]
"""Heads and templates."""


# Markdown -------------------------------------------------------------------------------------------------------------


class Figures(dict[str, Any]):
    """A part of a result, for templates."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return Figures(value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __format__(self, form: str) -> str:
        middle, least, most = (format(self[name], form) for name in ("median", "least", "most"))
        return f"{middle} ({least}–{most})"


def filled(template: str, figures: Mapping[str, Any]) -> str:
    """The template with its figures."""
    return template.format_map(Figures(figures))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "") -> str:
    """Markdown. Columns but the first are aligned right, unless `rule` is given."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    lines.insert(1, rule or "| " + " | ".join(["---", *["---:"] * (len(head) - 1)]) + " |")
    return "\n".join(lines)


def columns(found: Columns, rows: Rows, rule: str = "") -> str:
    """A table of templates."""
    head, templates = [one for one, _ in found], [template for _, template in found]
    return table(head, [[filled(template, row) for template in templates] for row in rows], rule)


def spread(values: Mapping[str, Any], form: str = ".2f") -> str:
    """Median, and least to most in brackets."""
    return format(Figures(values), form)


def numbered(rows: Rows) -> list[dict[str, Any]]:
    """With their number, from 1."""
    return [{**row, "number": number} for number, row in enumerate(rows, 1)]


def signature(result: Result) -> str:
    """Machine, date, commit and versions."""
    versions = ", ".join(f"{name} {number}" for name, number in result.get("versions", {}).items())
    where = f"{result['machine']}; {result['date'][:10]}, commit {result['commit']}"
    return f"*{where}{f'; {versions}' if versions else ''}.*"


# Jobs -----------------------------------------------------------------------------------------------------------------


def demo(result: Result) -> str:
    """The whole demo."""
    found = (
        ("run", "{number}"),
        ("s", "{seconds}"),
        ("accuracy before", "{eval_accuracy_before:.1%}"),
        ("after", "{eval_accuracy_after:.1%}"),
        ("tokens/s", "{tokens_per_second:,.0f}"),
        ("audit", "{audit}"),
    )
    return columns(found, numbered(result["runs"]))


def judge(result: Result) -> str:
    """Learning from a judge alone: what it takes for right, and what is."""
    found = (
        ("run", "{number}"),
        ("s", "{seconds:.0f}"),
        ("sums right before", "{accuracy_before:.1%}"),
        ("after", "{accuracy_after:.1%}"),
        ("the judge says, after", "{judged_after:.1%}"),
        ("audit", "{audit}"),
    )
    accuracy = statistics.median(run["accuracy_after"] for run in result["runs"])
    told = filled("{what}; median {seconds.median:.0f} s (goal: under {goal_seconds:.0f}), ", result)
    return f"{columns(found, numbered(result['runs']))}\n\n{told}{accuracy:.1%} right (goal: {result['goal_accuracy']:.0%})."


def calculator(result: Result) -> str:
    """What a tool is worth, seed by seed."""
    runs = {(run["kind"], run["seed"]): run for run in result["runs"]}
    rows = [
        {
            "seed": seed,
            "tool": runs["with_tool", seed],
            "bare": runs["without_tool", seed],
            "above": 100 * result["above"][str(seed)],
        }
        for seed in sorted({seed for _, seed in runs})
    ]
    found = (
        ("seed", "{seed}"),
        ("before, with the tool", "{tool.accuracy_before:.1%}"),
        ("after", "{tool.accuracy_after:.1%}"),
        ("before, without it", "{bare.accuracy_before:.1%}"),
        ("after", "{bare.accuracy_after:.1%}"),
        ("points above", "{above:.1f}"),
    )
    seconds = sorted(run["seconds"] for run in result["runs"] if run["kind"] == "with_tool")
    return f"{columns(found, rows)}\n\n{result['what']}; with the tool {seconds[0]:.0f} to {seconds[-1]:.0f} s a run."


def grpo_step(result: Result) -> str:
    """A whole step beside TRL's, and where gcore's time goes."""
    rows = [
        {**case, "one": case["seconds"]["trl 1 x 2"], "two": case["seconds"]["trl 2 x 1"]} for case in result["cases"]
    ]
    compared = (
        ("tokens a response", "{tokens}"),
        ("gcore, s", "{seconds.gcore:.3f}"),
        ("TRL, 1 process × 2 threads, s", "{one:.3f}"),
        ("TRL, 2 processes × 1 thread, s", "{two:.3f}"),
        ("gcore is faster than the better of both by", "{times_faster_than_trl:.2f} ×"),
    )
    phases = (
        ("tokens a response", "{tokens}"),
        ("publish", "{gcore_phases.publish_s.median:.3f}"),
        ("collect", "{gcore_phases.collect_s.median:.3f}"),
        ("exchange", "{gcore_phases.exchange_s.median:.3f}"),
        ("train", "{gcore_phases.train_s.median:.3f}"),
        ("of it: forward, backward, update", "{gcore_phases.update_seconds.median:.3f}"),
        ("of it: weights written", "{gcore_phases.saving_seconds.median:.3f}"),
    )
    return f"{columns(compared, rows)}\n\n{columns(phases, rows)}"


def asynchrony(result: Result) -> str:
    """Rollouts that run ahead beside rollouts that wait."""
    rows = []
    for kind, name in (("strict", "waits for the weights"), ("ahead", "runs ahead")):
        runs = [pair[kind] for pair in result["pairs"]]
        steps = [statistics.median(run["step_seconds"]) for run in runs]
        rows.append(
            {
                "name": name,
                "step": {"median": statistics.median(steps), "least": min(steps), "most": max(steps)},
                "batch": statistics.median(run["wait_for_batch_s"] for run in runs),
                "weights": statistics.median(run["wait_for_weights_s"] for run in runs),
                "accuracy": result[f"{kind}_accuracy"],
            }
        )
    found = (
        ("rollout", "{name}"),
        ("a step, s", "{step:.2f}"),
        ("ranks waited for batches, s a run", "{batch:.1f}"),
        ("engines waited for weights, s a run", "{weights:.1f}"),
        ("accuracy", "{accuracy:.1%}"),
    )
    faster = filled("Running ahead, a run is {ratio:.2f} times as fast: {what}", result)
    return f"{columns(found, rows)}\n\n{faster}; {len(result['pairs'])} alternating pairs."


def stream(result: Result) -> str:
    """Steps in parts beside whole ones."""
    pairs = result["pairs"]

    def all_of(kind: str, name: str) -> Result:
        found = [one for pair in pairs for one in pair[kind][name]]
        return {"median": statistics.median(found), "least": min(found), "most": max(found)}

    rows = [
        {
            "name": name,
            "step": result[f"{kind}_step_seconds"],
            **{key: all_of(kind, key) for key in ("collect_seconds", "train_seconds", "parts")},
        }
        for kind, name in (("whole", "as a whole"), ("streamed", "in parts"))
    ]
    found = (
        ("the step is trained", "{name}"),
        ("a step, s", "{step:.0f}"),
        ("until its batch is whole, s", "{collect_seconds:.0f}"),
        ("from then to its commit, s", "{train_seconds:.1f}"),
        ("parts", "{parts:.0f}"),
    )
    what = f"{result['what']}; the same responses in both, {len(pairs)} alternating pairs"
    faster = f"In parts a step is {spread(result['ratio'])} times as fast."
    return f"{columns(found, rows)}\n\n{faster} {what}. **Engines and ranks are emulated**: they compute nothing; seconds are emulated ones."


# Workers --------------------------------------------------------------------------------------------------------------


def engine(result: Result) -> str:
    """The torch engine beside `generate`."""
    goals = (
        {**case, "goal": f"{case['goal_ratio']} ×" if case["goal_ratio"] is not None else ""}
        for case in result["cases"]
    )
    found = (
        ("requests", "{what}"),
        ("engine is faster by", "{ratio:.2f} ×"),
        ("goal", "{goal}"),
        ("engine tok/s", "{engine_tokens_per_second.median:,.0f}"),
        ("generate tok/s", "{generate_tokens_per_second.median:,.0f}"),
        ("largest error of a log-probability", "{largest_logprob_error:.1e}"),
    )
    return columns(found, goals)


def trainer(result: Result) -> str:
    """An optimizer step beside the plain loop."""
    found = (
        ("batch", "{samples} samples, {case}"),
        ("ranks (threads)", "{ranks}"),
        ("gcore is faster by", "{ratio:.2f} ×"),
        ("by processor time", "{cpu_ratio:.2f} ×"),
        ("plain s", "{plain_seconds.median:.3f}"),
        ("gcore s", "{gcore_seconds.median:.3f}"),
        ("padding", "{gcore_padding.median:.1%}"),
        ("losses differ by at most", "{losses_apart_at_most:.1e}"),
    )
    return columns(found, result["cases"])


def checkpoints(result: Result) -> str:
    """What a checkpoint costs the steps, by how it is written."""
    words = {"beside": "written beside the steps", "within": "written within its step", "none": "none is due"}

    def more(kind: str, key: str) -> str:
        return "" if kind == "none" else spread(result["added_seconds"][f"{key}_{kind}_less_none"])

    rows = [
        {**numbers, "name": words[kind], "more_first": more(kind, "first_step"), "more_round": more(kind, "round")}
        for kind, numbers in result["kinds"].items()
    ]
    found = (
        ("checkpoint", "{name}"),
        ("its step, s", "{first_step:.2f}"),
        ("more than none", "{more_first}"),
        (f"{result['steps_of_a_round']} steps, s", "{round:.2f}"),
        ("more than none", "{more_round}"),
    )
    size = f"{result['model']}: {result['checkpoint_bytes'] / 1e6:.0f} MB; load of the machine before: {result['load_before']}"
    return f"{columns(found, rows)}\n\n{size}."


def rewards(result: Result) -> str:
    """Scoring in processes of its own beside scoring directly, and programs."""
    rows = [
        {**numbers, "where": "in the caller's own process" if where == "direct" else f"in {where} of its own"}
        for where, numbers in result["rule"].items()
    ]
    found = (
        ("a rule", "{where}"),
        ("responses a second", "{calls_per_second:,.0f}"),
        ("the caller's µs for each", "{controller_us_per_call:.0f}"),
        ("one group alone, ms", "{group_alone_ms:.2f}"),
    )
    code = "Programs in the box: {code.programs_per_second:.0f} a second; to prove that the box holds, {code.proof_ms:.0f} ms, once."
    return f"{columns(found, rows)}\n\n{filled(code, result)}"


def memory(result: Result) -> str:
    """What is estimated beside what real processes take."""
    rows = [{**case, "millions": case["parameters"] / 1e6} for case in result["cases"]]
    large = [case for case in result["cases"] if case["parameters"] > 5e6]
    of = {kind: [case["error"] for case in large if case["what"] == kind] for kind in ("rank", "engine")}
    said = "; ".join(f"{kind}s {min(errors):+.0%} to {max(errors):+.0%}" for kind, errors in of.items() if errors)
    found = (
        ("process", "{case}"),
        ("parameters, 10^6", "{millions:.1f}"),
        ("measured MB", "{measured_mb:,.0f}"),
        ("estimated MB", "{estimated_mb:,.0f}"),
        ("error", "{error:+.0%}"),
    )
    return f"{columns(found, rows)}\n\nErrors of models of 8 million parameters and more: {said}."


# Clusters -------------------------------------------------------------------------------------------------------------


def startup(result: Result) -> str:
    """Seconds until something is there."""
    rows = [
        {"what": f"{what}: {name.removesuffix('_s').replace('_', ' ')}", "s": values}
        for what, found in result["seconds"].items()
        for name, values in found.items()
    ]
    return columns((("what", "{what}"), ("s", "{s:.2f}")), rows)


def idle(result: Result) -> str:
    """The largest process of each kind."""
    words = {"fresh": "just come up", "workers_waiting": "workers wait", "after_a_job": "after a job"}
    rows = []
    for situation, processes in result["processes"].items():
        for kind in sorted({row["process"] for row in processes}):
            mine = [row for row in processes if row["process"] == kind]
            names = ("rss_mb", "pss_mb", "anonymous_mb", "share_of_a_core")
            largest = {name: max(row[name] for row in mine) for name in names}
            rows.append({"what": f"{words[situation]}: {kind}", **largest})
    found = (
        ("process", "{what}"),
        ("RSS, MB", "{rss_mb:.0f}"),
        ("PSS, MB", "{pss_mb:.0f}"),
        ("anonymous, MB", "{anonymous_mb:.0f}"),
        ("of a core", "{share_of_a_core:.2%}"),
    )
    return columns(found, rows)


def control_plane(result: Result) -> str:
    """What agreeing costs many controllers, beside emulated engines and ranks."""
    rows = (
        ("a step, s", "{seconds:.2f}", ""),
        ("seal, s", "{seal_s:.3f}", ""),
        ("ready, s", "{ready_s:.3f}", ""),
        ("commit, s", "{commit_s:.3f}", ""),
        ("the three together, s", "{agreeing_s:.3f}", "under {goals.agreeing_s:.1f}"),
        ("the three, of the step", "{share:.2%}", "under {goals.share_of_step:.0%}"),
        ("writes to the store, a controller", "{writes:.1f}", "under {goals.writes_per_controller_and_step:.0f}"),
        ("exchange of samples, s", "{exchange_s:.3f}", ""),
    )
    used = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in result["processor_s_per_step"].items())
    what = filled(
        "{controllers} controllers, {engines:,} emulated engines; audit clean, {audit.trained:,} prompts trained",
        result,
    )
    made = table(("", "median (least–most)", "goal"), [[filled(one, result) for one in row] for row in rows])
    return (
        f"{made}\n\n{what}; processor time of a step on this machine's cores, s: {used}. "
        "**Engines and ranks are emulated**: they compute nothing."
    )


def submit(result: Result) -> str:
    """Jobs submitted by many at once, beside bare guarded puts."""
    rows = [
        {**result[key], "name": name} for name, key in (("CreateJob", "create_job"), ("a guarded put", "guarded_put"))
    ]
    found = (
        ("", "{name}"),
        ("median, ms", "{p50_ms:,.0f}"),
        ("99th percentile, ms", "{p99_ms:,.0f}"),
        ("most, ms", "{max_ms:,.0f}"),
    )
    said = (
        "{calls:,} calls from {clients} clients, {calls_per_second:.0f} a second, with {distinct_request_ids} distinct request ids: "
        "{jobs} jobs, {missing} missing, {doubled} doubled. The 99th percentile is {p99_times_a_put:.1f} times a put's (goal: at most {limit:.0f})."
    )
    return f"{columns(found, rows)}\n\n{filled(said, result)}"


def tails(result: Result) -> str:
    """What each mechanism does to a step's time, and how well lengths are expected."""
    found = (
        ("setting; where", "{mechanism}; {regime}"),
        ("a step without, s", "{off_s:.0f}"),
        ("with, s", "{on_s:.0f}"),
        ("with beside without", "{ratio:.2f} ×"),
    )
    told = (
        "{pairs} pairs of the same seed: {controllers} controllers, {engines} engines, {groups} groups of {samples}. "
        "**Engines and ranks are emulated, and their seconds made up**: the machine and its load change nothing."
    )
    errors = {(one["likeness"], one["siblings"]): one["error_beside_the_mean"] for one in result["expectations"]}
    counts = sorted({siblings for _, siblings in errors})
    rows = [
        [f"{likeness:g}", *(f"{errors[likeness, count]:.2f} ×" for count in counts)]
        for likeness in sorted({likeness for likeness, _ in errors})
    ]
    head = ["correlation within a prompt", *(f"{count} sibling{'s' * (count > 1)}" for count in counts)]
    why = "The mean absolute error of an expected length, beside that of the source's mean:"
    return f"{columns(found, result['cases'])}\n\n{filled(told, result)}\n\n{why}\n\n{table(head, rows)}"


def issue_ahead(result: Result) -> str:
    """Per filter rate and seats, what each cap takes beside a cap of 1."""
    rows = []
    for case in result["cases"]:
        base = case["caps"]["1.0"]["time"]["median"]
        row = [f"{case['filter_rate']:.0%}, {case['seats']}"]
        for cap in result["issue_caps"]:
            one = case["caps"][str(cap)]
            row.append(f"{one['time']['median'] / base:.2f} ({one['wasted']['median']:.0%})")
        rows.append(row)
    return table(["filtered, groups made at once", *(f"cap {cap:g}" for cap in result["issue_caps"])], rows)


# Faults ---------------------------------------------------------------------------------------------------------------


def sim(result: Result) -> str:
    """The seeds, and how many failed."""
    rows = (
        ("seeds, each in both simulations", "{seeds:,}"),
        ("seeds that failed", str(len(result["failed_seeds"]))),
        ("whole clusters: faults", "{whole_clusters.faults:,}"),
        ("whole clusters: steps committed", "{whole_clusters.steps:,}"),
        ("whole clusters: rollbacks", "{whole_clusters.rollbacks:,}"),
        ("whole clusters: revisions of the store, each looked at", "{whole_clusters.store_revisions:,}"),
        ("whole clusters: hours of made-up time", "{whole_clusters.virtual_hours:,.0f}"),
        ("bare protocol: steps committed", "{bare_protocol.steps:,}"),
    )
    return table(("", "in all"), [(name, filled(template, result)) for name, template in rows])


def mutations(result: Result) -> str:
    """What notices each."""
    rows = [(row["mutation"], row["caught_by"].partition("[")[0] or "**nothing**") for row in result["mutations"]]
    said = (
        f"{len(rows)} mutations, {result['noticed_by_simulation']} noticed by a simulation already, "
        f"{len(result['not_noticed'])} by nothing."
    )
    if again := result.get("again"):
        said += f" {len(again['mutations'])} were looked for again at {again['commit']}."
    return f"{table(('taken out', 'noticed by'), rows, '|---|---|')}\n\n{said}"


def chaos(result: Result) -> str:
    """A line a fault, and how soon a killed controller's prompts are in a commit again."""
    found = (("row", "`{fault}`"), ("what", "{what}"), ("passed", "{passed} of {runs}"), ("rollbacks", "{rollbacks}"))
    recovered = (
        "Recovery after a controller's death, {count} times: median {median_s} s, 95th percentile {p95_s} s, at most {most_s} s; "
        "the lease is {lease_ttl_s} s, the goal {goal_p95_s} s."
    )
    commits = Counter(run["commit"] for run in result["runs"]).most_common()
    made_at = f"{len(result['runs'])} runs: {', '.join(f'{count} at {commit}' for commit, count in commits)}."
    recovery = filled(recovered, result["recovery_of_a_killed_controller"])
    return f"{columns(found, result['faults'], '|---|---|---:|---:|')}\n\n{made_at} {recovery}"


# Flows ----------------------------------------------------------------------------------------------------------------


def flows(result: Result) -> str:
    """What each flow reached."""
    rows = [
        {**run, "points": 100 * (run["accuracy_after"] - run["accuracy_before"]), "day": run["date"][:10]}
        for run in result["runs"]
    ]
    found = (
        ("flow", "[`{flow}`](../examples/arithmetic/{flow}.yaml)"),
        ("steps", "{steps}"),
        ("before", "{accuracy_before:.1%}"),
        ("after", "{accuracy_after:.1%}"),
        ("points", "{points:+.1f}"),
        ("s", "{seconds:.0f}"),
        ("taken", "{day}"),
        ("commit", "`{commit}`"),
    )
    machines = sorted({run["machine"] for run in result["runs"]})
    return f"{columns(found, rows)}\n\n*{result['what']}. {'; '.join(machines)}.*"


# Placement -----------------------------------------------------------------------------------------------------------

POLICIES = ("best static", "dynamic", "threshold", "hill_climb", "colocated", "static")
REGRET_GOALS = (
    ("median regret", "regret", "p50", 3.0),
    ("95th percentile", "regret", "p95", 8.0),
    ("99th percentile behind the best static split", "behind_static", "p99", 2.0),
)
"""Of `dynamic`, in percent: in words, the figure and its quantile, and what it is to be at most."""
COST_S = 5.0
"""The switch cost of tables that show one."""


def placement_pairs(result: Result) -> str:
    """`dynamic` placement beside the best fixed plan, on real cores."""
    rows = [[name, f"{seconds:.1f}"] for name, seconds in result["fixed_seconds"].items()]
    moves = sum(len(pair["dynamic"]["moves"]) for pair in result["pairs"])
    template = (
        "{what}; the best fixed plan: {best_fixed}. `dynamic` is {ratio:.2f} times as fast (goal: at least {goal_ratio}); "
        f"{len(result['pairs'])} alternating pairs, in which it moved {moves} times; right at the end "
        "{dynamic_accuracy:.1%}, with the fixed plan {fixed_accuracy:.1%}."
    )
    return f"{table(['fixed plan', 'from the first commit to the last, s'], rows)}\n\n{filled(template, result)}"


def placement_live(result: Result) -> str:
    """Policies on emulated slots, with lengths that drift and a judge that becomes slow."""
    rows = [
        {**row, "name": name, "by_best": result["seconds_by_best_static"][name]}
        for name, row in result["policies"].items()
    ]
    found = (
        ("policy (rollout, judge and train slots to begin with)", "`{name}`"),
        (f"{result['steps'] - 1} steps, s", "{seconds:.0f}"),
        ("a step before the judge is slow, s", "{step_seconds_before:.1f}"),
        ("and after, s", "{step_seconds_after:.1f}"),
        ("moves between steps", "{moves}"),
        ("and within", "{lent}"),
        ("beside the best static split", "{by_best:.2f}"),
    )
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
    told = f"{columns(found, rows)}\n\n{said}{books} **Engines and ranks are emulated**: they compute nothing; seconds are emulated ones."
    accounts = [run["account"] for run in result["runs"] if run["moves"] and run.get("account")]
    if not accounts:
        return told
    lines = "\n".join(accounts[0]).strip()
    return f"{told}\n\nThe account of `dynamic`'s first run, in its own seconds, without what was lent within steps:\n\n```text\n{lines}\n```"


def placement_decisions(result: Result) -> str:
    """What a decision takes, case by case."""
    head = ("slots", "splits", "of the processor, ms: p50", "p99", "most", "of these the event loop: p50", "p99")
    names = ("cpu_p50_ms", "cpu_p99_ms", "cpu_most_ms", "loop_p50_ms", "loop_p99_ms")
    rows = [
        (case, f"{one['splits']:,}", *(f"{one[name]:.1f}" for name in names)) for case, one in result["cases"].items()
    ]
    count = {one["decisions"] for one in result["cases"].values()}
    return f"{table(head, rows)}\n\nOf {', '.join(map(str, sorted(count)))} decisions each."


def placement_within(result: Result) -> str:
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


def placement(result: Result) -> str:
    """The tables."""
    return "\n\n".join(
        (
            f"{result['seeds']} seeds from {result.get('first_seed', 0)} on, {result['jobs']} simulated jobs, each at five switch costs. Taken at "
            f"{result['commit']}, {result['date'][:10]}.",
            "Everything together: percent behind the best split for each step (regret), and behind the best static split.",
            overall(result["overall"]),
            goals(result["overall"]["dynamic"]),
            *unseen(RESULTS / "placement_unseen.json"),
            "`dynamic`, regime by regime: regret, median and 95th percentile, percent; and the 99th behind the best static split.",
            by_regime(result),
            "Regret of `dynamic` by scenario and switch cost: median / 95th percentile / most, percent.",
            by_scenario(result, "dynamic"),
            "Regret of the others by scenario, at a switch cost of 5 s: median, percent.",
            others(result),
        )
    )


def goals(found: Result) -> str:
    """What `dynamic` was to reach, and whether it does in the runs that there are."""
    told = ((what, found[figure][quantile], goal) for what, figure, quantile, goal in REGRET_GOALS)
    said = "; ".join(
        f"{what} {value:.2f} % of at most {goal:g} % ({'reached' if value <= goal else 'missed'})"
        for what, value, goal in told
    )
    worst = f"{found['regret']['most']:.1f} % of regret in {found['regret_worst']}"
    return (
        f"What `dynamic` is held to, over {found['runs']} runs of all regimes and costs: {said}. The worst runs: {worst}, and "
        f"{found['behind_static']['most']:.1f} % behind the best static split in {found['behind_static_worst']}."
    )


def unseen(file: Path) -> Iterator[str]:
    """The same of seeds that no table showed before, where they were played."""
    if not file.is_file():
        return
    found = read_result(file.stem, file.parent)
    one = found["overall"]["dynamic"]
    yield (
        f"Of {found['seeds']} seeds from {found['first_seed']} on, which no table showed before ({one['runs']} runs, at {found['commit']}): median regret "
        f"{one['regret']['p50']:.2f} %, 95th percentile {one['regret']['p95']:.2f} %, 99th percentile behind the best static split "
        f"{one['behind_static']['p99']:.2f} %; the worst {one['regret']['most']:.1f} % of regret in {one['regret_worst']}, and "
        f"{one['behind_static']['most']:.1f} % behind the best static split in {one['behind_static_worst']}."
    )


def rows_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in this page's form."""
    return table(head, rows, "| " + " | ".join(["---", *["--:"] * (len(head) - 1)]) + " |")


def overall(found: Result) -> str:
    """Each policy over all runs."""
    head = ("policy", "regret p50", "p95", "p99", "most", "behind static p50", "p99", "most", "where")
    return rows_of(
        head,
        (
            (
                f"`{name}`",
                *(f"{one['regret'][key]:.1f}" for key in ("p50", "p95", "p99", "most")),
                *(f"{one['behind_static'][key]:.1f}" for key in ("p50", "p99", "most")),
                one["behind_static_worst"] if name != "best static" else "",
            )
            for name in POLICIES
            for one in (found[name],)
        ),
    )


def regime(scenario: Scenario) -> str:
    """What the scenario is one of."""
    if scenario.overlaps:
        return "one step ahead"
    return "strict, co-location possible" if scenario.colocated else "strict, pools apart"


def by_regime(result: Result) -> str:
    """The spread of scenarios' figures in each regime, at each cost: the worst scenario's."""
    names = {cell["scenario"] for cell in result["cells"]}
    regimes: dict[str, set[str]] = {}
    for name in sorted(names):
        regimes.setdefault(regime(scenario_of(name)), set()).add(name)
    costs = sorted({cell["cost"] for cell in result["cells"]})

    def worst(scenarios: set[str], cost: float) -> str:
        cells = [
            c for c in result["cells"] if c["policy"] == "dynamic" and c["cost"] == cost and c["scenario"] in scenarios
        ]
        told = [max(c["regret"][key] for c in cells) for key in ("p50", "p95")]
        return f"{told[0]:.1f} / {told[1]:.1f}; {max(c['behind_static']['p99'] for c in cells):.1f}"

    head = ("regime (the worst of its scenarios)", *(f"{cost:g} s" for cost in costs))
    return rows_of(head, ((name, *(worst(found, cost) for cost in costs)) for name, found in regimes.items()))


def by_scenario(result: Result, policy: str) -> str:
    """A policy's regret in each scenario."""
    cells = {(c["scenario"], c["cost"]): c["regret"] for c in result["cells"] if c["policy"] == policy}
    names, costs = sorted({name for name, _ in cells}), sorted({cost for _, cost in cells})

    def cell(name: str, cost: float) -> str:
        one = cells[name, cost]
        return f"{one['p50']:.1f} / {one['p95']:.1f} / {one['most']:.1f}"

    head = ("scenario", *(f"{cost:g} s" for cost in costs))
    return rows_of(head, ((f"`{name}`", *(cell(name, cost) for cost in costs)) for name in names))


def others(result: Result) -> str:
    """The median regret of each policy, and how far the oracle is above the bound."""
    cells = {(c["scenario"], c["policy"]): c["regret"]["p50"] for c in result["cells"] if c["cost"] == COST_S}
    names = sorted({name for name, _ in cells})
    head = ("scenario", "regime", *(f"`{one}`" for one in POLICIES))
    return rows_of(
        head,
        ((f"`{name}`", regime(scenario_of(name)), *(f"{cells[name, one]:.1f}" for one in POLICIES)) for name in names),
    )


def scenario_of(name: str) -> Scenario:
    """From its file."""
    return read_scenario(SCENARIOS / f"{name}.yaml")


# The pages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What is made from one result on one page."""

    page: str
    """Its path from docs."""
    write: Callable[[Result], str]
    """Its name is the result's."""
    signed: bool = True
    """With machine, date and commit below."""
    around: str = "\n\n"

    @property
    def result(self) -> str:
        """The name of the result, and of the marks on the page."""
        return self.write.__name__

    def text(self, result: Result) -> str:
        """What stands between the marks."""
        return self.write(result) + (f"\n\n{signature(result)}" if self.signed else "")


PARTS = (
    Part("simulation.md", sim),
    Part("simulation.md", mutations),
    Part("chaos.md", chaos),
    Part("dynamic-sampling.md", issue_ahead, signed=False, around="\n"),
    Part("first-placement.md", memory),
    Part("flows.md", flows, signed=False),
    Part("placement-simulation.md", placement, signed=False),
    Part("placement-simulation.md", placement_decisions),
    Part("placement-simulation.md", placement_within),
    *(
        Part("performance.md", write)
        for write in (
            *(demo, engine, trainer, checkpoints, grpo_step, rewards, startup, idle, control_plane, submit, tails),
            *(judge, placement_pairs, placement_live, asynchrony, stream),
        )
    ),
    Part("../examples/calculator/README.md", calculator),
)


def renewed(name: str, text: str, results: Path = RESULTS) -> str:
    """The page of that name with all its parts made from the results. Raises SystemExit unless each part is there once."""
    for part in PARTS:
        if part.page == name:
            made = f"{part.around}{part.text(read_result(part.result, results))}{part.around}"
            place = re.compile(rf"(<!-- {part.result} -->).*?(<!-- /{part.result} -->)", re.DOTALL)
            text, count = place.subn(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)  # type: ignore[misc]
            if count != 1:
                raise SystemExit(f"docs/{name}: the part {part.result} is there {count} times, not once")
    return text


def files() -> Iterator[tuple[Path, str]]:
    """Every page and picture, and its text as the results say. The plots of placement need more packages: see `pictures`."""
    for name in dict.fromkeys(part.page for part in PARTS):
        file = DOCS / name
        yield file.resolve(), renewed(name, file.read_text())
    yield FLOWS_PICTURE, flows_picture(read_result("flows"))


def write() -> None:
    """Write them all."""
    for file, text in files():
        if file.read_text() != text:
            file.write_text(text)
            print(f"{file}: written")


def outdated() -> list[Path]:
    """Those that differ from the results."""
    return [file for file, text in files() if file.read_text() != text]


def shown(name: str, result: Result) -> str:
    """A result for the terminal; empty if no page shows it, or if it is a part of what a page shows (a benchmark's options may say so)."""
    for part in PARTS:
        if part.result == name:
            try:
                return part.write(result)
            except KeyError:
                break
    return ""
