"""Run a policy on a simulated job step by step, and compute the best possible runs for comparison.

`best_static` finds the best single split in hindsight, and `best_each_step` the best split for each step, including the
costs of changes. Both are exact over all feasible splits. They do not optimize lending: `best_each_step` takes each
step without lending or with the lending rule under true knowledge, whichever is shorter. At staleness 1, lent slots
return at no cost in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
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
    LendingSetup,
    SimulatedBatch,
    SimulatedJob,
    estimated_knowledge,
)
from placement.simulator.scenario import Scenario
from placement.slots import Split, count_turns, feasible_splits

KNOWN = 64
"""Number of newest steps that a policy gets."""


@dataclass(frozen=True, slots=True)
class SimulatedMove:
    """A change of the split before a step. `cost_s`: seconds that it took."""

    step: int
    decision: Decision
    cost_s: float


@dataclass(frozen=True, slots=True)
class JobRun:
    """A complete run under a policy. `seconds`: total. `step_s`: seconds of each step without the costs of changes.
    `splits`: the split of each step."""

    seconds: float
    step_s: tuple[float, ...]
    splits: tuple[Split, ...]
    moves: tuple[SimulatedMove, ...]


class _Lending:
    """Prepares the input of the lending rule for each step of a run, and keeps track of replicas that are still lent
    when a step ends. `cost_s`: seconds to lend a replica."""

    def __init__(self, job: SimulatedJob, cost_s: float) -> None:
        self._job, self._cost_s = job, cost_s
        self._paces = PaceTracker()
        self._before: tuple[Split, SimulatedBatch] | None = None

    def now(self, split: Split, history: list[MeasuredStep]) -> LendingSetup:
        """Return the lending settings of the next step, on this split and with these measured steps."""
        self._paces.see(history)
        knowledge, before = estimated_knowledge(history, self._job.scenario, self._paces), self._before
        if before is None or before[0] != split or not self._job.scenario.overlaps:
            return LendingSetup(self._cost_s, knowledge)  # a change of split returns all lent slots
        return LendingSetup(self._cost_s, knowledge, before[1].away, before[1].back_s)

    def after(self, split: Split, produced: SimulatedBatch) -> None:
        """Record which replicas were still lent when the step's batch was complete."""
        self._before = split, produced


def play_job(
    job: SimulatedJob, policy: Policy, costs: SwitchCosts, prior: SwitchCosts, *, lends: bool = False
) -> JobRun:
    """Run a whole job under a policy. `costs`: true costs of changes. `prior`: the costs that the policy assumes until
    its first change. `lends`: whether replicas are lent within steps."""
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
    """A best possible run. `seconds`: total. `splits`: the split of each step. `step_s`: seconds of each step without
    the costs of changes."""

    seconds: float
    splits: tuple[Split, ...]
    step_s: tuple[float, ...]


def best_static(job: SimulatedJob, costs: SwitchCosts) -> OracleRun:
    """Return the run with the single split that is best for all steps, without lending. While slots are absent, the
    most similar feasible split is used."""
    table, at = job.table(), {split: i for i, split in enumerate(job.splits)}
    found = []
    for split in job.splits:
        path = [StaticPolicy(split).nearest(job.scenario.bounds(step)) for step in range(job.scenario.steps)]
        step_s = tuple(float(table[step, at[one]]) for step, one in enumerate(path))
        seconds = sum(step_s) + sum(costs.of(one, after) for one, after in pairwise(path))
        found.append(OracleRun(seconds, tuple(path), step_s))
    return min(found, key=lambda one: one.seconds)


def best_each_step(job: SimulatedJob, costs: SwitchCosts, runs: Iterable[JobRun] = ()) -> OracleRun:
    """Return the run with the best sequence of splits, including the costs of changes (dynamic programming over splits;
    the first split costs nothing). Each step is taken with or without lending by the rule. `runs`: runs of policies at
    the same costs; if one finished a step sooner on the same split (the lending rule can be lucky with estimated
    input), its time is used."""
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
    """Return the cost of each change between two splits as a matrix, [before, after]. `of`: computes one cost."""
    return np.array([[of(one, other) for other in splits] for one in splits])


PRIOR = SwitchCosts(10.0, 20.0)
"""Costs that policies assume before their first change, in seconds. They are too high for most engines."""

GUESSED = 0.3
"""Standard deviation of the relative error of each estimate from which the first split is chosen."""

LENDS = frozenset({"dynamic"})
"""Policies under which replicas are lent within steps."""


def switch_costs(scenario: Scenario, seed: int, move_s: float) -> SwitchCosts:
    """Return the costs of changes in a simulated run. `move_s`: seconds until engines have changed their pool; a train
    world of another size costs twice as much. The cost of a phase change on co-located slots has a random error,
    because a live cluster measures it only once, when the engines start."""
    error = float(np.exp(np.random.default_rng((seed, 0, 4)).normal(0.0, 0.3)))
    return SwitchCosts(move_s, 2.0 * move_s, scenario.wake_s * error)


def policies(scenario: Scenario, seed: int) -> Mapping[str, Callable[[], Policy]]:
    """Return factories of gcore's policies by name. All policies start with the same split (`choose_start`)."""
    first, pools = choose_start(scenario, seed), pool_limits(scenario)
    return {
        "static": lambda: StaticPolicy(first),
        "colocated": lambda: ColocatedPolicy(first),
        "hill_climb": lambda: HillClimbPolicy(first),
        "threshold": lambda: new_threshold_policy(first),
        "dynamic": lambda: DynamicPolicy(pools, first),
    }


def pool_limits(scenario: Scenario) -> PoolLimits:
    """Return the slots per engine and the maximum of concurrent requests per engine, for each pool."""
    return PoolLimits(scenario.rollout.size, scenario.reward.size, scenario.rollout.running, scenario.reward.running)


def choose_start(scenario: Scenario, seed: int) -> Split:
    """Return the split that the first placement would choose: the best one by estimates of speeds and lengths, each
    with a random error."""
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
    """Create one of `policies`, or a policy of another package in the way in which a controller does. Raises
    PluginFault if there is no policy of this name."""
    own = policies(scenario, seed).get(name)
    if own is not None:
        return own()
    # gcore's own policies need nothing that only a live job has.
    return find_policy(name)(
        PolicyStart(choose_start(scenario, seed), scenario.rollout.running, scenario.reward.running)
    )


def play_policy(job: SimulatedJob, name: str, move_s: float) -> JobRun:
    """Run the job under the policy `name`. `move_s`: seconds until engines have changed their pool. Raises PluginFault
    if there is no such policy."""
    costs = switch_costs(job.scenario, job.seed, move_s)
    prior = SwitchCosts(PRIOR.move_s, PRIOR.world_s, costs.turn_s)
    return play_job(job, new_policy(name, job.scenario, job.seed), costs, prior, lends=name in LENDS)
