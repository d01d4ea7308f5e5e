"""Writes the tables of figures in docs from benchmarks/results/*.json, so that no figure there is typed by hand.

    make bench-page

A page keeps its words; each part between `<!-- NAME -->` and `<!-- /NAME -->` is made anew from the result of that name.
A test compares the pages with the results. The parts are made by `job_parts`, `worker_parts`, `cluster_parts`,
`placement_parts` and `fault_parts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import cluster_parts
import fault_parts
import job_parts
import placement_parts
import worker_parts
from measured import RESULTS, ROOT
from page_form import Result, renewed, taken

DOCS = ROOT / "docs"
Parts = dict[str, Callable[[Result], str]]
PAGES: dict[str, Parts] = {
    "simulation.md": {
        "sim": fault_parts.sim,
        "mutations": fault_parts.mutations,
    },
    "chaos.md": {
        "chaos": fault_parts.chaos,
    },
    "placement-simulation.md": {
        "placement_decisions": placement_parts.decisions,
        "placement_within": placement_parts.within,
    },
    "first-placement.md": {
        "memory": worker_parts.memory,
    },
    "performance.md": {
        "demo": job_parts.demo,
        "engine": worker_parts.engine,
        "trainer": worker_parts.trainer,
        "checkpoints": worker_parts.checkpoints,
        "grpo_step": job_parts.grpo_step,
        "rewards": worker_parts.rewards,
        "startup": cluster_parts.startup,
        "idle": cluster_parts.idle,
        "control_plane": cluster_parts.control_plane,
        "submit": cluster_parts.submit,
        "tails": cluster_parts.tails,
        "judge": job_parts.judge,
        "placement_pairs": job_parts.placement_pairs,
        "placement_live": job_parts.placement_live,
        "asynchrony": job_parts.asynchrony,
        "stream": job_parts.stream,
    },
    "../examples/calculator/README.md": {
        "calculator": job_parts.calculator,
    },
}
"""What is made of each page, by its path from docs."""


def made(name: str, page: str, results: Path = RESULTS) -> str:
    """The page of that name with all its tables made anew."""
    for key, part in PAGES[name].items():
        result = json.loads((results / f"{key}.json").read_text())
        page = renewed(page, key, f"\n\n{part(result)}\n\n{taken(result)}\n\n", f"docs/{name}")
    return page


def main() -> None:
    """Write them."""
    for name in PAGES:
        file = DOCS / name
        file.write_text(made(name, file.read_text()))
        print(file)


if __name__ == "__main__":
    main()
