"""The time to start gcore, and the resources of its idle processes.

**Start** (`startup`): commands, daemons, workers, and from `gcore run` to the first step. Seconds of elapsed time, and where
available of processor time with children: on a busy machine only the latter is meaningful. The import times of each process are summed by
package (`python -X importtime`, once each), from the entry of the program, because the order of imports decides what is loaded.
`--pairs` of each. Commands and daemons run beside a bare process that imports the same third-party packages and nothing of gcore; the
ratio of both is independent of the machine. `--only ratios` measures just that.

**Idle** (`idle`): memory, share of a core and wake-ups a second in three situations, each for half a minute. The first is a cluster
that has just started. The second has workers that wait while the controllers are stopped (SIGSTOP), so that they get no requests. The third is
the same cluster after its job has ended. RSS counts shared pages for each process, PSS divides them. The goal is for daemons: under
80 MB and 1 % of a core. Engines and ranks have torch in memory; their goal is the core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from engine_processes import engine_process

from benchmarks.harness import EXAMPLES, GCORE, PREPARED, Benchmark, Result, own_home, read_process, spread
from controllers.cli.local import home_processes
from gcore.client import JobsClient
from gcore.config.node import NodeConfig
from gcore.store.etcd import LocalEtcd
from gcore.store.reference import StoreRef
from gcore.system.clock import SystemClock

SPEC = EXAMPLES / "arithmetic" / "grpo.yaml"
MODEL = PREPARED / "arithmetic" / "model"
PACKAGES = 12
"""Shown of each process's imports."""


def command_line() -> None:
    """`gcore`."""
    import controllers.cli.main  # noqa: F401


def controller_process() -> None:
    """A daemon without a job: its entry, which ends at a configuration that is not there."""
    import contextlib
    import io
    import sys

    import controllers.daemon.__main__ as entry

    sys.argv[1:] = ["--config", "/nowhere/node.yaml"]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        entry.main()
    assert "controllers.daemon.daemon" in sys.modules


def first_job() -> None:
    """What a daemon loads when it starts its first job."""
    import controllers.api.submission.submit
    import controllers.job.runner  # noqa: F401


def supervisor() -> None:
    """Of a worker."""
    import gcore.worker.main  # noqa: F401


