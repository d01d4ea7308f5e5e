"""Why an address cannot be listened on: whether that passes by itself, or the configuration names what cannot be had.

At a machine's start an address may not be up yet, and a port may still be somebody else's for a moment: whoever starts daemons is to try
again (`CannotListen`). A port that needs rights, or a host that is none, stays so (`UsageError`). Opens nothing for good.
"""

from __future__ import annotations

import errno
import socket
from contextlib import closing

from gcore.errors import CannotListen, GcoreError, UsageError

PASSING = frozenset({errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.ENETDOWN, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE})
PASSING_NAMES = frozenset({socket.EAI_AGAIN})
"""Whoever resolves names does not answer yet."""


def refused(what: str, error: OSError | None) -> GcoreError:
    """The error to raise. `what` cannot be done, and so says the system; None: it would not refuse any more."""
    said = "somebody else had it a moment ago" if error is None else error.strerror or str(error)
    if error is None or error.errno in (PASSING_NAMES if isinstance(error, socket.gaierror) else PASSING):
        return CannotListen(
            f"{what} ({said})",
            fix="Another start may find it free, or the address up; if not, choose another in the configuration",
        )
    return UsageError(f"{what} ({said})", fix="Choose another address or port in the configuration")


def asked(host: str, port: int) -> OSError | None:
    """What the system says of listening there now, for servers that do not tell; None: nothing."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with closing(socket.socket(family, kind, protocol)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
    except OSError as error:
        return error
    return None
