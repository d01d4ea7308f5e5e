"""The sections of a job spec.

Every field has its unit and meaning here; `gcore schema` prints them. Frozen, and unknown keys are errors
(`gcore.config.load` names the nearest known one). A spec names flows, rewards and policies; it never carries code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from gcore.config.base import Section
from gcore.config.sources import (
    DataSpec,
    EvalSpec,
    RewardSpec,
    StopString,
    Temperature,
    eval_sources,
    training_sources,
)

__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "EvalSpec",
    "FlowSpec",
    "JobSpec",
    "ModelSpec",
    "PlacementSpec",
    "RewardSpec",
    "RolloutSpec",
    "Section",
    "TrainSpec",
]

Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelSpec(Section):
    """The policy."""

    path: str = Field(
        description="Folder of a Hugging Face model with its tokenizer, relative to the spec's folder; or "
        "hf://OWNER/NAME[@REVISION] on the Hugging Face hub, ms://OWNER/NAME[@REVISION] on ModelScope"
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model; read that code first"
    )
    chat: bool = Field(False, description="Wrap prompts with the tokenizer's chat template; otherwise plain text")
    max_length: PositiveInt | None = Field(
        None, description="Longest prompt plus response, in tokens; default: the model's own limit"
    )


class FlowSpec(Section):
    """The RL program and its sizes."""

    name: str = Field("grpo", description="Flow, by its entry-point name in `gcore.flows`")
    steps: PositiveInt = Field(le=1_000_000, description="Steps (sealed batches) until the job has succeeded")
    groups_per_step: PositiveInt = Field(32, description="The step's quota: kept groups in one sealed batch")
    samples_per_prompt: PositiveInt = Field(8, description="Responses in a group")
    max_reissues: PositiveInt = Field(
        8, description="Times a prompt is issued again after a failure before its outcome is failed"
    )


class RolloutSpec(Section):
    """Generation."""

    engine: Literal["torch", "sglang"] = Field("torch", description="What serves the rollout pool")
    temperature: Temperature = Field(1.0, description="Sampling temperature; the trainer divides its logits by it too")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus; below 1 needs `correction`")
    top_k: int | None = Field(None, ge=1, description="Keep only the k likeliest tokens; needs `correction`")
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Drop tokens below this share of the likeliest one's probability; needs `correction`"
    )
    correction: Literal["none", "tis", "icepop"] = Field(
        "none",
        description="How training corrects for truncated sampling or engine mismatch: not at all, each token weighed by "
        "its capped importance ratio, or by its ratio within train.icepop_band and not at all outside",
    )
    max_new_tokens: PositiveInt = Field(description="Longest response, in tokens")
    min_new_tokens: Annotated[int, Field(ge=0)] = Field(0, description="No response ends before, in tokens")
    stop: tuple[StopString, ...] = Field((), description="Strings that end a response")
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="Tokens that end a response")
    truncated: Literal["keep", "mask", "penalise", "drop_group"] = Field(
        "keep",
        description="Responses cut off at max_new_tokens: trained as they are, left out of the loss (not of the group's "
        "baseline), worth truncated_penalty less, or their whole group filtered",
    )
    truncated_penalty: PositiveFloat = Field(1.0, description="What `penalise` takes off a truncated response's reward")
    overlong_tokens: PositiveInt | None = Field(
        None,
        description="Before the longest length, over so many tokens, a response is worth less and less (DAPO's cache)",
    )
    overlong_penalty: PositiveFloat = Field(
        1.0, description="What a response of the longest length is worth less, with overlong_tokens"
    )
    deterministic: bool = Field(
        False, description="The same tokens whatever else is in an engine's batch; slower (the torch engine only)"
    )
    concurrency: PositiveInt = Field(256, description="Groups in flight per controller, at most")
    batch_slots: PositiveInt = Field(256, description="Sequences an engine decodes at once, at most")
    cache_tokens: PositiveInt | None = Field(
        None, description="Tokens an engine caches at once, at most; default: from the memory that is free"
    )
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="Prompt tokens an engine takes in between two tokens of what it is decoding"
    )
    engine_args: tuple[str, ...] = Field((), description="Further arguments of SGLang's server, word by word")
    staleness: Literal[0] = Field(0, description="Steps that rollout may run ahead of training; 0: strictly on-policy")
    timeout_s: PositiveFloat = Field(120.0, description="Longest wait for one group before it goes to another engine")

    @model_validator(mode="after")
    def _truncation_needs_a_correction(self) -> RolloutSpec:
        if (self.top_p < 1 or self.top_k is not None or self.min_p > 0) and self.correction == "none":
            raise ValueError(
                "top_p < 1, top_k or min_p truncates what is sampled, so its log-probabilities are not those that are "
                "trained; set rollout.correction: tis, or top_p: 1 without top_k and min_p"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens})")
        if self.overlong_tokens is not None and self.overlong_tokens > self.max_new_tokens:
            raise ValueError(
                f"overlong_tokens ({self.overlong_tokens}) is above max_new_tokens ({self.max_new_tokens})"
            )
        if self.engine == "sglang" and self.deterministic:
            raise ValueError("deterministic is the torch engine's; give SGLang its own flags in engine_args")
        if self.engine == "torch" and self.engine_args:
            raise ValueError("engine_args are SGLang's; set engine: sglang")
        return self


class TrainSpec(Section):
    """The optimizer, the loss and the train world."""

    ranks: PositiveInt | None = Field(None, description="Train ranks; default: one per controller")
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
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = Field(
        "grpo",
        description="Estimator: against the group's mean and deviation, its mean, or the mean of the others; the return to "
        "go, or what is left of the group's mean, whitened over the step's tokens",
    )
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Discount a token, of reinforce_pp")
    loss: Literal["ppo", "gspo", "cispo"] = Field(
        "ppo", description="Clipped by token, clipped by sequence, or with a clipped weight and every token's gradient"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="ppo: a token of negative advantage is worth at most this many times it"
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
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = Field(
        "k3", description="Estimator of the KL as a loss; k3+ has the value of k3 and the gradient of k2"
    )
    old_logprobs: Literal["current", "recompute", "engine"] = Field(
        "recompute",
        description="What the ratio is taken against: this update's own (ratio 1), recomputed before the step, the engine's",
    )
    tis_cap: PositiveFloat = Field(2.0, description="Cap of the truncated importance weight, with correction: tis")
    icepop_band: tuple[Annotated[float, Field(ge=0)], PositiveFloat] = Field(
        (0.5, 5.0), description="Importance ratios whose tokens are trained, with correction: icepop"
    )
    watchdog_s: PositiveFloat = Field(
        120.0, description="A world that gets nowhere for so long is ended and started again"
    )

    @property
    def compares_group(self) -> bool:
        """Whether the estimator needs a group of at least two."""
        return self.advantage != "reinforce_pp"

    @model_validator(mode="after")
    def _fits_the_loss(self) -> TrainSpec:
        if self.dual_clip is not None and self.loss != "ppo":
            raise ValueError(f"dual_clip belongs to loss: ppo, not to {self.loss}")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip ({self.dual_clip}) must be above 1 + clip_high ({1 + self.clip_high})")
        if self.gamma != 1 and self.advantage != "reinforce_pp":
            raise ValueError(f"gamma is reinforce_pp's; advantage {self.advantage!r} has no returns to discount")
        if self.icepop_band[0] >= self.icepop_band[1]:
            raise ValueError(f"icepop_band {list(self.icepop_band)} holds nothing; its first must be below its second")
        return self


class PlacementSpec(Section):
    """Which slots the job uses."""

    policy: Literal["colocated"] = Field("colocated", description="Every slot runs rollout and train in turn")


class CheckpointSpec(Section):
    """When checkpoints are written and kept."""

    every: PositiveInt = Field(50, description="Steps between checkpoints; the last step always has one")
    keep: PositiveInt = Field(3, description="Newest checkpoints kept; the job's first model always is")


class JobSpec(Section):
    """A job. YAML on disk; see examples/."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")] = Field(
        description="The job's name: lower-case letters, digits, '.', '_' and '-'"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="Every random choice follows from it")
    model: ModelSpec
    data: DataSpec
    flow: FlowSpec
    rollout: RolloutSpec
    reward: RewardSpec = RewardSpec()
    train: TrainSpec = TrainSpec()
    placement: PlacementSpec = PlacementSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    eval: EvalSpec = EvalSpec()

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if self.flow.samples_per_prompt < 2 and self.train.compares_group:
            raise ValueError(
                f"flow.samples_per_prompt is {self.flow.samples_per_prompt}, and train.advantage {self.train.advantage!r} "
                "compares the samples of a group; use at least 2"
            )
        if self.train.mini_batches > self.flow.groups_per_step:
            raise ValueError(
                f"train.mini_batches ({self.train.mini_batches}) is more than flow.groups_per_step "
                f"({self.flow.groups_per_step}); a mini-batch holds at least one group"
            )
        for source in training_sources(self):
            own = source.sampling
            truncates = own.top_p < 1 or own.top_k is not None or own.min_p > 0
            if truncates and self.rollout.correction == "none":
                raise ValueError(
                    f"source {source.name!r} truncates what is sampled (top_p, top_k or min_p); set rollout.correction: tis"
                )
            if own.max_new_tokens < self.rollout.min_new_tokens:
                raise ValueError(
                    f"source {source.name!r} allows {own.max_new_tokens} new tokens, fewer than rollout.min_new_tokens "
                    f"({self.rollout.min_new_tokens})"
                )
            if self.rollout.overlong_tokens is not None and own.max_new_tokens < self.rollout.overlong_tokens:
                raise ValueError(
                    f"source {source.name!r} allows {own.max_new_tokens} new tokens, fewer than rollout.overlong_tokens "
                    f"({self.rollout.overlong_tokens})"
                )
            if own.max_new_tokens > self.rollout.max_new_tokens:
                raise ValueError(
                    f"source {source.name!r} allows {own.max_new_tokens} new tokens, more than rollout.max_new_tokens "
                    f"({self.rollout.max_new_tokens})"
                )
        for source in eval_sources(self):
            if source.sampling.max_new_tokens < self.rollout.min_new_tokens:
                raise ValueError(
                    f"eval source {source.name!r} allows {source.sampling.max_new_tokens} new tokens, fewer than "
                    f"rollout.min_new_tokens ({self.rollout.min_new_tokens})"
                )
        if self.model.max_length is not None and self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) leaves no room for a prompt in model.max_length "
                f"({self.model.max_length})"
            )
        return self

    @property
    def checkpoint_due(self) -> frozenset[int]:
        """The steps after which a checkpoint is written."""
        steps = self.flow.steps
        return frozenset(range(self.checkpoint.every, steps + 1, self.checkpoint.every)) | {steps}

    @property
    def eval_due(self) -> frozenset[int]:
        """The steps after which the model is evaluated; 0 is before training. Empty without an eval set."""
        if not self.eval.wanted:
            return frozenset()
        every = self.eval.every or self.flow.steps
        return frozenset(range(0, self.flow.steps + 1, every)) | {0, self.flow.steps}
