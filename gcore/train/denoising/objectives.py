"""Training objectives of policies that generate pictures: on the log-probabilities of denoising steps, and on the forward process.

As for texts, losses are summed over the table of a micro-batch, a column for each trained step, and divided by global counts
(`gcore.train.objectives`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gcore.config.diffusion import FORWARD_LOSSES, DenoisingTraining
from gcore.config.spec import JobSpec
from gcore.models.diffusion.schedule import NoiseSchedule
from gcore.train.algorithms.denoising import (
    guarded_log_ratio,
    matching_weights,
    nft_loss,
    nft_weights,
    prediction_gap,
)
from gcore.train.algorithms.losses import loss_sum, ppo_loss
from gcore.train.batching import Scores
from gcore.train.denoising.rows import DenoisingBatch, DenoisingRows, StepScores
from gcore.train.objectives import Need, PolicyGradient, PolicyObjective, Targets, TokenObjective


def denoising_objective(spec: JobSpec, schedule: NoiseSchedule) -> PolicyObjective:
    """The objective of a job whose policy generates pictures. `schedule`: of its pipeline."""
    assert spec.train.diffusion is not None
    horizon = float(spec.train.horizon or spec.rollout.max_new_tokens)
    if spec.train.loss in FORWARD_LOSSES:
        return ForwardProcess(spec.train, horizon, spec.train.diffusion, schedule)
    return DenoisingPolicy(spec.train, horizon, spec.rollout.correction, denoising=spec.train.diffusion)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingPolicy(PolicyGradient):
    """Policy gradient on the log-probabilities of denoising steps: the clipped loss (Flow-GRPO, DanceGRPO, MixGRPO, DDPO) or
    GRPO-Guard's, with the KL between the steps of policy and reference."""

    denoising: DenoisingTraining

    def loss(self, scores: Scores, targets: Targets) -> Tensor:
        """The job's loss with its off-policy correction and the KL, summed over the trained steps."""
        assert isinstance(scores, StepScores)
        if not targets.batch.slots:  # a dummy, whose steps have no standard deviation
            return scores.logp.sum()
        logp, old = self._compared(scores, targets)
        low, high = self.train.clip_low, self.train.clip_high
        step_loss = ppo_loss(logp, old, targets.advantages, clip_low=low, clip_high=high)
        if self.train.loss == "grpo_guard":
            step_loss = step_loss / -scores.delta.view(logp.shape)
        if self.correction in ("tis", "icepop", "decoupled"):
            step_loss = step_loss * self.weight(targets)
        if (kl := self._kl(scores, targets)) is not None:
            step_loss = step_loss + self.train.kl_coef * kl
        return loss_sum(step_loss, targets.mask, self.train.aggregation, self.horizon)

    def _compared(self, scores: Scores, targets: Targets) -> tuple[Tensor, Tensor]:
        """Log-probabilities whose ratio is clipped, and the old ones; with GRPO-Guard its log-ratio, and 0."""
        if self.train.loss != "grpo_guard":
            return scores.logp, targets.old
        old = targets.others.old
        assert isinstance(scores, StepScores)
        assert isinstance(old, StepScores)
        shape = scores.logp.shape
        gap, std = prediction_gap(scores.values, old.values).view(shape), scores.std.view(shape)
        found = guarded_log_ratio(scores.logp, targets.old, gap, std)
        return found, torch.zeros_like(found)

    def _kl(self, scores: StepScores, targets: Targets) -> Tensor | None:
        """The KL of each step to the reference [b, w]; None without one."""
        reference = targets.others.reference
        if not isinstance(reference, StepScores) or not targets.batch.slots:
            return None
        return scores.kl(reference.values, exact=self.denoising.kl == "exact").view(scores.logp.shape)

    @torch.no_grad()
    def metrics(self, scores: Scores, targets: Targets) -> Mapping[str, Tensor]:
        """Those of texts, without entropies, and the KL to the reference in place of its estimate."""
        assert isinstance(scores, StepScores)
        found = dict(PolicyGradient.metrics(self, scores, targets))
        if (kl := self._kl(scores, targets)) is not None:
            found["kl_reference"] = torch.where(targets.mask, kl, 0.0).sum()
        return found


@dataclass(frozen=True, slots=True)
class ForwardProcess(TokenObjective):
    """Losses on pictures to which noise was added again: DiffusionNFT, and reward-weighted matching."""

    denoising: DenoisingTraining
    schedule: NoiseSchedule

    @property
    def needs(self) -> frozenset[Need]:
        """The predictions of the served network for DiffusionNFT, and of the reference for a KL."""
        found: set[Need] = {"served"} if self.train.loss == "nft" else set()
        return frozenset(found | ({"reference"} if self.train.kl_coef > 0 else set()))

    def loss(self, scores: Scores, targets: Targets) -> Tensor:
        """The loss summed over the trained rows."""
        assert isinstance(scores, StepScores)
        assert isinstance(targets.batch, DenoisingBatch)
        if not targets.batch.slots:
            return scores.logp.sum()
        rows, shape = targets.batch.inputs, targets.mask.shape
        advantages = targets.advantages.expand(shape).flatten()
        if self.train.loss == "nft":
            row_loss = self._nft(scores, targets, rows, advantages)
        else:
            row_loss = self._matching(scores, rows, advantages)
        if (kl := self._kl(scores, targets)) is not None:
            row_loss = row_loss + self.train.kl_coef * kl
        return loss_sum(row_loss.view(shape), targets.mask, self.train.aggregation, self.horizon)

    def _nft(self, scores: StepScores, targets: Targets, rows: DenoisingRows, advantages: Tensor) -> Tensor:
        served = targets.others.served
        assert isinstance(served, StepScores)
        most = self.denoising.adv_clip or 1.0
        return nft_loss(
            scores.values,
            served.values.to(scores.values.device),
            rows.states,
            rows.following,
            rows.level,
            nft_weights(advantages, most=most),
            beta=self.denoising.nft_beta,
            most=most,
        )

    def _matching(self, scores: StepScores, rows: DenoisingRows, advantages: Tensor) -> Tensor:
        assert rows.noise is not None
        target = self.schedule.target(rows.following, rows.noise, rows.level)
        errors = prediction_gap(scores.values, target)
        return matching_weights(advantages, temperature=self.denoising.temperature) * errors

    def _kl(self, scores: StepScores, targets: Targets) -> Tensor | None:
        """The squared distance of each prediction to the reference's [n], as a mean over dimensions; None without one."""
        reference = targets.others.reference
        if not isinstance(reference, StepScores):
            return None
        return prediction_gap(scores.values, reference.values)

    @torch.no_grad()
    def metrics(self, scores: Scores, targets: Targets) -> Mapping[str, Tensor]:
        """Number of trained rows, and the distance to the reference."""
        assert isinstance(scores, StepScores)
        found = {"trained_tokens": targets.mask.sum()}
        if targets.batch.slots and (kl := self._kl(scores, targets)) is not None:
            found["kl_reference"] = torch.where(targets.mask, kl.view(targets.mask.shape), 0.0).sum()
            found["reference_tokens"] = found["trained_tokens"]
        return found
