"""Elastic reassignment within a step: whether replicas are lent from rollout to the judges or back, and which.

A request is hardly faster on another replica once it runs beside few others; a pool's end moves in proportion to what a token costs at
its load. So each number of replicas that could change over gives its own end of the step: the later end of the two pools. The number with
the earliest end is lent (`replicas_to_lend`), if that is earlier by more than it costs to put one model to sleep and wake the other. A
pool with outstanding requests keeps one replica.

The tokens that a pool has left are computed from counts, for the progress of a request is not known: how many of the step's responses are
outstanding, and how long those of the newest steps were. What the last ones have left is the expected excess over the finished ones.
Where other responses to the same prompts are finished (`gcore.rollout.length_prediction`), those lengths are scaled. Before a step was measured
nothing is lent. The slots lent are those with the least load, and each pool keeps one wherever it needs one.

The rule itself works on numbers only: the simulator compiles it, and a live cluster calls it as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

from gcore.ledger.records.cluster import Slot
from gcore.ledger.records.job import EnginePlace, Move, MoveKind, Plan
from placement.assign import POOLS, plan_roles, split_of
from placement.measurements import MeasuredStep
from placement.moves import DecisionContext, MoveProposal, base_split, changed_slots, split_part
from placement.slots import Split, count_noun

LEAST_GAIN = 0.06
"""Share of the time left that must be gained besides the cost: less is within what such estimates are wrong by."""


def replicas_to_lend(
    cost_s: float,
    rollout_awake: int,
    rollout_owed: float,
    rollout_saturating: float,
    rollout_left_s: float,
    reward_awake: int,
    reward_owed: float,
    reward_saturating: float,
    reward_left_s: float,
) -> int:
    """How many replicas change over now: above 0 from rollout to the judges, below 0 back.

    `owed`: requests that run or wait, with those of the judges that rollout's will become; `saturating`: how many of them one replica
    runs when a token takes twice what it takes alone; `left_s`: seconds until the pool is done with what it owes, as it is.
    """
    if rollout_awake + reward_awake < 1:
        return 0
    now = max(rollout_left_s, reward_left_s)
    least = -reward_awake if reward_owed <= 0 else 1 - reward_awake
    most = rollout_awake if rollout_owed <= 0 else rollout_awake - 1
    # What a token takes, beside what it takes alone, at the load there is.
    rollout_pace = rollout_saturating + max(rollout_owed / max(rollout_awake, 1), 1.0)
    reward_pace = reward_saturating + max(reward_owed / max(reward_awake, 1), 1.0)
    best, soonest = 0, now
    for count in range(least, most + 1):
        rollout, reward = rollout_awake - count, reward_awake + count
        ends = 0.0
        if rollout_owed > 0:
            ends = rollout_left_s * (rollout_saturating + max(rollout_owed / rollout, 1.0)) / rollout_pace
        if reward_owed > 0:
            ends = max(ends, reward_left_s * (reward_saturating + max(reward_owed / reward, 1.0)) / reward_pace)
        # Of several that end as soon, the one that moves least.
        if ends < soonest or (ends == soonest and abs(count) < abs(best)):
            best, soonest = count, ends
    return best if now - soonest > cost_s + LEAST_GAIN * now else 0


def remaining_s(
    owed: float,
    engines: int,
    rows: int,
    tokens: float,
    residual: float,
    longest: float,
    alone_s: float,
    saturating: float,
) -> float:
    """Seconds until `engines` are done with what a pool owes; what does not run yet comes after what does.

    `rows`: requests that an engine runs at once, at most; `tokens`: of a request; `residual`: that one which runs has still to come, on
    average; `longest`: that the last of them has, beside which go the others', once; `alone_s`: of a token of a request alone;
    `saturating`: as many requests make it twice that.
    """
    if owed <= 0:
        return 0.0
    each = max(owed / max(engines, 1), 1.0)
    running = min(each, float(rows))
    queue = (each / running - 1.0) * tokens
    return alone_s * (longest + queue + (residual + queue) * running / saturating)


def doubling_requests(
    owed: float, engines: int, rows: int, tokens: float, residual: float, longest: float, saturating: float
) -> float:
    """How many requests on each replica put the pool's end off to twice what it were alone: the `saturating` that `lent` takes."""
    each = max(owed / max(engines, 1), 1.0)
    queue = (each / min(each, float(rows)) - 1.0) * tokens
    others = residual + queue
    return saturating * (longest + queue) / others if others > 0 else saturating


def mean_tokens_left(owed: float, begun: float, tokens: float, residual: float) -> float:
    """Tokens that a request has still to come, on average over those that have begun and those that have not."""
    return tokens - (tokens - residual) * min(begun / owed, 1.0) if owed > 0 else tokens


def spare_replicas(
    count: int,
    rollout_awake: int,
    rollout_owed: float,
    rollout_rows: int,
    reward_awake: int,
    reward_asked: float,
    reward_rows: int,
) -> int:
    """Of `count` replicas as many as change over: who gives keeps so many that none of its requests waits which ran. `asked`: what the
    judges have now."""
    if count > 0:
        return max(min(count, rollout_awake - ceil(rollout_owed / rollout_rows)), 0)
    return min(max(count, ceil(reward_asked / reward_rows) - reward_awake), 0)


