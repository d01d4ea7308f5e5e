"""A simulated job: the work of its steps, the time of each step on a split with and without lending, and what
controllers would measure.

The work of a step is sampled once per scenario, seed and step, and is the same for every policy. A step at staleness 0
is production (generate and judge), then training, then weight sync; in a co-located split models also sleep and wake in
between. At staleness 1 in a co-existing split, a batch is produced while the previous one is trained, and the step
takes as long as the longer of the two. The model ignores that these belong to different batches, and that the end of
one batch can overlap with the beginning of the next.

At staleness 0, slots that are lent at the end of production return while ranks train; if the return takes longer, it
delays the next step. At staleness 1 they return at the beginning of the next production, and those replicas start late.
The lending rule uses earlier measurements, as in a live cluster. With "true knowledge" it uses the step's own lengths
and speeds without errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from placement.laws import Floats, PaceTracker
from placement.lending import EngineRows, pool_speeds
from placement.measurements import EngineSpeed, MeasuredStep, least_requests
from placement.simulator.kernel import BY_RULE, NEVER, play_batch
from placement.simulator.scenario import Scenario, ScenarioEngine
from placement.slots import Split, count_turns, feasible


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """The work of one step. `lengths`, `judged`: tokens of each response and of its judgement, [n]. `train_tokens`:
    tokens of the groups that are not filtered. `pace`: random factor on the training time."""

    lengths: Floats
    judged: Floats
    train_tokens: float
    pace: float


def draw_workload(scenario: Scenario, seed: int, step: int) -> SimulatedWorkload:
    """Sample the work of a step, numbered from 0. The same arguments give the same work."""
    draw = np.random.default_rng((seed, step, 1))
    groups = max(scenario.groups, round(scenario.groups / (1 - scenario.filtered)))
    lengths = _lengths(scenario, draw, groups, step)
    judged = _judged(scenario, draw, lengths.size, step)
    kept = lengths.reshape(groups, -1)[draw.permutation(groups)[: scenario.groups]]
    tokens = float(kept.sum()) + scenario.prompt * kept.size
    pace = float(np.exp(draw.normal(0.0, scenario.noise.train)))
    return SimulatedWorkload(lengths, judged, tokens, pace)


def replica_pace(scenario: Scenario, seed: int) -> Floats:
    """Sample a constant factor on the token time of the replica on each slot, [slots]. Policies do not know it."""
    return np.exp(np.random.default_rng((seed, 0, 2)).normal(0.0, scenario.noise.replica, scenario.slots))


def _lengths(scenario: Scenario, draw: np.random.Generator, groups: int, step: int) -> Floats:
    settings = scenario.lengths
    mean = settings.mean * settings.growth ** (step / max(scenario.steps - 1, 1))
    if settings.jump_at is not None and step >= settings.jump_at:
        mean *= settings.jump
    width = np.sqrt(np.log1p(settings.spread**2))
    own = draw.standard_normal((groups, scenario.samples))
    shared = draw.standard_normal((groups, 1))
    z = np.sqrt(settings.same_prompt) * shared + np.sqrt(1 - settings.same_prompt) * own
    drawn: Floats = np.exp(np.log(mean) - width**2 / 2 + width * z)
    return np.clip(np.ceil(drawn), 1, settings.cap).ravel()


def _judged(scenario: Scenario, draw: np.random.Generator, count: int, step: int) -> Floats:
    settings = scenario.judging
    if settings is None:
        return np.zeros(count)
    slow = settings.slow if settings.slow_from <= step < settings.slow_until else 1.0
    width = np.sqrt(np.log1p(settings.spread**2))
    drawn: Floats = np.ceil(settings.tokens * slow * np.exp(width * draw.standard_normal(count) - width**2 / 2))
    return drawn


LOADS = (1.0, 3.0, 9.0)
"""Numbers of concurrent requests at which the true token times are computed for the rule with true knowledge."""

NOBODYS = MeasuredStep(0, Split("coexisting", 1, 1, 1), (), (), 0.0, None, None, None, (), {})
"""A measured step without values, to be filled in."""


@dataclass(frozen=True, slots=True, eq=False)
class LendingKnowledge:
    """Input of the lending rule as arrays for `play_batch`. All zeros: nothing is known, so nothing is lent.

    `pools`: by pool, [2, 4]: the columns `ALONE_S`, `SATURATING`, `TOKENS`, `RESIDUAL` of the kernel. `tail`: by number
    of outstanding responses, [2, n]: remaining tokens of the last one, and mean remaining tokens; n = 0: all responses have equal
    lengths.
    """

    pools: Floats = field(default_factory=lambda: np.zeros((2, 4)))
    tail: Floats = field(default_factory=lambda: np.zeros((2, 1)))


UNKNOWN = LendingKnowledge()


@dataclass(frozen=True, slots=True, eq=False)
class LendingSetup:
    """Settings of lending within a step. `cost_s`: seconds in which a lent replica serves nothing. `told`: input of the
    lending rule. `late`: number of replicas, lent in the previous step, that return `late_s` seconds after the start of
    this one; above 0 to rollout, below 0 to the judges."""

    cost_s: float
    knowledge: LendingKnowledge
    late: int = 0
    late_s: float = 0.0


def estimated_knowledge(history: Sequence[MeasuredStep], scenario: Scenario, paces: PaceTracker) -> LendingKnowledge:
    """Return the input of the lending rule that a live controller would have after these measurements. `paces`: a
    tracker that has seen the history."""
    rows = EngineRows(scenario.rollout.running, scenario.reward.running)
    speeds = pool_speeds(history, rows, paces.since("rollout"), paces.since("reward"))
    if speeds is None:
        return UNKNOWN
    both = speeds.rollout, speeds.reward
    pools = [[one.alone_s, one.saturating, one.tokens, one.residual] for one in both]
    return LendingKnowledge(np.array(pools), np.array(speeds.rollout.tail).reshape(-1, 2).T)


def true_knowledge(step: int, scenario: Scenario, work: SimulatedWorkload) -> LendingKnowledge:
    """Return the input of the lending rule from the step's true lengths and speeds, which a live controller cannot
    know."""
    speed = (*_exact(scenario.rollout, "rollout"), *_exact(scenario.reward_at(step), "reward"))
    lengths, judged = tuple(work.lengths.tolist()), tuple(work.judged.tolist())
    return estimated_knowledge([replace(NOBODYS, lengths=lengths, judged=judged, speed=speed)], scenario, PaceTracker())


def _exact(engine: ScenarioEngine, pool: str) -> tuple[EngineSpeed, ...]:
    return tuple(EngineSpeed(pool, load, engine.token_s + engine.sequence_s * load) for load in LOADS)


EVERY_S = 1.0
"""Seconds between two evaluations of the lending rule."""

NO_MOVES = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class SimulatedBatch:
    """Result of producing one batch. `seconds`: until it was complete. `spans`: replica-seconds by pool and number of
    running requests, [2, n]. `moves`: number of replicas that changed their pool. `away`: replicas still lent at the
    end; above 0: to the judges. `back_s`: seconds until all of them have returned."""

    seconds: float
    spans: Floats
    moves: int = 0
    away: int = 0
    back_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedPhases:
    """Seconds of a step and of its parts. `busy`: slot-seconds of work by pool. `speed`: true speeds of the engines at
    the loads that they had."""

    produce_s: float
    train_s: float
    other_s: float
    seconds: float
    busy: Mapping[str, float]
    speed: tuple[EngineSpeed, ...]


class SimulatedJob:
    """A scenario with one seed. The result of each step on each split is cached."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.work = cache(lambda step: draw_workload(scenario, seed, step))
        self._truth = cache(lambda step: true_knowledge(step, scenario, self.work(step)))
        counts = {scenario.slots_at(step) for step in range(scenario.steps)}
        self._possible = {slots: frozenset(feasible(scenario.bounds_of(slots))) for slots in counts}
        self.splits: tuple[Split, ...] = tuple(sorted(set().union(*self._possible.values())))
        self._pace = replica_pace(scenario, seed)
        self._tables: dict[float | None, Floats] = {}
        self._measured: dict[tuple[int, Split], MeasuredStep] = {}
        self._plain: dict[tuple[int, Split], SimulatedBatch] = {}
        self._lent: dict[tuple[int, Split], dict[float, SimulatedBatch]] = {}

    def seconds(self, step: int, split: Split, produced: SimulatedBatch | None = None) -> float:
        """Return the seconds of a step on a split, without the cost of changing to that split. `produced`: result of
        its batch; None: its batch without lending."""
        made = produced or self.produced(step, split)
        train_s, other_s = self._others(step, split, made)
        return self._whole(split, made.seconds, train_s, other_s)

    def table(self, lend_s: float | None = None) -> Floats:
        """Return the seconds of each step on each split of `self.splits`, [steps, splits]; infinite where the split is
        not possible. `lend_s`: None: no lending; else lending with true knowledge and this cost in seconds. At
        staleness 1, slots lent in the previous step are assumed to have returned."""
        known = self._tables.get(lend_s)
        if known is None:
            known = self._tables[lend_s] = self._table(lend_s)
        return known

    def _table(self, lend_s: float | None) -> Floats:
        steps = range(self.scenario.steps)
        return np.array(
            [
                [
                    self.seconds(step, split, self._knowing(step, split, lend_s)) if split in possible else np.inf
                    for split in self.splits
                ]
                for step in steps
                for possible in (self._possible[self.scenario.slots_at(step)],)
            ]
        )

    def _knowing(self, step: int, split: Split, lend_s: float | None) -> SimulatedBatch:
        """Return the result of the step's batch with lending by true knowledge; `lend_s` None: without lending."""
        if lend_s is None or not self._lends(split):
            return self.produced(step, split)
        lent = self._lent.setdefault((step, split), {})
        if lend_s not in lent:
            # If nothing was lent at a lower cost, nothing is lent at a higher one.
            same = next((one for cost, one in lent.items() if cost < lend_s and not one.moves), None)
            lent[lend_s] = same or self._played(step, split, LendingSetup(lend_s, self._truth(step)))
        return lent[lend_s]

    def _lends(self, split: Split) -> bool:
        return split.mode == "coexisting" and self.scenario.lendable

    def produced(self, step: int, split: Split, lend: LendingSetup | None = None) -> SimulatedBatch:
        """Simulate the production of the step's batch on the split. All responses are requested at its start."""
        if lend is not None and self._lends(split):
            return self._played(step, split, lend)
        known = self._plain.get((step, split))
        if known is None:
            known = self._plain[step, split] = self._played(step, split, None)
        return known

    def phases(self, step: int, split: Split, produced: SimulatedBatch) -> SimulatedPhases:
        """Return the times of the parts of a step on the split. `produced`: result of its batch."""
        scenario = self.scenario
        train_s, other_s = self._others(step, split, produced)
        spans = produced.spans
        busy = {
            "rollout": _busy(spans[0], scenario.rollout),
            "reward": _busy(spans[1], scenario.reward),
            "train": train_s * split.train,
        }
        return SimulatedPhases(
            produced.seconds,
            train_s,
            other_s,
            self._whole(split, produced.seconds, train_s, other_s),
            busy,
            (*_speeds(spans[0], scenario.rollout, "rollout"), *_speeds(spans[1], scenario.reward_at(step), "reward")),
        )

    def measured(self, step: int, split: Split, produced: SimulatedBatch | None = None) -> MeasuredStep:
        """Return what controllers would measure in a step: with random errors, and sometimes with times and speeds
        missing. `produced`: result of its batch; None: its batch without lending."""
        plain = self.produced(step, split)
        if produced is not None and produced is not plain:
            return self._seen(step, split, produced)
        known = self._measured.get((step, split))
        if known is None:
            known = self._measured[step, split] = self._seen(step, split, plain)
        return known

    def _seen(self, step: int, split: Split, produced: SimulatedBatch) -> MeasuredStep:
        work, phases, noise = self.work(step), self.phases(step, split, produced), self.scenario.noise
        draw = np.random.default_rng((self.seed, step, 3))

        def noisy(value: float) -> float:
            return value * float(np.exp(draw.normal(0.0, noise.measured)))

        missing = bool(draw.random() < noise.missing)
        return MeasuredStep(
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

    def _others(self, step: int, split: Split, produced: SimulatedBatch) -> tuple[float, float]:
        """Return the seconds of training, and the seconds that are neither training nor production."""
        scenario, work = self.scenario, self.work(step)
        train_s = (scenario.training.fixed_s + work.train_tokens / (scenario.training.rate * split.train)) * work.pace
        changes = 0 if split.mode == "coexisting" else count_turns(judged=scenario.judging is not None)
        late_s = 0.0 if scenario.overlaps else max(produced.back_s - train_s, 0.0)
        return train_s, scenario.training.sync_s + scenario.wake_s * changes + late_s

    def _whole(self, split: Split, produce_s: float, train_s: float, other_s: float) -> float:
        if self.scenario.overlaps and split.mode == "coexisting":
            return max(produce_s, train_s + other_s)
        return produce_s + train_s + other_s

    def _played(self, step: int, split: Split, lend: LendingSetup | None) -> SimulatedBatch:
        scenario, work = self.scenario, self.work(step)
        judged = scenario.judging is not None
        if split.mode == "coexisting":
            pace = np.concatenate(
                (
                    self._replicas(0, split.rollout, scenario.rollout.size),
                    self._replicas(split.rollout, split.reward, scenario.reward.size),
                )
            )
            return self._served(
                work.lengths,
                work.judged if judged else NO_TOKENS,
                pace,
                split.rollout // scenario.rollout.size,
                step,
                lend,
            )
        rollout = self._served(
            work.lengths, NO_TOKENS, self._replicas(0, split.rollout, scenario.rollout.size), None, step, None
        )
        if not judged:
            return rollout
        reward = self._served(
            work.judged, NO_TOKENS, self._replicas(0, split.reward, scenario.reward.size), None, step, None, turned=True
        )
        return SimulatedBatch(rollout.seconds + reward.seconds, rollout.spans + reward.spans[::-1])

    def _replicas(self, first: int, slots: int, size: int) -> Floats:
        return self._pace[first : first + slots // size * size : size]

    def _served(
        self,
        lengths: Floats,
        judged: Floats,
        pace: Floats,
        rollout: int | None,
        step: int,
        lend: LendingSetup | None,
        *,
        turned: bool = False,
    ) -> SimulatedBatch:
        engines = (self.scenario.rollout, self.scenario.reward_at(step))[:: -1 if turned else 1]
        setup = lend or NONE
        end, _, spans, moves, away, settling_s = play_batch(
            lengths,
            judged,
            pace,
            pace.size if rollout is None else rollout,
            np.array([[one.token_s, one.sequence_s] for one in engines]),
            np.array([one.running for one in engines]),
            NEVER if lend is None else BY_RULE,
            setup.cost_s,
            EVERY_S,
            setup.knowledge.pools,
            setup.knowledge.tail,
            NO_MOVES,
            setup.late,
            setup.late_s,
        )
        return SimulatedBatch(
            float(end), spans, int(moves), int(away), float(settling_s) + (setup.cost_s if away else 0.0)
        )


NONE = LendingSetup(0.0, UNKNOWN)
NO_TOKENS: NDArray[np.float64] = np.zeros(0)
NOTHING = SimulatedBatch(0.0, np.zeros((2, 1)))


def _busy(spans: Floats, engine: ScenarioEngine) -> float:
    """Return the busy slot-seconds of a pool. An engine counts in full from the number of requests at which a token
    takes twice as long as alone, and in proportion below. `spans`: replica-seconds by running requests."""
    running = np.arange(spans.size)
    saturating = min(engine.token_s / engine.sequence_s, engine.running)
    return float((spans * np.minimum(running / saturating, 1.0)).sum()) * engine.size


def _speeds(spans: Floats, engine: ScenarioEngine, pool: str) -> tuple[EngineSpeed, ...]:
    """Return the true token times of a pool's engines at the loads that they had for more than 2 % of the time.
    `spans`: replica-seconds by running requests."""
    found, load, whole = [], 0, float(spans[1:].sum())
    while (least := least_requests(load)) < spans.size:
        span = spans[least : least_requests(load + 1)]
        seconds = float(span.sum())
        if seconds > 0.02 * whole:
            running = float((span * np.arange(least, least + span.size)).sum()) / seconds
            found.append(EngineSpeed(pool, running, engine.token_s + engine.sequence_s * running))
        load += 1
    return tuple(found)
