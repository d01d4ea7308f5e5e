"""The folders of `gcore certs`: the authority's, and one for each certificate. Keys have the mode 0600, folders of keys 0700.

AUTHORITY/ca.pem, ca-key.pem, engines.key (the cluster's key of engines, from which each replica's follows). NAME/ca.pem, cert.pem,
key.pem, and for a node engines.key: this folder is what goes to the node. Nothing is overwritten but by `renew`, which leaves a
certificate and a key that fit, in an order in which whoever reads in between goes on with what it had.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

from gcore.atomic import whole_file
from gcore.errors import UsageError
from gcore.tls.authority import Pair, Seen, issue, new_authority, seen, signed_by
from gcore.tls.names import NAME, CertName, check_user

CA, CA_KEY, ENGINES, CERT, KEY = "ca.pem", "ca-key.pem", "engines.key", "cert.pem", "key.pem"
MOST_DAYS = 36500
Purpose = Literal["node", "user", "etcd"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A certificate that is to be issued."""

    purpose: Purpose
    name: str
    hosts: tuple[str, ...] = ()
    role: str = ""
    namespaces: tuple[str, ...] = ()
    days: int = 90

    @property
    def whose(self) -> CertName | None:
        """Raises UsageError."""
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name[:80]!r} is no name", where="NAME", fix="Take letters, digits and ._@- inside, 63 at most"
            )
        if self.purpose == "user":
            if self.hosts:
                raise UsageError("a user's certificate names no host", where="--host", fix="Leave --host out")
            return check_user(self.name, self.role, self.namespaces, "--role, --namespace")
        if self.role or self.namespaces:
            raise UsageError(f"a certificate for {self.purpose} has no role", where="--role", fix="Use --for user")
        if not self.hosts:
            raise UsageError(
                "a server's certificate names where it answers",
                where="--host",
                fix="Name every host and IP address by which it is reached, with --host each",
            )
        return CertName("node", self.name) if self.purpose == "node" else None


def make_authority(folder: Path, name: str, *, days: int, now: datetime) -> None:
    """Raises UsageError if there is one already."""
    _check_days(days)
    if (folder / CA_KEY).exists() or (folder / CA).exists():
        raise UsageError(
            "there is an authority already", where=str(folder), fix="Name another folder; this one goes on to count"
        )
    made = new_authority(name, days=days, now=now)
    _write(folder, {CA_KEY: made.key, ENGINES: secrets.token_hex(32).encode() + b"\n", CA: made.cert})


def issue_into(folder: Path, authority: Path, wanted: Wanted, now: datetime) -> Seen:
    """Write the folder of a new certificate. Raises UsageError."""
    _check_days(wanted.days)
    whose = wanted.whose
    if (folder / CERT).exists() or (folder / KEY).exists():
        raise UsageError(
            "there is a certificate already",
            where=str(folder),
            fix="`gcore certs renew` renews it; or name another --to",
        )
    signer = _authority(authority)
    made = issue(signer, wanted.name, whose, wanted.hosts, days=wanted.days, now=now)
    files = {KEY: made.key, CERT: made.cert, CA: signer.cert}
    if wanted.purpose == "node":
        files[ENGINES] = _bytes(authority / ENGINES)
    _write(folder, files)
    return seen(made.cert)


def renew_in(folder: Path, authority: Path, *, within_days: int | None, days: int | None, now: datetime) -> Seen | None:
    """A new certificate with a new key for the same names; None: it lasts longer than `within_days`. Raises UsageError."""
    before = seen(_bytes(folder / CERT))
    if within_days is not None and before.ends > now + timedelta(days=within_days):
        return None
    signer = _authority(authority)
    span = (before.ends - before.begins).days if days is None else days
    _check_days(span)
    made = issue(signer, before.common_name, before.whose, before.hosts, days=span, now=now)
    _write(folder, {KEY: made.key, CERT: made.cert, CA: _trusted(folder / CA, signer.cert)})
    return seen(made.cert)


def trust_in(folder: Path, authority: Path, *, only: bool) -> int:
    """Have a folder trust an authority, besides those it trusts or (`only`) alone; how many it trusts then. Raises UsageError."""
    signer = _bytes(authority / CA)
    if not seen(signer).is_authority:
        raise UsageError("that is no authority", where=str(authority / CA), fix="`gcore certs init` makes one")
    if only and not signed_by(_bytes(folder / CERT), signer):
        raise UsageError(
            "the certificate there is another authority's, and would be trusted by nobody",
            where=str(folder / CERT),
            fix="Renew it by this authority first: `gcore certs renew`",
        )
    trusted = signer if only else _trusted(folder / CA, signer)
    _write(folder, {CA: trusted})
    return trusted.count(b"BEGIN CERTIFICATE")


def look(file: Path) -> Seen:
    """What is in a certificate, or in the one of a folder. Raises UsageError."""
    if file.is_dir():
        file = file / CERT if (file / CERT).exists() else file / CA
    try:
        return seen(_bytes(file))
    except UsageError as error:
        raise UsageError(error.what, where=error.where or str(file), fix=error.fix) from error


def _trusted(file: Path, signer: bytes) -> bytes:
    """Whom the folder trusted, and the signer: while an authority is replaced a folder trusts both."""
    before = file.read_bytes() if file.exists() else b""
    return before if signer.strip() in before else signer + before


def _authority(folder: Path) -> Pair:
    pair = Pair(_bytes(folder / CA), _bytes(folder / CA_KEY))
    if not signed_by(pair.cert, pair.cert):
        raise UsageError("that is no authority of its own", where=str(folder / CA), fix="`gcore certs init` makes one")
    return pair


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error.strerror or error})",
            where=str(file),
            fix="Name a folder that `gcore certs init` or `gcore certs issue` made",
        ) from error


def _write(folder: Path, files: dict[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, data in files.items():
            whole_file(folder / name, data, mode=0o644 if name in (CA, CERT) else 0o600)
    except OSError as error:
        raise UsageError(
            f"cannot be written ({error.strerror or error})", where=str(folder), fix="Name another folder"
        ) from error


def _check_days(days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"{days} days are no time", where="--days", fix=f"Name 1 to {MOST_DAYS}")


def hosts_of(words: Sequence[str]) -> tuple[str, ...]:
    """`--host a,b --host c`."""
    return tuple(host for word in words for host in word.split(",") if host)
