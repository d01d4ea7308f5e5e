"""From what engines have to do at a moment to whether slots are lent, and which. Pure.

`placement.lending.lent` says how many; here its numbers are worked out from what the nodes told and from the job's newest steps, and
the slots are chosen: those that have least to do, and of each pool so few that it keeps one everywhere it needs one. Before a step
was measured nothing is lent. Where other responses to the same prompts are finished, it is known better what those under way have still to
come (`gcore.rollout.outliving`): then the newest steps' lengths are taken to be so much longer or shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from gcore.ledger.job import EnginePlace, Plan
from gcore.ledger.placing import Move, MoveKind
from placement.assign import POOLS, Slot, roles, split_of
from placement.lending import lent, spared
from placement.moves import Deciding, Proposal, base_split, part_of, told_slots
from placement.plan import counted
from placement.speeds import Rows, Speed, Speeds
from placement.split import Split

MOST_OFF = 2.0
"""What responses tell of those to the same prompts changes a forecast by no more: twice as long, or half."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine as its node sees it. `ready`: it is awake and asked; `asleep`: its memory is given back."""

    node: str
    slot: str
    judge: str
    running: int
    waiting: int
    ready: bool
    asleep: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """That of its place in the plan."""
        return self.node, self.slot, self.judge


@dataclass(frozen=True, slots=True)
class Loads:
    """All engines of a job at a moment. `unseated`: requests that no engine has yet, by pool. `foreseen`: requests of the policy of which
    other responses to their prompts tell how long they may be, and `left_tokens`: what all of these together have still to come."""

    engines: tuple[EngineLoad, ...]
    unseated: Mapping[str, int]
    left_tokens: float = 0.0
    foreseen: int = 0

    def by_key(self) -> dict[tuple[str, str, str], EngineLoad]:
        """Each engine, by the key of its place in the plan."""
        return {one.key: one for one in self.engines}

    def of(self, pool: str) -> list[EngineLoad]:
        """The engines of a pool."""
        return [one for one in self.engines if bool(one.judge) == (pool == "reward")]

    def owed(self, pool: str) -> int:
        """Requests of a pool, wherever they are."""
        return sum(one.running + one.waiting for one in self.of(pool)) + self.unseated.get(pool, 0)


def present(plan: Plan, loads: Loads) -> Plan:
    """The plan without the engines that nobody told of: their nodes are away, or they have not come up."""
    told = loads.by_key()
    there = tuple(place for place in plan.engines if place.key in told)
    return plan.model_copy(update={"engines": there})


@dataclass(frozen=True, slots=True)
class Lending:
    """What is lent now: above 0 from rollout to the judges, below 0 back, and the seconds each pool had left."""

    count: int
    speeds: Speeds
    rollout_left_s: float
    reward_left_s: float
    rollout_owed: int
    reward_owed: int

    def ends_s(self, rollout: int, reward: int) -> float:
        """Seconds until both pools are done, with so many engines each."""
        to_come = self.reward_owed + self.rollout_owed * self.speeds.asked_each
        mine, theirs = self.speeds.rollout, self.speeds.reward
        owed, begun = float(self.rollout_owed), float(min(self.reward_owed, reward * theirs.rows))
        return max(mine.left_s(owed, owed, rollout), theirs.left_s(to_come, begun, reward))


def as_foreseen(rollout: Speed, loads: Loads) -> Speed:
    """The newest steps' tails, made as much longer or shorter as other responses to the prompts tell. A request that is not foreseen counts
    as long as any; where most are not, nothing is changed."""
    owed = loads.owed("rollout")
    if not rollout.tail or not 0 < owed < 2 * loads.foreseen:
        return rollout
    usual = rollout.to_come(owed, owed)[1]
    each = (loads.left_tokens + max(owed - loads.foreseen, 0) * rollout.tokens) / max(owed, loads.foreseen)
    if usual <= 0 or each <= 0:
        return rollout
    times = min(max(each / usual, 1.0 / MOST_OFF), MOST_OFF)
    return replace(rollout, tail=tuple((longest * times, mean * times) for longest, mean in rollout.tail))


def wanted(plan: Plan, loads: Loads, speeds: Speeds, cost_s: float, rows: Rows) -> Lending | None:
    """What is to be lent, of the engines that are there (`present`). None: nothing can be, as where engines of the two pools span different
    numbers of slots."""
    awake, (here, there) = roles(plan), _awake(plan)
    alike = len({len(replica) for pool in POOLS if pool != "train" for replica in awake[pool]}) == 1
    if split_of(plan).mode == "colocated" or not here or not there or not alike:
        return None
    speeds = replace(speeds, rollout=as_foreseen(speeds.rollout, loads))
    rollout, reward = speeds.rollout, speeds.reward
    owed, asked = loads.owed("rollout"), loads.owed("reward")
    to_come = asked + owed * speeds.asked_each  # every response that is still made will be judged
    begun = float(min(asked, there * reward.rows))
    rollout_left = rollout.left_s(owed, owed, here)
    reward_left = reward.left_s(to_come, begun, there)
    count = lent(
        cost_s,
        here,
        float(owed),
        rollout.doubling(owed, owed, here),
        rollout_left,
        there,
        to_come,
        reward.doubling(to_come, begun, there),
        reward_left,
    )
    count = spared(count, here, float(owed), rows.rollout, there, float(asked), rows.reward)
    return Lending(count, speeds, rollout_left, reward_left, owed, asked)


