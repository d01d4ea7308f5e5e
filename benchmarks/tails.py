"""What over-provision, the longest first and weighing by expected tokens do to a step's time: pairs in made-up time.

    make bench-tails                               benchmarks/results/tails.json, a table of docs/performance.md
    ... BENCH_ARGS="--pairs 1 --out /tmp/tails.json"

Production's controllers over emulated engines (`tails_cluster`), whose response lengths are the field's: half below 440 tokens, one
in a hundred above 2,400, up to 15 times the median. A pair is the same seed without and with a setting: the same prompts, in
each data epoch again, the same lengths, engines and messages; so the ratio of a pair is the setting's, and the machine's load
has no part in it. The first data epoch is not counted: of a prompt that never came nothing can be known.

Whether a group is better split over engines is measured beside it, each response going to the engine that owes least. gcore does
not do that (docs/adr/0032).

And how well lengths are expected: the mean absolute error of `gcore.rollout.lengths` beside that of the source's mean, on draws of
the same law, from so many finished siblings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from measured import RESULTS, circumstances, spread, write_to

PAIRS = 5
WARM, STEPS, PROMPTS = 4, 12, 64
"""A data epoch is as long as the steps that are not counted."""
FEW_ROWS, MANY_ROWS = 8, 64
"""Of each engine: four responses for each row, and a row for each response."""
LIKENESS = (0.15, 0.4, 0.7, 0.93)
"""The field's correlations within a prompt."""
ORDER, BALANCE = {"order": "longest_first"}, {"balance": "tokens"}


@dataclass(frozen=True)
class Case:
    """What is compared with what."""

    mechanism: str
    regime: str
    off: dict[str, Any]
    on: dict[str, Any]
    story: dict[str, Any] = field(default_factory=dict)
    split: bool = False
    """Whether, with it, each response goes to an engine of its own choice."""


def cases() -> list[Case]:
    """All of them."""
    found = []
    for staleness, over, filtered in ((1, 1.5, 0.0), (1, 2.0, 0.0), (2, 3.0, 0.0), (1, 2.0, 0.5)):
        regime = f"staleness {staleness}, {filtered:.0%} filtered: {over:g} times beside 1"
        off, on = ({"staleness": staleness, "over_provision": times} for times in (1.0, over))
        found.append(Case("over_provision", regime, off, on, {"rows": MANY_ROWS, "filter_rate": filtered}))
    for rows, likeness in ((FEW_ROWS, 0.4), (FEW_ROWS, 0.93), (MANY_ROWS, 0.4)):
        regime = f"{'4 responses a row' if rows == FEW_ROWS else 'a row for each'}, likeness {likeness:g}"
        story = {"rows": rows, "likeness": likeness}
        found.append(Case("order: longest_first", regime, {}, ORDER, story))
        found.append(Case("balance: tokens", regime, {}, BALANCE, story))
        found.append(Case("both", regime, {}, ORDER | BALANCE, story))
        found.append(Case("groups split over engines", regime, {}, {}, story, split=True))
    return found


@dataclass(frozen=True)
class Wanted:
    """A run. `settings`: of its story and of the section `rollout`, as JSON: what is the same is played once."""

    seed: int
    settings: str
    split: bool


def wanted(case: Case, seed: int, *, on: bool) -> Wanted:
    """One side of a pair."""
    rollout = case.on if on else case.off
    return Wanted(seed, json.dumps(case.story | {"rollout": rollout}, sort_keys=True), on and case.split)


def step_seconds(run: Wanted) -> float:
    """Made-up seconds of a counted step, in the mean."""
    logging.disable(logging.CRITICAL)
    from tails_cluster import play, story_of

    from controllers.generating import Generating

    settings = {"engines": 2, "groups": 16, "prompts": PROMPTS, "steps": STEPS} | json.loads(run.settings)
    whole = Generating.generate

    async def each(self: Generating, version: Any, prompts: Any, params: Any, seeds: Any, rid: str, *more: Any) -> Any:
        asked = [
            whole(self, version, [prompt], params, (one,), f"{rid}/{place}", *more)
            for place, (prompt, one) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return tuple(sample for made in await asyncio.gather(*asked) for sample in made)

    with mock.patch.object(Generating, "generate", each if run.split else whole):
        commits = play(story_of(run.seed, **settings)).commits
    return (commits[-1] - commits[WARM - 1]) / (len(commits) - WARM)


def measure(pairs: int, processes: int) -> list[dict[str, Any]]:
    """Every case."""
    rows, seeds = [], range(1, pairs + 1)
    with ProcessPoolExecutor(processes) as pool:
        sides = {wanted(case, seed, on=on): None for case in cases() for seed in seeds for on in (False, True)}
        begun = {run: pool.submit(step_seconds, run) for run in sides}
        for case in cases():
            off, on = ([begun[wanted(case, seed, on=on)].result() for seed in seeds] for on in (False, True))
            row = {
                "mechanism": case.mechanism,
                "regime": case.regime,
                "off_s": spread(off, 1),
                "on_s": spread(on, 1),
                "ratio": spread([after / before for before, after in zip(off, on, strict=True)], 3),
            }
            print(f"{case.mechanism}, {case.regime}: {row['ratio']}", flush=True)
            rows.append(row)
    return rows


def expectations(draws: int = 3000) -> list[dict[str, Any]]:
    """How far expectations are off beside the source's mean, by likeness and the number of finished siblings."""
    from gcore.rollout.lengths import Siblings, SourceLengths, expected

    chance, rows = random.Random(1), []

    def group(likeness: float, count: int) -> list[int]:
        common = chance.gauss(0.0, 1.0)
        own = [math.sqrt(likeness) * common + math.sqrt(1.0 - likeness) * chance.gauss(0.0, 1.0) for _ in range(count)]
        return [min(max(round(440 * math.exp(0.73 * deviation)), 1), 6600) for deviation in own]

    for likeness in LIKENESS:
        for siblings in (1, 4, 7):
            missed, by_mean = [], []
            for _ in range(5):
                recent = [group(likeness, 8) for _ in range(64)]
                source = SourceLengths.of(recent)
                mean = statistics.fmean(length for one in recent for length in one)
                for _ in range(draws // 5):
                    *others, own = group(likeness, siblings + 1)
                    missed.append(abs(own - expected(source, Siblings.of(source, others), 0, 6600)))
                    by_mean.append(abs(own - mean))
            ratio = statistics.fmean(missed) / statistics.fmean(by_mean)
            rows.append({"likeness": likeness, "siblings": siblings, "error_beside_the_mean": round(ratio, 3)})
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--processes", type=int, default=1, help="runs at once; they do not change what comes out")
    parser.add_argument("--out", type=Path, default=RESULTS / "tails.json")
    arguments = parser.parse_args()
    sizes = {
        "pairs": arguments.pairs,
        "controllers": 2,
        "engines": 4,
        "groups": 16,
        "samples": 8,
        "steps_counted": STEPS - WARM,
    }
    what = "production's controllers, emulated engines, made-up time"
    result = circumstances() | {"what": what} | sizes
    result |= {"cases": measure(arguments.pairs, arguments.processes), "expectations": expectations()}
    print(write_to(arguments.out, result))


if __name__ == "__main__":
    main()
