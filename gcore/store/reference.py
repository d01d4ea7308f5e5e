"""References to the store in a daemon's configuration and in launch documents, and connecting to it.

A reference contains only names and files. The password is read from its file for each connection and not stored.

The expiry of the members' certificates is reported to users and alerts only. gRPC does not expose server certificates, so this module makes its own
TLS handshake and sends nothing after it. It checks the authority but not the validity period, because expired certificates must be reported too.
It does not see certificates on the members' peer port.

Launch documents contain a reference, but engines and ranks never connect. So the functions that connect import the etcd client, and gRPC with it.
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
    """TLS files (PEM) for the store.

    `ca`: authority of the store's certificates (None: the system's authorities). `cert` and `key` must be set together; without them only the
    server is authenticated.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("only one of cert and key is set; set both or neither")
        return self


class UserRef(RecordPart):
    """The store user. The password is in a file, never here."""

    name: Annotated[str, Field(min_length=1)]
    password_file: Annotated[str, Field(min_length=1)]


class StoreRef(RecordPart):
    """How to reach the store. `endpoints`: host:port each, with the prefix https:// for TLS."""

    endpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    tls: TlsFiles | None = None
    user: UserRef | None = None


async def connect_store(store: StoreRef, clock: Clock, lease_call_s: float | None = None) -> EtcdStore:
    """Connect to the store. `lease_call_s`: timeout of lease renewals. Raises UsageError."""
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
    """Read the password file. Raises UsageError, also if other users may read it."""
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise UsageError(
                    "other users may read the store's password", where=str(path), fix=f"Run chmod 600 {path}"
                )
            password = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"cannot read the store's password ({why})", where=str(path), fix="Check the path and its permissions"
        ) from error
    if not password:
        raise UsageError("the store's password file is empty", where=str(path), fix="Write the password into it")
    return password


WITHIN_S = 5.0

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not export."""


def tls_endpoints(store: StoreRef) -> tuple[EtcdEndpoint, ...]:
    """Return the members that use TLS. Raises UsageError for an invalid endpoint."""
    from gcore.store.connection import EtcdEndpoint

    members = map(EtcdEndpoint.parse, store.endpoints)
    return tuple(member for member in members if member.secure or store.tls is not None)


async def store_certificate_expiries(store: StoreRef) -> dict[str, float]:
    """Return certificate expiry by host:port, in seconds since the epoch, of members that answer with a trusted certificate."""
    members = tls_endpoints(store)
    try:
        context = _context(store)
    except OSError:  # files that are missing or being replaced; ssl.SSLError is an OSError
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
    """Build the TLS context. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the etcd client checks the name
    context.verify_flags |= NO_CHECK_TIME
    tls = store.tls
    if tls is None or tls.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(tls.ca)
    if tls is not None and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context
