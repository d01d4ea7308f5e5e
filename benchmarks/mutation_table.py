"""Takes each compare and each rule of the step protocol out of gcore in turn, and looks for what notices it.

    make mutations [BENCH_ARGS="--only 'commit without head'"]
    make mutations BENCH_ARGS=--again      only those that nothing noticed before; what noticed the others stays as it is written

Prints a table and writes benchmarks/results/mutations.json: for each mutation the seed of a simulation, or the unit test, that
fails. Fails if one is not noticed.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from measured import RESULTS, ROOT, circumstances, write

sys.path.insert(0, str(ROOT / "tests" / "support"))


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


def main() -> None:
    """The command."""
    from mutations import MUTATIONS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--bare-seeds", type=int, default=60)
    parser.add_argument("--whole-seeds", type=int, default=12)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    before: dict[str, Any] = json.loads((RESULTS / "mutations.json").read_text()) if options.again else {}
    names = before["not_noticed"] if options.again else options.only or list(MUTATIONS)
    rows: list[dict[str, Any]] = []
    # A process each: gcore is wrong in it from then on. Processes that the pool replaces itself may stand still (cpython 115634).
    with ThreadPoolExecutor(options.processes) as threads:
        for row in threads.map(alone, [(name, options.bare_seeds, options.whole_seeds) for name in names]):
            rows.append(row)
            print(f"{row['mutation']:50} {row['caught_by'] or 'NOT NOTICED'}", flush=True)
    if options.again:
        found = {row["mutation"]: row for row in rows}
        rows = [found.get(row["mutation"], row) for row in before["mutations"]]
    missed = [row["mutation"] for row in rows if not row["caught_by"]]
    by_simulation = sum("seed" in row["caught_by"] for row in rows)
    print(f"{len(rows)} mutations, {by_simulation} noticed by simulation, {len(missed)} not noticed")
    if options.only is None:
        seeds = {"bare_protocol": options.bare_seeds, "whole_cluster": options.whole_seeds}
        result = before or {
            **circumstances(),
            "what": "gcore with one compare or rule taken out; which seed of a simulation, or which unit test, notices",
            "seeds_tried": seeds,
        }
        result |= {"mutations": rows, "noticed_by_simulation": by_simulation, "not_noticed": missed}
        if options.again:
            result["again"] = {"mutations": names, **circumstances()}
        write("mutations", result)
    if missed:
        raise SystemExit(f"not noticed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
