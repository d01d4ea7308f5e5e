"""How to reach the store, as it stands in a daemon's configuration and in the launch documents of workers.

Files and names only: a password or a key is never here, and nothing is read before somebody connects
(`gcore.store.connecting`).
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from gcore.schema import Part


class TlsFiles(Part):
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


class UserRef(Part):
    """Who speaks to the store. The password stands in a file, never here."""

    name: Annotated[str, Field(min_length=1)]
    password_file: Annotated[str, Field(min_length=1)]


class StoreRef(Part):
    """How to reach the store. `endpoints`: host:port each, with https:// before it where TLS is spoken."""

    endpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    tls: TlsFiles | None = None
    user: UserRef | None = None
