"""Placement policies beside bounds: the best lending schedule, a lower bound for any lending or split, and all policies on one job.

`compare_lending` compares the rule with the best of all schedules at the moments at which the rule decides. It tries all
schedules, so there must be few such moments. `lower_bound` is below the time of every lending and move.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from placement.laws import Floats
from placement.simulator.job import NOTHING, UNKNOWN, LendingKnowledge, SimulatedJob, replica_pace
from placement.simulator.kernel import BY_RULE, BY_SCHEDULE, NEVER, Ints, play_batch
from placement.simulator.run import best_each_step, best_static, play_policy, policies, switch_costs
from placement.simulator.scenario import ScenarioEngine

NO_MOVES = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class LendingSchedule:
    """When the last request has ended, and how many replicas were lent in each moment."""

    seconds: float
    moves: tuple[int, ...]


def best_schedule(
    lengths: Floats,
    judged: Floats,
    pace: Floats,
    rollout: int,
    laws: Floats,
    most: Ints,
    *,
    cost_s: float,
    every_s: float,
    moments: int,
    at_once: int = 1,
) -> LendingSchedule:
    """Of every schedule that moves up to `at_once` replicas in each of so many moments, by trying all of them: (2 * at_once + 1) ** moments."""
    found = []
    several = sorted(range(-at_once, at_once + 1), key=lambda count: (abs(count), -count))
    for moves in product(several, repeat=moments):
        schedule = np.array(moves, dtype=np.int64)
        told = lengths, judged, pace, rollout, laws, most, BY_SCHEDULE, cost_s, every_s
        found.append(LendingSchedule(float(play_batch(*told, UNKNOWN.pools, UNKNOWN.tail, schedule, 0, 0.0)[0]), moves))
    return min(found, key=lambda one: one.seconds)


@dataclass(frozen=True, slots=True)
class LendingTimes:
    """Seconds until a batch is whole: lent in the best way, by the rule, and with nothing lent."""

    best: LendingSchedule
    by_rule: float
    never: float

    @property
    def known(self) -> float:
        """What the best split for each step is taken to need: the shorter of the two others."""
        return min(self.by_rule, self.never)


def compare_lending(
    lengths: Floats,
    judged: Floats,
    pace: Floats,
    rollout: int,
    laws: Floats,
    most: Ints,
    *,
    told: LendingKnowledge,
    cost_s: float,
    moments: int,
) -> LendingTimes:
    """All three, if it is looked at so many moments whether to lend, evenly over the time that it takes with nothing lent. `told`: what the
    rule knows.

    None is shorter than the best: to lend nothing is one of the schedules, and the rule lends in those moments only, or takes longer than
    if nothing were lent."""
    work = lengths, judged, pace, rollout, laws, most
    never = float(play_batch(*work, NEVER, cost_s, 1.0, UNKNOWN.pools, UNKNOWN.tail, NO_MOVES, 0, 0.0)[0])
    every_s = never / moments
    by_rule = float(play_batch(*work, BY_RULE, cost_s, every_s, told.pools, told.tail, NO_MOVES, 0, 0.0)[0])
    best = best_schedule(*work, cost_s=cost_s, every_s=every_s, moments=moments, at_once=pace.size)
    return LendingTimes(best, by_rule, never)


def within_bound(lengths: Floats, judged: Floats, laws: Floats, most: Ints, replicas: int) -> float:
    """Seconds that no lending can be below on replicas of pace 1: the longest request alone, and a fluid that flows at no cost."""
    own = lengths * laws[0].sum() + judged * laws[1].sum()
    least = laws[:, 0] / most + laws[:, 1]
    return max(float(own.max()), float(lengths.sum() * least[0] + judged.sum() * least[1]) / replicas)


COSTS = (0.0, 0.5, 5.0, 20.0, 60.0)
"""Seconds that engines which move take; a train world of another size takes twice that."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A policy's run. `regret`: beside the best split for each step; `behind`: beside the best static split in hindsight."""

    policy: str
    seconds: float
    regret: float
    behind: float
    moves: int


def lower_bound(job: SimulatedJob) -> float:
    """Seconds that no way of splitting, lending and moving can be below: a fluid that flows wherever it is needed at no cost, the
    longest response and its judgement alone on the fastest replica, training on the largest world."""
    return sum(_bound(job, step) for step in range(job.scenario.steps))


def _bound(job: SimulatedJob, step: int) -> float:
    told, work = job.scenario, job.work(step)
    slots, fastest = told.slots_at(step), float(replica_pace(told, job.seed).min())
    own = work.lengths * (told.rollout.token_s + told.rollout.sequence_s)
    owed = float(work.lengths.sum()) * _least(told.rollout)
    if told.judging is not None:
        own = own + work.judged * (told.reward.token_s + told.reward.sequence_s)
        owed += float(work.judged.sum()) * _least(told.reward)
    produce_s = max(float(own.max()), owed / slots) * fastest
    train_s, other_s = _fastest_training(job, step)
    return max(produce_s, train_s + other_s) if told.overlaps else produce_s + train_s + other_s


def _least(engine: ScenarioEngine) -> float:
    """Slot-seconds that a token takes at least, on an engine that is full."""
    return (engine.token_s / engine.running + engine.sequence_s) * engine.size


def _fastest_training(job: SimulatedJob, step: int) -> tuple[float, float]:
    """Of all splits that the step can have: training, and what is neither that nor production."""
    found = [job._others(step, split, NOTHING) for split in job._possible[job.scenario.slots_at(step)]]
    return min(one for one, _ in found), min(other for _, other in found)


def compare_policies(job: SimulatedJob, move_s: float) -> tuple[PolicyResult, ...]:
    """All policies on the job."""
    costs = switch_costs(job.scenario, job.seed, move_s)
    runs = {name: play_policy(job, name, move_s) for name in policies(job.scenario, job.seed)}
    best, fixed = best_each_step(job, costs, runs.values()).seconds, best_static(job, costs).seconds
    rows = [
        PolicyResult("best each step", best, 0.0, best / fixed - 1, 0),
        PolicyResult("best static", fixed, fixed / best - 1, 0.0, 0),
    ]
    for name, run in runs.items():
        rows.append(
            PolicyResult(name, run.seconds, run.seconds / best - 1, run.seconds / fixed - 1, len(run.moves) - 1)
        )
    return tuple(rows)
