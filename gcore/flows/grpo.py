"""GRPO: groups of samples per prompt, scored, and trained against each other's mean (arXiv 2402.03300)."""

from __future__ import annotations

from gcore.flows.api import Peer
from gcore.flows.settings import flow
from gcore.types import Group, Outcome, Prompt


@flow(train={"advantage": "grpo"})
async def grpo(peer: Peer) -> None:
    """The whole algorithm, on every controller."""
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
