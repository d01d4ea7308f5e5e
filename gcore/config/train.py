"""The section `train` of a job spec: the optimizer, the estimator, the loss and the train world."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from gcore.config.algorithms import AdvantageName, LossName, is_own_advantage
from gcore.config.base import Option, Section
from gcore.config.combinations import RETURNS, refuse_train
from gcore.config.critic import CriticSpec
from gcore.config.scheduling import MOST_SLOTS

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
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="The rate after warm-up")
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
    clip_low: PositiveFloat = Field(0.2, description="The ratio is clipped below 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="The ratio is clipped above 1 + clip_high")
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

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSpec:
        if (why := refuse_train(self)) is not None:
            raise ValueError(why)
        return self
