"""Collective operations of a flow: the peers of a job exchange values in a step, like an all-gather
(`gcore.ledger.collectives` has the rules).

`gather` writes this peer's value to the store, waits for the values of the others, and reads the agreed result. A hash
selects the peer that writes the result; if that peer does not, the next one does. `answer_others` runs beside the flow:
if other peers wait in a step that this peer's flow has already left, it reports that, because they would wait forever
otherwise. gcore itself trains without collectives; only flows use them.
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
"""Seconds after which the records are checked again even if no change was reported."""

TURN_S = 0.5
"""Seconds that a peer waits for each peer before it in turn order to write a result."""


class PeerCollectives:
    """Takes part in the collective operations of one job. `me`, `lease`: this run of the controller and its lease in
    the store."""

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
        """Record that the flow has reached the step that starts with the weights `at`."""
        self._at = at
        self._changes.notify()

    async def gather(self, at: Version, name: str, value: Any) -> tuple[Any, ...]:
        """Contribute `value` to the operation `name` of the step `at`, and return the values of all peers, ordered by
        the peers' names. Raises ValueError if the value or the name is invalid."""
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
        """Contribute `value`, and return the exact sum of the values of all peers. Raises ValueError if the value or
        the name is invalid."""
        exact_sum([value])
        return exact_sum(await self.gather(at, name, value))

    async def answer_others(self) -> None:
        """Run until cancelled: when other peers wait in a step that this peer's flow has left, report that it gives no
        value there."""
        while True:
            mine = self._parts().get(self._me)
            reported = mine.at if mine is not None else Version(-1, -1)
            if reported < self._at and self._somebody_waits():
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
        """Write this peer's contributions."""
        mirror = self._mirror()
        await self._make(
            give(mirror.keys, mirror.written(mirror.keys.part(self._me), mirror.parts.get(self._me)), new, self._lease)
        )

    async def _fix(self, at: Version, name: str) -> None:
        """Write the agreed result of an operation to which all peers have contributed."""
        mirror = self._mirror()
        forgotten = finished_answers(
            self._members(), self._parts(), ((s.record.version, s.record.name) for s in mirror.agreed.values())
        )
        await self._make(agree(mirror.keys, compute_answer(at, name, self._parts()), forgotten))

    async def _make(self, txn: Any) -> None:
        """Run the transaction, and wait until the mirror of the store shows its effect, for a limited time."""
        before = self._mirror().revision
        try:
            report = await TransactionExecutor(self._store, self._mirror().keys).run(txn)
        except StoreUnavailable:
            await self._clock.sleep(COLLECTIVE_LOOK_AGAIN_S)
            return
        waited = self._clock.monotonic()
        while self._mirror().revision < max(report.revision, before + 1):
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
