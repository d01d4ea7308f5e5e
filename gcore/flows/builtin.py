"""The built-in flows. Each is the whole algorithm as one controller runs it; every controller runs the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gcore.config.load import flow
from gcore.flows.api import Peer
from gcore.types import Group, Outcome, Prompt


@flow(train={"advantage": "grpo"})
async def grpo(peer: Peer) -> None:
    """GRPO: groups of samples per prompt, scored, and trained against each other's mean (arXiv 2402.03300)."""
    async for step in peer.steps():
        await peer.evaluate()  # the weights that this step starts from, when that is due
        async with step.collect() as batch:  # ends when the whole cluster has its quota
            async for prompt in peer.prompts(step):  # only this peer's shards
                batch.start(score_group(peer, prompt))
        await step.train()  # seal, exchange, train, commit
        await step.publish()
    await peer.evaluate()


async def score_group(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's group, with rewards; or that it is filtered, if the spec names filters."""
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))


@flow(
    flow={"filters": [{"name": "signal"}]},
    train={"advantage": "grpo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean", "kl_coef": 0.0},
)
async def dapo(peer: Peer) -> None:
    """DAPO: GRPO without the groups that teach nothing, which are drawn anew until the step is full (arXiv 2503.14476).

    The ratio may rise further than it may fall, tokens are weighed alike, and no reference holds the model back: the settings
    below. The penalty of length wants a length: `rollout.overlong_tokens`.
    """
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:  # ends when the whole cluster has its quota of groups that teach
            async for prompt in peer.prompts(step):
                batch.start(sample_group(peer, prompt))
        await step.train()
        await step.publish()
    await peer.evaluate()


async def sample_group(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's group; or that it is filtered, because all its rewards are the same."""
    group = await peer.score(prompt, await peer.rollout(prompt))
    return await peer.filter(prompt, group)


@flow(flow={"samples_per_prompt": 1}, train={"advantage": "gae", "loss": "ppo", "mini_batches": 4})
async def ppo(peer: Peer) -> None:
    """PPO: one response to a prompt, advantages from a critic that learns beside the policy, several clipped updates a step
    (arXiv 1707.06347; arXiv 2203.02155 for language models).

    The critic is the train ranks' (`train.critic`); the flow only brings responses and rewards.
    """
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(respond(peer, prompt))
        await step.train()  # values, returns and advantages; then policy and critic, mini-batch by mini-batch
        await step.publish()
    await peer.evaluate()


async def respond(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's responses, with rewards."""
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))


@flow(
    flow={"samples_per_prompt": 1}, train={"advantage": "remax", "aggregation": "seq-mean-token-sum", "kl_in": "reward"}
)
async def remax(peer: Peer) -> None:
    """ReMax: REINFORCE, each sample against what the greedy answer to its prompt earns (arXiv 2310.10505)."""
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(score_against_greedy(peer, prompt))
        await step.train()
        await step.publish()
    await peer.evaluate()


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
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(score_leave_one_out(peer, prompt))
        await step.train()
        await step.publish()
    await peer.evaluate()


async def score_leave_one_out(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's samples, with rewards; the ranks take from each the mean of the others."""
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))


@flow(
    flow={"samples_per_prompt": 1},
    train={"advantage": "reinforce_pp", "loss": "ppo", "kl_in": "reward", "kl_coef": 0.01, "mini_batches": 2},
)
async def reinforce_pp(peer: Peer) -> None:
    """REINFORCE++: one response to a prompt, no critic; token returns that hold the KL to the reference, whitened over the whole
    step, in PPO's clipped loss (arXiv 2501.03262).

    With `train.advantage: reinforce_pp_baseline` and several samples a prompt it is the paper's variant with a group mean.
    """
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(respond(peer, prompt))
        await step.train()  # the KL goes into the rewards of tokens, these into returns, and those are whitened
        await step.publish()
    await peer.evaluate()


@flow(flow={"samples_per_prompt": 1}, train={"loss": "sft"})
async def sft(peer: Peer) -> None:
    """SFT: the answers that the data hold are what is trained, token by token; nothing is sampled but for evaluation."""
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(demonstrate_group(peer, prompt))
        await step.train()  # minus the log-probability of the answers, mean over the step's tokens
        await step.publish()
    await peer.evaluate()


async def demonstrate_group(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt with its entry's answer."""
    return await peer.filter(prompt, await peer.demonstrate(prompt))
