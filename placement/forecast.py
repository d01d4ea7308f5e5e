"""Predict the seconds of a step on each split (slots per pool) from the job's measurements.

Response lengths are those of the newest steps since lengths last jumped, extrapolated along their trend
(`placement.laws`). An engine that serves `running` requests takes `token_s + sequence_s * running` seconds per token.
Training takes `fixed_s + slot_s * tokens / slots`. `laws` fits these numbers.

The production time of a batch is the time to generate its responses and to judge them. The model: each replica serves
an equal, possibly fractional, share of the unfinished responses; judging starts when a response is finished; lending
slots within a step reaches a better division of the same slots, at the cost of the change. `policies.corrections`
learns the remaining error as a factor.
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
"""Number of responses that represent a batch, evenly spaced in the order of their lengths."""

LONGEST = 12
"""Number of longest responses that are represented individually in addition, because they determine the end."""

SHARP = 6.0
"""Exponent of the smooth maximum of two end times."""

LEFT = 0.22
"""With lending, the largest gap in production time between a split and the best split with the same train world, as a
share of the best one's time. Without lending a gap may be larger; small gaps hardly shrink. Measured in the simulator
with the lending rule, on the tuning seeds."""

LENT_LATE = 0.5
"""Share of the lending cost that delays the end of the step. The rest is hidden, because other replicas serve on."""

MOST_WORK = 500_000
"""Limit of splits times points in one forecast. If there are more splits, the forecast uses fewer of the newest
batches."""

ROLLOUT, REWARD, TRAIN, TOGETHER = range(4)
"""Columns of the features of a split: slots of each pool, and 1 if the split is co-located."""

Shapes = NDArray[np.int64]
"""Features of splits, [splits, 4]."""


def shapes_of(splits: Sequence[Split]) -> Shapes:
    """Return the features of splits, [splits, 4]."""
    rows = [[s.rollout, s.reward, s.train, s.mode == "colocated"] for s in splits]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Constants of the pools: slots per replica, and the maximum of concurrent requests per engine."""

    rollout_size: int = 1
    reward_size: int = 1
    rollout_most: int = 64
    reward_most: int = 64


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """Response lengths of one batch, reduced to [p] points (representative responses, shortest first).

    `gaps`: tokens from the previous point to this one. `going`: responses that are unfinished in between, on average.
    `after`: responses that are unfinished before this point ends. `length`, `judgement`: mean tokens of a response and
    of its judgement; 0 if nothing was judged. `train_tokens`: tokens that the batch trains on.
    """

    gaps: Floats
    going: Floats
    after: Floats
    length: float
    judgement: float
    train_tokens: float

    @classmethod
    def of(cls, step: MeasuredStep) -> LengthProfile:
        """Make the profile of a measured step's batch."""
        judgement = float(np.mean(np.asarray(step.judged))) if step.judged else 0.0
        return cls.made(np.asarray(step.lengths or (1.0,), dtype=np.float64), judgement, step.train_tokens)

    @classmethod
    def made(cls, lengths: Floats, judgement: float, train_tokens: float) -> LengthProfile:
        """Make the profile of responses with these lengths in tokens, [n]."""
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
    """Return the indices of the responses that represent all `count` responses sorted by length, ascending."""
    spread = np.linspace(0, count - 1, min(POINTS, count)).round().astype(np.int64)
    return np.unique(np.concatenate((spread, np.arange(max(count - LONGEST, 0), count))))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Model of a future step, which predicts its seconds on any split.

    `rollout`, `reward`, `train`: speed of the engines and of training. `batches`: recent batches, each a possible batch
    of the future step. `longer`, `wordier`: factors on the response and judgement lengths of each, [batches].
    `apart_s`, `together_s`: seconds that are neither production nor training, in a co-existing and a co-located split.
    `overlaps`: in a co-existing split, the next batch is produced while this one trains. `lend_s`: cost of lending
    within the step; None: no lending. `nodes`: number of nodes that share the prompts equally.
    """

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
    """Responses per prompt. One engine generates all of them."""

    def seconds(self, shapes: Shapes, off: Floats | None = None) -> Floats:
        """Return the seconds of a step on each split, [splits]: the mean over the batches. `off`: learned factor on the
        production time of each split, [splits]."""
        return np.asarray(self.each(shapes, off).mean(axis=0))

    def each(self, shapes: Shapes, off: Floats | None = None) -> Floats:
        """Return the seconds of a step with each batch on each split, [batches, splits]. `off`: as in `seconds`."""
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
        """Return the production time of each batch on each split, [batches, splits]."""
        keep = max(MOST_WORK // (len(shapes) * (POINTS + LONGEST)), 1)
        newest = range(max(len(self.batches) - keep, 0), len(self.batches))
        found: dict[int, Floats] = {}
        for count in {self.batches[i].gaps.size for i in newest}:
            same = [i for i in newest if self.batches[i].gaps.size == count]
            found.update(zip(same, self._produced(same, shapes), strict=True))
        return np.stack([found[max(i, newest[0])] for i in range(len(self.batches))])

    def _produced(self, numbers: Sequence[int], shapes: Shapes) -> Floats:
        """Return the production time of batches with equal numbers of points, [numbers, splits]."""
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
        # Co-located: the judges start when the whole batch is generated.
        produced = np.where(together, ends[:, at, -1] + served[:, of, 0], produced)
        return self._lent(produced, shapes, together)

    def _groups(self) -> float | None:
        """Number of prompts in a step; None if the number does not affect the forecast."""
        return float(self.batches[-1].after[0]) / self.group if self.group > 1 else None

    def _lent(self, produced: Floats, shapes: Shapes, together: NDArray[np.bool_]) -> Floats:
        """Return the production times with lending: a split comes closer to the best split with the same train world,
        at the cost of lending. Where that does not pay, the time is unchanged."""
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
    """Return the effective number of engines: so many would take as long if responses could be divided evenly.

    Prompts are divided evenly between `nodes`, so engines that one node has more than another do not shorten the step.
    One engine generates all responses to a prompt, so the engine with the most prompts determines the end. `groups`:
    prompts of a step; None: no such rounding.
    """
    alike = np.where(replicas >= nodes, replicas // nodes * nodes, replicas).astype(np.float64)
    if groups is None:
        return alike
    each = np.maximum(alike / nodes, 1.0)
    share = groups / nodes
    return alike * (share / each) / np.ceil(np.round(share / each, 9))


def _distinct(replicas: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct numbers of replicas, 0 counted as 1, and for each input its index among them."""
    there, at = np.unique(np.maximum(replicas, 1), return_inverse=True)
    return there, at


