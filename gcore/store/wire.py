"""gcore's words for keys and transactions, and etcd's. Pure; both directions, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aetcd import rpc

from gcore.store.types import Compare, Delete, KeyValue, Put, WatchEvent

_EVERYTHING = b"\0"


def range_begin(prefix: str) -> bytes:
    """Where the keys with `prefix` begin. etcd has no empty key: everything begins at the zero byte."""
    return prefix.encode() or _EVERYTHING


def range_end(prefix: str) -> bytes:
    """The first key after all keys with `prefix`; for the empty prefix etcd's sign for "to the end"."""
    raw = prefix.encode().rstrip(b"\xff")
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else _EVERYTHING


def key_value(kv: Any) -> KeyValue:
    """From etcd's."""
    return KeyValue(
        bytes(kv.key).decode(errors="backslashreplace"),  # a key that is no text is none of gcore's, and ends nobody
        bytes(kv.value),
        int(kv.create_revision),
        int(kv.mod_revision),
        version=int(kv.version),
        lease=int(kv.lease),
    )


def watch_event(event: Any) -> WatchEvent:
    """From etcd's."""
    return WatchEvent("delete" if event.type == event.DELETE else "put", key_value(event.kv))


def transaction(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> Any:
    """A TxnRequest that makes `writes` if all `compares` hold, and nothing otherwise."""
    return rpc.TxnRequest(
        compare=[
            rpc.Compare(
                result=rpc.Compare.EQUAL,
                target=rpc.Compare.MOD,
                key=compare.key.encode(),
                mod_revision=compare.mod_revision,
            )
            for compare in compares
        ],
        success=[_operation(write) for write in writes],
    )


def _operation(write: Put | Delete) -> Any:
    if isinstance(write, Put):
        return rpc.RequestOp(request_put=rpc.PutRequest(key=write.key.encode(), value=write.value, lease=write.lease))
    if write.prefix:
        request = rpc.DeleteRangeRequest(key=range_begin(write.key), range_end=range_end(write.key))
    else:
        request = rpc.DeleteRangeRequest(key=write.key.encode())
    return rpc.RequestOp(request_delete_range=request)
