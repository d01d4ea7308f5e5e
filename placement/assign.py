"""Assign a split (how many slots each pool gets) to slots of nodes, with as few role changes as possible.

A pool keeps its slots where it can. It gives up slots on the nodes where it has the most, and receives slots on the
nodes where it has the fewest. So every node keeps a rollout engine while there are enough of them; this matters because
each node sends its prompts to its own engines. Train ranks keep their slots while the size of the train world is
unchanged. Only a rollback forms a world of another size. A replica has as many slots of one node as `ReplicaSizes`
says.

In a co-existing split (each pool has slots of its own), every slot that does not train holds an engine process of each
pool, and all but one of them sleep (their weights and caches are not on the device). Moving a slot to another pool is
then a sleep and a wake instead of a model load. In a co-located split all engines on a slot are awake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from gcore.ledger.records.cluster import Slot
from gcore.ledger.records.job import EnginePlace, Plan, RankPlace
from gcore.types import Pool, ServingPool
from placement.slots import (
    SINGLE,
    NodeSlots,
    ReplicaSizes,
    Snapshot,
    Split,
    SplitBounds,
    feasible,
    rank_slots,
    replica_groups,
    round_robin,
    split_distance,
)

POOLS: tuple[Pool, ...] = ("train", "reward", "rollout")
"""Pools in the order in which they get slots: the most expensive to move first."""

Dealt = Mapping[Pool, tuple[tuple[Slot, ...], ...]]
"""The replicas of each pool; a replica is the tuple of its slots."""


def deal_replicas(
    split: Split, now: Dealt, snapshot: Snapshot, sizes: ReplicaSizes = SINGLE, *, ranks_stay: bool = False
) -> Dealt | None:
    """Choose the replicas of a co-existing split, with as few new ones as possible. `now`: the present replicas, which
    are kept where possible. `ranks_stay`: train ranks must not move. Return None if the slots of the nodes cannot be
    divided that way."""
    slots = _slots(snapshot)
    wanted = {"train": split.train, "reward": split.reward, "rollout": split.rollout}
    kept: dict[Pool, list[tuple[Slot, ...]]] = {}
    free = set(slots)
    for pool in POOLS:
        whole = {group for node in snapshot.nodes for group in _groups(node, sizes.of(pool))}
        there = [replica for replica in now.get(pool, ()) if replica in whole and free.issuperset(replica)]
        kept[pool] = _keep(there, wanted[pool] // sizes.of(pool))
        free.difference_update(*kept[pool])  # a co-located slot served several pools
    found = _filled(kept, wanted, snapshot, sizes)
    if found is None:  # the kept replicas leave no node with enough adjacent slots: assign all engines again
        found = _filled({**kept, "reward": [], "rollout": []}, wanted, snapshot, sizes)
    if found is None and not ranks_stay:
        found = _filled({"train": [], "reward": [], "rollout": []}, wanted, snapshot, sizes)
    return found


def _groups(node: NodeSlots, size: int) -> tuple[tuple[Slot, ...], ...]:
    return _groups_of(node.node, node.slots, size)


@lru_cache(maxsize=4096)
def _groups_of(node: str, slots: tuple[str, ...], size: int) -> tuple[tuple[Slot, ...], ...]:
    """Divide a node's slots into replicas. Cached: each plan calls it many times with the same arguments."""
    return tuple(tuple(Slot(node, slot) for slot in group) for group in replica_groups(slots, size))


def _keep(replicas: Sequence[tuple[Slot, ...]], most: int) -> list[tuple[Slot, ...]]:
    """Choose at most `most` of a pool's replicas to keep. The node with the most replicas gives up its last one, until
    few enough are left."""
    if len(replicas) <= most:
        return list(replicas)
    on: dict[str, list[tuple[Slot, ...]]] = {}
    for replica in replicas:
        on.setdefault(replica[0].node, []).append(replica)
    newest = {replica: place for place, replica in enumerate(replicas)}
    for _ in range(len(replicas) - most):
        fullest = max(map(len, on.values()))
        node = max((node for node in on if len(on[node]) == fullest), key=lambda node: newest[on[node][-1]])
        on[node].pop()
    kept = {replica for there in on.values() for replica in there}
    return [replica for replica in replicas if replica in kept]


