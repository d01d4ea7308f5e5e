"""Discrete-event simulation of a step's production: the replicas of one pool generate responses, those of another pool
judge them.

All requests of a replica progress at the same speed: one token of each takes `token_s + sequence_s * running` seconds,
times the replica's own factor. A waiting request goes to the replica with the fewest running ones, first come first
served. Time advances from the end of one request to the next, so the simulation is exact for this model. Every
`every_s` seconds replicas may be lent, by the rule of `placement.lending` or by a schedule. A lent replica serves
nothing for `cost_s` seconds; its requests go to the front of the queue and keep their tokens. The rule knows earlier
measurements and present counts only. Late replicas (lent in the previous step) get requests at once and begin with them
when they arrive; nothing is lent before that.

The functions use numbers and arrays only, compiled by numba if installed (the extra `simulate`). Without numba the
results are the same, about 100 times slower.

Shared arrays, with one column or row per replica `k`:

- `clock`, [4, replicas]. `MADE`: tokens that each running request has made since the replica was last empty. `SEEN`:
  the time up to which that is computed. `NEXT`: when its next request ends. `READY`: when it has changed its pool.
- `seats`, [4, replicas]. `POOL`; `RUNNING`: number of running requests; `FIRST`: the seat whose request ends next;
  `TARGET`: the pool that it changes to. A seat is an index from 0 to `RUNNING` - 1.
- `aims`, [replicas, seats]: value of `MADE` at which the request ends. `whose`: index of the request.
- `line`, [2, n]: queue of waiting requests by pool, from `ends[pool, 0]` to `ends[pool, 1]`. `left`: remaining tokens
  of each waiting request.
- `laws`, [2, 2]: `token_s` and `sequence_s` by pool. `pace`: factor of each replica. `most`: maximum of running
  requests by pool. `spans`: replica-seconds by pool and number of running requests.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from placement.laws import Floats
from placement.lending import doubling_requests, mean_tokens_left, remaining_s, replicas_to_lend, spare_replicas

P = ParamSpec("P")
R = TypeVar("R")
COMPILES = find_spec("numba") is not None


def compile_lazily(function: Callable[P, R]) -> Callable[P, R]:
    """Return a version of the function that numba compiles at its first call; without numba the function itself."""
    if not COMPILES:
        return function
    from numba import njit

    made: Callable[P, R] = njit(error_model="numpy")(function)
    return made


def compile_inline(function: Callable[P, R]) -> Callable[P, R]:
    """Return a version of the function that numba inlines into its callers, because passing many arrays would take
    longer than the body; without numba the function itself."""
    if not COMPILES:
        return function
    from numba import njit

    made: Callable[P, R] = njit(error_model="numpy", inline="always")(function)
    return made


Ints = NDArray[np.int64]
ROLLOUT, REWARD, SWITCHING = 0, 1, 2
MADE, SEEN, NEXT, READY = 0, 1, 2, 3
POOL, RUNNING, FIRST, TARGET = 0, 1, 2, 3
NEVER, BY_RULE, BY_SCHEDULE = 0, 1, 2

ALONE_S, SATURATING, TOKENS, RESIDUAL = 0, 1, 2, 3
"""Columns of the lending rule's input for a pool; the meaning is that of the arguments of
`placement.lending.remaining_s`. `ALONE_S` 0: nothing is known."""

_lent, _left_s, _spared = compile_lazily(replicas_to_lend), compile_lazily(remaining_s), compile_lazily(spare_replicas)
_doubling, _of_each = compile_lazily(doubling_requests), compile_lazily(mean_tokens_left)


@compile_inline
def _token_s(k: int, seats: Ints, laws: Floats, pace: Floats) -> float:
    """Return the seconds per token of each running request of replica `k`."""
    pool = seats[POOL, k]
    return float((laws[pool, 0] + laws[pool, 1] * seats[RUNNING, k]) * pace[k])


@compile_inline
def _catch_up(k: int, now: float, clock: Floats, seats: Ints, laws: Floats, pace: Floats, spans: Floats) -> None:
    """Advance the requests of replica `k` to the time `now`. A late replica does not advance before its arrival."""
    running, spent = seats[RUNNING, k], max(now - clock[SEEN, k], 0.0)
    if running > 0:
        clock[MADE, k] += spent / _token_s(k, seats, laws, pace)
        spans[seats[POOL, k], running] += spent
    clock[SEEN, k] = max(now, clock[SEEN, k])


@compile_inline
def _look_ahead(k: int, clock: Floats, seats: Ints, aims: Floats, laws: Floats, pace: Floats) -> None:
    """Compute when the next request of replica `k` ends; infinite if it has none."""
    clock[NEXT, k] = np.inf
    if seats[RUNNING, k] > 0:
        left = max(aims[k, seats[FIRST, k]] - clock[MADE, k], 0.0)
        clock[NEXT, k] = clock[SEEN, k] + left * _token_s(k, seats, laws, pace)


@compile_inline
def _sit(k: int, request: int, tokens: float, clock: Floats, seats: Ints, aims: Floats, whose: Ints) -> None:
    """Start a request with `tokens` remaining tokens on replica `k`. Call `_catch_up` first."""
    at = seats[RUNNING, k]
    if at == 0:
        clock[MADE, k] = 0.0
    aims[k, at] = clock[MADE, k] + tokens
    whose[k, at] = request
    if at == 0 or aims[k, at] < aims[k, seats[FIRST, k]]:
        seats[FIRST, k] = at
    seats[RUNNING, k] = at + 1


@compile_inline
def _stand_up(k: int, at: int, seats: Ints, aims: Floats, whose: Ints) -> int:
    """Remove the request in seat `at` of replica `k` and return its index. The request in the last seat takes its
    seat."""
    request = whose[k, at]
    last = seats[RUNNING, k] - 1
    aims[k, at], whose[k, at] = aims[k, last], whose[k, last]
    seats[RUNNING, k] = last
    first = 0
    for i in range(1, last):
        if aims[k, i] < aims[k, first]:
            first = i
    seats[FIRST, k] = first
    return int(request)


@compile_inline
def _admit(
    pool: int,
    now: float,
    line: Ints,
    ends: Ints,
    left: Floats,
    most: Ints,
    clock: Floats,
    seats: Ints,
    aims: Floats,
    whose: Ints,
    laws: Floats,
    pace: Floats,
    spans: Floats,
) -> None:
    """Start waiting requests of the pool until its queue is empty or its replicas are full."""
    room = True
    while room and ends[pool, 0] < ends[pool, 1]:
        k = -1
        for i in range(seats.shape[1]):
            if (
                seats[POOL, i] == pool
                and seats[RUNNING, i] < most[pool]
                and (k < 0 or seats[RUNNING, i] < seats[RUNNING, k])
            ):
                k = i
        if k < 0:
            room = False
            continue
        request = line[pool, ends[pool, 0]]
        ends[pool, 0] += 1
        _catch_up(k, now, clock, seats, laws, pace, spans)
        _sit(k, request, left[request], clock, seats, aims, whose)
        _look_ahead(k, clock, seats, aims, laws, pace)


@compile_lazily
def _leave(
    pool: int,
    count: int,
    now: float,
    cost_s: float,
    line: Ints,
    ends: Ints,
    left: Floats,
    clock: Floats,
    seats: Ints,
    aims: Floats,
    whose: Ints,
    laws: Floats,
    pace: Floats,
    spans: Floats,
) -> None:
    """Reassign `count` replicas of the pool to the other pool, those with the fewest requests. Their requests move to
    the front of the queue and keep their tokens."""
    for _ in range(count):
        k = -1
        for i in range(seats.shape[1]):
            if seats[POOL, i] == pool and (k < 0 or seats[RUNNING, i] < seats[RUNNING, k]):
                k = i
        if k < 0:
            return
        _catch_up(k, now, clock, seats, laws, pace, spans)
        while seats[RUNNING, k] > 0:
            at = seats[RUNNING, k] - 1
            tokens = max(aims[k, at] - clock[MADE, k], 0.0)
            request = _stand_up(k, at, seats, aims, whose)
            left[request] = tokens
            ends[pool, 0] -= 1
            line[pool, ends[pool, 0]] = request
        seats[POOL, k], seats[TARGET, k] = SWITCHING, 1 - pool
        clock[NEXT, k], clock[READY, k] = np.inf, now + cost_s


@compile_lazily
def _by_rule(cost_s: float, ends: Ints, known: Floats, tail: Floats, most: Ints, seats: Ints) -> int:
    """Evaluate the lending rule with the counts that a controller gets by polling every engine. Return the number of
    replicas to lend (`replicas_to_lend`); 0 while a replica changes its pool."""
    awake, asked = np.zeros(2, np.int64), np.zeros(2)
    for k in range(seats.shape[1]):
        if seats[POOL, k] == SWITCHING:
            return 0
        awake[seats[POOL, k]] += 1
        asked[seats[POOL, k]] += seats[RUNNING, k]
    for pool in range(2):
        if known[pool, ALONE_S] <= 0:
            return 0
        asked[pool] += ends[pool, 1] - ends[pool, 0]
    owed = np.array([asked[0], asked[1] + asked[0]])  # every outstanding response will be judged
    tokens = np.zeros(2)
    for i in range(2):
        begun = min(asked[i], float(awake[i] * most[i]))
        tokens[i] = _of_each(owed[i], begun, known[i, TOKENS], known[i, RESIDUAL])
    mean, longest = tokens.copy(), tokens.copy()
    if tail.shape[1] > 0:
        at = min(int(asked[0]), tail.shape[1] - 1)
        tokens[0], mean[0], longest[0] = known[0, TOKENS], tail[1, at], tail[0, at]
    left, slow = np.zeros(2), np.zeros(2)
    for i in range(2):
        left[i] = _left_s(
            owed[i], awake[i], most[i], tokens[i], mean[i], longest[i], known[i, ALONE_S], known[i, SATURATING]
        )
        slow[i] = _doubling(owed[i], awake[i], most[i], tokens[i], mean[i], longest[i], known[i, SATURATING])
    count = _lent(cost_s, awake[0], owed[0], slow[0], left[0], awake[1], owed[1], slow[1], left[1])
    return int(_spared(count, awake[0], asked[0], most[0], awake[1], asked[1], most[1]))


@compile_lazily
def play_batch(
    lengths: Floats,
    judged: Floats,
    pace: Floats,
    rollout: int,
    laws: Floats,
    most: Ints,
    how: int,
    cost_s: float,
    every_s: float,
    known: Floats,
    tail: Floats,
    schedule: Ints,
    late: int,
    late_s: float,
) -> tuple[float, float, Floats, int, int, float]:
    """Simulate the production of one batch: responses of `lengths` tokens, [n], all requested at once, and their
    judgements of `judged` tokens, [n] or none.

    The first `rollout` replicas generate, the others judge. `how`: `NEVER` lend replicas, or lend them `BY_RULE` or
    `BY_SCHEDULE`; `schedule`: replicas to lend at each evaluation. `known`, [2, 4], and `tail`, [2, left]: input of the
    rule by pool and by number of outstanding responses (remaining tokens of the last one and mean remaining tokens,
    `placement.lending.response_tail`). `late`: number of replicas that arrive `late_s` seconds late: above 0 generating
    ones, below 0 judging ones.

    Return the time when the last response was judged, the time when the last one was generated, replica-seconds by pool
    and number of running requests, the number of replicas that changed their pool, the number of replicas lent at the
    end (above 0: to the judges), and the seconds until those that are then changing their pool have finished.
    """
    count, replicas = lengths.shape[0], pace.shape[0]
    room = max(most[0], most[1])
    clock = np.zeros((4, replicas))
    clock[NEXT, :] = np.inf
    seats = np.zeros((4, replicas), np.int64)
    seats[POOL, rollout:] = REWARD
    clock[SEEN, rollout - max(late, 0) : rollout + max(-late, 0)] = late_s
    aims, whose = np.zeros((replicas, room)), np.zeros((replicas, room), np.int64)
    left = lengths.copy()
    # A queue begins in the middle of the array: aborted requests go to its front.
    line, ends = np.zeros((2, 2 * count), np.int64), np.full((2, 2), count)
    line[0, count:] = np.arange(count)
    ends[0, 1] = 2 * count
    spans = np.zeros((2, room + 1))
    owed = 2 * count if judged.shape[0] else count
    now, generated, moved, tick = 0.0, 0.0, 0, 0
    _admit(0, now, line, ends, left, most, clock, seats, aims, whose, laws, pace, spans)
    while owed > 0:
        k, at = -1, np.inf
        for i in range(replicas):
            if clock[NEXT, i] < at:
                k, at = i, clock[NEXT, i]
        if how != NEVER:
            ready, woken = np.inf, -1
            for i in range(replicas):
                if seats[POOL, i] == SWITCHING and clock[READY, i] < ready:
                    ready, woken = clock[READY, i], i
            look = tick * every_s
            if k < 0 and woken < 0 and how == BY_SCHEDULE and tick >= schedule.shape[0]:
                break  # no replica is left for the waiting requests; only a schedule can cause that
            if ready <= at and ready <= look:
                now = ready
                for i in range(replicas):  # replicas that arrive together share the waiting requests
                    if seats[POOL, i] == SWITCHING and clock[READY, i] == ready:
                        seats[POOL, i], clock[SEEN, i] = seats[TARGET, i], now
                for pool in range(2):
                    _admit(pool, now, line, ends, left, most, clock, seats, aims, whose, laws, pace, spans)
                continue
            if look < at:
                now, moves = look, 0
                if how == BY_RULE and (late == 0 or now >= late_s):
                    moves = _by_rule(cost_s, ends, known, tail, most, seats)
                elif tick < schedule.shape[0]:
                    moves = schedule[tick]
                tick += 1
                if moves != 0:
                    pool = ROLLOUT if moves > 0 else REWARD
                    moved += abs(moves)
                    _leave(
                        pool, abs(moves), now, cost_s, line, ends, left, clock, seats, aims, whose, laws, pace, spans
                    )
                    _admit(pool, now, line, ends, left, most, clock, seats, aims, whose, laws, pace, spans)
                continue
        now = at
        pool = seats[POOL, k]
        _catch_up(k, now, clock, seats, laws, pace, spans)
        request = _stand_up(k, seats[FIRST, k], seats, aims, whose)
        _look_ahead(k, clock, seats, aims, laws, pace)
        owed -= 1
        if pool == ROLLOUT:
            generated = now
            if judged.shape[0]:
                left[request] = judged[request]
                line[1, ends[1, 1]] = request
                ends[1, 1] += 1
                _admit(REWARD, now, line, ends, left, most, clock, seats, aims, whose, laws, pace, spans)
        _admit(pool, now, line, ends, left, most, clock, seats, aims, whose, laws, pace, spans)
    lent_at_end, settling_s = rollout - replicas, 0.0
    for k in range(replicas):
        if seats[POOL, k] == SWITCHING:
            settling_s = max(settling_s, clock[READY, k] - now)
        if seats[POOL, k] == REWARD or (seats[POOL, k] == SWITCHING and seats[TARGET, k] == REWARD):
            lent_at_end += 1
    return np.inf if owed > 0 else now, generated, spans, moved, lent_at_end, settling_s
