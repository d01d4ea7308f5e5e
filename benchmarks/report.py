"""The figures of the documents, made from `results/*.json`: `python -m benchmarks report` (`make bench-page`), with `--check` to compare only.

A page keeps its words; the text between `<!-- RESULT -->` and `<!-- /RESULT -->` is made from the result of that name. `tables.txt` has all of
these texts: tables and sentences with places for figures, and how they are filled. The functions here make what the result does not have in
that form: rows of tables, parts of sentences, and the few tables whose columns follow from the result.
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
from placement.simulator.scenario import Scenario, read_scenario

DOCS = ROOT / "docs"
SCENARIOS = ROOT / "benchmarks" / "scenarios"
TABLES = ROOT / "benchmarks" / "tables.txt"
Rows = Iterable[Mapping[str, Any]]


# Markdown -------------------------------------------------------------------------------------------------------------


class Figures(dict[str, Any]):
    """A part of a result, for templates. Of a list it has the `count`."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, list):
            return Figures(count=len(value))
        return Figures(value) if isinstance(value, dict) else value

    def __missing__(self, key: str) -> Any:
        return MADE[key](dict(self))

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __format__(self, form: str) -> str:
        middle, least, most = (format(self[name], form) for name in ("median", "least", "most"))
        return f"{middle} ({least}–{most})"


def filled(template: str, figures: Mapping[str, Any]) -> str:
    """The template with its figures."""
    return template.format_map(Figures(figures))


def rule_of(columns: int) -> str:
    """Columns but the first are aligned right."""
    return "| " + " | ".join(["---", *["---:"] * (columns - 1)]) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], rule_of(len(head)), *lines[1:]])


def rendered(block: str, result: Result) -> str:
    """A block of `tables.txt`: a table or a sentence."""
    lines, name = block.split("\n"), ""
    if lines[0].startswith("for "):
        name, lines = lines[0].removeprefix("for "), lines[1:]
    if not lines[0].startswith("|"):
        return filled(block, result)
    head, *templates = lines
    rule = templates.pop(0) if set(templates[0]) <= set("|-: ") else rule_of(head.count(" | ") + 1)
    rows: Rows = [result] if not name else result[name] if isinstance(result.get(name), list) else MADE[name](result)
    return "\n".join([filled(head, result), rule, *(filled(template, row) for row in rows for template in templates)])


def spread(values: Mapping[str, Any], form: str = ".2f") -> str:
    """Median, and least to most in brackets."""
    return format(Figures(values), form)


def signature(result: Result) -> str:
    """Machine, date, commit and versions."""
    versions = ", ".join(f"{name} {number}" for name, number in result.get("versions", {}).items())
    where = f"{result['machine']}; {result['date'][:10]}, commit {result['commit']}"
    return f"*{where}{f'; {versions}' if versions else ''}.*"


# Rows -----------------------------------------------------------------------------------------------------------------


def media_cases(result: Result) -> Rows:
    """Memory of the process that every sample's record passes, of the largest other one, and of all; stores and messages."""
    for case in result["cases"]:
        main = "controller" if case["system"] == "gcore" else "driver"
        kinds, out = case["kinds"], case["out_of_memory"]
        others = {name: one["anonymous_mb"] for name, one in kinds.items() if name != main}
        largest = max(others, key=lambda name: others[name])
        stores = case.get("stores_mb", {}).values()
        made = [store["made"] for store in stores if "made" in store]
        served = [store["served"] for store in stores]
        later = [store["served_later"] for store in stores if "served_later" in store]
        messages = case.get("messages_bytes", {})
        without = "small pictures" if "generated" in case["payload"] else "text"
        yield {
            **case,
            "content": "pictures" if case["pictures"] else without,
            "main": f"{main} {kinds[main]['anonymous_mb']:,.0f}",
            "other": f"{largest} {others[largest]:,.0f}",
            "made": f"{max(made):,.0f}" if made else "",
            "served": f"{max(served):,.0f}" if served else "",
            "later": f"{max(later):,.0f}" if later else "",
            "message": f"{max(messages.values()) / 1024:,.0f}" if messages else "",
            "end": f"killed at {out['mb']:,} MB after {out['after_s']:.0f} s" if out else "complete",
            "day": case["date"][:10],
        }


