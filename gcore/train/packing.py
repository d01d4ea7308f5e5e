"""Cuts a step into micro-batches, for every rank alike: a pure function of the seal.

A rank's samples of a mini-batch are sorted by length and filled into micro-batches, longest first, as long as rows ×
longest row stays within the budget: so padding is small and the first micro-batch shows whether memory suffices. A
sample longer than the budget gets a micro-batch of its own.

Under ZeRO every forward and backward is a collective, so all ranks must run equally many. As each computes the cut of
all from the seal, they agree on the largest number without talking; who has fewer runs empty micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcore.ledger.balance import SampleSlot, StepLayout
from gcore.ledger.records import Seal


@dataclass(frozen=True, slots=True)
class MiniBatchPlan:
    """One update, as one rank runs it.

    `micro_batches` are equally many on all ranks; an empty one stands for a dummy. `tokens` and `sequences` count what is
    trained on in the whole update, over all ranks: response tokens, and responses with at least one.
    """

    micro_batches: tuple[tuple[SampleSlot, ...], ...]
    tokens: int
    sequences: int


def plan_step(seal: Seal, layout: StepLayout, rank: int, budget: int) -> tuple[MiniBatchPlan, ...]:
    """The mini-batches of a step as `rank` runs them. `budget`: tokens of a micro-batch, padding included."""
    plans = []
    for number in range(layout.mini_batches):
        shares = [layout.share(number, other) for other in range(layout.world_size)]
        cuts = [pack(seal, share, budget) for share in shares]
        count = max(len(cut) for cut in cuts)
        responses = [seal.groups[slot.group].response_tokens[slot.sample] for share in shares for slot in share]
        plans.append(
            MiniBatchPlan(
                cuts[rank] + ((),) * (count - len(cuts[rank])),
                tokens=sum(responses),
                sequences=sum(1 for tokens in responses if tokens),
            )
        )
    return tuple(plans)


def pack(seal: Seal, slots: tuple[SampleSlot, ...], budget: int) -> tuple[tuple[SampleSlot, ...], ...]:
    """Micro-batches of at most `budget` tokens each, padding included; every slot in exactly one."""
    batches: list[list[SampleSlot]] = []
    longest = 0
    for slot in sorted(slots, key=lambda slot: (-length(seal, slot), slot)):
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(slot)
        else:
            batches.append([slot])
            longest = length(seal, slot)
    return tuple(tuple(batch) for batch in batches)


def length(seal: Seal, slot: SampleSlot) -> int:
    """Prompt and response of a sample, in tokens."""
    group = seal.groups[slot.group]
    return group.prompt_tokens + group.response_tokens[slot.sample]
