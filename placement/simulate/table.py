"""Every policy on one simulated job, beside what could have been had. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from placement.forecast import Batch, Forecast, Pools, shapes_of
from placement.laws import Law, TrainLaw
from placement.policies.base import Policy, SwitchCosts
from placement.policies.climbing import HillClimb, threshold
from placement.policies.dynamic import Dynamic
from placement.policies.fixed import Colocated, Static, possible
from placement.simulate.job import SimulatedJob
from placement.simulate.oracle import best_each_step, best_static
from placement.simulate.run import Played, played
from placement.simulate.scenario import Scenario
from placement.split import Split, turns

COSTS = (0.0, 0.5, 5.0, 20.0, 60.0)
"""Seconds that engines which move take; a train world of another size takes twice that."""
PRIOR = SwitchCosts(10.0, 20.0)
"""What changes are taken to cost before one was seen: pessimistic for most engines."""
GUESSED = 0.3
"""Relative error of each estimate that the first placement stands on."""
LENDS = frozenset({"dynamic"})


@dataclass(frozen=True, slots=True)
class Row:
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
    first, pools = start(scenario, seed), pools_of(scenario)
    return {
        "static": lambda: Static(first),
        "colocated": lambda: Colocated(first),
        "hill_climb": lambda: HillClimb(first),
        "threshold": lambda: threshold(first),
        "dynamic": lambda: Dynamic(pools, first),
    }


def pools_of(scenario: Scenario) -> Pools:
    """What stays as it is."""
    return Pools(scenario.rollout.size, scenario.reward.size, scenario.rollout.running, scenario.reward.running)


def start(scenario: Scenario, seed: int) -> Split:
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
        pools_of(scenario),
        Law(*engines[0]),
        Law(*engines[1]),
        TrainLaw(train.fixed_s, 1.0 / guess(train.rate)),
        (Batch.made(lengths, guess(judging.tokens) if judging is not None else 0.0, trained),),
        np.ones(1),
        np.ones(1),
        train.sync_s,
        train.sync_s + turns(judged=judging is not None) * scenario.wake_s,
        scenario.overlaps,
        None,
    )
    splits = possible(scenario.bounds(0))
    return splits[int(expected.seconds(shapes_of(splits)).argmin())]


def policy_of(name: str, scenario: Scenario, seed: int) -> Policy:
    """One of those above, or one of another package, which is made as a controller makes it. Raises PluginFault."""
    own = policies(scenario, seed).get(name)
    if own is not None:
        return own()
    from placement.live import Start  # gcore's own need none of what a live job has
    from placement.named import find_policy

    return find_policy(name)(Start(start(scenario, seed), scenario.rollout.running, scenario.reward.running))


def play_policy(job: SimulatedJob, name: str, move_s: float) -> Played:
    """One policy on the job. Raises PluginFault."""
    costs = switch_costs(job.scenario, job.seed, move_s)
    prior = SwitchCosts(PRIOR.move_s, PRIOR.world_s, costs.turn_s)
    return played(job, policy_of(name, job.scenario, job.seed), costs, prior, lends=name in LENDS)


def compared(job: SimulatedJob, move_s: float) -> tuple[Row, ...]:
    """All policies on the job."""
    costs = switch_costs(job.scenario, job.seed, move_s)
    runs = {name: play_policy(job, name, move_s) for name in policies(job.scenario, job.seed)}
    best, fixed = best_each_step(job, costs, runs.values()).seconds, best_static(job, costs).seconds
    rows = [Row("best each step", best, 0.0, best / fixed - 1, 0), Row("best static", fixed, fixed / best - 1, 0.0, 0)]
    for name, run in runs.items():
        rows.append(Row(name, run.seconds, run.seconds / best - 1, run.seconds / fixed - 1, len(run.moves) - 1))
    return tuple(rows)
