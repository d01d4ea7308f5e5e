"""A simulated job: how long each step takes on a split, with and without lending, and what is measured of it. The truth.

A strict step is production, then training, then the weights' way to the engines; co-located pools also change over in between. One
step ahead, pools with slots of their own make a batch while they train on the one before: the longer of the two is the step. That the
two are of different batches, and that the tail of one batch can overlap the next batch's beginning, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from placement.measured import EngineSpeed, Measured
from placement.simulate.kernel import BY_RULE, NEVER, play
from placement.simulate.scenario import Engine, Scenario
from placement.simulate.workload import Floats, replica_pace, workload
from placement.split import Split, feasible

EVERY_S = 1.0
"""Between two looks at whether to lend."""
REMEMBERED = 4
"""Steps that a step's longest response is expected from."""
NO_MOVES = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Produced:
    """A batch. `spans`: replica-seconds by pool and number of running requests. `moves`: replicas that were lent."""

    seconds: float
    spans: Floats
    moves: int


@dataclass(frozen=True, slots=True)
class Phases:
    """Of a step, in seconds. `busy`: slot-seconds by pool."""

    produce_s: float
    train_s: float
    other_s: float
    seconds: float
    busy: Mapping[str, float]
    speed: tuple[EngineSpeed, ...]


class SimulatedJob:
    """One scenario with one seed. What a step takes on a split is worked out once."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.work = cache(lambda step: workload(scenario, seed, step))
        self.expected = cache(self._expected)
        counts = {scenario.slots_at(step) for step in range(scenario.steps)}
        self._possible = {slots: frozenset(feasible(scenario.bounds_of(slots))) for slots in counts}
        self.splits: tuple[Split, ...] = tuple(sorted(set().union(*self._possible.values())))
        self._pace = replica_pace(scenario, seed)
        self._tables: dict[float | None, Floats] = {}
        self._measured: dict[tuple[int, Split, float | None], Measured] = {}
        self._plain: dict[tuple[int, Split], Produced] = {}
        self._lent: dict[tuple[int, Split], dict[float, Produced]] = {}

    def seconds(self, step: int, split: Split, lend_s: float | None = None) -> float:
        """What the step takes, without what led to the split. `lend_s`: what it costs to lend; None: nothing is lent."""
        train_s, other_s = self._others(step, split)
        return self._whole(split, self.produced(step, split, lend_s).seconds, train_s, other_s)

    def table(self, lend_s: float | None = None) -> Floats:
        """Seconds of each step on each of `splits`, [steps, splits]; infinite where it is not possible."""
        known = self._tables.get(lend_s)
        if known is None:
            known = self._tables[lend_s] = self._table(lend_s)
        return known

    def _table(self, lend_s: float | None) -> Floats:
        steps = range(self.scenario.steps)
        return np.array(
            [
                [self.seconds(step, split, lend_s) if split in possible else np.inf for split in self.splits]
                for step in steps
                for possible in (self._possible[self.scenario.slots_at(step)],)
            ]
        )

    def produced(self, step: int, split: Split, lend_s: float | None = None) -> Produced:
        """The step's batch on the split. All responses are asked for when it begins."""
        if lend_s is None or split.mode == "colocated" or not self.scenario.lendable:
            known = self._plain.get((step, split))
            if known is None:
                known = self._plain[step, split] = self._played(step, split, None)
            return known
        lent = self._lent.setdefault((step, split), {})
        if lend_s not in lent:
            # Where nothing was lent at a lower cost, nothing is at a higher one.
            same = next((one for cost, one in lent.items() if cost < lend_s and not one.moves), None)
            lent[lend_s] = same or self._played(step, split, lend_s)
        return lent[lend_s]

    def phases(self, step: int, split: Split, lend_s: float | None = None) -> Phases:
        """The step on the split, part by part."""
        told, produced = self.scenario, self.produced(step, split, lend_s)
        train_s, other_s = self._others(step, split)
        spans = produced.spans
        busy = {
            "rollout": _busy(spans[0], told.rollout),
            "reward": _busy(spans[1], told.reward),
            "train": train_s * split.train,
        }
        return Phases(
            produced.seconds,
            train_s,
            other_s,
            self._whole(split, produced.seconds, train_s, other_s),
            busy,
            (*_speeds(spans[0], told.rollout, "rollout"), *_speeds(spans[1], told.reward_at(step), "reward")),
        )

    def measured(self, step: int, split: Split, lend_s: float | None = None) -> Measured:
        """What the controllers would know of the step: with errors, and now and then without the speeds and times."""
        lend_s = lend_s if self.scenario.lendable else None
        known = self._measured.get((step, split, lend_s))
        if known is None:
            known = self._measured[step, split, lend_s] = self._seen(step, split, lend_s)
        return known

    def _seen(self, step: int, split: Split, lend_s: float | None) -> Measured:
        work, phases, noise = self.work(step), self.phases(step, split, lend_s), self.scenario.noise
        draw = np.random.default_rng((self.seed, step, 3))

        def noisy(value: float) -> float:
            return value * float(np.exp(draw.normal(0.0, noise.measured)))

        missing = bool(draw.random() < noise.missing)
        return Measured(
            step=step,
            split=split,
            lengths=tuple(work.lengths.tolist()),
            judged=tuple(work.judged.tolist()) if self.scenario.judging is not None else (),
            train_tokens=work.train_tokens,
            produce_s=None if missing else noisy(phases.produce_s),
            train_s=None if missing else noisy(phases.train_s),
            other_s=None if missing else noisy(phases.other_s),
            speed=() if missing else tuple(EngineSpeed(s.pool, s.running, noisy(s.token_s)) for s in phases.speed),
            busy={pool: noisy(seconds) for pool, seconds in phases.busy.items()},
            step_s=None if missing else noisy(phases.seconds),
        )

    @property
    def fastest(self) -> float:
        """The pace of the fastest replica, below 1."""
        return float(self._pace.min())

    def fastest_training(self, step: int) -> tuple[float, float]:
        """Of all splits that the step can have: training, and what is neither that nor production."""
        found = [self._others(step, split) for split in self._possible[self.scenario.slots_at(step)]]
        return min(one for one, _ in found), min(other for _, other in found)

    def _expected(self, step: int) -> Floats:
        """Of a batch's longest response, of a judgement and of a response, from the steps before, tokens, [3]."""
        if step == 0:
            told = self.scenario
            return np.array([4.0 * told.lengths.mean, told.judging.tokens if told.judging else 0.0, told.lengths.mean])
        longest = [float(self.work(one).lengths.max()) for one in range(max(step - REMEMBERED, 0), step)]
        return np.array(
            [
                float(np.mean(longest)),
                float(self.work(step - 1).judged.mean()),
                float(self.work(step - 1).lengths.mean()),
            ]
        )

    def _others(self, step: int, split: Split) -> tuple[float, float]:
        """Training, and what is neither that nor production."""
        told, work = self.scenario, self.work(step)
        train_s = (told.training.fixed_s + work.train_tokens / (told.training.rate * split.train)) * work.pace
        turns = 0 if split.mode == "coexisting" else 3 if told.judging is not None else 2
        return train_s, told.training.sync_s + told.wake_s * turns

    def _whole(self, split: Split, produce_s: float, train_s: float, other_s: float) -> float:
        if self.scenario.overlaps and split.mode == "coexisting":
            return max(produce_s, train_s + other_s)
        return produce_s + train_s + other_s

    def _played(self, step: int, split: Split, lend_s: float | None) -> Produced:
        told, work = self.scenario, self.work(step)
        judged = told.judging is not None
        if split.mode == "coexisting":
            pace = np.concatenate(
                (
                    self._replicas(0, split.rollout, told.rollout.size),
                    self._replicas(split.rollout, split.reward, told.reward.size),
                )
            )
            return self._served(
                work.lengths,
                work.judged if judged else NO_TOKENS,
                pace,
                split.rollout // told.rollout.size,
                step,
                lend_s,
            )
        rollout = self._served(
            work.lengths, NO_TOKENS, self._replicas(0, split.rollout, told.rollout.size), None, step, None
        )
        if not judged:
            return rollout
        reward = self._served(
            work.judged, NO_TOKENS, self._replicas(0, split.reward, told.reward.size), None, step, None, turned=True
        )
        return Produced(rollout.seconds + reward.seconds, rollout.spans + reward.spans[::-1], 0)

    def _replicas(self, first: int, slots: int, size: int) -> Floats:
        return self._pace[first : first + slots // size * size : size]

    def _served(
        self,
        lengths: Floats,
        judged: Floats,
        pace: Floats,
        rollout: int | None,
        step: int,
        lend_s: float | None,
        *,
        turned: bool = False,
    ) -> Produced:
        engines = (self.scenario.rollout, self.scenario.reward_at(step))[:: -1 if turned else 1]
        end, _, spans, moves = play(
            lengths,
            judged,
            pace,
            pace.size if rollout is None else rollout,
            np.array([[one.token_s, one.sequence_s] for one in engines]),
            np.array([one.running for one in engines]),
            NEVER if lend_s is None else BY_RULE,
            lend_s or 0.0,
            EVERY_S,
            self.expected(step),
            NO_MOVES,
        )
        return Produced(float(end), spans, int(moves))


NO_TOKENS: NDArray[np.float64] = np.zeros(0)


def _busy(spans: Floats, engine: Engine) -> float:
    """Slot-seconds, each by the share of what saturates the engine."""
    running = np.arange(spans.size)
    saturating = min(engine.token_s / engine.sequence_s, engine.running)
    return float((spans * np.minimum(running / saturating, 1.0)).sum()) * engine.size


def _speeds(spans: Floats, engine: Engine, pool: str) -> tuple[EngineSpeed, ...]:
    """What a pool's engines report: what a token took at the loads they had, from twice to twice."""
    found, least, whole = [], 1, float(spans[1:].sum())
    while least < spans.size:
        span = spans[least : 2 * least]
        seconds = float(span.sum())
        if seconds > 0.02 * whole:
            running = float((span * np.arange(least, least + span.size)).sum()) / seconds
            found.append(EngineSpeed(pool, running, engine.token_s + engine.sequence_s * running))
        least *= 2
    return tuple(found)
