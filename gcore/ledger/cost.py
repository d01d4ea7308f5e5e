"""At what length attention costs a model as much as its matrices: a pure function of its configuration.

Per token and layer the matrices take two operations a parameter, and attention four a column of its heads for every
token before it. A causal kernel skips half of those and is about half as fast as a matrix product at the other half, so
they are counted in full: the two are equal at half the layer's parameters divided by the width of its heads, six times
the width for the classic layer of 12·width² parameters. The embedding and the output layer are left out: prompts do not
go through the one, and the other multiplies nothing.

Knows the names that Hugging Face configurations use; what it does not know is left at the default, because the result
only weighs samples against one another. Does not read files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ATTENTION_EQUALS_AT = 24_576
"""For a model that tells nothing: six times a width of 4096. Never to be changed: it is the value of records that were
written without one, and ranks that read another would deal a sealed batch differently."""
LARGEST = 1 << 24


def attention_equals_at(config: Mapping[str, Any]) -> int:
    """The length in tokens, at least 1. `config`: a model's config.json."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = nested
    width = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head")
    if not width or not heads:
        return ATTENTION_EQUALS_AT
    columns = heads * (_first(config, "head_dim") or max(1, width // heads))
    shared = (_first(config, "num_key_value_heads") or heads) / heads
    attention = 2 * width * columns * (1 + shared)
    inner = _first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * width
    experts = _first(config, "num_experts_per_tok")
    if experts:
        inner = experts * (_first(config, "moe_intermediate_size") or inner)
    gated = "hidden_act" in config  # nearly all models with a gate call their activation so
    parameters = attention + (3 if gated else 2) * width * inner
    return max(1, min(LARGEST, round(parameters / (2 * columns))))


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a number above 0; 0 if none is."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
