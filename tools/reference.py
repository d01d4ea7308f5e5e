"""Record the behaviour that pure moves of modules must not change, and compare with the record.

    python -m tools.reference record FILE [--seeds 200] [--processes 2]
    python -m tools.reference compare FILE [--seeds 20] [--only simulations,help,json,metrics]

The record has the history of each seed of every kind of simulated story, with all writes to the store. It has the `--help` of every
command of the console scripts, and the answer of every command with `-o json` for a recorded job. It has every metric with type and labels.
Both commands resume after an interruption if the sources are the same. `compare` prints each difference and exits with 1 if there is one.

A few stories have more than one history: when a group of tasks is cancelled, asyncio uses the order of their addresses. A story that
differs is played again, `PLAYS` times at most, and counts as equal if one of these histories is the recorded one.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools import reference_answers, reference_stories

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 5
"""Seeds that a process plays before it says so."""
CHUNKS_OF_A_PROCESS = 10
"""Then it is replaced, because its memory grows."""
LONG_JOB = "long job"
LONG_JOB_STEPS = 1200
PLAYS = 16
MOST_AGAIN = 20
"""Stories that are played again: if more differ, the cause is a change."""
SHOWN_LINES = 12
"""Of one difference."""

Tree = dict[str, Any]
SECTIONS: dict[str, Callable[[], Tree]] = {
    "help": reference_answers.helps,
    "json": reference_answers.answers,
    "metrics": reference_answers.metrics,
}


def sources() -> str:
    """A digest of all that a recording depends on."""
    digest = hashlib.sha256()
    for folder in ("gcore", "placement", "controllers", "tests/support", "tools"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def commit() -> str:
    """The commit that is checked out."""
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def load(file: Path) -> Tree:
    """What is recorded in `file`, or an empty recording of the present sources."""
    if file.exists():
        tree: Tree = json.loads(file.read_text())
        return tree
    return {"commit": commit(), "sources": sources(), "simulations": {}, "took_s": {}}


def save(file: Path, tree: Tree) -> None:
    """Write a recording, whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(tree, indent=1, sort_keys=True))
    part.replace(file)


def record(file: Path, seeds: list[int], processes: int, only: list[str]) -> Tree:
    """Add to the recording in `file` what it lacks. Exits if other sources were recorded there."""
    tree = load(file)
    if tree["sources"] != sources():
        raise SystemExit(f"{file} is a recording of other sources ({tree['commit']}). Delete it or name another file.")
    for section, call in SECTIONS.items():
        if section in only and section not in tree:
            began = time.monotonic()
            tree[section] = call()
            tree["took_s"][section] = round(time.monotonic() - began, 1)
            print(f"{section}: {len(tree[section])} entries, {tree['took_s'][section]} s", flush=True)
            save(file, tree)
    if "simulations" in only:
        _record_simulations(file, tree, seeds, processes)
    return tree


def _record_simulations(file: Path, tree: Tree, seeds: list[int], processes: int) -> None:
    histories: Tree = tree["simulations"]
    if LONG_JOB not in histories:
        histories[LONG_JOB] = asdict(reference_stories.long_job(LONG_JOB_STEPS))
    left = [seed for seed in seeds if key(next(reversed(reference_stories.STORIES)), seed) not in histories]
    chunks = [left[start : start + CHUNK] for start in range(0, len(left), CHUNK)]
    began, before = time.monotonic(), tree["took_s"].get("simulations", 0.0)
    for found in everywhere(chunks, processes):
        for seed, stories in found.items():
            histories |= {key(kind, seed): asdict(story) for kind, story in stories.items()}
        took = time.monotonic() - began
        tree["took_s"]["simulations"] = round(before + took, 1)
        save(file, tree)
        done = (len(histories) - 1) // len(reference_stories.STORIES)
        print(f"simulations: {done} of {len(seeds)} seeds, {took:.0f} s", flush=True)
    save(file, tree)


def key(kind: str, seed: int) -> str:
    """Of one story."""
    return f"{kind}, seed {seed}"


