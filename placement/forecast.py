"""The seconds that a step will take on each split, from what was measured of the job so far.

Lengths are those of the newest steps since the last jump, each moved along their trend (`placement.laws`). A pool's engines serve
`running` requests at `token_s + sequence_s * running` seconds a token, and training takes `fixed_s + slot_s * tokens / slots`; `laws`
fits these numbers.

A pool's seconds for a batch: a replica has its share of the responses that are still running, whatever number of tokens they have.
Judges: what is asked after any moment must be served from it on. Lending within a step reaches whatever other shares of the same slots
are better by more than it costs. What this model leaves out shows as a factor, which `policies.corrections` learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.laws import DecodeLaw, Floats, TrainLaw
from placement.measurements import MeasuredStep
from placement.slots import Split

POINTS = 40
"""Responses of a batch, by rank, that stand for the others; the longest stand for themselves."""

LONGEST = 12

SHARP = 6.0
"""How sharply the later of two ends decides."""

LEFT = 0.22
"""What lending leaves of how far a split is behind the best one with the same world, as a share of what that takes: all of it where it
is little, and where it is much no more than this. What the rule reaches in the simulator, on the seeds that things are tuned on."""

LENT_LATE = 0.5
"""Share of what it costs to lend by which that puts the end off: some replicas serve on meanwhile."""

MOST_WORK = 500_000
"""Splits times points that one forecast looks at: with more splits, fewer steps of the window."""

ROLLOUT, REWARD, TRAIN, TOGETHER = range(4)
"""Columns of what splits are forecast by: slots of each pool, and 1 where all slots go in turn."""

Shapes = NDArray[np.int64]


def shapes_of(splits: Sequence[Split]) -> Shapes:
    """What splits are forecast by, [splits, 4]."""
    rows = [[s.rollout, s.reward, s.train, s.mode == "colocated"] for s in splits]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What stays as it is: slots of a replica, and how many requests an engine runs at a time."""

    rollout_size: int = 1
    reward_size: int = 1
    rollout_most: int = 64
    reward_most: int = 64


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """A step's responses by length, [p] points: tokens between them, how many go on meanwhile, how many end from there on; and what was
    trained on. `length`, `judgement`: means, tokens; 0 where nothing was judged."""

    gaps: Floats
    going: Floats
    after: Floats
    length: float
    judgement: float
    train_tokens: float

    @classmethod
    def of(cls, step: MeasuredStep) -> LengthProfile:
        """The step's."""
        judgement = float(np.mean(np.asarray(step.judged))) if step.judged else 0.0
        return cls.made(np.asarray(step.lengths or (1.0,), dtype=np.float64), judgement, step.train_tokens)

    @classmethod
    def made(cls, lengths: Floats, judgement: float, train_tokens: float) -> LengthProfile:
        """Of responses of so many tokens, [n]."""
        ordered = np.sort(lengths)
        ranks = _ranks(ordered.size)
        before = np.concatenate(([0], ranks[:-1] + 1))
        return cls(
            np.diff(ordered[ranks], prepend=0.0),
            ordered.size - (before + ranks) / 2.0,
            ordered.size - ranks.astype(np.float64),
            float(ordered.mean()),
            judgement,
            train_tokens,
        )


