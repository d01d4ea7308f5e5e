"""How large a model is, from its configuration alone: parameters, the cache of a token, operations. Pure.

Counts are exact for the architectures named in `KNOWN`, which are the decoders of one kind: norms of one vector, a gated
feed-forward layer, grouped heads. Others are refused, not guessed: a wrong count would look like a right one.

Does not read files and does not know transformers; what a configuration leaves out is as transformers takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gcore.errors import DataError
from gcore.ledger.facts import ConfigValue
from gcore.nearest import did_you_mean

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
QWEN3_HEAD_DIM = 128
"""Of a qwen3 whose configuration names none."""
MOST = 1 << 24
"""No size in a configuration is larger; a product of a few stays a number that can be printed."""
READ = (
    "model_type",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "num_key_value_heads",
    "attention_bias",
    "vocab_size",
    "num_hidden_layers",
    "intermediate_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "mlp_bias",
)
"""What of a configuration `shape_of` looks at."""
LONGEST_WORD = 64
"""Characters of a value that is kept; a longer one is wrong, and is told so by its beginning."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. `qkv_biases`, `output_bias`, `mlp_biases`: whether the matrices have biases; `head_norms`: norms of queries and keys.

    `outputs`: rows of the output layer, the vocabulary of a language model, 1 of a critic or a classifier; `tied`: it is the
    embedding's own matrix.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    context: int
    tied: bool = False
    qkv_biases: bool = False
    output_bias: bool = False
    mlp_biases: bool = False
    head_norms: bool = False
    outputs: int = 0
    head_bias: bool = False

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = self.width * (2 * queries + 2 * keys) + 3 * self.width * self.inner + 2 * self.width
        count += (queries + 2 * keys) * self.qkv_biases + self.width * self.output_bias
        count += (2 * self.inner + self.width) * self.mlp_biases
        return count + 2 * self.head_dim * self.head_norms

    @property
    def head_parameters(self) -> int:
        """Of the output layer, whether or not they are the embedding's."""
        return self.outputs * self.width + self.outputs * self.head_bias

    @property
    def parameters(self) -> int:
        """All, a tied matrix once."""
        body = self.vocabulary * self.width + self.layers * self.layer_parameters + self.width
        return body + (0 if self.tied else self.head_parameters)

    @property
    def computing(self) -> int:
        """Parameters that a token is multiplied with: the embedding is only looked up, the output layer is not left out."""
        return self.layers * self.layer_parameters + self.head_parameters

    @property
    def cache_numbers(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def with_one_output(self, *, bias: bool) -> ModelShape:
        """The same body with a head of one number: a critic, a classifier."""
        return replace(self, tied=False, outputs=1, head_bias=bias)


def shape_of(config: Mapping[str, Any], *, where: str) -> ModelShape:
    """`config`: a model's config.json. Raises DataError for an architecture that is not known, or a size that is none."""
    kind = config.get("model_type")
    if kind not in KNOWN:
        if not config:
            what = "no model's configuration (config.json) can be read here"
        else:
            what = f"the sizes of an architecture {kind!r} are not known{did_you_mean(str(kind), KNOWN)}"
        raise DataError(what, where=where, fix=f"Name a model of one of these: {', '.join(KNOWN)}")
    read = _Reading(config, where)
    width, heads = read.size("hidden_size"), read.size("num_attention_heads")
    head_dim = read.size("head_dim", QWEN3_HEAD_DIM if kind == "qwen3" else max(1, width // heads))
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise DataError(
            f"{heads} heads cannot share {kv_heads} of keys and values",
            where=where,
            fix="Correct num_key_value_heads in config.json",
        )
    biased = read.truth("attention_bias") and kind in ("llama", "qwen3")
    vocabulary = read.size("vocab_size")
    return ModelShape(
        layers=read.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=read.size("intermediate_size"),
        vocabulary=vocabulary,
        context=read.size("max_position_embeddings", 2048),
        tied=read.truth("tie_word_embeddings"),
        qkv_biases=biased or kind == "qwen2",
        output_bias=biased,
        mlp_biases=read.truth("mlp_bias") and kind == "llama",
        head_norms=kind == "qwen3",
        outputs=vocabulary,
    )


def sizes_in(config: Mapping[str, Any]) -> dict[str, ConfigValue]:
    """What of `config` is to be kept, so that `shape_of` says of it what it says of the whole: short, whatever stands there."""
    kept: dict[str, ConfigValue] = {}
    for name in READ:
        value = config.get(name)
        plain = isinstance(value, bool | str) or (isinstance(value, int) and abs(value) <= MOST)
        if value is not None:
            kept[name] = value if plain and len(str(value)) <= LONGEST_WORD else str(value)[:LONGEST_WORD]
    return kept


@dataclass(frozen=True, slots=True)
class _Reading:
    config: Mapping[str, Any]
    where: str

    def size(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
            said = "is missing" if value is None else f"is {str(value)[:40]!r}"
            raise DataError(
                f"config.json: {name} {said}, and should be a whole number from 1 to {MOST}",
                where=self.where,
                fix="Copy or download the model again",
            )
        return value

    def truth(self, name: str) -> bool:
        return self.config.get(name) is True
