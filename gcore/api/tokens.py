"""User tokens: their format, and their record in the store.

A token is `gcore_ID_SECRET`. The secret has 256 random bits, so the store keeps its SHA-256 without a salt: the secret cannot be guessed or
recovered from the record. The prefix lets secret scanners find leaked tokens. This module uses neither the store nor the clock.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from gcore.api.tls import CertName, check_user
from gcore.schema import Record

LONGEST_S = 10 * 366 * 86400.0
DEFAULT_S = 90 * 86400.0
"""Longest and default validity of a token, in seconds."""

KEPT_S = 7 * 86400.0
"""Seconds that an expired token's record is kept, so that its user gets another error than for a token that never existed."""

MOST_TOKENS = 10_000
_FORM = re.compile(r"gcore_([a-z0-9]{12})_([A-Za-z0-9_-]{43})")


class TokenRecord(Record):
    """The record of one user token in the store, under the key `tokens/{id}`. Times in seconds since the Unix epoch."""

    id: str
    name: str
    role: str
    namespaces: tuple[str, ...] = ()
    """("*",): all namespaces. An admin has all of them without it."""
    sha256: str
    """SHA-256 of the secret."""
    created: float
    expires: float
    created_by: str = ""

    @property
    def whose(self) -> CertName:
        """The user whom the token identifies. Raises UsageError if the record is not valid."""
        return check_user(self.name, self.role, self.namespaces, "token")


@dataclass(frozen=True, slots=True)
class UserToken:
    """A user's token: its public id and its secret."""

    id: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        """The token as users and HTTP headers write it: `gcore_ID_SECRET`."""
        return f"gcore_{self.id}_{self.secret}"

    @property
    def sha256(self) -> str:
        """SHA-256 of the secret, which the store keeps."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    def is_of(self, sha256: str) -> bool:
        """Return whether the secret has this SHA-256 (hexadecimal), in a time that does not depend on where they differ."""
        return hmac.compare_digest(self.sha256, sha256)


def new_token() -> UserToken:
    """Return a new token with a random id and a random secret. Stores nothing."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return UserToken("".join(secrets.choice(letters) for _ in range(12)), secrets.token_urlsafe(32))


def parse_token(text: str) -> UserToken | None:
    """Parse a token; None if the text is not a token."""
    match = _FORM.fullmatch(text)
    return None if match is None else UserToken(match[1], match[2])
