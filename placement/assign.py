"""Which slot changes its role for a split of slots: from a split to places on slots, with the fewest changes.

A pool keeps its slots where it can. It gives up slots on the nodes that have the most of it, and gets slots on those that have the least
of it, so that every node keeps a rollout engine for as long as there are enough (its prompts are answered there). Ranks of a train world
stay where they are while their number does; only a rollback places another number. A pool's replica is as many slots of one node as
`ReplicaSizes` says.

Where pools have slots of their own, an engine of each is resident on each slot that does not train, and all but one of them sleep: a
change of role is a sleep and a wake, not a load. Co-located, all are awake on every slot.
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
    replica_groups,
    round_robin,
    split_distance,
)

POOLS: tuple[Pool, ...] = ("train", "reward", "rollout")
"""In the order in which they are dealt: what is dearest to move first."""

Dealt = Mapping[Pool, tuple[tuple[Slot, ...], ...]]
"""The replicas of each pool."""


def deal_replicas(
    split: Split, now: Dealt, snapshot: Snapshot, sizes: ReplicaSizes = SINGLE, *, ranks_stay: bool = False
) -> Dealt | None:
    """The replicas of a co-existing split, the fewest of them new. None: the nodes' borders do not allow for it. `ranks_stay`: no rank
    may move for that."""
    slots = _slots(snapshot)
    wanted = {"train": split.train, "reward": split.reward, "rollout": split.rollout}
    kept: dict[Pool, list[tuple[Slot, ...]]] = {}
    free = set(slots)
    for pool in POOLS:
        whole = {group for node in snapshot.nodes for group in _groups(node, sizes.of(pool))}
        there = [replica for replica in now.get(pool, ()) if replica in whole and free.issuperset(replica)]
        kept[pool] = _keep(there, wanted[pool] // sizes.of(pool))
        free.difference_update(*kept[pool])  # what was co-located served several
    found = _filled(kept, wanted, snapshot, sizes)
    if found is None:  # what is kept leaves no whole replica's slots on a node: the engines are dealt anew
        found = _filled({**kept, "reward": [], "rollout": []}, wanted, snapshot, sizes)
    if found is None and not ranks_stay:
        found = _filled({"train": [], "reward": [], "rollout": []}, wanted, snapshot, sizes)
    return found


def _groups(node: NodeSlots, size: int) -> tuple[tuple[Slot, ...], ...]:
    return _groups_of(node.node, node.slots, size)


@lru_cache(maxsize=4096)
def _groups_of(node: str, slots: tuple[str, ...], size: int) -> tuple[tuple[Slot, ...], ...]:
    """Asked for many times in each plan, and always the same of a node."""
    return tuple(tuple(Slot(node, slot) for slot in group) for group in replica_groups(slots, size))


def _keep(replicas: Sequence[tuple[Slot, ...]], most: int) -> list[tuple[Slot, ...]]:
    """The `most` that stay: of nodes that have many of them the last ones go first."""
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
    result: dict[Pool, list[tuple[Slot, ...]]] = {pool: list(kept[pool]) for pool in POOLS}
    taken = {slot for replicas in result.values() for replica in replicas for slot in replica}
    wide = {slot: group for node in snapshot.nodes for group in _groups(node, sizes.widest) for slot in group}
    # The largest replicas first, for they find room least easily.
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
    """Whether a smaller replica on any of these would break the slots of a wider one, of which there may be few, and which to take."""
    if not broken and len(free[0]) == len(wide.get(free[0][0], free[0])):
        return False, 0
    whole = (number for number, one in enumerate(free) if wide.get(one[0]) in broken or one[0] not in wide)
    found = next(whole, None)
    return found is None, found or 0


def plan_roles(plan: Plan) -> Dealt:
    """Which slots a plan gives to which pool: where engines are awake, and where ranks are."""
    ranks = [place.on for place in sorted(plan.ranks, key=lambda place: place.rank)]
    awake = [place for place in plan.engines if not place.asleep]
    return {
        "train": tuple((slot,) for slot in ranks),
        "reward": tuple(dict.fromkeys(place.on for place in awake if place.judge)),
        "rollout": tuple(dict.fromkeys(place.on for place in awake if not place.judge)),
    }


def split_of(plan: Plan, snapshot: Snapshot | None = None) -> Split:
    """What a plan's split is, of the slots in `snapshot` if one is given: nodes that are away do not count."""
    here = None if snapshot is None else frozenset(_slots(snapshot))
    found = {
        pool: [slot for replica in replicas if here is None or here.issuperset(replica) for slot in replica]
        for pool, replicas in plan_roles(plan).items()
    }
    together = bool(set(found["train"]) & {*found["reward"], *found["rollout"]})
    mode: Literal["coexisting", "colocated"] = "colocated" if together else "coexisting"
    return Split(mode, len(found["rollout"]), len(found["reward"]), len(found["train"]))


def unlikeness(one: Split, split: Split) -> tuple[int, ...]:
    """How little `one` is like `split`: by its mode, by the size of its train world, and then by all pools."""
    return (one.mode != split.mode, abs(one.train - split.train), split_distance(one, split), -one.rollout)


