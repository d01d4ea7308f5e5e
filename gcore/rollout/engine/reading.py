"""Which prompts, and how much of each, a cycle reads: `schedule.portions` over prompts that several works may share.

A pure decision over prompts and their sizes. Works are served in order: behind a prompt that is read only in part come
none but those that share it, so nobody overtakes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gcore.rollout.engine.prefill import Chunk, Prompt
from gcore.rollout.engine.schedule import portions


@dataclass(frozen=True, slots=True)
class Plan:
    """What is read now, and how many works, in order, take part: they join, or have begun."""

    chunks: tuple[Chunk, ...]
    works: int


def plan(needs: Sequence[Prompt | None], *, budget: int, grid: int | None) -> Plan:
    """`needs`: by work the prompt that it waits for; None: it can join at once. `budget`, `grid`: see `portions`."""
    prompts = list(dict.fromkeys(prompt for prompt in needs if prompt is not None))
    counts = portions(
        [prompt.left for prompt in prompts], budget=budget, grid=grid, done=[prompt.done for prompt in prompts]
    )
    chunks = tuple(Chunk(prompt, count) for prompt, count in zip(prompts, counts, strict=True) if count)
    return Plan(chunks, _works(needs, chunks))


def _works(needs: Sequence[Prompt | None], chunks: Sequence[Chunk]) -> int:
    begun = {chunk.prompt for chunk in chunks}
    cut = next((chunk.prompt for chunk in chunks if chunk.count < chunk.prompt.left), None)
    behind = False
    for count, prompt in enumerate(needs):
        if prompt is not None and prompt not in begun and prompt.left:
            return count
        if behind and prompt is not cut:
            return count
        behind = behind or (cut is not None and prompt is cut)
    return len(needs)
