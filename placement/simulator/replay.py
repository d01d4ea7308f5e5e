"""Turn a recorded run into a simulated job, to see how it would have run under another policy or on other slots.

The run folder has three inputs: `metrics.jsonl` (each step's mean length, tokens and seconds), `books/` (the work of
engines and slots) and `samples/` (the lengths of recorded responses). Engine and training speeds are fitted as a policy
would fit them.

A simulated step has as many responses as the recorded one, including the filtered ones, which were generated and judged
too. Only some trained responses are recorded individually; the other lengths are resampled from them and scaled to the
recorded means. Steps without recorded samples get random lengths with the spread of the other steps. The same run
always gives the same job. Only the mean judgement length is known.

The records do not show the speed of an engine with more requests than it ever had (the fitted line is extrapolated),
nor differences between slots (all are assumed to be equal).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import ValidationError

from gcore.errors import UsageError, explain_os_errors
from gcore.ledger.records.slot_accounting import AccountLine, EngineSums, read_lines, sum_engines
from gcore.observability import samples as folder
from gcore.system.files import parse_object
from gcore.types import Version
from placement.laws import Floats, fit_decode_law, fit_train_law
from placement.measurements import EngineSpeed, MeasuredStep
from placement.simulator.job import SimulatedJob, SimulatedWorkload
from placement.simulator.scenario import (
    MOST_RESPONSES,
    Scenario,
    ScenarioEngine,
    ScenarioJudging,
    ScenarioLengths,
    ScenarioTraining,
    scenario_problem,
)
from placement.slots import SINGLE, ReplicaSizes, Split

LEAST_STEPS = 4
"""Minimum number of recorded steps, without the skipped ones."""

SKIPPED = 2
"""Number of first steps that are skipped: engines and ranks start in them."""

NEEDED = {"seconds", "tokens", "response_length"}
"""Metrics that a recorded step must have."""

MOST_NUMBER = 1e9
"""Largest recorded value of a metric that is accepted."""

MOST_FILTERED = 0.99
"""Maximum share of a step's responses that count as filtered."""

SPREAD = 0.8
"""Assumed standard deviation of response lengths relative to their mean, if no sample was recorded."""


@dataclass(frozen=True)
class ReplayScenario:
    """A recorded run as input of the simulator.

    `steps`: work of each recorded step. `taken_s`: its recorded seconds. `trained_on`: number of slots with train
    ranks. `lend_s`: median seconds of the run's role changes of slots; None: there was none.
    """

    scenario: Scenario
    steps: tuple[SimulatedWorkload, ...]
    taken_s: tuple[float, ...]
    trained_on: tuple[int, ...]
    lend_s: float | None


class ReplayedJob(SimulatedJob):
    """A simulated job whose steps have the lengths of a recorded run."""

    def __init__(self, replay: ReplayScenario, seed: int) -> None:
        super().__init__(replay.scenario, seed)
        self.work = cache(lambda step: replay.steps[step])


@dataclass(frozen=True)
class _Step:
    """A recorded step: its metrics, and the slot accounts of all nodes."""

    version: Version
    metrics: Mapping[str, float]
    books: tuple[AccountLine, ...]

    def engines(self, pool: str) -> EngineSums:
        """Return the sums of the pool's engines over all nodes."""
        return sum_engines(line.book for line in self.books).get(pool, EngineSums())

    @property
    def trained(self) -> int | None:
        """Number of trained responses; None if not recorded."""
        samples = self.metrics.get("samples")
        return None if samples is None else min(max(int(samples), 1), MOST_RESPONSES)

    @property
    def filtered(self) -> float:
        """Share of the responses that were generated and not trained on."""
        return min(self.metrics.get("filter_rate", 0.0), MOST_FILTERED)

    @property
    def mean_length(self) -> float:
        """Mean tokens of all responses."""
        return max(self.metrics.get("response_length_before_filter", self.metrics["response_length"]), 1.0)

    @property
    def trained_on(self) -> int:
        """Number of slots on which train ranks worked; 1 if no account shows any."""
        return len({(line.node, slot) for line in self.books for slot in _slots_at(line, "busy train")}) or 1


