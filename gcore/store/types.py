"""What the rest of gcore knows of the store: keys with revisions, transactions that compare, leases, watches.

etcd's semantics, and only those. `gcore.store.client.EtcdStore` speaks to a real etcd; `gcore.testing.MemoryStore` is its equal for
tests, held to it by one contract suite. Safety rests on `Store.transact` alone: a lease's end, a watch event or a cached value only
says when to look.

A transaction's size is checked before it is sent, the same for every implementation: too big or contradictory is a `ValueError` with
figures. The size is estimated from above, so the server never refuses for size what passes here.

Of a lease: a renewal is sent `tick_s` after the last one was answered, is given up after `call_s` without an answer, and the next is
sent `retry_s` later. A lease must outlive one renewal that takes its whole time and one that is lost, and the process be held up for
`margin_s` besides:

    tick_s + 2 · call_s + retry_s + margin_s  <  ttl_s

Where it does not hold, one slow answer of the store costs a life: the peers take the shards over, and everything that was made and
not sealed is made again. Nothing unsafe follows, so this is checked at start and never again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gcore.errors import UsageError


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
class KeyListing:
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

    async def list(self, prefix: str) -> KeyListing:
        """Every key that begins with `prefix`, of one revision."""
        ...

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> KeyListing:
        """At most `limit` of the keys that begin with `prefix`, those first that were created last. `before`: only those that were created before this revision."""
        ...

    async def between(self, first: str, behind: str, limit: int) -> KeyListing:
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


MAX_OPERATIONS = 128
"""etcd's --max-txn-ops: as many compares, and as many writes."""

MAX_BYTES = 3 * 512 * 1024
"""etcd's --max-request-bytes: 1.5 MiB."""

MIN_TTL_S = 2
"""The shortest lease etcd gives at its default election timeout of 1 s; less is raised to it."""

_PER_OPERATION = 64  # tags, lengths and numbers of one encoded compare or write take less
_PER_REQUEST = 512  # and so does the envelope, the writer's name included


def check_transaction(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> None:
    """Raises ValueError if the store would refuse this whatever it holds."""
    for what, count in (("compares", len(compares)), ("writes", len(writes))):
        if count > MAX_OPERATIONS:
            raise ValueError(f"a transaction holds at most {MAX_OPERATIONS} {what}, not {count}")
    size = request_bytes(compares, writes)
    if size > MAX_BYTES:
        raise ValueError(f"a transaction holds at most {MAX_BYTES} bytes, not {size}")
    if any(not compare.key for compare in compares):
        raise ValueError("a compare needs a key")
    _check_overlaps(writes)


def request_bytes(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> int:
    """An upper bound of the encoded request's size in bytes."""
    size = _PER_REQUEST + sum(_PER_OPERATION + len(compare.key.encode()) for compare in compares)
    for write in writes:
        # A prefix delete carries the key twice: the range's begin and its end.
        size += _PER_OPERATION + 2 * len(write.key.encode()) + (len(write.value) if isinstance(write, Put) else 0)
    return size


def _check_overlaps(writes: Sequence[Put | Delete]) -> None:
    """No key is put twice, or put and deleted, in one transaction."""
    put: set[str] = set()
    for write in writes:
        if isinstance(write, Put):
            if not write.key:
                raise ValueError("a put needs a key")
            if write.key in put:
                raise ValueError(f"the transaction puts {write.key!r} twice")
            put.add(write.key)
        elif not write.key and not write.prefix:
            raise ValueError("a delete needs a key")
    for write in writes:
        if isinstance(write, Delete):
            for key in put:
                if key == write.key or (write.prefix and key.startswith(write.key)):
                    raise ValueError(f"the transaction puts {key!r} and deletes it")


TICKS_PER_TTL = 3
CALLS_PER_TTL = 5
MARGINS_PER_TTL = 10

LONGEST_RETRY_S = 0.5
"""Between a renewal that had no answer and the next."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Times of a lease, in seconds. `of` fills in those that are not given."""

    ttl_s: int
    tick_s: float
    call_s: float
    margin_s: float

    @classmethod
    def of(
        cls, ttl_s: int, *, tick_s: float | None = None, call_s: float | None = None, margin_s: float | None = None
    ) -> LeaseTimes:
        """By default parts of the lease's life for which the inequality holds, whatever that is."""
        return cls(
            ttl_s,
            ttl_s / TICKS_PER_TTL if tick_s is None else tick_s,
            ttl_s / CALLS_PER_TTL if call_s is None else call_s,
            ttl_s / MARGINS_PER_TTL if margin_s is None else margin_s,
        )

    @property
    def retry_s(self) -> float:
        """From a renewal that had no answer to the next."""
        return min(LONGEST_RETRY_S, self.ttl_s / MARGINS_PER_TTL)

    @property
    def needed_s(self) -> float:
        """What a lease must outlive: the left side of the inequality."""
        return self.tick_s + 2 * self.call_s + self.retry_s + self.margin_s

    def check(self, where: str) -> LeaseTimes:
        """These times. Raises UsageError where the inequality does not hold; `where`: who was told them."""
        if self.needed_s < self.ttl_s:
            return self
        raise UsageError(
            f"a lease of lease_ttl_s = {self.ttl_s} s does not outlive lease_tick_s + 2 x lease_call_s + {self.retry_s:g} s "
            f"+ lease_margin_s = {self.tick_s:g} + 2 x {self.call_s:g} + {self.retry_s:g} + {self.margin_s:g} = "
            f"{self.needed_s:g} s, so one slow answer of the store would end it",
            where=where,
            fix="Raise lease_ttl_s, or lower the others; left out, they fit",
        )


ALARMS = ("NOSPACE", "CORRUPT")
"""What etcd may raise; under the first it takes no write."""


@dataclass(frozen=True, slots=True)
class StoreMemberStatus:
    """One member's."""

    database_bytes: int
    in_use_bytes: int
    alarms: frozenset[str] = frozenset()
