"""The variable-length kernel of older and newer torch: `enable_gqa` is passed only where the kernel accepts it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from gcore.train.backends.packed_attention import PackedAttention
from gcore.train.packing import Rectangle

GROUPED = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def attend(query: Any, key: Any, value: Any, bounds: Any, scale: float) -> torch.Tensor:
    """[token, head, dim], sequence by sequence."""
    outs = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        q, k, v = (one[start:end].transpose(0, 1) for one in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def newer(
    query: Any,
    key: Any,
    value: Any,
    bounds: Any,
    _: Any,
    *lengths: int,
    scale: float,
    window_size: Any,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch 2.12 and later: without the word, all heads must be there."""
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("fewer heads of keys")
    return attend(query, key, value, bounds, scale)


def older(
    query: Any, key: Any, value: Any, bounds: Any, _: Any, *lengths: int, scale: float, window_size: Any
) -> torch.Tensor:
    """torch 2.11: there is no such word."""
    return attend(query, key, value, bounds, scale)


@pytest.mark.parametrize("kernel", [newer, older])
def test_the_kernel_is_used_whether_or_not_it_takes_enable_gqa(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., torch.Tensor]
) -> None:
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "torch.nn.attention.varlen", module)
    ours = PackedAttention()
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(ours, "lay", lambda shapes, _: PackedAttention.lay(ours, shapes, torch.device("cpu")))
    error = ours._varlen_error
    monkeypatch.setattr(ours, "_varlen_error", lambda shape, dtype, _: error(shape, dtype, torch.device("cpu")))
    ours.use_fastest(GROUPED, torch.bfloat16, device)  # type: ignore[arg-type]
    assert ours._varlen is kernel
    ours.lay((Rectangle(1, 5),), torch.device("cpu"))
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    at_once, plainly = (one(query, key, key, 0.3) for one in (ours._at_once, ours._by_rectangle))
    assert torch.allclose(at_once, plainly, atol=1e-5)
