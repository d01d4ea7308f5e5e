"""What a transaction may hold, checked before it is sent, and the same for every implementation of `Store`.

The server refuses what is too big or contradicts itself; here that is a `ValueError` at the caller, with figures. The
size is estimated from above, so what passes here is never refused by the server for its size.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcore.store.types import Compare, Delete, Put

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