def _filled(
    kept: Mapping[Pool, Sequence[tuple[Slot, ...]]], wanted: Mapping[str, int], snapshot: Snapshot, sizes: ReplicaSizes
) -> Dealt | None:
    """Add replicas to the `kept` ones until each pool has its `wanted` number of slots; None if they do not fit."""
    result: dict[Pool, list[tuple[Slot, ...]]] = {pool: list(kept[pool]) for pool in POOLS}
    taken = {slot for replicas in result.values() for replica in replicas for slot in replica}
    wide = {slot: group for node in snapshot.nodes for group in _groups(node, sizes.widest) for slot in group}
    # The largest replicas first: they are the hardest to fit.
    for pool in sorted(POOLS, key=lambda pool: -sizes.of(pool)):
        size = sizes.of(pool)
        free = {node.node: [one for one in _groups(node, size) if taken.isdisjoint(one)] for node in snapshot.nodes}
        has = Counter(replica[0].node for replica in result[pool])
        broken = {wide[slot] for slot in taken if slot in wide} if size < sizes.widest else set()
        for _ in range(wanted[pool] // size - len(result[pool])):
            fitting = {node: _least_breaking(free[node], wide, broken) for node in free if free[node]}
            if not fitting:
                return None
            spread = {node: has[node] if pool == "rollout" else 0 for node in fitting}
            node = min(fitting, key=lambda node: (spread[node], fitting[node][0], has[node], -len(free[node]), node))
            replica = free[node].pop(fitting[node][1])
            result[pool].append(replica)
            has[node] += 1
            if size < sizes.widest and replica[0] in wide:
                broken.add(wide[replica[0]])
        taken.update(slot for replica in result[pool] for slot in replica)
    return {pool: tuple(replicas) for pool, replicas in result.items()}


def _least_breaking(
    free: Sequence[tuple[Slot, ...]],
    wide: Mapping[Slot, tuple[Slot, ...]],
    broken: Collection[tuple[Slot, ...]],
) -> tuple[bool, int]:
    """Choose one of a node's free replicas such that, if possible, the slots of no intact wider replica are used up.

    `wide`: the widest replica that each slot belongs to. `broken`: widest replicas that already lost a slot to a
    smaller one. Return whether the choice breaks another one, and the index of the choice in `free`.
    """
    if not broken and len(free[0]) == len(wide.get(free[0][0], free[0])):
        return False, 0
    whole = (number for number, one in enumerate(free) if wide.get(one[0]) in broken or one[0] not in wide)
    found = next(whole, None)
    return found is None, found or 0


def plan_roles(plan: Plan, together: int = 1) -> Dealt:
    """List the slots that each pool uses in a plan, by replica: those of awake engines, and of sequence groups of
    `together` train ranks.
    """
    ranks = [place.on for place in sorted(plan.ranks, key=lambda place: place.rank)]
    awake = [place for place in plan.engines if not place.asleep]
    return {
        "train": tuple(tuple(ranks[first : first + together]) for first in range(0, len(ranks), together)),
        "reward": tuple(dict.fromkeys(place.on for place in awake if place.judge)),
        "rollout": tuple(dict.fromkeys(place.on for place in awake if not place.judge)),
    }


def split_of(plan: Plan, snapshot: Snapshot | None = None) -> Split:
    """Return the split of a plan. With `snapshot`, count only slots on nodes that are present."""
    here = None if snapshot is None else frozenset(_slots(snapshot))
    found = {
        pool: [slot for replica in replicas if here is None or here.issuperset(replica) for slot in replica]
        for pool, replicas in plan_roles(plan).items()
    }
    together = bool(set(found["train"]) & {*found["reward"], *found["rollout"]})
    mode: Literal["coexisting", "colocated"] = "colocated" if together else "coexisting"
    return Split(mode, len(found["rollout"]), len(found["reward"]), len(found["train"]))


def unlikeness(one: Split, split: Split) -> tuple[int, ...]:
    """Measure how much the split `one` differs from `split`, as a sort key (smaller is more alike): first whether the
    mode differs, then the size of the train world, then the slots of all pools."""
    return (one.mode != split.mode, abs(one.train - split.train), split_distance(one, split), -one.rollout)


def sort_by_unlikeness(split: Split, bounds: SplitBounds) -> list[Split]:
    """List all splits within `bounds`, the most similar to `split` first."""
    return sorted(feasible(bounds), key=lambda one: unlikeness(one, split))


def assign_split(
    split: Split,
    current: Plan | None,
    snapshot: Snapshot,
    judges: Sequence[str],
    *,
    world: str,
    generation: int,
    reason: str = "",
    sizes: ReplicaSizes = SINGLE,
) -> Plan | None:
    """Make the plan of a split with the fewest changes to `current`. Return None if the split cannot be placed.

    `judges`: names of the judge models that need engines. `world`: name of the train world; if it is that of `current`,
    the train ranks keep their slots, and engines on absent nodes stay in the plan, so that they start again when the
    node returns.
    """
    same_world = current is not None and current.world == world
    if same_world and current is not None and len(current.ranks) != split.train:
        return None
    # Ranks that stay are not dealt again, so their sequence groups may have slots of any nodes.
    sizes = replace(sizes, train=1) if same_world else sizes
    now: Dealt = plan_roles(current, sizes.train) if current is not None else {}
    if split.mode == "colocated":
        ranks = (
            current.ranks if same_world and current is not None else _ranks(_dealt_ranks(split, now, snapshot, sizes))
        )
        engines = _together(snapshot, judges, current, sizes)
    else:
        if same_world and current is not None:
            now = {**now, "train": tuple((p.on,) for p in current.ranks)}
        # Train ranks on absent nodes keep their slots there; no other slot is reserved for them.
        here = frozenset(_slots(snapshot))
        ranks_here = sum(slot in here for (slot,) in now["train"]) if same_world else split.train
        pools = deal_replicas(replace(split, train=ranks_here), now, snapshot, sizes, ranks_stay=same_world)
        if pools is None and sizes.train > 1:  # no node has enough adjacent slots for a sequence group
            split_groups = {**now, "train": tuple((slot,) for group in now.get("train", ()) for slot in group)}
            pools = deal_replicas(split, split_groups, snapshot, replace(sizes, train=1))
            pools = None if pools is None else {**pools, "train": tuple(sorted(pools["train"]))}
        if pools is None:
            return None
        dealt = [slot for group in pools["train"] for slot in group]
        ranks = current.ranks if same_world and current is not None else _ranks(dealt)
        engines = _apart(pools, {p.on for p in ranks}, snapshot, judges, current, sizes)
    if same_world and current is not None:
        nodes = {one.node for one in snapshot.nodes}
        engines += tuple(place for place in current.engines if place.node not in nodes)
    return Plan(generation=generation, world=world, ranks=tuple(ranks), engines=engines, reason=reason)


def _slots(snapshot: Snapshot) -> list[Slot]:
    """List all slots round robin: one slot of each node before the second of any."""
    return [slot for (slot,) in _replicas(snapshot, 1)]


def _dealt_ranks(split: Split, now: Dealt, snapshot: Snapshot, sizes: ReplicaSizes) -> list[Slot]:
    """Choose the slots of the train ranks: slots that train now first, those of whole sequence groups before others,
    then further ones. Ranks fill all slots of one of the widest replicas, or sequence groups, before the next, so that
    whole replicas stay free for engines."""
    slots = rank_slots(sorted(snapshot.nodes, key=lambda one: one.node), max(sizes.widest, sizes.train))
    there = frozenset(slots)
    groups = sorted(now.get("train", ()), key=lambda group: not there.issuperset(group))
    kept = [slot for group in groups for slot in group if slot in there][: split.train]
    stays = frozenset(kept)
    return [*kept, *(slot for slot in slots if slot not in stays)][: split.train]


def _ranks(slots: Sequence[Slot]) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(rank=number, node=one.node, slot=one.slot) for number, one in enumerate(slots))


