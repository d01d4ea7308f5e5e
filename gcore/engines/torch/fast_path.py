"""A decode step of the most common model architectures as one loop over the layers.

A step with few rows of a small model spends a third of its time in Python between the matrix products: modules that
call modules, wrappers, and the same rotary embedding computed for queries and for keys. Llama, Mistral, Qwen 2, Qwen 3
and models built like them have the same few parts in each layer, so one loop over these parts is the whole step.

The loop is used only if it is proved to fit the model. The parts are recognised by name and must contain all weights of
the model, because a weight without effect today (a scale of 1) may have one after the next weight update. The arguments
of each layer's attention are recorded during a step of the model itself. Then the loop must give the same bits as the
model. A model that fails any of these checks uses its own modules. Each step reads the present weights, so a weight
update or sleep needs no action here.

`Model.forward` uses the loop for a step with one token per row; it does not prefill prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from gcore.engines.torch.attention import NAME, DecodePass, EngineAttention

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
HEADS = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMED = HEADS | {"q_norm", "k_norm"}
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}

PAST = 3
"""Number of cached tokens before each row's token in the trial."""

POSITIONS = (3, 4, 11, 30)
"""Token positions of the rows in the trial."""

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parts of a layer, in the order of their use.

    `attention_options`: arguments that the model passes to its attention besides queries, keys and values.
    """

    before: Any
    q: Any
    k: Any
    v: Any
    o: Any
    q_norm: Any
    k_norm: Any
    after: Any
    gate: Any
    up: Any
    down: Any
    act: Any
    attention_options: dict[str, Any]


class FastDecodeStep:
    """A decode step as one loop over the layers; see the module docstring. Created by `fast_decode_step`."""

    def __init__(self, module: Any, attention: EngineAttention, attention_options: list[dict[str, Any]]) -> None:
        base = module.model
        self._attention = attention
        self._embedding = base.embed_tokens
        self._rotary = base.rotary_emb
        self._norm = base.norm
        self._head = module.lm_head
        self._dim = base.layers[0].self_attn.head_dim
        self._layers = [_parts(layer, one) for layer, one in zip(base.layers, attention_options, strict=True)]

    def logits(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the logits [row, vocabulary] after one token per row. `ids` and `positions` [row, 1]."""
        rows, dim = ids.shape[0], self._dim
        hidden = functional.embedding(ids[:, 0], self._embedding.weight)
        cos, sin = self._rotary(hidden[:, None], positions)
        half = dim // 2
        for index, layer in enumerate(self._layers):
            x = layer.before.forward(hidden)
            q = _linear(x, layer.q).view(rows, -1, dim)
            k = _linear(x, layer.k).view(rows, -1, dim)
            v = _linear(x, layer.v).view(rows, -1, 1, dim)
            if layer.q_norm is not None:
                q, k = layer.q_norm.forward(q), layer.k_norm.forward(k)
            heads = q.shape[1]
            both = torch.cat((q, k), 1)
            turned = torch.cat((-both[..., half:], both[..., :half]), -1).mul_(sin)
            both = (both * cos).add_(turned)[:, :, None]
            keys, values = cache.update(both[:, heads:], v, index)
            out, _ = self._attention(layer, both[:, :heads], keys, values, None, **layer.attention_options)
            hidden = _linear(out.reshape(rows, -1), layer.o).add_(hidden)
            x = layer.after.forward(hidden)
            inner = layer.act(_linear(x, layer.gate)).mul_(_linear(x, layer.up))
            hidden = _linear(inner, layer.down).add_(hidden)
        made: Tensor = self._head(self._norm.forward(hidden)[:, None])
        return made[:, 0]


