"""Counts what happens in a step, and makes the step's metrics of it: the same on every rank.

Each rank adds up its own part; the sums are added over ranks once, at the end. Means are over the tokens or samples of
the whole step. What is not finite is left out of the metrics: a number is missing rather than wrong.

    loss             mean over the updates
    grad_norm        global, before clipping, mean over the updates that were made; skipped_updates the others
    learning_rate    of the last update;  updates: made so far in the job
    entropy          of the policy, in nats a token, as the updates saw it
    kl               of the policy from π_old (k3), kl_reference from the reference (k3), as the updates saw it
    clip_fraction    of tokens
    mismatch_kl      of the engine from the trainer at the step's start: mean of engine's minus trainer's
                     log-probability; mismatch_abs: mean of its absolute value. Where π_old is not recomputed, over the
                     first mini-batch only
    reward_mean, response_length_mean, tokens    of the step's samples; tokens of responses
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from gcore.train.algorithms.kl import kl_estimate
from gcore.train.batch import MicroBatch, Scores
from gcore.train.loss import Losses, Targets
from gcore.train.policy import UpdateResult

Count = Literal[
    "loss",
    "entropy",
    "kl",
    "kl_reference",
    "clipped",
    "trained_tokens",
    "reference_tokens",
    "mismatch",
    "mismatch_abs",
    "mismatch_tokens",
    "reward",
    "tokens",
    "samples",
]
COUNTS: tuple[Count, ...] = Count.__args__  # type: ignore[attr-defined]


class Tally:
    """One rank's counts of one step."""

    def __init__(self) -> None:
        self._sums: dict[Count, float] = dict.fromkeys(COUNTS, 0.0)
        self._norms: list[float] = []
        self._updates = 0
        self._rate = 0.0

    def sample(self, reward: float, tokens: int) -> None:
        """A sample of this rank's."""
        self._sums["reward"] += reward
        self._sums["tokens"] += tokens
        self._sums["samples"] += 1

    @torch.no_grad()
    def mismatch(self, logp: Tensor, batch: MicroBatch) -> None:
        """The trainer's log-probabilities [b, w] at the step's start."""
        difference = batch.rollout_logp - logp
        self._sums["mismatch"] += _masked(difference, batch.mask)
        self._sums["mismatch_abs"] += _masked(difference.abs(), batch.mask)
        self._sums["mismatch_tokens"] += float(batch.mask.sum())

    @torch.no_grad()
    def trained(self, loss: float, scores: Scores, targets: Targets, losses: Losses) -> None:
        """A micro-batch went through an update; `loss` is its part of the update's."""
        mask, logp = targets.batch.mask, scores.logp.detach()
        tokens = float(mask.sum())
        self._sums["loss"] += loss
        self._sums["entropy"] += _masked(scores.entropy, mask)
        self._sums["kl"] += _masked(kl_estimate(targets.old, logp, "k3"), mask)
        self._sums["clipped"] += _masked(losses.clipped(logp, targets), mask)
        self._sums["trained_tokens"] += tokens
        if targets.reference is not None:
            self._sums["kl_reference"] += _masked(kl_estimate(logp, targets.reference, "k3"), mask)
            self._sums["reference_tokens"] += tokens

    def updated(self, result: UpdateResult, rate: float) -> None:
        """An update is over; the same on every rank."""
        self._updates += 1
        self._rate = rate
        if result.applied:
            self._norms.append(result.grad_norm)

    def metrics(self, add: Callable[[Sequence[float]], list[float]]) -> dict[str, float]:
        """The step's metrics; `add` sums over the ranks. A collective."""
        totals = add([self._sums[name] for name in COUNTS])
        sums: dict[Count, float] = dict(zip(COUNTS, totals, strict=True))
        found = {
            "loss": _ratio(sums["loss"], self._updates),
            "grad_norm": _ratio(math.fsum(self._norms), len(self._norms)),
            "learning_rate": self._rate,
            "skipped_updates": float(self._updates - len(self._norms)),
            "entropy": _ratio(sums["entropy"], sums["trained_tokens"]),
            "kl": _ratio(sums["kl"], sums["trained_tokens"]),
            "kl_reference": _ratio(sums["kl_reference"], sums["reference_tokens"]),
            "clip_fraction": _ratio(sums["clipped"], sums["trained_tokens"]),
            "mismatch_kl": _ratio(sums["mismatch"], sums["mismatch_tokens"]),
            "mismatch_abs": _ratio(sums["mismatch_abs"], sums["mismatch_tokens"]),
            "reward_mean": _ratio(sums["reward"], sums["samples"]),
            "response_length_mean": _ratio(sums["tokens"], sums["samples"]),
            "tokens": sums["tokens"],
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _masked(values: Tensor, mask: Tensor) -> float:
    return float(torch.where(mask, values, torch.zeros_like(values)).sum())


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
