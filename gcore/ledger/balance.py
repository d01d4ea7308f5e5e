"""Which train rank takes which sample of a sealed step, in which update; the parts of a streamed step; a step's content digest.

The assignment is a pure function of the seal, so holders know what to push where, ranks know what they wait for, and nothing
about it is stored. A step's groups are cut into mini-batches (one optimizer update each), contiguous in the seal's order, whose
sizes differ by at most one group. Within a mini-batch the samples, not the groups, are spread over the ranks, costliest first,
each to the rank that has least to do so far (the LPT rule: the fullest rank never has more than 4/3 − 1/(3·ranks) of the best
possible). All arithmetic is on integers and every tie has a fixed winner, so that no platform comes to another layout. A rank
may get nothing in a mini-batch and then takes part with an empty share. Samples that a loss compares make one unit and go to
one rank; a unit of a policy's loss is one sample.

The cost of a sample is a polynomial of its length: linear for the matrices, quadratic for attention. The length at which the
two are equal depends on the model, so the sealer writes it into the seal (`gcore.ledger.records.cluster`). A masked sample costs
nothing: it is not computed, and only its reward counts.

A streamed step (`train.stream`) is cut by its parts in place of mini-batches. The batch is the same with and without parts: at
staleness 0 the first groups of the stream's order, as many as the quota. A group is *certain* to be in it once fewer refs than
the quota before it are kept or may still be; a ref that ends without a group only makes room. If the note that a prompt was
filtered is lost with its controller, the prompt is sampled again; the step then has its quota all the same, and takes that
prompt if there is room left. A part is worth sealing from `StreamRules.part` groups on: each costs a seal, an exchange and a
READY. A READY part is the same in all later states of its slot, so ranks compare the slot cut down to it (`seal_up_to`).
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gcore.ledger.records.chain import Head, Seal, SealedGroup, SealState
from gcore.ledger.selection import OffersView, SealPart, StreamRules, begun_groups, find_groups
from gcore.types import PromptRef


@dataclass(frozen=True, slots=True, order=True)
class SampleSlot:
    """A sample of a seal: `seal.groups[group]`, and in it the sample of index `sample`."""

    group: int
    sample: int


Unit = tuple[SampleSlot, ...]
"""Samples that are never on different ranks, nor in different micro-batches."""


def single_units(slots: Iterable[SampleSlot]) -> list[Unit]:
    """Each sample by itself."""
    return [(slot,) for slot in slots]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The samples of each rank: `shares[mini_batch][rank]` are sample slots, ascending. Of a streamed step, by part in place of
    mini-batch: all of its parts make one update."""

    shares: tuple[tuple[tuple[SampleSlot, ...], ...], ...]
    world_size: int

    @property
    def mini_batches(self) -> int:
        """Optimizer updates in a pass: the seal's number, or one a group when there are fewer groups than that; or parts."""
        return len(self.shares)

    def share(self, mini_batch: int, rank: int) -> tuple[SampleSlot, ...]:
        """What `rank` takes in `mini_batch`, ascending; may be empty. Raises IndexError for what does not exist."""
        return self.shares[mini_batch][rank]

    def of_rank(self, rank: int) -> tuple[SampleSlot, ...]:
        """What `rank` takes in the whole step, ascending."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a world of {self.world_size}")
        return tuple(sorted(slot for by_rank in self.shares for slot in by_rank[rank]))


def sample_cost(length: int, attention_equals_at: int) -> int:
    """What forward and backward over a sample of `length` tokens cost, in an arbitrary unit: matrices and attention.

    `attention_equals_at`: the length in tokens at which the two are equal.
    """
    return length * (attention_equals_at + length)


def slot_cost(seal: Seal, slot: SampleSlot) -> int:
    """The cost of a sample of a seal; 0 for a masked one."""
    group = seal.groups[slot.group]
    if slot.sample in group.masked:
        return 0
    return sample_cost(group.prompt_tokens + group.response_tokens[slot.sample], seal.attention_equals_at)


def balance_samples(seal: Seal, units_of: Callable[[Iterable[SampleSlot]], list[Unit]] = single_units) -> StepLayout:
    """The layout of a seal's samples over `seal.world_size` ranks and `seal.mini_batches` updates.

    `units_of`: the units of a mini-batch's samples; whoever computes the layout must use the same. Raises ValueError if either number is below 1: such a seal must never be written.
    """
    if seal.world_size < 1 or seal.mini_batches < 1:
        raise ValueError(f"a seal for {seal.world_size} ranks and {seal.mini_batches} mini-batches")
    if seal.parts:
        chunks = _by_parts(seal.parts)
    else:
        chunks = _contiguous(len(seal.groups), min(seal.mini_batches, len(seal.groups)))
    return StepLayout(tuple(_spread(seal, chunk, units_of) for chunk in chunks), seal.world_size)


def _by_parts(parts: tuple[int, ...]) -> list[range]:
    """Where each part of a streamed step lies among its groups; what one holds does not depend on those that follow."""
    ends = list(itertools.accumulate(parts))
    return [range(end - size, end) for end, size in zip(ends, parts, strict=True)]


def _contiguous(count: int, parts: int) -> list[range]:
    """Cut range(count) into `parts` ranges in order; the first ones are longer by one where it does not come out even."""
    cuts = [part * (count // parts) + min(part, count % parts) for part in range(parts + 1)] if parts else []
    return [range(start, end) for start, end in itertools.pairwise(cuts)]


def _spread(
    seal: Seal, groups: range, units_of: Callable[[Iterable[SampleSlot]], list[Unit]]
) -> tuple[tuple[SampleSlot, ...], ...]:
    """Costliest unit first, to the rank with the least load; ties go to fewer samples, then to the lower rank."""
    slots = (SampleSlot(group, sample) for group in groups for sample in range(len(seal.groups[group].response_tokens)))
    weighed = sorted((-sum(slot_cost(seal, slot) for slot in unit), unit) for unit in units_of(slots))
    shares: list[list[SampleSlot]] = [[] for _ in range(seal.world_size)]
    ranks = [(0, 0, rank) for rank in range(seal.world_size)]  # ascending, so already a heap
    for negative_cost, unit in weighed:
        load, taken, rank = ranks[0]
        shares[rank].extend(unit)
        heapq.heapreplace(ranks, (load - negative_cost, taken + len(unit), rank))
    return tuple(tuple(sorted(share)) for share in shares)


def certain_groups(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> tuple[SealedGroup, ...]:
    """The offered groups that no part holds and that are in the next step's batch whatever happens later, in the order.

    `order`: what `refs_in_order` gives, if it is `CachedOrder` already.
    """
    return find_groups(rules, head, seals, offered, order=order).groups[len(begun_groups(head, seals)) :]


def next_part(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> SealPart | None:
    """The part that is worth sealing now, while others of the batch are missing; None if there is none."""
    if rules.part is None:
        return None
    new = certain_groups(rules, head, seals, offered, order=order)
    return SealPart((*begun_groups(head, seals), *new)) if len(new) >= rules.part else None


def seal_up_to(seal: Seal, parts: int) -> Seal:
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


def part_layout(seal: Seal, part: int) -> StepLayout:
    """Which rank takes which sample of one part (from 0); nothing of the others."""
    layout = balance_samples(seal)
    return StepLayout((layout.shares[part],), layout.world_size)


def parts_sha256(parts: Iterable[Sequence[str]]) -> bytes:
    """SHA-256 over the digests of the groups in each part: what a rank says of the parts that it has begun."""
    h = hashlib.sha256()
    for digests in parts:
        h.update(f"{len(digests)} {' '.join(digests)}\n".encode())
    return h.digest()


def part_digests(seal: Seal, parts: int) -> tuple[tuple[str, ...], ...]:
    """The digests of the groups in the first `parts` parts."""
    found, start = [], 0
    for size in seal.parts[:parts]:
        found.append(tuple(group.digest for group in seal.groups[start : start + size]))
        start += size
    return tuple(found)


def content_sha256(seal: Seal) -> bytes:
    """SHA-256 over the seal's group digests, sorted, each followed by a newline."""
    h = hashlib.sha256()
    for digest in sorted(group.digest for group in seal.groups):
        h.update(f"{digest}\n".encode())
    return h.digest()
