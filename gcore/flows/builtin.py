"""The built-in flows: GRPO, DAPO, PPO and others for texts, Flow-GRPO, DiffusionNFT and others for pictures.

They differ in their settings and in how they make a group (all samples of one prompt). All use the loop
`train_prompts`; a custom flow may have its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from gcore.config.load import flow
from gcore.flows.api import Peer
from gcore.types import Group, Outcome, Prompt


async def train_prompts(peer: Peer, produce: Callable[[Peer, Prompt], Coroutine[Any, Any, Group | Outcome]]) -> None:
    """The training loop: generate groups with `produce`, train, update the engines' weights; evaluate when it is due."""
    async for step in peer.steps():
        await peer.evaluate()  # the weights at the start of this step, if an evaluation is due
        async with step.collect() as batch:  # ends when the whole cluster has the step's number of groups
            async for prompt in peer.prompts(step):  # only this controller's shards
                batch.start(produce(peer, prompt))
        await step.train()  # fix the batch, send its groups to the train ranks, train, commit
        await step.publish()
    await peer.evaluate()


async def score_group(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """Generate, score and filter the group of a prompt."""
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))


@flow(train={"advantage": "grpo"})
async def grpo(peer: Peer) -> None:
    """GRPO: several samples per prompt, each compared with the mean reward of its group (arXiv 2402.03300)."""
    await train_prompts(peer, score_group)


@flow(
    flow={"filters": [{"name": "signal"}]},
    train={"advantage": "grpo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean", "kl_coef": 0.0},
)
async def dapo(peer: Peer) -> None:
    """DAPO: GRPO without groups of equal rewards; prompts are sampled until the step is full (arXiv 2503.14476).

    The settings above: asymmetric clip, token-level loss, no KL to the reference. The length penalty needs
    `rollout.overlong_tokens`.
    """
    await train_prompts(peer, score_group)


@flow(flow={"samples_per_prompt": 1}, train={"advantage": "gae", "loss": "ppo", "mini_batches": 4})
async def ppo(peer: Peer) -> None:
    """PPO: one response per prompt, advantages from a critic trained with the policy, several clipped updates per step
    (arXiv 1707.06347; arXiv 2203.02155 for language models).

    The train ranks hold the critic (`train.critic`): they compute values, returns and advantages, then train policy and
    critic in mini-batches. The flow only provides responses and rewards.
    """
    await train_prompts(peer, score_group)


@flow(
    flow={"samples_per_prompt": 1}, train={"advantage": "remax", "aggregation": "seq-mean-token-sum", "kl_in": "reward"}
)
async def remax(peer: Peer) -> None:
    """ReMax: REINFORCE with the reward of the prompt's greedy response as baseline (arXiv 2310.10505)."""
    await train_prompts(peer, score_against_greedy)


