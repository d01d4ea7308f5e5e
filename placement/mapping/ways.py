"""The ways in which a job's pools can lie on the slots of a cluster, before anybody asks whether they fit. Pure.

A replica spans 1, 2, 4 or more slots of one node, so many that its heads can be divided; pools lie side by side (co-existing), or all
slots go through the phases together (co-located), with every model awake, or with those asleep whose turn it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from placement.mapping.cluster import Cluster
from placement.mapping.shapes import ModelShape
from placement.mapping.workload import Workload
from placement.plan import counted
from placement.split import Bounds, Split, feasible

FEW = 64
"""So many slots and fewer are shared out in every way; more of them in about `GRID` sizes of each pool."""
GRID = 24


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """One of them. `rollout_size`, `reward_size`: slots of a replica; `ranks`: train ranks, a slot each; `asleep`: co-located, and
    who is not at work sleeps; `starts`: whether the spec's engines can span so many slots, which SGLang's alone can."""

    split: Split
    rollout_size: int
    reward_size: int
    asleep: bool
    starts: bool = True

    @property
    def ranks(self) -> int:
        """Train ranks."""
        return self.split.train

    def __str__(self) -> str:
        spans = []
        if self.rollout_size > 1:
            spans.append(f"rollout engines over {self.rollout_size}")
        if self.reward_size > 1:
            spans.append(f"judges over {self.reward_size}")
        if self.split.mode == "colocated":
            turns = "memory in turns" if self.asleep else "memory kept"
            slots, ranks = counted(self.split.rollout, "slot"), counted(self.ranks, "rank")
            return ", ".join([f"co-located: {slots} in turn, {ranks}, {turns}", *spans])
        reward = f", {self.split.reward} reward" if self.split.reward else ""
        return ", ".join([f"co-existing: {self.split.rollout} rollout{reward}, {self.split.train} train", *spans])


def ways(cluster: Cluster, workload: Workload) -> Iterator[Way]:
    """All of them, in an order of its own. Where memory is the host's, nothing is gained by sleeping, so it is not tried unasked."""
    slots, judged = cluster.slots, bool(workload.judges)
    trains = _sizes(max(1, min(slots, workload.training.samples // workload.training.mini_batches)))
    turns = workload.turns if cluster.device.is_gpu else workload.turns[:1]
    reward_sizes = _spans(cluster, [judge.shape for judge in workload.judges]) if judged else (1,)
    for rollout_size in _spans(cluster, [workload.rollout.shape]):
        for reward_size in reward_sizes:
            starts = _starts(workload, rollout_size, reward_size)
            bounds = Bounds(slots, rollout_size, reward_size, trains, judged, colocated=False)
            for split in _splits(bounds):
                yield Way(split, rollout_size, reward_size, False, starts)
            if slots < max(rollout_size, reward_size):
                continue
            rollout, reward = (slots // size * size for size in (rollout_size, reward_size))
            for train in trains:
                split = Split("colocated", rollout, reward if judged else 0, train)
                for asleep in turns:
                    yield Way(split, rollout_size, reward_size, asleep, starts)


def ways_within(bounds: Bounds, workload: Workload, *, gpu: bool) -> Iterator[Way]:
    """Those in which a job can be begun as its spec stands: within `bounds`, and on shared slots the memory had as it would be, which is
    in turns on GPUs where the spec leaves it open."""
    asleep = workload.turns[-1 if gpu else 0]
    for split in _splits(bounds):
        yield Way(split, bounds.rollout_size, bounds.reward_size, asleep if split.mode == "colocated" else False)


def _starts(workload: Workload, rollout_size: int, reward_size: int) -> bool:
    wide = [workload.rollout] * (rollout_size > 1) + list(workload.judges) * (reward_size > 1)
    return all(served.engine == "sglang" for served in wide)


def _splits(bounds: Bounds) -> Iterator[Split]:
    """Those of `feasible`; on many slots only those with one of the numbers of judges that are tried, without counting through the rest:
    of a hundred thousand slots there are a billion."""
    if bounds.slots <= FEW or not bounds.judged:
        yield from feasible(bounds)
        return
    together = bounds.all_together()
    if together is not None:
        yield together
    for train in bounds.sizes():
        left = bounds.slots - train
        for judges in _sizes(bounds.slots):
            reward = judges * bounds.reward_size
            rollout = (left - reward) // bounds.rollout_size * bounds.rollout_size
            if rollout > 0 and left - reward - rollout < bounds.reward_size:
                yield Split("coexisting", rollout, reward, train)


def _sizes(most: int) -> tuple[int, ...]:
    """Sizes that a pool may have: every one up to `FEW`, beyond that about `GRID` of them, powers of two among them."""
    if most <= FEW:
        return tuple(range(1, most + 1))
    powers = {1 << n for n in range(most.bit_length()) if 1 << n <= most}
    even = {max(1, round(most * n / GRID / 8) * 8) for n in range(1, GRID + 1)}
    return tuple(sorted(size for size in powers | even | {most} if size <= most))


def _spans(cluster: Cluster, shapes: Sequence[ModelShape]) -> tuple[int, ...]:
    """Slots that a replica of each of these models may span: within a node, and by which the heads can be divided."""
    if not cluster.device.is_gpu:
        return (1,)
    return tuple(
        size
        for size in (1 << n for n in range(cluster.smallest_node.bit_length()))
        if all(kind.accelerators % size == 0 for kind in cluster.nodes)
        and all(shape.heads % size == 0 and shape.kv_heads % size == 0 for shape in shapes)
    )