@torch.inference_mode()
def fast_decode_step(module: Any, attention: EngineAttention, vocabulary: int) -> FastDecodeStep | None:
    """Return the fast decode step of a model, if a trial gives the same bits; None if the model does not fit.

    The model must use the engine's attention already.
    """
    if not _recognised(module):
        return None
    device = module.lm_head.weight.device
    ids = torch.tensor([[(7 * n + 1) % vocabulary] for n in range(len(POSITIONS))], device=device)
    positions = torch.tensor(POSITIONS, device=device)[:, None]
    attention_options: list[dict[str, Any]] = []

    def overhear(part: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        attention_options.append(
            {name: more[name] for name in ("scaling", "sliding_window", "softcap", "s_aux") if name in more}
        )
        return attention(part, query, key, value, mask, **more)

    kind, attention.kind = attention.kind, DecodePass(None)
    AttentionInterface.register(NAME, overhear)
    try:
        expected = module(input_ids=ids, position_ids=positions, past_key_values=_Past(), use_cache=True).logits[:, -1]
        if len(attention_options) != len(module.model.layers):
            return None
        made = FastDecodeStep(module, attention, attention_options)
        same = torch.equal(made.logits(ids, positions, _Past()), expected)
    except (
        AttributeError,
        IndexError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # parts with these names but another interface
        return None
    finally:
        attention.kind = kind
        attention.register()
    return made if same else None


class _Past(Cache):  # type: ignore[misc]  # transformers is not typed
    """KV cache of the trial: `PAST` random tokens, the same each time, before the new one."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return keys and values [row, kv_head, `PAST` + 1, head_dim] of all tokens, from those of the new token."""
        generator = torch.Generator().manual_seed(layer)
        size = (*keys.shape[:2], PAST, keys.shape[3])
        made = [torch.randn(size, generator=generator).to(keys) for _ in range(2)]
        return torch.cat((made[0], keys), 2), torch.cat((made[1], values), 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, as the engine's own caches do: the model receives every position."""
        return 0


def _recognised(module: Any) -> bool:
    base: Any = getattr(module, "model", None)
    layers = getattr(base, "layers", None)
    if not layers or set(module._modules) != {"model", "lm_head"}:
        return False
    if set(base._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    linear = (*HEADS, "gate_proj", "up_proj", "down_proj")
    for layer in layers:
        if set(layer._modules) != LAYER or set(layer.self_attn._modules) not in (HEADS, NORMED):
            return False
        parts = layer.self_attn._modules | layer.mlp._modules
        if set(layer.mlp._modules) != GATED or any(type(parts[name]) is not torch.nn.Linear for name in linear):
            return False
    if any(part._parameters for part in module.modules() if part._modules):
        return False  # weights outside the known parts, which the loop would ignore
    return type(base.embed_tokens) is torch.nn.Embedding and hasattr(layers[0].self_attn, "head_dim")


def _parts(layer: Any, attention_options: dict[str, Any]) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        layer.input_layernorm,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        attention._modules.get("q_norm"),
        attention._modules.get("k_norm"),
        layer.post_attention_layernorm,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        _function(mlp.act_fn),
        attention_options,
    )


def _function(act: Any) -> Function:
    """Return the activation as a plain function, which is faster than its module. The trial checks that it is equal."""
    if isinstance(act, torch.nn.SiLU) or type(act).__name__ == "SiLUActivation":
        return functional.silu
    forward: Function = act.forward
    return forward


def _linear(x: Tensor, part: Any) -> Tensor:
    made: Tensor = part.forward(x)  # an adapter may have replaced it
    return made


Norm = Callable[[torch.Tensor], torch.Tensor]


def patch_norms(module: Any) -> None:
    """Make a loaded model faster without changing a bit of its results. It must be on its final device and have its
    final dtype.

    - RMS norms are computed in five operations instead of the eight of transformers and torch, if a trial gives the
      same bits (`replace_norms`).
    - Submodules and parameters are found faster (`cache_submodules`): `torch.nn.Module` keeps them in dictionaries that
      Python searches only after everything else has failed, and a decode step looks up some hundred of them.

    Does not change what is saved, listed or loaded.
    """
    replace_norms(module)
    cache_submodules(module)


def cache_submodules(module: Any) -> None:
    """Store submodules and parameters also as plain attributes, which Python finds first.

    Assigning a submodule or parameter removes its plain attribute (`torch.nn.Module.__setattr__`), so the attributes
    are never stale; code of this package changes tensors in place.
    """
    for layer in module.modules():
        for parts in (layer._modules, layer._parameters):
            layer.__dict__.update({name: part for name, part in parts.items() if part is not None})


@torch.inference_mode()
def replace_norms(module: Any) -> None:
    """Replace the forward function of each RMS norm by `_short` or `_fused`, the first that gives the same bits, if
    any.
    """
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
    """Whether the forward function that `form` makes gives the same bits as the layer's own, on random inputs.

    Tested with random weights, because the layer's own may be all ones; they are restored.
    """
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
