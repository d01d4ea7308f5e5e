"""The first placement of a job: every way is tried, those that fit are put in order of predicted step time. Pure.

Of those that do not fit, one sentence for each kind says who exceeds what by how much: of a kind the one that is nearest to
fitting. Hints say which fields of the spec would change the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from placement.mapping.cluster import Cluster
from placement.mapping.fitting import Excess, Memory, Room, judge_replicas, room
from placement.mapping.speed import Machine, Replica
from placement.mapping.ways import Way, ways, ways_within
from placement.mapping.workload import Training, Workload
from placement.split import Bounds, Split

BETTER = 0.95
"""A hint is given where the step would take at most so much of what it takes."""


@dataclass(frozen=True, slots=True)
class Times:
    """Predicted seconds of a step's parts. `ahead`: the next responses are made while this step is trained."""

    rollout: float
    judging: float
    training: float
    publishing: float
    switching: float
    in_turn: bool
    ahead: bool

    @property
    def step(self) -> float:
        """From commit to commit. Judges of their own slots work beside rollout, else after it."""
        produced = self.rollout + self.judging if self.in_turn else max(self.rollout, self.judging)
        learned = self.training + self.publishing
        if self.ahead and not self.in_turn:
            return max(produced, learned)
        return produced + learned + self.switching


@dataclass(frozen=True, slots=True)
class Fit:
    """A way that fits, and what it is predicted to take."""

    way: Way
    room: Room
    times: Times


@dataclass(frozen=True, slots=True)
class Misfits:
    """Ways of one kind that do not fit: the one that is nearest to it, and how many there are."""

    way: Way
    excess: Excess
    count: int


@dataclass(frozen=True, slots=True)
class Found:
    """`fits`: the best first. `misfits`: the nearest first. `hints`: sentences about the spec."""

    fits: tuple[Fit, ...]
    misfits: tuple[Misfits, ...]
    hints: tuple[str, ...]

    @property
    def first(self) -> Fit | None:
        """What the job can be started with."""
        return next((fit for fit in self.fits if fit.way.starts), None)


def search(workload: Workload, cluster: Cluster) -> Found:
    """Try them all."""
    fits, misfits = _tried(ways(cluster, workload), workload, cluster)
    return Found(fits, misfits, tuple(_hints(workload, cluster, fits)))


@dataclass(frozen=True, slots=True)
class First:
    """What a job begins with before anything of it was measured: the best of `count` ways that fit. `untimed`: why it is only the first
    of them, for want of figures."""

    fit: Fit
    count: int
    untimed: str = ""

    @property
    def split(self) -> Split:
        """Its split."""
        return self.fit.way.split

    @property
    def expected_s(self) -> float | None:
        """What a step is predicted to take."""
        return None if self.untimed else self.fit.times.step

    @property
    def reason(self) -> str:
        """Why."""
        if self.untimed:
            which = f"it is the first of {self.count} ways that fit" if self.count > 1 else "it alone fits"
            return f"nothing is measured yet, and {self.untimed}: {which}"
        which = f"of {self.count} ways that fit it" if self.count > 1 else "it alone fits, and"
        least = "least, " if self.count > 1 else ""
        return f"nothing is measured yet: {which} is predicted to take {least}{self.fit.times.step:.3g} s a step"

    @property
    def cut(self) -> str:
        """Which engines want more memory for their caches than there is, and what to write against that; or nothing."""
        cells, bound = dict(self.fit.room.cells), self.fit.room.bound
        keys = {
            name: "rollout.cache_tokens" if name == "rollout" else f"serving.cache_tokens of {name}" for name in bound
        }
        rooms = [f"{name} has room for a cache of {cells[name]} tokens" for name in bound]
        told = " and ".join(f"{keys[name]}: {cells[name]}" for name in bound)
        return f"{', '.join(rooms)} and takes more unless it is told not to ({told})" if bound else ""


