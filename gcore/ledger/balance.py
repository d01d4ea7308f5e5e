"""Assignment of a sealed step's samples to train ranks and updates, parts of a streamed step, and digests of a step's
content.

The seal is the record that lists the groups of a step. The assignment is a pure function of the seal: the controllers
that hold the groups compute where to send samples, ranks compute what to wait for, and no assignment is stored. A
step's groups are split into mini-batches (one optimizer update each), contiguous in the seal's order, whose sizes
differ by at most one group. Within a mini-batch the samples (not the groups) are spread over the ranks: the most
expensive first, each to the rank with the least load (LPT scheduling: the maximum load is at most 4/3 − 1/(3·ranks) of
the optimum). All arithmetic uses integers and every tie is broken by a fixed rule, so that every platform computes the
same layout. A rank may get no sample in a mini-batch; it then takes part with an empty share. Samples that a loss
compares with each other form one unit and go to one rank. For a policy loss each sample is a unit of its own.

With sequence parallelism, `seal.sequence_parallel` consecutive ranks form a sequence group. Samples are spread over the
groups, and every rank of a group gets the group's share, because each computes a part of every sample. The receipt of
the group's first rank lists the share, so that each sample is in one receipt.

Where groups have pictures, a rank encodes the pictures of a group once in each micro-batch with samples of it. This cost
counts once for each rank that has a sample of the group. So samples of one group stay together, unless it is cheaper
to encode its pictures on a further rank. Samples of groups with other blobs (arrays of samples) stay together likewise.

Samples of groups with blobs go to a rank on the node of the group's holder (`seal.near`), whose store has the blobs, if
that does not make the step slower. First whole shares change places. Then the samples of a group on one rank move to a
near rank, or change places with those of another group there. The highest load rises by at most 1/`NEAR_SLACK`, or by less
than the transfer of the blobs would cost (`TRANSFER_BYTES`).

The cost of a sample is a polynomial of its length: linear for the matrix products, quadratic for attention. The length
at which the two are equal depends on the model, so the controller that seals writes it into the seal
(`gcore.ledger.records.cluster`). A masked sample costs nothing: it is not computed, and only its reward counts. A generated
picture costs as much as a sample of the image tokens of one denoising step, for each of its trained steps.

A streamed step (`train.stream`) is split into parts instead of mini-batches; ranks train a part before the batch is
complete. The batch is the same with and without parts: at staleness 0 the first groups in order, up to the quota. A
group is *certain* to be in the batch once fewer prompts than the quota precede it, not counting those that ended
without a group. A preceding prompt that ends without a group later only makes room. If the record that a prompt was
filtered is lost with its controller, the prompt is sampled again; the step still reaches its quota, and takes that
prompt if there is room. A part has at least `StreamRules.part` groups, because each part costs two transactions and a
transfer. A READY part (every rank holds its share) stays the same in all later states of the step's record, so ranks
compare only the READY parts (`seal_up_to`).
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gcore.ledger.records.chain import Head, Seal, SealedGroup, SealState
from gcore.ledger.selection import OffersView, SealPart, StreamRules, begun_groups, find_groups
from gcore.types import PromptRef


@dataclass(frozen=True, slots=True, order=True)
class SampleSlot:
    """Identifies one sample of a seal: the sample with index `sample` in `seal.groups[group]`."""

    group: int
    sample: int


Unit = tuple[SampleSlot, ...]
"""Samples that always stay on one rank and in one micro-batch."""


def single_units(slots: Iterable[SampleSlot]) -> list[Unit]:
    """Make each sample a unit of its own."""
    return [(slot,) for slot in slots]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The samples of each sequence group: `shares[mini_batch][group]` are sample slots, ascending.

    A sequence group is one rank, or `sequence_parallel` consecutive ranks, which all get its share. For a streamed step
    the first index is the part; all parts form one update.
    """

    shares: tuple[tuple[tuple[SampleSlot, ...], ...], ...]
    world_size: int
    sequence_parallel: int = 1

    @property
    def mini_batches(self) -> int:
        """Number of mini-batches (optimizer updates per pass), at most one per group; for a streamed step, of parts."""
        return len(self.shares)

    def share(self, mini_batch: int, rank: int) -> tuple[SampleSlot, ...]:
        """Samples that `rank` trains in `mini_batch`, ascending; may be empty. Raises IndexError if one is unknown."""
        return self.shares[mini_batch][self.group_of(rank)]

    def of_rank(self, rank: int) -> tuple[SampleSlot, ...]:
        """Samples that `rank` trains in the whole step, ascending. Raises IndexError for an unknown rank."""
        group = self.group_of(rank)
        return tuple(sorted(slot for by_group in self.shares for slot in by_group[group]))

    def receipt_of(self, rank: int) -> tuple[SampleSlot, ...]:
        """Samples that the receipt of `rank` lists, ascending: those that it trains, if it is the first rank of its
        sequence group, else none. Raises IndexError for an unknown rank.
        """
        share = self.of_rank(rank)
        return share if rank % self.sequence_parallel == 0 else ()

    def group_of(self, rank: int) -> int:
        """The sequence group of `rank`, an index into `shares[mini_batch]`. Raises IndexError for an unknown rank."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} does not exist; the world has {self.world_size} ranks")
        return rank // self.sequence_parallel


def sample_cost(length: int, attention_equals_at: int) -> int:
    """Cost of forward and backward over a sample of `length` tokens, in an arbitrary unit.

    Matrix products cost in proportion to the length, attention to its square. `attention_equals_at`: the length in
    tokens at which both cost the same.
    """
    return length * (attention_equals_at + length)


def slot_cost(seal: Seal, slot: SampleSlot) -> int:
    """Compute cost (`sample_cost`) of one sample of a seal; 0 for a masked sample, which is not computed."""
    group = seal.groups[slot.group]
    if slot.sample in group.masked:
        return 0
    if group.step_tokens:
        return group.response_tokens[slot.sample] * sample_cost(group.step_tokens, seal.attention_equals_at)
    return sample_cost(group.prompt_tokens + group.response_tokens[slot.sample], seal.attention_equals_at)


def picture_cost(seal: Seal, group: int) -> int:
    """Compute cost of encoding the pictures of a seal's group once, in the unit of `sample_cost`; 0 without pictures."""
    return seal.groups[group].picture_tokens * seal.attention_equals_at