def numbered_runs(result: Result) -> Rows:
    """Each run with its number, from 1."""
    return ({**run, "number": number} for number, run in enumerate(result["runs"], 1))


def accuracy_of_runs(result: Result) -> float:
    """Their median at the end."""
    return float(statistics.median(run["accuracy_after"] for run in result["runs"]))


def calculator_seeds(result: Result) -> Rows:
    """With and without the tool, seed by seed."""
    runs = {(run["kind"], run["seed"]): run for run in result["runs"]}
    for seed in sorted({seed for _, seed in runs}):
        tool, bare = runs["with_tool", seed], runs["without_tool", seed]
        yield {"seed": seed, "tool": tool, "bare": bare, "above": 100 * result["above"][str(seed)]}


def calculator_seconds(result: Result) -> str:
    """Of the runs with the tool."""
    seconds = sorted(run["seconds"] for run in result["runs"] if run["kind"] == "with_tool")
    return f"{seconds[0]:.0f} to {seconds[-1]:.0f}"


def grpo_cases(result: Result) -> Rows:
    """With the seconds of both ways of TRL."""
    return (
        {**case, "one": case["seconds"]["trl 1 x 2"], "two": case["seconds"]["trl 2 x 1"]} for case in result["cases"]
    )


def rollout_ways(result: Result) -> Rows:
    """Waiting for the weights, and running ahead: of all runs."""
    for kind, name in (("strict", "waits for the weights"), ("ahead", "runs ahead")):
        runs = [pair[kind] for pair in result["pairs"]]
        steps = [statistics.median(run["step_seconds"]) for run in runs]
        yield {
            "name": name,
            "step": {"median": statistics.median(steps), "least": min(steps), "most": max(steps)},
            "batch": statistics.median(run["wait_for_batch_s"] for run in runs),
            "weights": statistics.median(run["wait_for_weights_s"] for run in runs),
            "accuracy": result[f"{kind}_accuracy"],
        }


def stream_ways(result: Result) -> Rows:
    """Steps as a whole, and in parts: of all steps of all pairs."""
    for kind, name in (("whole", "as a whole"), ("streamed", "in parts")):
        row = {"name": name, "step": result[f"{kind}_step_seconds"]}
        for key in ("collect_seconds", "train_seconds", "parts"):
            found = [one for pair in result["pairs"] for one in pair[kind][key]]
            row[key] = {"median": statistics.median(found), "least": min(found), "most": max(found)}
        yield row


def engine_cases(result: Result) -> Rows:
    """With their goals, where they have one."""
    return (
        {**case, "goal": f"{case['goal_ratio']} ×" if case["goal_ratio"] is not None else ""}
        for case in result["cases"]
    )


def checkpoint_kinds(result: Result) -> Rows:
    """By how a checkpoint is written, beside none."""
    words = {"beside": "written beside the steps", "within": "written within its step", "none": "none is due"}

    def more(kind: str, key: str) -> str:
        return "" if kind == "none" else spread(result["added_seconds"][f"{key}_{kind}_less_none"])

    return (
        {**numbers, "name": words[kind], "more_first": more(kind, "first_step"), "more_round": more(kind, "round")}
        for kind, numbers in result["kinds"].items()
    )


def checkpoint_megabytes(result: Result) -> str:
    """Its size."""
    return f"{result['checkpoint_bytes'] / 1e6:.0f}"


def reward_ways(result: Result) -> Rows:
    """By where a rule is scored."""
    return (
        {**numbers, "where": "in the caller's own process" if where == "direct" else f"in {where} of its own"}
        for where, numbers in result["rule"].items()
    )


