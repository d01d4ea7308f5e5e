"""SFT: the answers that the data hold are what is trained, token by token; nothing is sampled but for evaluation."""

from __future__ import annotations

from gcore.flows.api import Peer
from gcore.flows.settings import flow
from gcore.types import Group, Outcome, Prompt


@flow(flow={"samples_per_prompt": 1}, train={"loss": "sft"})
async def sft(peer: Peer) -> None:
    """The whole algorithm, on every controller."""
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(show(peer, prompt))
        await step.train()  # minus the log-probability of the answers, mean over the step's tokens
        await step.publish()
    await peer.evaluate()


async def show(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt with its entry's answer."""
    return await peer.filter(prompt, await peer.demonstrate(prompt))
