"""Elastic reassignment within a step ("lending"): decide how many and which replicas move from rollout to the judges
or back.

The seconds per token grow with the requests per replica, so the time that a pool still needs is proportional to the
seconds per token at its load. For each number of replicas to reassign, the rule computes when the later of the two
pools finishes. It chooses the number with the earliest end (`replicas_to_lend`), if that saves more than the cost of
putting one model to sleep and waking the other. A pool with outstanding requests keeps one replica.

The progress of a request is not known. So the remaining tokens of a pool are estimated from counts: how many responses
of the step are outstanding, and how much longer than the finished ones the longest responses of the newest steps were.
If other responses to the same prompts are finished (`gcore.rollout.length_prediction`), the estimate is scaled by their
lengths. Nothing is lent before the first measured step. The replicas with the fewest requests are lent, and each node
whose prompts need a rollout engine keeps one.

The rule works on numbers only: the simulator compiles it, and a live cluster calls the same code.
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
"""Share of the remaining time that lending must gain in addition to its cost. A smaller gain is within the error of the
estimates."""


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
    """Return the number of replicas to reassign now: above 0 from rollout to the judges, below 0 from the judges to
    rollout.

    `cost_s`: seconds of putting one model to sleep and waking the other. Of each pool: `awake`: its replicas. `owed`:
    its running and waiting requests; for the judges also the requests that rollout's outstanding responses will cause.
    `saturating`: concurrent requests per replica at which a token takes twice as long as for a request alone. `left_s`:
    seconds until the pool finishes with its present replicas.
    """
    if rollout_awake + reward_awake < 1:
        return 0
    now = max(rollout_left_s, reward_left_s)
    least = -reward_awake if reward_owed <= 0 else 1 - reward_awake
    most = rollout_awake if rollout_owed <= 0 else rollout_awake - 1
    # Time of a token at the present load, relative to the time of a token alone.
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
        # Of several counts with the same end, choose the smallest move.
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
    """Return the seconds until `engines` finish the `owed` outstanding requests of a pool. Waiting requests run after
    the running ones.

    `rows`: maximum of concurrent requests per engine. `tokens`: mean tokens of a whole request. `residual`: mean
    remaining tokens of a running request. `longest`: remaining tokens of the request that ends last; the others run
    beside it. `alone_s`: seconds per token of a request that runs alone. `saturating`: concurrent requests that double
    the time of a token.
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
    """Return the number of requests per replica that doubles the time until the pool finishes (`saturating` of
    `replicas_to_lend`). Parameters as in `remaining_s`; `saturating` there is about the time of a token."""
    each = max(owed / max(engines, 1), 1.0)
    queue = (each / min(each, float(rows)) - 1.0) * tokens
    others = residual + queue
    return saturating * (longest + queue) / others if others > 0 else saturating


def mean_tokens_left(owed: float, begun: float, tokens: float, residual: float) -> float:
    """Return the mean remaining tokens over all `owed` requests, of which `begun` are running with a mean of `residual`
    remaining tokens, and the others still need all of their `tokens`."""
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
    """Reduce `count` (the result of `replicas_to_lend`) so that no running request of the giving pool has to wait.
    `rows`: maximum of concurrent requests per engine. `reward_asked`: requests that the judges have at present."""
    if count > 0:
        return max(min(count, rollout_awake - ceil(rollout_owed / rollout_rows)), 0)
    return min(max(count, ceil(reward_asked / reward_rows) - reward_awake), 0)


STEPS = 2
"""Number of newest steps whose response and judgement lengths are used."""


@dataclass(frozen=True, slots=True)
class EngineRows:
    """Maximum number of concurrent requests per engine, for each pool."""

    rollout: int
    reward: int


@dataclass(frozen=True, slots=True)
class PoolSpeed:
    """Speed of a pool's engines and lengths of its requests.

    `alone_s`: seconds per token of a request that runs alone. `saturating`: concurrent requests that double it.
    `tokens`: mean tokens of a request. `rows`: maximum of concurrent requests per engine. `tail`: for a pool whose
    requests all exist when a step begins (rollout); item n is for n outstanding requests: the remaining tokens of the
    one that ends last, and the mean remaining tokens. Empty for a pool whose requests arrive one after another, and if all
    have equal lengths, as pictures have denoising steps: then they end in the order in which they start.
    """

    alone_s: float
    saturating: float
    tokens: float
    residual: float
    """Mean remaining tokens of a running request. A random running request is likelier to be a long one."""
    rows: int
    tail: tuple[tuple[float, float], ...] = ()

    def to_come(self, owed: float, begun: float) -> tuple[float, float, float]:
        """Return three numbers of tokens: mean of a whole request; mean that a running request has left; those that the
        request that ends last has left. `owed`: outstanding requests, of which `begun` are running."""
        if self.tail:
            longest, residual = self.tail[min(int(owed), len(self.tail) - 1)]
            return self.tokens, residual, longest
        each = mean_tokens_left(owed, begun, self.tokens, self.residual)
        return each, each, each

    def left_s(self, owed: float, begun: float, engines: int) -> float:
        """Return the seconds until `engines` finish `owed` requests, of which `begun` have started. Waiting requests
        run after the running ones."""
        return remaining_s(owed, engines, self.rows, *self.to_come(owed, begun), self.alone_s, self.saturating)

    def doubling(self, owed: float, begun: float, engines: int) -> float:
        """Return the number of requests per replica that doubles the time until the pool finishes (the `saturating`
        argument of `replicas_to_lend`). Parameters as in `left_s`."""
        return doubling_requests(owed, engines, self.rows, *self.to_come(owed, begun), self.saturating)


