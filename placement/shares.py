"""Divide the slots of a cluster between jobs. The input is the cluster's slots and the claims of the jobs; the output
is which job has which slots (its share).

The steps, numbered as in the code:

1. A job that has ended, is paused or was asked to end gets nothing. Slots of a draining node and faulty slots are not
   assigned.
2. Each job gets the minimum of slots that it needs, or none. Jobs with higher priority come first. At equal priority
   running jobs come before waiting ones, so that no job is interrupted for an equal one, and older jobs before younger
   ones. The jobs of a namespace together get no more than its quota.
3. The remaining slots are given slot by slot, for the highest priority first. Each goes to the namespace with the
   fewest slots at that priority, and in it to the job with the fewest. On a tie it goes to a job that would otherwise
   lose a slot, so that slots do not move without gain. Slots are given in multiples of the job's engine size, up to the
   job's maximum.
4. The counted slots are chosen: first those that the job has, then free ones, preferably on nodes where it already
   runs, then on those with the fewest slots left over.

A slot that another job may still be using is not assigned, nor the other slots of an engine that would include it. When
that job has returned the slot, the division runs again. A job keeps its slots on an absent node, up to its limit (its
maximum and the quota, minus its slots elsewhere). While the node may soon return (`absent`), the job gets no
replacement. Jobs with wide engines choose slots before those with narrow ones, which may have to move. So steps 2 and 3
count a slot for a job only if all jobs counted earlier can still find their slots.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gcore.config.spec import JobSpec
from gcore.ledger.records.cluster import Claim, QueuePosition, Share, Shares, Slot, group_by_node, slots_of_share
from gcore.ledger.records.restart_reasons import slots_gone, slots_limited, slots_taken, slots_unusable
from placement.request import PlacementRequest, count_lacking_slots
from placement.slots import Snapshot, count_noun, replica_groups

Unit = tuple[Slot, ...]
"""Adjacent slots of one node that are assigned together."""


def new_claim(spec: JobSpec, *, created: float, owner: str = "") -> Claim:
    """Make the claim on slots of a job that is created now. `created`: seconds since the epoch. `owner`: the user who
    submitted it."""
    wanted = PlacementRequest.by(spec)
    unit = wanted.sizes.widest
    needed = max(count_lacking_slots(Snapshot(()), wanted, first=True), spec.scheduling.slots_min)
    least = -(-needed // unit) * unit
    return Claim(
        namespace=spec.namespace,
        name=spec.name,
        owner=owner,
        priority=spec.scheduling.priority,
        least=least,
        most=spec.scheduling.slots_max,
        unit=unit,
        created=created,
    )


@dataclass(frozen=True)
class ClusterSlots:
    """The slots of a cluster. `nodes`: slots of each present node, in order. `out`: slots that must not be assigned,
    because they are faulty or their node is draining."""

    nodes: Mapping[str, tuple[str, ...]]
    out: frozenset[Slot] = frozenset()
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Maximum slots of all jobs of a namespace together; without an entry there is no limit."""
    absent: frozenset[str] = frozenset()
    """Absent nodes that may soon return."""

    @classmethod
    def of(
        cls,
        nodes: Mapping[str, tuple[str, ...]],
        drained: Iterable[str],
        sick: Mapping[str, Iterable[str]],
        quotas: Mapping[str, int],
    ) -> ClusterSlots:
        """Make the cluster's slots. `drained`: draining nodes. `sick`: faulty slots by node. `quotas`: maximum slots by
        namespace."""
        out = {Slot(node, slot) for node in drained for slot in nodes.get(node, ())}
        return cls(nodes, frozenset(out | slots_of_share(sick)), quotas)

    def units(self, size: int) -> list[Unit]:
        """List all units of `size` adjacent slots that may be assigned."""
        found = [
            tuple(Slot(node, slot) for slot in group)
            for node, slots in sorted(self.nodes.items())
            for group in replica_groups(slots, size)
        ]
        return [unit for unit in found if self.out.isdisjoint(unit)]


def divide_slots(cluster: ClusterSlots, claims: Mapping[str, Claim], shares: Shares) -> Shares:
    """Divide the slots between the jobs that claim some. `claims`: by job ID. `shares`: the present division. Return
    the same record if nothing changes."""
    wanting, has, turns, counting = _counted(cluster, claims, shares)
    # 4. Choose slots; exclude those that another job may still be using.
    holders = {slot: uid for uid in claims if uid in shares.jobs for slot in slots_of_share(shares.jobs[uid].held)}
    chosen = _chosen(cluster, wanting, turns, counting.counts, holders, has)
    kept = _kept_away(cluster, wanting, has, counting)
    jobs: dict[str, Share] = {}
    for uid in sorted(claims):
        away = kept.get(uid, frozenset())
        whole = (unit for unit in chosen.get(uid, ()) if all(holders.get(slot, uid) == uid for slot in unit))
        granted = frozenset(slot for unit in whole for slot in unit) | away
        held = granted | (slots_of_share(shares.jobs[uid].held) if uid in shares.jobs else frozenset())
        holders.update(dict.fromkeys(granted, uid))
        if held:
            jobs[uid] = Share(granted=group_by_node(granted), held=group_by_node(held))
    found = Shares(jobs=jobs)
    return shares if found == shares else found


