"""Whole clusters and the step protocol under random faults, any number of seeds; a summary in benchmarks/results/sim.json.

    make sim SEEDS=20000 [FIRST=0]

Each seed is two stories: a whole cluster in made-up time (`tests/support/simulated_cluster.py`), and the bare protocol over
views of any age (`tests/support/step_simulation.py`). After every event the invariants are looked at; once the faults stop
the job must come to its end. It tells how far it is, and of a seed that fails its whole history and how to play it again, and
goes on. What is measured is made-up time but for the seconds that it took; the machine matters only for those.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from measured import ROOT, circumstances, write

CHUNK = 20
CHUNKS_OF_A_PROCESS = 10


@dataclass(frozen=True)
class Played:
    """One seed's two stories. `wrong`: what must not have happened, with its history; empty if all held."""

    seed: int
    wrong: str
    steps: int
    rollbacks: int
    faults: int
    revisions: int
    virtual_s: float
    bare_steps: int


def play(seeds: list[int]) -> list[Played]:
    """In a process of its own."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    logging.disable(logging.CRITICAL)
    from simulated_cluster import tell_story
    from simulated_story import Story

    played = []
    for seed in seeds:
        ended = tell_story(Story.of(seed))
        wrong, bare_steps = (ended.why if ended.wrong else ""), 0
        try:
            bare_steps = bare(seed)
        except Exception:  # noqa: BLE001 - whatever went wrong is told, and the others are played
            wrong = wrong or f"seed {seed}, the bare protocol:\n{traceback.format_exc()}"
        played.append(
            Played(
                seed,
                wrong,
                ended.steps,
                ended.lineages,
                ended.faults,
                ended.revisions,
                ended.seconds,
                bare_steps,
            )
        )
    return played


def bare(seed: int) -> int:
    """The protocol alone: its steps. Raises AssertionError."""
    from dataclasses import replace

    from step_simulation import RULES, Simulation

    async def story() -> int:
        part = 1 if seed % 4 == 1 else None  # a step in parts
        simulation = Simulation(seed, replace(RULES, staleness=(0, 0, 1, 2)[seed % 4], part=part))
        simulation.start()
        await simulation.faulty(250)
        head = simulation.fresh().head
        assert head is not None
        await simulation.calm(head.record.step + 3)
        ended = simulation.fresh().head
        assert ended is not None
        return int(ended.record.step)

    return asyncio.run(story())


def summary(played: list[Played], first: int, took_s: float) -> dict[str, Any]:
    """What is written down."""
    failed = [one for one in played if one.wrong]
    return {
        **circumstances(),
        "what": "simulation: made-up time, a store in memory, no device; see benchmarks/sim.py",
        "seeds": len(played),
        "first": first,
        "failed_seeds": [one.seed for one in failed],
        "took_s": round(took_s, 1),
        "processes": os.cpu_count(),
        "whole_clusters": {
            "steps": sum(one.steps for one in played),
            "rollbacks": sum(one.rollbacks for one in played),
            "faults": sum(one.faults for one in played),
            "store_revisions": sum(one.revisions for one in played),
            "virtual_hours": round(sum(one.virtual_s for one in played) / 3600, 1),
            "stories_by_rollbacks": {
                str(k): v for k, v in sorted(Counter(min(one.rollbacks, 5) for one in played).items())
            },
        },
        "bare_protocol": {"steps": sum(one.bare_steps for one in played), "events_each": 250},
    }


def everywhere(chunks: Sequence[list[int]], processes: int) -> Iterator[list[Played]]:
    """What becomes of each chunk, on so many processes, which are new ones after some chunks: their memory grows.

    An executor that replaces its processes itself (`max_tasks_per_child`) may stand still for ever (cpython 115634), and a
    `multiprocessing.Pool` does when one of its processes is killed. Raises BrokenProcessPool then.
    """
    lot = CHUNKS_OF_A_PROCESS * processes
    for start in range(0, len(chunks), lot):
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as executor:
            yield from executor.map(play, chunks[start : start + lot])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    seeds = list(range(options.first, options.first + options.seeds))
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    began, played = time.monotonic(), list[Played]()
    for found in everywhere(chunks, options.processes):
        played += found
        for one in found:
            if one.wrong:
                print(one.wrong, flush=True)
                print(f"\nseed {one.seed} FAILED; again: make sim FIRST={one.seed} SEEDS=1\n", flush=True)
        failed = sum(bool(one.wrong) for one in played)
        took = time.monotonic() - began
        print(f"{len(played)} of {len(seeds)} seeds, {failed} failed, {took:.0f} s", flush=True)
    if options.seeds > 1:
        write("sim", summary(played, options.first, time.monotonic() - began))
    if any(one.wrong for one in played):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
