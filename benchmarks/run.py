"""The command: `python -m benchmarks run NAME`, `report` and `check`. See `benchmarks`.

`run NAME` measures, writes the result, prints its table and renews the pages that show it. `run NAME --compare COMMIT` measures this tree
and that commit in alternating pairs instead. The other commit is checked out in a temporary folder and measures with its own benchmark, in the
same environment. The comparison covers the figures that both results have: for each pair this tree's figure divided by the other's, and
the median of all pairs with its spread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, Benchmark, Result, circumstances, read_result, spread, write_to

MODULES = {
    "demo": "learning",
    "judge": "learning",
    "calculator": "learning",
    "flows": "learning",
    "engine": "engine",
    "adapters": "engine",
    "trainer": "trainer",
    "grpo": "grpo_step",
    "checkpoints": "checkpoints",
    "memory": "memory",
    "media-memory": "media_memory",
    "rewards": "rewards",
    "startup": "startup",
    "idle": "startup",
    "control-plane": "control_plane",
    "submit": "control_plane",
    "issue": "rollout",
    "tails": "tails",
    "async": "rollout",
    "stream": "rollout",
    "placement": "placement_simulation",
    "placement-within": "placement_simulation",
    "placement-decisions": "placement_simulation",
    "placement-live": "placement_live",
    "placement-pictures": "placement_live",
    "placement-pairs": "placement_live",
    "sim": "protocol",
    "mutations": "protocol",
}
"""Every benchmark, and the module of this package that has it. Modules are imported when they are needed: some need packages of their own."""


def benchmark_named(name: str) -> Benchmark:
    """The benchmark of that name."""
    module = importlib.import_module(f"benchmarks.{MODULES[name]}")
    found: Benchmark = next(one for one in module.BENCHMARKS if one.name == name)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """The command. `words`: instead of the command line's."""
    given = list(sys.argv[1:] if words is None else words)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, write tables, check bounds.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="measure and write benchmarks/results")
    report = verbs.add_parser("report", help="write the tables of the documents from the results")
    report.add_argument("--check", action="store_true", help="only compare; fail if a page differs")
    report.add_argument("--plots", action="store_true", help="the plots of placement, too (needs gcore[simulate])")
    check = verbs.add_parser("check", help="measure some ratios again and compare all with their bounds")
    check.add_argument("--recorded", action="store_true", help="measure nothing: only the committed results")
    check.add_argument("--write", action="store_true", help="derive bounds.json from the committed results")
    check.add_argument("--measure", action="store_true", help="with --write: measure results/check.json first")
    check.add_argument(
        "--slowed",
        action="store_true",
        help="with planted slow-downs: every limit that is measured again must be missed",
    )
    check.add_argument(
        "--only", nargs="*", metavar="PART", help="measure these parts again: engine, trainer, control_plane, startup"
    )
    if given[:1] == ["run"] and len(given) > 1 and given[1] in MODULES:
        run.description = importlib.import_module(f"benchmarks.{MODULES[given[1]]}").__doc__
        run.formatter_class = argparse.RawDescriptionHelpFormatter
        benchmark = benchmark_named(given[1])
        add_options(run, benchmark)
        run_benchmark(benchmark, parser.parse_args(given), given[2:])
        return
    run.add_argument("name", choices=MODULES, metavar="NAME", help=", ".join(MODULES))
    arguments = parser.parse_args(given)
    if arguments.verb == "report":
        write_report(arguments)
    else:
        run_check(arguments)


def run_check(arguments: argparse.Namespace) -> None:
    """Exit with 0 if all bounds hold, otherwise with 1."""
    from benchmarks import bounds

    parts = tuple(bounds.LIVE) if arguments.only is None else arguments.only
    if arguments.write:
        bounds.write(parts=parts if arguments.measure else ())
    if arguments.slowed:
        raise SystemExit(not bounds.check_slowed(parts=parts))
    raise SystemExit(not bounds.check(parts=() if arguments.recorded or arguments.write else parts))


def add_options(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    """Those of every benchmark, and its own."""
    parser.add_argument("name", choices=[benchmark.name], metavar="NAME")
    what = "pairs, rounds or runs" if benchmark.pairs else "of --compare"
    parser.add_argument("--pairs", type=int, default=benchmark.pairs, help=f"{what} (default: %(default)s)")
    parser.add_argument("--compare", metavar="COMMIT", help="measure beside that commit, in alternating pairs")
    parser.add_argument("--out", type=Path, help=f"default: benchmarks/results/{benchmark.result}.json")
    benchmark.options(parser)


def run_benchmark(benchmark: Benchmark, arguments: argparse.Namespace, words: Sequence[str]) -> None:
    """Measure, write, print, renew pages."""
    if arguments.compare:
        compare(benchmark, arguments, words)
        return
    from benchmarks import report

    if arguments.out is None:
        arguments.out = RESULTS / f"{benchmark.result}.json"
    result = benchmark.measure(arguments, circumstances(*benchmark.packages))
    if result is None:
        return
    print(write_to(arguments.out, result))
    print(report.shown(benchmark.result, result))
    if arguments.out.resolve() == RESULTS / f"{benchmark.result}.json":
        report.write()
        benchmark.pictures(result)
    if wrong := benchmark.verdict(result):
        raise SystemExit(f"{benchmark.name}: {wrong}")
    if benchmark.exits_at_once:
        sys.stdout.flush()
        os._exit(0)


def write_report(arguments: argparse.Namespace) -> None:
    """Pages and pictures."""
    from benchmarks import report

    if arguments.check:
        if differing := report.outdated():
            raise SystemExit(f"{', '.join(map(str, differing))}: not what the results say; run `make bench-page`")
        return
    report.write()
    if arguments.plots:
        from benchmarks.placement_simulation import plot_placement

        plot_placement(read_result("placement"))


# Beside another commit ------------------------------------------------------------------------------------------------

COMPARISONS = ROOT / ".cache" / "benchmarks"
LEFT_OUT = ("load_before", "load_after", "law", "pairs")
"""Parts of a result that say nothing of either side."""
COUNTS = {"startup": "--runs", "demo": "--runs", "judge": "--runs"} | dict.fromkeys(
    ("grpo", "checkpoints", "rewards", "placement-live", "placement-pictures"), "--rounds"
)
"""Names of the option `--pairs` in commits whose benchmarks were single programs, where they differ."""


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
    """Of each figure that is on both sides of every pair, and differs in one: this tree's through the other's."""
    names = [name for name in pairs[0]["this"] if all(name in side for pair in pairs for side in pair.values())]
    return {
        name: spread([pair["this"][name] / pair["other"][name] for pair in pairs])
        for name in names
        if all(pair["other"][name] for pair in pairs)
        and any(pair["this"][name] != pair["other"][name] for pair in pairs)
    }
