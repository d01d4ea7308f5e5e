"""Loading a Hugging Face model, refusing those that the engine's cache cannot serve, and changing weights.

A model is refused at start when its configuration names what the cache does not do (windows, states, positions that
depend on the length of the batch). What a configuration does not tell, `decoder.prove` finds out.

New weights are first read into host memory (`stage`, in any thread) and compared with what the model has: names and
shapes must all fit before anything is written (`install`, between decode steps). A folder whose names differ from the
module's own (older checkpoints, fused experts) is read through transformers instead, which knows how to convert them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from gcore.errors import DataError, EngineError
from gcore.models.folder import check_code
from gcore.rollout.engine.attention import NAME, Attention
from gcore.rollout.engine.cache import CacheShape
from gcore.rollout.engine.text import Text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. `end_tokens` end a sample unless the request ignores them."""

    module: Any
    attention: Attention
    shape: CacheShape
    vocabulary: int
    context: int
    end_tokens: tuple[int, ...]


def load(
    folder: Path,
    *,
    dtype: str,
    device: str,
    context: int | None,
    text: Text | None,
    trust_remote_code: bool = False,
) -> Model:
    """Load from a local folder. Raises DataError in one sentence when it cannot be served.

    `trust_remote_code`: run Python files that the folder brings.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"the model's config.json cannot be read ({error})", where=str(folder), fix="Name the folder of a model"
        ) from error
    check_code(config, trusted=trust_remote_code, where=str(folder))
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"cannot load this model ({reason})", where=str(folder), fix="Check the folder's files"
        ) from error
    c = module.config
    limit = int(getattr(c, "max_position_embeddings", None) or getattr(c, "n_positions", None) or 2048)
    length = min(limit, context or limit)
    if (unfit := _unfit(module, length)) is not None:
        raise _refusal(folder, unfit)
    module.to(device).eval().requires_grad_(False)
    heads = int(c.num_attention_heads)
    attention = Attention(length)
    attention.register()
    shape = CacheShape(
        layers=int(c.num_hidden_layers),
        kv_heads=int(getattr(c, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(c, "head_dim", None) or c.hidden_size // heads),
        dtype=DTYPES[dtype],
        device=torch.device(device),
    )
    vocabulary = int(module.get_output_embeddings().weight.shape[0])
    return Model(module, attention, shape, vocabulary, length, _end_tokens(folder, config, text))


def use_own_attention(model: Model) -> None:
    """Loaded models attend in transformers' plain way until this is called."""
    model.module.set_attn_implementation(NAME)


def _refusal(folder: Path, why: str) -> DataError:
    return DataError(
        f"the torch engine cannot serve this model: {why}", where=str(folder), fix="Serve it with SGLang instead"
    )


def _unfit(module: Any, context: int) -> str | None:
    c = module.config
    kinds = set(getattr(c, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(c, "sliding_window", None) if getattr(c, "use_sliding_window", True) else None
    rope = getattr(c, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, Mapping) else "default"
    if not getattr(module, "_supports_attention_backend", False):
        return f"a {c.model_type} has no attention that can be replaced"
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}, and only full attention is served"
    if window is not None and window < context:
        return f"its attention has a sliding window of {window} tokens, less than its context of {context}"
    if kind in LENGTH_DEPENDENT_ROPE:
        return f"its positions ({kind}) depend on the longest sequence of the batch"
    if getattr(c, "num_attention_heads", None) is None or module.get_output_embeddings() is None:
        return f"a {c.model_type} has no attention heads or no output layer"
    return None


def _end_tokens(folder: Path, config: dict[str, Any], text: Text | None) -> tuple[int, ...]:
    """Every token that config, generation config or tokenizer call the end."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        try:
            value = (config if name == "config.json" else json.loads((folder / name).read_text())).get("eos_token_id")
        except (OSError, ValueError):
            continue
        found.update([value] if isinstance(value, int) else value or ())
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token")
    except (OSError, ValueError):
        token = None
    end = token.get("content") if isinstance(token, dict) else token
    if text is not None and isinstance(end, str) and (known := text.token_id(end)) is not None:
        found.add(known)
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights in host memory that fit the model; by the module's names."""

    tensors: Mapping[str, torch.Tensor]


def stage(model: Model, folder: Path) -> Staged:
    """Read a folder's weights. Raises EngineError, and nothing has changed, when they do not fit."""
    own: dict[str, torch.Tensor] = model.module.state_dict()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError("there are no weights (*.safetensors)", where=str(folder), fix="Publish a whole model folder")
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as weights:
                tensors.update({name: weights.get_tensor(name) for name in weights.keys()})  # noqa: SIM118
        if tensors.keys() - own.keys():
            tensors = dict(_converted(model, folder))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise EngineError(
            f"cannot read the weights ({' '.join(str(error).split())[:300]})",
            where=str(folder),
            fix="Publish them again",
        ) from error
    # Tied weights stand in a checkpoint once.
    written = {own[name].data_ptr() for name in tensors if name in own}
    missing = sorted(name for name in own.keys() - tensors.keys() if own[name].data_ptr() not in written)
    unknown = sorted(tensors.keys() - own.keys())
    wrong = sorted(n for n, t in tensors.items() if n in own and t.shape != own[n].shape)
    for names, what in ((missing, "lacks"), (unknown, "has, unknown to the model,"), (wrong, "has in another shape")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EngineError(f"the weights do not fit: the folder {what} {names[0]}{more}", where=str(folder))
    return Staged(tensors)


def _converted(model: Model, folder: Path) -> Mapping[str, torch.Tensor]:
    # The class that serves already, which may be one that came with the model.
    module: Any = type(model.module).from_pretrained(
        folder, config=model.module.config, dtype=model.shape.dtype, local_files_only=True
    )
    state: dict[str, torch.Tensor] = module.state_dict()
    return state


def install(model: Model, staged: Staged) -> None:
    """Write staged weights over the model's own."""
    own: dict[str, torch.Tensor] = model.module.state_dict()
    with torch.no_grad():
        for name, tensor in staged.tensors.items():
            own[name].copy_(tensor)


def put_to_sleep(model: Model) -> None:
    """The weights go from the accelerator to host memory; where they are there already, nothing happens."""
    if model.shape.device.type != "cpu":
        model.module.to("cpu")
        torch.cuda.empty_cache()


def wake(model: Model) -> None:
    """The weights come back."""
    model.module.to(model.shape.device)
