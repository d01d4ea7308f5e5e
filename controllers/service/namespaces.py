"""Whether there is a namespace, for those who ask for what is in it and get nothing.

A namespace is made by nothing but its use: it is there while a job is called in it that was not deleted, while something was used in it, while
it has a quota, or while a token or the caller's certificate names it. `default` always is. One that the caller may not see is not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from controllers.service.access import caller, may_see
from controllers.service.refusals import NamespaceNotFound
from gcore.ledger.claims import Quotas
from gcore.nearest import did_you_mean
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.keys import DEFAULT_NAMESPACE
from gcore.store.types import Store
from gcore.tokens import TokenRecord


async def check_namespace(store: Store, namespace: str, used: Collection[str] = ()) -> None:
    """Raises NamespaceNotFound. `used`: those of which usage is known."""
    fix = "`gcore quota` and `gcore usage` show those there are"
    if not may_see(namespace):
        raise NamespaceNotFound(f"there is no namespace {namespace[:80]!r}", fix=fix)
    if namespace in (DEFAULT_NAMESPACE, *used) or caller().namespaces is not None:
        return
    if (await store.newest(keys.NAMES + keys.full_name("", namespace), 1)).kvs:
        return
    others = {DEFAULT_NAMESPACE, *used, *await _with_quota(store), *await _with_token(store)}
    if namespace not in others:
        near = did_you_mean(namespace, others)
        raise NamespaceNotFound(f"there is no namespace {namespace[:80]!r}{near}", fix=fix)


async def _with_quota(store: Store) -> Collection[str]:
    kv = await store.get(keys.QUOTAS)
    with contextlib.suppress(UnreadableRecord):
        return () if kv is None else tuple(Quotas.decode(kv.value, kv.key).slots)
    return ()


async def _with_token(store: Store) -> Collection[str]:
    found: set[str] = set()
    for kv in (await store.list(keys.TOKENS)).kvs:
        with contextlib.suppress(UnreadableRecord):
            found.update(TokenRecord.decode(kv.value, kv.key).namespaces)
    return found
