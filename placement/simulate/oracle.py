"""What could have been had by whoever knew everything. The best static split in hindsight and the best split for each step with what
changes cost are exact, over all feasible splits. What is lent within a step is not searched for: each step is taken with nothing lent, or
lent by the rule that was told the truth, whichever is shorter (`placement.simulate.within` has the best lending, on small cases). The
bound is below whatever lends and moves. One step ahead, what was lent goes back for nothing here: below what could have been had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from placement.policies.base import SwitchCosts
from placement.policies.fixed import Static
from placement.simulate.job import SimulatedJob
from placement.simulate.run import Played
from placement.simulate.scenario import Engine
from placement.simulate.workload import Floats
from placement.split import Split


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds of the whole run, and the split of each step. `step_s`: without what changes took."""

    seconds: float
    splits: tuple[Split, ...]
    step_s: tuple[float, ...]


def best_static(job: SimulatedJob, costs: SwitchCosts) -> Found:
    """One split for all steps, nothing lent; while slots are away, the nearest one that there is."""
    table, at = job.table(), {split: i for i, split in enumerate(job.splits)}
    found = []
    for split in job.splits:
        path = [Static(split).nearest(job.scenario.bounds(step)) for step in range(job.scenario.steps)]
        step_s = tuple(float(table[step, at[one]]) for step, one in enumerate(path))
        seconds = sum(step_s) + sum(costs.of(one, after) for one, after in pairwise(path))
        found.append(Found(seconds, tuple(path), step_s))
    return min(found, key=lambda one: one.seconds)


def best_each_step(job: SimulatedJob, costs: SwitchCosts, runs: Iterable[Played] = ()) -> Found:
    """A split for each step, lending by the rule or not; changes take what they cost. By dynamic programming over splits; the first
    one is free. `runs`: of policies, at the same costs: in a step that one of them had done sooner on the same split, for the rule was
    luckier with what it was told there, it is that."""
    table = np.minimum(job.table(), job.table(costs.move_s))
    at = {split: i for i, split in enumerate(job.splits)}
    for run in runs:
        for step, (split, seconds) in enumerate(zip(run.splits, run.step_s, strict=True)):
            table[step, at[split]] = min(table[step, at[split]], seconds)
    change = changes(job.splits, costs.of)
    total, came = table[0], []
    for row in table[1:]:
        with_change = total[:, None] + change
        came.append(with_change.argmin(axis=0))
        total = with_change.min(axis=0) + row
    last = int(total.argmin())
    seconds, path = float(total[last]), [last]
    for via in reversed(came):
        path.append(int(via[path[-1]]))
    path.reverse()
    step_s = tuple(float(table[step, i]) for step, i in enumerate(path))
    return Found(seconds, tuple(job.splits[i] for i in path), step_s)


def changes(splits: tuple[Split, ...], of: Callable[[Split, Split], float]) -> Floats:
    """What each change costs, [before, after]."""
    return np.array([[of(one, other) for other in splits] for one in splits])


def bound(job: SimulatedJob) -> float:
    """Seconds that no way of splitting, lending and moving can be below: a fluid that flows wherever it is needed at no cost, the
    longest response and its judgement alone on the fastest replica, training on the largest world."""
    return sum(_bound(job, step) for step in range(job.scenario.steps))


def _bound(job: SimulatedJob, step: int) -> float:
    told, work = job.scenario, job.work(step)
    slots, fastest = told.slots_at(step), job.fastest
    own = work.lengths * (told.rollout.token_s + told.rollout.sequence_s)
    owed = float(work.lengths.sum()) * _least(told.rollout)
    if told.judging is not None:
        own = own + work.judged * (told.reward.token_s + told.reward.sequence_s)
        owed += float(work.judged.sum()) * _least(told.reward)
    produce_s = max(float(own.max()), owed / slots) * fastest
    train_s, other_s = job.fastest_training(step)
    return max(produce_s, train_s + other_s) if told.overlaps else produce_s + train_s + other_s


def _least(engine: Engine) -> float:
    """Slot-seconds that a token takes at least, on an engine that is full."""
    return (engine.token_s / engine.running + engine.sequence_s) * engine.size
