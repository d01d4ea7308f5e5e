"""The sections `train` (optimizer, estimator, loss, critic, train world) and `flow` (the RL program, its sizes) of a job spec.

Advantage estimators and losses are named: gcore's own, or entry points of the user's packages. Only names are checked here;
the train ranks load and try the functions (`gcore.train.objectives`). A stored spec was checked when it was submitted: reading it
(`STORED`) looks up no entry point, since a controller need not have the package installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from gcore.config.base import HUB_SCHEMES, MOST_SLOTS, FilePath, Option, Section, is_unset
from gcore.plugins import PluginKind, parse_plugin_file

Schedule = Literal["constant", "linear", "cosine"]
"""Of the learning rate after its warm-up: as it is, or to zero at the last update along a line or half a cosine."""


CLIPS: dict[str, dict[str, float]] = {"gspo": {"clip_low": 3e-4, "clip_high": 4e-4}, "cispo": {"clip_low": 1.0}}
"""Clips of losses whose papers differ from PPO's (arXiv 2507.18071, 2506.13585). A ratio is at least 0, so a clip_low of 1 is no bound."""


class CriticSpec(Section):
    """The critic's model and optimizer. ZeRO stage, dtype, betas, schedule, mini-batches and packing are the policy's."""

    path: FilePath | None = Field(
        None,
        description="Folder of the model it starts from, relative to the spec's folder: a language model, which gets a "
        "head of zeros, or one whose weights hold `score`, a head of one number (a reward model; the folder `critic` of "
        "a checkpoint); default: the policy's model",
    )
    learning_rate: Annotated[float, Field(ge=0)] = Field(
        1e-5, description="Peak learning rate; its head begins at nothing, so it bears more than the policy"
    )
    warmup_updates: Annotated[int, Field(ge=0)] = Field(0, description="Updates over which the rate rises linearly")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight decay of its optimizer")
    max_grad_norm: PositiveFloat = Field(1.0, description="Its gradients are clipped to this global norm")
    clip: PositiveFloat | None = Field(
        0.2, description="A value moves no further than this from what it was at the step's start; null: as it likes"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="First steps of the job in which the critic alone is trained and the policy stays as it is"
    )

    @field_validator("path")
    @classmethod
    def _is_a_folder(cls, path: str | None) -> str | None:
        if path is not None and path.startswith(HUB_SCHEMES):
            raise ValueError("the critic's model is a folder that every node sees; download it and name the folder")
        return path


STORED = {"stored": True}
"""The validation context of a spec that was stored."""


def is_stored(info: ValidationInfo) -> bool:
    """Whether a spec that was stored is read."""
    return bool((info.context or {}).get("stored"))


ADVANTAGES = PluginKind("advantage estimator", "gcore.advantages", "train.advantage")
LOSSES = PluginKind("loss", "gcore.losses", "train.loss")
BuiltInAdvantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gae"]
BuiltInLoss = Literal["ppo", "gspo", "cispo", "sft"]


def is_own_advantage(name: str) -> bool:
    """Whether it is none of gcore's."""
    return name not in get_args(BuiltInAdvantage)


def is_own_loss(name: str) -> bool:
    """Whether it is none of gcore's."""
    return name not in get_args(BuiltInLoss)


def _provided(name: str, info: ValidationInfo, kind: PluginKind, built_in: Sequence[str]) -> str:
    if name in built_in or is_stored(info) or parse_plugin_file(name) is not None:
        return name
    own = sorted({point.name for point in entry_points(group=kind.group)} - set(built_in))
    if name in own:
        return name
    *some, last = (repr(one) for one in (*built_in, *own))
    # As pydantic says of a Literal, so that it is put in the same words (`gcore.config.base`).
    expected = f"{', '.join(some)} or {last}; one of your own is an entry point in {kind.group}"
    raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


def _advantage(name: str, info: ValidationInfo) -> str:
    return _provided(name, info, ADVANTAGES, get_args(BuiltInAdvantage))


def _loss(name: str, info: ValidationInfo) -> str:
    return _provided(name, info, LOSSES, get_args(BuiltInLoss))


AdvantageName = Annotated[BuiltInAdvantage | str, AfterValidator(_advantage)]
LossName = Annotated[BuiltInLoss | str, AfterValidator(_loss)]

RETURNS = ("reinforce_pp", "remax", "gae")
"""Estimators that look at what is still to come, token by token, and not at the group."""

ALONE = ("grpo", "dr_grpo", "rloo", "remax")
"""Estimators that look at one group alone, so that it can be trained before the others are there."""


