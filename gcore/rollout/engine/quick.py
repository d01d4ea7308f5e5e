"""A loaded model made quicker without a changed bit: what a step over small layers spends beside its arithmetic.

- RMS norms are computed in as few steps as they have (five; transformers and torch's own take eight). Only where a trial
  gives the same bits.
- A layer's parts are found at once. `torch.nn.Module` keeps them in tables that Python looks into only after everything
  else has failed; a decode step looks some hundred of them up. They are also put where Python looks first. Assigning a part
  or a parameter anew removes it from there (`torch.nn.Module.__setattr__`), so what is found is never out of date; tensors
  are changed in place by everything in this package.

Changes nothing that is saved, listed or loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Norm = Callable[[torch.Tensor], torch.Tensor]


def make_quick(module: Any) -> None:
    """Do all of it to a model that is where it will stay, as the type it will have."""
    use_short_norms(module)
    find_parts_at_once(module)


def find_parts_at_once(module: Any) -> None:
    """Submodules and parameters as plain attributes too."""
    for layer in module.modules():
        for parts in (layer._modules, layer._parameters):
            layer.__dict__.update({name: part for name, part in parts.items() if part is not None})


@torch.inference_mode()
def use_short_norms(module: Any) -> None:
    """Give layers that compute an RMS norm one of the forms below that gives the same bits, if one does."""
    found: dict[tuple[type, torch.dtype], Callable[[Any], Norm] | None] = {}
    for layer in module.modules():
        if not type(layer).__name__.endswith("RMSNorm") or not _looks_like_one(layer):
            continue
        kind = (type(layer), layer.weight.dtype)
        if kind not in found:
            found[kind] = next((form for form in (_short, _fused) if _same_bits(layer, form)), None)
        form = found[kind]
        if form is not None:
            layer.forward = form(layer)


def _short(layer: Any) -> Norm:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        scale = (hidden * hidden).mean(-1, keepdim=True).add_(layer.variance_epsilon).rsqrt_()
        return (hidden * scale).mul_(layer.weight)

    return forward


def _fused(layer: Any) -> Norm:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weight = layer.weight
        return functional.rms_norm(hidden, weight.shape, weight, layer.variance_epsilon)

    return forward


def _looks_like_one(layer: Any) -> bool:
    own = dict(layer.named_parameters())
    return hasattr(layer, "variance_epsilon") and list(own) == ["weight"] and own["weight"].dim() == 1


def _same_bits(layer: Any, form: Callable[[Any], Norm]) -> bool:
    """Asked of other weights than its own, which may be all ones."""
    weight, quick = layer.weight, form(layer)
    generator = torch.Generator().manual_seed(0)
    own = weight.clone()
    weight.copy_(torch.randn(weight.shape, generator=generator).to(weight))
    try:
        for size in ((1, 1), (7, 3), (64, 1), (5, 4, 3)):
            hidden = torch.randn((*size, *weight.shape), generator=generator).to(weight) * 3
            if not torch.equal(layer(hidden), quick(hidden)):
                return False
    finally:
        weight.copy_(own)
    return True
