"""One `gcore run` for a benchmark: in a folder of its own, to its end, with a clean audit; and what it has left there.

The cluster is ended however the run went, also where it failed, took too long or was interrupted, so that nothing of it runs beside
the next measurement. That is not among the seconds: they are those of the command alone. What the command says goes to a
file, and is shown only where the run did not succeed. What a benchmark makes of steps, moves and books is its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import monotonic, time
from typing import Any

from controllers import moves_file
from gcore.ledger import books_file
from gcore.ledger.books_file import BookLine
from gcore.ledger.placing import Move, MoveKind, Stay

GCORE = [sys.executable, "-m", "controllers.cli.main"]
SHOWN = 6000
"""Characters of what a run said, of one that did not succeed."""
Line = dict[str, Any]
Figures = dict[str, Any]
"""What a benchmark keeps of a run."""


@dataclass(frozen=True)
class Run:
    """One that succeeded with a clean audit. Times are seconds, as the run's own clock had them."""

    began: float
    """Since the epoch."""
    seconds: float
    """Of the command, with the cluster's start and end."""
    summary: dict[str, Any]
    events: list[Line]
    metrics: list[Line]
    move_lines: list[Line]
    """Of `moves.jsonl`, as they stand there, without what the job began with: what became of a move is a line more."""
    moves: list[Move]
    stays: list[Stay]
    """Stretches of steps between which nothing moved."""
    books: list[BookLine]
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
    """A home for a cluster, in a folder that holds nothing else. Both are gone afterwards, and so is whatever runs there."""
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
    """Run a spec with `settings` on a cluster of its own. `environment`: besides this process's.

    Raises SystemExit unless it succeeds, with a clean audit, within `limit_s`.
    """
    what = " ".join((spec.name, *settings))
    words = [str(spec), "--plain", "--controllers", str(controllers), "--slots", slots]
    words += [word for setting in settings for word in ("--set", setting)]
    with own_home() as home:
        log = home.parent / "run.log"
        began, began_wall = monotonic(), time()
        try:
            with log.open("wb") as said:
                done = subprocess.run(
                    [*GCORE, "run", *words, "--home", str(home)],
                    check=False,
                    stdout=said,
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
    """What stands in a run's folder."""
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
        moves=[move for move in moves_file.moves_in(folder / moves_file.NAME) if move.kind is not MoveKind.BEGIN],
        stays=moves_file.stays_in(folder / moves_file.NAME),
        books=list(books_file.lines_of(folder)),
    )


def alternating_pairs(
    count: int, base: tuple[str, Callable[[], Figures]], other: tuple[str, Callable[[], Figures]]
) -> list[dict[str, Figures]]:
    """Both sides `count` times, by their names. Which of them goes first changes from pair to pair.

    Prints of each pair how many times as fast the other side is, by their `seconds`.
    """
    pairs = []
    for number in range(count):
        found = {name: run() for name, run in ((other, base) if number % 2 else (base, other))}
        pairs.append({name: found[name] for name, _ in (base, other)})
        ratio = found[base[0]]["seconds"] / found[other[0]]["seconds"]
        print(f"pair {number + 1}/{count}: {ratio:.3f} times as fast", flush=True)
    return pairs


def lines_of(file: Path) -> list[Line]:
    """A file of JSON lines; none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-SHOWN:]