def _of_train(train: TrainSpec) -> Iterator[str]:
    if train.dual_clip is not None and train.loss != "ppo":
        yield f"dual_clip belongs to loss: ppo, not to {train.loss}"
    if train.dual_clip is not None and train.dual_clip <= 1 + train.clip_high:
        yield f"dual_clip ({train.dual_clip}) must be above 1 + clip_high ({1 + train.clip_high})"
    if train.loss == "gspo" and train.aggregation != "seq-mean-token-mean":
        yield (
            "loss: gspo clips whole sequences, each of which counts once; set aggregation: seq-mean-token-mean, not "
            f"{train.aggregation}"
        )
    if train.horizon is not None and train.aggregation != "seq-mean-token-sum-norm":
        yield f"horizon belongs to aggregation: seq-mean-token-sum-norm, not to {train.aggregation}"
    if train.gamma != 1 and train.advantage not in RETURNS:
        yield (
            f"gamma is for {', '.join(RETURNS[:-1])} and {RETURNS[-1]}; advantage {train.advantage!r} has no returns to "
            "discount"
        )
    if train.advantage_options and not is_own_advantage(train.advantage):
        yield f"advantage_options are for an estimator of your own; {train.advantage!r} has none"
    if train.loss_options and not is_own_loss(train.loss):
        yield f"loss_options are for a loss of your own; {train.loss!r} has none"
    if train.critic is not None and train.advantage != "gae":
        yield f"critic belongs to advantage: gae; advantage {train.advantage!r} asks no critic"
    if train.gae_lambda != 1 and train.advantage != "gae":
        yield f"gae_lambda belongs to advantage: gae, not to {train.advantage!r}"
    if train.kl_max is not None and not (train.kl_coef > 0 and train.kl_kind == "k3"):
        why = f"the estimator is {train.kl_kind!r}" if train.kl_coef > 0 else "kl_coef is 0"
        yield f"kl_max is a bound of k3, and {why}; leave it out, or set kl_coef above 0 and kl_estimator: k3"
    if train.correction_band[0] >= train.correction_band[1]:
        yield f"correction_band {list(train.correction_band)} holds nothing; its first must be below its second"
    yield from _of_stream(train)
    if train.loss == "sft" and train.critic is not None:
        yield "loss: sft knows no rewards, so there is nothing for a critic to learn; leave advantage: gae out"
    if train.loss == "sft" and train.kl_in == "reward" and train.kl_coef > 0:
        yield "loss: sft knows no rewards; set kl_in: loss"


def _of_stream(train: TrainSpec) -> Iterator[str]:
    if not train.stream:
        if train.stream_min is not None:
            yield "stream_min belongs to stream: true"
        return
    for name, value in (("epochs", train.epochs), ("mini_batches", train.mini_batches)):
        if value > 1:
            yield (
                f"stream: true makes one update of each step, for the next would need the weights of the one before; set "
                f"{name}: 1, not {value}"
            )
    if train.loss == "sft":
        yield "stream: true is for steps that wait for engines, and loss: sft trains what no engine draws; leave it out"
    elif train.advantage not in ALONE:
        known = f"{', '.join(ALONE[:-1])} or {ALONE[-1]}"
        why = (
            "is your own, and may look at the whole step"
            if is_own_advantage(train.advantage)
            else "looks at the whole step"
        )
        yield f"stream: true needs an estimator that looks at one group alone ({known}); advantage {train.advantage!r} {why}"


