"""When the certificates end that the store's members show to whoever connects: for people and alerts, nothing is decided by it.

gRPC does not tell what a server showed, so this is a handshake of its own, after which nothing is said. It looks whether the certificate is
of the authority that is trusted, not whether it is still good: one that has ended is what somebody should hear of. What members show
one another on their peers' port is not seen. Logs nothing of members that do not answer: the calls that fail tell of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from gcore.store.endpoints import Endpoint
from gcore.store.reference import StoreRef

WITHIN_S = 5.0
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


def secured(store: StoreRef) -> tuple[Endpoint, ...]:
    """The members with which TLS is spoken. Raises UsageError for what is no endpoint."""
    members = map(Endpoint.parse, store.endpoints)
    return tuple(member for member in members if member.secure or store.tls is not None)


async def shown_ends(store: StoreRef) -> dict[str, float]:
    """By host:port, in seconds since the epoch; a member that does not answer, or shows what is not trusted, is not in it."""
    members = secured(store)
    try:
        context = _context(store)
    except OSError:  # files that are being replaced, or gone; ssl.SSLError is one
        return {}
    ends = await asyncio.gather(*(_shown_end(member, context) for member in members))
    return {member.target: end for member, end in zip(members, ends, strict=True) if end is not None}


async def _shown_end(member: Endpoint, context: ssl.SSLContext) -> float | None:
    try:
        async with asyncio.timeout(WITHIN_S):
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