def memory_cases(result: Result) -> Rows:
    """With their parameters in millions."""
    return ({**case, "millions": case["parameters"] / 1e6} for case in result["cases"])


def memory_errors(result: Result) -> str:
    """The range of the errors of large models."""
    large = [case for case in result["cases"] if case["parameters"] > 5e6]
    of = {kind: [case["error"] for case in large if case["what"] == kind] for kind in ("rank", "engine")}
    return "; ".join(f"{kind}s {min(errors):+.0%} to {max(errors):+.0%}" for kind, errors in of.items() if errors)


def start_seconds(result: Result) -> Rows:
    """Each thing that starts, and each of its moments."""
    return (
        {"what": f"{what}: {name.removesuffix('_s').replace('_', ' ')}", "s": values}
        for what, found in result["seconds"].items()
        for name, values in found.items()
    )


def largest_idle(result: Result) -> Rows:
    """The largest process of each kind in each situation."""
    words = {"fresh": "just come up", "workers_waiting": "workers wait", "after_a_job": "after a job"}
    for situation, processes in result["processes"].items():
        for kind in sorted({row["process"] for row in processes}):
            mine = [row for row in processes if row["process"] == kind]
            names = ("rss_mb", "pss_mb", "anonymous_mb", "share_of_a_core")
            yield {"what": f"{words[situation]}: {kind}"} | {name: max(row[name] for row in mine) for name in names}


def processor_seconds(result: Result) -> str:
    """Of a step, by process."""
    return ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in result["processor_s_per_step"].items())


def submit_latencies(result: Result) -> Rows:
    """Of calls and of puts."""
    return (
        {**result[key], "name": name} for name, key in (("CreateJob", "create_job"), ("a guarded put", "guarded_put"))
    )


def length_errors(result: Result) -> str:
    """How well lengths are expected, by likeness and finished siblings."""
    errors = {(one["likeness"], one["siblings"]): one["error_beside_the_mean"] for one in result["expectations"]}
    counts = sorted({siblings for _, siblings in errors})
    rows = [
        [f"{likeness:g}", *(f"{errors[likeness, count]:.2f} ×" for count in counts)]
        for likeness in sorted({likeness for likeness, _ in errors})
    ]
    head = ["correlation within a prompt", *(f"{count} sibling{'s' * (count > 1)}" for count in counts)]
    return table(head, rows)


def issue_table(result: Result) -> str:
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


def mutation_rows(result: Result) -> Rows:
    """What notices each."""
    return ({**row, "by": row["caught_by"].partition("[")[0] or "**nothing**"} for row in result["mutations"])


def mutations_note(result: Result) -> str:
    """How many, and which were looked for again."""
    said = (
        f"{len(result['mutations'])} mutations, {result['noticed_by_simulation']} noticed by a simulation already, "
        f"{len(result['not_noticed'])} by nothing."
    )
    if again := result.get("again"):
        said += f" {len(again['mutations'])} were looked for again at {again['commit']}."
    return said


def chaos_commits(result: Result) -> str:
    """How many runs, and at which commits."""
    commits = Counter(run["commit"] for run in result["runs"]).most_common()
    return f"{len(result['runs'])} runs: {', '.join(f'{count} at {commit}' for commit, count in commits)}."


def flow_runs(result: Result) -> Rows:
    """With what they gained."""
    return (
        {**run, "points": 100 * (run["accuracy_after"] - run["accuracy_before"]), "day": run["date"][:10]}
        for run in result["runs"]
    )


def machines(result: Result) -> str:
    """Of all runs."""
    return "; ".join(sorted({run["machine"] for run in result["runs"]}))


def day(result: Result) -> str:
    """When it was measured."""
    return str(result["date"][:10])


# Pictures -------------------------------------------------------------------------------------------------------------

FLOWS_PICTURE = DOCS / "images" / "flows.svg"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 400, 56, 20, 130, 44
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#444444", "#b8672a")


