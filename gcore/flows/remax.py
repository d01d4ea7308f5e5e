"""ReMax: REINFORCE, each sample against what the greedy answer to its prompt earns (arXiv 2310.10505)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gcore.flows.api import Peer
from gcore.flows.settings import flow
from gcore.types import Group, Outcome, Prompt


@flow(
    flow={"samples_per_prompt": 1}, train={"advantage": "remax", "aggregation": "seq-mean-token-sum", "kl_in": "reward"}
)
async def remax(peer: Peer) -> None:
    """The whole algorithm, on every controller."""
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(against_greedy(peer, prompt))
        await step.train()
        await step.publish()
    await peer.evaluate()


async def against_greedy(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's samples, with the reward of its greedy answer as their baseline; that answer is not trained."""
    samples, greedy = await asyncio.gather(peer.rollout(prompt), peer.rollout(prompt, samples=1, greedy=True))
    baseline = await peer.score(prompt, greedy)
    group = await peer.score(prompt, samples)
    if isinstance(baseline, Outcome) or isinstance(group, Outcome):
        return group if isinstance(group, Outcome) else baseline
    return await peer.filter(prompt, replace(group, baseline=baseline.samples[0].reward))
