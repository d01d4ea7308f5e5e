"""The attention function that the model is made to use, for the cache that `cache` describes.

Prefill is causal attention over prompts padded on the right: a real token never sees the padding, which stands behind
it. A decode step has one query a row; the query heads that share a key head are folded into the query length, so that
nothing is repeated: two batched matrix products and a softmax (on a CPU faster than torch's fused attention for one
token). What the function does not honour (sliding windows, soft caps, sinks, position biases) it refuses.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers import AttentionInterface

NAME = "gcore"
"""What the model's configuration calls it (`attn_implementation`)."""


class UnsupportedAttention(Exception):
    """The model wants something of its attention that this one does not do; the text says what."""


class Attention:
    """Registered once a process. `bias` is None in prefill, else the decode step's `[row * kv_head, 1, width]`."""

    def __init__(self, context: int) -> None:
        self._context = context
        self.bias: torch.Tensor | None = None

    def register(self) -> None:
        """Models loaded with `attn_implementation=NAME` use it from now on."""
        AttentionInterface.register(NAME, self)

    def __call__(
        self,
        module: torch.nn.Module,
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
        """`query` [row, head, token, dim] → [row, token, head, dim], as transformers wants it."""
        if sliding_window is not None and sliding_window < self._context:
            raise UnsupportedAttention(f"a sliding window of {sliding_window} tokens")
        if softcap is not None or s_aux is not None or position_bias is not None:
            raise UnsupportedAttention("a soft cap, attention sinks or a position bias")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.bias is None:
            return _causal(query, key, value, scale), None
        return _one_token(query, key, value, scale, self.bias), None


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=query.shape[2] > 1, scale=scale, enable_gqa=groups > 1
    )
    return out.transpose(1, 2)


def _one_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: torch.Tensor
) -> torch.Tensor:
    rows, heads, _, dim = query.shape
    kv_heads, width = key.shape[1], key.shape[2]
    folded = query.reshape(rows * kv_heads, heads // kv_heads, dim)
    flat_key = key.view(rows * kv_heads, width, dim)
    flat_value = value.view(rows * kv_heads, width, value.shape[-1])
    scores = torch.baddbmm(bias, folded, flat_key.transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.bmm(weights, flat_value).view(rows, 1, heads, value.shape[-1])
