"""What every benchmark uses: machine, commit and load; medians with their spread; alternating pairs; processes; whole runs.

A benchmark is a `Benchmark`: a function that measures and returns the result, which `run` writes to `results/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from time import monotonic, perf_counter, process_time, time
from typing import Any, ParamSpec, TypeVar

from controllers.planning import history as moves_file
from gcore.ledger.records import slot_accounting as books_file
from gcore.ledger.records.job import HoldPeriod, Move, MoveKind
from gcore.ledger.records.slot_accounting import AccountLine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "examples"
PREPARED = ROOT / ".cache" / "examples"
"""The examples that `gcore prepare` has made."""
GCORE = [sys.executable, "-m", "controllers.cli.main"]
LOG_TAIL = 6000
"""Characters of a failed run's log that are shown."""
Result = dict[str, Any]
"""The contents of a result file."""
Line = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Benchmark:
    """One entry of `python -m benchmarks run`."""

    name: str
    """As in `make bench-NAME`."""
    result: str
    """Written to `results/RESULT.json`."""
    measure: Callable[[argparse.Namespace, Result], Result | None]
    """Gets the options and the circumstances; returns the whole result, or None where nothing is to be written."""
    packages: tuple[str, ...] = ()
    """Their versions stand in the result."""
    pairs: int | None = None
    """Default of `--pairs`: pairs, rounds or runs. None: the benchmark has none."""
    options: Callable[[argparse.ArgumentParser], None] = lambda _: None
    """Adds the benchmark's own options."""
    verdict: Callable[[Result], str] = lambda _: ""
    """What is wrong with a result that was written; the command then fails."""
    pictures: Callable[[Result], None] = lambda _: None
    """Makes what a page shows of the result besides its tables."""
    exits_at_once: bool = False
    """This process joined a gloo world, whose threads may abort the interpreter at its end."""


# Circumstances and figures --------------------------------------------------------------------------------------------


def circumstances(*packages: str) -> Result:
    """Date, commit, machine and load of a measurement. `packages`: whose versions matter."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {_processor()}, Python {platform.python_version()}",
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {name: _version(name) for name in packages},
    }


def spread(values: Sequence[float], digits: int = 4) -> Result:
    """Median, least and most, and how many."""
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
        "count": len(values),
    }


def write_to(path: Path, result: Result) -> Path:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def read_result(name: str, folder: Path = RESULTS) -> Result:
    """The result of that name."""
    result: Result = json.loads((folder / f"{name}.json").read_text())
    return result


def alternating_pairs(
    count: int, base: tuple[str, Callable[[], Result]], other: tuple[str, Callable[[], Result]]
) -> list[dict[str, Result]]:
    """Both sides `count` times, by their names. The side that goes first changes from pair to pair.

    Prints of each pair how many times as fast the other side is, by their `seconds`.
    """
    pairs = []
    for number in range(count):
        found = {name: run() for name, run in ((other, base) if number % 2 else (base, other))}
        pairs.append({name: found[name] for name, _ in (base, other)})
        ratio = found[base[0]]["seconds"] / found[other[0]]["seconds"]
        print(f"pair {number + 1}/{count}: {ratio:.3f} times as fast", flush=True)
    return pairs


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


# Time -----------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began, self._busy, self._waited = perf_counter(), process_time(), _waiting_times()

    def spent(self) -> dict[str, float]:
        """`seconds` on the clock; `own_seconds`: without those in which a thread was ready and other processes had the cores; `cpu_seconds`.

        What other processes do lengthens the first and not the second, and a sleep is in both.
        """
        seconds = perf_counter() - self._began
        waited = max(now - self._waited.get(thread, 0.0) for thread, now in _waiting_times().items())
        return {
            "seconds": seconds,
            "own_seconds": seconds - waited,
            "cpu_seconds": process_time() - self._busy,
        }


def _waiting_times() -> dict[str, float]:
    """Seconds that each thread of this process has been ready without a core, by its id."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


def slowed(run: Callable[P, R]) -> Callable[P, R]:
    """A function that takes twice as long: it computes for as long again. With it a measurement shows that its bound notices."""

    def twice(*words: P.args, **named: P.kwargs) -> R:
        began = process_time()
        found = run(*words, **named)
        until = 2 * process_time() - began
        while process_time() < until:
            pass
        return found

    return twice


# Processes ------------------------------------------------------------------------------------------------------------

TICKS = os.sysconf("SC_CLK_TCK")
MB = 1e6


@dataclass(frozen=True)
class Reading:
    """A process at one moment, as the kernel counts it. Memory in MB (10^6 bytes), processor time in seconds."""

    rss: float
    pss: float
    anonymous: float
    processor_s: float
    switches: int
    threads: int


def read_process(pid: int) -> Reading:
    """Raises OSError if the process is gone."""
    proc = Path(f"/proc/{pid}")
    rollup = _fields(proc / "smaps_rollup")
    stat = (proc / "stat").read_text().rpartition(")")[2].split()
    tasks = [_fields(task / "status") for task in (proc / "task").iterdir()]
    switches = sum(t["voluntary_ctxt_switches"] + t["nonvoluntary_ctxt_switches"] for t in tasks)
    return Reading(
        rss=round(rollup["Rss"] * 1024 / MB, 1),
        pss=round(rollup["Pss"] * 1024 / MB, 1),
        anonymous=round(rollup["Anonymous"] * 1024 / MB, 1),
        processor_s=(int(stat[11]) + int(stat[12])) / TICKS,
        switches=switches,
        threads=len(tasks),
    )


