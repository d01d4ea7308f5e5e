"""Causal attention over sequences packed end to end in one row, for models whose attention can be replaced.

The row is split into the micro-batch's rectangles (sequences of similar length, padded to one length), which are views
of it. Each uses plain causal attention, and the rest of the model (projections, norms, output layer) does not depend on
the arrangement. On CUDA, in half precision, torch's variable-length kernel computes all rectangles at once, if its
results are correct.

Unsupported features (sliding windows, soft caps, sinks, position biases) are refused, never ignored, and so is
attention across rectangles. `choose_feeding` in `gcore.train.models` tests which models can be packed.

With sequence parallelism a layer's input is this rank's slice of the row. Queries, keys and values of the whole row are
exchanged for a share of the heads (`gcore.train.backends.sequence_parallel`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from gcore.train.backends.sequence_parallel import ALONE
from gcore.train.packing import Rectangle

log = logging.getLogger("gcore.train")


NAME = "gcore_packed"
"""The name of this attention in a model's configuration (`attn_implementation`)."""


Varlen = Callable[..., Any]


def attention_heads(config: Any) -> tuple[int, int]:
    """The numbers of query heads and of KV heads of a model, from its transformers configuration."""
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


class UnsupportedPackedAttention(Exception):
    """The model needs an attention feature that packed attention does not support; the text names the feature."""


class PackedAttention:
    """An attention function for transformers models; registered once per process, for policy, critic and reference.

    `lay` defines how the next forward's row is split. A layer that is recomputed in its backward pass (activation
    checkpointing) uses the same split, because every backward directly follows its forward.
    """

    def __init__(self) -> None:
        self._rectangles: tuple[Rectangle, ...] = ()
        self._sizes: list[int] = []
        self._bounds: Tensor | None = None
        self._longest = 0
        self.context = 0
        """Maximum sequence length in tokens of the model; a sliding window of at least this size has no effect."""
        self.group = ALONE
        """The ranks that compute a row together."""
        self._varlen: Varlen | None = None
        self._takes_gqa = True

    def register(self) -> None:
        """Register this object in transformers as the attention of models whose `attn_implementation` is `NAME`."""
        AttentionInterface.register(NAME, self)

    def begin(self, context: int) -> None:
        """Prepare for another model, with plain attention of this rank alone. `context`: maximum sequence length in tokens."""
        self.context, self.group, self._varlen = context, ALONE, None

    def lay(self, rectangles: Sequence[Rectangle], device: torch.device) -> None:
        """Set how the row of the next forward pass, of all ranks of the group, is split: its rectangles, in order."""
        self._rectangles = tuple(rectangles)
        self._sizes = [one.tokens for one in rectangles]
        self._longest = max((one.length for one in rectangles), default=0)
        if self._varlen is not None:
            lengths = [one.length for one in rectangles for _ in range(one.rows)]
            bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._bounds = bounds.to(device, non_blocking=True)

    def use_fastest(self, config: Any, dtype: torch.dtype, device: torch.device, *, beside: Any = None) -> None:
        """Use torch's variable-length kernel if it exists and its results agree with those of plain attention.

        `config`: the model's configuration, for its attention heads. `beside`: that of another model with this
        attention, for which the results must agree too.
        """
        self._use(config, dtype, device)
        if beside is not None and self._varlen is not None:
            self._use(beside, dtype, device)

    def _use(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._varlen = None
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return
        try:
            from torch.nn.attention.varlen import varlen_attn

            heads, kv_heads = attention_heads(config)
            dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
            heads, kv_heads = self.group.heads_of_rank(heads), self.group.heads_of_rank(kv_heads)
            self._varlen = varlen_attn
            # Without this parameter torch 2.11 supports grouped heads implicitly; the result is compared below.
            self._takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
            off = self._varlen_error((heads, kv_heads, dim), dtype, device)
        except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            self._varlen = None
            log.info("variable-length attention is not used: %s", " ".join(str(error).split())[:200])
            return
        if not off < 0.05:
            self._varlen = None
            log.warning("variable-length attention is not used: its result differs by %.3g", off)

    def _varlen_error(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> float:
        heads, kv_heads, dim = shape
        self.lay((Rectangle(2, 33), Rectangle(1, 7)), device)
        tokens = sum(self._sizes)
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(1, count, tokens, dim, generator=generator).to(device, dtype).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        both = []
        for attend in (self._at_once, self._by_rectangle):
            out = attend(leaves[0], leaves[1], leaves[2], dim**-0.5)
            both.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
        return max(
            float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(*both, strict=True)
        )

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Attention with the interface of transformers: `query` [1, head, token, dim] → [1, token, head, dim].

        The tokens are those of this rank's slice of the row.

        Raises UnsupportedPackedAttention if the model passes an argument that is not supported.
        """
        if softcap is not None or s_aux is not None or position_bias is not None:
            raise UnsupportedPackedAttention("a soft cap, attention sinks or a position bias")
        if sliding_window is not None and sliding_window < max(self.context, self._longest):
            raise UnsupportedPackedAttention(f"a sliding window of {sliding_window} tokens")
        tokens = query.shape[2] * self.group.size
        if query.shape[0] != 1 or tokens != sum(self._sizes) or key.shape[2] != query.shape[2]:
            raise UnsupportedPackedAttention(f"queries {tuple(query.shape)} over keys {tuple(key.shape)}")
        if attention_mask is not None or getattr(module, "is_causal", True) is False:
            raise UnsupportedPackedAttention("its own attention mask")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        attend = self._by_rectangle if self._varlen is None else self._at_once
        if self.group.size == 1:
            return attend(query, key, value, scale), None
        return self.group.join_heads(attend(*self.group.divide_heads(query, key, value), scale)), None

    def _by_rectangle(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        outs = []
        parts = zip(self._rectangles, *(one[0].split(self._sizes, dim=1) for one in (query, key, value)), strict=True)
        for shape, *three in parts:
            q, k, v = (one.unflatten(1, (shape.rows, shape.length)).transpose(0, 1) for one in three)
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.length > 1, scale=scale, enable_gqa=grouped
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)

    def _at_once(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert self._varlen is not None
        out: Tensor = self._varlen(
            *(one[0].transpose(0, 1).contiguous() for one in (query, key, value)),
            self._bounds,
            self._bounds,
            self._longest,
            self._longest,
            scale=scale,
            window_size=(-1, 0),
            **({"enable_gqa": query.shape[1] != key.shape[1]} if self._takes_gqa else {}),
        )
        return out.unsqueeze(0)


PACKED = PackedAttention()
"""The only instance in the process, because transformers has one registry of attention functions."""
