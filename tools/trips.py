"""Record which modules of the product four trips enter.

    python -m tools.trips record FILE [--only prompt,submission,placement,sample]

A module counts if one of its functions is called during the trip, in the processes that the trip passes; code that runs at import does
not count, and generated code does not. So the number stays comparable when modules are merged or split. The clusters are real: daemons, etcd,
workers, started by the console script as a person does it, with a profiler in each process (`trip_hook`).

    submission  from `gcore submit` until the first step is committed: the command and the daemons
    prompt      from the data set to the commit: all that two daemons enter while `STEPS` steps are made
    sample      from the engine to the optimizer step: all that engine and train rank enter meanwhile
    placement   from a step's measurements to moved engines: all that the daemons enter while `MOVES` moves are made,
                but for the job's flow, which goes on meanwhile. The policy moves a slot after each step, and asks gcore's own policy too.

The first three are recorded in one run on two cores with a tiny model, the last in one on emulated slots.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Files = set[str]
Tree = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import yaml

from gcore.testing.models import make_tiny_model
from tools.own_package import put_on_path

SCRIPTS: Tree = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
HOOK = ROOT / "tools" / "trip_hook"
STEPS = 16
MOVES = 5
FIRST_STEP = 2
"""Of the steps that are recorded: what only happens in a job's first steps is part of the submission."""
PATIENCE_S = 240.0
LAW = {
    "speedup": 8.0, "load_s": 0.2, "decode_s": 0.05, "response_tokens": 30, "response_spread": 0.5, "judge_decode_s": 0.05,
    "judge_response_tokens": 10, "sleep_s": 0.2, "wake_s": 0.2, "train_s": 1.0,
}  # fmt: skip
"""Of emulated slots."""
JUDGE = {
    "name": "tutor", "model": {"path": "model"}, "template": "{{ prompt }}{{ response }}", "max_new_tokens": 40,
    "serving": {"batch_slots": 8}, "verdict": {"parser": "words", "words": {"y": 1, "n": 0}},
}  # fmt: skip
SMALL = {
    "flow": {"name": "trip", "steps": 10_000, "groups_per_step": 4, "samples_per_prompt": 2},
    "rollout": {"max_new_tokens": 8},
    "train": {"ranks": 1},
}
PLACED = {
    "flow": {"name": "trip", "steps": 10_000, "groups_per_step": 16, "samples_per_prompt": 2},
    "rollout": {"max_new_tokens": 80, "batch_slots": 8},
    "judges": [JUDGE],
    "reward": {"judge": "tutor"},
    "placement": {"policy": "swing", "train": 1, "reward": 1},
}


@dataclass(frozen=True)
class Process:
    """A process of the cluster. `argv`: its command line."""

    pid: int
    parent: int
    argv: tuple[str, ...]

    @property
    def is_daemon(self) -> bool:
        """Whether it is a node's controller."""
        return "--config" in self.argv and "--home" in self.argv

    def starts(self, role: str) -> bool:
        """Whether it supervises a worker of that role."""
        return any(Path(word).parent.name == "workers" and Path(word).name.startswith(f"{role}-") for word in self.argv)


