"""What the rule that lends within a step is told: what somebody has measured until then, as in a live cluster (`placement.loads`).

Whoever knew everything is told a step's own lengths and speeds, without errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.forecast import Paces
from placement.loads import speed_of
from placement.measured import EngineSpeed, Measured
from placement.simulate.scenario import Engine, Scenario
from placement.simulate.workload import Floats, Workload
from placement.split import Split

UNKNOWN: Floats = np.zeros((2, 4))
LOADS = (1.0, 3.0, 9.0)
"""Of engines whose law is known: a line goes through what they take."""
NOBODYS = Measured(0, Split("coexisting", 1, 1, 1), (), (), 0.0, None, None, None, (), {})


@dataclass(frozen=True, slots=True, eq=False)
class Lend:
    """How replicas are lent within a step: what it costs each of them, and what the rule is told (`placement.simulate.kernel`). `late`:
    replicas that were lent in the step before, and come back in the first `late_s` seconds; above 0 to rollout, below 0 to the judges."""

    cost_s: float
    told: Floats
    late: int = 0
    late_s: float = 0.0


def told_of(history: Sequence[Measured], scenario: Scenario, paces: Paces) -> Floats:
    """By pool, [2, 4]: all zeros before enough was measured. `paces`: was shown the history."""
    most = {"rollout": scenario.rollout.running, "reward": scenario.reward.running}
    speeds = [speed_of(history, pool, rows, paces.since(pool)) for pool, rows in most.items()]
    known = [[one.alone_s, one.saturating, one.tokens, one.residual] for one in speeds if one is not None]
    return np.array(known) if len(known) == len(speeds) else UNKNOWN


def truth_of(step: int, scenario: Scenario, work: Workload) -> Floats:
    """What nobody knows before: the step's own."""
    speed = (*_exact(scenario.rollout, "rollout"), *_exact(scenario.reward_at(step), "reward"))
    lengths, judged = tuple(work.lengths.tolist()), tuple(work.judged.tolist())
    return told_of([replace(NOBODYS, lengths=lengths, judged=judged, speed=speed)], scenario, Paces())


def _exact(engine: Engine, pool: str) -> tuple[EngineSpeed, ...]:
    return tuple(EngineSpeed(pool, load, engine.token_s + engine.sequence_s * load) for load in LOADS)
