"""A policy on a simulated job, step by step, compared with the best that was possible.

`best_static` and `best_each_step` find the best split in hindsight and the best split for each step, the cost of changes included, exactly, over all
feasible splits. Lending is not searched for there: each step is taken with nothing lent, or lent by the rule with true knowledge,
whichever is shorter. `compare_lending` compares the rule with the best of all schedules at the moments at which the rule looks, which are few,
for all schedules are tried. `lower_bound` is below whatever lends and moves; one step ahead, what was lent goes back for nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import NormalDist

import numpy as np

from placement.forecast import Forecast, LengthProfile, PoolLimits, shapes_of
from placement.laws import DecodeLaw, Floats, PaceTracker, TrainLaw
from placement.measurements import MeasuredStep
from placement.policies.base import Decision, Policy, PolicyStart, Situation, SwitchCosts, find_policy
from placement.policies.dynamic import DynamicPolicy
from placement.policies.simple import (
    ColocatedPolicy,
    HillClimbPolicy,
    StaticPolicy,
    new_threshold_policy,
)
from placement.simulator.job import (
    UNKNOWN,
    LendingKnowledge,
    LendingSetup,
    SimulatedBatch,
    SimulatedJob,
    estimated_knowledge,
)
from placement.simulator.kernel import BY_RULE, BY_SCHEDULE, NEVER, Ints, play_batch
from placement.simulator.scenario import Scenario, ScenarioEngine
from placement.slots import Split, count_turns, feasible_splits

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


KNOWN = 64
"""Newest steps that a policy is told of."""


@dataclass(frozen=True, slots=True)
class SimulatedMove:
    """Before a step, and what it cost."""

    step: int
    decision: Decision
    cost_s: float


@dataclass(frozen=True, slots=True)
class JobRun:
    """All of a run. `step_s`: without what moves took."""

    seconds: float
    step_s: tuple[float, ...]
    splits: tuple[Split, ...]
    moves: tuple[SimulatedMove, ...]


class _Lending:
    """What the rule within steps is told while a run goes on, and what it has lent. Mutable."""

    def __init__(self, job: SimulatedJob, cost_s: float) -> None:
        self._job, self._cost_s = job, cost_s
        self._paces = PaceTracker()
        self._before: tuple[Split, SimulatedBatch] | None = None

    def now(self, split: Split, history: list[MeasuredStep]) -> LendingSetup:
        """How the next step is lent in."""
        self._paces.see(history)
        told, before = estimated_knowledge(history, self._job.scenario, self._paces), self._before
        if before is None or before[0] != split or not self._job.scenario.overlaps:
            return LendingSetup(self._cost_s, told)  # a change of split has brought all that was lent to its place
        return LendingSetup(self._cost_s, told, before[1].away, before[1].back_s)

    def after(self, split: Split, produced: SimulatedBatch) -> None:
        """The step's batch is whole."""
        self._before = split, produced


def play_job(
    job: SimulatedJob, policy: Policy, costs: SwitchCosts, prior: SwitchCosts, *, lends: bool = False
) -> JobRun:
    """The whole job. `prior`: what changes are taken to cost before one was seen; `lends`: whether replicas are lent within steps."""
    now: Split | None = None
    history: list[MeasuredStep] = []
    moves: list[SimulatedMove] = []
    step_s, splits = [], []
    known, total, steps = prior, 0.0, job.scenario.steps
    lending = _Lending(job, costs.move_s) if lends else None
    for step in range(steps):
        newest = history[-KNOWN:]
        decision = policy.plan(
            Situation(job.scenario.bounds(step), now, newest, known, steps - step, job.scenario.overlaps, lends)
        )
        cost = costs.of(now, decision.split) if now is not None else 0.0
        if decision.split != now:
            moves.append(SimulatedMove(step, decision, cost))
            known = costs if now is not None else known
        now = decision.split
        produced = job.produced(step, now, lending.now(now, newest) if lending is not None else None)
        if lending is not None:
            lending.after(now, produced)
        seconds = job.seconds(step, now, produced)
        total += cost + seconds
        step_s.append(seconds)
        splits.append(now)
        history.append(job.measured(step, now, produced))
    return JobRun(total, tuple(step_s), tuple(splits), tuple(moves))


@dataclass(frozen=True, slots=True)
class OracleRun:
    """Seconds of the whole run, and the split of each step. `step_s`: without what changes took."""

    seconds: float
    splits: tuple[Split, ...]
    step_s: tuple[float, ...]


def best_static(job: SimulatedJob, costs: SwitchCosts) -> OracleRun:
    """One split for all steps, nothing lent; while slots are away, the nearest one that there is."""
    table, at = job.table(), {split: i for i, split in enumerate(job.splits)}
    found = []
    for split in job.splits:
        path = [StaticPolicy(split).nearest(job.scenario.bounds(step)) for step in range(job.scenario.steps)]
        step_s = tuple(float(table[step, at[one]]) for step, one in enumerate(path))
        seconds = sum(step_s) + sum(costs.of(one, after) for one, after in pairwise(path))
        found.append(OracleRun(seconds, tuple(path), step_s))
    return min(found, key=lambda one: one.seconds)


