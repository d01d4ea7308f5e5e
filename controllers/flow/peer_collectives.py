"""A peer's side of the values that the peers of a job exchange in a step (`gcore.ledger.collectives` has the rules).

`gather` writes this peer's value, waits for the others, and reads the agreed result. A hash selects the peer that fixes the result; if that
peer does not, the next one does. `answer_others` runs beside the flow: if others wait in a step that this peer's flow has left, it reports
that; otherwise they would wait forever. Training a step needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from controllers.changes import ChangeSignal
from controllers.rules.view import turn_of
from gcore.errors import StoreUnavailable
from gcore.ledger.collectives import (
    Agreed,
    Part,
    add_contribution,
    agree,
    awaited_members,
    check_contribution,
    compute_answer,
    exact_sum,
    finished_answers,
    give,
)
from gcore.ledger.mirror import JobMirror
from gcore.ledger.transactions import TransactionExecutor
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.types import Version

COLLECTIVE_LOOK_AGAIN_S = 1.0

TURN_S = 0.5
"""Seconds that a peer waits for the previous peer in turn order to fix a result."""


class PeerCollectives:
    """Takes part in the collectives of one job, for one incarnation of a peer."""

    def __init__(
        self, store: Store, mirror: Callable[[], JobMirror], me: str, lease: int, changes: ChangeSignal, clock: Clock
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._me = me
        self._lease = lease
        self._changes = changes
        self._clock = clock
        self._at = Version(-1, -1)

    def begin(self, at: Version) -> None:
        """Record that the flow is in the step that starts with version `at`, or waits for it."""
        self._at = at
        self._changes.notify()

    async def gather(self, at: Version, name: str, value: Any) -> tuple[Any, ...]:
        """The agreed values, ordered by the peers' names. Raises ValueError."""
        check_contribution(name, value)
        began: float | None = None
        while (agreed := self._agreed(at, name)) is None:
            mine = self._parts().get(self._me)
            if mine is None or mine.at < at or (mine.at == at and name not in mine.given):
                await self._give(add_contribution(mine, self._me, at, name, value))
            elif awaited_members(at, name, self._members(), self._parts()):
                began = None
                await self._changes.wait(COLLECTIVE_LOOK_AGAIN_S)
            else:
                now = self._clock.monotonic()
                began = now if began is None else began
                left = turn_of(self._members(), self._me, f"agree {at} {name}") * TURN_S - (now - began)
                if left > 0:
                    await self._changes.wait(left)
                else:
                    await self._fix(at, name)
        return tuple(value for _, value in sorted(agreed.values.items()))

    async def sum(self, at: Version, name: str, value: float) -> float:
        """The sum of the agreed values. Raises ValueError."""
        exact_sum([value])
        return exact_sum(await self.gather(at, name, value))

    async def answer_others(self) -> None:
        """Run until cancelled: contribute to steps that this flow has passed while other peers wait in them."""
        while True:
            mine = self._parts().get(self._me)
            told = mine.at if mine is not None else Version(-1, -1)
            if told < self._at and self._somebody_waits():
                await self._give(Part(incarnation=self._me, at=self._at))
            else:
                await self._changes.wait(COLLECTIVE_LOOK_AGAIN_S)

    def _somebody_waits(self) -> bool:
        """Whether another peer has contributed to an earlier step that has no agreed result."""
        return any(
            self._agreed(part.at, name) is None
            for member, part in self._parts().items()
            if member != self._me and part.at < self._at
            for name in part.given
        )

    async def _give(self, new: Part) -> None:
        mirror = self._mirror()
        await self._make(
            give(mirror.keys, mirror.written(mirror.keys.part(self._me), mirror.parts.get(self._me)), new, self._lease)
        )

    async def _fix(self, at: Version, name: str) -> None:
        mirror = self._mirror()
        forgotten = finished_answers(
            self._members(), self._parts(), ((s.record.version, s.record.name) for s in mirror.agreed.values())
        )
        await self._make(agree(mirror.keys, compute_answer(at, name, self._parts()), forgotten))

    async def _make(self, txn: Any) -> None:
        """Run the transaction, and wait until the watch updates the mirror."""
        heard = self._mirror().revision
        try:
            report = await TransactionExecutor(self._store, self._mirror().keys).run(txn)
        except StoreUnavailable:
            await self._clock.sleep(COLLECTIVE_LOOK_AGAIN_S)
            return
        waited = self._clock.monotonic()
        while self._mirror().revision < max(report.revision, heard + 1):
            await self._changes.wait(COLLECTIVE_LOOK_AGAIN_S)
            if self._clock.monotonic() - waited >= COLLECTIVE_LOOK_AGAIN_S:
                return  # the caller checks again in either case

    def _parts(self) -> Mapping[str, Part]:
        return {member: stored.record for member, stored in self._mirror().parts.items()}

    def _members(self) -> frozenset[str]:
        return frozenset(self._mirror().members)

    def _agreed(self, at: Version, name: str) -> Agreed | None:
        stored = self._mirror().agreed.get(f"{at}/{name}")
        return stored.record if stored is not None else None
