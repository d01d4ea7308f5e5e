"""A policy that plans a simulated job, step by step: what it takes, and where it moved."""

from __future__ import annotations

from dataclasses import dataclass

from placement.measured import Measured
from placement.paces import Paces
from placement.policies.base import Decision, Policy, Situation, SwitchCosts
from placement.simulate.job import Produced, SimulatedJob
from placement.simulate.told import Lend, told_of
from placement.split import Split

KNOWN = 64
"""Newest steps that a policy is told of."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Before a step, and what it cost."""

    step: int
    decision: Decision
    cost_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """All of a run. `step_s`: without what moves took."""

    seconds: float
    step_s: tuple[float, ...]
    splits: tuple[Split, ...]
    moves: tuple[Moved, ...]


class _Lending:
    """What the rule within steps is told while a run goes on, and what it has lent. Mutable."""

    def __init__(self, job: SimulatedJob, cost_s: float) -> None:
        self._job, self._cost_s = job, cost_s
        self._paces = Paces()
        self._before: tuple[Split, Produced] | None = None

    def now(self, split: Split, history: list[Measured]) -> Lend:
        """How the next step is lent in."""
        self._paces.see(history)
        told, before = told_of(history, self._job.scenario, self._paces), self._before
        if before is None or before[0] != split or not self._job.scenario.overlaps:
            return Lend(self._cost_s, told)  # a change of split has brought all that was lent to its place
        return Lend(self._cost_s, told, before[1].away, before[1].back_s)

    def after(self, split: Split, produced: Produced) -> None:
        """The step's batch is whole."""
        self._before = split, produced


def played(job: SimulatedJob, policy: Policy, costs: SwitchCosts, prior: SwitchCosts, *, lends: bool = False) -> Played:
    """The whole job. `prior`: what changes are taken to cost before one was seen; `lends`: whether replicas are lent within steps."""
    now: Split | None = None
    history: list[Measured] = []
    moves: list[Moved] = []
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
            moves.append(Moved(step, decision, cost))
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
    return Played(total, tuple(step_s), tuple(splits), tuple(moves))