def best_each_step(job: SimulatedJob, costs: SwitchCosts, runs: Iterable[JobRun] = ()) -> OracleRun:
    """A split for each step, lending by the rule or not; changes take what they cost. By dynamic programming over splits; the first
    one is free. `runs`: of policies, at the same costs: in a step that one of them had done sooner on the same split, for the rule was
    luckier with what it was told there, it is that."""
    table = np.minimum(job.table(), job.table(costs.move_s))
    at = {split: i for i, split in enumerate(job.splits)}
    for run in runs:
        for step, (split, seconds) in enumerate(zip(run.splits, run.step_s, strict=True)):
            table[step, at[split]] = min(table[step, at[split]], seconds)
    change = change_costs(job.splits, costs.of)
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
    return OracleRun(seconds, tuple(job.splits[i] for i in path), step_s)


def change_costs(splits: tuple[Split, ...], of: Callable[[Split, Split], float]) -> Floats:
    """What each change costs, [before, after]."""
    return np.array([[of(one, other) for other in splits] for one in splits])


def lower_bound(job: SimulatedJob) -> float:
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


def _least(engine: ScenarioEngine) -> float:
    """Slot-seconds that a token takes at least, on an engine that is full."""
    return (engine.token_s / engine.running + engine.sequence_s) * engine.size


COSTS = (0.0, 0.5, 5.0, 20.0, 60.0)
"""Seconds that engines which move take; a train world of another size takes twice that."""

PRIOR = SwitchCosts(10.0, 20.0)
"""What changes are taken to cost before one was seen: pessimistic for most engines."""

GUESSED = 0.3
"""Relative error of each estimate that the first placement stands on."""

LENDS = frozenset({"dynamic"})


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A policy's run. `regret`: beside the best split for each step; `behind`: beside the best static split in hindsight."""

    policy: str
    seconds: float
    regret: float
    behind: float
    moves: int


def switch_costs(scenario: Scenario, seed: int, move_s: float) -> SwitchCosts:
    """What changes take. A co-located turn is known but for an error: it was measured once when the job's engines started."""
    error = float(np.exp(np.random.default_rng((seed, 0, 4)).normal(0.0, 0.3)))
    return SwitchCosts(move_s, 2.0 * move_s, scenario.wake_s * error)


def policies(scenario: Scenario, seed: int) -> Mapping[str, Callable[[], Policy]]:
    """All begin with the same split, the first placement."""
    first, pools = choose_start(scenario, seed), pool_limits(scenario)
    return {
        "static": lambda: StaticPolicy(first),
        "colocated": lambda: ColocatedPolicy(first),
        "hill_climb": lambda: HillClimbPolicy(first),
        "threshold": lambda: new_threshold_policy(first),
        "dynamic": lambda: DynamicPolicy(pools, first),
    }


def pool_limits(scenario: Scenario) -> PoolLimits:
    """What stays as it is."""
    return PoolLimits(scenario.rollout.size, scenario.reward.size, scenario.rollout.running, scenario.reward.running)


def choose_start(scenario: Scenario, seed: int) -> Split:
    """The split that is best by estimates from before the job: of speeds, lengths and judgements, each wrong by its own factor."""
    draw = np.random.default_rng((seed, 0, 5))

    def guess(value: float) -> float:
        return value * float(np.exp(draw.normal(0.0, GUESSED)))

    engines = [(guess(one.token_s), guess(one.sequence_s), one.running) for one in (scenario.rollout, scenario.reward)]
    count = scenario.samples * max(scenario.groups, round(scenario.groups / (1 - scenario.filtered)))
    mean, judging, train = guess(scenario.lengths.mean), scenario.judging, scenario.training
    width = float(np.sqrt(np.log1p(scenario.lengths.spread**2)))
    ranks = (np.arange(count) + 0.5) / count
    lengths = mean * np.exp(width * np.array([NormalDist().inv_cdf(float(rank)) for rank in ranks]) - width**2 / 2)
    trained = scenario.groups * scenario.samples * (mean + scenario.prompt)
    expected = Forecast(
        pool_limits(scenario),
        DecodeLaw(*engines[0]),
        DecodeLaw(*engines[1]),
        TrainLaw(train.fixed_s, 1.0 / guess(train.rate)),
        (LengthProfile.made(lengths, guess(judging.tokens) if judging is not None else 0.0, trained),),
        np.ones(1),
        np.ones(1),
        train.sync_s,
        train.sync_s + count_turns(judged=judging is not None) * scenario.wake_s,
        scenario.overlaps,
        None,
    )
    splits = feasible_splits(scenario.bounds(0))
    return splits[int(expected.seconds(shapes_of(splits)).argmin())]


def new_policy(name: str, scenario: Scenario, seed: int) -> Policy:
    """One of those above, or one of another package, which is made as a controller makes it. Raises PluginFault."""
    own = policies(scenario, seed).get(name)
    if own is not None:
        return own()
    # gcore's own need nothing of what a live job has.
    return find_policy(name)(
        PolicyStart(choose_start(scenario, seed), scenario.rollout.running, scenario.reward.running)
    )


def play_policy(job: SimulatedJob, name: str, move_s: float) -> JobRun:
    """One policy on the job. Raises PluginFault."""
    costs = switch_costs(job.scenario, job.seed, move_s)
    prior = SwitchCosts(PRIOR.move_s, PRIOR.world_s, costs.turn_s)
    return play_job(job, new_policy(name, job.scenario, job.seed), costs, prior, lends=name in LENDS)


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
