"""How far a job goes, in words. Pure."""

from __future__ import annotations

from gcore.config.flow import FlowSpec


def so_far(flow: FlowSpec, prompts: int) -> str:
    """`20 steps`; `2 data epochs, 24 steps`; `2 data epochs, at most 24 steps, fewer if prompts are filtered`."""
    steps = flow.last_step(prompts)
    if flow.epochs is None:
        return counted(steps or 0, "step")
    if steps is not None:
        return f"{counted(flow.epochs, 'data epoch')}, {counted(steps, 'step')}"
    most = -(-flow.epochs * prompts // flow.groups_per_step)
    return f"{counted(flow.epochs, 'data epoch')}, at most {counted(most, 'step')}, fewer if prompts are filtered"


def counted(count: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