STEPS = 2
"""Newest steps from which lengths are."""


@dataclass(frozen=True, slots=True)
class EngineRows:
    """Requests that an engine of each pool runs at once, at most."""

    rollout: int
    reward: int


@dataclass(frozen=True, slots=True)
class PoolSpeed:
    """Of a pool's engines: seconds of a token alone, and how many requests make it twice that; tokens of one request; `rows`: requests
    that one runs at once, at most. `tail`: of a pool whose requests are all there when a step begins, by how many of them are left, what
    the last has still to come and what they have on average; none where they come one after another."""

    alone_s: float
    saturating: float
    tokens: float
    residual: float
    """Tokens that a request which runs has still to come, on average: long ones are met more often."""
    rows: int
    tail: tuple[tuple[float, float], ...] = ()

    def to_come(self, owed: float, begun: float) -> tuple[float, float, float]:
        """Tokens of a request, of those that run on average, and of the one that ends last."""
        if self.tail:
            longest, residual = self.tail[min(int(owed), len(self.tail) - 1)]
            return self.tokens, residual, longest
        each = mean_tokens_left(owed, begun, self.tokens, self.residual)
        return each, each, each

    def left_s(self, owed: float, begun: float, engines: int) -> float:
        """Seconds until `engines` are done with what is owed, of which so many have begun; what does not run yet comes after what does."""
        return remaining_s(owed, engines, self.rows, *self.to_come(owed, begun), self.alone_s, self.saturating)

    def doubling(self, owed: float, begun: float, engines: int) -> float:
        """What `lent` takes as `saturating`."""
        return doubling_requests(owed, engines, self.rows, *self.to_come(owed, begun), self.saturating)


