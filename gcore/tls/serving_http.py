"""TLS of a process that serves HTTP: a context that shows the newest certificate to each connection. See `gcore.tls.material`."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from gcore.tls.material import TlsMaterial, Watched


class ServingTls(BaseModel):
    """The files of a worker's node, as its launch document names them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca: str
    cert: str
    key: str

    @property
    def material(self) -> TlsMaterial:
        """To be read."""
        return TlsMaterial(Path(self.ca), Path(self.cert), Path(self.key))


def serving_context(watched: Watched, *, ask: bool = False) -> ssl.SSLContext:
    """For a server. `ask`: clients may show a certificate, which then must be of the authority. Raises UsageError."""

    def made() -> ssl.SSLContext:
        context = watched.material.context(watched.pem, serves=True)
        context.verify_mode = ssl.CERT_OPTIONAL if ask else ssl.CERT_NONE
        return context

    first = made()
    newest = [watched.generation, first]

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Before a certificate is shown: whether there is a newer one."""
        watched.look()
        if newest[0] != watched.generation:
            newest[:] = [watched.generation, made()]
        if newest[1] is not first:
            connection.context = newest[1]

    first.sni_callback = choose
    return first
