"""Loading a Hugging Face causal model, and one forward pass through it.

A model folder is refused at start, in one sentence, when it cannot be loaded whole: weights that are truncated, missing or
do not fit, a configuration of no known architecture, a tokenizer with more tokens than the model has. Which lane can serve
a model that loads is not decided here (`prove`).

A forward pass needs the logits of a few positions only, and an output layer over a large vocabulary is most of its work.
So a hook stands before that layer and lets through the positions that are wanted, whatever the model's own forward offers
for that; and the logits of a decode step over a large vocabulary are written into the same memory each time, because
tens of megabytes that are fresh at every step cost the system more than the multiplication.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from gcore.errors import DataError
from gcore.models.folder import check_code
from gcore.rollout.engine.attention import NAME, Attention
from gcore.rollout.engine.cache import CacheShape
from gcore.rollout.engine.quick import make_quick
from gcore.rollout.engine.straight import Straight
from gcore.rollout.engine.text import Text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONTEXT = 2048
"""Of a model that names none, when the launch does not either."""
LARGE_VOCABULARY = 16_384
ALIGNMENT = 64
"""Bytes."""
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class Head:
    """Stands at the output layer. `wanted`: rows and positions whose logits are needed; None: of every row's only one."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        self.wanted: tuple[torch.Tensor, torch.Tensor] | None = None
        self._buffer = torch.zeros(0)
        self._layer = layer
        layer.register_forward_pre_hook(self._select)
        plain = type(layer) is torch.nn.Linear and layer.bias is None
        if plain and device.type == "cpu" and int(layer.weight.shape[0]) >= LARGE_VOCABULARY:
            layer.forward = self._into_buffer

    def _select(self, layer: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = arguments[0]
        if self.wanted is None or hidden.dim() != 3:
            return None
        rows, positions = self.wanted
        return (hidden[rows, positions][:, None], *arguments[1:])

    def _into_buffer(self, hidden: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self._layer.weight
        if self.wanted is not None or hidden.dim() != 3 or hidden.shape[1] != 1:
            return functional.linear(hidden, weight)
        rows = hidden.shape[0]
        if self._buffer.shape[0] < rows or self._buffer.dtype != hidden.dtype:
            self._buffer = torch.empty((rows, weight.shape[0]), dtype=hidden.dtype)
        return torch.mm(hidden[:, 0], weight.t(), out=self._buffer[:rows])[:, None]


@dataclass(slots=True)
class Model:
    """A loaded model. `end_tokens` end a sample unless the request ignores them."""

    module: Any
    folder: Path
    attention: Attention
    shape: CacheShape
    """What the fast lanes' caches hold; no layers until `prove` has measured them."""
    head: Head
    vocabulary: int
    context: int
    end_tokens: tuple[int, ...]
    trusted: bool = False
    """Whether code from the folder may run."""
    cache_name: str = "past_key_values"
    """What the model's forward calls its cache."""
    asleep: bool = False
    """Whether the weights are released."""
    straight: Straight | None = None
    """A quicker way through a step of one token a row, to the same bits."""

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        *,
        wanted: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """[row, vocabulary]: logits of each row's only token, or of the `wanted` (rows, positions).

        `ids` and `positions` [row, token].
        """
        if self.straight is not None and wanted is None and ids.shape[1] == 1:
            return self.straight.logits(ids, positions, cache)
        arguments = {"input_ids": ids, "position_ids": positions, self.cache_name: cache, "use_cache": True}
        places = None if wanted is None else _places(wanted, ids.device)
        self.head.wanted = places
        try:
            logits: torch.Tensor = self.module(**arguments).logits
        finally:
            self.head.wanted = None
        return _picked(logits, places)

    def forward_own(
        self, ids: torch.Tensor, cache: Any, *, wanted: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> tuple[torch.Tensor, Any]:
        """As `forward`, with the cache that the model makes for itself (None: a new one), which is given back too."""
        places = None if wanted is None else _places(wanted, ids.device)
        self.head.wanted = places
        try:
            out = self.module(**{"input_ids": ids, self.cache_name: cache, "use_cache": True})
        finally:
            self.head.wanted = None
        kept = getattr(out, self.cache_name, None)
        if kept is None:
            raise ValueError("it keeps no cache")
        return _picked(out.logits, places), kept

    def use_own_attention(self) -> None:
        """Attend in the engine's way. Raises ValueError where a model cannot be made to."""
        self.module.set_attn_implementation(NAME)

    def use_plain_attention(self) -> None:
        """Attend in transformers' own plain way, as loaded models do."""
        self.module.set_attn_implementation("eager")


def _picked(logits: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    if places is None:
        return logits[:, -1]
    # A model that does not call its output layer as a module has not been stopped there.
    return logits[:, 0] if logits.shape[:2] == (len(places[0]), 1) else logits[places]


def _places(wanted: tuple[Sequence[int], Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(wanted[0], device=device), torch.tensor(wanted[1], device=device)


def load(
    folder: Path, *, dtype: str, device: str, context: int | None, text: Text | None, trust_remote_code: bool = False
) -> Model:
    """Load from a local folder. Raises DataError in one sentence when it cannot be served."""
    config = config_of(folder)
    check_code(config, trusted=trust_remote_code, where=str(folder))
    module = load_module(
        AutoModelForCausalLM, folder, DTYPES[dtype], trust_remote_code=trust_remote_code, attn_implementation="eager"
    )
    c = module.config.get_text_config()
    limit = getattr(c, "max_position_embeddings", None) or getattr(c, "n_positions", None)
    length = min(int(limit), context or int(limit)) if limit else context or CONTEXT
    head = module.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise refusal(folder, f"a {c.model_type} has no output layer")
    rope = getattr(c, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if kind in LENGTH_DEPENDENT_ROPE:
        raise refusal(folder, f"its positions ({kind}) depend on the longest sequence of the batch")
    vocabulary = int(head.weight.shape[0])
    check_vocabulary(text, vocabulary, folder)
    place = torch.device(device)
    module.to(place).eval().requires_grad_(False)
    align(module)
    attention = Attention()
    attention.register()
    parameters = inspect.signature(module.forward).parameters
    make_quick(module)
    return Model(
        module,
        folder,
        attention,
        CacheShape((), DTYPES[dtype], place),
        Head(head, place),
        vocabulary,
        length,
        _end_tokens(folder, config, text),
        trusted=trust_remote_code,
        cache_name="cache_params" if "cache_params" in parameters else "past_key_values",
    )


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises DataError."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise DataError(
            f"the model's config.json cannot be read ({error})", where=str(folder), fix="Name the folder of a model"
        ) from error
    return config


def check_vocabulary(text: Text | None, vocabulary: int, folder: Path) -> None:
    """Raises DataError if the tokenizer has tokens that the model has not."""
    if text is not None and text.highest_token >= vocabulary:
        raise DataError(
            f"the tokenizer has a token {text.highest_token} ({text.token(text.highest_token)!r}), but the model's "
            f"vocabulary ends at {vocabulary - 1}",
            where=str(folder),
            fix="Save the tokenizer that belongs to the model, or resize the model's embeddings",
        )


def load_module(auto: Any, folder: Path, dtype: torch.dtype, *, trust_remote_code: bool, **options: Any) -> Any:
    """The module as one of transformers' `Auto` classes loads it. Raises DataError if it does not load whole."""
    transformers_logging.disable_progress_bar()
    try:
        module, report = auto.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (
        OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError, StrictDataclassError
    ) as error:  # fmt: skip
        # A missing key's own words are its name alone.
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        reason = " ".join(said.split())[:300]
        raise DataError(
            f"cannot load this model ({reason})", where=str(folder), fix="Check the folder's files"
        ) from error
    # transformers would make these up at random and only warn.
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"the model's weights lack {missing[0]}{more}", where=str(folder), fix="Copy or save the model again"
        )
    return module


def align(module: Any) -> None:
    """Weights as a file's bytes lie anywhere; a matrix product's last bits, and its speed, may depend on where."""
    for parameter in module.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def refusal(folder: Path, why: str) -> DataError:
    """The sentence for a model that loads and still cannot be served."""
    return DataError(
        f"the torch engine cannot serve this model: {why}", where=str(folder), fix="Serve it with SGLang instead"
    )


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