def flows_picture(result: Result) -> str:
    """The curves: held-out accuracy by step, one line a flow, its name at its end."""
    runs = result["runs"]
    last = max((step for run in runs for step, _ in run["curve"]), default=1) or 1
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: float, accuracy: float) -> tuple[float, float]:
        return round(LEFT + across * step / last, 1), round(TOP + down * (1 - accuracy), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        "<title>Held-out accuracy of each built-in flow on the arithmetic example, by step</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        x, y = place(0, tenth / 10)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{LEFT + across}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end" fill="#555">{tenth * 10} %</text>')
    for step in sorted({step for run in runs for step, _ in run["curve"]}):
        x, y = place(step, 0)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle" fill="#555">{step}</text>')
    parts.append(f'<text x="{LEFT + across / 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#555">step</text>')
    ends = _apart([place(*run["curve"][-1])[1] if run["curve"] else TOP for run in runs])
    for run, colour, end in zip(runs, COLOURS, ends, strict=False):
        points = [place(step, accuracy) for step, accuracy in run["curve"]]
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        x = points[-1][0] if points else LEFT + across
        parts.append(f'<text x="{x + 10}" y="{round(end + 4, 1)}" fill="{colour}">{run["flow"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _apart(places: list[float], gap: float = 14.0) -> list[float]:
    """The same places in the same order, moved down so that no two names lie on each other."""
    moved = list(places)
    least = float("-inf")
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        moved[index] = least = max(places[index], least + gap)
    return moved


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


def fixed_plans(result: Result) -> Rows:
    """With their seconds."""
    return ({"name": name, "seconds": seconds} for name, seconds in result["fixed_seconds"].items())


def moves_of_pairs(result: Result) -> int:
    """Of `dynamic`, in all pairs."""
    return sum(len(pair["dynamic"]["moves"]) for pair in result["pairs"])


def counted_steps(result: Result) -> int:
    """All but the first."""
    return int(result["steps"]) - 1


def live_policies(result: Result) -> Rows:
    """With their seconds beside the best static split's."""
    return (
        {**row, "name": name, "by_best": result["seconds_by_best_static"][name]}
        for name, row in result["policies"].items()
    )


def live_note(result: Result) -> str:
    """What `dynamic` expected, how far the slot accounting is off, and the account of a run."""
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
    told = f"{said}{books} **Engines and ranks are emulated**: they compute nothing; seconds are emulated ones."
    accounts = [run["account"] for run in result["runs"] if run["moves"] and run.get("account")]
    if not accounts:
        return told
    lines = "\n".join(accounts[0]).strip()
    return f"{told}\n\nThe account of `dynamic`'s first run, in its own seconds, without what was lent within steps:\n\n```text\n{lines}\n```"


def named_cases(result: Result) -> Rows:
    """With their names."""
    return ({**case, "name": name} for name, case in result["cases"].items())


def decision_counts(result: Result) -> str:
    """Of each case."""
    return ", ".join(map(str, sorted({case["decisions"] for case in result["cases"].values()})))


def lending_ways(result: Result) -> Rows:
    """How far each way of lending is from the best, at each cost."""
    ways = {
        "on the best split, by the rule or with nothing lent, whichever is shorter": "best split",
        "on any split, by the rule": "rule",
        "on any split, with nothing lent": "nothing lent",
    }
    for words, way in ways.items():
        for number, (cost, one) in enumerate(result["costs"].items()):
            yield {"name": "" if number else words, "cost": cost, **one[way]}


def lending_seconds(result: Result) -> str:
    """Of the best lending, at each cost."""
    return ", ".join(f"{one['seconds']:g}" for one in result["costs"].values())


def placement_goals(result: Result) -> str:
    """The goals of `dynamic`, and whether the runs reach them."""
    found = result["overall"]["dynamic"]
    told = ((what, found[figure][quantile], goal) for what, figure, quantile, goal in REGRET_GOALS)
    said = "; ".join(
        f"{what} {value:.2f} % of at most {goal:g} % ({'reached' if value <= goal else 'missed'})"
        for what, value, goal in told
    )
    worst = f"{found['regret']['most']:.1f} % of regret in {found['regret_worst']}"
    return (
        f"Goals of `dynamic`, over {found['runs']} runs of all regimes and costs: {said}. The worst runs: {worst}, and "
        f"{found['behind_static']['most']:.1f} % behind the best static split in {found['behind_static_worst']}."
    )


def placement_unseen(_: Result) -> str:
    """The same of seeds that no table showed before."""
    found = read_result("placement_unseen")
    one = found["overall"]["dynamic"]
    return (
        f"Of {found['seeds']} seeds from {found['first_seed']} on, which no table showed before ({one['runs']} runs, at {found['commit']}): median regret "
        f"{one['regret']['p50']:.2f} %, 95th percentile {one['regret']['p95']:.2f} %, 99th percentile behind the best static split "
        f"{one['behind_static']['p99']:.2f} %; the worst {one['regret']['most']:.1f} % of regret in {one['regret_worst']}, and "
        f"{one['behind_static']['most']:.1f} % behind the best static split in {one['behind_static_worst']}."
    )


def rows_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in this page's form."""
    return table(head, rows).replace("---:", "--:")


def policies_overall(result: Result) -> Rows:
    """Each policy over all runs."""
    for name in POLICIES:
        one = result["overall"][name]
        yield {"name": name, **one, "where": one["behind_static_worst"] if name != "best static" else ""}


def regime(scenario: Scenario) -> str:
    """The family of the scenario."""
    if scenario.overlaps:
        return "one step ahead"
    return "strict, co-location possible" if scenario.colocated else "strict, pools apart"


def placement_by_regime(result: Result) -> str:
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


def placement_by_scenario(result: Result) -> str:
    """The regret of `dynamic` in each scenario."""
    cells = {(c["scenario"], c["cost"]): c["regret"] for c in result["cells"] if c["policy"] == "dynamic"}
    names, costs = sorted({name for name, _ in cells}), sorted({cost for _, cost in cells})

    def cell(name: str, cost: float) -> str:
        one = cells[name, cost]
        return f"{one['p50']:.1f} / {one['p95']:.1f} / {one['most']:.1f}"

    head = ("scenario", *(f"{cost:g} s" for cost in costs))
    return rows_of(head, ((f"`{name}`", *(cell(name, cost) for cost in costs)) for name in names))


def placement_others(result: Result) -> str:
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

MADE: dict[str, Callable[[Result], Any]] = {name: one for name, one in globals().items() if callable(one)}
"""The names that `tables.txt` may use."""


@dataclass(frozen=True)
class Part:
    """What is made from one result on one page."""

    page: str
    """Its path from docs."""
    result: str
    """Its name, and that of the marks on the page."""
    blocks: tuple[str, ...]
    options: frozenset[str] = frozenset()

    @classmethod
    def read(cls, section: str) -> Part:
        """A section of `tables.txt`."""
        heading, _, text = section.partition("\n")
        page, words = heading.split(": ")
        result, *options = words.split()
        return cls(page, result, tuple(text.strip("\n").split("\n\n")), frozenset(options))

    @property
    def around(self) -> str:
        """Between the marks and the text."""
        return "\n" if "tight" in self.options else "\n\n"

    def write(self, result: Result) -> str:
        """What is made of the result."""
        return "\n\n".join(rendered(block, result) for block in self.blocks)

    def text(self, result: Result) -> str:
        """What stands between the marks."""
        return self.write(result) + ("" if "unsigned" in self.options else f"\n\n{signature(result)}")


PARTS = tuple(Part.read(section) for section in TABLES.read_text().split("\n= ")[1:])


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
    """Every page and picture, and its text as the results say. The plots of placement need more packages: see `placement_simulation`."""
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
