"""The pictures of the documents: curves of flows, and plots of placement policies (these need the packages of `gcore[simulate]`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.harness import ROOT, Result

FLOWS_PICTURE = ROOT / "docs" / "flows.svg"
REGRETS, RUN = ROOT / "docs" / "placement-regret.svg", ROOT / "docs" / "placement-run.svg"
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


SHOWN = ("best static", "dynamic", "threshold", "hill_climb")
POLICY_COLOURS = {"best static": "#555555", "dynamic": "#0072b2", "threshold": "#e69f00", "hill_climb": "#d55e00"}
PLAYED, SEED, COST_S = "judge-slow-apart", 0, 5.0


def plot_placement(result: Result) -> None:
    """Both plots of docs/placement-simulation.md. The run is played again."""
    import matplotlib

    matplotlib.rcParams |= {"svg.hashsalt": "gcore", "font.size": 9}
    plot_regrets(result)
    plot_run()


def plot_regrets(result: dict[str, Any]) -> None:
    """Median and 5th to 95th percentile of each policy's regret in each scenario, at one cost."""
    from matplotlib import pyplot

    cells = {(c["scenario"], c["policy"]): c["regret"] for c in result["cells"] if c["cost"] == COST_S}
    names = sorted({name for name, _ in cells}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(7.5, 5.2), layout="constrained")
    for number, policy in enumerate(SHOWN):
        at = np.arange(len(names)) + 0.27 - 0.18 * number
        found = [cells[name, policy] for name in names]
        middle = np.array([one["p50"] for one in found])
        reach = np.array([[one["p50"] - one["p5"] for one in found], [one["p95"] - one["p50"] for one in found]])
        axes.errorbar(middle, at, xerr=reach, fmt="o", ms=4, lw=1.2, color=POLICY_COLOURS[policy], label=policy)
    axes.set_yticks(np.arange(len(names)), names)
    axes.set_xlabel(f"percent behind the best split for each step; a change costs {COST_S:g} s")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(REGRETS, metadata={"Date": None})
    pyplot.close(figure)


def plot_run() -> None:
    """Seconds of each step of one run, the mean over five."""
    from matplotlib import pyplot

    from placement.simulator.job import SimulatedJob
    from placement.simulator.run import best_each_step, play_policy, switch_costs
    from placement.simulator.scenario import read_scenario

    job = SimulatedJob(read_scenario(ROOT / "benchmarks" / "scenarios" / f"{PLAYED}.yaml"), SEED)
    runs = {policy: play_policy(job, policy, COST_S) for policy in ("dynamic", "hill_climb")}
    best = best_each_step(job, switch_costs(job.scenario, SEED, COST_S), runs.values())
    figure, axes = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained")
    axes.plot(smooth(best.step_s), color="black", lw=1, label="best split for each step")
    for policy, run in runs.items():
        axes.plot(smooth(run.step_s), color=POLICY_COLOURS[policy], lw=1.2, label=policy)
        if policy == "dynamic":
            for move in run.moves[1:]:
                axes.axvline(move.step, color=POLICY_COLOURS[policy], lw=0.8, ls=":")
    axes.set_xlabel(f"step of {PLAYED}, seed {SEED}; dotted: a move of dynamic")
    axes.set_ylabel("seconds a step, without moves")
    axes.legend()
    figure.savefig(RUN, metadata={"Date": None})
    pyplot.close(figure)


def smooth(values: Iterable[float], width: int = 5) -> Any:
    """The mean over `width` steps."""
    return np.convolve(np.array(list(values)), np.ones(width) / width, mode="valid")
