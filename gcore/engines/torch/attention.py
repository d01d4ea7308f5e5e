"""Attention function that replaces the model's own, so that the runners' KV caches can be used.

Before each forward pass a model runner sets the kind of pass:

- `PrefillPass`: tokens of one prompt, or of several prompts padded on the right, after `past` tokens in the cache. Real
  tokens never attend to the padding, because it follows them.
- `DecodePass`: one query per row over one common range of columns, with a bias that masks the columns of other rows.
  The query heads that share a key head are folded into the query length, so nothing is repeated: two batched matrix
  products and a softmax (on a CPU faster than torch's fused attention for one token).
- `BlockDecodePass`: like `DecodePass`, but over blocks of `BLOCK` columns, all of the same shape, combined by a running
  maximum and sum. A block without columns of a row does not change a bit of that row's result, so the result does not
  depend on the lengths of other rows. For deterministic decoding.

Supported: grouped heads, any scale, sliding windows, soft caps, attention sinks. Position biases are refused.
`runner_selection` detects features that the model does not pass to this function, such as a window that it applies only
in its mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import AttentionInterface

NAME = "gcore"
"""Name of this attention in the model's configuration (`attn_implementation`)."""

BLOCK = 64
"""Number of columns (token positions) of a block."""

NOTHING = -1e30
"""Added to a masked score. Finite, so that a fully masked block gives no NaN."""


class UnsupportedEngineAttention(Exception):
    """The model needs an attention feature that this function does not support; the text names it."""


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """A pass over prompts, or parts of them. `past`: number of tokens before them that the cache already has."""

    past: int = 0


@dataclass(frozen=True, slots=True)
class DecodePass:
    """A decode step. `bias` `[row * kv_head, 1, width]`, 0 or -inf; None if every row uses all columns."""

    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BlockDecodePass:
    """A decode step of rows that begin at column 0. `positions` [row]: position of each row's query.

    `count`: number of blocks that cover the longest row.
    """

    positions: torch.Tensor
    count: int


Pass = PrefillPass | DecodePass | BlockDecodePass


