"""RLOO: REINFORCE, each sample against the mean of the others of its prompt (arXiv 2402.14740).

A response is one action: its log-probability is the sum over its tokens. With `train.kl_coef` the distance from the
reference is part of the reward.
"""

from __future__ import annotations

from gcore.flows.api import Peer
from gcore.flows.settings import flow
from gcore.types import Group, Outcome, Prompt


@flow(
    flow={"samples_per_prompt": 4}, train={"advantage": "rloo", "aggregation": "seq-mean-token-sum", "kl_in": "reward"}
)
async def rloo(peer: Peer) -> None:
    """The whole algorithm, on every controller."""
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(leave_one_out(peer, prompt))
        await step.train()
        await step.publish()
    await peer.evaluate()


async def leave_one_out(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's samples, with rewards; the ranks take from each the mean of the others."""
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))
