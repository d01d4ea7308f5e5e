"""From a split of slots to places on slots: which slot changes its role, so that as few as possible do. Pure.

A replica is as many slots of one node as its pool's size says. What a pool has and keeps stays where it is; what is given up is
taken from nodes that have the most of that pool, and what is new goes to nodes that have the least of it, so that every node keeps an
engine of the policy for as long as there are enough (its prompts are answered there). The ranks of a train world stay as they are
while their number does; only a rollback places another number.

Where pools have slots of their own, an engine of each is resident on each slot that does not train, and those whose turn it is not
sleep: to change over is to sleep and to wake, not to load. Co-located, all are awake on every slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gcore.ledger.job import EnginePlace, Plan, RankPlace
from placement.plan import NodeSlots, Snapshot
from placement.split import Bounds, Split, feasible

Pool = Literal["train", "reward", "rollout"]
POOLS: tuple[Pool, ...] = ("train", "reward", "rollout")
"""In the order in which they are dealt: what is dearest to move first."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One accelerator."""

    node: str
    slot: str

    def __str__(self) -> str:
        return f"{self.node}/{self.slot}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Slots of one replica. A replica lies on one node; a rank is one slot."""

    rollout: int = 1
    reward: int = 1

    def of(self, pool: Pool) -> int:
        """Of a pool."""
        return 1 if pool == "train" else self.rollout if pool == "rollout" else self.reward


Dealt = Mapping[Pool, tuple[tuple[Slot, ...], ...]]
"""The replicas of each pool."""


def dealt(split: Split, now: Dealt, snapshot: Snapshot, sizes: Sizes = Sizes()) -> Dealt | None:
    """The replicas of a co-existing split, the fewest of them new. None: the nodes' borders do not allow for it."""
    slots = _slots(snapshot)
    here = frozenset(slots)
    wanted = {"train": split.train, "reward": split.reward, "rollout": split.rollout}
    kept: dict[Pool, list[tuple[Slot, ...]]] = {}
    free = set(here)
    for pool in POOLS:
        there = [replica for replica in now.get(pool, ()) if free.issuperset(replica)]
        kept[pool] = _keep(there, wanted[pool] // sizes.of(pool))
        free.difference_update(*kept[pool])  # what was co-located served several
    found = _filled(kept, wanted, slots, sizes)
    if found is None:  # what is kept leaves no whole replica's slots on a node: the engines are dealt anew
        found = _filled({"train": kept["train"], "reward": [], "rollout": []}, wanted, slots, sizes)
    return found


def _keep(replicas: Sequence[tuple[Slot, ...]], most: int) -> list[tuple[Slot, ...]]:
    """The `most` that stay: of nodes that have many of them the last ones go first."""
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
    kept: Mapping[Pool, Sequence[tuple[Slot, ...]]], wanted: Mapping[str, int], slots: Sequence[Slot], sizes: Sizes
) -> Dealt | None:
    result: dict[Pool, list[tuple[Slot, ...]]] = {pool: list(kept[pool]) for pool in POOLS}
    taken = {slot for replicas in result.values() for replica in replicas for slot in replica}
    free: dict[str, list[Slot]] = {}
    for slot in slots:
        free.setdefault(slot.node, [])
        if slot not in taken:
            free[slot.node].append(slot)
    # The largest replicas first, for they find room least easily.
    for pool in sorted(POOLS, key=lambda pool: -sizes.of(pool)):
        size = sizes.of(pool)
        has = Counter(replica[0].node for replica in result[pool])
        for _ in range(wanted[pool] // size - len(result[pool])):
            fitting = [node for node in free if len(free[node]) >= size]
            if not fitting:
                return None
            node = min(fitting, key=lambda node: (has[node], -len(free[node]), node))
            result[pool].append(tuple(free[node][:size]))
            free[node] = free[node][size:]
            has[node] += 1
    return {pool: tuple(replicas) for pool, replicas in result.items()}


def roles(plan: Plan) -> Dealt:
    """Which slots a plan gives to which pool: where engines are awake, and where ranks are."""
    ranks = [Slot(place.node, place.slot) for place in sorted(plan.ranks, key=lambda place: place.rank)]
    reward = dict.fromkeys(Slot(place.node, place.slot) for place in plan.engines if place.judge and not place.asleep)
    rollout = dict.fromkeys(
        Slot(place.node, place.slot) for place in plan.engines if not place.judge and not place.asleep
    )
    return {
        "train": tuple((slot,) for slot in ranks),
        "reward": tuple((slot,) for slot in reward),
        "rollout": tuple((slot,) for slot in rollout),
    }


def split_of(plan: Plan, snapshot: Snapshot | None = None) -> Split:
    """What a plan's split is, of the slots in `snapshot` if one is given: nodes that are away do not count."""
    here = None if snapshot is None else frozenset(_slots(snapshot))
    found = {
        pool: [slot for (slot,) in replicas if here is None or slot in here]
        for pool, replicas in ((pool, roles(plan)[pool]) for pool in POOLS)
    }
    together = bool(set(found["train"]) & {*found["reward"], *found["rollout"]})
    mode: Literal["coexisting", "colocated"] = "colocated" if together else "coexisting"
    return Split(mode, len(found["rollout"]), len(found["reward"]), len(found["train"]))


def nearest(split: Split, bounds: Bounds) -> Split | None:
    """The split within `bounds` that is least unlike `split`; None if there is none at all."""

    def unlike(one: Split) -> tuple[int, ...]:
        sizes = abs(one.rollout - split.rollout) + abs(one.reward - split.reward) + abs(one.train - split.train)
        return (one.mode != split.mode, abs(one.train - split.train), sizes, -one.rollout)

    return min(feasible(bounds), key=unlike, default=None)


def assigned(
    split: Split,
    current: Plan | None,
    snapshot: Snapshot,
    judges: Sequence[str],
    *,
    world: str,
    generation: int,
    reason: str = "",
) -> Plan | None:
    """The plan of a split, with the fewest changes of `current`; None if it cannot be placed.

    `world`: if it is that of `current`, its ranks stay as they are. Engines on nodes that are away keep their places, to be started
    again when the node is back, unless the world is another.
    """
    slots = _slots(snapshot)
    same_world = current is not None and current.world == world
    if same_world and current is not None and len(current.ranks) != split.train:
        return None
    now: Dealt = roles(current) if current is not None else {}
    if split.mode == "colocated":
        ranks = current.ranks if same_world and current is not None else _ranks(_dealt_ranks(split, now, slots))
        engines = _together(slots, judges, current)
    else:
        if same_world and current is not None:
            now = {**now, "train": tuple((Slot(p.node, p.slot),) for p in current.ranks)}
        # Ranks on nodes that are away keep their slots there: no other slot is kept free for them.
        ranks_here = sum(slot in set(slots) for (slot,) in now["train"]) if same_world else split.train
        pools = dealt(replace(split, train=ranks_here), now, snapshot)
        if pools is None:
            return None
        ranks = current.ranks if same_world and current is not None else _ranks([slot for (slot,) in pools["train"]])
        engines = _apart(pools, {Slot(p.node, p.slot) for p in ranks}, slots, judges, current)
    if same_world and current is not None:
        here = frozenset(slots)
        engines += tuple(place for place in current.engines if Slot(place.node, place.slot) not in here)
    return Plan(generation=generation, world=world, ranks=tuple(ranks), engines=engines, reason=reason)


def _slots(snapshot: Snapshot) -> list[Slot]:
    """Round robin: one of each node before the second of any."""
    nodes: list[NodeSlots] = sorted(snapshot.nodes, key=lambda one: one.node)
    deepest = max((len(one.slots) for one in nodes), default=0)
    return [Slot(one.node, one.slots[i]) for i in range(deepest) for one in nodes if i < len(one.slots)]


def _dealt_ranks(split: Split, now: Dealt, slots: Sequence[Slot]) -> list[Slot]:
    kept = [slot for (slot,) in now.get("train", ()) if slot in slots][: split.train]
    return [*kept, *(slot for slot in slots if slot not in kept)][: split.train]


def _ranks(slots: Sequence[Slot]) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(rank=number, node=one.node, slot=one.slot) for number, one in enumerate(slots))


