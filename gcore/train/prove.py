"""The proof, at load, that sequences may lie end to end in one row of this model.

A few short sequences go through the model each alone, with the attention it came with, and then together in one row, in
rectangles, with gcore's. Their log-probabilities must be equal. A model whose positions, attention or states look beyond
a sequence gives other numbers; so no table of supported models has to be kept. What shows only in long contexts is
refused by the attention (sliding windows shorter than the context) or found in the configuration (chunked attention).

Done in float32 and in host memory, before DeepSpeed has the module. All ranks decide alike: one that cannot pack is
enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gcore.config.spec import TrainSpec
from gcore.errors import DataError
from gcore.train.attention import NAME, PACKED, UnsupportedAttention
from gcore.train.batch import Inputs
from gcore.train.module import logits_of, vocabulary_of
from gcore.train.packing import Packing, Rectangle

log = logging.getLogger("gcore.train")

TOLERANCE = 1e-5
"""Of a log-probability's size, or of 1 if it is smaller."""
ROWS = ((Rectangle(2, 9), (9, 8)), (Rectangle(2, 5), (5, 5)), (Rectangle(1, 3), (3,)))
"""The rectangles of the proof, and how many of each row's tokens are looked at; the rest is padding."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How the model is fed, and, if bucketed though packed was allowed, why."""

    packing: Packing
    reason: str = ""


def fit(
    module: nn.Module,
    train: TrainSpec,
    context: int | None,
    most: Callable[[Sequence[float]], list[float]],
    *,
    beside: nn.Module | None = None,
) -> Fit:
    """Try, decide, and leave the module with the attention that goes with it. Raises DataError.

    `context`: the longest sequence, in tokens, if the job has a limit. `most`: each number's largest over the ranks.
    `beside`: another model that is fed the same micro-batches; it is decided for both.
    """
    if train.packing == "bucketed":
        return Fit("bucketed")
    every: list[Any] = [module] if beside is None else [module, beside]
    before = [one.config._attn_implementation for one in every]
    unfit, reason = next(((one, why) for one in every if (why := why_not(one, context))), (module, ""))
    if any(most([float(bool(reason))])):
        for one, own in zip(every, before, strict=True):
            if one.config._attn_implementation != own:
                one.set_attn_implementation(own)
        reason = reason or "another rank cannot pack it"
        if train.packing == "packed":
            raise DataError(
                f"a {_kind(unfit)} cannot be packed: {reason}", where="train.packing", fix="Set it to auto or bucketed"
            )
        log.info("sequences are bucketed: %s", reason)
        return Fit("bucketed", reason)
    return Fit("packed")


def why_not(module: nn.Module, context: int | None) -> str:
    """Why the model cannot be packed, and it has its own attention as before; or nothing, and it has gcore's."""
    model: Any = module
    config = model.config
    if not getattr(model, "_supports_attention_backend", False):
        return f"a {_kind(module)} has no attention that can be replaced"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    before = config._attn_implementation
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    PACKED.register()
    PACKED.context = min(context, limit) if context and limit else context or limit
    try:
        error = _error(model, before)
    except (UnsupportedAttention, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as problem:
        model.set_attn_implementation(before)
        return " ".join(str(problem).split())[:200]
    if error <= TOLERANCE:
        return ""
    model.set_attn_implementation(before)
    return f"its log-probabilities come out {error:.3g} off"


@torch.no_grad()
def _error(model: Any, before: str) -> float:
    """The largest difference; leaves the model with gcore's attention."""
    vocabulary = vocabulary_of(model)
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for shape, _ in ROWS]
    rows = [torch.randint(0, vocabulary, (one.rows, one.length), generator=generator) for one in shapes]
    model.set_attn_implementation(before)
    alone = [
        _logp(model(input_ids=tokens[None, :real], use_cache=False).logits[0], tokens[:real])
        for block, (_, reals) in zip(rows, ROWS, strict=True)
        for tokens, real in zip(block, reals, strict=True)
    ]
    model.set_attn_implementation(NAME)
    every = torch.cat([block.flatten() for block in rows])
    positions = torch.cat([torch.arange(one.length).repeat(one.rows) for one in shapes])
    logits = logits_of(model)(Inputs(every[None], positions[None], tuple(shapes), torch.arange(len(every)), None))
    found, start = [], 0
    for shape, reals in ROWS:
        for real in reals:
            found.append(_logp(logits[start : start + real], every[start : start + real]))
            start += shape.length
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in zip(found, alone, strict=True))


def _logp(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(logits[:-1].float(), dim=-1).gather(1, tokens[1:, None])[:, 0]


def _kind(module: nn.Module) -> str:
    model: Any = module
    return str(getattr(model.config, "model_type", type(module).__name__))