def response_tail(steps: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    """Return the `tail` of `PoolSpeed`: item n has, for n outstanding responses, the remaining tokens of the one that
    ends last and the mean remaining tokens. `steps`: response lengths of each step; the result is the mean over them.
    All responses of a step are assumed to start together."""
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
    """Estimate the speed of a pool from the newest steps, with the law that step forecasts use; None if nothing is
    measured. `rows`: maximum of concurrent requests per engine. `since`: the step since which the pool has its present
    speed (`PaceTracker`)."""
    from placement.laws import fit_decode_law  # imports numpy: a daemon without lending does not load it

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
    varied = pool == "rollout" and max(lengths) > min(lengths)
    tail = response_tail([step.lengths for step in newest]) if varied else ()
    return PoolSpeed(law.token_s, max(law.token_s / law.sequence_s, 1.0), mean, max(residual, mean / 2.0), rows, tail)


@dataclass(frozen=True, slots=True)
class PoolSpeeds:
    """Speeds of both pools. `asked_each`: mean number of judge requests per response."""

    rollout: PoolSpeed
    reward: PoolSpeed
    asked_each: float = 1.0


def pool_speeds(
    history: Sequence[MeasuredStep], rows: EngineRows, rollout_since: int, reward_since: int
) -> PoolSpeeds | None:
    """Estimate the speeds of both pools; None if one is not known. `rollout_since`, `reward_since`: `since` of
    `pool_speed`."""
    rollout = pool_speed(history, "rollout", rows.rollout, rollout_since)
    reward = pool_speed(history, "reward", rows.reward, reward_since)
    if rollout is None or reward is None:
        return None
    # If the account of a step is incomplete, its number of judge requests is not known.
    return PoolSpeeds(rollout, reward, fmean(step.asked_per_response for step in history[-STEPS:] if step.judged))


MOST_OFF = 2.0
"""Limit of the factor by which finished responses to the same prompts change the expected lengths: from 1/2 to 2."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one engine as its node reports it. `judge`: its judge model; empty: a rollout engine. `running`,
    `waiting`: requests. `ready`: it is awake and receives requests. `asleep`: it has released its memory."""

    node: str
    slot: str
    judge: str
    running: int
    waiting: int
    ready: bool
    asleep: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies the engine in a plan: node, first slot, judge."""
        return self.node, self.slot, self.judge


@dataclass(frozen=True, slots=True)
class JobLoads:
    """Load of all engines of a job at one moment.

    `unseated`: requests that no engine has yet, by pool. `foreseen`: rollout requests whose length is predicted from
    finished responses to the same prompts. `left_tokens`: predicted remaining tokens of these together.
    """

    engines: tuple[EngineLoad, ...]
    unseated: Mapping[str, int]
    left_tokens: float = 0.0
    foreseen: int = 0

    def by_key(self) -> dict[tuple[str, str, str], EngineLoad]:
        """Return the engines by their key in the plan: node, first slot, judge."""
        return {one.key: one for one in self.engines}

    def of(self, pool: str) -> list[EngineLoad]:
        """Return the engines of a pool."""
        return [one for one in self.engines if bool(one.judge) == (pool == "reward")]

    def owed(self, pool: str) -> int:
        """Count the requests of a pool, with and without an engine."""
        return sum(one.running + one.waiting for one in self.of(pool)) + self.unseated.get(pool, 0)


def present_plan(plan: Plan, loads: JobLoads) -> Plan:
    """Return the plan without the engines that no node reported: their nodes are absent, or they have not started."""
    loads_by_place = loads.by_key()
    there = tuple(place for place in plan.engines if place.key in loads_by_place)
    return plan.model_copy(update={"engines": there})


@dataclass(frozen=True, slots=True)
class LendingDecision:
    """Result of the lending rule. `count`: replicas to lend now, above 0 from rollout to the judges, below 0 from the
    judges to rollout. `left_s`: seconds until each pool finishes without that. `owed`: outstanding requests."""

    count: int
    speeds: PoolSpeeds
    rollout_left_s: float
    reward_left_s: float
    rollout_owed: int
    reward_owed: int

    def ends_s(self, rollout: int, reward: int) -> float:
        """Return the seconds until both pools finish if they have these numbers of engines."""
        to_come = self.reward_owed + self.rollout_owed * self.speeds.asked_each
        mine, theirs = self.speeds.rollout, self.speeds.reward
        owed, begun = float(self.rollout_owed), float(min(self.reward_owed, reward * theirs.rows))
        return max(mine.left_s(owed, owed, rollout), theirs.left_s(to_come, begun, reward))


def scale_tail(rollout: PoolSpeed, loads: JobLoads) -> PoolSpeed:
    """Scale the `tail` of rollout's speed so that its mean remaining tokens match those predicted for the outstanding
    requests. A request without a prediction counts with the mean length; if most have none, nothing changes."""
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
    """Apply the lending rule. `plan`: without absent engines (`present_plan`). `cost_s`: seconds to reassign a replica.
    Return None if nothing can be lent: the split is co-located, a pool has no engine, or engines of the two pools span
    different numbers of slots."""
    awake, (here, there) = plan_roles(plan), _awake(plan)
    alike = len({len(replica) for pool in POOLS if pool != "train" for replica in awake[pool]}) == 1
    if split_of(plan).mode == "colocated" or not here or not there or not alike:
        return None
    speeds = replace(speeds, rollout=scale_tail(speeds.rollout, loads))
    rollout, reward = speeds.rollout, speeds.reward
    owed, asked = loads.owed("rollout"), loads.owed("reward")
    to_come = asked + owed * speeds.asked_each  # every outstanding response will be judged
    begun, generating = float(min(asked, there * reward.rows)), float(min(owed, here * rollout.rows))
    rollout_left = rollout.left_s(owed, generating, here)
    reward_left = reward.left_s(to_come, begun, there)
    count = replicas_to_lend(
        cost_s,
        here,
        float(owed),
        rollout.doubling(owed, generating, here),
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
    """Return the change of the plan that the lending rule wants now; None if there is none. `needed`: nodes that keep a
    rollout engine, because their own engines answer their prompts. `at`: step, author and time of the decision."""
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
        f"{pool} had {count_noun(owed, 'request')} on {count_noun(now_slots, 'slot')}, {_about(left)} of work including expected requests, and {other} "
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
    """Return the split at the beginning of the step, counting only engines in `there` (the plan without absent
    engines). The plan does not record which slots are lent, so all of them are assumed to be present."""
    now, all_now, base = split_of(there), split_of(plan), base_split(plan)
    lent = all_now.reward - base.reward
    return replace(now, rollout=now.rollout + lent, reward=now.reward - lent)


def _gained(before: Split, after: Split, base: Split) -> bool:
    """Whether the pool that gets slots has more of them afterwards than at the beginning of the step (`base`). If not,
    the change is a return and not a loan."""
    if after.reward > before.reward:
        return after.reward > base.reward
    return after.rollout > base.rollout


def follows_plan(plan: Plan, loads: JobLoads, nodes: Collection[str]) -> bool:
    """Whether every engine on the present `nodes` has reached the state that the plan sets: those that should be awake
    receive requests, and those that should sleep do."""
    loads_by_place = loads.by_key()
    for place in (place for place in plan.engines if place.node in nodes):
        known = loads_by_place.get(place.key)
        if known is None or not (known.asleep if place.asleep else known.ready):
            return False
    return True


def _awake(plan: Plan) -> tuple[int, int]:
    """Count the replicas with an awake rollout engine, and those with an awake judge engine."""
    awake = plan_roles(plan)
    return len(awake["rollout"]), len(awake["reward"])


def _firsts(plan: Plan, loads: JobLoads, rows: int, *, to_judges: bool, needed: frozenset[str]) -> list[Slot]:
    """List the replicas that can be reassigned, each by its first slot, those with the fewest requests first. `rows`:
    maximum of concurrent requests per rollout engine. On each of them the engine to be woken exists and sleeps."""
    loads_by_place = loads.by_key()
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
        ready = [loads_by_place.get(p.key) for p in comes]
        if leaves and comes and all(one is not None and one.asleep for one in ready):
            busy = [loads_by_place.get(p.key) for p in leaves]
            found.append((sum(one.running + one.waiting for one in busy if one is not None), slot))
    chosen = []
    for _, slot in sorted(found):
        if to_judges:
            if awake[slot.node] <= (1 if slot.node in needed else 0) or sum(awake.values()) <= 1:
                continue
            if (awake[slot.node] - 1) * rows < owed[slot.node]:
                continue  # the controller of a node uses only its own engines, so the node must keep one
            awake[slot.node] -= 1
        else:
            leaving = [place.judge for place in on[slot] if place.judge and not place.asleep]
            if any(judges[judge] <= 1 for judge in leaving):
                continue
            judges.subtract(leaving)
        chosen.append(slot)
    return chosen