def response_tail(steps: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    """By how many of a step's responses are left, what the last has still to come and what they have on average: the mean over steps,
    whose responses were all asked for at once."""
    sizes = [len(step) for step in steps if step]
    found = [(0.0, 0.0)] * (min(sizes, default=0) + 1)
    for step in (sorted(step, reverse=True) for step in steps if step):
        total = 0.0
        for left, length in enumerate(step[: len(found) - 1], start=1):
            total += length
            made = step[left] if left < len(step) else 0.0
            longest, mean = found[left]
            share = 1.0 / len(sizes)
            found[left] = (longest + share * (step[0] - made), mean + share * (total / left - made))
    return tuple(found)


def pool_speed(history: Sequence[MeasuredStep], pool: str, rows: int, since: int) -> PoolSpeed | None:
    """What the newest steps tell, by the law that steps are forecast with; None: nothing. `since`: the step since which the pool has
    its pace (`PaceTracker`)."""
    from placement.laws import fit_decode_law  # numpy: a daemon that no job lends in is started without it

    newest = history[-STEPS:]
    if pool == "rollout":
        lengths = [tokens for step in newest for tokens in step.lengths]
    else:
        lengths = [tokens / step.asked_per_response for step in newest for tokens in step.judged]
    is_measured = any(one.pool == pool for step in newest for one in step.speed)
    if not is_measured or not lengths or fmean(lengths) <= 0:
        return None
    law = fit_decode_law(history, pool, rows, since)
    mean = fmean(lengths)
    residual = fmean(tokens * tokens for tokens in lengths) / (2.0 * mean)
    tail = response_tail([step.lengths for step in newest]) if pool == "rollout" else ()
    return PoolSpeed(law.token_s, max(law.token_s / law.sequence_s, 1.0), mean, max(residual, mean / 2.0), rows, tail)


@dataclass(frozen=True, slots=True)
class PoolSpeeds:
    """Of both pools. `asked_each`: requests of the judges that a response comes to."""

    rollout: PoolSpeed
    reward: PoolSpeed
    asked_each: float = 1.0


def pool_speeds(
    history: Sequence[MeasuredStep], rows: EngineRows, rollout_since: int, reward_since: int
) -> PoolSpeeds | None:
    """Of both; None: of one nothing is known. The steps since which they have their paces are as for `pool_speed`."""
    rollout = pool_speed(history, "rollout", rows.rollout, rollout_since)
    reward = pool_speed(history, "reward", rows.reward, reward_since)
    if rollout is None or reward is None:
        return None
    # Of a step that is not booked whole nobody knows how often its judges were asked.
    return PoolSpeeds(rollout, reward, fmean(step.asked_per_response for step in history[-STEPS:] if step.judged))


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
class JobLoads:
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


def present_plan(plan: Plan, loads: JobLoads) -> Plan:
    """The plan without the engines that nobody told of: their nodes are away, or they have not come up."""
    told = loads.by_key()
    there = tuple(place for place in plan.engines if place.key in told)
    return plan.model_copy(update={"engines": there})


@dataclass(frozen=True, slots=True)
class LendingDecision:
    """What is lent now: above 0 from rollout to the judges, below 0 back, and the seconds each pool had left."""

    count: int
    speeds: PoolSpeeds
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


def scale_tail(rollout: PoolSpeed, loads: JobLoads) -> PoolSpeed:
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


def decide_lending(
    plan: Plan, loads: JobLoads, speeds: PoolSpeeds, cost_s: float, rows: EngineRows
) -> LendingDecision | None:
    """What is to be lent, of the engines that are there (`present_plan`). None: nothing can be, as where engines of the two pools span different
    numbers of slots."""
    awake, (here, there) = plan_roles(plan), _awake(plan)
    alike = len({len(replica) for pool in POOLS if pool != "train" for replica in awake[pool]}) == 1
    if split_of(plan).mode == "colocated" or not here or not there or not alike:
        return None
    speeds = replace(speeds, rollout=scale_tail(speeds.rollout, loads))
    rollout, reward = speeds.rollout, speeds.reward
    owed, asked = loads.owed("rollout"), loads.owed("reward")
    to_come = asked + owed * speeds.asked_each  # every response that is still made will be judged
    begun = float(min(asked, there * reward.rows))
    rollout_left = rollout.left_s(owed, owed, here)
    reward_left = reward.left_s(to_come, begun, there)
    count = replicas_to_lend(
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
    count = spare_replicas(count, here, float(owed), rows.rollout, there, float(asked), rows.reward)
    return LendingDecision(count, speeds, rollout_left, reward_left, owed, asked)


def make_lending_move(
    plan: Plan,
    loads: JobLoads,
    speeds: PoolSpeeds,
    cost_s: float,
    needed: frozenset[str],
    rows: EngineRows,
    at: DecisionContext,
) -> MoveProposal | None:
    """The move by which slots are lent now. `needed`: nodes that keep an engine of the policy, for their prompts are answered there."""
    there = present_plan(plan, loads)
    found = decide_lending(there, loads, speeds, cost_s, rows)
    if found is None or found.count == 0:
        return None
    to_judges = found.count > 0
    slots = _firsts(there, loads, rows.rollout, to_judges=to_judges, needed=needed)[: abs(found.count)]
    if not slots:
        return None
    engines = tuple(
        place.model_copy(update={"asleep": to_judges != bool(place.judge)}) if place.on[0] in slots else place
        for place in plan.engines
    )
    base, base_there = base_split(plan), _base_there(plan, there)
    after = plan.model_copy(update={"generation": plan.generation + 1, "engines": engines})
    is_back = split_of(after) == base
    before_split, after_split = split_of(there), split_of(present_plan(after, loads))
    pool, other = ("the judges", "rollout") if to_judges else ("rollout", "the judges")
    left, spare = (
        (found.reward_left_s, found.rollout_left_s) if to_judges else (found.rollout_left_s, found.reward_left_s)
    )
    owed, has = (found.reward_owed, found.rollout_owed) if to_judges else (found.rollout_owed, found.reward_owed)
    now_slots = before_split.reward if to_judges else before_split.rollout
    gain = max(found.ends_s(*_awake(there)) - found.ends_s(*_awake(present_plan(after, loads))), 0.0)
    reason = (
        f"{pool} had {count_noun(owed, 'request')} on {count_noun(now_slots, 'slot')}, {_about(left)} of work with what was to come, and {other} "
        f"had {has}, {_about(spare)}"
    )
    names, more = changed_slots(plan, after)
    move = Move(
        generation=after.generation,
        step=at.step,
        seq=at.seq,
        kind=MoveKind.LEND if _gained(before_split, after_split, base_there) else MoveKind.RETURN,
        before=split_part(before_split),
        after=split_part(after_split),
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
    update = {
        "reason": f"{plan.reason.split(';')[0]}; then {reason}",
        "lent_from": None if is_back else split_part(base),
    }
    return MoveProposal(move, None if at.dry else after.model_copy(update=update))


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


def follows_plan(plan: Plan, loads: JobLoads, nodes: Collection[str]) -> bool:
    """Whether every engine on `nodes`, which are there, is as the plan says: what is to be awake is asked, and what is to sleep sleeps."""
    told = loads.by_key()
    for place in (place for place in plan.engines if place.node in nodes):
        known = told.get(place.key)
        if known is None or not (known.asleep if place.asleep else known.ready):
            return False
    return True


def _awake(plan: Plan) -> tuple[int, int]:
    """Engines of rollout, and places of judges'."""
    awake = plan_roles(plan)
    return len(awake["rollout"]), len(awake["reward"])


def _firsts(plan: Plan, loads: JobLoads, rows: int, *, to_judges: bool, needed: frozenset[str]) -> list[Slot]:
    """The replicas that can change over, by their first slots, those with least to do first. On each the engine that is to wake sleeps, and is
    well."""
    told = loads.by_key()
    on: dict[Slot, list[EnginePlace]] = {}
    for place in plan.engines:
        on.setdefault(place.on[0], []).append(place)
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