def _fields(file: Path) -> dict[str, int]:
    found = {}
    for line in file.read_text().splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def cpu_environment(threads: int = 1) -> dict[str, str]:
    """This process's environment for a process that computes: so many threads that wait passively, no GPU, no progress bars, no downloads."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class Child:
    """A module of this package as a process. It reads lines of JSON from its input and answers on descriptor 3.

    Its standard output is not used, so that what libraries print does not disturb the answers.
    """

    def __init__(self, module: str, *words: str, threads: int = 1) -> None:
        out, theirs = os.pipe()
        command = [sys.executable, "-m", f"benchmarks.{module}", *words]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3>&{theirs}', "bash", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=cpu_environment(threads),
            pass_fds=(theirs,),
        )
        os.close(theirs)
        self._lines = os.fdopen(out)

    def send(self, **message: Any) -> None:
        """One line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Result:
        """Its next line. Raises SystemExit if it has ended."""
        line = self._lines.readline()
        if not line:
            raise SystemExit("a child process ended; its error stands above")
        found: Result = json.loads(line)
        return found

    def end(self) -> None:
        """It ends with its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._lines.close()


def send_parent(**message: Any) -> None:
    """In a `Child`: one line of answer."""
    os.write(3, json.dumps(message).encode() + b"\n")


# Whole runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A `gcore run` that succeeded with a clean audit. Times are seconds on the run's own clock."""

    began: float
    """Since the epoch."""
    seconds: float
    """Of the command, with the cluster's start and end."""
    summary: dict[str, Any]
    events: list[Line]
    metrics: list[Line]
    move_lines: list[Line]
    """Lines of `moves.jsonl` without the begin line. The outcome of a move is a line of its own."""
    moves: list[Move]
    stays: list[HoldPeriod]
    """Stretches of steps between which nothing moved."""
    books: list[AccountLine]
    """Node by node."""

    @property
    def step_times(self) -> list[float]:
        """When each step was committed."""
        return [event["time"] for event in self.events if event["kind"] == "step"]

    @property
    def step_seconds(self) -> list[float]:
        """From each commit to the next."""
        return [later - earlier for earlier, later in pairwise(self.step_times)]

    @property
    def stats(self) -> list[dict[str, Any]]:
        """Each step's statistics."""
        return [event["data"]["stats"] for event in self.events if event["kind"] == "step"]

    @property
    def curve(self) -> list[list[float]]:
        """Steps and the held-out accuracy after them."""
        found = {line["step"]: line["metrics"]["accuracy"] for line in self.metrics if line["kind"] == "eval"}
        return [[step, round(accuracy, 4)] for step, accuracy in sorted(found.items())]


@contextmanager
def own_home() -> Iterator[Path]:
    """A home for a cluster, in a new folder. At the end the cluster is stopped and the folder removed."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        try:
            yield home
        finally:
            subprocess.run([*GCORE, "down", "--home", str(home)], check=False, stdout=subprocess.DEVNULL, cwd=folder)


def finished_run(
    spec: Path,
    *settings: str,
    controllers: int = 2,
    slots: str = "cpu:2",
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> Run:
    """Run a spec with `settings` on a cluster of its own. `environment`: added to this process's.

    The cluster is stopped in every case, so that nothing runs beside the next measurement; that is not among the seconds.
    Raises SystemExit, with the end of the command's log, unless the run succeeds with a clean audit within `limit_s`.
    """
    what = " ".join((spec.name, *settings))
    words = [str(spec), "--plain", "--controllers", str(controllers), "--slots", slots]
    words += [word for setting in settings for word in ("--set", setting)]
    with own_home() as home:
        log = home.parent / "run.log"
        began, began_wall = monotonic(), time()
        try:
            with log.open("wb") as output:
                done = subprocess.run(
                    [*GCORE, "run", *words, "--home", str(home)],
                    check=False,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=home.parent,
                    env={**os.environ, **(environment or {})},
                    timeout=limit_s,
                )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{what}: not at its end after {limit_s} s\n{_end_of(log)}") from None
        seconds = monotonic() - began
        if done.returncode:
            raise SystemExit(f"{what}: ended with {done.returncode}\n{_end_of(log)}")
        (folder,) = home.glob("runs/*")
        run = read_run(folder, began_wall, seconds)
    state, audit = run.summary["state"], run.summary["audit"]
    if state != "SUCCEEDED" or audit != "clean":
        raise SystemExit(f"{what}: {state} ({run.summary['reason']}), audit {audit}")
    return run


def read_run(folder: Path, began: float, seconds: float) -> Run:
    """Read a run's folder."""
    return Run(
        began=began,
        seconds=seconds,
        summary=json.loads((folder / "summary.json").read_text()),
        events=lines_of(folder / "events.jsonl"),
        metrics=lines_of(folder / "metrics.jsonl"),
        move_lines=[
            line
            for line in lines_of(folder / moves_file.NAME)
            if "move" in line and line["move"]["kind"] != MoveKind.BEGIN
        ],
        moves=[move for move in moves_file.read_moves(folder / moves_file.NAME) if move.kind is not MoveKind.BEGIN],
        stays=moves_file.read_stays(folder / moves_file.NAME),
        books=list(books_file.read_lines(folder)),
    )


def lines_of(file: Path) -> list[Line]:
    """A file of JSON lines; empty if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def write_sums(file: Path, first: range, second: range) -> None:
    """Prompts for jobs on emulated devices: sums, with their answers."""
    lines = (json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in first for b in second)
    file.write_text("\n".join(lines) + "\n")


def write_spec(file: Path, job: Mapping[str, Any]) -> Path:
    """A spec file (JSON is YAML)."""
    file.write_text(json.dumps(job))
    return file


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]