def engine_process_imports() -> None:
    """The torch engine: its entry, which ends at a port that is taken."""
    import contextlib
    import io
    import socket
    import sys
    import tempfile
    from pathlib import Path

    import gcore.engines.torch.__main__  # noqa: F401
    from gcore.engines.launch import serve_program

    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        (Path(folder) / "config.json").write_text("{}")
        sys.argv[1:] = ["--model", folder, "--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]
        with contextlib.redirect_stderr(io.StringIO()):
            serve_program("gcore.engines.torch", "gcore.engines.torch.server")
    assert "gcore.engines.torch.server" in sys.modules


def rank() -> None:
    """A train rank: its entry, and what it loads once it has its launch document."""
    import importlib

    for name in ("gcore.train.__main__", "torch", "gcore.train.backends.distributed"):  # in this order
        importlib.import_module(name)
    from gcore.train.rank.main import _import_the_rest

    _import_the_rest("deepspeed", lambda phase: None)
    import gcore.train.step  # noqa: F401


IMPORTS = {
    "command line": (command_line,),
    "controller": (controller_process,),
    "controller with a job": (controller_process, first_job),
    "supervisor": (supervisor,),
    "engine": (engine_process_imports,),
    "rank": (rank,),
}
"""What each process imports, from its own entry and in its own order. The source of these functions runs in a new process."""
BARE = {
    "command line": "typer",
    "controller": "pydantic, grpc.aio, google.protobuf, yaml, asyncio, annotated_types, prometheus_client, aetcd, tenacity",
    "engine": "torch, transformers, uvicorn, starlette.applications",
}
"""Packages of others that some of these processes load: their start is compared with that of a process with nothing else."""
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_SERVING = re.compile(r"^(\S+ \S+?),(\d{3}) INFO gcore\.worker: serving", re.MULTILINE)


def command(*words: str) -> dict[str, float]:
    """One command of `gcore`, however it ends: seconds and processor seconds."""
    return process(*GCORE, *words)


def process(*words: str) -> dict[str, float]:
    """One process, however it ends: seconds and processor seconds."""
    before, began = processor_seconds(), time.monotonic()
    subprocess.run(words, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {"seconds": time.monotonic() - began, "processor_s": processor_seconds() - before}


def processor_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
    with engine_process(MODEL, cold=True):
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


def source(*functions: Callable[[], None]) -> str:
    """A program that does what the functions do, one after the other."""
    return "".join(f"{inspect.getsource(one)}\n{one.__name__}()\n" for one in functions)


def imports(program: str) -> dict[str, Any]:
    """Milliseconds by package, the largest first, of one process's imports. Tracing makes all of them slower."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
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


def own_seconds(program: str) -> float:
    """Seconds from the start of a new process to the end of this program in it, without those in which other processes had the cores."""
    last = "import time; print(time.monotonic(), open('/proc/self/schedstat').read().split()[1])"
    # Compiled modules are kept, whatever the environment says: compiling is no part of what is compared.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": ""}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{last}"], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    ended, waited_ns = done.stdout.splitlines()[-1].split()
    return float(ended) - began - int(waited_ns) / 1e9


def import_ratios(pairs: int, *, slowed: bool) -> dict[str, Any]:
    """Own seconds of a process's imports through those of a bare process, in alternating pairs."""
    ratios = {}
    for what, packages in BARE.items():
        programs = [source(*IMPORTS[what]), f"import {packages}"]
        if slowed:
            programs[0] = f"import time; began = time.monotonic()\n{programs[0]}\ntime.sleep(time.monotonic() - began)"
        rows = []
        for number in range(pairs + 1):
            turns = (0, 1) if number % 2 else (1, 0)
            took = {side: own_seconds(programs[side]) for side in turns}
            rows.append(took[0] / took[1])
        ratios[what] = spread(rows[1:], 3)  # in the first pair, files come from the disk
        print(f"{what}: {ratios[what]}", flush=True)
    return ratios


def measure_start(arguments: argparse.Namespace, taken: Result) -> Result:
    """Each process by itself, then a whole run."""
    result = taken | {
        "what": "How long gcore takes to start: commands, daemons, workers, and from `gcore run` to the first step."
    }
    if arguments.only == "ratios":
        return result | {"ratios": import_ratios(arguments.pairs, slowed=arguments.slowed)}
    nowhere = str(Path(tempfile.gettempdir()) / "gcore-nowhere")
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "gcore --help": lambda: command("--help"),
        "gcore list": lambda: command("list", "--home", nowhere),
        "gcore up": up,
        "controller": controller,
        "engine": engine,
        "gcore run to the first step": first_step,
    }
    result["seconds"] = {name: repeated(name, measure, arguments.pairs) for name, measure in measures.items()}
    result["imports"] = {name: imports(source(*functions)) for name, functions in IMPORTS.items()}
    result["ratios"] = import_ratios(arguments.pairs, slowed=False)
    return result


def start_options(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    parser.add_argument("--only", choices=("ratios",), help="beside bare processes only")
    parser.add_argument(
        "--slowed", action="store_true", help="ratios: imports take twice as long, to see that bounds notice"
    )


# Idle -----------------------------------------------------------------------------------------------------------------

GOAL_MB, GOAL_SHARE = 80.0, 0.01
SETTLE_S = 10.0
"""After a change, until things are quiet; longer than a lease."""


def kinds(home: Path) -> dict[int, str]:
    """Every process of the home: what it is, by pid."""
    found = {}
    for one in home_processes(home.resolve()):
        pid = one.process.pid
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if one.kind == "child":
            found[pid] = "engine" if {b"gcore.engines.torch", b"gcore.rollout.engine"} & set(arguments) else "rank"
        else:
            found[pid] = "supervisor" if one.kind == "worker" else one.kind
    return found


def watch(home: Path, seconds: float, only: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """One row a process, over `seconds`."""
    pids = {pid: kind for pid, kind in kinds(home).items() if not only or kind in only}
    before, began = {pid: read_process(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    rows = []
    for pid, kind in sorted(pids.items(), key=lambda item: item[1]):
        with contextlib.suppress(OSError):  # it ended meanwhile, and so was not idle
            now = read_process(pid)
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


def situations(seconds: float) -> dict[str, list[dict[str, Any]]]:
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


def measure_idle(arguments: argparse.Namespace, taken: Result) -> Result:
    """The three situations, and whether they meet the goal."""
    rows = situations(arguments.seconds)
    result = taken | {
        "what": "What gcore's processes take while nothing happens: memory, share of a core, wake-ups a second.",
        "seconds": arguments.seconds,
        "verdict": {name: verdict(found) for name, found in rows.items()},
        "processes": rows,
    }
    for name, found in result["verdict"].items():
        for kind, row in found.items():
            print(f"{name:16} {kind:10} {row['rss_mb']:7.1f} MB  {row['share_of_a_core']:.2%} of a core")
    return result


def idle_options(parser: argparse.ArgumentParser) -> None:
    """How long."""
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each situation is watched")


BENCHMARKS = (
    Benchmark(
        "startup",
        "startup",
        measure_start,
        ("torch", "transformers", "deepspeed", "grpcio", "typer"),
        3,
        start_options,
    ),
    Benchmark("idle", "idle", measure_idle, ("grpcio", "torch", "transformers", "pydantic"), options=idle_options),
)
