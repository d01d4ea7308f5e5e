"""Models, work and layouts of a job that has not run yet: model sizes, the work of one step for each model, and all
layouts of the pools.

Response lengths are not known yet: they are guessed, or given by the user. Memory is planned for the longest response,
time for the mean.

The size of a model (parameters, cache per token, operations) follows from its configuration alone. Counts are exact for
the architectures in `KNOWN`: decoders with one-vector norms, a gated feed-forward layer and grouped-query attention.
Of vision-language models those in `VISION` are known, with tower and projector. Other architectures are rejected, because a wrong count would look like a correct one. Missing fields of a configuration
have the defaults of transformers.

A layout says how many slots each pool gets and how many slots of one node an engine spans (1, 2, 4 and so on, a divisor
of its attention heads). Pools have slots of their own (co-existing), or all pools share all slots (co-located), either
with all models in memory or with only the active ones, while the others sleep.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from gcore.config.capabilities import ENGINES
from gcore.config.diffusion import FORWARD_LOSSES
from gcore.config.reward import JudgeSpec
from gcore.config.spec import JobSpec, training_sources, uses_pictures
from gcore.errors import DataError, did_you_mean
from gcore.ledger.records.cluster import ConfigValue
from placement.mapping.cluster import ClusterSpec
from placement.mapping.pictures import DenoiserShape, is_pipeline, read_pipeline
from placement.slots import Split, SplitBounds, count_noun, feasible

KNOWN = ("llama", "mistral", "qwen2", "qwen3")

VISION = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""By vision-language architecture, that of its language model."""

QWEN3_HEAD_DIM = 128
"""Head dimension of a qwen3 configuration without one."""

MOST = 1 << 24
"""Largest size that is accepted in a configuration, so that products of a few sizes stay printable."""

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
"""Fields of a configuration that `read_shape` reads."""

READ_OF_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_layers": 3,
}
"""Fields of a tower's configuration that `read_shape` reads, with their defaults for Qwen3-VL. `deepstack_layers`: number of
`deepstack_visual_indexes`."""

QWEN_2_5_TOWER = {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14}
"""Defaults of Qwen2.5-VL that differ."""