class Cluster:
    """A local cluster of two nodes, whose processes are profiled."""

    def __init__(self, folder: Path, slots: str) -> None:
        self.folder = folder
        self.trips = folder / "trips"
        self.trips.mkdir()
        self._dumps: dict[int, int] = {}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GCORE_")}
        (folder / "law.json").write_text(json.dumps(LAW))
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (HOOK, put_on_path(), ROOT))), "GCORE_TRIPS": str(self.trips)}
        more = {"GCORE_EMULATED_LAW": str(folder / "law.json"), "OMP_NUM_THREADS": "1"}
        self._environment = {**kept, **paths, **more}
        self.gcore("up", "--home", "home", "--controllers", "2", "--slots", slots)

    def gcore(self, *words: str, **more: str) -> int:
        """Run the command to its end; its process id. Exits with what it said if it fails."""
        module, _, function = SCRIPTS["gcore"].partition(":")
        command = [sys.executable, "-c", f"from {module} import {function}; {function}()", *words]
        with subprocess.Popen(
            command, cwd=self.folder, env={**self._environment, **more}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            said, _ = process.communicate(timeout=PATIENCE_S)
        if process.returncode != 0:
            raise SystemExit(f"gcore {' '.join(words)} ended with {process.returncode}:\n{said}")
        return process.pid

    def processes(self) -> list[Process]:
        """The processes of the cluster that are alive."""
        found = []
        for file in self.trips.glob("*.json"):
            if file.stem.isdigit() and Path(f"/proc/{file.stem}").exists():
                tree = json.loads(file.read_text())
                found.append(Process(int(file.stem), tree["parent"], tuple(tree["argv"])))
        return found

    def daemons(self) -> list[Process]:
        """The controllers."""
        return [one for one in self.processes() if one.is_daemon]

    def workers(self) -> list[Process]:
        """The engines and ranks themselves, without their supervisors."""
        known = self.processes()
        supervisors = {one.pid for one in known if one.starts("rollout") or one.starts("train")}
        return [one for one in known if one.parent in supervisors]

    def entered(self, processes: Iterable[Process], *, flow: bool = True) -> Files:
        """The files that they entered since the call before. `flow`: with those that the job's flow entered."""
        asked = list(processes)
        for process in asked:
            self._dumps[process.pid] = self._dumps.get(process.pid, 0) + 1
            os.kill(process.pid, signal.SIGUSR1)
        found: Files = set()
        for process in asked:
            found |= self.dumped(process.pid, self._dumps[process.pid], flow=flow)
        return found

    def dumped(self, pid: int, number: int, *, flow: bool = True) -> Files:
        """The files of one dump of a process."""
        file = self.trips / f"{pid}-{number}.json"
        until(file.exists, f"process {pid} wrote nothing down")
        tree = json.loads(file.read_text())
        return {*tree["others"], *(tree["flow"] if flow else ())}

    def lines(self, name: str) -> list[Tree]:
        """The JSON lines of a file in the run's folder. A line that is being written is left out."""
        found = []
        for file in (self.folder / "home" / "runs").glob(f"*/{name}"):
            for line in file.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def until_step(self, step: int) -> None:
        """Wait until the step is committed."""
        until(
            lambda: any(one.get("step") == step for one in self.lines("metrics.jsonl")),
            f"step {step} was not committed",
        )

    def moves(self) -> int:
        """How often slots changed between rollout and the judge."""
        told = [one for one in self.lines("moves.jsonl") if one.get("move", {}).get("kind") == "split"]
        return len({one["number"] for one in told})


def until(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait for it. Exits with `otherwise` after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(otherwise)
        time.sleep(0.02)


@contextlib.contextmanager
def running(slots: str, job: Tree) -> Iterator[Cluster]:
    """A cluster with the spec `job.yaml`, and nothing submitted yet. It is stopped and removed at the end."""
    with tempfile.TemporaryDirectory(prefix="gcore-trips-") as name:
        folder = Path(name)
        make_tiny_model(folder / "model", seed=1)
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(30) for b in range(30)]
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
        spec = {"name": "trip", "model": {"path": "model"}, "data": {"path": "train.jsonl"}, **job}
        (folder / "job.yaml").write_text(yaml.safe_dump(spec))
        cluster = Cluster(folder, slots)
        try:
            yield cluster
        finally:
            cluster.gcore("down", "--home", "home")


def record_job() -> dict[str, Files]:
    """The trips of a job on two cores."""
    with running("cpu:2", SMALL) as cluster:
        cluster.entered(cluster.daemons())
        command = cluster.gcore("submit", "job.yaml", "--home", "home", GCORE_TRIPS_WHOLE="1")
        cluster.until_step(1)
        submission = cluster.dumped(command, 1) | cluster.entered(cluster.daemons())
        cluster.until_step(FIRST_STEP)
        workers = cluster.workers()
        cluster.entered([*cluster.daemons(), *workers])
        cluster.until_step(FIRST_STEP + STEPS)
        return {
            "submission": submission,
            "prompt": cluster.entered(cluster.daemons()),
            "sample": cluster.entered(workers),
        }


def record_placement() -> dict[str, Files]:
    """The trip of a placement decision."""
    with running("emulated:6", PLACED) as cluster:
        cluster.gcore("submit", "job.yaml", "--home", "home")
        cluster.until_step(FIRST_STEP)
        daemons, before = cluster.daemons(), cluster.moves()
        cluster.entered(daemons)
        until(lambda: cluster.moves() >= before + MOVES, f"{MOVES} moves were not made")
        return {"placement": cluster.entered(daemons, flow=False)}


def counts(files: Iterable[str]) -> dict[str, int]:
    """How many modules, in all and by package."""
    packages = [file.split("/", 1)[0] for file in files]
    found = {name: packages.count(name) for name in ("controllers", "placement", "gcore")}
    return {"all": len(packages), "controllers and placement": found["controllers"] + found["placement"], **found}


def record(names: Iterable[str]) -> Tree:
    """The trips: how many modules each enters, and which."""
    wanted = set(names)
    found: dict[str, Files] = {}
    if wanted & {"submission", "prompt", "sample"}:
        found |= record_job()
    if "placement" in wanted:
        found |= record_placement()
    return {
        name: {"counts": counts(files), "modules": sorted(files)} for name, files in found.items() if name in wanted
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("record",))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="prompt,submission,placement,sample", help="trips, with commas between")
    options = parser.parse_args()
    began = time.monotonic()
    trips = record(options.only.split(","))
    asked = ["git", "log", "-1", "--format=%H", "--", "gcore", "placement", "controllers"]
    newest = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    tree = {"commit": newest.stdout.strip(), "trips": trips}
    options.file.write_text(json.dumps(tree, indent=1) + "\n")
    for name, trip in trips.items():
        print(f"{name}: {trip['counts']}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