def read_run(
    run_dir: Path, *, slots: int | None = None, staleness: int = 0, sizes: ReplicaSizes = SINGLE
) -> ReplayScenario:
    """Read the run in this folder. `slots`: number of slots of the simulated job, if different from the run. `sizes`:
    slots per engine in the run. Raises UsageError if the folder cannot be read or has too few steps."""
    with explain_os_errors("cannot read the run's folder", UsageError, where=run_dir):
        steps = _steps(run_dir)[SKIPPED:]
        drawn = _lengths(run_dir, steps)
    if len(steps) < LEAST_STEPS:
        raise UsageError(
            f"{run_dir} has slot accounts of {len(steps)} steps after the first {SKIPPED}; a replay needs at least {LEAST_STEPS}",
            fix="Choose a longer run, made by a gcore version that records slot accounts",
        )
    work = tuple(_workload(step, lengths) for step, lengths in zip(steps, drawn, strict=True))
    there = max(sum(line.book.slots for line in step.books) for step in steps)
    try:
        scenario = _scenario(run_dir, steps, work, slots or there, staleness, sizes)
    except ValidationError as error:
        raise UsageError(
            f"the run's folder does not describe a valid job: {scenario_problem(error)}", where=str(run_dir)
        ) from error
    return ReplayScenario(
        scenario,
        work,
        tuple(step.metrics["seconds"] for step in steps),
        tuple(step.trained_on for step in steps),
        _switch_s(steps),
    )


def _steps(run_dir: Path) -> list[_Step]:
    """List the steps that have metrics and accounts, in order. If a step was repeated after a rollback, only its newest
    run counts."""
    booked: dict[Version, list[AccountLine]] = {}
    for line in read_lines(run_dir):
        booked.setdefault(line.book.version, []).append(line)
    chain: dict[int, _Step] = {}
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    for tree in filter(None, map(parse_object, text.splitlines())):  # the last line of a killed run may be incomplete
        at, metrics = tree.get("step"), _metrics(tree.get("metrics"))
        if not isinstance(at, int):
            continue
        if tree.get("kind") == "rollback":
            chain = {step: one for step, one in chain.items() if step <= at}
        if tree.get("kind") != "step" or not metrics.keys() >= NEEDED or not isinstance(tree.get("lineage"), int):
            continue
        version = Version(tree["lineage"], at)
        if version in booked:
            chain[version.step] = _Step(version, metrics, tuple(booked[version]))
    return [chain[step] for step in sorted(chain)]


def _metrics(tree: Any) -> dict[str, float]:
    """Select the metrics whose value is a number from 0 to `MOST_NUMBER`."""
    found = tree.items() if isinstance(tree, dict) else ()
    return {name: value for name, value in found if isinstance(value, int | float) and 0 <= value <= MOST_NUMBER}


def _lengths(run_dir: Path, steps: Iterable[_Step]) -> Iterator[Floats]:
    """Yield the lengths in tokens of each step's responses, [n]: recorded ones and resampled ones."""
    there = set(folder.kept_steps(run_dir))
    found, spreads = [], []
    for step in steps:
        groups = folder.read_groups(run_dir, step.version) if step.version in there else []
        own = [sample.tokens - sample.observed_tokens for group in groups for sample in group.samples]
        kept = np.array(own, dtype=np.float64)
        found.append((step, kept))
        if kept.size > 1 and kept.mean() > 0:
            spreads.append(float(kept.std() / kept.mean()))
    width = float(np.sqrt(np.log1p((median(spreads) if spreads else SPREAD) ** 2)))
    return iter([_all_of(step, kept, width) for step, kept in found])


def _all_of(step: _Step, kept: Floats, width: float) -> Floats:
    """Return as many lengths as the step had responses, based on those that were recorded (`kept`). `width`: standard
    deviation of the logarithm of lengths, used if none were recorded."""
    draw = np.random.default_rng((step.version.lineage, step.version.step, 6))
    trained = max(step.trained or 1, kept.size)
    count = min(round(trained / (1.0 - step.filtered)), MOST_RESPONSES)
    if not kept.size or kept.mean() <= 0:
        drawn: Floats = np.exp(np.log(step.mean_length) - width**2 / 2 + width * draw.standard_normal(count))
        return np.maximum(np.ceil(drawn), 1.0)
    mean = float(kept.mean())
    of_trained = max(step.metrics["response_length"], 1.0) if trained > kept.size else mean
    rest = (step.mean_length * count - of_trained * trained) / (count - trained) if count > trained else 0.0
    found = [resample_lengths(kept, trained, of_trained / mean, draw)]
    found.append(resample_lengths(kept, count - trained, rest / mean if rest > 0 else 1.0, draw))
    return np.concatenate(found)


def resample_lengths(kept: Floats, count: int, times: float, draw: np.random.Generator) -> Floats:
    """Resample `count` lengths from the recorded lengths `kept`, scaled by `times`. Each recorded length is used
    equally often; the remainder is chosen at random. If `count` is their number and `times` is 1, they are returned
    unchanged."""
    whole, over = divmod(count, kept.size)
    found = np.concatenate((np.tile(kept, whole), kept[draw.permutation(kept.size)[:over]]))
    return found if times == 1.0 else np.maximum(np.rint(found * times), 1.0)