PARTS = 8
"""A streamed step comes in so many parts at most, unless `stream_min` says otherwise."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainSpec(Section):
    """The optimizer, the loss and the train world."""

    ranks: PositiveInt | None = Field(None, le=MOST_SLOTS, description="Train ranks; default: one per controller")
    zero_stage: Literal[1, 2, 3] = Field(1, description="DeepSpeed ZeRO stage")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of forward and backward")
    learning_rate: Annotated[float, Field(ge=0)] = Field(1e-6, description="Peak learning rate")
    warmup_updates: Annotated[int, Field(ge=0)] = Field(0, description="Updates over which the rate rises linearly")
    schedule: Schedule = Field("constant", description="The rate after warm-up")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="Adam's")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight decay of the optimizer")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm")
    epochs: PositiveInt = Field(1, description="Passes over a step's batch")
    mini_batches: PositiveInt = Field(1, description="Optimizer updates per pass")
    micro_batch_tokens: PositiveInt = Field(
        8192, description="Tokens a rank computes at once; lower it if memory runs out"
    )
    packing: Literal["auto", "packed", "bucketed"] = Field(
        "auto",
        description="Sequences end to end without padding, or rows of like lengths; auto: packed where the model can",
    )
    activation_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, more time"
    )
    offload_reference: bool = Field(
        True, description="Keep the reference model in host memory while it is not used (GPUs)"
    )
    advantage: AdvantageName = Field(
        "grpo",
        description="Estimator: against the group's mean and deviation, its mean, or the mean of the others; the return to "
        "go, or what is left of the group's mean, whitened over the step's tokens; remax: the return to go less the "
        "group's baseline, which the flow finds; gae: against a critic's values, whitened; or an entry point in "
        "`gcore.advantages`",
    )
    advantage_options: dict[str, Option] = Field({}, description="Settings of an estimator of your own, by name")
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Discount a token, of reinforce_pp, remax and gae"
    )
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0,
        description="How far ahead gae takes rewards as they came and not as the critic values them; 1: to the end, so "
        "that a young critic only adds noise. Below 1 a last token's reward fades on the way (0.95: to half in 14 tokens)",
    )
    critic: CriticSpec | None = Field(None, description="The model of values of advantage: gae; default: its defaults")
    loss: LossName = Field(
        "ppo",
        description="Clipped by token, clipped by sequence, or with a clipped weight and every token's gradient; sft: minus "
        "the log-probability of the response, without rewards, advantages or ratios; or an entry point in `gcore.losses`",
    )
    loss_options: dict[str, Option] = Field({}, description="Settings of a loss of your own, by name")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="With loss ppo, a token of negative advantage is worth at most this many times it"
    )
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the entropy bonus")
    clip_low: PositiveFloat = Field(
        0.2,
        description="The ratio is clipped below 1 - clip_low; loss: gspo has 3e-4 and cispo 1 (no bound) where none is given",
    )
    clip_high: PositiveFloat = Field(
        0.2, description="The ratio is clipped above 1 + clip_high; loss: gspo has 4e-4 where none is given"
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        "token-mean", description="How token losses become one; denominators are global"
    )
    horizon: PositiveInt | None = Field(
        None, description="Constant of seq-mean-token-sum-norm; default: max_new_tokens"
    )
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Weight of the KL to the reference; 0: no reference"
    )
    kl_in: Literal["loss", "reward"] = Field("loss", description="Where the KL stands")
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] | None = Field(
        None,
        description="Estimator of the KL; k3+ has the value of k3 and the gradient of k2; default: k3 in the loss, and k1, "
        "the unbiased one, in the reward",
    )
    kl_max: PositiveFloat | None = Field(
        None,
        exclude_if=is_unset,
        description="The most that k3 of one token counts, in nats: a token beyond counts this and has no gradient. 10 is the bound "
        "of verl and OpenRLHF; default: no bound",
    )
    old_logprobs: Literal["current", "recompute", "engine"] = Field(
        "recompute",
        description="What the ratio is taken against: this update's own (ratio 1), recomputed before the step, the engine's",
    )
    tis_cap: PositiveFloat = Field(2.0, description="Cap of the truncated importance weight, with correction: tis")
    correction_band: tuple[Annotated[float, Field(ge=0)], PositiveFloat] = Field(
        (0.5, 5.0), description="Importance ratios whose tokens are trained, with correction: icepop or mis"
    )
    stream: bool = Field(
        False,
        description="Train on finished groups while the others of the step are still being generated; the gradient is that of "
        "the whole. For one update a step, at staleness 0, with an estimator that looks at one group alone",
    )
    stream_min: PositiveInt | None = Field(
        None, description="Groups from which on a part of a step is trained by itself; default: an eighth of the step's"
    )
    copies_gb: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="Memory of its node, in GB (1e9 bytes), that a rank may take for copies of its state and a neighbour's, "
        "from which a world that loses a rank or a node goes on without losing a step; 0: none are made; default: as they "
        "need, up to a quarter of what is free there",
    )
    watchdog_s: PositiveFloat = Field(
        120.0, description="A world that gets nowhere for so long is ended and started again"
    )
    start_limit_s: PositiveFloat = Field(
        600.0,
        description="A rank that does not serve so long after its start has failed. The first reads every byte of the "
        "checkpoint, and the others wait for it: more for hundreds of gigabytes on a slow disk",
    )

    @property
    def compares_group(self) -> bool:
        """Whether what is learned from a sample depends on others of its group, so that there must be two."""
        return self.loss != "sft" and self.advantage not in RETURNS and not is_own_advantage(self.advantage)

    def part_of(self, groups: int) -> int | None:
        """Groups of a streamed step of `groups` from which on a part is worth its exchange; None: the step is not streamed."""
        if not self.stream:
            return None
        return self.stream_min or max(1, -(-groups // PARTS))

    @property
    def kl_kind(self) -> Literal["k1", "k2", "k3", "k3+"]:
        """The estimator of the KL, decided."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def rewards_kl(self) -> bool:
        """Whether the KL stands in the reward."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @model_validator(mode="before")
    @classmethod
    def _gae_has_a_critic(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("advantage") == "gae" and tree.get("critic") is None:
            return {**tree, "critic": {}}
        return tree

    @model_validator(mode="before")
    @classmethod
    def _clips_are_the_loss_s(cls, tree: Any, info: ValidationInfo) -> Any:
        """Give a new job the clips of its loss's paper. A stored job keeps its own."""
        if not isinstance(tree, dict) or is_stored(info):
            return tree
        return {**CLIPS.get(str(tree.get("loss")), {}), **tree}

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSpec:
        if (why := next(_of_train(self), None)) is not None:
            raise ValueError(why)
        return self


