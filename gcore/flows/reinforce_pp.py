"""REINFORCE++: one response to a prompt, no critic; token returns that hold the KL to the reference, whitened over the whole
step, in PPO's clipped loss (arXiv 2501.03262).

With `train.advantage: reinforce_pp_baseline` and several samples a prompt it is the paper's variant with a group mean.
"""

from __future__ import annotations

from gcore.flows.api import Peer
from gcore.flows.settings import flow
from gcore.types import Group, Outcome, Prompt


@flow(
    flow={"samples_per_prompt": 1},
    train={"advantage": "reinforce_pp", "loss": "ppo", "kl_in": "reward", "kl_coef": 0.01, "mini_batches": 2},
)
async def reinforce_pp(peer: Peer) -> None:
    """The whole algorithm, on every controller."""
    async for step in peer.steps():
        await peer.evaluate()
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(respond(peer, prompt))
        await step.train()  # the KL goes into the rewards of tokens, these into returns, and those are whitened
        await step.publish()
    await peer.evaluate()


async def respond(peer: Peer, prompt: Prompt) -> Group | Outcome:
    """One prompt's responses, with rewards."""
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))