def lending(
    plan: Plan,
    loads: Loads,
    speeds: Speeds,
    cost_s: float,
    needed: frozenset[str],
    rows: Rows,
    at: Deciding,
) -> Proposal | None:
    """The move by which slots are lent now. `needed`: nodes that keep an engine of the policy, for their prompts are answered there."""
    there = present(plan, loads)
    found = wanted(there, loads, speeds, cost_s, rows)
    if found is None or found.count == 0:
        return None
    to_judges = found.count > 0
    slots = _firsts(there, loads, rows.rollout, to_judges=to_judges, needed=needed)[: abs(found.count)]
    if not slots:
        return None
    engines = tuple(
        place.model_copy(update={"asleep": to_judges != bool(place.judge)})
        if Slot(place.node, place.slot) in slots
        else place
        for place in plan.engines
    )
    base, base_there = base_split(plan), _base_there(plan, there)
    after = plan.model_copy(update={"generation": plan.generation + 1, "engines": engines})
    is_back = split_of(after) == base
    before_split, after_split = split_of(there), split_of(present(after, loads))
    pool, other = ("the judges", "rollout") if to_judges else ("rollout", "the judges")
    left, spare = (
        (found.reward_left_s, found.rollout_left_s) if to_judges else (found.rollout_left_s, found.reward_left_s)
    )
    owed, has = (found.reward_owed, found.rollout_owed) if to_judges else (found.rollout_owed, found.reward_owed)
    now_slots = before_split.reward if to_judges else before_split.rollout
    gain = max(found.ends_s(*_awake(there)) - found.ends_s(*_awake(present(after, loads))), 0.0)
    reason = (
        f"{pool} had {counted(owed, 'request')} on {counted(now_slots, 'slot')}, {_about(left)} of work with what was to come, and {other} "
        f"had {has}, {_about(spare)}"
    )
    names, more = told_slots(plan, after)
    move = Move(
        generation=after.generation,
        step=at.step,
        seq=at.seq,
        kind=MoveKind.LEND if _gained(before_split, after_split, base_there) else MoveKind.RETURN,
        before=part_of(before_split),
        after=part_of(after_split),
        slots=names,
        more_slots=more,
        reason=reason,
        idle={"rollout_owed": float(found.rollout_owed), "reward_owed": float(found.reward_owed)},
        gain_s=round(gain, 3),
        cost_s=round(cost_s, 3),
        by=at.by,
        time=at.time,
        within=True,
        state="would" if at.dry else "done",
    )
    update = {"reason": f"{plan.reason.split(';')[0]}; then {reason}", "lent_from": None if is_back else part_of(base)}
    return Proposal(move, None if at.dry else after.model_copy(update=update))


def _about(seconds: float) -> str:
    return f"about {seconds:.1f} s" if seconds >= 0.1 else "less than 0.1 s"


def _base_there(plan: Plan, there: Plan) -> Split:
    """What the slots that are there began the step with: nobody knows which of them are lent, so all that is lent is taken to be among them."""
    now, all_now, base = split_of(there), split_of(plan), base_split(plan)
    lent = all_now.reward - base.reward
    return replace(now, rollout=now.rollout + lent, reward=now.reward - lent)


def _gained(before: Split, after: Split, base: Split) -> bool:
    """Whether the pool that gets slots has more than at the beginning then: what brings it nearer to that is a return."""
    if after.reward > before.reward:
        return after.reward > base.reward
    return after.rollout > base.rollout


def is_settled(plan: Plan, loads: Loads, nodes: Collection[str]) -> bool:
    """Whether every engine on `nodes`, which are there, is as the plan says: what is to be awake is asked, and what is to sleep sleeps."""
    told = loads.by_key()
    for place in (place for place in plan.engines if place.node in nodes):
        known = told.get(place.key)
        if known is None or not (known.asleep if place.asleep else known.ready):
            return False
    return True


def _awake(plan: Plan) -> tuple[int, int]:
    """Engines of rollout, and places of judges'."""
    awake = roles(plan)
    return len(awake["rollout"]), len(awake["reward"])


def _firsts(plan: Plan, loads: Loads, rows: int, *, to_judges: bool, needed: frozenset[str]) -> list[Slot]:
    """The replicas that can change over, by their first slots, those with least to do first. On each the engine that is to wake sleeps, and is
    well."""
    told = loads.by_key()
    on: dict[Slot, list[EnginePlace]] = {}
    for place in plan.engines:
        on.setdefault(Slot(place.node, place.slot), []).append(place)
    awake = Counter(place.node for place in plan.engines if not place.judge and not place.asleep)
    judges = Counter(place.judge for place in plan.engines if place.judge and not place.asleep)
    owed: Counter[str] = Counter()
    for one in loads.of("rollout"):
        owed[one.node] += one.running + one.waiting
    found: list[tuple[int, Slot]] = []
    for slot, places in on.items():
        leaves = [p for p in places if not p.asleep and bool(p.judge) != to_judges]
        comes = [p for p in places if p.asleep and bool(p.judge) == to_judges]
        ready = [told.get(p.key) for p in comes]
        if leaves and comes and all(one is not None and one.asleep for one in ready):
            busy = [told.get(p.key) for p in leaves]
            found.append((sum(one.running + one.waiting for one in busy if one is not None), slot))
    chosen = []
    for _, slot in sorted(found):
        if to_judges:
            if awake[slot.node] <= (1 if slot.node in needed else 0) or sum(awake.values()) <= 1:
                continue
            if (awake[slot.node] - 1) * rows < owed[slot.node]:
                continue  # its requests stay on the node, whose controller asks no engine of another
            awake[slot.node] -= 1
        else:
            leaving = [place.judge for place in on[slot] if place.judge and not place.asleep]
            if any(judges[judge] <= 1 for judge in leaving):
                continue
            judges.subtract(leaving)
        chosen.append(slot)
    return chosen
