"""A policy that plans a simulated job, step by step: what it takes, and where it moved."""

from __future__ import annotations

from dataclasses import dataclass

from placement.measured import Measured
from placement.policies.base import Decision, Policy, Situation, SwitchCosts
from placement.simulate.job import SimulatedJob
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


def played(job: SimulatedJob, policy: Policy, costs: SwitchCosts, prior: SwitchCosts, *, lends: bool = False) -> Played:
    """The whole job. `prior`: what changes are taken to cost before one was seen; `lends`: whether replicas are lent within steps."""
    now: Split | None = None
    history: list[Measured] = []
    moves: list[Moved] = []
    step_s, splits = [], []
    known, total, steps = prior, 0.0, job.scenario.steps
    lend_s = costs.move_s if lends else None
    for step in range(steps):
        decision = policy.plan(
            Situation(
                job.scenario.bounds(step), now, history[-KNOWN:], known, steps - step, job.scenario.overlaps, lends
            )
        )
        cost = costs.of(now, decision.split) if now is not None else 0.0
        if decision.split != now:
            moves.append(Moved(step, decision, cost))
            known = costs if now is not None else known
        now = decision.split
        seconds = job.seconds(step, now, lend_s)
        total += cost + seconds
        step_s.append(seconds)
        splits.append(now)
        history.append(job.measured(step, now, lend_s))
    return Played(total, tuple(step_s), tuple(splits), tuple(moves))
