"""The store's interface: keys with revisions, transactions with compares, leases, watches.

The semantics are etcd's. `gcore.store.client.EtcdStore` uses a real etcd; `gcore.testing.MemoryStore` is equivalent for tests, and one contract
suite checks both. Safety depends on `Store.transact` alone: the end of a lease, a watch event or a cached value only says when to look.

Every implementation checks a transaction's size before it sends it: a transaction that is too large or contradictory raises `ValueError` with
numbers. The size is an upper bound, so the server never rejects a checked transaction for its size.

Lease timing: the client sends a renewal `tick_s` after the last one was answered, gives up after `call_s` without a response, and sends the next
`retry_s` later. A lease must outlive one renewal that takes its whole timeout, one that is lost, and a delay of the process of `margin_s`:

    tick_s + 2 · call_s + retry_s + margin_s  <  ttl_s

Otherwise one slow response of the store would cost the lease: peers would take over the shards and generate everything unsealed again. This is not
unsafe, so it is checked at start only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gcore.errors import UsageError


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key at some revision. `mod_revision`: revision of its last write. `lease` 0: none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int = 1
    lease: int = 0


@dataclass(frozen=True, slots=True)
class KeyListing:
    """Keys at `revision`, ascending."""

    kvs: tuple[KeyValue, ...]
    revision: int

    def by_key(self) -> dict[str, KeyValue]:
        """The keys as a mapping."""
        return {kv.key: kv for kv in self.kvs}


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds if `key`'s mod revision (0: absent) equals `mod_revision`."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Writes `value`, under `lease` if not 0."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes `key`; with `prefix`, all keys that begin with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`won`: all compares held and all writes were made, at `revision`. Otherwise nothing was written."""

    won: bool
    revision: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change. For a delete, `kv.value` is empty and `kv.mod_revision` is the revision of the deletion."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes in order, up to and including `revision`.

    `reset`: the stream began, or history was compacted. `events` are then puts of all existing keys; keys that are not among them no longer exist.
    """

    events: tuple[WatchEvent, ...]
    revision: int
    reset: bool = False


class Store(Protocol):
    """The store. All methods raise `gcore.errors.StoreUnavailable` if no response came in time.

    After that, a write has an unknown outcome: it may have happened or may still happen. Implementations retry only reads.
    """

    async def get(self, key: str) -> KeyValue | None:
        """Return the key's current value (linearizable), or None."""
        ...

    async def list(self, prefix: str) -> KeyListing:
        """Return all keys that begin with `prefix`, at one revision."""
        ...

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> KeyListing:
        """Return at most `limit` keys that begin with `prefix`, newest creation first. `before`: only keys created before this revision."""
        ...

    async def between(self, first: str, behind: str, limit: int) -> KeyListing:
        """Return the first `limit` keys from `first` (inclusive) to `behind` (exclusive), in byte order."""
        ...

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """Make all writes if all compares hold. Raises LeaseLost if a put names a lease that has ended.

        Raises ValueError beyond the store's limits: 128 compares or writes, 1.5 MiB.
        """
        ...

    async def grant(self, ttl: int) -> int:
        """Create a lease of `ttl` seconds and return its id."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew once and return the remaining seconds, counted from before the call. Raises LeaseLost."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. No error if the lease does not exist."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """Yield everything under `prefix` (a batch with `reset`), then every change, without end.

        Survives server restarts and compaction: reopens after the last revision or, if history was compacted, lists again and yields a batch with
        `reset`. Events may be late, but never wrong. While the store is unavailable, the iterator waits and raises nothing.
        """
        ...

    async def close(self) -> None:
        """Close the connection. Leases live until they expire."""
        ...


MAX_OPERATIONS = 128
"""etcd's --max-txn-ops: limit of compares, and of writes."""

MAX_BYTES = 3 * 512 * 1024
"""etcd's --max-request-bytes: 1.5 MiB."""

MIN_TTL_S = 2
"""The shortest lease of etcd at its default election timeout of 1 s; etcd raises shorter ones to it."""

_PER_OPERATION = 64  # upper bound of tags, lengths and numbers of one encoded compare or write
_PER_REQUEST = 512  # upper bound of the envelope, including the writer's name


def check_transaction(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> None:
    """Raise ValueError if the store would reject the transaction regardless of its content."""
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
    """Return an upper bound of the encoded request's size, in bytes."""
    size = _PER_REQUEST + sum(_PER_OPERATION + len(compare.key.encode()) for compare in compares)
    for write in writes:
        # A prefix delete contains the key twice: begin and end of the range.
        size += _PER_OPERATION + 2 * len(write.key.encode()) + (len(write.value) if isinstance(write, Put) else 0)
    return size


def _check_overlaps(writes: Sequence[Put | Delete]) -> None:
    """Raise ValueError if the transaction puts a key twice, or puts and deletes it."""
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
"""Longest pause between a failed renewal and the next."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Timing of a lease, in seconds. `of` fills in missing values."""

    ttl_s: int
    tick_s: float
    call_s: float
    margin_s: float

    @classmethod
    def of(
        cls, ttl_s: int, *, tick_s: float | None = None, call_s: float | None = None, margin_s: float | None = None
    ) -> LeaseTimes:
        """Fill in defaults, as fractions of the TTL for which the inequality holds."""
        return cls(
            ttl_s,
            ttl_s / TICKS_PER_TTL if tick_s is None else tick_s,
            ttl_s / CALLS_PER_TTL if call_s is None else call_s,
            ttl_s / MARGINS_PER_TTL if margin_s is None else margin_s,
        )

    @property
    def retry_s(self) -> float:
        """Pause between a failed renewal and the next."""
        return min(LONGEST_RETRY_S, self.ttl_s / MARGINS_PER_TTL)

    @property
    def needed_s(self) -> float:
        """Left side of the inequality."""
        return self.tick_s + 2 * self.call_s + self.retry_s + self.margin_s

    def check(self, where: str) -> LeaseTimes:
        """Return these times. Raises UsageError if the inequality does not hold; `where`: the configuration file."""
        if self.needed_s < self.ttl_s:
            return self
        raise UsageError(
            f"lease_ttl_s = {self.ttl_s} s is too short for lease_tick_s + 2 x lease_call_s + {self.retry_s:g} s "
            f"+ lease_margin_s = {self.tick_s:g} + 2 x {self.call_s:g} + {self.retry_s:g} + {self.margin_s:g} = "
            f"{self.needed_s:g} s: one slow response of the store would end the lease",
            where=where,
            fix="Raise lease_ttl_s, or lower the others; by default they fit",
        )


ALARMS = ("NOSPACE", "CORRUPT")
"""etcd's alarms. Under NOSPACE etcd accepts no writes."""


@dataclass(frozen=True, slots=True)
class StoreMemberStatus:
    """Size and alarms of one etcd member."""

    database_bytes: int
    in_use_bytes: int
    alarms: frozenset[str] = frozenset()