def _together(
    snapshot: Snapshot, judges: Sequence[str], current: Plan | None, sizes: ReplicaSizes
) -> tuple[EnginePlace, ...]:
    """List the engines of a co-located split: one of each model on every slot, all awake."""
    placing = _Placing(current)
    places = [placing.of(one, judge) for judge in ("", *judges) for one in _replicas(snapshot, sizes.of(_pool(judge)))]
    return _in_order(places, current)


def _apart(
    pools: Dealt,
    training: set[Slot],
    snapshot: Snapshot,
    judges: Sequence[str],
    current: Plan | None,
    sizes: ReplicaSizes,
) -> tuple[EnginePlace, ...]:
    """List the engines of a co-existing split: one of each model on every slot that does not train. They are awake on
    the slots of their own pool and asleep elsewhere."""
    awake = {pool: set(pools[pool]) for pool in POOLS}
    # Engines stay, asleep, on slots that no pool needs now.
    known = {slot for place in current.engines for slot in place.on} if current is not None else set()
    known |= {slot for pool in ("rollout", "reward") for replica in awake[pool] for slot in replica}
    placing = _Placing(current)
    places = [
        placing.of(one, judge, asleep=one not in awake[_pool(judge)])
        for judge in ("", *judges)
        for one in _replicas(snapshot, sizes.of(_pool(judge)))
        if training.isdisjoint(one) and not known.isdisjoint(one)
    ]
    return _in_order(places, current)


