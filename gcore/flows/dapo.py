"""DAPO: GRPO without the groups that teach nothing, which are drawn anew until the step is full (arXiv 2503.14476).

The ratio may rise further than it may fall, tokens are weighed alike, and no reference holds the model back: the settings
below. The penalty of length wants a length: `rollout.overlong_tokens`.
"""

from __future__ import annotations

from gcore.flows.api import Peer
from gcore.flows.settings import flow
from gcore.types import Group, Outcome, Prompt


@flow(
    flow={"filters": [{"name": "signal"}]},
    train={"advantage": "grpo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean", "kl_coef": 0.0},
)
async def dapo(peer: Peer) -> None:
    """The whole algorithm, on every controller."""
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
