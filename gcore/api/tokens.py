"""Tokens of users: what one looks like, and what of it the store keeps.

A token is `gcore_ID_SECRET`. The secret has 256 random bits, so the store keeps its SHA-256 and needs no salt: nobody guesses it, and
from what is stored nobody gets it back. The prefix lets scanners of source code find one that was lost. Nothing here asks the
store or the clock.
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

KEPT_S = 7 * 86400.0
"""So long does one that has expired stay in the list, so that its end is told from a token that never was."""

MOST_TOKENS = 10_000
_FORM = re.compile(r"gcore_([a-z0-9]{12})_([A-Za-z0-9_-]{43})")


class TokenRecord(Record):
    """`tokens/{id}`."""

    id: str
    name: str
    role: str
    namespaces: tuple[str, ...] = ()
    """("*",): all; an admin has all without it."""
    sha256: str
    """Of the secret."""
    created: float
    expires: float
    created_by: str = ""

    @property
    def whose(self) -> CertName:
        """Raises UsageError for what was never made so."""
        return check_user(self.name, self.role, self.namespaces, "token")


@dataclass(frozen=True, slots=True)
class UserToken:
    """A user's token."""

    id: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        """Whole, as it goes into files and headers."""
        return f"gcore_{self.id}_{self.secret}"

    @property
    def sha256(self) -> str:
        """What is kept of it."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    def is_of(self, sha256: str) -> bool:
        """Whether it is the one of which that was kept; takes the same time for all that are not."""
        return hmac.compare_digest(self.sha256, sha256)


def new_token() -> UserToken:
    """Another one than there ever was."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return UserToken("".join(secrets.choice(letters) for _ in range(12)), secrets.token_urlsafe(32))


def parse_token(text: str) -> UserToken | None:
    """What somebody showed; None: no token."""
    match = _FORM.fullmatch(text)
    return None if match is None else UserToken(match[1], match[2])