class EngineAttention:
    """The attention function. Registered in transformers once per process. `kind`: that of the next forward pass."""

    def __init__(self) -> None:
        self.kind: Pass = PrefillPass()
        self.windows: set[int] = set()
        """Sizes of the sliding windows that the model has passed to this function."""
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}
        self._biases: tuple[Pass, dict[int | None, list[torch.Tensor]]] = (self.kind, {})

    def register(self) -> None:
        """Register the function for models with `attn_implementation=NAME`."""
        AttentionInterface.register(NAME, self)

    def __call__(
        self,
        module: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention. `query` [row, head, token, dim] → [row, token, head, dim], as transformers expects it."""
        if position_bias is not None:
            raise UnsupportedEngineAttention("it adds a position bias to its attention")
        if sliding_window is not None:
            self.windows.add(sliding_window)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        kind = self.kind
        if isinstance(kind, DecodePass):
            return _one_token(query, key, value, scale, kind.bias, sliding_window, softcap, s_aux), None
        if isinstance(kind, BlockDecodePass):
            biases = self._block_biases(kind, sliding_window, key.shape[1])
            return _blocks(query, key, value, scale, biases, softcap, s_aux), None
        mask = self._mask(query.shape[2], kind.past, sliding_window, query.device)
        if softcap is not None or s_aux is not None:
            return _spelled_out(query, key, value, scale, mask, softcap, s_aux), None
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and query.shape[2] > 1,
            scale=scale,
            enable_gqa=query.shape[1] > key.shape[1],
        )
        return out.transpose(1, 2), None

    def _mask(self, tokens: int, past: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return the bool mask [token, past + token] of which keys a query attends to.

        None: no mask is needed, because a query attends to all preceding tokens.
        """
        if window is not None and window >= past + tokens:
            window = None
        if window is None and (past == 0 or tokens == 1):
            return None
        found = self._masks.get((tokens, past, window))
        if found is None:
            query = torch.arange(past, past + tokens, device=device)[:, None]
            key = torch.arange(past + tokens, device=device)[None, :]
            found = key <= query
            if window is not None:
                found &= key > query - window
            # The layers of one pass share the mask; the next pass has another.
            if len(self._masks) > 2:
                self._masks.clear()
            self._masks[tokens, past, window] = found
        return found

    def _block_biases(self, kind: BlockDecodePass, window: int | None, kv_heads: int) -> list[torch.Tensor]:
        """Return the mask of each block as a bias [row * kv_head, 1, `BLOCK`]: 0, or `NOTHING` for columns that the row's
        query must not attend to.
        """
        if self._biases[0] is not kind:
            self._biases = (kind, {})
        known = self._biases[1]
        if window not in known:
            columns = torch.arange(kind.count * BLOCK, device=kind.positions.device)[None, :]
            own = columns <= kind.positions[:, None]
            if window is not None:
                own &= columns > kind.positions[:, None] - window
            bias = torch.where(own, 0.0, NOTHING).repeat_interleave(kv_heads, dim=0)[:, None]
            known[window] = [bias[:, :, b * BLOCK : (b + 1) * BLOCK].contiguous() for b in range(kind.count)]
        return known[window]


def _one_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, heads, _, dim = query.shape
    kv_heads, width = key.shape[1], key.shape[2]
    folded = query.reshape(rows * kv_heads, heads // kv_heads, dim)
    flat_key = key.view(rows * kv_heads, width, dim)
    flat_value = value.view(rows * kv_heads, width, value.shape[-1])
    if window is not None and window < width:
        # All rows write the same column, so the window excludes the same columns for all of them.
        flat_key, flat_value = flat_key[:, -window:], flat_value[:, -window:]
        bias = None if bias is None else bias[:, :, -window:]
    if bias is None or softcap is not None:
        scores = torch.baddbmm(query.new_empty(1, 1, 1), folded, flat_key.transpose(1, 2), beta=0, alpha=scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
            scores = scores if bias is None else scores + bias
    else:
        scores = torch.baddbmm(bias, folded, flat_key.transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32) if sinks is None else _with_sinks(scores, sinks, rows)
    return torch.bmm(weights.to(value.dtype), flat_value).view(rows, 1, heads, value.shape[-1])


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor, rows: int) -> torch.Tensor:
    """Softmax over the scores and the head's attention sink, whose weight is then removed.

    `scores` [row * kv_head, group, width].
    """
    sink = sinks.view(1, -1, scores.shape[1]).expand(rows, -1, -1).reshape(scores.shape[0], scores.shape[1], 1)
    return torch.softmax(torch.cat([scores, sink.to(scores.dtype)], -1), dim=-1, dtype=torch.float32)[..., :-1]


def _blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    biases: Sequence[torch.Tensor],
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, heads, _, dim = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    group = heads // kv_heads
    folded = query.reshape(rows * kv_heads, group, dim) * scale
    flat_key = key.view(rows * kv_heads, columns, dim)
    flat_value = value.view(rows * kv_heads, columns, value.shape[-1])
    if sinks is None:
        top = torch.full((rows * kv_heads, group, 1), NOTHING, device=query.device)
        total = torch.zeros_like(top)
    else:
        top = sinks.float().view(1, kv_heads, group, 1).expand(rows, -1, -1, -1).reshape(rows * kv_heads, group, 1)
        total = torch.ones_like(top)
    out = torch.zeros((rows * kv_heads, group, value.shape[-1]), device=query.device)
    for number, bias in enumerate(biases):
        block = slice(number * BLOCK, (number + 1) * BLOCK)
        scores = torch.bmm(folded, flat_key[:, block].transpose(1, 2)).float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + bias
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - higher)
        fading = torch.exp(top - higher)
        total = total * fading + weights.sum(-1, keepdim=True)
        out = out * fading + torch.bmm(weights.to(value.dtype), flat_value[:, block]).float()
        top = higher
    return (out / total).to(value.dtype).view(rows, 1, heads, value.shape[-1])


def _spelled_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over prompts without torch's fused kernel, which supports neither soft caps nor sinks."""
    rows, heads, tokens, _ = query.shape
    groups, width = heads // key.shape[1], key.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(tokens, width, dtype=torch.bool, device=query.device).tril(width - tokens)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        sink = sinks.view(1, heads, 1, 1).expand(rows, -1, tokens, 1)
        weights = torch.softmax(torch.cat([scores, sink.to(scores.dtype)], -1), -1, torch.float32)[..., :-1]
    return (weights.to(value.dtype) @ value).transpose(1, 2)
