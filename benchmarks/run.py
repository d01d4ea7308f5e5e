"""The command: `python -m benchmarks run NAME`, `report` and `check`. See `benchmarks`.

`run NAME` measures, writes the result, prints its table and renews the pages that show it. `run NAME --compare COMMIT` measures this tree
and that commit in alternating pairs instead, and prints how their figures are to each other.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import RESULTS, Benchmark, circumstances, read_result, write_to

MODULES = {
    "demo": "learning",
    "judge": "learning",
    "calculator": "learning",
    "flows": "learning",
    "engine": "engine",
    "trainer": "trainer",
    "grpo": "grpo_step",
    "checkpoints": "checkpoints",
    "copies": "checkpoints",
    "memory": "memory",
    "rewards": "rewards",
    "startup": "startup",
    "idle": "startup",
    "control-plane": "control_plane",
    "submit": "control_plane",
    "issue": "rollout",
    "tails": "rollout",
    "async": "rollout",
    "stream": "rollout",
    "placement": "placement.simulator",
    "placement-within": "placement.simulator",
    "placement-decisions": "placement.decisions",
    "placement-live": "placement.live",
    "placement-pairs": "placement.live",
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
        from benchmarks import bounds

        if arguments.write:
            bounds.write(measure=arguments.measure)
        raise SystemExit(0 if bounds.check(measure=not arguments.recorded and not arguments.write) else 1)


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
        from benchmarks import comparison

        comparison.compare(benchmark, arguments, words)
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
        from benchmarks.pictures import plot_placement

        plot_placement(read_result("placement"))
