"""The sections `train` (optimizer, estimator, loss, critic, train world) and `flow` (the RL program, its sizes) of a job spec.

Advantage estimators and losses are built in, or entry points of the user's packages. This module checks only their names; the
train ranks load and test the functions (`gcore.train.objectives`). Stored specs (`STORED`) were checked at submission. Reading
them looks up no entry point, since a controller need not have the package installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from gcore.config.base import HUB_SCHEMES, MOST_SLOTS, FilePath, Option, Section, is_unset
from gcore.config.capabilities import BACKENDS, lacking
from gcore.config.diffusion import DenoisingTraining
from gcore.plugins import PluginKind, parse_plugin_file

Schedule = Literal["constant", "linear", "cosine"]
"""Learning rate after warm-up: constant, or down to zero at the last update, linearly or as half a cosine."""


CLIPS: dict[str, dict[str, float]] = {"gspo": {"clip_low": 3e-4, "clip_high": 4e-4}, "cispo": {"clip_low": 1.0}}
"""Clip ranges of losses whose papers differ from PPO (arXiv 2507.18071, 2506.13585). A ratio is never negative, so clip_low 1 is no bound."""


ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer except the output layer."""

OUTPUT_LAYER = "lm_head"
"""Usual name of a model's output layer."""


class LoraSpec(Section):
    """Low-rank adapters (LoRA): only they are trained, beside the frozen model."""

    rank: PositiveInt = Field(
        8, le=4096, description="Rank of each adapter: columns of one matrix and rows of the other"
    )
    alpha: float | None = Field(
        None,
        ge=1e-6,
        le=1e6,
        description="An adapter's product is multiplied by alpha / rank. Default: twice the rank",
    )
    targets: tuple[Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.-]+$")], ...] = Field(
        (ALL_LINEAR,),
        min_length=1,
        max_length=64,
        description="Linear layers that get an adapter, by name or by the end of the name, such as q_proj. all-linear: all but the "
        "output layer",
    )
    publish: Literal["merged", "adapter"] = Field(
        "merged",
        description="What a step writes for the engines. merged: the whole model with the adapters added. adapter: the adapters alone; "
        "each engine adds them to the model that it started with. Both give the same weights, except beside judges that are adapters. "
        "Not with SGLang",
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's product, alpha / rank."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    @field_validator("targets")
    @classmethod
    def _all_or_some(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"{ALL_LINEAR} is every linear layer, but others are listed too; list it alone")
        if len(set(targets)) < len(targets):
            raise ValueError("a target is listed twice; list it once")
        return targets


class CriticSpec(Section):
    """The critic's model and optimizer. ZeRO stage, dtype, betas, schedule, mini-batches and packing come from the policy."""

    path: FilePath | None = Field(
        None,
        description="Folder of the initial model, relative to the spec's folder: a language model (its value head starts at zero), or "
        "a model whose weights contain `score`, a head with one output (a reward model, or the folder `critic` of a checkpoint). "
        "Default: the policy's model",
    )
    learning_rate: Annotated[float, Field(ge=0)] = Field(
        1e-5, description="Peak learning rate. Higher than the policy's, because the value head starts from zero"
    )
    warmup_updates: Annotated[int, Field(ge=0)] = Field(
        0, description="Updates over which the learning rate rises linearly"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight decay of the critic's optimizer")
    max_grad_norm: PositiveFloat = Field(1.0, description="Global norm to which the critic's gradients are clipped")
    clip: PositiveFloat | None = Field(
        0.2, description="Value clipping: largest change of a value from the start of the step. null: no clipping"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="Number of first steps in which only the critic is trained"
    )

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        if path is not None and path.startswith(HUB_SCHEMES):
            raise ValueError(
                "the critic's model must be a folder that every node sees; download the model and name its folder"
            )
        return path


STORED = {"stored": True}
"""Validation context of stored specs."""


def is_stored(info: ValidationInfo) -> bool:
    """Return whether the spec being validated is a stored one."""
    return bool((info.context or {}).get("stored"))


ADVANTAGES = PluginKind("advantage estimator", "gcore.advantages", "train.advantage")
LOSSES = PluginKind("loss", "gcore.losses", "train.loss")
BuiltInAdvantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gae"]
BuiltInLoss = Literal["ppo", "gspo", "cispo", "sft", "grpo_guard", "nft", "weighted_matching"]


def is_own_advantage(name: str) -> bool:
    """Return whether the estimator is not built in."""
    return name not in get_args(BuiltInAdvantage)


def is_own_loss(name: str) -> bool:
    """Return whether the loss is not built in."""
    return name not in get_args(BuiltInLoss)


def _provided(name: str, info: ValidationInfo, kind: PluginKind, built_in: Sequence[str]) -> str:
    """Return `name` if it is built in, an installed entry point, or a plug-in file; accept any name in a stored spec.

    Raises PydanticCustomError for other names.
    """
    if name in built_in or is_stored(info) or parse_plugin_file(name) is not None:
        return name
    own = sorted({point.name for point in entry_points(group=kind.group)} - set(built_in))
    if name in own:
        return name
    *some, last = (repr(one) for one in (*built_in, *own))
    # The same error type as pydantic's for a Literal, so that `gcore.config.base` words it in the same way.
    expected = f"{', '.join(some)} or {last}; your own must be an entry point in {kind.group}"
    raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


def _advantage(name: str, info: ValidationInfo) -> str:
    return _provided(name, info, ADVANTAGES, get_args(BuiltInAdvantage))


def _loss(name: str, info: ValidationInfo) -> str:
    return _provided(name, info, LOSSES, get_args(BuiltInLoss))


AdvantageName = Annotated[BuiltInAdvantage | str, AfterValidator(_advantage)]
LossName = Annotated[BuiltInLoss | str, AfterValidator(_loss)]

RETURNS = ("reinforce_pp", "remax", "gae")
"""Estimators that use the return of each token instead of the group."""

ALONE = ("grpo", "dr_grpo", "rloo", "remax")
"""Estimators that need only one group, so that training can start before the other groups arrive."""


def _of_train(train: TrainSpec) -> Iterator[str]:
    """Yield a sentence for each contradiction between fields of `train`."""
    if train.dual_clip is not None and train.loss != "ppo":
        yield f"dual_clip needs loss: ppo, not {train.loss}; leave it out"
    if train.dual_clip is not None and train.dual_clip <= 1 + train.clip_high:
        yield f"dual_clip ({train.dual_clip}) must be above 1 + clip_high ({1 + train.clip_high})"
    if train.loss == "gspo" and train.aggregation != "seq-mean-token-mean":
        yield (
            "loss: gspo clips whole sequences and weighs them equally; set aggregation: seq-mean-token-mean, not "
            f"{train.aggregation}"
        )
    if train.horizon is not None and train.aggregation != "seq-mean-token-sum-norm":
        yield f"horizon needs aggregation: seq-mean-token-sum-norm, not {train.aggregation}; leave it out"
    if train.gamma != 1 and train.advantage not in RETURNS:
        yield (
            f"gamma needs advantage {', '.join(RETURNS[:-1])} or {RETURNS[-1]}; {train.advantage!r} has no returns to "
            "discount. Leave it out"
        )
    if train.advantage_options and not is_own_advantage(train.advantage):
        yield f"advantage_options are for an estimator of your own; {train.advantage!r} has none. Leave them out"
    if train.loss_options and not is_own_loss(train.loss):
        yield f"loss_options are for a loss of your own; {train.loss!r} has none. Leave them out"
    if train.critic is not None and train.advantage != "gae":
        yield f"critic needs advantage: gae; advantage {train.advantage!r} uses no critic"
    if train.gae_lambda != 1 and train.advantage != "gae":
        yield f"gae_lambda needs advantage: gae, not {train.advantage!r}; leave it out"
    if len(set(train.freeze)) < len(train.freeze):
        yield f"freeze names {train.freeze[0]!r} twice; name it once"
    if train.freeze and train.lora is not None:
        yield "freeze excludes parts from training, and lora trains adapters alone; leave one of the two out"
    if train.kl_max is not None and not (train.kl_coef > 0 and train.kl_kind == "k3"):
        why = f"the estimator is {train.kl_kind!r}" if train.kl_coef > 0 else "kl_coef is 0"
        yield f"kl_max limits k3, but {why}; leave it out, or set kl_coef above 0 and kl_estimator: k3"
    if train.correction_band[0] >= train.correction_band[1]:
        yield f"correction_band {list(train.correction_band)} is empty; the first number must be below the second"
    yield from _of_stream(train)
    settings = {
        "offload_state": ("offload_state", train.offload_state),
        "lora": ("adapters", train.lora is not None),
        "activation_checkpointing": ("checkpointing", train.activation_checkpointing),
        "copies_gb": ("replicas", bool(train.copies_gb)),
        "sequence_parallel": ("sequence_parallel", train.sequence_parallel > 1),
    }
    yield from lacking(BACKENDS, "backend", train.backend, settings)
    yield from _of_sequence_parallel(train)
    if train.loss == "sft" and train.critic is not None:
        yield "loss: sft has no rewards from which a critic could learn; leave advantage: gae out"
    if train.loss == "sft" and train.kl_in == "reward" and train.kl_coef > 0:
        yield "loss: sft has no rewards, so it cannot use kl_in: reward; set kl_in: loss"


def _of_sequence_parallel(train: TrainSpec) -> Iterator[str]:
    """Yield a sentence for each field of `train` that sequence groups of `sequence_parallel` ranks cannot share."""
    size = train.sequence_parallel
    if train.ranks is not None and (fix := multiples_near(train.ranks, size)):
        yield (
            f"ranks ({train.ranks}) must be a multiple of sequence_parallel ({size}), because {size} ranks compute each "
            f"sample together; set ranks: {fix}"
        )
    if fix := multiples_near(train.micro_batch_tokens, size):
        yield (
            f"micro_batch_tokens ({train.micro_batch_tokens}) must be a multiple of sequence_parallel ({size}), because each "
            f"of {size} ranks computes an equal slice of a row; set micro_batch_tokens: {fix}"
        )
    if size > 1 and train.packing == "bucketed":
        yield "sequence_parallel divides packed rows between ranks, and packing: bucketed makes none; leave one of the two out"


def multiples_near(value: int, size: int) -> str:
    """Name the multiples of `size` next to `value`, for an error; empty if `value` is one."""
    below = value // size * size
    return "" if below == value else " or ".join(str(one) for one in (below, below + size) if one)


def _of_stream(train: TrainSpec) -> Iterator[str]:
    """Yield a sentence for each field of `train` that contradicts `stream`."""
    if not train.stream:
        if train.stream_min is not None:
            yield "stream_min needs stream: true; set it, or leave stream_min out"
        return
    for name, value in (("epochs", train.epochs), ("mini_batches", train.mini_batches)):
        if value > 1:
            yield (
                f"stream: true makes one update per step, because a second update would need the weights after the first; set "
                f"{name}: 1, not {value}"
            )
    if train.loss == "sft":
        yield "stream: true overlaps training with generation, and loss: sft generates nothing; leave stream out"
    elif train.advantage not in ALONE:
        known = f"{', '.join(ALONE[:-1])} or {ALONE[-1]}"
        why = "is your own and may use the whole step" if is_own_advantage(train.advantage) else "uses the whole step"
        yield f"stream: true needs an estimator that uses one group alone ({known}); advantage {train.advantage!r} {why}"


PARTS = 8
"""Number of parts in which a streamed step is trained, while its other groups are generated, unless `stream_min` is set."""

Beta = Annotated[float, Field(ge=0, lt=1)]


EXECUTION_SETTINGS = ("backend", "offload_state")
"""Fields of `train` that may change while a job is unfinished: how a step is computed, not which values it computes."""


class TrainSpec(Section):
    """The optimizer, the loss and the train world."""

    ranks: PositiveInt | None = Field(
        None, le=MOST_SLOTS, description="Number of train ranks. Default: one per controller"
    )
    backend: Literal["deepspeed", "fsdp2"] = Field(
        "deepspeed",
        exclude_if=lambda name: name == "deepspeed",
        description="Library that splits the model over the ranks. fsdp2: torch's own fully_shard; DeepSpeed need not be installed",
    )
    zero_stage: Literal[1, 2, 3] = Field(
        1,
        description="What is split over the ranks. deepspeed: the ZeRO stage. fsdp2: everything; at stage 3 a layer's weights are gathered "
        "again for the backward pass, and the reference model is split too",
    )
    offload_state: bool = Field(
        False,
        exclude_if=lambda offload: not offload,
        description="Keep each rank's weights, gradients and Adam's state in host memory, with backend: fsdp2 (GPUs only)",
    )
    sequence_parallel: PositiveInt = Field(
        1,
        le=MOST_SLOTS,
        exclude_if=lambda size: size == 1,
        description="Number of consecutive ranks that compute each packed row together, each a slice of it (Ulysses). It must divide "
        "the ranks, micro_batch_tokens and the model's attention heads",
    )
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Data type of the forward and backward pass")
    lora: LoraSpec | None = Field(
        None,
        exclude_if=is_unset,
        description="Low-rank adapters, trained in place of the whole policy. A critic is trained whole",
    )
    freeze: tuple[Literal["vision", "projector"], ...] = Field(
        (),
        max_length=2,
        exclude_if=lambda parts: not parts,
        description="Parts of a vision-language model that are not trained. vision: the vision tower. projector: the layers that convert "
        "its features for the language model. Default: everything is trained",
    )
    learning_rate: Annotated[float, Field(ge=0)] = Field(1e-6, description="Peak learning rate")
    warmup_updates: Annotated[int, Field(ge=0)] = Field(
        0, description="Updates over which the learning rate rises linearly"
    )
    schedule: Schedule = Field("constant", description="Learning rate schedule after warm-up")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="Adam's betas")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight decay of the optimizer")
    max_grad_norm: PositiveFloat = Field(1.0, description="Global norm to which gradients are clipped")
    epochs: PositiveInt = Field(1, description="Passes over a step's batch")
    mini_batches: PositiveInt = Field(1, description="Optimizer updates per pass")
    micro_batch_tokens: PositiveInt = Field(
        8192,
        description="Tokens in one micro-batch of a rank, or of sequence_parallel ranks together. Lower it if memory runs out",
    )
    micro_batch_patches: PositiveInt | None = Field(
        None,
        exclude_if=is_unset,
        description="Patches that the vision tower computes in one micro-batch, at most. Lower it if memory runs out in the tower. "
        "Default: four times micro_batch_tokens",
    )
    packing: Literal["auto", "packed", "bucketed"] = Field(
        "auto",
        description="Layout of a micro-batch. packed: sequences end to end without padding. bucketed: padded rows of similar "
        "length. auto: packed if the model supports it",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, more time"
    )
    offload_reference: bool = Field(
        True, description="Keep the reference model in host memory while it is not used (GPUs only)"
    )
    advantage: AdvantageName = Field(
        "grpo",
        description="Advantage estimator. grpo: minus the group's mean, divided by its deviation. dr_grpo: minus the mean. rloo: minus "
        "the mean of the other samples. reinforce_pp: return to go, whitened over the step's tokens. reinforce_pp_baseline: reward "
        "minus the group's mean, whitened in the same way. remax: return to go minus the group's baseline, which the flow provides. "
        "gae: against a critic's values, whitened. Or an entry point in `gcore.advantages`",
    )
    advantage_options: dict[str, Option] = Field({}, description="Settings of an estimator of your own, by name")
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Discount per token, for reinforce_pp, remax and gae"
    )
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0,
        description="Lambda of GAE. 1: use the rewards up to the end and no critic values in between, which suits an untrained critic. "
        "Below 1, a reward at the last token fades with distance (0.95: half after 14 tokens)",
    )
    critic: CriticSpec | None = Field(
        None, description="The value model, for advantage: gae. Default: a critic with default settings"
    )
    loss: LossName = Field(
        "ppo",
        description="Loss. ppo: clip per token. gspo: clip per sequence. cispo: clip the weight and keep every token's gradient. sft: negative "
        "log-probability of the response, without rewards, advantages or ratios. For models that generate pictures, also grpo_guard: ppo "
        "with ratios of equal mean and spread at all steps. nft: DiffusionNFT. weighted_matching: flow matching of the generated pictures, "
        "weighted by reward. Or an entry point in `gcore.losses`",
    )
    loss_options: dict[str, Option] = Field({}, description="Settings of a loss of your own, by name")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="Dual clip, for loss: ppo: bounds the loss of a token with negative advantage at this multiple of the advantage",
    )
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the entropy bonus")
    clip_low: PositiveFloat = Field(
        0.2,
        description="The ratio is clipped below 1 - clip_low. Default with loss: gspo 3e-4, with loss: cispo 1 (no bound)",
    )
    clip_high: PositiveFloat = Field(
        0.2, description="The ratio is clipped above 1 + clip_high. Default with loss: gspo 4e-4"
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        "token-mean", description="How token losses are aggregated. Denominators are global"
    )
    horizon: PositiveInt | None = Field(
        None, description="Denominator of seq-mean-token-sum-norm. Default: max_new_tokens"
    )
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Weight of the KL divergence from the reference model. 0: no reference model"
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Whether the KL is a term of the loss or of the reward"
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] | None = Field(
        None,
        description="KL estimator. k3+ has the value of k3 and the gradient of k2. Default: k3 in the loss, and k1 (unbiased) in the reward",
    )
    kl_max: PositiveFloat | None = Field(
        None,
        exclude_if=is_unset,
        description="Upper bound of k3 for one token, in nats. A token above it counts this much and has no gradient. verl and OpenRLHF "
        "use 10. Default: no bound",
    )
    diffusion: DenoisingTraining | None = Field(
        None, exclude_if=is_unset, description="How denoising steps are trained, with an engine that generates pictures"
    )
    old_logprobs: Literal["current", "recompute", "engine"] = Field(
        "recompute",
        description="Log-probabilities in the ratio's denominator. current: those of this update (ratio 1). recompute: recomputed before "
        "the step. engine: those of the engine",
    )
    tis_cap: PositiveFloat = Field(2.0, description="Cap of the truncated importance weight, with correction: tis")
    correction_band: tuple[Annotated[float, Field(ge=0)], PositiveFloat] = Field(
        (0.5, 5.0), description="Range of importance ratios whose tokens are trained, with correction: icepop or mis"
    )
    stream: bool = Field(
        False,
        description="Train on finished groups while the other groups of the step are still being generated. The gradient equals that of "
        "the whole step. Needs one update per step, staleness 0, and an estimator that uses one group alone",
    )
    stream_min: PositiveInt | None = Field(
        None, description="Fewest groups to train as a part of a streamed step. Default: an eighth of the step's groups"
    )
    copies_gb: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="Host memory, in GB (1e9 bytes), that a rank may use for in-memory replicas of its own and a neighbour's state. From "
        "them, a train world that loses a rank or a node continues without losing a step. 0: no replicas. Default: as needed, up to "
        "a quarter of the free memory",
    )
    watchdog_s: PositiveFloat = Field(
        120.0, description="A train world that makes no progress for this many seconds is stopped and restarted"
    )
    start_limit_s: PositiveFloat = Field(
        600.0,
        description="Maximum start time of a train rank, in seconds; after that the start has failed. The first rank reads the whole checkpoint "
        "while the others wait, so allow more for hundreds of gigabytes on a slow disk",
    )

    @property
    def compares_group(self) -> bool:
        """Whether a sample's advantage depends on the other samples of its group, so that a group needs at least two."""
        return self.loss != "sft" and self.advantage not in RETURNS and not is_own_advantage(self.advantage)

    def part_of(self, groups: int) -> int | None:
        """Return the fewest groups on which training starts before the other ones of a step with `groups` groups are finished; None without `stream`."""
        if not self.stream:
            return None
        return self.stream_min or max(1, -(-groups // PARTS))

    @property
    def most_patches(self) -> int:
        """Maximum number of patches in a micro-batch after defaults. Four patches are one token in Qwen's models."""
        return self.micro_batch_patches or 4 * self.micro_batch_tokens

    @property
    def kl_kind(self) -> Literal["k1", "k2", "k3", "k3+"]:
        """The KL estimator after defaults."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def averages(self) -> bool:
        """Whether a moving average of the trained weights is evaluated."""
        return self.diffusion is not None and self.diffusion.ema_decay is not None

    @property
    def follows(self) -> bool:
        """Whether each rank has a second network, which follows the trained one."""
        return self.loss == "nft" or self.averages

    @property
    def rewards_kl(self) -> bool:
        """Whether the KL is part of the reward."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @model_validator(mode="before")
    @classmethod
    def _add_critic(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("advantage") == "gae" and tree.get("critic") is None:
            return {**tree, "critic": {}}
        return tree

    @model_validator(mode="before")
    @classmethod
    def _add_clip_range(cls, tree: Any, info: ValidationInfo) -> Any:
        """Give a new job the clip range of its loss's paper. A stored job keeps its own."""
        if not isinstance(tree, dict) or is_stored(info):
            return tree
        return {**CLIPS.get(str(tree.get("loss")), {}), **tree}

    @model_validator(mode="after")
    def _check_fields(self) -> TrainSpec:
        if (why := next(_of_train(self), None)) is not None:
            raise ValueError(why)
        return self


class FilterSpec(Section):
    """A filter that decides which groups are not trained."""

    name: str = Field(description="Filter, by entry-point name in `gcore.filters`")
    options: dict[str, Option] = Field({}, description="Settings of the filter, by name")


MOST_STEPS = 1_000_000

LIMIT_QUOTAS, LEAST_LIMIT = 10, 256
"""`max_prompts_per_step: auto` is this many quotas, and at least this many prompts."""

OnLimit = Literal["train_smaller", "pad_masked", "fail"]


class FlowSpec(Section):
    """The RL program, its sizes, and its length, in `steps` or in `epochs`."""

    name: str = Field("grpo", description="Flow, by entry-point name in `gcore.flows`")
    steps: Annotated[int, Field(gt=0, le=MOST_STEPS)] | None = Field(
        None, description="Steps (sealed batches) until the job succeeds. Set either steps or epochs"
    )
    epochs: Annotated[int, Field(gt=0, le=MOST_STEPS)] | None = Field(
        None, description="Data epochs until the job succeeds. Set either steps or epochs"
    )
    count: Literal["prompts", "steps"] = Field(
        "prompts",
        description="Length of an epoch. prompts: until every prompt is trained, filtered or failed. steps: as many steps as it would "
        "take if every prompt were trained",
    )
    groups_per_step: PositiveInt = Field(32, description="Quota of a step: groups in one sealed batch, after filters")
    samples_per_prompt: PositiveInt = Field(8, description="Responses in a group")
    issue_cap: Annotated[float, Field(ge=1, le=16)] = Field(
        4.0,
        description="Maximum number of prompts sampled at once per group that the step still needs. Within this limit, the number follows how many "
        "prompts recent steps used per kept group. 1: as many as needed",
    )
    max_prompts_per_step: PositiveInt | Literal["auto"] | None = Field(
        "auto",
        description=f"Maximum number of prompts that one step may use up. auto: {LIMIT_QUOTAS} times groups_per_step, at least "
        f"{LEAST_LIMIT}. null: no limit",
    )
    on_limit: OnLimit = Field(
        "train_smaller",
        description="What happens when a step has used up its prompts, or those in the windows, before it met its quota. train_smaller: "
        "train on the available groups. pad_masked: the same, but missing groups count in the loss's denominators. fail: fail the job",
    )
    filters: tuple[FilterSpec, ...] = Field(
        (),
        description="Filters in order. A group must pass all of them; the first filter that rejects it gives the reason",
    )
    max_reissues: PositiveInt = Field(
        8,
        description="Maximum number of times that a prompt is sampled again after a failure, before its outcome is failed",
    )

    @model_validator(mode="after")
    def _check_goal(self) -> FlowSpec:
        if (self.steps is None) == (self.epochs is None):
            both = "both are set. Remove one, on the command line with --set flow.steps=null or flow.epochs=null"
            given = both if self.steps is not None else "neither is set"
            raise ValueError(f"set exactly one of flow.steps and flow.epochs; {given}")
        if self.prompt_limit is not None and self.prompt_limit < self.groups_per_step:
            raise ValueError(
                f"max_prompts_per_step ({self.prompt_limit}) is below groups_per_step ({self.groups_per_step}), so no step "
                "could meet its quota; raise it"
            )
        return self

    @property
    def prompt_limit(self) -> int | None:
        """Most prompts that one step may use up; None: no limit."""
        if self.max_prompts_per_step == "auto":
            return max(LIMIT_QUOTAS * self.groups_per_step, LEAST_LIMIT)
        return self.max_prompts_per_step

    def last_step(self, prompts: int) -> int | None:
        """Return the job's last step with `prompts` prompts per epoch; None if it depends on how many prompts are filtered."""
        if self.epochs is None or self.steps is not None:
            return self.steps
        return self.epochs * -(-prompts // self.groups_per_step) if self.count == "steps" else None


def learning_rate(
    update: int,
    *,
    peak: float,
    warmup_updates: int,
    schedule: Schedule,
    total_updates: int,
) -> float:
    """Return the learning rate of optimizer update `update` (from 0) of `total_updates`; after them 0, unless constant.

    Depends on the update number alone, so that a resumed run continues exactly. The rate is above zero in the first and in the
    last update. Warm-up: peak·(update + 1)/warmup_updates; the first update after warm-up has `peak`. Raises ValueError for a
    negative number.
    """
    if update < 0:
        raise ValueError(f"update {update} is negative; updates are counted from 0")
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    left = max(0.0, (total_updates - update) / max(1, total_updates - warmup_updates))
    return peak * (left if schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)
