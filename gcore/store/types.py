"""What the rest of gcore knows of the store: keys with revisions, transactions that compare, leases, watches.

etcd's semantics, and only those. `gcore.store.client.EtcdStore` speaks to a real etcd; `gcore.testing.MemoryStore` is its
equal for tests, held to it by one contract suite.

Safety rests on `Store.transact` alone: a lease's end, a watch event or a cached value only says when to look.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it stood at some revision. `mod_revision` is the revision of its last write; `lease` 0: none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int = 1
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Keys as of `revision`, ascending."""

    kvs: tuple[KeyValue, ...]
    revision: int

    def by_key(self) -> dict[str, KeyValue]:
        """The keys as a mapping."""
        return {kv.key: kv for kv in self.kvs}


@dataclass(frozen=True, slots=True)
class Compare:
    """`key`'s mod revision (0: absent) equals `mod_revision`."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value`; under `lease` if not 0."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`; with `prefix`, every key that begins with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`won`: every compare held and all writes were made, at `revision`. Otherwise nothing was written."""

    won: bool
    revision: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change. For a delete `kv.value` is empty and `kv.mod_revision` is the revision of the deletion."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes in order, up to and including `revision`.

    `reset`: history was compacted away, or the stream began; `events` then are puts of everything there is, and what
    the listener knew and is not among them is gone.
    """

    events: tuple[WatchEvent, ...]
    revision: int
    reset: bool = False


class Store(Protocol):
    """All methods raise `gcore.errors.StoreUnavailable` when no answer came in time.

    After that a write has an unknown outcome: it may have been made, or be made later. Only reads are retried inside.
    """

    async def get(self, key: str) -> KeyValue | None:
        """The key now (linearizable), or None."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Every key that begins with `prefix`, of one revision."""
        ...

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> Listing:
        """At most `limit` of the keys that begin with `prefix`, those first that were created last. `before`: only those that were created before this revision."""
        ...

    async def between(self, first: str, behind: str, limit: int) -> Listing:
        """The first `limit` keys from `first` on that come before `behind`, in the order of their bytes."""
        ...

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """All writes, if all compares hold. Raises LeaseLost if a put names a lease that has ended.

        Raises ValueError beyond the store's limits: 128 compares or writes, 1.5 MiB.
        """
        ...

    async def grant(self, ttl: int) -> int:
        """A new lease of `ttl` seconds; its id."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew once. Returns the seconds it now lives, counted from before the call. Raises LeaseLost."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. Ending one that is gone is no error."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """Everything under `prefix` now (a batch with `reset`), then every change, for ever.

        Survives a restarted server and compaction: opens again from the last revision, or, when history is gone, lists
        again and yields a batch with `reset`. A hint: events may be late, never wrong. A store that is away raises
        nothing here; the iterator waits for it.
        """
        ...

    async def close(self) -> None:
        """Close the connection; leases live on until they end."""
        ...
