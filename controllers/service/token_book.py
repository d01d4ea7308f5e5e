"""The tokens there are, as last heard from the store, and whose a call is by what it shows.

A token that was taken back counts no more as soon as that is heard; while the store is away nothing is heard, and nothing of a
job is told either. One from the file that the node's configuration names is an admin's always: with it the first others are made. Whoever shows a token
is who the token says, whatever certificate comes with it. Writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from controllers.service.access import NOBODY_IS_TOLD_APART, USER_ROLES, Caller, Role
from controllers.service.refusals import Unauthenticated
from gcore.clock import Clock
from gcore.errors import StoreUnavailable, UsageError
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.types import Store, WatchBatch
from gcore.tls.names import EVERY, CertName, name_in
from gcore.tokens import Token, TokenRecord, token_in

log = logging.getLogger(__name__)

FIRST_ADMIN = "first-admin"
"""Who shows the token of the configuration's file."""
HOW = "Show a token (`gcore token create` makes one; GCORE_TOKEN or the context names it) or a client certificate"


class NoCredentials(Unauthenticated):
    """Neither a token nor a certificate."""

    reason = "NO_CREDENTIALS"


class BadToken(Unauthenticated):
    """No token, or none of this cluster, or one that was taken back."""

    reason = "BAD_TOKEN"


class TokenExpired(Unauthenticated):
    """It was good once."""

    reason = "TOKEN_EXPIRED"


class BadCertificate(Unauthenticated):
    """The cluster's authority signed it, and says not for whom of gcore."""

    reason = "BAD_CERTIFICATE"


class TokenBook:
    """`required` False: nobody is told apart, whatever a call shows. Any thread may ask."""

    def __init__(self, clock: Clock, *, required: bool = False, admin_file: Path | None = None) -> None:
        """Raises UsageError for an admin's file that has no token."""
        self._clock = clock
        self.required = required
        self._first = None if admin_file is None else read_token(admin_file)
        self._known: dict[str, TokenRecord] = {}
        self._heard = False

    async def watch(self, store: Store) -> None:
        """Hear of tokens, for ever."""
        async for batch in store.watch(keys.TOKENS):
            self.note(batch)

    def note(self, batch: WatchBatch) -> None:
        """What was heard."""
        known = {} if batch.reset else dict(self._known)
        for event in batch.events:
            token_id = event.kv.key.removeprefix(keys.TOKENS)
            known.pop(token_id, None)
            if event.kind == "put":
                try:
                    known[token_id] = TokenRecord.decode(event.kv.value, event.kv.key)
                except UnreadableRecord as error:
                    log.error("passed over: %s", error)
        self._known, self._heard = known, True

    def caller(self, authorization: str | None, uris: Iterable[str] | None) -> Caller:
        """Whose a call is that shows this header and a certificate with these names (None: no certificate).

        Raises Unauthenticated; StoreUnavailable while it is not known which tokens there are.
        """
        if not self.required:
            return NOBODY_IS_TOLD_APART
        if authorization is not None:
            scheme, _, text = authorization.partition(" ")
            if scheme.lower() != "bearer":
                raise BadToken("the header `authorization` is no Bearer token", fix=HOW)
            return self.by_token(text.strip())
        if uris is not None:
            return by_certificate(uris)
        raise NoCredentials("the call does not say whose it is", fix=HOW)

    def by_token(self, text: str) -> Caller:
        """Whose the token is. Raises Unauthenticated, StoreUnavailable."""
        token = token_in(text)
        if token is None:
            raise BadToken("what was shown is no token", fix="A token begins with gcore_; copy all of it")
        if self._first is not None and token.id == self._first.id and token.is_of(self._first.sha256):
            return Caller(FIRST_ADMIN, Role.ADMIN)
        if not self._heard:
            raise StoreUnavailable(
                "which tokens there are was not heard from the store yet", fix="Ask again in a moment"
            )
        record = self._known.get(token.id)
        if record is None or not token.is_of(record.sha256):
            raise BadToken("the token is not one of this cluster, or was revoked", fix=HOW)
        if self._clock.wall() >= record.expires:
            raise TokenExpired(f"the token {record.id} of {record.name} has expired", fix="Have an admin make another")
        try:
            return _user(record.whose)
        except UsageError as error:
            raise BadToken(f"the token's record says nothing that holds ({error})", fix=HOW) from error


def by_certificate(uris: Iterable[str]) -> Caller:
    """Whose a certificate is that the cluster's authority signed. Raises Unauthenticated."""
    whose = name_in(uris)
    if whose is None:
        raise BadCertificate(
            "the certificate does not say for whom of gcore it is", fix="`gcore certs issue NAME --for user` makes one"
        )
    return Caller(whose.name, Role.NODE) if whose.kind == "node" else _user(whose)


def _user(whose: CertName) -> Caller:
    role = USER_ROLES[whose.role]
    every = role is Role.ADMIN or EVERY in whose.namespaces
    return Caller(whose.name, role, None if every else whose.namespaces)


def read_token(file: Path) -> Token:
    """The token in a file of its own. Raises UsageError."""
    fix = f"`gcore token first-admin --to {file}` makes one"
    try:
        if file.stat().st_mode & 0o077:
            raise UsageError("others may read the token", where=str(file), fix=f"chmod 600 {file}")
        token = token_in(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"the token cannot be read ({why})", where=str(file), fix=fix) from error
    if token is None:
        raise UsageError("there is no token in it", where=str(file), fix=fix)
    return token
