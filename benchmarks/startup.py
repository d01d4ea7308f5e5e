"""How long gcore takes to start: commands, daemons, workers, and from `gcore run` to the first step.

    make bench-startup         each three times; writes benchmarks/results/startup.json

Seconds on the clock, and where it can be told, of processor time with children: on a busy machine only that means
something. What the imports of each process take is added up by package (`python -X importtime`, once each).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from measured import ROOT, circumstances, spread, write
from runs import GCORE, own_home

from gcore.client import JobsClient
from gcore.clock import SystemClock
from gcore.config.node import NodeConfig
from gcore.store.launcher import LocalEtcd
from gcore.store.reference import StoreRef
from gcore.testing.engine_process import engine_process

SPEC = ROOT / "examples" / "arithmetic" / "grpo.yaml"
MODEL = ROOT / ".cache" / "examples" / "arithmetic" / "model"
PACKAGES = 12
"""Shown of each process's imports."""
IMPORTS = {
    "command line": "controllers.cli.main",
    "controller": "controllers.wire",
    "controller with a job": "controllers.wire, controllers.job, controllers.service.submission",
    "supervisor": "gcore.worker.main",
    "engine": "gcore.uncompiled as u; u.leave_compiler_out(); import gcore.rollout.engine.serve",
    "rank": "gcore.uncompiled as u; u.leave_compiler_out(); import gcore.train.models, gcore.train.step",
}
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_SERVING = re.compile(r"^(\S+ \S+?),(\d{3}) INFO gcore\.worker serving", re.MULTILINE)


def command(*words: str) -> dict[str, float]:
    """One command of `gcore`, however it ends: seconds and processor seconds."""
    before, began = os.times(), time.monotonic()
    subprocess.run([*GCORE, *words], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": time.monotonic() - began, "processor_s": processor}


def up() -> dict[str, float]:
    """`gcore up` until it returns."""
    with own_home() as home:
        return command("up", "--home", str(home))


def controller() -> dict[str, float]:
    """A daemon by itself, beside an etcd that runs: from its start until it says that it serves."""
    return {"seconds": asyncio.run(_controller())}


async def _controller() -> float:
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        etcd = await LocalEtcd.start(home / "etcd", log_file=home / "etcd.log", clock=clock)
        port = 20000 + os.getpid() % 20000
        config = NodeConfig(
            node="one",
            home=folder,
            etcd=StoreRef(endpoints=(etcd.endpoint,)),
            slots=("cpu:0",),
            run_root=folder,
            listen_port=port,
        )
        (home / "one.json").write_text(config.model_dump_json())
        began = time.monotonic()
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
            [sys.executable, "-m", "controllers.daemon", "--home", folder, "--config", str(home / "one.json")],
            stderr=subprocess.DEVNULL,
        )
        try:
            async with JobsClient([f"127.0.0.1:{port}"], clock=clock) as client:
                while not await client.is_serving(f"127.0.0.1:{port}"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return time.monotonic() - began
        finally:
            process.terminate()
            process.wait()
            await etcd.stop()


def engine() -> dict[str, float]:
    """An engine by itself: from its start until it serves the example's model."""
    began = time.monotonic()
    with engine_process(MODEL):
        return {"seconds": time.monotonic() - began}


def first_step() -> dict[str, float]:
    """`gcore run` of one step, nothing up before: when the cluster is up, each worker serves, the step is committed."""
    with own_home() as home:
        began, began_wall = time.monotonic(), time.time()
        run = subprocess.Popen(
            [*GCORE, "run", str(SPEC), "--home", str(home), "--plain", "--set", "flow.steps=1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert run.stdout is not None
        found: dict[str, float] = {}
        for line in run.stdout:
            now = time.monotonic() - began
            if line.startswith("state: RUNNING"):
                found["until_running_s"] = now
            if line.startswith("step 1/"):
                found["until_step_s"] = now
        if run.wait() != 0 or "until_step_s" not in found:
            raise SystemExit("the run did not end well")
        found["until_summary_s"] = time.monotonic() - began
        for role in ("rollout", "train"):
            started, served = _workers(home, role, began_wall)
            found[f"{role}_worker_started_s"] = started
            found[f"{role}_worker_serving_after_s"] = served
        return found


def _workers(home: Path, role: str, began: float) -> tuple[float, float]:
    """Of the slowest worker of a role: when it was started after `began`, and how long it took to serve from then."""
    rows = []
    for launch in (home / "workers").glob(f"{role}-*.json"):
        log = (home / "logs" / f"{launch.stem}.supervisor.log").read_text()
        said = _SERVING.search(log)
        if said is not None:
            moment = datetime.strptime(said[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(said[2]) / 1000
            started = launch.stat().st_mtime
            rows.append((moment - started, started - began))
    slowest, started = max(rows)
    return started, slowest


def imports(statement: str) -> dict[str, Any]:
    """Milliseconds by package, the largest first, of one process's imports. Tracing makes all of them slower."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {statement}"],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    counted: Counter[str] = Counter()
    for own, name in _IMPORT.findall(done.stderr):
        counted[name.split(".")[0]] += int(own)
    largest = {name: round(own / 1000, 1) for name, own in counted.most_common(PACKAGES)}
    return {"modules": len(_IMPORT.findall(done.stderr)), "all_ms": round(counted.total() / 1000, 1), "ms": largest}


def repeated(what: str, measure: Callable[[], dict[str, float]], runs: int) -> dict[str, Any]:
    """Each number of `measure` over some runs."""
    rows = []
    for number in range(runs):
        rows.append(measure())
        print(f"{what} {number + 1}/{runs}: { ({k: round(v, 2) for k, v in rows[-1].items()}) }", flush=True)
    return {name: spread([row[name] for row in rows], 3) for name in rows[0]}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    result = circumstances("torch", "transformers", "deepspeed", "grpcio", "typer")
    result |= {"what": (__doc__ or "").split("\n")[0]}
    nowhere = str(Path(tempfile.gettempdir()) / "gcore-nowhere")
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "gcore --help": lambda: command("--help"),
        "gcore list": lambda: command("list", "--home", nowhere),
        "gcore up": up,
        "controller": controller,
        "engine": engine,
        "gcore run to the first step": first_step,
    }
    result["seconds"] = {name: repeated(name, measure, arguments.runs) for name, measure in measures.items()}
    result["imports"] = {name: imports(statement) for name, statement in IMPORTS.items()}
    print(write("startup", result))


if __name__ == "__main__":
    main()
