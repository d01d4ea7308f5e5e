"""DAPO: GRPO without the groups that teach nothing, which are drawn anew until the step is full (arXiv 2503.14476).

The wider upper clip, the mean over tokens and the penalty of length are settings: `train.clip_high`, `train.aggregation`,
`rollout.overlong_tokens`; `examples/arithmetic/dapo.yaml` has them as the paper does.
"""

from __future__ import annotations

from gcore.flows.api import Peer
from gcore.flows.signal import has_signal
from gcore.types import Group, Outcome, Prompt


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
    """One prompt's group, or that it is filtered because all its rewards are the same."""
    group = await peer.score(prompt, await peer.rollout(prompt))
    if isinstance(group, Group) and not has_signal(group):
        return Outcome("filtered", "all its rewards are the same")
    return group