class FilterSpec(Section):
    """A filter: which groups are not trained."""

    name: str = Field(description="Filter, by its entry-point name in `gcore.filters`")
    options: dict[str, Option] = Field({}, description="Settings of the filter's own, by name")


MOST_STEPS = 1_000_000

LIMIT_QUOTAS, LEAST_LIMIT = 10, 256
"""`max_prompts_per_step: auto` is so many quotas, and never fewer prompts than that."""

OnLimit = Literal["train_smaller", "pad_masked", "fail"]


class FlowSpec(Section):
    """The RL program, its sizes, and how far it goes: by `steps` or by `epochs`."""

    name: str = Field("grpo", description="Flow, by its entry-point name in `gcore.flows`")
    steps: Annotated[int, Field(gt=0, le=MOST_STEPS)] | None = Field(
        None, description="Steps (sealed batches) until the job has succeeded; either these or `epochs`"
    )
    epochs: Annotated[int, Field(gt=0, le=MOST_STEPS)] | None = Field(
        None, description="Data epochs until the job has succeeded; either these or `steps`"
    )
    count: Literal["prompts", "steps"] = Field(
        "prompts",
        description="What an epoch is: over when each of its prompts is trained, filtered or failed; or as many steps as "
        "it would take if every prompt were trained",
    )
    groups_per_step: PositiveInt = Field(32, description="The step's quota: kept groups in one sealed batch")
    samples_per_prompt: PositiveInt = Field(8, description="Responses in a group")
    issue_cap: Annotated[float, Field(ge=1, le=16)] = Field(
        4.0,
        description="Prompts issued at once for each group that is still wanted, at most; within it, as many as recent "
        "steps took for a kept group. 1: never more than are wanted",
    )
    max_prompts_per_step: PositiveInt | Literal["auto"] | None = Field(
        "auto",
        description=f"Prompts that one step may use up; auto: {LIMIT_QUOTAS} times groups_per_step, at least "
        f"{LEAST_LIMIT}; null: no limit",
    )
    on_limit: OnLimit = Field(
        "train_smaller",
        description="When a step has used up its prompts, or those in the windows, without its quota: train on the groups "
        "there are; the same, with the lacking groups counted in the loss's denominators; or fail the job",
    )
    filters: tuple[FilterSpec, ...] = Field(
        (),
        description="What groups must pass to be trained, in this order; the first that refuses one names the reason",
    )
    max_reissues: PositiveInt = Field(
        8, description="Times a prompt is issued again after a failure before its outcome is failed"
    )

    @model_validator(mode="after")
    def _goes_so_far_and_no_further(self) -> FlowSpec:
        if (self.steps is None) == (self.epochs is None):
            both = "both are given. Take one out, on the command line with --set flow.steps=null or flow.epochs=null"
            given = both if self.steps is not None else "neither is given"
            raise ValueError(f"a job goes by flow.steps or by flow.epochs, exactly one of them; {given}")
        if self.prompt_limit is not None and self.prompt_limit < self.groups_per_step:
            raise ValueError(
                f"max_prompts_per_step ({self.prompt_limit}) is below groups_per_step ({self.groups_per_step}), so no step "
                "could meet its quota"
            )
        return self

    @property
    def prompt_limit(self) -> int | None:
        """Prompts that one step may use up; None: any number."""
        if self.max_prompts_per_step == "auto":
            return max(LIMIT_QUOTAS * self.groups_per_step, LEAST_LIMIT)
        return self.max_prompts_per_step

    def last_step(self, prompts: int) -> int | None:
        """The job's last step with `prompts` prompts in an epoch; None if that depends on what is filtered."""
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
    """The rate of optimizer update number `update` (from 0) of `total_updates`; 0 beyond them unless constant.

    A function of the update's number alone, so that a resumed run continues where it was. The first update already has a
    rate above zero, and the last too: no update is made for nothing. In the warm-up peak·(update + 1)/warmup_updates; the first update after it has `peak`. Raises ValueError for a
    negative number.
    """
    if update < 0:
        raise ValueError(f"update {update}; updates are counted from 0")
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    left = max(0.0, (total_updates - update) / max(1, total_updates - warmup_updates))
    return peak * (left if schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)
