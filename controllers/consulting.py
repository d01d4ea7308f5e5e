"""Asking a placement policy, which may be anybody's code: in a thread of its own, for so long at most, and nothing rests on what it
gives before that was looked at.

A policy that hangs keeps its thread; nobody is asked again while it does, and the process may end without it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

from gcore.errors import GcoreError
from placement.policies.base import Decision, Policy, Situation
from placement.split import Split

ANSWER_S = 30.0
"""For a decision, which gcore's own policies make in a fifth of a second."""
MOST_IDLE = 16
"""Pools that it may say something of."""


class PolicyFailed(GcoreError):
    """A policy gave no decision."""


class Consulting:
    """One policy at a time. Belongs to one event loop."""

    def __init__(self, limit_s: float = ANSWER_S) -> None:
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None

    async def asked(self, policy: Policy, situation: Situation) -> Decision:
        """What it decides. Raises PolicyFailed."""
        if self._thread is not None and self._thread.is_alive():
            raise PolicyFailed("it has not answered what it was asked before")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()

        def settle(given: object, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(given)
            else:
                # StopIteration and CancelledError mean something else to whoever awaits.
                answer.set_exception(PolicyFailed(f"{type(error).__name__}: {str(error)[:300]}".rstrip(": ")))

        def ask() -> None:
            given: object = None
            problem: BaseException | None = None
            try:
                given = policy.plan(situation)
            except BaseException as error:  # noqa: BLE001 - the edge to foreign code: a policy may raise anything
                problem = error
            try:
                loop.call_soon_threadsafe(settle, given, problem)
            except RuntimeError:  # the loop has ended meanwhile
                return

        self._thread = threading.Thread(target=ask, name="placement policy", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(self._limit_s):
                await asyncio.wait({answer})
        except TimeoutError:
            raise PolicyFailed(f"it has not answered for {self._limit_s:.0f} s") from None
        self._thread = None
        return checked(answer.result())


def checked(given: object) -> Decision:
    """What a policy gave, if it is a decision. Raises PolicyFailed."""
    if not isinstance(given, Decision) or not isinstance(given.split, Split):
        raise PolicyFailed(f"it gave {type(given).__name__!r}, and a Decision with a Split is wanted")
    split = given.split
    slots = (split.rollout, split.reward, split.train)
    if split.mode not in ("coexisting", "colocated") or any(type(count) is not int for count in slots):
        raise PolicyFailed("its split is of something else than whole numbers of slots")
    if not isinstance(given.reason, str) or not isinstance(given.idle, Mapping) or len(given.idle) > MOST_IDLE:
        raise PolicyFailed("its reason is no text, or what it says of idle pools no short mapping")
    told = [one for one in (given.expected_s, given.before_s) if one is not None]
    numbers = [given.cost_s, given.gain_s, *told, *given.idle.values()]
    if not all(isinstance(one, int | float) and isfinite(one) for one in numbers):
        raise PolicyFailed("its figures are no numbers")
    if not all(isinstance(pool, str) for pool in given.idle):
        raise PolicyFailed("what it says of idle pools is not by pool")
    return replace(given, reason=given.reason.encode("utf-8", "replace").decode())