def queue_jobs(cluster: ClusterSlots, claims: Mapping[str, Claim], shares: Shares) -> dict[str, QueuePosition]:
    """Return the queue position of each job that waits for slots, by job ID, with the reason why it waits."""
    _, _, turns, counting = _counted(cluster, claims, shares)
    waiting = [uid for uid in turns if not counting.has_any(uid)]
    return {uid: QueuePosition(position, counting.why(uid)) for position, uid in enumerate(waiting, 1)}


def explain_surplus(
    cluster: ClusterSlots, claims: Mapping[str, Claim], shares: Shares, uid: str, drained: Collection[str]
) -> tuple[str, ...]:
    """Explain why job `uid` must give back slots: which jobs get them, which nodes are draining (`drained`), which slots are unhealthy, which
    nodes are gone, or the job's maximum. One sentence each; empty if there is nothing to give back or no such reason. Jobs of other namespaces are not named."""
    share = shares.jobs.get(uid)
    if share is None or not share.surplus or uid not in claims:
        return ()
    wanting, has, turns, counting = _counted(cluster, claims, shares)
    holders = {slot: one for one in claims if one in shares.jobs for slot in slots_of_share(shares.jobs[one].held)}
    chosen = _chosen(cluster, wanting, turns, counting.counts, holders, has)
    takers = {slot: one for one, units in chosen.items() for unit in units for slot in unit}
    taken, draining, unhealthy, gone = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    claim = claims[uid]
    for slot in share.surplus:
        taker = takers.get(slot, uid)
        if taker != uid:
            same = claims[taker].namespace == claim.namespace
            taken[f"job {taker}" if same else "a job of another namespace"] += 1
        elif slot.node in drained:
            draining[slot.node] += 1
        elif slot in cluster.out:
            unhealthy[slot.node] += 1
        elif slot.node not in cluster.nodes:
            gone[slot.node] += 1
    found = [slots_taken(count, name) for name, count in sorted(taken.items())]
    found += [slots_unusable(count, node, draining=True) for node, count in sorted(draining.items())]
    found += [slots_unusable(count, node, draining=False) for node, count in sorted(unhealthy.items())]
    found += [slots_gone(count, node) for node, count in sorted(gone.items())]
    if not found and claim.most is not None and len(slots_of_share(share.granted)) + claim.unit > claim.most:
        found.append(slots_limited(claim.most))
    return tuple(found)


def _counted(
    cluster: ClusterSlots, claims: Mapping[str, Claim], shares: Shares
) -> tuple[dict[str, Claim], dict[str, frozenset[Slot]], list[str], _Counting]:
    """Do steps 1 to 3. Return the claims that want slots, the slots that each job has now, the order of the jobs, and
    the counts."""
    # 1. Which jobs claim slots, what they have, and their order.
    wanting = {uid: claim for uid, claim in claims.items() if claim.wants}
    has = {uid: slots_of_share(shares.jobs[uid].granted) if uid in shares.jobs else frozenset() for uid in claims}
    turns = sorted(wanting, key=lambda uid: (-wanting[uid].priority, not has[uid], wanting[uid].created, uid))
    # 2. and 3. How many slots each job gets.
    absent = {uid: sum(slot.node in cluster.absent for slot in has[uid]) for uid in wanting}
    counting = _Counting(cluster, wanting, {uid: len(slots) for uid, slots in has.items()}, absent)
    counting.give_least(turns)
    counting.give_rest(turns)
    return wanting, has, turns, counting