def _pool(judge: str) -> ServingPool:
    return "reward" if judge else "rollout"


class _Placing:
    """Makes `EnginePlace` records. It reuses equal records of the current plan, because creating a thousand is slow."""

    def __init__(self, current: Plan | None) -> None:
        self._there = {place.key: place for place in current.engines} if current is not None else {}

    def of(self, replica: tuple[Slot, ...], judge: str, *, asleep: bool = False) -> EnginePlace:
        """Return the record of an engine on the slots of a replica. `judge`: name of its judge model; empty: a rollout
        engine."""
        first, further = replica[0], tuple(one.slot for one in replica[1:])
        there = self._there.get((first.node, first.slot, judge))
        if there is not None and (there.further, there.asleep) == (further, asleep):
            return there
        return EnginePlace(node=first.node, slot=first.slot, judge=judge, asleep=asleep, further=further)


def _replicas(snapshot: Snapshot, size: int) -> list[tuple[Slot, ...]]:
    """List all replicas of `size` slots that the nodes have room for, one of each node before the second of any."""
    return round_robin([list(_groups(node, size)) for node in sorted(snapshot.nodes, key=lambda one: one.node)])


def _in_order(places: Sequence[EnginePlace], current: Plan | None) -> tuple[EnginePlace, ...]:
    """Sort places so that those of the current plan come first in their old order. A plan without changes is then equal
    to the current one."""
    keys = {place.key: place for place in places}
    before = [place.key for place in current.engines] if current is not None else []
    kept = [keys.pop(key) for key in before if key in keys]
    return (*kept, *keys.values())


def role_changes(before: Plan, after: Plan) -> list[str]:
    """List the slots whose pools differ between two plans, each as `NODE/SLOT was -> is`, e.g. `rollout -> reward`."""
    was, now = _by_slot(before), _by_slot(after)
    return [
        f"{slot} {was.get(slot, 'nothing')} -> {now.get(slot, 'nothing')}"
        for slot in sorted({*was, *now})
        if was.get(slot) != now.get(slot)
    ]


def _by_slot(plan: Plan) -> dict[Slot, str]:
    """Return the pools that use each slot, joined by `+`."""
    found: dict[Slot, list[str]] = {}
    for pool, replicas in plan_roles(plan).items():
        for replica in replicas:
            for slot in replica:
                found.setdefault(slot, []).append(pool)
    return {slot: "+".join(sorted(pools)) for slot, pools in found.items()}