def sort_by_unlikeness(split: Split, bounds: SplitBounds) -> list[Split]:
    """All within `bounds`, those that are least unlike `split` first."""
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
    """The plan of a split, with the fewest changes of `current`; None if it cannot be placed.

    `world`: if it is that of `current`, its ranks stay as they are. Engines on nodes that are away keep their places, to be started
    again when the node is back, unless the world is another.
    """
    same_world = current is not None and current.world == world
    if same_world and current is not None and len(current.ranks) != split.train:
        return None
    now: Dealt = plan_roles(current) if current is not None else {}
    if split.mode == "colocated":
        ranks = (
            current.ranks if same_world and current is not None else _ranks(_dealt_ranks(split, now, snapshot, sizes))
        )
        engines = _together(snapshot, judges, current, sizes)
    else:
        if same_world and current is not None:
            now = {**now, "train": tuple((p.on,) for p in current.ranks)}
        # Ranks on nodes that are away keep their slots there: no other slot is kept free for them.
        here = frozenset(_slots(snapshot))
        ranks_here = sum(slot in here for (slot,) in now["train"]) if same_world else split.train
        pools = deal_replicas(replace(split, train=ranks_here), now, snapshot, sizes, ranks_stay=same_world)
        if pools is None:
            return None
        ranks = current.ranks if same_world and current is not None else _ranks([slot for (slot,) in pools["train"]])
        engines = _apart(pools, {p.on for p in ranks}, snapshot, judges, current, sizes)
    if same_world and current is not None:
        nodes = {one.node for one in snapshot.nodes}
        engines += tuple(place for place in current.engines if place.node not in nodes)
    return Plan(generation=generation, world=world, ranks=tuple(ranks), engines=engines, reason=reason)


def _slots(snapshot: Snapshot) -> list[Slot]:
    """Round robin: one of each node before the second of any."""
    return [slot for (slot,) in _replicas(snapshot, 1)]


def _dealt_ranks(split: Split, now: Dealt, snapshot: Snapshot, sizes: ReplicaSizes) -> list[Slot]:
    """So that pools can have slots of their own beside them later, ranks have all slots of a wide replica before the next one's."""
    slots = [slot for replica in _replicas(snapshot, sizes.widest) for slot in replica]
    there = frozenset(slots)
    kept = [slot for (slot,) in now.get("train", ()) if slot in there][: split.train]
    stays = frozenset(kept)
    return [*kept, *(slot for slot in slots if slot not in stays)][: split.train]


def _ranks(slots: Sequence[Slot]) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(rank=number, node=one.node, slot=one.slot) for number, one in enumerate(slots))


def _together(
    snapshot: Snapshot, judges: Sequence[str], current: Plan | None, sizes: ReplicaSizes
) -> tuple[EnginePlace, ...]:
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
    awake = {pool: set(pools[pool]) for pool in POOLS}
    # On slots that no pool needs now engines stay, asleep.
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
    """The places of engines; those that the plan there is has already are taken from it, for to make a thousand takes a moment."""

    def __init__(self, current: Plan | None) -> None:
        self._there = {place.key: place for place in current.engines} if current is not None else {}

    def of(self, replica: tuple[Slot, ...], judge: str, *, asleep: bool = False) -> EnginePlace:
        """An engine on the slots of a replica."""
        first, further = replica[0], tuple(one.slot for one in replica[1:])
        there = self._there.get((first.node, first.slot, judge))
        if there is not None and (there.further, there.asleep) == (further, asleep):
            return there
        return EnginePlace(node=first.node, slot=first.slot, judge=judge, asleep=asleep, further=further)


def _replicas(snapshot: Snapshot, size: int) -> list[tuple[Slot, ...]]:
    """All that there can be of a size, round robin as the slots."""
    return round_robin([list(_groups(node, size)) for node in sorted(snapshot.nodes, key=lambda one: one.node)])


def _in_order(places: Sequence[EnginePlace], current: Plan | None) -> tuple[EnginePlace, ...]:
    """Those that were there first, as they stood, so that a plan that changes nothing is the same plan."""
    keys = {place.key: place for place in places}
    before = [place.key for place in current.engines] if current is not None else []
    kept = [keys.pop(key) for key in before if key in keys]
    return (*kept, *keys.values())


def role_changes(before: Plan, after: Plan) -> list[str]:
    """`NODE/SLOT was -> is` of each slot that changes its role, in words."""
    was, now = _by_slot(before), _by_slot(after)
    return [
        f"{slot} {was.get(slot, 'nothing')} -> {now.get(slot, 'nothing')}"
        for slot in sorted({*was, *now})
        if was.get(slot) != now.get(slot)
    ]


def _by_slot(plan: Plan) -> dict[Slot, str]:
    found: dict[Slot, list[str]] = {}
    for pool, replicas in plan_roles(plan).items():
        for replica in replicas:
            for slot in replica:
                found.setdefault(slot, []).append(pool)
    return {slot: "+".join(sorted(pools)) for slot, pools in found.items()}