def _together(slots: Sequence[Slot], judges: Sequence[str], current: Plan | None) -> tuple[EnginePlace, ...]:
    places = [EnginePlace(node=slot.node, slot=slot.slot, judge=judge) for judge in ("", *judges) for slot in slots]
    return _in_order(places, current)


def _apart(
    pools: Dealt, training: set[Slot], slots: Sequence[Slot], judges: Sequence[str], current: Plan | None
) -> tuple[EnginePlace, ...]:
    role = {slot: pool for pool in ("rollout", "reward") for replica in pools[pool] for slot in replica}
    places = [
        EnginePlace(
            node=slot.node,
            slot=slot.slot,
            judge=judge,
            asleep=role.get(slot) != ("reward" if judge else "rollout"),
        )
        for judge in ("", *judges)
        for slot in slots
        if slot not in training and (slot in role or _resident(current, slot))
    ]
    return _in_order(places, current)


def _resident(current: Plan | None, slot: Slot) -> bool:
    """Whether engines are on a slot that no pool needs now: they stay there, asleep."""
    return current is not None and any((place.node, place.slot) == (slot.node, slot.slot) for place in current.engines)


def _in_order(places: Sequence[EnginePlace], current: Plan | None) -> tuple[EnginePlace, ...]:
    """Those that were there first, as they stood, so that a plan that changes nothing is the same plan."""
    keys = {(place.node, place.slot, place.judge): place for place in places}
    before = [(p.node, p.slot, p.judge) for p in current.engines] if current is not None else []
    kept = [keys.pop(key) for key in before if key in keys]
    return (*kept, *keys.values())


def changes(before: Plan, after: Plan) -> list[str]:
    """`NODE/SLOT was -> is` of each slot that changes its role, in words."""
    was, now = _by_slot(before), _by_slot(after)
    return [
        f"{slot} {was.get(slot, 'nothing')} -> {now.get(slot, 'nothing')}"
        for slot in sorted({*was, *now})
        if was.get(slot) != now.get(slot)
    ]


def _by_slot(plan: Plan) -> dict[Slot, str]:
    found: dict[Slot, list[str]] = {}
    for pool, replicas in roles(plan).items():
        for replica in replicas:
            for slot in replica:
                found.setdefault(slot, []).append(pool)
    return {slot: "+".join(sorted(pools)) for slot, pools in found.items()}
