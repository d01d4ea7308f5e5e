"""A benchmark of this tree beside the same of another commit, in alternating pairs: `python -m benchmarks run NAME --compare COMMIT`.

The other commit is checked out in a temporary folder and measures with its own benchmark, in the same environment. What is compared are the
figures that both results have: of each pair this tree's figure through the other's, and of all pairs the median with its spread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Benchmark, Result, circumstances, spread, write_to

COMPARISONS = ROOT / ".cache" / "benchmarks"
LEFT_OUT = ("load_before", "load_after", "law", "pairs")
"""Parts of a result that say nothing of either side."""
COUNTS = {"startup": "--runs", "demo": "--runs", "judge": "--runs", "copies": "--starts"} | dict.fromkeys(
    ("grpo", "checkpoints", "rewards", "placement-live"), "--rounds"
)
"""What the option `--pairs` was called in commits whose benchmarks were single programs, where it was another word."""


def compare(benchmark: Benchmark, arguments: argparse.Namespace, words: Sequence[str]) -> None:
    """Measure pairs, print and write."""
    count = arguments.pairs or 3
    result = circumstances(*benchmark.packages) | {"benchmark": benchmark.name, "beside": arguments.compare}
    pairs: list[dict[str, dict[str, float]]] = []
    with checked_out(arguments.compare) as other:
        for number in range(count):
            sides = {"this": ROOT, "other": other}
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            found = {side: figures(measured(sides[side], benchmark, own_words(words))) for side in order}
            pairs.append(found)
            print(f"pair {number + 1}/{count}: measured", flush=True)
    result["ratios"] = ratios(pairs)
    result["pairs"] = pairs
    width = max(map(len, result["ratios"]), default=0)
    for name, ratio in result["ratios"].items():
        print(f"{name:{width}}  {ratio['median']:.3f} ({ratio['least']:.3f}-{ratio['most']:.3f})")
    print(
        f"this tree through {arguments.compare}: {write_to(arguments.out or COMPARISONS / f'{benchmark.name}.json', result)}"
    )


def own_words(words: Sequence[str]) -> list[str]:
    """The options that both sides get: not those of the comparison itself."""
    left, rest = list(words), []
    while left:
        word = left.pop(0)
        if word in ("--compare", "--pairs", "--out"):
            left = left[1:]
        elif not word.startswith(("--compare=", "--pairs=", "--out=")):
            rest.append(word)
    return rest


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """That commit in a folder of its own, with what is prepared here."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(folder), commit], check=True, capture_output=True)
        try:
            if (ROOT / ".cache").exists():
                (folder / ".cache").symlink_to((ROOT / ".cache").resolve())
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)


def measured(root: Path, benchmark: Benchmark, words: Sequence[str]) -> Result:
    """One pair (round, run) of the benchmark of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    if (root / "benchmarks" / "run.py").exists():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            count = ["--pairs", "1"] if benchmark.pairs else []
            command = [sys.executable, "-m", "benchmarks", "run", benchmark.name, *count, *words, "--out", str(out)]
            return _ran(command, root, environment, out)
    out = root / "benchmarks" / "results" / f"{benchmark.result}.json"
    out.unlink(missing_ok=True)
    count = [COUNTS.get(benchmark.name, "--pairs"), "1"] if benchmark.pairs else []
    command = [sys.executable, f"benchmarks/{benchmark.result}.py", *count, *words]
    return _ran(command, root, environment, out)


def _ran(command: Sequence[str], root: Path, environment: dict[str, str], out: Path) -> Result:
    done = subprocess.run(command, cwd=root, env=environment, check=False, capture_output=True, text=True)
    if not out.is_file():
        raise SystemExit(f"{' '.join(command)} in {root}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    result: Result = json.loads(out.read_text())
    return result


def figures(result: Any, name: str = "") -> dict[str, float]:
    """The figures of a result by the path to each; of a spread its median."""
    if isinstance(result, bool):
        return {}
    if isinstance(result, int | float):
        return {name: float(result)}
    if isinstance(result, dict):
        if "median" in result:
            return figures(result["median"], name)
        parts = {key: value for key, value in result.items() if key not in LEFT_OUT}
    elif isinstance(result, list) and all(isinstance(one, dict) for one in result):
        parts = {f"{number} {one.get('case', '')}".strip(): one for number, one in enumerate(result)}
    else:
        return {}
    found: dict[str, float] = {}
    for key, value in parts.items():
        found |= figures(value, f"{name} / {key}" if name else key)
    return found


def ratios(pairs: Sequence[dict[str, dict[str, float]]]) -> dict[str, Result]:
    """Of each figure that is on both sides of every pair: this tree's through the other's."""
    names = [name for name in pairs[0]["this"] if all(name in side for pair in pairs for side in pair.values())]
    return {
        name: spread([pair["this"][name] / pair["other"][name] for pair in pairs])
        for name in names
        if all(pair["other"][name] for pair in pairs)
    }
