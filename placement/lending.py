"""Whether slots should be lent within a step, from rollout to the judges or back: a rule over what is there at a moment. Pure.

A request is not made faster by another replica once it runs beside few others; a pool's end is put off in proportion to what a token
of it costs at its load. So each number of replicas that could change over has its own end of the step: the later one of the two pools'.
The number whose end is earliest is lent, if it comes earlier by more than it costs to put one model to sleep and wake the other. A
pool that owes anything keeps one replica.

How much a pool has left is worked out from counts alone: nobody knows how far a request is.

Numbers only, no objects: the simulator compiles these very functions, and a live cluster calls them as they are. They forecast nothing.
"""

from __future__ import annotations

from math import ceil

LEAST_GAIN = 0.06
"""Share of the time left that must be gained besides the cost: less is within what such estimates are wrong by."""


def lent(
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


def left_s(
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


def doubling(
    owed: float, engines: int, rows: int, tokens: float, residual: float, longest: float, saturating: float
) -> float:
    """How many requests on each replica put the pool's end off to twice what it were alone: the `saturating` that `lent` takes."""
    each = max(owed / max(engines, 1), 1.0)
    queue = (each / min(each, float(rows)) - 1.0) * tokens
    others = residual + queue
    return saturating * (longest + queue) / others if others > 0 else saturating


def of_each(owed: float, begun: float, tokens: float, residual: float) -> float:
    """Tokens that a request has still to come, on average over those that have begun and those that have not."""
    return tokens - (tokens - residual) * min(begun / owed, 1.0) if owed > 0 else tokens


def spared(
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
