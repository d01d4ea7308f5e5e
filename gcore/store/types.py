"""The store's interface: keys with revisions, transactions with compares, leases, watches.

The semantics are etcd's: every write has a *revision*, a number that increases over all keys. A transaction compares
the revisions that its writer read, and writes only if they are unchanged. `gcore.store.client.EtcdStore` uses a real
etcd; `gcore.testing.MemoryStore` is equivalent for tests, and one contract suite checks both. Safety depends on
`Store.transact` alone: the end of a lease, a watch event or a cached value only says when to read again.

Every implementation checks a transaction before it sends it: one that is too large or contradictory raises
`ValueError`. The computed size is an upper bound, so the server never rejects a checked transaction for its size.

Lease timing: the client sends a renewal `tick_s` after the last one was answered, gives up after `call_s` without a
response, and sends the next `retry_s` later. A lease must outlive one renewal that takes its full timeout, one that is
lost, and a delay of the process of `margin_s`:

    tick_s + 2 · call_s + retry_s + margin_s  <  ttl_s

Otherwise one slow response of the store would end the lease: other controllers would take over the shards and generate
everything again that is not sealed. This wastes work but is not unsafe, so it is checked at start only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gcore.errors import UsageError


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key and its value at some revision of the store.

    `create_revision`: revision at which the key was created. `mod_revision`: revision of its last write. `version`:
    number of writes since its creation. `lease`: ID of its lease; 0: none.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int = 1
    lease: int = 0


@dataclass(frozen=True, slots=True)
class KeyListing:
    """Result of a listing: keys in ascending order, all as of `revision`."""

    kvs: tuple[KeyValue, ...]
    revision: int

    def by_key(self) -> dict[str, KeyValue]:
        """Return the listed values by key."""
        return {kv.key: kv for kv in self.kvs}


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction: the last write of `key` has revision `mod_revision` (0: the key is absent)."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """A write of a transaction: sets `key` to `value`, under `lease` if that is not 0."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """A write of a transaction: deletes `key`; with `prefix`, all keys that begin with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Result of a transaction. `won`: whether all compares held and all writes were made; else nothing was written.

    `revision`: of the store after it.
    """

    won: bool
    revision: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change of one key. For a delete, `kv.value` is empty and `kv.mod_revision` is the revision of the deletion."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes that a watch reports together, in order, up to and including `revision`.

    `reset`: the watch began, or history was compacted. `events` are then puts of all existing keys; other keys no
    longer exist.
    """

    events: tuple[WatchEvent, ...]
    revision: int
    reset: bool = False


class Store(Protocol):
    """Interface of the store. All methods raise `gcore.errors.StoreUnavailable` if no response came in time.

    After that error a write has an unknown outcome: it may have happened or may still happen. Implementations retry
    only calls that are safe to repeat.
    """

    async def get(self, key: str) -> KeyValue | None:
        """Return the key's current value (linearizable), or None."""
        ...

    async def list(self, prefix: str) -> KeyListing:
        """Return all keys that begin with `prefix`, at one revision."""
        ...

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> KeyListing:
        """Return at most `limit` keys that begin with `prefix`, those created last first.

        `before`: only keys that were created before this revision.
        """
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
        """Create a lease of `ttl` seconds and return its ID. Without renewal it expires, which deletes its keys."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew a lease once. Returns its remaining seconds, counted from before the call. Raises LeaseLost."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. No error if the lease does not exist."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """Yield all keys under `prefix` (a batch with `reset`), then every change, without end.

        Survives server restarts and compaction: continues after the last revision or, if history was compacted, lists
        again and yields another batch with `reset`. While the store is unavailable, the iterator waits and raises
        nothing.
        """
        ...

    async def close(self) -> None:
        """Close the connection. Leases are not revoked; they exist until they expire."""
        ...


MAX_OPERATIONS = 128
"""Maximum number of compares, and of writes, of a transaction: etcd's default of --max-txn-ops."""

MAX_BYTES = 3 * 512 * 1024
"""Maximum size of a request in bytes: etcd's default of --max-request-bytes, 1.5 MiB."""

MIN_TTL_S = 2
"""The shortest lease in seconds that etcd grants at its default election timeout of 1 s; shorter ones get this TTL."""

_PER_OPERATION = 64  # upper bound of tags, lengths and numbers of one encoded compare or write
_PER_REQUEST = 512  # upper bound of the envelope, including the writer's name


def check_transaction(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> None:
    """Raise ValueError if a transaction exceeds the store's limits, has an empty key, or writes a key twice."""
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
    """Return an upper bound of the size in bytes of a transaction's encoded request."""
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
"""Maximum seconds between a failed renewal and the next."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Timing of a lease in seconds; see the module docstring for the fields. `of` fills in missing values."""

    ttl_s: int
    tick_s: float
    call_s: float
    margin_s: float

    @classmethod
    def of(
        cls, ttl_s: int, *, tick_s: float | None = None, call_s: float | None = None, margin_s: float | None = None
    ) -> LeaseTimes:
        """Create with defaults for None: fractions of the TTL for which the inequality of the module docstring holds."""
        return cls(
            ttl_s,
            ttl_s / TICKS_PER_TTL if tick_s is None else tick_s,
            ttl_s / CALLS_PER_TTL if call_s is None else call_s,
            ttl_s / MARGINS_PER_TTL if margin_s is None else margin_s,
        )

    @property
    def retry_s(self) -> float:
        """Seconds between a failed renewal and the next."""
        return min(LONGEST_RETRY_S, self.ttl_s / MARGINS_PER_TTL)

    @property
    def needed_s(self) -> float:
        """Left side of the inequality in the module docstring: the TTL must be longer."""
        return self.tick_s + 2 * self.call_s + self.retry_s + self.margin_s

    def check(self, where: str) -> LeaseTimes:
        """Return these times. Raises UsageError if the TTL is not longer than `needed_s`.

        `where`: the configuration file, for the error.
        """
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
"""Names of etcd's alarms. Under NOSPACE, etcd accepts no writes."""


@dataclass(frozen=True, slots=True)
class StoreMemberStatus:
    """Status of one etcd member: size of its database file, bytes of it in use, and active alarms."""

    database_bytes: int
    in_use_bytes: int
    alarms: frozenset[str] = frozenset()
