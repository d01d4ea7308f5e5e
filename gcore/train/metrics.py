"""Counts what happens in a step, and makes the step's metrics of it: the same on every rank.

Each rank adds up its own part; the sums are added over ranks once, at the end. Means are over the tokens or samples of
the whole step. What is not finite is left out of the metrics: a number is missing rather than wrong.

    loss             mean over the updates
    grad_norm        global, before clipping, mean over the updates that were made; skipped_updates the others
    learning_rate    of the last update;  updates: made so far in the job
    entropy          of the policy, in nats a token, as the updates saw it
    kl               of the policy from π_old (k3), kl_reference from the reference (k3), as the updates saw it
    ratio_mean, ratio_min, ratio_max    what the clip acts on, over the tokens of all updates: the policy's probability
                     over π_old's. All are exactly 1 where one update was made with π_old recomputed
    ratio_deviation  mean distance of that ratio from 1; ratio_deviation_last: in the step's last update
    clip_fraction    of tokens: those that the clip holds back, or whose weight it changes
    correction_mean  of the correction's weights; correction_dropped: share of the tokens that it gives no weight, or
                     leaves out
    mismatch_kl      of the engine from the trainer at the step's start: mean of engine's minus trainer's
                     log-probability (k1); mismatch_k3: the same KL by k3, never negative; mismatch_abs: mean of the
                     absolute value, mismatch_max: the largest; mismatch_correlation: of the two's probabilities. Where
                     π_old is not recomputed, over the first mini-batch only
    reward_mean, response_length_mean, tokens    of the step's samples; tokens of responses that the policy made. masked_samples: those
                     whose tokens were left out
    padding          share of the tokens that were computed for nobody: padding and dummies
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
    """One rank's counts of one step."""

    def __init__(self) -> None:
        self._sums: dict[CountName, float] = dict.fromkeys(COUNTS, 0.0)
        self._norms: list[float] = []
        self._updates = 0
        self._rate = 0.0
        self._largest_mismatch = 0.0
        self._ratios = (math.inf, -math.inf)
        self._begins = True  # an update, with the next micro-batch

    def sample(self, reward: float, group: SealedGroup, sample: int) -> None:
        """A sample of this rank's, computed or not."""
        self._sums["reward"] += reward
        self._sums["tokens"] += group.own_tokens[sample]
        self._sums["samples"] += 1
        self._sums["masked"] += sample in group.masked

    def fed(self, batch: MicroBatch) -> None:
        """A micro-batch of this rank's."""
        self._sums["real"] += batch.real
        self._sums["computed"] += batch.computed

    @torch.no_grad()
    def mismatch(self, logp: Tensor, batch: MicroBatch) -> None:
        """The trainer's log-probabilities [b, w] at the step's start."""
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
        """A micro-batch went through an update; `loss` is its part of the update's, `sums` are its objective's metrics."""
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
        """What the losses so far were divided by was not what the update is divided by."""
        self._sums["loss"] *= factor

    def updated(self, result: UpdateResult, rate: float) -> None:
        """An update is over; the same on every rank."""
        self._updates += 1
        self._begins = True
        self._rate = rate
        if result.applied:
            self._norms.append(result.grad_norm)

    def metrics(self, over_ranks: RankReductions) -> dict[str, float]:
        """The step's metrics. A collective."""
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
            # A smallest and a largest pass over what is not a number; the sum does not.
            "ratio_min": -below if math.isfinite(sums["ratio"]) else math.nan,
            "ratio_max": ratio_max if math.isfinite(sums["ratio"]) else math.nan,
            "clip_fraction": _ratio(sums["clipped"], sums["ratio_tokens"]),
            "correction_mean": _ratio(sums["weight"], sums["weighed_tokens"]),
            "correction_dropped": _ratio(sums["dropped"], sums["weighed_tokens"]),
            "mismatch_kl": _ratio(sums["mismatch"], sums["mismatch_tokens"]),
            "mismatch_k3": _ratio(sums["mismatch_k3"], sums["mismatch_tokens"]),
            "mismatch_abs": _ratio(sums["mismatch_abs"], sums["mismatch_tokens"]),
            # A maximum passes over what is not a number; the sum does not.
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
    """Pearson's, of the engine's and the trainer's probabilities; not a number if either is constant."""
    n = sums["mismatch_tokens"]
    one = n * sums["engine_squares"] - sums["engine"] ** 2
    other = n * sums["trainer_squares"] - sums["trainer"] ** 2
    if n < 2 or one <= 0 or other <= 0:
        return math.nan
    return (n * sums["products"] - sums["engine"] * sums["trainer"]) / math.sqrt(one * other)


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