LONGEST_WORD = 64
"""Number of characters of a configuration value that are stored. A longer value is invalid anyway; its beginning is
enough for the error message."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of the vision tower and projector of a Qwen-VL model.

    `width`: hidden size. `inner`: size of the feed-forward layer. `patch`: values of a patch, over both frames of a
    picture. `merged`: patches of one token. `outputs`: width of the language model. `positions`: rows of the table of
    positions; 0: none. `levels`: layers whose features have projectors of their own. `gated`: as in Qwen2.5-VL, with gated
    feed-forward layers and one-vector norms.
    """

    layers: int
    width: int
    inner: int
    patch: int
    merged: int
    outputs: int
    positions: int
    levels: int
    gated: bool
    pixels: int = 196
    """Of a patch."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        count = 4 * self.width * self.width + 4 * self.width
        if self.gated:
            return count + 2 * self.width + 3 * self.width * self.inner + 2 * self.inner + self.width
        return count + 4 * self.width + 2 * self.width * self.inner + self.inner + self.width

    @property
    def parameters(self) -> int:
        """Parameters of the tower without the projector."""
        embedding = self.patch * self.width + (not self.gated) * self.width
        return embedding + self.positions * self.width + self.layers * self.layer_parameters

    @property
    def projector_parameters(self) -> int:
        """Parameters of the projector and of those of other layers' features."""
        wide = self.width * self.merged
        matrices = wide * wide + wide + wide * self.outputs + self.outputs
        first = matrices + (1 if self.gated else 2) * self.width
        return first + self.levels * (matrices + 2 * wide)

    def forward_ops(self, parts: Collection[str] = ("vision", "projector")) -> float:
        """Operations of a forward pass for one patch, without attention between patches. `parts`: those that are counted."""
        sizes = {
            "vision": self.parameters - self.positions * self.width,
            "projector": self.projector_parameters / self.merged,
        }
        return 2 * sum(sizes[part] for part in parts)

    def activation_numbers(self, *, recomputes: bool) -> int:
        """Values that autograd keeps for one patch of a trained tower. `recomputes`: with activation checkpointing."""
        layer = 11 * self.width + (5 if self.gated else 3) * self.inner
        return (self.width * self.layers + layer if recomputes else layer * self.layers) + self.patch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder model.

    `width`: hidden size. `inner`: size of the feed-forward layer. `context`: maximum tokens of a sequence.
    `qkv_biases`, `output_bias`, `mlp_biases`: whether these matrices have biases. `head_norms`: queries and keys are
    normalized. `outputs`: rows of the output layer: the vocabulary size of a language model, 1 for a critic or
    classifier; `head_bias`: whether it has a bias. `tied`: the output layer shares the embedding matrix.
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
    tower: TowerShape | None = None
    """Of a vision-language model."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = self.width * (2 * queries + 2 * keys) + 3 * self.width * self.inner + 2 * self.width
        count += (queries + 2 * keys) * self.qkv_biases + self.width * self.output_bias
        count += (2 * self.inner + self.width) * self.mlp_biases
        return count + 2 * self.head_dim * self.head_norms

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters of this rank beside every matrix of the layers."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = 2 * (self.width + queries) + 2 * (self.width + keys) + 3 * (self.width + self.inner)
        return self.layers * rank * sides

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer, including a matrix that is shared with the embedding."""
        return self.outputs * self.width + self.outputs * self.head_bias

    @property
    def parameters(self) -> int:
        """All parameters. A matrix that embedding and output layer share counts once."""
        body = self.vocabulary * self.width + self.layers * self.layer_parameters + self.width
        seeing = 0 if self.tower is None else self.tower.parameters + self.tower.projector_parameters
        return body + (0 if self.tied else self.head_parameters) + seeing

    def frozen_parameters(self, parts: Collection[str]) -> int:
        """Parameters of the parts that `train.freeze` names."""
        if self.tower is None:
            return 0
        sizes = {"vision": self.tower.parameters, "projector": self.tower.projector_parameters}
        return sum(sizes[part] for part in parts)

    @property
    def computing(self) -> int:
        """Parameters that a token is multiplied with: all but the embedding lookup, and including the output layer."""
        return self.layers * self.layer_parameters + self.head_parameters

    @property
    def cache_numbers(self) -> int:
        """Number of values that the KV cache keeps per token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def with_one_output(self, *, bias: bool) -> ModelShape:
        """Return the same model with a head of one output, as a critic or classifier has."""
        return replace(self, tied=False, outputs=1, head_bias=bias)


PolicyShape = ModelShape | DenoiserShape
"""A policy writes texts, or generates pictures."""


def read_policy(config: Mapping[str, Any], *, where: str) -> PolicyShape:
    """Read the shape of a policy: from its config.json, or from the sizes of a pipeline. Raises DataError."""
    return read_pipeline(config, where=where) if is_pipeline(config) else read_shape(config, where=where)


def read_shape(config: Mapping[str, Any], *, where: str) -> ModelShape:
    """Read the shape from a model's config.json. Raises DataError for an unknown architecture or an invalid size."""
    kind, tower = config.get("model_type"), None
    if str(kind) in VISION:
        flat = _flat(config)
        tower = _read_tower(flat, gated=kind == "qwen2_5_vl", where=where)
        config = {name: flat.get(f"text_config.{name}", flat.get(name)) for name in READ}
        if kind == "qwen2_5_vl":
            del config["head_dim"]  # transformers ignores it
        kind = VISION[str(kind)]
    if kind not in KNOWN:
        if not config:
            what = "the model's config.json cannot be read"
        else:
            what = f"the model architecture {kind!r} is not supported for planning{did_you_mean(str(kind), KNOWN)}"
        raise DataError(what, where=where, fix=f"Name a model of one of these: {', '.join((*KNOWN, *VISION))}")
    read = _Reading(config, where)
    width, heads = read.size("hidden_size"), read.size("num_attention_heads")
    head_dim = read.size("head_dim", QWEN3_HEAD_DIM if kind == "qwen3" else max(1, width // heads))
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise DataError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
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
        tower=tower,
    )


def _read_tower(flat: Mapping[str, Any], *, gated: bool, where: str) -> TowerShape:
    """Read the shape of a tower from a flattened configuration. Raises DataError."""
    defaults = READ_OF_TOWER | (QWEN_2_5_TOWER if gated else {})
    read = _Reading({name: flat.get(f"vision_config.{name}") for name in defaults}, where)
    size = {name: read.size(name, default) for name, default in defaults.items() if name != "deepstack_layers"}
    levels = flat.get("vision_config.deepstack_layers")
    return TowerShape(
        layers=size["depth"],
        width=size["hidden_size"],
        inner=size["intermediate_size"],
        patch=3 * size["temporal_patch_size"] * size["patch_size"] ** 2,
        merged=size["spatial_merge_size"] ** 2,
        outputs=size["out_hidden_size"],
        positions=0 if gated else size["num_position_embeddings"],
        levels=0 if gated else levels if isinstance(levels, int) else READ_OF_TOWER["deepstack_layers"],
        gated=gated,
        pixels=size["patch_size"] ** 2,
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A vision-language model's configuration with the fields of its parts as `text_config.hidden_size`."""
    flat = dict(config)
    for part, names in (("text_config", READ), ("vision_config", (*READ_OF_TOWER, "deepstack_visual_indexes"))):
        inner = config.get(part)
        if isinstance(inner, Mapping):
            flat |= {f"{part}.{name}": inner[name] for name in names if inner.get(name) is not None}
    indexes = flat.pop("vision_config.deepstack_visual_indexes", None)
    if isinstance(indexes, Sequence) and not isinstance(indexes, str):
        flat["vision_config.deepstack_layers"] = len(indexes)
    return flat


def relevant_sizes(config: Mapping[str, Any]) -> dict[str, ConfigValue]:
    """Select the fields of a model's configuration that are stored in the job's record: those that `read_shape` reads.
    Long values are cut off."""
    kept: dict[str, ConfigValue] = {}
    flat: Mapping[str, Any] = config
    names: Sequence[str] = READ
    if str(config.get("model_type")) in VISION:
        flat = _flat(config)
        names = (*READ, *(name for name in flat if "." in name))
    for name in names:
        value = flat.get(name)
        plain = isinstance(value, bool | str) or (isinstance(value, int) and abs(value) <= MOST)
        if value is not None:
            kept[name] = value if plain and len(str(value)) <= LONGEST_WORD else str(value)[:LONGEST_WORD]
    return kept


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reads fields of a config.json. `where`: the model, for error messages."""

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


FIXED_SHARE = 0.5
"""Share of GPU memory that SGLang and vLLM take at start for weights and cache, unless `engine_args` set another."""

SHARE_OPTIONS = {"sglang": "--mem-fraction-static", "vllm": "--gpu-memory-utilization"}
"""By engine that takes a fixed share: the option that sets it."""

LONGEST_GUESSED = 512
"""Assumed maximum of prompt tokens if the spec sets none."""

CHARACTERS_OF_A_TOKEN = 4
"""Characters per token in the fixed text of a judge's template."""


@dataclass(frozen=True, slots=True)
class JobShapes:
    """Shapes of a job's models. `critic` None: the job has no critic, or the critic starts as a copy of the policy.
    `judges`: by name; only judges that the cluster serves."""

    policy: PolicyShape
    critic: ModelShape | None
    judges: Mapping[str, ModelShape]


@dataclass(frozen=True, slots=True)
class MeanLengths:
    """Mean tokens of a prompt and of a response. A picture has no tokens, and its denoising steps in their place."""

    prompt: float
    response: float

    @classmethod
    def guessed(
        cls, spec: JobSpec, shape: PolicyShape, prompt: float | None = None, response: float | None = None
    ) -> MeanLengths:
        """Return the lengths that the user gave; half of the spec's maximum for a length that is None."""
        longest = spec.rollout.max_new_tokens
        if isinstance(shape, DenoiserShape):
            return cls(longest_prompt(spec, shape) / 2 if prompt is None else prompt, float(longest))
        return cls(
            longest_prompt(spec, shape) / 2 if prompt is None else prompt,
            longest / 2 if response is None else min(float(longest), response),
        )


@dataclass(frozen=True, slots=True)
class EngineWorkload:
    """One step's requests to a model that engines serve: `requests` requests, with `read` prompt tokens and `written`
    response tokens on average. A picture has no tokens: `written` are its denoising steps, and `read` is 0.

    `rows`: maximum of concurrent requests per engine. `cache_tokens`: tokens of its KV cache, if the spec sets them.
    `replicas`: number of engines, if the spec sets it. `longest`: maximum tokens of prompt and response together.
    `longest_written`: maximum tokens of the response alone; 0: a classifier. `shared`: number of requests with the same
    prompt, which is prefilled once. `share`: share of GPU memory that the engine takes in any case; None: as much as it
    needs.
    """

    name: str
    shape: PolicyShape
    engine: Literal["torch", "sglang", "vllm", "hf", "diffusers", "sglang-diffusion"]
    rows: int
    cache_tokens: int | None
    replicas: int | None
    requests: int
    read: float
    written: float
    longest: int
    longest_written: int
    shared: int = 1
    share: float | None = None
    patches: float = 0.0
    """Patches of a prompt's pictures on average."""

    @property
    def parameters(self) -> int:
        """Parameters that an engine holds."""
        return self.shape.served_parameters if isinstance(self.shape, DenoiserShape) else self.shape.parameters


@dataclass(frozen=True, slots=True)
class TrainWorkload:
    """The work of the train ranks in one step: `samples` samples of `tokens` tokens each on average.

    `models`: trained models by name. `reference`: a frozen reference model is evaluated; `offloads`: it is kept in host
    memory between uses. `stage`: ZeRO stage. `half`: bfloat16. `recomputes`: activation checkpointing. `micro_tokens`:
    limit of a micro-batch. `longest`: maximum tokens of a sample. `scored`: maximum share of a micro-batch's tokens
    whose logits are computed. `forwards`: passes over the step's samples without gradient, in addition to those of the
    updates.
    """

    models: Mapping[str, PolicyShape]
    reference: bool
    offloads: bool
    stage: int
    half: bool
    recomputes: bool
    micro_tokens: int
    longest: int
    samples: int
    tokens: float
    scored: float
    mini_batches: int
    epochs: int
    forwards: float
    lora_rank: int = 0
    """Rank of the policy's adapters, which alone are trained; 0: the whole policy is."""
    fsdp: bool = False
    """FSDP2 in place of ZeRO: every stage splits weights, gradients and optimizer state."""
    state_offloads: bool = False
    """With FSDP2 on a GPU: these are in host memory."""
    together: int = 1
    """Ranks that compute each micro-batch together, each a slice of it (sequence parallelism)."""
    frozen: tuple[str, ...] = ()
    """Parts of the policy that are not trained (`train.freeze`)."""
    patches: int = 0
    """Maximum number of patches of pictures in a micro-batch; 0 without pictures."""
    encoded: float = 0.0
    """Patches of the distinct pictures of a step. Each is encoded once in each pass."""
    rows: float = 1.0
    """Rows of a sample, which micro-batches may separate: the trained steps of a picture. `longest` is then the size of a row."""
    followed: bool = False
    """Each rank has a second, whole network that follows the trained one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step of a job.

    `ahead`: the next step's responses are generated while this one trains. `turns`: allowed memory modes of co-located
    slots; True: inactive ranks and engines sleep and release their memory. `resident`: in a co-existing split each
    model has an engine, awake or asleep, on every slot that does not train.
    """

    rollout: EngineWorkload
    judges: tuple[EngineWorkload, ...]
    training: TrainWorkload
    ahead: bool
    turns: tuple[bool, ...] = (False,)
    resident: bool = False
    blob_bytes: int = 0
    """Bytes of the blobs that are made for the responses of a step."""

    @property
    def served(self) -> tuple[EngineWorkload, ...]:
        """All models served by engines."""
        return (self.rollout, *self.judges)


def make_workload(spec: JobSpec, shapes: JobShapes, lengths: MeanLengths) -> Workload:
    """Compute the work of one step from a spec, the shapes of its models, and mean lengths."""
    samples = spec.flow.groups_per_step * spec.flow.samples_per_prompt
    policy = shapes.policy
    drawn = policy if isinstance(policy, DenoiserShape) else None
    longest = min(_context(spec, shapes.policy), longest_prompt(spec, shapes.policy) + spec.rollout.max_new_tokens)
    rollout = EngineWorkload(
        name="rollout",
        shape=shapes.policy,
        engine=spec.rollout.engine,
        rows=spec.rollout.batch_slots,
        cache_tokens=spec.rollout.cache_tokens,
        replicas=None,
        requests=0 if spec.train.loss == "sft" else samples,  # sft does not generate
        read=lengths.prompt if drawn is None else 0.0,
        written=lengths.response,
        longest=longest,
        longest_written=spec.rollout.max_new_tokens,
        shared=spec.flow.samples_per_prompt,
        share=_share(spec.rollout.engine, spec.rollout.engine_args),
        patches=_patches(policy, lengths) if uses_pictures(spec) else 0.0,
    )
    judges = tuple(
        _judge(judge, shapes.judges[judge.name], spec, lengths, longest, drawn)
        for judge in spec.judges
        if judge.model is not None
    )
    training = _training(spec, shapes, lengths, longest)
    return Workload(
        rollout,
        judges,
        training,
        ahead=spec.rollout.staleness > 0,
        turns=_turns(spec),
        resident=spec.placement.is_live and bool(judges),
        blob_bytes=0 if drawn is None else drawn.group_bytes * spec.flow.groups_per_step,
    )


def _patches(shape: PolicyShape, lengths: MeanLengths) -> float:
    """Return the patches of a prompt's pictures on average. All tokens of a prompt are taken for tokens of pictures, because
    most are and the others are not known."""
    return 0.0 if shape.tower is None else lengths.prompt * shape.tower.merged


def _turns(spec: JobSpec) -> tuple[bool, ...]:
    """Return `Workload.turns`: the memory mode that the spec sets, or those that are possible."""
    if spec.placement.memory is not None:
        return (spec.placement.memory == "in_turns",)
    overlaps = spec.rollout.staleness > 0 or spec.train.stream
    return (False,) if overlaps else (False, True)


def longest_prompt(spec: JobSpec, shape: PolicyShape) -> int:
    """Return the maximum tokens of a prompt: the limit of the spec or a guess, and what the model's context leaves
    beside a response of maximum length."""
    if isinstance(shape, DenoiserShape):
        return shape.context
    said = max(source.max_prompt_tokens or LONGEST_GUESSED for source in training_sources(spec))
    return max(1, min(said, _context(spec, shape) - spec.rollout.max_new_tokens))


def _context(spec: JobSpec, shape: PolicyShape) -> int:
    return min(shape.context, spec.model.max_length or shape.context)


def _judge(
    judge: JudgeSpec,
    shape: ModelShape,
    spec: JobSpec,
    lengths: MeanLengths,
    longest: int,
    drawn: DenoiserShape | None = None,
) -> EngineWorkload:
    """Compute the requests of one step to a judge. `longest`: maximum tokens of the policy's prompt and response. `drawn`: the
    policy, if it generates pictures, which the judge sees in the place of responses."""
    assert judge.model is not None
    classifies = judge.kind == "classifier"
    template = _template_tokens(judge)
    others = (judge.opponents or spec.flow.samples_per_prompt - 1) if judge.mode == "pairwise" else 1
    shown = 2 if judge.mode == "pairwise" else 1
    most_written = 0 if classifies else judge.max_new_tokens
    context = min(shape.context, judge.model.max_length or shape.context)
    response, most_response = lengths.response, spec.rollout.max_new_tokens
    patches = _patches(shape, lengths) if judge.images else 0.0
    if drawn is not None:
        tower = shape.tower
        patches = 0.0 if tower is None else float(-(-drawn.height * drawn.width // tower.pixels))
        most_response = 0 if tower is None else int(patches) // tower.merged
        response, longest, patches = float(most_response), drawn.context + most_response, shown * patches
    return EngineWorkload(
        name=f"judge {judge.name}",
        shape=shape.with_one_output(bias=False) if classifies else shape,
        engine=judge.serving.engine,
        rows=judge.serving.batch_slots,
        cache_tokens=judge.serving.cache_tokens,
        replicas=judge.serving.replicas,
        requests=spec.flow.groups_per_step * spec.flow.samples_per_prompt * max(1, others) * judge.votes,
        read=template + lengths.prompt + shown * response,
        written=most_written / 2,
        longest=min(context, template + longest + (shown - 1) * most_response + most_written),
        longest_written=most_written,
        shared=judge.votes,
        share=_share(judge.serving.engine, judge.serving.engine_args),
        patches=patches,
    )


def _template_tokens(judge: JudgeSpec) -> int:
    """Return the tokens that a judge's template adds to prompt and response."""
    said = re.sub(r"\{[{%#].*?[}%#]\}", "", judge.template or "", flags=re.DOTALL)
    return -(-(len(said) + len(judge.system or "")) // CHARACTERS_OF_A_TOKEN)


def _share(engine: str, arguments: Sequence[str]) -> float | None:
    """Return the share of GPU memory that an engine takes, as set by its arguments or by default; None: what it needs."""
    if engine not in SHARE_OPTIONS:
        return None
    words = [word for argument in arguments for word in argument.split("=", 1)]
    for name, value in pairwise(words):
        if name == SHARE_OPTIONS[engine]:
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                break  # the engine reports an invalid option itself
    return FIXED_SHARE


def _training(spec: JobSpec, shapes: JobShapes, lengths: MeanLengths, longest: int) -> TrainWorkload:
    train, policy = spec.train, shapes.policy
    models: dict[str, PolicyShape] = {"policy training": policy}
    if train.critic is not None:
        critic = shapes.critic or policy
        assert isinstance(critic, ModelShape)  # checked by the spec: a model that generates pictures has no critic
        models["critic training"] = critic.with_one_output(bias=True)
    written = spec.rollout.max_new_tokens
    later = train.mini_batches - 1 if train.epochs == 1 and train.critic is None else train.mini_batches
    compared = train.old_logprobs == "recompute" and train.loss not in ("sft", *FORWARD_LOSSES)
    recomputed = later / train.mini_batches if compared else 0.0
    drawn = policy if isinstance(policy, DenoiserShape) else None
    return TrainWorkload(
        models=models,
        reference=train.kl_coef > 0,
        offloads=train.offload_reference,
        stage=train.zero_stage,
        half=train.dtype == "bf16",
        recomputes=train.activation_checkpointing,
        micro_tokens=train.micro_batch_tokens,
        longest=longest if drawn is None else drawn.step_tokens,
        samples=spec.flow.groups_per_step * spec.flow.samples_per_prompt,
        tokens=lengths.prompt + lengths.response if drawn is None else drawn.trained * drawn.step_tokens,
        scored=written / (written + lengths.prompt),
        mini_batches=train.mini_batches,
        epochs=train.epochs,
        forwards=recomputed + (train.kl_coef > 0) + (train.loss == "nft"),
        lora_rank=0 if train.lora is None else train.lora.rank,
        fsdp=train.backend == "fsdp2",
        state_offloads=train.offload_state,
        together=train.sequence_parallel,
        frozen=train.freeze,
        patches=train.most_patches if uses_pictures(spec) else 0,
        encoded=_patches(policy, lengths) * spec.flow.groups_per_step if uses_pictures(spec) else 0.0,
        rows=1.0 if drawn is None else drawn.trained,
        followed=train.follows,
    )


FEW = 64
"""Up to this many slots every split is tried; with more slots, about `GRID` sizes of each pool."""

GRID = 24


@dataclass(frozen=True, slots=True, order=True)
class PoolLayout:
    """One layout of the pools. `rollout_size`, `reward_size`: slots per engine. `asleep`: the split is co-located, and
    inactive models sleep. `starts`: whether the job can start with it: its engines can span so many slots."""

    split: Split
    rollout_size: int
    reward_size: int
    asleep: bool
    starts: bool = True

    @property
    def ranks(self) -> int:
        """Number of train ranks; each has one slot."""
        return self.split.train

    def __str__(self) -> str:
        spans = []
        if self.rollout_size > 1:
            spans.append(f"rollout engines over {self.rollout_size}")
        if self.reward_size > 1:
            spans.append(f"judges over {self.reward_size}")
        if self.split.mode == "colocated":
            turns = "memory in turns" if self.asleep else "memory kept"
            slots, ranks = count_noun(self.split.rollout, "slot"), count_noun(self.ranks, "rank")
            return ", ".join([f"co-located: {slots} in turn, {ranks}, {turns}", *spans])
        reward = f", {self.split.reward} reward" if self.split.reward else ""
        return ", ".join([f"co-existing: {self.split.rollout} rollout{reward}, {self.split.train} train", *spans])


def all_layouts(cluster: ClusterSpec, workload: Workload) -> Iterator[PoolLayout]:
    """Enumerate all layouts on a cluster. On CPU slots sleeping saves no memory, so layouts with sleeping models are
    only tried if the spec requires them."""
    slots, judged = cluster.slots, bool(workload.judges)
    training = workload.training
    groups = min(slots // training.together, training.samples // training.mini_batches)
    trains = tuple(size * training.together for size in _sizes(max(1, groups)))
    turns = workload.turns if cluster.device.is_gpu else workload.turns[:1]
    reward_sizes = _spans(cluster, [judge.shape for judge in workload.judges]) if judged else (1,)
    for rollout_size in _spans(cluster, [workload.rollout.shape]):
        for reward_size in reward_sizes:
            starts = _starts(workload, rollout_size, reward_size)
            bounds = SplitBounds(slots, rollout_size, reward_size, trains, judged, colocated=False)
            for split in _splits(bounds):
                yield PoolLayout(split, rollout_size, reward_size, False, starts)
            if slots < max(rollout_size, reward_size):
                continue
            rollout, reward = (slots // size * size for size in (rollout_size, reward_size))
            for train in trains if slots >= training.together else ():
                split = Split("colocated", rollout, reward if judged else 0, train)
                for asleep in turns:
                    yield PoolLayout(split, rollout_size, reward_size, asleep, starts)


def layouts_within(bounds: SplitBounds, workload: Workload, *, gpu: bool) -> Iterator[PoolLayout]:
    """Enumerate the layouts with which a job can start under its present spec: the splits within `bounds`, with the
    memory mode that the job would use on co-located slots (if the spec leaves it open, models sleep in turns on
    GPUs)."""
    asleep = workload.turns[-1 if gpu else 0]
    for split in _splits(bounds):
        yield PoolLayout(split, bounds.rollout_size, bounds.reward_size, asleep if split.mode == "colocated" else False)


def _starts(workload: Workload, rollout_size: int, reward_size: int) -> bool:
    """Whether the spec's engines can span this many slots."""
    wide = [workload.rollout] * (rollout_size > 1) + list(workload.judges) * (reward_size > 1)
    return all(ENGINES[served.engine].several_slots for served in wide)


def _splits(bounds: SplitBounds) -> Iterator[Split]:
    """Enumerate the splits within `bounds`. With more than `FEW` slots, only those whose number of judge engines is one
    of `_sizes`, because 100,000 slots have a billion splits."""
    if bounds.slots <= FEW or not bounds.judged:
        yield from feasible(bounds)
        return
    together = bounds.all_together()
    if together is not None:
        yield together
    for train in bounds.sizes():
        left = bounds.slots - train
        for judges in _sizes(bounds.slots):
            reward = judges * bounds.reward_size
            rollout = (left - reward) // bounds.rollout_size * bounds.rollout_size
            if rollout > 0 and left - reward - rollout < bounds.reward_size:
                yield Split("coexisting", rollout, reward, train)


def _sizes(most: int) -> tuple[int, ...]:
    """Return the sizes to try for a pool: every size up to `FEW`, then about `GRID` sizes including the powers of
    two."""
    if most <= FEW:
        return tuple(range(1, most + 1))
    powers = {1 << n for n in range(most.bit_length()) if 1 << n <= most}
    even = {max(1, round(most * n / GRID / 8) * 8) for n in range(1, GRID + 1)}
    return tuple(sorted(size for size in powers | even | {most} if size <= most))


def _spans(cluster: ClusterSpec, shapes: Sequence[PolicyShape]) -> tuple[int, ...]:
    """Return the numbers of slots that an engine of these models may span: powers of two that divide the slots of every
    node and the attention and KV heads of every model. On CPUs only 1."""
    if not cluster.device.is_gpu:
        return (1,)
    return tuple(
        size
        for size in (1 << n for n in range(cluster.smallest_node.bit_length()))
        if all(kind.accelerators % size == 0 for kind in cluster.nodes)
        and all(shape.heads % size == 0 and shape.kv_heads % size == 0 for shape in shapes)
    )
