"""`make chaos`: run every fault of the table at several random moments, on real clusters on this machine.

    python tests/chaos/table.py [--only controller,etcd] [--moments 5] [--together 5] [--fresh] [--dirty]

A line a run, a bar for all of them. Several moments of a fault share a cluster and a job, each with an audit of its own. Results
are written to the results file when their job has ended, and a run that stands there as passed is not made again: a table that was interrupted goes on (`--fresh` forgets it). A run is named by its fault and
its seed, from which its moment and every choice in it follow; what failed leaves its folder with the logs. Each result names its commit; with changes that are in none, nothing
is run (`--dirty` runs all the same, and the results say so).

Ends with 1 if a run has failed, or if controllers' shards came back too late: at the 95th percentile of the runs in which one
was killed, not later than the lease plus 15 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

from chaos_cluster import TTL_S  # noqa: E402
from chaos_faults import FAULTS, RECOVERY_GOAL_S, Fault  # noqa: E402
from chaos_run import one_job  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402

from benchmarks.harness import RESULTS, circumstances  # noqa: E402
from gcore.store.etcd import EtcdBinary, find_etcd  # noqa: E402
from gcore.system.files import replace_file  # noqa: E402

FOLDER = ROOT / ".cache" / "chaos"
MOMENTS = 5
TOGETHER = 5
"""So many moments have one job, at most."""
Run = tuple[Fault, int]
Result = dict[str, Any]


def chosen(only: str) -> tuple[Fault, ...]:
    """The faults that are named: exactly, or all whose names begin so with a `*` behind. Empty: all of them."""
    if only in ("", "list"):
        return FAULTS
    found = []
    for word in filter(None, (part.strip() for part in only.split(","))):
        some = [f for f in FAULTS if f.name == word or (word.endswith("*") and f.name.startswith(word[:-1]))]
        if not some:
            raise SystemExit(f"no fault is called {word!r}; there are {', '.join(f.name for f in FAULTS)}")
        found += [fault for fault in some if fault not in found]
    return tuple(found)


def planned(faults: Iterable[Fault], moments: int) -> list[Run]:
    """Every run: a fault and a seed."""
    return [(fault, seed) for fault in faults for seed in range(fault.moments or moments)]


def still_to_do(runs: Iterable[Run], done: Iterable[Result]) -> list[Run]:
    """What does not stand among the results as passed."""
    passed = {(result["fault"], result["seed"]) for result in done if result["ok"]}
    return [(fault, seed) for fault, seed in runs if (fault.name, seed) not in passed]


def next_job(waiting: Sequence[Run], together: int = TOGETHER) -> tuple[Fault, list[int]]:
    """The first fault that waits, and the seeds that are run on its next job."""
    fault = waiting[0][0]
    seeds = [seed for other, seed in waiting if other is fault]
    return fault, seeds[: together if fault.together else 1]


def with_result(done: Sequence[Result], new: Result) -> list[Result]:
    """The results, a run's older one replaced, in the table's order."""
    order = {fault.name: place for place, fault in enumerate(FAULTS)}
    kept = [result for result in done if (result["fault"], result["seed"]) != (new["fault"], new["seed"])]
    return sorted([*kept, new], key=lambda result: (order.get(result["fault"], len(order)), result["seed"]))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that so many of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def recovery(done: Iterable[Result]) -> Result | None:
    """From the kill of a controller to the first commit with its shards' prompts from another holder; None without any."""
    seconds = [result["recovery_s"] for result in done if result["ok"] and "recovery_s" in result]
    if not seconds:
        return None
    return {
        "lease_ttl_s": TTL_S,
        "goal_p95_s": RECOVERY_GOAL_S,
        "p95_s": percentile(seconds, 0.95),
        "median_s": round(statistics.median(seconds), 2),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "count": len(seconds),
    }


def summary(done: Sequence[Result]) -> list[Result]:
    """A line a fault."""
    rows = []
    for fault in FAULTS:
        mine = [result for result in done if result["fault"] == fault.name]
        if mine:
            passed = sum(result["ok"] for result in mine)
            rollbacks = sum(result.get("rollbacks", 0) for result in mine)
            rows.append(
                {"fault": fault.name, "what": fault.what, "runs": len(mine), "passed": passed, "rollbacks": rollbacks}
            )
    return rows


def line(result: Result) -> str:
    """One run, for people."""
    moment = f"after step {result['after_step']:>3} + {result['delay_s']:4.2f} s"
    words = [f"{result['fault']:18} {result['seed']:<3} {moment}"]
    words.append(f"{result.get('seconds', result.get('job_seconds', 0.0)):5.1f} s  {result.get('target', '')}")
    if "recovery_s" in result:
        words.append(f"recovered in {result['recovery_s']:.1f} s")
    if result.get("rollbacks"):
        words.append(f"{result['rollbacks']} rollbacks")
    if not result["ok"]:
        words.append(f"FAILED: {result.get('why', '')} {'; '.join(result.get('audit', ()))}".rstrip())
    return "  ".join(words)


