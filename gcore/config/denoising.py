"""Checks of a job whose policy generates pictures: options of other sections that it does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gcore.config.data import DataSpec
from gcore.config.diffusion import DENOISING_LOSSES, FORWARD_LOSSES, LARGEST_CLIP, DenoisingSpec
from gcore.config.rollout import RolloutSpec
from gcore.config.train import TrainSpec


def check_denoising(
    rollout: RolloutSpec, train: TrainSpec, data: DataSpec, others: Mapping[str, bool]
) -> Iterator[str]:
    """Yield a sentence for each option that contradicts the policy, which generates pictures or does not. `others`: further
    options that are for texts, and whether the spec uses them."""
    if rollout.diffusion is None:
        if train.loss in DENOISING_LOSSES:
            yield f"train.loss {train.loss!r} trains models that generate pictures; set rollout.engine: diffusers"
        if train.diffusion is not None:
            yield "train.diffusion is for models that generate pictures; set rollout.engine: diffusers, or leave it out"
        return
    yield from _of_data(data, others)
    yield from _of_rollout(rollout)
    yield from _of_train(rollout, train)


def _of_data(data: DataSpec, others: Mapping[str, bool]) -> Iterator[str]:
    unfit = {
        **others,
        "data.images (editing of pictures)": data.images is not None,
        "data.min_prompt_tokens": data.min_prompt_tokens is not None,
        "data.max_prompt_tokens": data.max_prompt_tokens is not None,
    }
    for name, used in unfit.items():
        if used:
            yield f"a model that generates pictures does not support {name}; leave it out"


def _of_rollout(rollout: RolloutSpec) -> Iterator[str]:
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "truncated": "keep",
        "overlong_tokens": None,
        "cache_tokens": None,
        "order": "stream",
        "balance": "samples",
    }
    for name, value in neutral.items():
        if getattr(rollout, name) != value:
            yield f"rollout.{name} is for texts, and pictures have no tokens; leave it out"


def _of_train(rollout: RolloutSpec, train: TrainSpec) -> Iterator[str]:
    diffusion = rollout.diffusion
    assert diffusion is not None
    if rollout.engine == "sglang-diffusion":
        yield from _of_sglang(diffusion, train)
    unfit = {
        "train.critic": train.critic is not None,
        "train.lora": train.lora is not None,
        "train.freeze": bool(train.freeze),
        "train.sequence_parallel": train.sequence_parallel > 1,
        "train.activation_checkpointing": train.activation_checkpointing,
        "train.entropy_coef": train.entropy_coef > 0,
        "train.dual_clip": train.dual_clip is not None,
        "train.kl_in: reward": train.rewards_kl,
        "train.kl_estimator": train.kl_estimator is not None,
        "train.kl_max": train.kl_max is not None,
        "train.packing": train.packing != "auto",
    }
    for name, used in unfit.items():
        if used:
            yield f"a model that generates pictures does not support {name}; leave it out"
    if train.loss not in ("ppo", *DENOISING_LOSSES):
        yield f"train.loss {train.loss!r} trains texts; use ppo, {' or '.join(DENOISING_LOSSES)}"
    if train.advantage != "grpo":
        yield f"train.advantage {train.advantage!r} is for texts; leave it out: train.diffusion says how rewards become advantages"
    if train.dtype == "bf16" and train.backend == "fsdp2":
        yield "train.backend: fsdp2 rounds noise levels to bfloat16 with dtype: bf16; set dtype: fp32, or backend: deepspeed"
    if train.averages:
        if train.loss == "nft":
            yield "train.loss: nft serves an average of the trained weights already; leave train.diffusion.ema_decay out"
        if train.zero_stage == 3:
            yield "train.diffusion.ema_decay keeps a whole second network on each rank; set train.zero_stage: 1 or 2"
    if train.loss in FORWARD_LOSSES:
        yield from _of_forward_loss(rollout, train)
    elif diffusion.sampler == "ode":
        yield (
            f"rollout.diffusion.sampler: ode has no log-probabilities, which train.loss: {train.loss} needs; use sde, cps or dance, or "
            f"{' or '.join(FORWARD_LOSSES)} as loss"
        )
    if train.loss == "ppo" and max(train.clip_low, train.clip_high) > LARGEST_CLIP:
        yield (
            f"train.clip_low {train.clip_low:g} and clip_high {train.clip_high:g} never clip: log-probabilities of denoising steps are "
            "means over dimensions, so ratios are within about 0.001 of 1; use 1e-4 or less"
        )
    if train.stream and train.diffusion is not None and train.diffusion.adv_std == "batch":
        yield "train.stream trains parts of a step, but train.diffusion.adv_std: batch uses the rewards of the whole step; set it to group"
    if train.loss == "grpo_guard" and train.old_logprobs == "engine":
        yield "train.loss: grpo_guard compares the means of steps, which engines do not report; set train.old_logprobs: recompute"
    if rollout.staleness and train.loss == "nft":
        yield "train.loss: nft compares with the network that generated the pictures; set rollout.staleness: 0"


def _of_sglang(diffusion: DenoisingSpec, train: TrainSpec) -> Iterator[str]:
    unfit = {
        "rollout.diffusion.sampler: dance": diffusion.sampler == "dance",
        "rollout.diffusion.same_noise": diffusion.same_noise,
        "train.diffusion.ema_decay": train.averages,
    }
    for name, used in unfit.items():
        if used:
            yield f"rollout.engine: sglang-diffusion does not support {name}; leave it out, or set rollout.engine: diffusers"


def _of_forward_loss(rollout: RolloutSpec, train: TrainSpec) -> Iterator[str]:
    assert rollout.diffusion is not None
    if rollout.diffusion.sampler != "ode":
        yield f"train.loss: {train.loss} needs only finished pictures; set rollout.diffusion.sampler: ode"
    if rollout.diffusion.guidance > 1:
        yield f"train.loss: {train.loss} trains the network without guidance; leave rollout.diffusion.guidance out"
    if rollout.correction != "none":
        yield f"rollout.correction needs log-probabilities, which train.loss: {train.loss} does not have; leave it out"
    if rollout.diffusion.same_noise:
        yield "rollout.diffusion.same_noise makes all pictures of a group equal with sampler: ode; leave it out"
    if train.loss != "nft":
        return
    if train.diffusion is not None and train.diffusion.adv_clip is None:
        yield "train.loss: nft maps advantages up to train.diffusion.adv_clip to probabilities; set adv_clip"
    if train.zero_stage == 3:
        yield "train.loss: nft keeps a whole second network on each rank; set train.zero_stage: 1 or 2"
    if train.stream:
        yield "train.stream is not supported with train.loss: nft, whose served network changes after the step; leave stream out"
