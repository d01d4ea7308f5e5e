"""Patient: a prompt whose first answers are all wrong is sampled again, and the group keeps the best half of the answers.

A group of eight has a training signal only if it contains a right answer. So the flow samples half of the answers first. Only
if none of them is right it samples the other half; then the better of each pair goes into the group. The number of
these prompts is summed over all peers and logged.
"""

from __future__ import annotations

import logging

from gcore.flows import Peer, flow
from gcore.types import Group, Outcome, Prompt

log = logging.getLogger(__name__)


@flow(
    flow={"samples_per_prompt": 4, "filters": [{"name": "two_answers"}]},
    reward={"name": "close"},
    train={"advantage": "against_median"},
)
async def patient(peer: Peer) -> None:
    """The whole program, on every controller."""
    async for step in peer.steps():
        await peer.evaluate()
        again: list[Prompt] = []
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(better_half(peer, prompt, again))
        log.info("step %d: %d prompts were tried again", step.number, await step.sum("again", len(again)))
        await step.train()
        await step.publish()
    await peer.evaluate()


async def better_half(peer: Peer, prompt: Prompt, again: list[Prompt]) -> Group | Outcome:
    """One prompt's group; drawn twice if no first answer is right."""
    group = await peer.score(prompt, await peer.rollout(prompt))
    if isinstance(group, Group) and all(sample.reward < 1 for sample in group.samples):
        again.append(prompt)
        more = await peer.score(prompt, await peer.rollout(prompt))
        if isinstance(more, Group):
            pairs = zip(group.samples, more.samples, strict=True)
            better = tuple(max(pair, key=lambda sample: sample.reward) for pair in pairs)
            group = Group(group.ref, group.prompt_ids, better, group.source, group.temperature)
    return await peer.filter(prompt, group)
