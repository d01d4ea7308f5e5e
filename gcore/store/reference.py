"""How to reach the store: the part of a daemon's configuration and of launch documents, and connecting with it.

A `StoreRef` contains only addresses, names and paths. The password is read from its file for each connection and not
kept.

This module also reads when the members' certificates expire, for alerts. gRPC does not expose server certificates, so
it makes its own TLS handshake and sends nothing after it. It checks the authority but not the validity period, because
expired certificates must be reported too. It does not see certificates on the members' peer port.

Launch documents of engines and ranks contain a `StoreRef`, but these never connect. So only the functions that connect
import the etcd client and gRPC.
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

    `ca`: authority of the store's certificates (None: the system's authorities). `cert` and `key`: the client's own;
    set both or neither. Without them only the server is authenticated.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("only one of cert and key is set; set both or neither")
        return self


class UserRef(RecordPart):
    """An etcd user. The password is in a file, never here."""

    name: Annotated[str, Field(min_length=1)]
    password_file: Annotated[str, Field(min_length=1)]


class StoreRef(RecordPart):
    """How to reach the store. `endpoints`: host:port of each etcd member, with the prefix https:// for TLS."""

    endpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    tls: TlsFiles | None = None
    user: UserRef | None = None


async def connect_store(store: StoreRef, clock: Clock, lease_call_s: float | None = None) -> EtcdStore:
    """Create the etcd client, which connects when it is used. `lease_call_s`: timeout of lease renewals in seconds.

    Raises UsageError for unreadable files and invalid endpoints.
    """
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
    """Return the addresses of the members that use TLS. Raises UsageError for an invalid endpoint."""
    from gcore.store.connection import EtcdEndpoint

    members = map(EtcdEndpoint.parse, store.endpoints)
    return tuple(member for member in members if member.secure or store.tls is not None)


async def store_certificate_expiries(store: StoreRef) -> dict[str, float]:
    """Return when the certificate of each etcd member expires, in seconds since the epoch, by host:port.

    Members that do not answer, or whose certificate is not trusted, are left out.
    """
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
    """Build the TLS context that accepts expired certificates and any host name. Raises OSError."""
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
