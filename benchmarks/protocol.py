"""The step protocol under random faults, and with its compares and rules taken out one by one.

**Simulation** (`make sim SEEDS=20000 [FIRST=0] [BENCH_ARGS=--pictures]`): each seed is two stories: a whole cluster in simulated time
(`tests/support/simulated_cluster.py`), and the bare protocol over views of any age (`tests/support/step_simulation.py`). After every
event the invariants are checked; once the faults stop the job must come to its end. Prints progress, and of a seed that fails its whole
history and how to play it again, and goes on. The machine matters only for the seconds that it took.

**Mutations** (`make mutations [BENCH_ARGS="--only 'commit without head'"]`): takes each compare and each rule of the protocol out of gcore
in turn, and finds what notices it: the seed of a simulation, or the unit test, that fails. It fails if one is not noticed. `--again` looks
only for new ones and for those that nothing noticed before, or for those of `--only`; the others stay as they are written.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import Benchmark, Result, read_result

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


def summary(played: list[Played], first: int, took_s: float, taken: Result) -> dict[str, Any]:
    """What is written down."""
    failed = [one for one in played if one.wrong]
    return {
        **taken,
        "what": "simulation: made-up time, a store in memory, no device; see benchmarks/protocol.py",
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


def measure_simulation(arguments: argparse.Namespace, taken: Result) -> Result | None:
    """All seeds. A single one is played to look at it, and not written."""
    seeds = list(range(arguments.first, arguments.first + arguments.seeds))
    if arguments.pictures or arguments.generated:
        from simulated_story import Story

        stories = map(Story.of, itertools.count(arguments.first))
        wanted = (one.seed for one in stories if (one.generates if arguments.generated else one.pictures))
        seeds = list(itertools.islice(wanted, arguments.seeds))
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    began, played = time.monotonic(), list[Played]()
    for found in everywhere(chunks, arguments.processes):
        played += found
        for one in found:
            if one.wrong:
                print(one.wrong, flush=True)
                print(f"\nseed {one.seed} FAILED; again: make sim FIRST={one.seed} SEEDS=1\n", flush=True)
        failed = sum(bool(one.wrong) for one in played)
        print(f"{len(played)} of {len(seeds)} seeds, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    result = summary(played, arguments.first, time.monotonic() - began, taken)
    if len(seeds) == 1:
        raise SystemExit(1 if result["failed_seeds"] else 0)
    return result


def simulation_options(parser: argparse.ArgumentParser) -> None:
    """Seeds."""
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--pictures", action="store_true", help="only seeds whose prompts have pictures")
    only.add_argument("--generated", action="store_true", help="only seeds whose policy generates pictures")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)


# Mutations ------------------------------------------------------------------------------------------------------------


def look(job: tuple[str, int, int]) -> dict[str, Any]:
    """In a process of its own."""
    logging.disable(logging.CRITICAL)
    from mutants import caught

    name, bare_seeds, whole_seeds = job
    found = caught(name, bare_seeds=bare_seeds, whole_seeds=whole_seeds)
    return {"mutation": found.mutation, "rule": found.rule, "caught_by": found.by, "said": found.said}


def alone(job: tuple[str, int, int]) -> dict[str, Any]:
    """The same, in a process that ends with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(look, job).result()


def measure_mutations(arguments: argparse.Namespace, taken: Result) -> Result | None:
    """All mutations, those of `--only`, or with `--again` the new ones and those that were not noticed. With `--only` alone
    nothing is written."""
    from mutations import MUTATIONS

    before = read_result("mutations") if arguments.again else {}
    known = {
        row["mutation"] for row in before.get("mutations", ()) if row["mutation"] in MUTATIONS and row["caught_by"]
    }
    names = arguments.only or [name for name in MUTATIONS if name not in known]
    rows: list[dict[str, Any]] = []
    # A process each: gcore is wrong in it from then on. Processes that the pool replaces itself may stand still (cpython 115634).
    with ThreadPoolExecutor(arguments.processes) as threads:
        for row in threads.map(alone, [(name, arguments.bare_seeds, arguments.whole_seeds) for name in names]):
            rows.append(row)
            print(f"{row['mutation']:50} {row['caught_by'] or 'NOT NOTICED'}", flush=True)
    if arguments.again:
        found = {row["mutation"]: row for row in (*before["mutations"], *rows)}
        rows = [found[name] for name in MUTATIONS if name in found]
    missed = [row["mutation"] for row in rows if not row["caught_by"]]
    by_simulation = sum("seed" in row["caught_by"] for row in rows)
    print(f"{len(rows)} mutations, {by_simulation} noticed by simulation, {len(missed)} not noticed")
    seeds = {"bare_protocol": arguments.bare_seeds, "whole_cluster": arguments.whole_seeds}
    result = before or {
        **taken,
        "what": "gcore with one compare or rule taken out; which seed of a simulation, or which unit test, notices",
        "seeds_tried": seeds,
    }
    result |= {"mutations": rows, "noticed_by_simulation": by_simulation, "not_noticed": missed}
    if arguments.again:
        result["again"] = {"mutations": names, "seeds_tried": seeds, **taken}
    elif arguments.only is not None:
        raise SystemExit(not_noticed(result) or 0)
    return result


def not_noticed(result: Result) -> str:
    """The mutations that nothing noticed."""
    missed = result["not_noticed"]
    return f"not noticed: {', '.join(missed)}" if missed else ""


def mutation_options(parser: argparse.ArgumentParser) -> None:
    """Which, and how many seeds are tried."""
    parser.add_argument("--only", action="append")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--bare-seeds", type=int, default=60)
    parser.add_argument("--whole-seeds", type=int, default=12)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)


BENCHMARKS = (
    Benchmark(
        "sim",
        "sim",
        measure_simulation,
        options=simulation_options,
        verdict=lambda result: "seeds failed" if result["failed_seeds"] else "",
    ),
    Benchmark("mutations", "mutations", measure_mutations, options=mutation_options, verdict=not_noticed),
)
