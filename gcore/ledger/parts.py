"""Parts of a streamed step (`train.stream`): which groups may be sealed before the others are there, and what a part is.

The batch is the same with and without parts: at staleness 0 the first groups of the stream's order, as many as the quota. A
group is *certain* to be in it once fewer refs than the quota before it are kept or may still be. Nothing that happens to those
can push it out, since a ref that ends without a group only makes room. Whoever noted that a prompt was filtered may die with
that note, and the prompt is drawn anew; the step then has its quota all the same, and takes that prompt if there is room left.

A part is worth sealing from `StreamRules.part` groups on: each costs a seal, an exchange and a READY of its own.

Every READY part is the same in all states of its slot from then on. What ranks compare before they compute on it is therefore
the slot cut down to it (`up_to`), whichever later state they were told of.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

from gcore.ledger.balance import StepLayout, balance
from gcore.ledger.records import Head, Seal, SealedGroup, SealState
from gcore.ledger.rules import StreamRules
from gcore.ledger.stream import Offered, PartNow, begun, find
from gcore.types import PromptRef


def certain(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: Offered,
    *,
    order: Iterable[PromptRef] | None = None,
) -> tuple[SealedGroup, ...]:
    """The offered groups that no part holds and that are in the next step's batch whatever happens later, in the order.

    `order`: what `in_order` gives, if it is `Walked` already.
    """
    return find(rules, head, seals, offered, order=order).groups[len(begun(head, seals)) :]


def next_part(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: Offered,
    *,
    order: Iterable[PromptRef] | None = None,
) -> PartNow | None:
    """The part that is worth sealing now, while others of the batch are missing; None if there is none."""
    if rules.part is None:
        return None
    new = certain(rules, head, seals, offered, order=order)
    return PartNow((*begun(head, seals), *new)) if len(new) >= rules.part else None


def up_to(seal: Seal, parts: int) -> Seal:
    """The slot as it was when its part number `parts` (from 1) had become READY: the same for whatever came after it.

    But for the attempt, which is 0: parts are given up and sealed anew under another, and stay what they are. Nothing else of a slot is taken
    over than what a part follows from: what is asked of the step meanwhile, such as a checkpoint, changes no part.
    """
    return Seal(
        lineage=seal.lineage,
        step=seal.step,
        attempt=0,
        state=SealState.OPEN,
        world=seal.world,
        world_size=seal.world_size,
        mini_batches=seal.mini_batches,
        attention_equals_at=seal.attention_equals_at,
        groups=seal.groups[: sum(seal.parts[:parts])],
        parts=seal.parts[:parts],
        ready_parts=parts,
    )


def layout_of(seal: Seal, part: int) -> StepLayout:
    """Which rank takes which sample of one part (from 0); nothing of the others."""
    layout = balance(seal)
    return StepLayout((layout.shares[part],), layout.world_size)


def parts_sha256(parts: Iterable[Sequence[str]]) -> bytes:
    """SHA-256 over the digests of the groups in each part: what a rank says of the parts that it has begun."""
    h = hashlib.sha256()
    for digests in parts:
        h.update(f"{len(digests)} {' '.join(digests)}\n".encode())
    return h.digest()


def digests_of(seal: Seal, parts: int) -> tuple[tuple[str, ...], ...]:
    """The digests of the groups in the first `parts` parts."""
    found, start = [], 0
    for size in seal.parts[:parts]:
        found.append(tuple(group.digest for group in seal.groups[start : start + size]))
        start += size
    return tuple(found)
