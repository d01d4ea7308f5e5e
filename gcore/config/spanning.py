"""Engines that span several slots (`slots_per_engine`): which sizes in a spec do not go together.

What nodes and models allow is not known here (`controllers.service.spanning`), nor on which slots engines lie (`placement.replicas`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from gcore.config.spec import JobSpec

MOST_SPANNED = 64
SlotsPerEngine = Annotated[int, Field(ge=1, le=MOST_SPANNED)]
SPANS = (
    "Slots of one node that an engine spans (tensor parallel, SGLang only): the model's heads, and each node's slots, are divided "
    "by it"
)


def refuse_torch(engine: str, slots_per_engine: int) -> str | None:
    """Why an engine cannot span so many slots; None: it can."""
    if engine == "torch" and slots_per_engine > 1:
        return f"slots_per_engine is {slots_per_engine}, and the torch engine runs on one slot; set engine: sglang"
    return None


def refuse_spans(spec: JobSpec) -> str | None:
    """Why the sizes of engines do not go together, or with the sizes of pools; None: they do."""
    sizes = {judge.serving.slots_per_engine: judge.name for judge in spec.served_judges}
    if len(sizes) > 1:
        first, second = sorted(sizes)[:2]
        return (
            f"judge {sizes[first]!r} has engines of {first} slots (serving.slots_per_engine) and judge {sizes[second]!r} of {second}; "
            "judges share the slots of their pool, so give them the same"
        )
    rollout, reward = spec.rollout.slots_per_engine, next(iter(sizes), 1)
    if max(rollout, reward) % min(rollout, reward):
        return (
            f"rollout.slots_per_engine is {rollout} and the judges' is {reward}; what one pool gives the other must be whole engines "
            "of both, so use sizes of which one divides the other"
        )
    placed = spec.placement.reward
    if placed is not None and placed % reward:
        return f"placement.reward is {placed}, and a judge's engine spans {reward} slots; use a multiple of that"
    return None
