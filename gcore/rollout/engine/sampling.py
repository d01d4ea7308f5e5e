"""From logits to tokens.

Log-probabilities are those of `softmax(logits / T)` before anything is cut off (top-p, top-k, the minimum length): the
distribution that the trainer computes too. Greedy rows (T = 0) take the likeliest token, and their log-probabilities are
of the untempered softmax.

A token is drawn by the inverse of the cumulative distribution, in order of token id, at a uniform number that belongs to
its request: the i-th number of the Philox stream whose key is the request's seed. So a sample's randomness depends on its
seed alone, whatever else runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gcore.rollout.engine.rows import Doubles, Ints


@dataclass(frozen=True, slots=True)
class RowParams:
    """How each of the running rows is sampled; tensors over rows, on the logits' device.

    `temperature` [row, 1] float32 (1 for a greedy row); `greedy` [row] bool or None when no row is; `top_p` [row, 1]
    float32 and `top_k` [row, 1] int64, both None when no row truncates.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None

    @classmethod
    def of(cls, temperature: Doubles, top_p: Doubles, top_k: Ints, device: torch.device) -> RowParams:
        """From arrays over rows: temperature 0 is greedy, top_p 1 and top_k 0 cut nothing off."""
        greedy = temperature == 0
        scale = np.where(greedy, 1.0, temperature)
        truncates = bool(((top_p < 1) | (top_k > 0)).any())
        return cls(
            torch.tensor(scale, dtype=torch.float32, device=device)[:, None] if (scale != 1).any() else None,
            torch.tensor(greedy, device=device) if greedy.any() else None,
            torch.tensor(top_p, dtype=torch.float32, device=device)[:, None] if truncates else None,
            torch.tensor(top_k, device=device)[:, None] if truncates else None,
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """`tokens` [row] int64 and `logprobs` [row] float32."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Cells that must not be drawn now: token `tokens[i]` in row `rows[i]`. Their log-probabilities stay as they are."""

    rows: torch.Tensor
    tokens: torch.Tensor


def draw(logits: torch.Tensor, uniforms: torch.Tensor, params: RowParams, forbidden: Forbidden | None = None) -> Drawn:
    """One token a row. `logits` [row, vocabulary], any float; `uniforms` [row] float64 in [0, 1)."""
    scaled = logits.float()
    if params.temperature is not None:
        scaled = scaled / params.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    if params.greedy is not None and bool(params.greedy.all()):
        # The logits decide: normalising may round two of them together.
        tokens = _without(scaled, forbidden, float("-inf")).argmax(-1)
    else:
        tokens = _inverse(_truncated(_without(logprobs.exp(), forbidden, 0.0), params), uniforms)
        if params.greedy is not None:
            likeliest = _without(scaled, forbidden, float("-inf")).argmax(-1)
            tokens = torch.where(params.greedy, likeliest, tokens)
    return Drawn(tokens, logprobs.gather(-1, tokens[:, None])[:, 0])


def _without(table: torch.Tensor, forbidden: Forbidden | None, nothing: float) -> torch.Tensor:
    if forbidden is None:
        return table
    table = table.clone()
    table[forbidden.rows, forbidden.tokens] = nothing
    return table


def _inverse(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    # In double precision, or a large vocabulary's tail would drown in rounding.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_(max=weights.shape[-1] - 1)


def _truncated(weights: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Keep the `top_k` likeliest, and of these the fewest whose probability reaches `top_p`."""
    if params.top_p is None or params.top_k is None:
        return weights
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)[None, :]
    ordered = torch.where((params.top_k > 0) & (rank >= params.top_k), 0.0, ordered)
    before = ordered.cumsum(-1) - ordered
    # A row with top_p = 1 keeps all, even where rounding makes the sum exceed 1.
    cut = (params.top_p < 1) & (before >= params.top_p * ordered.sum(-1, keepdim=True))
    return torch.zeros_like(weights).scatter_(-1, index, torch.where(cut, 0.0, ordered))