class _Counting:
    """Counts how many slots each job gets (steps 2 and 3), without choosing which."""

    def __init__(
        self, cluster: ClusterSlots, claims: Mapping[str, Claim], has: Mapping[str, int], absent: Mapping[str, int]
    ) -> None:
        """`has`: number of slots that each job has now. `absent`: number of those on absent nodes that may soon return;
        the job keeps them in addition to its count."""
        self._claims = claims
        self._absent = absent
        self._quotas = cluster.quotas
        self._has = has
        self._all = sum(len(unit) for unit in cluster.units(1))
        self._room = {size: len(cluster.units(size)) for size in {1, *(claim.unit for claim in claims.values())}}
        """Number of units that are still free, by unit size."""
        self._given: dict[int, int] = defaultdict(int)
        """Slots that were given in units of each size."""
        self._left = self._all
        self._used: dict[str, int] = defaultdict(int)
        for uid, slots in absent.items():
            self._used[claims[uid].namespace] += slots
        self.counts = dict.fromkeys(claims, 0)
        self._over_quota: set[str] = set()

    def give_least(self, turns: Iterable[str]) -> None:
        """Give each job its minimum of slots, or none."""
        for uid in turns:
            claim, least = self._claims[uid], self._least(uid)
            absent = self._absent[uid]
            # A job keeps its minimum of present slots, even if it has as many on a node that may not return.
            lacking = max(least - absent, min(least, self._has[uid] - absent), 0) // claim.unit * claim.unit
            quota = self._quotas.get(claim.namespace)
            if quota is not None and self._used[claim.namespace] + lacking > quota:
                self._over_quota.add(uid)
            elif (claim.most is None or least <= claim.most) and self._has_room(claim.unit, lacking):
                self._give(uid, lacking)

    def has_any(self, uid: str) -> bool:
        """Whether a job has slots or gets some."""
        return self._slots(uid) > 0

    def keep(self, uid: str, slots: int) -> int:
        """Let a job keep up to `slots` slots on absent nodes in addition to its count, in whole units and within its
        limits. Return how many it may keep."""
        claim = self._claims[uid]
        quota = self._quotas.get(claim.namespace)
        room = [slots]
        room += [] if claim.most is None else [claim.most - self._slots(uid)]
        room += [] if quota is None else [quota - self._used[claim.namespace]]
        kept = max(0, min(room)) // claim.unit * claim.unit
        self._used[claim.namespace] += kept
        return kept

    def _slots(self, uid: str) -> int:
        return self.counts[uid] + self._absent[uid]

    def why(self, uid: str) -> str:
        """Explain why a job has no slots; empty if it has some. Call it after counting."""
        if self.has_any(uid):
            return ""
        claim, needs = self._claims[uid], f"it needs {count_noun(self._least(uid), 'slot')}"
        if claim.most is not None and self._least(uid) > claim.most:
            return f"{needs} in engines of {claim.unit}, but its limit is {claim.most}"
        if uid in self._over_quota:
            used, quota = self._used[claim.namespace], self._quotas[claim.namespace]
            return f"{needs}, but namespace {claim.namespace!r} has a quota of {quota} and uses {used}"
        if self._least(uid) <= self._left:
            needs += f" in engines of {claim.unit} adjacent slots"
        return f"{needs}, and other jobs use {self._all - self._left} of {count_noun(self._all, 'slot')}"

    def _least(self, uid: str) -> int:
        """Return the minimum of slots that a job needs, in whole units."""
        claim = self._claims[uid]
        return -(-claim.least // claim.unit) * claim.unit

    def give_rest(self, turns: Sequence[str]) -> None:
        """Give the remaining slots, highest priority first, unit by unit to the job with the fewest (step 3)."""
        place = {uid: number for number, uid in enumerate(turns)}
        for priority in sorted({self._claims[uid].priority for uid in turns}, reverse=True):
            level = [uid for uid in turns if self._claims[uid].priority == priority and self.has_any(uid)]
            of_level: dict[str, int] = defaultdict(int)
            for uid in level:
                of_level[self._claims[uid].namespace] += self._slots(uid)
            while able := [uid for uid in level if self._takes_more(uid)]:
                level = able  # a job that takes no more now takes none later
                uid = min(able, key=lambda one: self._poverty(one, of_level, place))
                of_level[self._claims[uid].namespace] += self._claims[uid].unit
                self._give(uid, self._claims[uid].unit)

    def _poverty(self, uid: str, of_level: Mapping[str, int], place: Mapping[str, int]) -> tuple[int, int, bool, int]:
        """Return the sort key by which the next unit is given: the smallest gets it. `of_level`: slots of each
        namespace at this priority. `place`: position of each job in the order of step 2."""
        slots = self._slots(uid)
        return of_level[self._claims[uid].namespace], slots, slots >= self._has[uid], place[uid]

    def _takes_more(self, uid: str) -> bool:
        claim, more = self._claims[uid], self._slots(uid) + self._claims[uid].unit
        quota = self._quotas.get(claim.namespace)
        return (
            self._has_room(claim.unit, claim.unit)
            and (claim.most is None or more <= claim.most)
            and (quota is None or self._used[claim.namespace] + claim.unit <= quota)
        )

    def _has_room(self, unit: int, slots: int) -> bool:
        """Whether `slots` more slots in units of `unit` can be found beside all that were counted so far. Jobs with
        wide engines choose first (`_chosen`) and reduce what is left for narrow ones, so a job counted later must not
        use slots that one counted earlier needs. A narrower size of which nothing is counted needs no slots."""
        return all(
            self._room[size] >= taken or (1 < size < unit and not self._given[size])
            for size, taken in self._takes(unit, slots)
        )

    def _takes(self, unit: int, slots: int) -> Iterator[tuple[int, int]]:
        """Yield, for each unit size up to `unit`, how many units of that size can no longer be used when `slots` slots
        are given in units of `unit`. If one size does not divide the other, a unit may overlap one more than it
        covers."""
        for size in self._room:
            if size <= unit:
                each = unit // size if unit % size == 0 else (unit + size - 2) // size + 1
                yield size, slots // unit * each

    def _give(self, uid: str, slots: int) -> None:
        for size, taken in self._takes(self._claims[uid].unit, slots):
            self._room[size] = max(0, self._room[size] - taken)
        self._given[self._claims[uid].unit] += slots
        self.counts[uid] += slots
        self._used[self._claims[uid].namespace] += slots
        self._left -= slots


def _chosen(
    cluster: ClusterSlots,
    claims: Mapping[str, Claim],
    turns: Sequence[str],
    counts: Mapping[str, int],
    holders: Mapping[Slot, str],
    has: Mapping[str, frozenset[Slot]],
) -> dict[str, list[Unit]]:
    """Choose the slots of each job (step 4): as many as were counted for it, or as can be found in whole units.
    `holders`: the job that may still be using each slot. `has`: the slots that each job has now."""
    found: dict[str, list[Unit]] = {uid: [] for uid in turns}
    taken: set[Slot] = set()
    for size in sorted({claims[uid].unit for uid in turns}, reverse=True):
        of_size = [uid for uid in turns if claims[uid].unit == size and counts[uid]]
        units = cluster.units(size)
        for uid in of_size:  # slots that they keep
            own = [unit for unit in units if has[uid].issuperset(unit) and taken.isdisjoint(unit)]
            per_node = Counter(unit[0][0] for unit in own)
            kept = sorted(own, key=lambda unit: (-per_node[unit[0][0]], unit))[: counts[uid] // size]
            found[uid] = kept
            taken.update(slot for unit in kept for slot in unit)
        for uid in of_size:  # additional slots
            found[uid] += _added(uid, counts[uid] // size - len(found[uid]), found[uid], units, holders, taken)
    return found


def _kept_away(
    cluster: ClusterSlots, claims: Mapping[str, Claim], has: Mapping[str, frozenset[Slot]], counting: _Counting
) -> dict[str, frozenset[Slot]]:
    """Return the slots that each job keeps on nodes that are not present: all slots on nodes that may soon return
    (`cluster.absent`), and whole units on other nodes, within the job's limit. Jobs with the fewest slots elsewhere
    come first."""
    found: dict[str, frozenset[Slot]] = {}
    for uid in sorted(claims, key=lambda uid: (counting.counts[uid], uid)):
        gone = [slot for slot in has[uid] if slot.node not in cluster.nodes and slot.node not in cluster.absent]
        gone.sort(key=_in_order)
        kept = counting.keep(uid, len(gone))
        found[uid] = frozenset(gone[:kept]) | {slot for slot in has[uid] if slot.node in cluster.absent}
    return found


def _in_order(slot: Slot) -> tuple[str, list[tuple[int, str]]]:
    """Return the sort key of a slot: by node, then by name with numbers in numeric order (`cpu:9` before `cpu:10`)."""
    return slot.node, [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", slot.slot)]


def _added(
    uid: str,
    lacking: int,
    own: Sequence[Unit],
    units: Sequence[Unit],
    holders: Mapping[Slot, str],
    taken: set[Slot],
) -> list[Unit]:
    """Choose up to `lacking` more units for a job, and add their slots to `taken`.

    Preferred are units that no other job may still be using, then nodes where the job already runs (`own`: its units),
    then nodes with the fewest free units. One node is filled before the next.
    """
    free: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        if taken.isdisjoint(unit):
            free[unit[0][0]].append(unit)
    for of_node in free.values():
        of_node.sort(key=lambda unit: (sum(holders.get(slot, uid) != uid for slot in unit), unit))
    nodes, found = {unit[0][0] for unit in own}, list[Unit]()

    def cost(node: str) -> tuple[int, bool, int, str]:
        busy = sum(holders.get(slot, uid) != uid for slot in free[node][0])
        return busy, node not in nodes, len(free[node]), node

    while len(found) < lacking and (there := [node for node, of_node in free.items() if of_node]):
        node = min(there, key=cost)
        unit = free[node].pop(0)
        nodes.add(node)
        found.append(unit)
        taken.update(unit)
    return found