def changed(root: Path, but: Path) -> list[str]:
    """The files of the repository at `root` that differ from its commit, without results."""
    names = _git(root, "-c", "core.quotePath=off", "diff", "--name-only", "--no-renames", "HEAD").splitlines()
    results = (root / "benchmarks" / "results").resolve()
    return [name for name in names if (file := (root / name).resolve()) != but.resolve() and file.parent != results]


def commit_of(root: Path, but: Path) -> str:
    """What is run: the commit, with `-dirty` behind it if files differ from it."""
    return _git(root, "describe", "--always", "HEAD").strip() + "-dirty" * bool(changed(root, but))


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout


def refused(names: Sequence[str]) -> str:
    """Why nothing is run with these files changed."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{more} differ from the commit that the results would name: commit or put them away, "
        "or add --dirty (make chaos DIRTY=1), and the results say so"
    )


def written(file: Path, done: Sequence[Result]) -> None:
    """The results file, whole."""
    found = find_etcd()
    version = found.version() if isinstance(found, EtcdBinary) else ""
    tree = circumstances("torch", "deepspeed", "grpcio") | {"etcd": version, "commit": commit_of(ROOT, file)}
    tree |= {"what": "Real clusters on one machine with a fault at a random moment; each run ends with the audit."}
    tree |= {"recovery_of_a_killed_controller": recovery(done), "faults": summary(done), "runs": list(done)}
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(tree, indent=1) + "\n").encode())


def read(file: Path) -> list[Result]:
    """The runs that stand in the results file."""
    return list(json.loads(file.read_text())["runs"]) if file.exists() else []


def make(runs: Sequence[Run], file: Path, done: list[Result], console: Console, together: int) -> list[Result]:
    """Make them, one after the other."""
    columns = (
        TextColumn("chaos"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(runs), now="")
        waiting = list(runs)
        while waiting:
            fault, seeds = next_job(waiting, together)
            bar.update(task, now=f"{fault.name} {', '.join(map(str, seeds))}")
            commit = commit_of(ROOT, file)
            results = asyncio.run(one_job(fault, seeds, FOLDER))
            for result in results:
                done = with_result(done, result | {"commit": commit})
                bar.console.print(line(result), highlight=False, soft_wrap=True, style=None if result["ok"] else "red")
            written(file, done)
            failed = any(not result["ok"] for result in results)
            over = set(seeds) if failed else {result["seed"] for result in results}
            waiting = [run for run in waiting if run[0] is not fault or run[1] not in over]
            bar.advance(task, len(over))
    return done


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults, by comma; a name may end in *; `list` shows them")
    parser.add_argument("--moments", type=int, default=MOMENTS, help=f"random moments a fault (default: {MOMENTS})")
    parser.add_argument("--together", type=int, default=TOGETHER, help=f"moments in one job (default: {TOGETHER})")
    parser.add_argument("--fresh", action="store_true", help="forget what has passed before")
    parser.add_argument("--dirty", action="store_true", help="run with changes that are in no commit; results say so")
    parser.add_argument("--results", type=Path, default=RESULTS / "chaos.json")
    told = parser.parse_args()
    # Whoever ends this (timeout, a runner of jobs) must not leave a cluster behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(stderr=True)
    faults = chosen(told.only)
    if told.only == "list":
        for fault in faults:
            print(f"{fault.name:18} {fault.what}")
        return 0
    if (differing := changed(ROOT, told.results)) and not told.dirty:
        raise SystemExit(refused(differing))
    done = [] if told.fresh else read(told.results)
    runs = planned(faults, told.moments)
    todo = still_to_do(runs, done)
    if len(todo) < len(runs):
        console.print(f"{len(runs) - len(todo)} of {len(runs)} runs have passed before (--fresh makes them again)")
    if told.fresh:
        shutil.rmtree(FOLDER, ignore_errors=True)
    done = make(todo, told.results, done, console, told.together)
    names = {(fault.name, seed) for fault, seed in runs}
    failed = [result for result in done if (result["fault"], result["seed"]) in names and not result["ok"]]
    measured = recovery(done)
    late = measured is not None and measured["p95_s"] > RECOVERY_GOAL_S
    if measured is not None:
        console.print(
            f"recovery after a controller's death: p95 {measured['p95_s']:.1f} s of {measured['count']} runs, goal {RECOVERY_GOAL_S:.0f} s"
        )
    console.print(f"{len(runs) - len(failed)} of {len(runs)} runs passed; {told.results}")
    return 1 if failed or late else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on behind the last job that ended")
