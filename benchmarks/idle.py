"""What gcore's processes take while nothing happens: memory, share of a core, wake-ups a second.

    make bench-idle            writes benchmarks/results/idle.json

Three situations, each watched for half a minute: a cluster that has just come up; one whose workers wait while the
controllers are stopped (SIGSTOP), so that nobody sends them anything; and the same cluster after its job has ended.
RSS counts pages that processes share for each of them, PSS shares them out. The goal is for daemons: under 80 MB and
1 % of a core. Engines and ranks hold torch; of them the goal is the core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from measured import ROOT, circumstances, write
from processes import read
from runs import GCORE, own_home

from controllers.cli.leftovers import processes_of

SPEC = ROOT / "examples" / "arithmetic" / "grpo.yaml"
GOAL_MB, GOAL_SHARE = 80.0, 0.01
SETTLE_S = 10.0
"""After a change, until things are quiet; longer than a lease."""


def kinds(home: Path) -> dict[int, str]:
    """Every process of the home: what it is, by pid."""
    found = {}
    for one in processes_of(home.resolve()):
        pid = one.process.pid
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if one.kind == "child":
            found[pid] = "engine" if b"gcore.rollout.engine" in arguments else "rank"
        else:
            found[pid] = "supervisor" if one.kind == "worker" else one.kind
    return found


def watch(home: Path, seconds: float, only: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """One row a process, over `seconds`."""
    pids = {pid: kind for pid, kind in kinds(home).items() if not only or kind in only}
    before, began = {pid: read(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    rows = []
    for pid, kind in sorted(pids.items(), key=lambda item: item[1]):
        with contextlib.suppress(OSError):  # it ended meanwhile, and so was not idle
            now = read(pid)
            share = (now.processor_s - before[pid].processor_s) / took
            rows.append(
                {
                    "process": kind,
                    "rss_mb": now.rss,
                    "pss_mb": now.pss,
                    "anonymous_mb": now.anonymous,
                    "share_of_a_core": round(share, 5),
                    "wakeups_per_s": round((now.switches - before[pid].switches) / took, 2),
                    "threads": now.threads,
                }
            )
    return rows


def until_step(log: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Until the run has printed that a step is committed."""
    while f"step {step}/" not in log.read_text():
        if process.poll() is not None:
            raise SystemExit(f"the run ended before step {step}:\n{log.read_text()}")
        time.sleep(0.2)


def measure(seconds: float) -> dict[str, list[dict[str, Any]]]:
    """The three situations."""
    with own_home() as home:
        log = home.parent / "run.log"
        subprocess.run(
            [*GCORE, "up", "--home", str(home)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(SETTLE_S)
        fresh = watch(home, seconds)
        with log.open("wb") as out:
            run = subprocess.Popen(
                [*GCORE, "run", str(SPEC), "--home", str(home), "--plain", "--set", "flow.steps=4"],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        until_step(log, 1, run)
        controllers = [pid for pid, kind in kinds(home).items() if kind == "controller"]
        for pid in controllers:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(SETTLE_S)
            waiting = watch(home, seconds, only=("supervisor", "engine", "rank", "etcd"))
        finally:
            for pid in controllers:
                os.kill(pid, signal.SIGCONT)
        if run.wait() != 0:
            raise SystemExit(log.read_text())
        time.sleep(SETTLE_S)
        ended = watch(home, seconds)
    return {"fresh": fresh, "workers_waiting": waiting, "after_a_job": ended}


def verdict(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The largest of each kind of process, and whether that meets the goal."""
    found: dict[str, dict[str, Any]] = {}
    for kind in sorted({row["process"] for row in rows}):
        mine = [row for row in rows if row["process"] == kind]
        rss, share = max(r["rss_mb"] for r in mine), max(r["share_of_a_core"] for r in mine)
        found[kind] = {"rss_mb": rss, "share_of_a_core": share, "under_1_percent": share < GOAL_SHARE}
        if kind in ("controller", "supervisor", "etcd"):
            found[kind]["under_80_mb"] = rss < GOAL_MB
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each situation is watched")
    arguments = parser.parse_args()
    result = circumstances("grpcio", "torch", "transformers", "pydantic")
    situations = measure(arguments.seconds)
    result |= {"what": (__doc__ or "").split("\n")[0], "seconds": arguments.seconds}
    result["verdict"] = {name: verdict(rows) for name, rows in situations.items()}
    result["processes"] = situations
    for name, found in result["verdict"].items():
        for kind, row in found.items():
            print(f"{name:16} {kind:10} {row['rss_mb']:7.1f} MB  {row['share_of_a_core']:.2%} of a core")
    print(write("idle", result))


if __name__ == "__main__":
    main()