def pictured_groups(seal: Seal, unit: Unit) -> frozenset[int]:
    """The groups with pictures of which a unit has samples that are computed."""
    return frozenset(s.group for s in unit if seal.groups[s.group].patches and slot_cost(seal, s))


MOVES = 4
"""Maximum number of moves per unit by which a layout with pictures is improved."""


def balance_samples(seal: Seal, units_of: Callable[[Iterable[SampleSlot]], list[Unit]] = single_units) -> StepLayout:
    """Assign a seal's samples to `seal.world_size` ranks and `seal.mini_batches` optimizer updates.

    `units_of`: splits a mini-batch's samples into units, each of which goes to one rank; all processes must use the
    same function. Raises ValueError if `world_size` or `mini_batches` is below 1, or if the ranks do not form whole
    sequence groups.
    """
    if seal.world_size < 1 or seal.mini_batches < 1:
        raise ValueError(
            f"the seal has {seal.world_size} ranks and {seal.mini_batches} mini-batches; both must be at least 1"
        )
    if seal.world_size % seal.sequence_parallel:
        raise ValueError(
            f"the seal has {seal.world_size} ranks, which is not a multiple of sequence_parallel ({seal.sequence_parallel})"
        )
    if seal.parts:
        chunks = _by_parts(seal.parts)
    else:
        chunks = _contiguous(len(seal.groups), min(seal.mini_batches, len(seal.groups)))
    shares = tuple(_spread(seal, chunk, units_of) for chunk in chunks)
    return StepLayout(shares, seal.world_size, seal.sequence_parallel)