def first_split(workload: Workload, cluster: Cluster, bounds: Bounds, untimed: str = "") -> First | Misfits | None:
    """What a job begins with, of what can be started as its spec stands: ways in which an engine that is left to itself would take more
    than there is come last. Misfits: nothing fits, and this is the nearest to it. None: there are too few slots. `untimed`: why no time
    can be predicted."""
    gpu = cluster.device.is_gpu
    fits, misfits = _tried(ways_within(bounds, workload, gpu=gpu), workload, cluster)
    if not fits:
        return next(iter(misfits), None)
    if untimed:
        order = {way: number for number, way in enumerate(ways_within(bounds, workload, gpu=gpu))}
        return First(min(fits, key=lambda fit: (bool(fit.room.bound), order[fit.way])), len(fits), untimed)
    return First(min(fits, key=lambda fit: (bool(fit.room.bound), fit.times.step, fit.way)), len(fits))


def _tried(some: Iterable[Way], workload: Workload, cluster: Cluster) -> tuple[tuple[Fit, ...], tuple[Misfits, ...]]:
    memory, machine = Memory.of(cluster), Machine.of(cluster)
    fits: list[Fit] = []
    failed: dict[tuple[object, ...], Misfits] = {}
    for way in some:
        found = room(way, workload, cluster, memory)
        if isinstance(found, Room):
            fits.append(Fit(way, found, predicted(way, found, workload, machine)))
            continue
        spans = (way.rollout_size, way.reward_size) if found.engines else ()
        kind = (way.split.mode, way.asleep, spans, found.names, bool(found.where))
        known = failed.get(kind)
        if known is None:
            failed[kind] = Misfits(way, found, 1)
        else:
            nearer = (found.over, not way.starts, way) < (known.excess.over, not known.way.starts, known.way)
            nearest = Misfits(way, found, 0) if nearer else known
            failed[kind] = replace(nearest, count=known.count + 1)
    fits.sort(key=lambda fit: (fit.times.step, fit.way))
    misfits = sorted(failed.values(), key=lambda one: (one.excess.over, one.way))
    return tuple(fits), tuple(misfits)


def predicted(way: Way, room: Room, workload: Workload, machine: Machine) -> Times:
    """The step's parts."""
    rows = dict(room.rows)
    rollout = Replica(way.rollout_size, rows["rollout"])
    judging = sum(
        machine.serve_s(judge, judge_replicas(judge, way), Replica(way.reward_size, rows[judge.name]))
        for judge in workload.judges
    )
    return Times(
        rollout=machine.serve_s(workload.rollout, way.split.rollout // way.rollout_size, rollout),
        judging=judging,
        training=machine.train_s(workload.training, way.ranks),
        publishing=machine.publish_s(workload.rollout),
        switching=machine.switch_s(room.slept),
        in_turn=way.split.mode == "colocated",
        ahead=workload.ahead,
    )


def _hints(workload: Workload, cluster: Cluster, fits: Sequence[Fit]) -> Iterator[str]:
    now = next((fit for fit in fits if fit.way.starts), None)
    for words, training in _alternatives(workload.training):
        other = replace(workload, training=training)
        others, _ = _tried(ways(cluster, other), other, cluster)
        best = next((fit for fit in others if fit.way.starts), None)
        if best is None:
            continue
        if now is None:
            yield f"With {words} {best.way} would fit, at a predicted {best.times.step:.3g} s a step"
        elif best.times.step < BETTER * now.times.step:
            yield f"With {words} {best.way} is predicted to take {best.times.step:.3g} s a step instead of {now.times.step:.3g} s"
    if now is None and any(fit.way.starts is False for fit in fits):
        yield "What fits has engines that span several slots, which SGLang's can: set engine: sglang, and plan anew"


def _alternatives(training: Training) -> Iterator[tuple[str, Training]]:
    for stage in (1, 2, 3):
        if stage != training.stage:
            yield f"train.zero_stage: {stage}", replace(training, stage=stage)
    if not training.recomputes:
        yield "train.activation_checkpointing: true", replace(training, recomputes=True)
        if training.stage != 3:
            both = replace(training, recomputes=True, stage=3)
            yield "train.zero_stage: 3 and train.activation_checkpointing: true", both
