"""Accumulates a step's training statistics per rank, and computes the step's metrics from them: the same on every rank.

Each rank sums its own part; the sums are added over ranks once, at the end. Means are over the tokens or samples of the
whole step. Metrics that are not finite are omitted.

    loss             mean over the updates
    grad_norm        global, before clipping, mean over the applied updates
    skipped_updates  number of updates that were skipped because their gradient was not finite
    learning_rate    of the last update
    entropy          of the policy, in nats per token, at the updates
    kl               of the policy from π_old (k3), kl_reference from the reference (k3), at the updates
    ratio_mean, ratio_min, ratio_max    the clipped ratio over the tokens of all updates: the policy's probability over
                     π_old's. All are exactly 1 for a single update with recomputed π_old
    ratio_deviation  mean distance of that ratio from 1; ratio_deviation_last: in the step's last update
    clip_fraction    share of tokens whose gradient the clip removes, or whose weight it changes
    correction_mean  mean weight of the off-policy correction; correction_dropped: share of tokens with weight 0 or
                     masked by it
    mismatch_kl      engine against trainer at the step's start: mean of the engine's minus the trainer's
                     log-probability (k1); mismatch_k3: the same KL by k3, never negative; mismatch_abs: mean absolute
                     difference, mismatch_max: its maximum; mismatch_correlation: of the two probabilities. If π_old is
                     not recomputed, over the first mini-batch only
    reward_mean      mean reward of the step's samples
    response_length_mean, tokens    mean per sample and total of response tokens that the policy generated
    masked_samples   number of samples masked in the loss
    padding          share of the computed tokens that belong to padding and dummy micro-batches
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from gcore.ledger.records.chain import SealedGroup
from gcore.train.advantages import RankReductions
from gcore.train.algorithms.losses import kl_estimate
from gcore.train.backends.base import UpdateResult
from gcore.train.batching import MicroBatch

CountName = Literal[
    "loss",
    "entropy",
    "kl",
    "kl_reference",
    "ratio",
    "clipped",
    "ratio_tokens",
    "ratio_off",
    "last_off",
    "last_tokens",
    "weight",
    "dropped",
    "weighed_tokens",
    "trained_tokens",
    "reference_tokens",
    "mismatch",
    "mismatch_abs",
    "mismatch_k3",
    "mismatch_tokens",
    "engine",
    "engine_squares",
    "trainer",
    "trainer_squares",
    "products",
    "reward",
    "tokens",
    "samples",
    "masked",
    "real",
    "computed",
]

COUNTS: tuple[CountName, ...] = CountName.__args__  # type: ignore[attr-defined]


class TrainStepMetrics:
    """One rank's running sums of one step, from which `metrics` computes the step's metrics."""

    def __init__(self) -> None:
        self._sums: dict[CountName, float] = dict.fromkeys(COUNTS, 0.0)
        self._norms: list[float] = []
        self._updates = 0
        self._rate = 0.0
        self._largest_mismatch = 0.0
        self._ratios = (math.inf, -math.inf)
        self._begins = True  # whether the next micro-batch starts an update

    def sample(self, reward: float, group: SealedGroup, sample: int) -> None:
        """Count a sample of this rank, whether or not its tokens are computed. `sample`: its index in `group`."""
        self._sums["reward"] += reward
        self._sums["tokens"] += group.own_tokens[sample]
        self._sums["samples"] += 1
        self._sums["masked"] += sample in group.masked

    def fed(self, batch: MicroBatch) -> None:
        """Count the real and the padding tokens of a micro-batch of this rank."""
        self._sums["real"] += batch.real
        self._sums["computed"] += batch.computed

    @torch.no_grad()
    def mismatch(self, logp: Tensor, batch: MicroBatch) -> None:
        """Compare the trainer's log-probabilities [b, w] at the step's start with those of the engine, and add up the
        differences.
        """
        engine, trainer = (one[batch.mask].double() for one in (batch.rollout_logp, logp))
        difference = engine - trainer
        self._sums["mismatch"] += float(difference.sum())
        self._sums["mismatch_abs"] += float(difference.abs().sum())
        self._sums["mismatch_k3"] += float(kl_estimate(engine, trainer, "k3").sum())
        self._sums["mismatch_tokens"] += len(difference)
        if len(difference):
            self._largest_mismatch = max(self._largest_mismatch, float(difference.abs().max()))
        one, other = engine.exp(), trainer.exp()
        self._sums["engine"] += float(one.sum())
        self._sums["engine_squares"] += float(one.square().sum())
        self._sums["trainer"] += float(other.sum())
        self._sums["trainer_squares"] += float(other.square().sum())
        self._sums["products"] += float((one * other).sum())

    def trained(self, loss: float, sums: Mapping[str, Tensor]) -> None:
        """Add the loss and metrics of a micro-batch that was trained.

        `loss`: its part of the update's loss. `sums`: `Objective.metrics` of the micro-batch: sums over its trained
        tokens.
        """
        found = {name: float(value) for name, value in sums.items()}
        self._sums["loss"] += loss
        if "ratio_min" in found:
            low, high = self._ratios
            self._ratios = (min(low, found.pop("ratio_min")), max(high, found.pop("ratio_max")))
        if "ratio_off" in found:
            if self._begins:
                self._sums["last_off"] = self._sums["last_tokens"] = 0.0
                self._begins = False
            self._sums["last_off"] += found["ratio_off"]
            self._sums["last_tokens"] += found["ratio_tokens"]
        for name in COUNTS:
            self._sums[name] += found.get(name, 0.0)

    def rescaled(self, factor: float) -> None:
        """Multiply the loss so far by `factor`: a streamed step divides it by a provisional divisor until its last
        part.
        """
        self._sums["loss"] *= factor

    def updated(self, result: UpdateResult, rate: float) -> None:
        """Count an optimizer update, applied or skipped, and its learning rate; the same on every rank."""
        self._updates += 1
        self._begins = True
        self._rate = rate
        if result.applied:
            self._norms.append(result.grad_norm)

    def metrics(self, over_ranks: RankReductions) -> dict[str, float]:
        """The step's metrics by name (see the module), summed over ranks. A collective."""
        totals = over_ranks.sum([self._sums[name] for name in COUNTS])
        low, high = self._ratios
        largest, below, ratio_max = over_ranks.max([self._largest_mismatch, -low, high])
        sums: dict[CountName, float] = dict(zip(COUNTS, totals, strict=True))
        found = {
            "loss": _ratio(sums["loss"], self._updates),
            "grad_norm": _ratio(math.fsum(self._norms), len(self._norms)),
            "learning_rate": self._rate,
            "skipped_updates": float(self._updates - len(self._norms)),
            "entropy": _ratio(sums["entropy"], sums["trained_tokens"]),
            "kl": _ratio(sums["kl"], sums["ratio_tokens"]),
            "kl_reference": _ratio(sums["kl_reference"], sums["reference_tokens"]),
            "ratio_mean": _ratio(sums["ratio"], sums["ratio_tokens"]),
            "ratio_deviation": _ratio(sums["ratio_off"], sums["ratio_tokens"]),
            "ratio_deviation_last": _ratio(sums["last_off"], sums["last_tokens"]),
            # Minimum and maximum ignore NaN; the sum does not.
            "ratio_min": -below if math.isfinite(sums["ratio"]) else math.nan,
            "ratio_max": ratio_max if math.isfinite(sums["ratio"]) else math.nan,
            "clip_fraction": _ratio(sums["clipped"], sums["ratio_tokens"]),
            "correction_mean": _ratio(sums["weight"], sums["weighed_tokens"]),
            "correction_dropped": _ratio(sums["dropped"], sums["weighed_tokens"]),
            "mismatch_kl": _ratio(sums["mismatch"], sums["mismatch_tokens"]),
            "mismatch_k3": _ratio(sums["mismatch_k3"], sums["mismatch_tokens"]),
            "mismatch_abs": _ratio(sums["mismatch_abs"], sums["mismatch_tokens"]),
            # The maximum ignores NaN; the sum does not.
            "mismatch_max": largest if sums["mismatch_tokens"] and math.isfinite(sums["mismatch_abs"]) else math.nan,
            "mismatch_correlation": _correlation(sums),
            "reward_mean": _ratio(sums["reward"], sums["samples"]),
            "response_length_mean": _ratio(sums["tokens"], sums["samples"]),
            "tokens": sums["tokens"],
            "masked_samples": sums["masked"],
            "padding": _ratio(sums["computed"] - sums["real"], sums["computed"]),
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _correlation(sums: dict[CountName, float]) -> float:
    """Pearson correlation of the engine's and the trainer's probabilities; NaN if either is constant."""
    n = sums["mismatch_tokens"]
    one = n * sums["engine_squares"] - sums["engine"] ** 2
    other = n * sums["trainer_squares"] - sums["trainer"] ** 2
    if n < 2 or one <= 0 or other <= 0:
        return math.nan
    return (n * sums["products"] - sums["engine"] * sums["trainer"]) / math.sqrt(one * other)


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
