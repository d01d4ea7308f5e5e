"""Where connections to other processes of gcore are made: to daemons, to train ranks, to engines.

Whoever talks to one takes a `Connector`, and knows nothing of certificates and tokens. With `PLAIN` there are none: on loopback,
where nobody is told apart. Certificates that have changed count from the next connection on; `generation` tells those that
keep connections open when to make them anew.

A token is sent over TLS, or to this machine, and nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Sequence
from typing import Any

import grpc

from gcore.config.securing import is_loopback
from gcore.errors import UsageError
from gcore.tls.material import TlsMaterial, Watched

Options = Sequence[tuple[str, Any]]
AUTHORIZATION = "authorization"


class Connector:
    """Makes the channels of one process. `token`: what it shows of itself; `engines`: the cluster's key of engines."""

    def __init__(self, tls: TlsMaterial | None = None, *, token: str = "", engines: bytes | None = None) -> None:
        """Raises UsageError for files that cannot be used."""
        self._watched = None if tls is None else Watched(tls)
        self._token = token
        self._engines = engines
        self._context: tuple[int, ssl.SSLContext] | None = None

    @property
    def secure(self) -> bool:
        """Whether what it makes speaks TLS."""
        return self._watched is not None

    @property
    def generation(self) -> int:
        """Another one when certificates have changed: then a connection that is not to be lost is made anew."""
        if self._watched is None:
            return 0
        self._watched.look()
        return self._watched.generation

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel to `host:port`."""
        if self._watched is None:
            return grpc.aio.insecure_channel(address, options=options)
        pem = self._watched.pem
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """What each call to `address` carries to say whose it is. Raises UsageError rather than tell a token to the network."""
        if not self._token:
            return ()
        if self._watched is None and not is_loopback(address.rpartition(":")[0]):
            raise UsageError(
                "a token is not sent over a connection that others can listen to",
                where=address,
                fix="Name the cluster's ca.pem in the context (`ca:`), or with GCORE_CA",
            )
        return ((AUTHORIZATION, f"Bearer {self._token}"),)

    @property
    def http(self) -> ssl.SSLContext | None:
        """For HTTP to engines; None: it is plain."""
        if self._watched is None:
            return None
        generation = self.generation
        if self._context is None or self._context[0] != generation:
            self._context = generation, self._watched.material.context(self._watched.pem)
        return self._context[1]

    def engine_key(self, instance: str) -> str | None:
        """What the engine that is called `instance` asks for; None: it asks for nothing."""
        return None if self._engines is None else key_of_engine(self._engines, instance)


PLAIN = Connector()


def key_of_engine(secret: bytes, instance: str) -> str:
    """Each replica has a key of its own, which every node of the cluster can work out and nobody else."""
    return hmac.new(secret, b"gcore engine " + instance.encode(), hashlib.sha256).hexdigest()