def _by_parts(parts: tuple[int, ...]) -> list[range]:
    """Ranges of group indexes, one per part of a streamed step, from the number of groups in each part."""
    ends = list(itertools.accumulate(parts))
    return [range(end - size, end) for end, size in zip(ends, parts, strict=True)]


def _contiguous(count: int, parts: int) -> list[range]:
    """Split range(count) into `parts` ranges in order; the first ones are longer by one if the split is uneven."""
    cuts = [part * (count // parts) + min(part, count % parts) for part in range(parts + 1)] if parts else []
    return [range(start, end) for start, end in itertools.pairwise(cuts)]


def _spread(
    seal: Seal, groups: range, units_of: Callable[[Iterable[SampleSlot]], list[Unit]]
) -> tuple[tuple[SampleSlot, ...], ...]:
    """Spread the samples of `groups` over the sequence groups of ranks. Returns the samples of each, ascending.

    Assigns the most expensive unit first, each to the sequence group with the least load. Ties go to that with fewer
    samples, then to the lower one.
    """
    slots = (SampleSlot(group, sample) for group in groups for sample in range(len(seal.groups[group].response_tokens)))
    units, count = units_of(slots), seal.world_size // seal.sequence_parallel
    if any(_has_blobs(seal.groups[group]) for group in groups):
        return _move_near(seal, _spread_with_blobs(seal, units, count))
    weighed = sorted((-sum(slot_cost(seal, slot) for slot in unit), unit) for unit in units)
    shares: list[list[SampleSlot]] = [[] for _ in range(count)]
    loads = [(0, 0, number) for number in range(count)]  # ascending, so already a heap
    for negative_cost, unit in weighed:
        load, taken, number = loads[0]
        shares[number].extend(unit)
        heapq.heapreplace(loads, (load - negative_cost, taken + len(unit), number))
    return tuple(tuple(sorted(share)) for share in shares)


def _has_blobs(group: SealedGroup) -> bool:
    return bool(group.patches or group.media_bytes)


def _slots_of(shares: Iterable[Iterable[Unit]]) -> tuple[tuple[SampleSlot, ...], ...]:
    """The samples of each share, ascending."""
    return tuple(tuple(sorted(slot for unit in share for slot in unit)) for share in shares)


class _Share:
    """The units of one sequence group of ranks, and their cost with the pictures of their groups."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._pictured: Counter[int] = Counter()  # number of units by group with pictures
        self.units: list[Unit] = []
        self.load = 0

    def cost_to_add(self, unit: Unit) -> int:
        """By how much the load grows with a unit."""
        new = (group for group in pictured_groups(self._seal, unit) if not self._pictured[group])
        return self._own(unit) + sum(picture_cost(self._seal, group) for group in new)

    def cost_to_remove(self, unit: Unit) -> int:
        """By how much the load falls without one of its units."""
        last = (group for group in pictured_groups(self._seal, unit) if self._pictured[group] == 1)
        return self._own(unit) + sum(picture_cost(self._seal, group) for group in last)

    def add(self, unit: Unit) -> None:
        """Add a unit."""
        self.load += self.cost_to_add(unit)
        self.units.append(unit)
        self._pictured.update(pictured_groups(self._seal, unit))

    def remove(self, unit: Unit) -> None:
        """Remove one of its units."""
        self.load -= self.cost_to_remove(unit)
        self.units.remove(unit)
        self._pictured.subtract(pictured_groups(self._seal, unit))

    def _own(self, unit: Unit) -> int:
        return sum(slot_cost(self._seal, slot) for slot in unit)


def _spread_with_blobs(seal: Seal, units: list[Unit], count: int) -> list[list[Unit]]:
    """Spread units of which some have blobs over `count` sequence groups. Returns the units of each.

    First the units of each group with blobs stay together, the most expensive go first, each to the least load. Then
    single units move from the most to the least loaded, as long as this lowers the greater of the two loads.
    """
    bundles: dict[tuple[int, ...] | Unit, list[Unit]] = {}
    for unit in units:
        groups = {slot.group for slot in unit if _has_blobs(seal.groups[slot.group])}
        bundles.setdefault(tuple(sorted(groups)) or unit, []).append(unit)
    shares = [_Share(seal) for _ in range(count)]
    loads = [(0, 0, number) for number in range(count)]
    for _, bundle in sorted((-_load_of(seal, bundle), bundle) for bundle in bundles.values()):
        _, taken, number = loads[0]
        for unit in bundle:
            shares[number].add(unit)
        heapq.heapreplace(loads, (shares[number].load, taken + sum(map(len, bundle)), number))
    for _ in range(MOVES * len(units)):
        source = max(shares, key=lambda share: share.load)
        target = min(shares, key=lambda share: share.load)
        moves = (
            (max(source.load - source.cost_to_remove(unit), target.load + target.cost_to_add(unit)), unit)
            for unit in source.units
        )
        highest, unit = min(moves, default=(source.load, ()))
        if highest >= source.load:
            break
        source.remove(unit)
        target.add(unit)
    return [share.units for share in shares]


NEAR_SLACK = 32
"""The highest load of a rank rises by at most this fraction (1/32) when samples move to the ranks near their blobs, unless
the transfer of the blobs would take longer."""

TRANSFER_BYTES = 1 << 16
"""Bytes of blobs whose transfer to another node takes as long as the computation of a token."""


class _Bundle:
    """The units of one share whose samples belong to one group with blobs. `own`: their cost without pictures."""

    def __init__(self, seal: Seal, group: int, units: list[Unit]) -> None:
        slots = [slot for unit in units for slot in unit]
        self.group = group
        self.units = units
        self.own = sum(slot_cost(seal, slot) for slot in slots)
        self.pictures = picture_cost(seal, group) if any(pictured_groups(seal, unit) for unit in units) else 0
        one = seal.groups[group]
        self.bytes = one.media_bytes * len(slots) // len(one.response_tokens)
        """Its share of the bytes of the group's blobs."""

    @property
    def cost(self) -> int:
        """Its cost on a rank that has no other samples of the group."""
        return self.own + self.pictures


class _Places:
    """The bundles of each sequence group of ranks (by group of the seal), the ranks' loads, and their limit."""

    def __init__(self, seal: Seal, shares: list[list[Unit]]) -> None:
        self._seal = seal
        self.bundles: list[dict[int, _Bundle]] = []
        self.fixed: list[list[Unit]] = []
        """Units that do not move: of several groups, or without blobs."""
        for share in shares:
            of_group: dict[int, list[Unit]] = {}
            fixed = []
            for unit in share:
                groups = {slot.group for slot in unit}
                if len(groups) == 1 and seal.groups[unit[0].group].media_bytes:
                    of_group.setdefault(unit[0].group, []).append(unit)
                else:
                    fixed.append(unit)
            self.bundles.append({group: _Bundle(seal, group, units) for group, units in of_group.items()})
            self.fixed.append(fixed)
        self.loads = [_load_of(seal, share) for share in shares]
        self.limit = max(self.loads) + max(self.loads) // NEAR_SLACK
        self.transfers = [0] * len(shares)
        """What the transfer of blobs to each rank costs, in the unit of the loads; set by `exchange_shares`."""

    def is_near(self, place: int, group: int) -> bool:
        """Whether the store of the node of a sequence group has the blobs of `group`."""
        return place in self.near(group)

    def near(self, group: int) -> tuple[int, ...]:
        """The sequence groups near the blobs of `group`."""
        near = self._seal.near.get(self._seal.groups[group].holder, ())
        return tuple(place for place in near if place < len(self.bundles))

    def exchange_shares(self) -> None:
        """Give whole shares to the ranks near whose nodes most of their bytes are; this changes no load."""
        gains: dict[tuple[int, int], int] = {}
        for share, bundles in enumerate(self.bundles):
            for group, bundle in bundles.items():
                for place in self.near(group):
                    gains[share, place] = gains.get((share, place), 0) + bundle.bytes
        place_of: dict[int, int] = {}
        taken: set[int] = set()
        for (share, place), _ in sorted(gains.items(), key=lambda item: (-item[1], item[0])):
            if share not in place_of and place not in taken:
                place_of[share] = place
                taken.add(place)
        free = iter(place for place in range(len(self.bundles)) if place not in taken)
        order = sorted(range(len(self.bundles)), key=lambda share: place_of[share] if share in place_of else next(free))
        self.bundles = [self.bundles[share] for share in order]
        self.fixed = [self.fixed[share] for share in order]
        self.loads = [self.loads[share] for share in order]
        self.transfers = [
            sum(self._transfer(place, bundle) for bundle in bundles.values())
            for place, bundles in enumerate(self.bundles)
        ]

    def bring_near(self, source: int, bundle: _Bundle) -> bool:
        """Move a bundle to a near rank, or exchange it with another bundle there, if no step becomes slower by that."""
        for target in sorted(self.near(bundle.group), key=lambda place: (self.loads[place], place)):
            if self._pays(source, target, bundle, None):
                self._move(source, target, bundle)
                return True
            others = [one for group, one in self.bundles[target].items() if not self.is_near(target, group)]
            others.sort(key=lambda one: (not self.is_near(source, one.group), abs(one.cost - bundle.cost), one.group))
            for one in others:
                if self._pays(source, target, bundle, one):
                    self._move(target, source, one)
                    self._move(source, target, bundle)
                    return True
        return False

    def _pays(self, source: int, target: int, bundle: _Bundle, other: _Bundle | None) -> bool:
        """Whether `bundle` should move from `source` to the near rank `target`, and `other` from there to `source`: no load
        exceeds the limit by that, or the greater of both loads with transfers does not rise.
        """
        more = {source: -bundle.cost, target: self._more(target, bundle)}
        sent = {source: -self._transfer(source, bundle), target: 0}
        if other is not None:
            more[target] -= other.cost
            more[source] += self._more(source, other)
            sent[target] -= self._transfer(target, other)
            sent[source] += self._transfer(source, other)
        if all(more[place] <= 0 or self.loads[place] + more[place] <= self.limit for place in more):
            return True
        before = max(self.loads[place] + self.transfers[place] for place in more)
        return all(self.loads[place] + self.transfers[place] + more[place] + sent[place] <= before for place in more)

    def _transfer(self, place: int, bundle: _Bundle) -> int:
        """What the transfer of a bundle's blobs to a rank costs; 0 for a near one."""
        if self.is_near(place, bundle.group):
            return 0
        return bundle.bytes * self._seal.attention_equals_at // TRANSFER_BYTES

    def _more(self, place: int, bundle: _Bundle) -> int:
        """By how much the load of a rank grows with a bundle."""
        there = self.bundles[place].get(bundle.group)
        return bundle.own + (0 if there is not None and there.pictures else bundle.pictures)

    def _move(self, source: int, target: int, bundle: _Bundle) -> None:
        self.loads[source] -= bundle.cost
        self.loads[target] += self._more(target, bundle)
        self.transfers[source] -= self._transfer(source, bundle)
        self.transfers[target] += self._transfer(target, bundle)
        del self.bundles[source][bundle.group]
        there = self.bundles[target].get(bundle.group)
        units = bundle.units if there is None else there.units + bundle.units
        self.bundles[target][bundle.group] = _Bundle(self._seal, bundle.group, units)


def _move_near(seal: Seal, shares: list[list[Unit]]) -> tuple[tuple[SampleSlot, ...], ...]:
    """Move units of groups with blobs to sequence groups near the blobs. Returns the samples of each, ascending."""
    if not seal.near:
        return _slots_of(shares)
    places = _Places(seal, shares)
    places.exchange_shares()
    moved = True
    while moved:  # each time more bytes are near
        far = [
            (-bundle.bytes, group, place)
            for place, bundles in enumerate(places.bundles)
            for group, bundle in bundles.items()
            if not places.is_near(place, group)
        ]
        moved = False
        for _, group, place in sorted(far):
            bundle = places.bundles[place].get(group)  # it may have been exchanged meanwhile
            if bundle is not None and not places.is_near(place, group):
                moved = places.bring_near(place, bundle) or moved
    return _slots_of(
        [*places.fixed[place], *(unit for bundle in places.bundles[place].values() for unit in bundle.units)]
        for place in range(len(shares))
    )


def _load_of(seal: Seal, units: list[Unit]) -> int:
    share = _Share(seal)
    for unit in units:
        share.add(unit)
    return share.load


def certain_groups(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> tuple[SealedGroup, ...]:
    """Offered groups, in order, that no part contains yet and that will be in the next step's batch in any case.

    `order`: the result of `refs_in_order` for these arguments, for example a `CachedOrder`; None: computed here.
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
    """The next part of a streamed step, to be sealed while other groups of the batch are still missing.

    None if the step is not streamed, or if fewer than `rules.part` new groups are certain. `order`: as in
    `certain_groups`.
    """
    if rules.part is None:
        return None
    new = certain_groups(rules, head, seals, offered, order=order)
    return SealPart((*begun_groups(head, seals), *new)) if len(new) >= rules.part else None


def seal_up_to(seal: Seal, parts: int) -> Seal:
    """Reduce a streamed step's seal to its first `parts` parts. The result stays the same once these are READY.

    Ranks compare it to detect that a READY part was changed. Only fields that determine these parts are copied, so
    later parts or a checkpoint at this step change nothing. The attempt is 0, because later parts can be given up and
    sealed again under another attempt number.
    """
    holders = {group.holder for group in seal.groups[: sum(seal.parts[:parts])] if group.media_bytes}
    return Seal(
        lineage=seal.lineage,
        step=seal.step,
        attempt=0,
        state=SealState.OPEN,
        world=seal.world,
        world_size=seal.world_size,
        sequence_parallel=seal.sequence_parallel,
        mini_batches=seal.mini_batches,
        attention_equals_at=seal.attention_equals_at,
        groups=seal.groups[: sum(seal.parts[:parts])],
        near={holder: near for holder, near in seal.near.items() if holder in holders},
        parts=seal.parts[:parts],
        ready_parts=parts,
    )


def part_layout(seal: Seal, part: int) -> StepLayout:
    """Assignment of one part's samples to ranks. `part` counts from 0."""
    layout = balance_samples(seal)
    return StepLayout((layout.shares[part],), layout.world_size, layout.sequence_parallel)


def parts_sha256(parts: Iterable[Sequence[str]]) -> bytes:
    """SHA-256 over the group digests of each part. Ranks report it for the parts that they have begun to train."""
    h = hashlib.sha256()
    for digests in parts:
        h.update(f"{len(digests)} {' '.join(digests)}\n".encode())
    return h.digest()


def part_digests(seal: Seal, parts: int) -> tuple[tuple[str, ...], ...]:
    """Group digests of each of the first `parts` parts, in the seal's order."""
    found, start = [], 0
    for size in seal.parts[:parts]:
        found.append(tuple(group.digest for group in seal.groups[start : start + size]))
        start += size
    return tuple(found)


def content_sha256(seal: Seal) -> bytes:
    """SHA-256 that identifies a batch's content: over the group digests, sorted, each followed by a newline."""
    h = hashlib.sha256()
    for digest in sorted(group.digest for group in seal.groups):
        h.update(f"{digest}\n".encode())
    return h.digest()
