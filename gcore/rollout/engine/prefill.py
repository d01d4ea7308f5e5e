"""Prompts through the model: their keys and values, and the logits after their last token.

Several prompts in one forward pass, padded on the right; attention is causal, so no real token sees the padding, and what
stands there is never copied into the cache. Does not choose rows and draws no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gcore.rollout.engine.cache import Prefix, RowCache
from gcore.rollout.engine.columns import Batch, prefill_batches
from gcore.rollout.engine.model import Model

MOST_TOKENS = 8192
"""Padded prompt tokens in one forward pass, unless a single prompt is longer."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: prompt `members[i]` is `prefix`'s i-th, and `logits[i]` [vocabulary] follow it."""

    members: tuple[int, ...]
    prefix: Prefix
    logits: torch.Tensor


def prefill(model: Model, cache: RowCache, prompts: Sequence[Sequence[int]]) -> list[Pass]:
    """All prompts, in as few passes as is sensible."""
    batches = prefill_batches([len(prompt) for prompt in prompts], most_tokens=MOST_TOKENS)
    return [_forward(model, cache, [prompts[m] for m in batch.members], batch) for batch in batches]


def _forward(model: Model, cache: RowCache, prompts: Sequence[Sequence[int]], batch: Batch) -> Pass:
    device = model.shape.device
    padded = [list(prompt) + [0] * (batch.width - len(prompt)) for prompt in prompts]
    last = [len(prompt) - 1 for prompt in prompts]
    kept = sorted(set(last))
    model.attention.bias = None
    cache.prefix = prefix = Prefix()
    out = model.module(
        input_ids=torch.tensor(padded, device=device),
        position_ids=torch.arange(batch.width, device=device).expand(len(prompts), -1),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=torch.tensor(kept, device=device),
    ).logits
    cache.prefix = None
    place = torch.tensor([kept.index(position) for position in last], device=device)
    return Pass(batch.members, prefix, out[torch.arange(len(prompts), device=device), place])