def everywhere(chunks: list[list[int]], processes: int) -> Iterator[dict[int, dict[str, reference_stories.Played]]]:
    """Play the chunks on so many processes, which are replaced after some chunks."""
    lot = CHUNKS_OF_A_PROCESS * processes
    for start in range(0, len(chunks), lot):
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as executor:
            yield from executor.map(reference_stories.play, chunks[start : start + lot])


def play_again(file: Path, before: Tree, now: Tree, processes: int) -> None:
    """Play the stories that differ again, each until its history is the recorded one."""
    olds, news = before["simulations"], now["simulations"]
    differ = [one for one, new in news.items() if one in olds and new["digest"] != olds[one]["digest"]]
    if len(differ) > MOST_AGAIN:
        print(f"simulations: {len(differ)} stories differ; only up to {MOST_AGAIN} are played again", flush=True)
        return
    for name in differ:
        kind, _, seed = name.rpartition(", seed ")
        for _ in range(PLAYS // processes if kind else 0):
            with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as executor:
                plays = [executor.submit(reference_stories.play_one, kind, int(seed)) for _ in range(processes)]
                found = [play.result() for play in plays]
            equal = next((one for one in found if one.digest == olds[name]["digest"]), None)
            if equal is not None:
                print(f"simulations: {name} has several histories, the recorded one among them", flush=True)
                news[name] = asdict(equal)
                save(file, now)
                break


def differences(before: Tree, now: Tree, seeds: list[int], only: list[str]) -> Iterator[str]:
    """Each difference between two recordings."""
    if "simulations" in only:
        wanted = [LONG_JOB, *(key(kind, seed) for kind in reference_stories.STORIES for seed in seeds)]
        for name in wanted:
            yield from _history_differs(name, before["simulations"].get(name), now["simulations"].get(name))
    for section in SECTIONS:
        if section in only:
            old, new = before.get(section, {}), now.get(section, {})
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    yield f"{section}: {name}\n{_diff(_lines(old.get(name)), _lines(new.get(name)))}"


def _history_differs(name: str, old: Tree | None, new: Tree | None) -> Iterator[str]:
    if old is None or new is None:
        yield f"simulations: {name}: not recorded {'before' if old is None else 'now'}"
    elif old["digest"] != new["digest"]:
        before, now = reference_stories.text_of(old["history"]), reference_stories.text_of(new["history"])
        same = "the histories are equal; what was written to the store differs"
        yield f"simulations: {name}\n{_diff(before, now) if before != now else same}"


def _lines(found: Any) -> list[str]:
    if found is None:
        return ["(absent)"]
    return found.splitlines() if isinstance(found, str) else json.dumps(found, indent=1, sort_keys=True).splitlines()


def _diff(before: list[str], now: list[str]) -> str:
    lines = list(difflib.unified_diff(before, now, "before", "now", n=2, lineterm=""))[2:]
    more = [f"... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
    return "\n".join([*lines[:SHOWN_LINES], *more])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, help="how many; record: 200, compare: all that were recorded")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", default=",".join(("simulations", *SECTIONS)), help="sections, with commas between")
    options = parser.parse_args()
    only = options.only.split(",")
    if options.what == "record":
        record(options.file, list(range(options.seeds or 200)), options.processes, only)
        return
    if not options.file.exists():
        raise SystemExit(f"there is no recording {options.file}. Make one with `record`.")
    before = load(options.file)
    seeds = sorted({int(name.rpartition(" ")[2]) for name in before["simulations"] if name != LONG_JOB})
    seeds = seeds[: options.seeds]
    beside = options.file.with_name(f"{options.file.name}.{sources()[:12]}.now")
    now = record(beside, seeds, options.processes, only)
    if "simulations" in only:
        play_again(beside, before, now, options.processes)
    found = list(differences(before, now, seeds, only))
    print("\n\n".join(found) if found else "", end="\n" if found else "")
    print(f"{len(found)} differences from {before['commit'][:10]}: {len(seeds)} seeds; {', '.join(only)}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
