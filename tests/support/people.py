"""Operators' actions on a simulated cluster: quotas, pauses, drained nodes. Without a reachable store they do nothing."""

from __future__ import annotations

from gcore.ledger.records.cluster import Claim, Drained, Quotas
from gcore.schema import NEWEST_VERSION, Record
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Delete, Put
from gcore.testing import MemoryCluster


class People:
    """Of one job's cluster."""

    def __init__(self, store: MemoryCluster, uid: str) -> None:
        self._store = store
        self._active = JobKeys(uid).active

    def limit(self, slots: int | None) -> None:
        """The namespace's quota; None: as many as there are."""
        if slots is None:
            self._delete(keys.QUOTAS)
        else:
            self._write(keys.QUOTAS, Quotas(slots={"default": slots}))

    def pause(self, *, yes: bool) -> bool:
        """Pause the job, or let it go on; whether that could be done."""
        known = None if self._store.stopped else self._store.get(self._active)
        if known is None:
            return False
        self._write(self._active, Claim.decode(known.value, self._active).model_copy(update={"paused": yes}))
        return True

    def resume(self) -> None:
        """Let it go on."""
        self.pause(yes=False)

    def drain(self, node: str, *, yes: bool) -> None:
        """Have a node left, or used again."""
        if yes:
            self._write(keys.drained_node(node), Drained())
        else:
            self._delete(keys.drained_node(node))

    def put_right(self) -> None:
        """Nothing is limited, drained or paused any more."""
        self._delete(keys.QUOTAS)
        self._store.transact((), (Delete(keys.DRAINED, prefix=True),))
        self.resume()

    def _write(self, key: str, record: Record) -> None:
        if not self._store.stopped:
            self._store.transact((), (Put(key, record.encode(NEWEST_VERSION)),))

    def _delete(self, key: str) -> None:
        if not self._store.stopped:
            self._store.transact((), (Delete(key),))
