"""From how the store is named (`gcore.store.reference`) to a connection: the password is read from its file here, and nowhere kept."""

from __future__ import annotations

import os
from pathlib import Path

from gcore.clock import Clock
from gcore.errors import UsageError
from gcore.store.client import EtcdStore
from gcore.store.endpoints import StoreTls, StoreUser
from gcore.store.reference import StoreRef, TlsFiles


async def connect(store: StoreRef, clock: Clock, lease_call_s: float | None = None) -> EtcdStore:
    """The store that is named so, for a lease whose renewal may take `lease_call_s`. Raises UsageError."""
    tls = None if store.tls is None else _tls(store.tls)
    user = None if store.user is None else StoreUser(store.user.name, _password(Path(store.user.password_file)))
    return await EtcdStore.connect(store.endpoints, clock=clock, tls=tls, user=user, lease_call_s=lease_call_s)


def _tls(files: TlsFiles) -> StoreTls:
    ca, cert, key = (None if path is None else Path(path) for path in (files.ca, files.cert, files.key))
    return StoreTls(ca=ca, cert=cert, key=key)


def _password(path: Path) -> str:
    """What stands in the file. Raises UsageError, also where others than its owner may read it."""
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise UsageError("others may read the store's password", where=str(path), fix=f"chmod 600 {path}")
            password = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"cannot read the store's password ({why})", where=str(path), fix="Check the path and its permissions"
        ) from error
    if not password:
        raise UsageError("the file of the store's password is empty", where=str(path), fix="Write the password into it")
    return password