@lru_cache(maxsize=64)
def _ranks(count: int) -> NDArray[np.int64]:
    """Of the responses that stand for all, ascending."""
    spread = np.linspace(0, count - 1, min(POINTS, count)).round().astype(np.int64)
    return np.unique(np.concatenate((spread, np.arange(max(count - LONGEST, 0), count))))


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step to come. `batches`: what it may be like; `longer`, `wordier`: by what the responses of each are longer by then, and the
    judgements, [batches]. `apart_s`, `together_s`: what is neither production nor training, in either mode. `lend_s`: what it costs to
    lend within the step; None: nothing is lent. `nodes`: that share prompts out alike."""

    pools: PoolLimits
    rollout: DecodeLaw
    reward: DecodeLaw
    train: TrainLaw
    batches: tuple[LengthProfile, ...]
    longer: Floats
    wordier: Floats
    apart_s: float
    together_s: float
    overlaps: bool
    lend_s: float | None
    nodes: int = 1
    group: int = 1
    """Responses of a prompt, which are all made by one engine."""

    def seconds(self, shapes: Shapes, off: Floats | None = None) -> Floats:
        """Of a step on each split, [splits]: the mean over the batches. `shapes`: the splits'; `off`: what production is multiplied by,
        [splits]."""
        return np.asarray(self.each(shapes, off).mean(axis=0))

    def each(self, shapes: Shapes, off: Floats | None = None) -> Floats:
        """Seconds of a step with each batch on each split, [batches, splits]."""
        produce = self.produce_s(shapes)
        if off is not None:
            produce = produce * off
        world = shapes[:, TRAIN].astype(np.float64)
        apart = shapes[:, TOGETHER] == 0
        tokens = np.array([batch.train_tokens for batch in self.batches]) * self.longer
        rest = self.train.fixed_s + self.train.slot_s * tokens[:, None] / world
        rest = rest + np.where(apart, self.apart_s, self.together_s)
        return np.asarray(
            np.where(apart, np.maximum(produce, rest), produce + rest) if self.overlaps else produce + rest
        )

    def produce_s(self, shapes: Shapes) -> Floats:
        """Until a batch is whole, [batches, splits]."""
        keep = max(MOST_WORK // (len(shapes) * (POINTS + LONGEST)), 1)
        newest = range(max(len(self.batches) - keep, 0), len(self.batches))
        found: dict[int, Floats] = {}
        for count in {self.batches[i].gaps.size for i in newest}:
            same = [i for i in newest if self.batches[i].gaps.size == count]
            found.update(zip(same, self._produced(same, shapes), strict=True))
        return np.stack([found[max(i, newest[0])] for i in range(len(self.batches))])

    def _produced(self, numbers: Sequence[int], shapes: Shapes) -> Floats:
        """Of batches with as many points each, [numbers, splits]."""
        batches = [self.batches[i] for i in numbers]
        rollout, at = _distinct(_worth(shapes[:, ROLLOUT] // self.pools.rollout_size, self.nodes, self._groups()))
        reward, of = _distinct(shapes[:, REWARD] // self.pools.reward_size)
        together = shapes[:, TOGETHER] == 1
        ends = np.stack([drain_times(self.batches[i], self.longer[i], rollout, self.rollout) for i in numbers])
        tokens = np.array([batch.judgement for batch in batches]) * self.wordier[list(numbers)]
        if not tokens.any():
            return np.asarray(ends[:, at, -1])
        after = np.stack([batch.after for batch in batches])
        served = judging_times(after, tokens, reward, self.reward)
        whole = ends[:, at] + served[:, of]
        crowd = int((after[0] >= after[0, 0] / 2).sum())
        produced = _either(whole.max(axis=2), whole[:, :, :crowd].max(axis=2))
        # In turn: the judges begin with the whole batch.
        produced = np.where(together, ends[:, at, -1] + served[:, of, 0], produced)
        return self._lent(produced, shapes, together)

    def _groups(self) -> float | None:
        """Prompts that a step is to have; None: it makes no difference."""
        return float(self.batches[-1].after[0]) / self.group if self.group > 1 else None

    def _lent(self, produced: Floats, shapes: Shapes, together: NDArray[np.bool_]) -> Floats:
        """With what lending reaches: most of what the best of the splits with the same world is better by, at its cost."""
        if self.lend_s is None or self.pools.rollout_size != self.pools.reward_size:
            return produced
        worlds = np.where(together, -1, shapes[:, TRAIN])
        reached = produced.copy()
        for world in set(worlds.tolist()) - {-1}:
            same = worlds == world
            best = produced[:, same].min(axis=1, keepdims=True)
            behind = produced[:, same] / np.maximum(best, 1e-9) - 1.0
            reached[:, same] = best * (1.0 + behind * LEFT / (behind + LEFT)) + LENT_LATE * self.lend_s
        return np.minimum(produced, reached)


def _worth(replicas: NDArray[np.int64], nodes: int, groups: float | None) -> Floats:
    """Engines that would take as long if responses could be shared out evenly: what one node has more of than another does nothing for
    the step, nor do engines that get a group less than another of their node."""
    alike = np.where(replicas >= nodes, replicas // nodes * nodes, replicas).astype(np.float64)
    if groups is None:
        return alike
    each = np.maximum(alike / nodes, 1.0)
    share = groups / nodes
    return alike * (share / each) / np.ceil(np.round(share / each, 9))


def _distinct(replicas: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The numbers that there are, from 1 on, and which of them each is."""
    there, at = np.unique(np.maximum(replicas, 1), return_inverse=True)
    return there, at


def _either(tail: Floats, crowd: Floats) -> Floats:
    """The later of two ends, and somewhat later where both come at about the same time: one is in the other's way."""
    share = np.minimum(crowd / np.maximum(tail, 1e-9), 1.0)
    return np.asarray(tail * (1.0 + share**SHARP) ** (1.0 / SHARP))


def drain_times(batch: LengthProfile, longer: float, replicas: NDArray[Any], law: DecodeLaw) -> Floats:
    """When the responses of each point end on so many replicas, all asked for at once, [replicas, points].

    What a replica has no room for waits, first come first served. While something waits, ends come as those of a renewal process do: in
    `t` a row has ended `t / mean + (cv**2 - 1) / 2` responses (Cox, Renewal Theory, 1962). The last that run drain as if begun together.
    """
    gaps, count = batch.gaps * longer, float(batch.after[0])
    together = np.cumsum(gaps * law.at(batch.going / replicas[:, None]), axis=1)
    crowded = count > law.most * replicas
    if not crowded.any():
        return np.asarray(together)
    lengths, full_s = np.cumsum(gaps), float(law.at(np.array(float(law.most))))
    mean = float((gaps * batch.going).sum()) / count
    varies = float((gaps * (2.0 * lengths - gaps) * batch.going).sum()) / count / mean**2 - 1.0
    rows = law.most * replicas[crowded, None].astype(np.float64)
    ended = count - batch.after
    flow = np.maximum((ended / rows + (1.0 - varies) / 2.0) * mean, lengths[0]) * full_s
    # The longest of all is among them, or has run beside full rows for so long that it ends no sooner.
    place = 1.0 - (batch.after - 1.0) / rows
    drain = np.interp(place, (ended + 1.0) / count, np.cumsum(gaps * law.at(law.most * batch.going / count)))
    last = np.maximum((count / rows - 1.0) * mean * full_s + drain, lengths[0] * full_s)
    is_last = batch.after <= rows
    begins = np.where(is_last, last, np.inf).min(axis=1, keepdims=True)
    together[crowded] = np.where(is_last, last, np.minimum(flow, begins))
    return np.asarray(together)


def judging_times(after: Floats, tokens: Floats, replicas: NDArray[np.int64], law: DecodeLaw) -> Floats:
    """How long so many judgements, [batches, points], of `tokens`, [batches], take on so many replicas if all are there, [batches,
    replicas, points]."""
    each = np.maximum(after[:, None] / replicas[:, None], 1.0)
    return np.asarray(each * tokens[:, None, None] * law.at(each) / np.minimum(each, law.most))
