"""docs/placement-simulation.md's tables and plots from benchmarks/results/placement.json.

The page keeps its words; the part between `<!-- placement -->` and `<!-- /placement -->` is made anew. The plot of one run is played
again, from a seed that says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from measured import RESULTS, ROOT
from page_form import renewed

from placement.simulate.job import SimulatedJob
from placement.simulate.oracle import best_each_step
from placement.simulate.scenario import Scenario, read_scenario
from placement.simulate.table import play_policy, switch_costs

PAGE = ROOT / "docs" / "placement-simulation.md"
REGRETS, RUN = ROOT / "docs" / "placement-regret.svg", ROOT / "docs" / "placement-run.svg"
POLICIES = ("best static", "dynamic", "threshold", "hill_climb", "colocated", "static")
SHOWN = ("best static", "dynamic", "threshold", "hill_climb")
COLOURS = {"best static": "#555555", "dynamic": "#0072b2", "threshold": "#e69f00", "hill_climb": "#d55e00"}
PLAYED, SEED, COST_S = "judge-slow-apart", 0, 5.0


def main() -> None:
    """The command."""
    result = json.loads((RESULTS / "placement.json").read_text())
    PAGE.write_text(renewed(PAGE.read_text(), "placement", f"\n\n{page(result)}\n\n", PAGE))
    matplotlib.rcParams |= {"svg.hashsalt": "gcore", "font.size": 9}
    plot_regrets(result)
    plot_run()


def page(result: dict[str, Any]) -> str:
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


def goals(found: dict[str, Any]) -> str:
    """What `dynamic` was to reach, and whether it does in the runs that there are."""
    told = (
        ("median regret", found["regret"]["p50"], 3.0),
        ("95th percentile", found["regret"]["p95"], 8.0),
        ("99th percentile behind the best static split", found["behind_static"]["p99"], 2.0),
    )
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
    found = json.loads(file.read_text())
    one = found["overall"]["dynamic"]
    yield (
        f"Of {found['seeds']} seeds from {found['first_seed']} on, which no table showed before ({one['runs']} runs, at {found['commit']}): median regret "
        f"{one['regret']['p50']:.2f} %, 95th percentile {one['regret']['p95']:.2f} %, 99th percentile behind the best static split "
        f"{one['behind_static']['p99']:.2f} %; the worst {one['regret']['most']:.1f} % of regret in {one['regret_worst']}, and "
        f"{one['behind_static']['most']:.1f} % behind the best static split in {one['behind_static_worst']}."
    )


def rows_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    lines = [list(head), *[list(row) for row in rows]]
    lines.insert(1, ["---"] + ["--:"] * (len(lines[0]) - 1))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def overall(found: dict[str, Any]) -> str:
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


def by_regime(result: dict[str, Any]) -> str:
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


def by_scenario(result: dict[str, Any], policy: str) -> str:
    """A policy's regret in each scenario."""
    cells = {(c["scenario"], c["cost"]): c["regret"] for c in result["cells"] if c["policy"] == policy}
    names, costs = sorted({name for name, _ in cells}), sorted({cost for _, cost in cells})

    def cell(name: str, cost: float) -> str:
        one = cells[name, cost]
        return f"{one['p50']:.1f} / {one['p95']:.1f} / {one['most']:.1f}"

    head = ("scenario", *(f"{cost:g} s" for cost in costs))
    return rows_of(head, ((f"`{name}`", *(cell(name, cost) for cost in costs)) for name in names))


def others(result: dict[str, Any]) -> str:
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
    return read_scenario(ROOT / "benchmarks" / "scenarios" / f"{name}.yaml")


def plot_regrets(result: dict[str, Any]) -> None:
    """Median and 5th to 95th percentile of each policy's regret in each scenario, at one cost."""
    cells = {(c["scenario"], c["policy"]): c["regret"] for c in result["cells"] if c["cost"] == COST_S}
    names = sorted({name for name, _ in cells}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(7.5, 5.2), layout="constrained")
    for number, policy in enumerate(SHOWN):
        at = np.arange(len(names)) + 0.27 - 0.18 * number
        found = [cells[name, policy] for name in names]
        middle = np.array([one["p50"] for one in found])
        reach = np.array([[one["p50"] - one["p5"] for one in found], [one["p95"] - one["p50"] for one in found]])
        axes.errorbar(middle, at, xerr=reach, fmt="o", ms=4, lw=1.2, color=COLOURS[policy], label=policy)
    axes.set_yticks(np.arange(len(names)), names)
    axes.set_xlabel(f"percent behind the best split for each step; a change costs {COST_S:g} s")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(REGRETS, metadata={"Date": None})
    pyplot.close(figure)


def plot_run() -> None:
    """Seconds of each step of one run, the mean over five."""
    job = SimulatedJob(scenario_of(PLAYED), SEED)
    runs = {policy: play_policy(job, policy, COST_S) for policy in ("dynamic", "hill_climb")}
    best = best_each_step(job, switch_costs(job.scenario, SEED, COST_S), runs.values())
    figure, axes = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained")
    axes.plot(smooth(best.step_s), color="black", lw=1, label="best split for each step")
    for policy, run in runs.items():
        axes.plot(smooth(run.step_s), color=COLOURS[policy], lw=1.2, label=policy)
        if policy == "dynamic":
            for move in run.moves[1:]:
                axes.axvline(move.step, color=COLOURS[policy], lw=0.8, ls=":")
    axes.set_xlabel(f"step of {PLAYED}, seed {SEED}; dotted: a move of dynamic")
    axes.set_ylabel("seconds a step, without moves")
    axes.legend()
    figure.savefig(RUN, metadata={"Date": None})
    pyplot.close(figure)


def smooth(values: Iterable[float], width: int = 5) -> Any:
    """The mean over `width` steps."""
    return np.convolve(np.array(list(values)), np.ones(width) / width, mode="valid")


if __name__ == "__main__":
    main()
