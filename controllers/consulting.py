"""Making a placement policy and asking it, which may be anybody's code: in a thread of its own, for so long at most, and nothing rests on
what it gives before that was looked at.

A policy that hangs keeps its thread; nobody is asked again while it does, and the process may end without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TypeVar, cast

from gcore.errors import GcoreError
from gcore.plugins import sentence_of
from placement.policies.base import Decision, Policy, Situation
from placement.split import Split

T = TypeVar("T")
ANSWER_S = 30.0
"""For a policy, or a decision, which gcore's own policies make in a fifth of a second."""
MOST_IDLE, MOST_NAME = 8, 24
"""Pools that it may say something of, and characters of a pool's name: both stand in the record of moves, which the store takes whole."""
MOST_SLOTS = 1_000_000
"""Of a pool. What has thousands of digits cannot even be told of."""


class PolicyFailed(GcoreError):
    """A policy gave no decision."""


class Consulting:
    """One policy at a time. Belongs to one event loop."""

    def __init__(self, limit_s: float = ANSWER_S) -> None:
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None

    async def made(self, make: Callable[[], object]) -> Policy:
        """The policy, from what finds and makes it. Raises PolicyFailed."""
        return await self._in_thread(lambda: planning(make()))

    async def asked(self, policy: Policy, situation: Situation) -> Decision:
        """What it decides. Raises PolicyFailed."""
        return await self._in_thread(lambda: checked(policy.plan(situation)))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        if self._thread is not None and self._thread.is_alive():
            raise PolicyFailed("it has not answered what it was asked before")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def ask() -> None:
            # Nothing of what it raises is raised in the loop as it is: StopIteration and CancelledError mean something else there.
            try:
                settle = partial(_give, answer, call())
            except BaseException as error:  # noqa: BLE001 - the edge to foreign code: a policy may raise anything
                failed = PolicyFailed(error.what if isinstance(error, PolicyFailed) else sentence_of(error))
                failed.__cause__ = error
                settle = partial(_fail, answer, failed)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle)

        self._thread = threading.Thread(target=ask, name="placement policy", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(self._limit_s):
                await asyncio.wait({answer})
        except TimeoutError:
            raise PolicyFailed(f"it has not answered for {self._limit_s:.0f} s") from None
        self._thread = None
        return answer.result()


def _give(answer: asyncio.Future[T], given: T) -> None:
    if not answer.done():
        answer.set_result(given)


def _fail(answer: asyncio.Future[T], failed: PolicyFailed) -> None:
    if not answer.done():
        answer.set_exception(failed)


def planning(made: object) -> Policy:
    """What was made, if it plans. Raises PolicyFailed."""
    if not callable(getattr(made, "plan", None)):
        raise PolicyFailed(f"what makes it gave {type(made).__name__!r}, which has no method plan")
    return cast(Policy, made)


def checked(given: object) -> Decision:
    """What a policy gave, if it is a decision. Raises PolicyFailed."""
    if not isinstance(given, Decision) or not isinstance(given.split, Split):
        raise PolicyFailed(f"it gave {type(given).__name__!r}, and a Decision with a Split is wanted")
    split = given.split
    slots = (split.rollout, split.reward, split.train)
    if split.mode not in ("coexisting", "colocated") or not all(map(_is_slots, slots)):
        raise PolicyFailed("its split is of something else than whole numbers of slots")
    if not isinstance(given.reason, str) or not isinstance(given.idle, Mapping):
        raise PolicyFailed("its reason is no text, or what it says of idle pools no mapping")
    idle = dict(given.idle)  # from here on nothing that it changes is looked at
    told = [one for one in (given.expected_s, given.before_s) if one is not None]
    numbers = [given.cost_s, given.gain_s, *told, *idle.values()]
    if not all(isinstance(one, int | float) and isfinite(one) for one in numbers):
        raise PolicyFailed("its figures are no numbers")
    if len(idle) > MOST_IDLE or not all(isinstance(pool, str) and len(pool) <= MOST_NAME for pool in idle):
        raise PolicyFailed("what it says of idle pools is not by pool")
    return replace(given, idle=idle, reason=given.reason.encode("utf-8", "replace").decode())


def _is_slots(count: object) -> bool:
    return type(count) is int and 0 <= count <= MOST_SLOTS
