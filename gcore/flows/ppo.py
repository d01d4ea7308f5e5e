"""PPO: one response to a prompt, advantages from a critic that learns beside the policy, several clipped updates a step
(arXiv 1707.06347; arXiv 2203.02155 for language models).

The critic is the train ranks' (`train.critic`); the flow only brings responses and rewards.
"""

from __future__ import annotations

from gcore.flows.api import Peer
from gcore.flows.settings import flow
from gcore.types import Group, Outcome, Prompt


@flow(flow={"samples_per_prompt": 1}, train={"advantage": "gae", "loss": "ppo", "mini_batches": 4})
async def ppo(peer: Peer) -> None:
    """The whole algorithm, on every controller."""
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