def _either(tail: Floats, crowd: Floats) -> Floats:
    """Return the smooth maximum of two end times: the judging of the longest responses (`tail`) and that of the bulk of
    the responses (`crowd`). If they are close, the result is somewhat later than both, because they delay each
    other."""
    share = np.minimum(crowd / np.maximum(tail, 1e-9), 1.0)
    return np.asarray(tail * (1.0 + share**SHARP) ** (1.0 / SHARP))


def drain_times(batch: LengthProfile, longer: float, replicas: NDArray[Any], law: DecodeLaw) -> Floats:
    """Return the seconds until the response at each point is finished, for each number of replicas, [replicas, points].
    All responses are requested at once.

    Requests beyond the capacity of a replica wait, first come first served. While requests wait, ends follow a renewal
    process: a row has ended `t / mean + (cv**2 - 1) / 2` responses by time `t` (Cox, Renewal Theory, 1962). The last
    running requests drain as if they had started together.
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
    # The longest response is among the last ones, or it has run beside full rows for so long that it does not end
    # earlier.
    place = 1.0 - (batch.after - 1.0) / rows
    drain = np.interp(place, (ended + 1.0) / count, np.cumsum(gaps * law.at(law.most * batch.going / count)))
    last = np.maximum((count / rows - 1.0) * mean * full_s + drain, lengths[0] * full_s)
    is_last = batch.after <= rows
    begins = np.where(is_last, last, np.inf).min(axis=1, keepdims=True)
    together[crowded] = np.where(is_last, last, np.minimum(flow, begins))
    return np.asarray(together)


def judging_times(after: Floats, tokens: Floats, replicas: NDArray[np.int64], law: DecodeLaw) -> Floats:
    """Return the seconds to judge the responses of each point and all longer ones, [batches, replicas, points], if they
    are all finished at once. `after`: their number, [batches, points]. `tokens`: mean tokens of a judgement,
    [batches]."""
    each = np.maximum(after[:, None] / replicas[:, None], 1.0)
    return np.asarray(each * tokens[:, None, None] * law.at(each) / np.minimum(each, law.most))
