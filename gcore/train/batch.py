"""Samples as tensors, and their log-probabilities.

A micro-batch is padded on the right. With causal attention no real token ever sees the padding, so no mask goes to the
model, and positions simply count from 0. Only the columns from the shortest prompt's end on are scored: that window
holds every response, and the vocabulary's logits are made for nothing else.

Log-probabilities are those of the temperature-scaled, untruncated softmax, in float32, like the engines'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gcore.ledger.balance import SampleSlot
from gcore.train.feed_state import Work

ENTROPY_ELEMENTS = 1 << 22
"""Logits that are looked at together for the entropy, so that it needs no second copy of them all."""

LogitsOf = Callable[[Tensor, int], Tensor]
"""Tokens [b, t] and k to the logits [b, k, vocabulary] of the last k columns."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows are `slots`, columns of the window [start, start + w) of the padded sequences; none of them for a dummy.

    `tokens` [b, start + w] int64; `mask` [b, w] bool: response tokens; `rollout_logp` [b, w] float32, 0 outside the mask.
    """

    slots: tuple[SampleSlot, ...]
    tokens: Tensor
    start: int
    mask: Tensor
    rollout_logp: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Of the tokens in a micro-batch's window: log-probabilities [b, w] float32, entropies [b, w] (no gradient)."""

    logp: Tensor
    entropy: Tensor


def make_batch(work: Work, slots: Sequence[SampleSlot], device: torch.device) -> MicroBatch:
    """The tensors of some samples; a dummy, with nothing in its mask, for none."""
    if not slots:
        return MicroBatch(
            (),
            torch.zeros(1, 2, dtype=torch.int64, device=device),
            1,
            torch.zeros(1, 1, dtype=torch.bool, device=device),
            torch.zeros(1, 1, device=device),
        )
    groups = [work.groups[work.seal.groups[slot.group].digest] for slot in slots]
    samples = [group.samples[slot.sample] for group, slot in zip(groups, slots, strict=True)]
    prompts = [len(group.prompt_ids) for group in groups]
    start = min(prompts)
    ends = [prompt + len(sample.token_ids) for prompt, sample in zip(prompts, samples, strict=True)]
    end = max(*ends, start + 1)
    tokens = np.zeros((len(slots), end), dtype=np.int64)
    mask = np.zeros((len(slots), end), dtype=np.bool_)
    logprobs = np.zeros((len(slots), end), dtype=np.float32)
    for row, (group, sample) in enumerate(zip(groups, samples, strict=True)):
        response = slice(prompts[row], ends[row])
        tokens[row, : prompts[row]] = group.prompt_ids
        tokens[row, response] = sample.token_ids
        mask[row, response] = True
        logprobs[row, response] = sample.logprobs
    return MicroBatch(
        tuple(slots),
        torch.from_numpy(tokens).to(device),
        start,
        torch.from_numpy(mask[:, start:].copy()).to(device),
        torch.from_numpy(logprobs[:, start:].copy()).to(device),
    )


def score(logits_of: LogitsOf, batch: MicroBatch, temperature: float) -> Scores:
    """Log-probabilities and entropies of the window's tokens under a model. Gradients as the caller has them enabled."""
    targets = batch.tokens[:, batch.start :]
    # A token is predicted by the column before it: one more column than the window has, without the last.
    logits = logits_of(batch.tokens, targets.shape[1] + 1)[:, :-1].float()
    if temperature != 1.0:
        logits = logits / temperature
    flat = logits.reshape(-1, logits.shape[-1])
    logp = -functional.cross_entropy(flat, targets.reshape(-1), reduction="none")
    return Scores(logp.view_as(targets), _entropy(flat.detach()).view_as(targets))


@torch.no_grad()
def _entropy(logits: Tensor) -> Tensor:
    rows = max(1, ENTROPY_ELEMENTS // logits.shape[-1])
    parts = []
    for part in logits.split(rows):
        logp = torch.log_softmax(part, dim=-1)
        parts.append(-(logp.exp() * logp).sum(dim=-1))
    return torch.cat(parts)
