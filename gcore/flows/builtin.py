"""The built-in flows: every controller runs the same one, and they differ in their settings and in what a prompt comes to.

`train_prompts` is the loop of all of them; a flow of one's own may write its own.
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
    """Train, step by step, on what `produce` makes of this peer's prompts."""
    async for step in peer.steps():
        await peer.evaluate()  # the weights that this step starts from, when that is due
        async with step.collect() as batch:  # ends when the whole cluster has its quota
            async for prompt in peer.prompts(step):  # only this peer's shards
                batch.start(produce(peer, prompt))
        await step.train()  # seal, exchange, train, commit
        await step.publish()
    await peer.evaluate()


async def score_group(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's group, with rewards; or that it is filtered, if the spec names filters."""
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))


@flow(train={"advantage": "grpo"})
async def grpo(peer: Peer) -> None:
    """GRPO: groups of samples per prompt, scored, and trained against each other's mean (arXiv 2402.03300)."""
    await train_prompts(peer, score_group)


@flow(
    flow={"filters": [{"name": "signal"}]},
    train={"advantage": "grpo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean", "kl_coef": 0.0},
)
async def dapo(peer: Peer) -> None:
    """DAPO: GRPO without the groups that teach nothing, which are drawn anew until the step is full (arXiv 2503.14476).

    The ratio may rise further than it may fall, tokens are weighed alike, and no reference holds the model back: the settings
    above. The penalty of length wants a length: `rollout.overlong_tokens`.
    """
    await train_prompts(peer, score_group)


@flow(flow={"samples_per_prompt": 1}, train={"advantage": "gae", "loss": "ppo", "mini_batches": 4})
async def ppo(peer: Peer) -> None:
    """PPO: one response to a prompt, advantages from a critic that learns beside the policy, several clipped updates a step
    (arXiv 1707.06347; arXiv 2203.02155 for language models).

    The critic is the train ranks' (`train.critic`): they make values, returns and advantages, then train policy and critic,
    mini-batch by mini-batch. The flow only brings responses and rewards.
    """
    await train_prompts(peer, score_group)


@flow(
    flow={"samples_per_prompt": 1}, train={"advantage": "remax", "aggregation": "seq-mean-token-sum", "kl_in": "reward"}
)
async def remax(peer: Peer) -> None:
    """ReMax: REINFORCE, each sample against what the greedy answer to its prompt earns (arXiv 2310.10505)."""
    await train_prompts(peer, score_against_greedy)


async def score_against_greedy(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's samples, with the reward of its greedy answer as their baseline; that answer is not trained."""
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
    """RLOO: REINFORCE, each sample against the mean of the others of its prompt (arXiv 2402.14740).

    A response is one action: its log-probability is the sum over its tokens. With `train.kl_coef` the distance from the
    reference is part of the reward.
    """
    await train_prompts(peer, score_group)


@flow(
    flow={"samples_per_prompt": 1},
    train={"advantage": "reinforce_pp", "loss": "ppo", "kl_in": "reward", "kl_coef": 0.01, "mini_batches": 2},
)
async def reinforce_pp(peer: Peer) -> None:
    """REINFORCE++: one response to a prompt, no critic; token returns that hold the KL to the reference, whitened over the whole
    step, in PPO's clipped loss (arXiv 2501.03262). The KL goes into the rewards of tokens, these into returns, and those are whitened.

    With `train.advantage: reinforce_pp_baseline` and several samples a prompt it is the paper's variant with a group mean.
    """
    await train_prompts(peer, score_group)


@flow(flow={"samples_per_prompt": 1}, train={"loss": "sft"})
async def sft(peer: Peer) -> None:
    """SFT: the answers that the data hold are what is trained, token by token; nothing is sampled but for evaluation.

    The loss is minus the log-probability of the answers, mean over the step's tokens.
    """
    await train_prompts(peer, demonstrate_group)


async def demonstrate_group(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt with its entry's answer."""
    return await peer.filter(prompt, await peer.demonstrate(prompt))