async def score_against_greedy(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """Make the prompt's group with the reward of a greedy response as baseline. The greedy response is not trained."""
    samples, greedy = await asyncio.gather(peer.rollout(prompt), peer.rollout(prompt, samples=1, greedy=True))
    baseline = await peer.score(prompt, greedy)
    group = await peer.score(prompt, samples)
    if isinstance(baseline, Outcome) or isinstance(group, Outcome):
        return group if isinstance(group, Outcome) else baseline
    return await peer.filter(prompt, replace(group, baseline=baseline.samples[0].reward))


@flow(
    flow={"samples_per_prompt": 4}, train={"advantage": "rloo", "aggregation": "seq-mean-token-sum", "kl_in": "reward"}
)
async def rloo(peer: Peer) -> None:
    """RLOO: REINFORCE with the mean reward of the prompt's other samples as baseline (arXiv 2402.14740).

    A response is one action: its log-probability is the sum over its tokens. With `train.kl_coef` the KL to the
    reference is part of the reward.
    """
    await train_prompts(peer, score_group)


@flow(
    flow={"samples_per_prompt": 1},
    train={"advantage": "reinforce_pp", "loss": "ppo", "kl_in": "reward", "kl_coef": 0.01, "mini_batches": 2},
)
async def reinforce_pp(peer: Peer) -> None:
    """REINFORCE++: one response per prompt without a critic; PPO's clipped loss (arXiv 2501.03262).

    Token rewards include the KL to the reference. Their returns, whitened over the whole step, are the advantages. With
    `train.advantage: reinforce_pp_baseline` and several samples per prompt it is the paper's variant with a group mean.
    """
    await train_prompts(peer, score_group)


@flow(flow={"samples_per_prompt": 1}, train={"loss": "sft"})
async def sft(peer: Peer) -> None:
    """SFT: train on the answers in the data; responses are generated only for evaluation.

    The loss is the negative log-likelihood of the answers, averaged over the step's tokens.
    """
    await train_prompts(peer, demonstrate_group)


async def demonstrate_group(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """Make and filter a group from the answer in the prompt's entry."""
    return await peer.filter(prompt, await peer.demonstrate(prompt))


PICTURES = {"engine": "diffusers"}


@flow(
    rollout={**PICTURES, "diffusion": {"sampler": "sde", "noise_level": 0.7}},
    train={
        "clip_low": 1e-4,
        "clip_high": 1e-4,
        "diffusion": {"adv_std": "batch", "adv_ddof": 0, "adv_eps": 1e-4, "adv_clip": 5.0, "kl": "flow"},
    },
)
async def flow_grpo(peer: Peer) -> None:
    """Flow-GRPO: pictures by flow matching with random steps, and GRPO on their log-probabilities (arXiv 2505.05470).

    The clip range is that of adapters; for whole models the paper's authors use 1e-5.
    """
    await train_prompts(peer, score_group)


@flow(
    rollout={
        **PICTURES,
        "diffusion": {"sampler": "dance", "noise_level": 0.3, "same_noise": True, "trained_share": 0.6},
    },
    train={
        "clip_low": 1e-4,
        "clip_high": 1e-4,
        "diffusion": {"adv_std": "group", "adv_ddof": 1, "adv_eps": 1e-8, "adv_clip": 5.0},
    },
)
async def dance_grpo(peer: Peer) -> None:
    """DanceGRPO: steps with noise of constant strength, a group begins with the same noise, and a share of the steps is
    trained (arXiv 2505.07818)."""
    await train_prompts(peer, score_group)


@flow(
    rollout={
        **PICTURES,
        "diffusion": {
            "sampler": "sde",
            "noise_level": 0.7,
            "window": {"size": 4, "strategy": "progressive", "stay": 25},
        },
    },
    train={
        "clip_low": 1e-4,
        "clip_high": 1e-4,
        "diffusion": {"adv_std": "group", "adv_ddof": 1, "adv_eps": 1e-8, "adv_clip": 5.0},
    },
)
async def mix_grpo(peer: Peer) -> None:
    """MixGRPO: only the steps of a window that moves are random and trained (arXiv 2507.21802)."""
    await train_prompts(peer, score_group)


@flow(
    rollout={**PICTURES, "diffusion": {"sampler": "sde", "noise_level": 1.0}},
    train={
        "clip_low": 1e-4,
        "clip_high": 1e-4,
        "diffusion": {"adv_std": "group", "adv_ddof": 0, "adv_eps": 1e-6, "adv_clip": 10.0, "kl": "exact"},
    },
)
async def ddpo(peer: Peer) -> None:
    """DDPO: policy gradient on the steps of a DDIM sampler with noise (arXiv 2305.13301)."""
    await train_prompts(peer, score_group)


@flow(
    rollout={**PICTURES, "diffusion": {"sampler": "ode"}},
    train={"loss": "nft", "diffusion": {"adv_std": "batch", "adv_ddof": 0, "adv_eps": 1e-4, "adv_clip": 5.0}},
)
async def diffusion_nft(peer: Peer) -> None:
    """DiffusionNFT: pulls the velocity towards good pictures and away from bad ones, on the forward process, without
    log-probabilities; engines serve a network that follows the trained one (arXiv 2509.16117)."""
    await train_prompts(peer, score_group)


@flow(
    rollout={**PICTURES, "diffusion": {"sampler": "ode"}},
    train={
        "loss": "weighted_matching",
        "diffusion": {"adv_std": "group", "adv_ddof": 0, "adv_eps": 1e-4, "adv_clip": 5.0},
    },
)
async def weighted_sft(peer: Peer) -> None:
    """Reward-weighted fine-tuning: flow matching (or noise prediction) of the policy's own pictures, each weighted by
    exp(advantage / temperature) (reward-weighted regression, as in arXiv 2305.13301)."""
    await train_prompts(peer, score_group)
