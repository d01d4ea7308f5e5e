"""What the rule that lends within a step is told: what somebody has measured until then, as in a live cluster (`placement.loads`).

Whoever knew everything is told a step's own lengths and speeds, without errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from placement.measured import EngineSpeed, Measured
from placement.paces import Paces
from placement.simulate.scenario import Engine, Scenario
from placement.simulate.workload import Floats, Workload
from placement.speeds import Rows, speeds_of
from placement.split import Split

LOADS = (1.0, 3.0, 9.0)
"""Of engines whose law is known: a line goes through what they take."""
NOBODYS = Measured(0, Split("coexisting", 1, 1, 1), (), (), 0.0, None, None, None, (), {})


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """By pool, [2, 4], and of responses by how many are left, [2, left], as `placement.simulate.kernel.play` takes them; all zeros:
    nothing is known."""

    pools: Floats = field(default_factory=lambda: np.zeros((2, 4)))
    tail: Floats = field(default_factory=lambda: np.zeros((2, 1)))


UNKNOWN = Told()


@dataclass(frozen=True, slots=True, eq=False)
class Lend:
    """How replicas are lent within a step: what it costs each of them, and what the rule is told (`placement.simulate.kernel`). `late`:
    replicas that were lent in the step before, and come back in the first `late_s` seconds; above 0 to rollout, below 0 to the judges."""

    cost_s: float
    told: Told
    late: int = 0
    late_s: float = 0.0


def told_of(history: Sequence[Measured], scenario: Scenario, paces: Paces) -> Told:
    """After so much was measured. `paces`: was shown the history."""
    rows = Rows(scenario.rollout.running, scenario.reward.running)
    speeds = speeds_of(history, rows, paces.since("rollout"), paces.since("reward"))
    if speeds is None:
        return UNKNOWN
    both = speeds.rollout, speeds.reward
    pools = [[one.alone_s, one.saturating, one.tokens, one.residual] for one in both]
    return Told(np.array(pools), np.array(speeds.rollout.tail).T)


def truth_of(step: int, scenario: Scenario, work: Workload) -> Told:
    """What nobody knows before: the step's own."""
    speed = (*_exact(scenario.rollout, "rollout"), *_exact(scenario.reward_at(step), "reward"))
    lengths, judged = tuple(work.lengths.tolist()), tuple(work.judged.tolist())
    return told_of([replace(NOBODYS, lengths=lengths, judged=judged, speed=speed)], scenario, Paces())


def _exact(engine: Engine, pool: str) -> tuple[EngineSpeed, ...]:
    return tuple(EngineSpeed(pool, load, engine.token_s + engine.sequence_s * load) for load in LOADS)
