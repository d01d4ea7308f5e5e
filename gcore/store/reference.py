"""How to reach the store: its description in a daemon's configuration and in launch documents, and a connection from it.

A description has files and names only; a password is read from its file when a connection is made, and kept nowhere.

When the members' certificates end is reported to people and alerts; nothing is decided by it. gRPC does not tell what a server
showed, so that is a handshake of its own, after which nothing is sent. It checks that the certificate is of the trusted authority,
not that it is still valid, because an expired one is to be reported. Certificates on the members' peer port are not seen.

A launch document has a description, and engines and ranks never connect: so the client of etcd, and gRPC with it, is imported by the
functions that connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from gcore.errors import UsageError
from gcore.schema import RecordPart
from gcore.system.clock import Clock
from gcore.system.concurrency import limit_time

if TYPE_CHECKING:
    from gcore.store.client import EtcdStore
    from gcore.store.connection import EtcdEndpoint, StoreTls


class TlsFiles(RecordPart):
    """Files (PEM) for speaking to the store.

    `ca`: who signs the store's certificates (None: the system's authorities). `cert` and `key` go together; without
    them only the server is checked.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("of cert and key only one is given; give both, or neither")
        return self


class UserRef(RecordPart):
    """Who speaks to the store. The password stands in a file, never here."""

    name: Annotated[str, Field(min_length=1)]
    password_file: Annotated[str, Field(min_length=1)]


class StoreRef(RecordPart):
    """How to reach the store. `endpoints`: host:port each, with https:// before it where TLS is spoken."""

    endpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    tls: TlsFiles | None = None
    user: UserRef | None = None


async def connect_store(store: StoreRef, clock: Clock, lease_call_s: float | None = None) -> EtcdStore:
    """The store that is named so, for a lease whose renewal may take `lease_call_s`. Raises UsageError."""
    from gcore.store.client import EtcdStore
    from gcore.store.connection import StoreUser

    tls = None if store.tls is None else _tls(store.tls)
    user = None if store.user is None else StoreUser(store.user.name, _password(Path(store.user.password_file)))
    return await EtcdStore.connect(store.endpoints, clock=clock, tls=tls, user=user, lease_call_s=lease_call_s)


def _tls(files: TlsFiles) -> StoreTls:
    from gcore.store.connection import StoreTls

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


WITHIN_S = 5.0

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


def tls_endpoints(store: StoreRef) -> tuple[EtcdEndpoint, ...]:
    """The members with which TLS is spoken. Raises UsageError for what is no endpoint."""
    from gcore.store.connection import EtcdEndpoint

    members = map(EtcdEndpoint.parse, store.endpoints)
    return tuple(member for member in members if member.secure or store.tls is not None)


async def store_certificate_expiries(store: StoreRef) -> dict[str, float]:
    """By host:port, in seconds since the epoch; a member that does not answer, or shows what is not trusted, is not in it."""
    members = tls_endpoints(store)
    try:
        context = _context(store)
    except OSError:  # files that are being replaced, or gone; ssl.SSLError is one
        return {}
    ends = await asyncio.gather(*(_shown_end(member, context) for member in members))
    return {member.target: end for member, end in zip(members, ends, strict=True) if end is not None}


async def _shown_end(member: EtcdEndpoint, context: ssl.SSLContext) -> float | None:
    try:
        async with limit_time(WITHIN_S):
            _, writer = await asyncio.open_connection(
                member.host, member.port, ssl=context, server_hostname=member.host, ssl_shutdown_timeout=WITHIN_S
            )
            shown = writer.get_extra_info("peercert")
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return None
    return ssl.cert_time_to_seconds(shown["notAfter"]) if shown else None


def _context(store: StoreRef) -> ssl.SSLContext:
    """Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # whoever calls there checks the name
    context.verify_flags |= NO_CHECK_TIME
    tls = store.tls
    if tls is None or tls.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(tls.ca)
    if tls is not None and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context