def _workload(step: _Step, lengths: Floats) -> SimulatedWorkload:
    reward = step.engines("reward")
    judged = np.full(lengths.size, reward.tokens / lengths.size if lengths.size else 0.0)
    return SimulatedWorkload(lengths, judged, step.metrics["tokens"], 1.0)


def _scenario(
    run_dir: Path,
    steps: list[_Step],
    work: tuple[SimulatedWorkload, ...],
    slots: int,
    staleness: int,
    sizes: ReplicaSizes,
) -> Scenario:
    history = [_measured(step) for step in steps]
    training, judged = fit_train_law(history), any(one.judged.any() for one in work)
    between = [step.metrics.get("exchange_s", 0.0) + step.metrics.get("publish_s", 0.0) for step in steps]
    worlds = {1, 2, 4, 8, 16, 32, 64, 128, *(step.trained_on for step in steps)}
    made = float(np.mean([one.lengths.size for one in work]))
    trained = float(np.mean([step.trained or one.lengths.size for step, one in zip(steps, work, strict=True)]))
    return Scenario(
        name=run_dir.name,
        what=f"{len(steps)} steps of the run in {run_dir}",
        slots=slots,
        steps=len(steps),
        groups=max(round(trained), 1),
        samples=1,
        filtered=min(max(1.0 - trained / made, 0.0), MOST_FILTERED),
        staleness=staleness,
        rollout=_engine(history, "rollout", sizes.rollout),
        reward=_engine(history, "reward", sizes.reward),
        lengths=_spread_of(work),
        judging=ScenarioJudging(tokens=max(float(np.mean([one.judged.mean() for one in work])), 1.0))
        if judged
        else None,
        prompt=max(round(_prompt(steps, work)), 1),
        training=ScenarioTraining(
            fixed_s=training.fixed_s,
            rate=1.0 / max(training.slot_s, 1e-12),
            sync_s=median(between),
            sizes=tuple(sorted(size for size in worlds if size <= slots)),
        ),
        wake_s=_switch_s(steps) or 0.0,
        noise=Scenario.model_fields["noise"].default.model_copy(update={"replica": 0.0, "train": 0.0}),
    )


def _spread_of(work: tuple[SimulatedWorkload, ...]) -> ScenarioLengths:
    """Return mean and spread of the response lengths over all steps of the run. The first split is chosen by them."""
    every = np.concatenate([one.lengths for one in work])
    mean = max(float(every.mean()), 1.0)
    return ScenarioLengths(mean=mean, spread=max(float(every.std()) / mean, 0.01))


def _prompt(steps: Iterable[_Step], work: Iterable[SimulatedWorkload]) -> float:
    """Return the mean trained tokens per response that are not response tokens."""
    return median(
        step.metrics["tokens"] / (step.trained or max(one.lengths.size, 1)) - step.metrics["response_length"]
        for step, one in zip(steps, work, strict=True)
    )


def _engine(history: list[MeasuredStep], pool: str, size: int) -> ScenarioEngine:
    loads = [one.running for step in history for one in step.speed if one.pool == pool]
    law = fit_decode_law(history, pool, 64)
    running = max(round(max(loads, default=1.0)), 8)
    return ScenarioEngine(token_s=law.token_s, sequence_s=law.sequence_s, running=running, size=size)


def _measured(step: _Step) -> MeasuredStep:
    """Return the measurements of a recorded step that are needed to fit engine and training speeds."""
    speed = tuple(
        EngineSpeed(pool, one.running_s / one.active_s, one.running_s / one.tokens)
        for line in step.books
        for pool, total in line.book.engines.items()
        for one in line.book.loads.get(pool, (total,))
        if one.active_s > 0 and one.tokens > 0
    )
    metrics, split = step.metrics, Split("coexisting", 1, 1, step.trained_on)
    return MeasuredStep(
        step.version.step, split, (), (), metrics["tokens"], None, metrics.get("train_s"), None, speed, {}, None
    )


def _slots_at(line: AccountLine, state: str) -> Iterator[tuple[str, str]]:
    """Yield node and name of each slot that was in `state` for some time."""
    for slot, spans in line.spans.items():
        if any(state in span.seconds for span in spans):
            yield line.node, slot


def _switch_s(steps: Iterable[_Step]) -> float | None:
    """Return the median seconds in which a slot changed its pool; None if none did."""
    found = [
        seconds
        for step in steps
        for line in step.books
        for change, taken in line.book.switches.items()
        if not change.startswith("none")
        for seconds in taken
    ]
    return median(found) if found else None
