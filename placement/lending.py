"""Whether slots should be lent within a step, from rollout to the judges or back: a rule over what is there at a moment. Pure.

A pool needs as many replicas as its outstanding requests saturate; what it has beyond that gains it nothing, for a request that runs
alone is not made faster by another replica. Such a replica is lent to the pool that is behind, if what the step gains by it is more
than what it costs to put one model to sleep and wake the other.

Numbers only, no objects: the simulator compiles this very function, and a live cluster calls it as it is.
"""

from __future__ import annotations


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
    runs before a further one costs as much as it gives; `left_s`: seconds until the pool is done with what it owes, as it is.
    """
    spare_rollout = rollout_awake - _needed(rollout_owed, rollout_saturating)
    spare_reward = reward_awake - _needed(reward_owed, reward_saturating)
    if spare_rollout > 0 and reward_owed > reward_awake * reward_saturating:
        gain = reward_left_s * (1.0 - reward_awake / (reward_awake + spare_rollout))
        return spare_rollout if gain > cost_s else 0
    if spare_reward > 0 and rollout_owed > rollout_awake * rollout_saturating:
        gain = rollout_left_s * (1.0 - rollout_awake / (rollout_awake + spare_reward))
        return -spare_reward if gain > cost_s else 0
    return 0


def _needed(owed: float, saturating: float) -> int:
    whole = int(owed / saturating)
    return whole + (owed > whole * saturating)
