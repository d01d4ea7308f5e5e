"""Who a certificate is of: a URI among its names, `gcore://node/NAME` or `gcore://user/NAME?role=ROLE&namespace=NAME...`. Pure.

A certificate of the cluster's authority without such a name, as etcd's own are, is nobody's here. So a certificate counts for
what its authority signed it as, whatever else is on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from gcore.errors import UsageError

Kind = Literal["node", "user"]
ROLES = ("viewer", "submitter", "admin")
"""Of users."""
SCHEME = "gcore"
EVERY = "*"
"""As a namespace: all."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class CertName:
    """Whose it is. `role` and `namespaces` are a user's; an admin has all of them, and who has `*`."""

    kind: Kind
    name: str
    role: str = ""
    namespaces: frozenset[str] = frozenset()

    @property
    def uri(self) -> str:
        """As it stands in the certificate."""
        more = [("role", self.role)] if self.role else []
        more += [("namespace", one) for one in sorted(self.namespaces)]
        return f"{SCHEME}://{self.kind}/{quote(self.name, safe='')}" + (f"?{urlencode(more)}" if more else "")


def check_user(name: str, role: str, namespaces: Iterable[str], where: str) -> CertName:
    """A user that may exist. Raises UsageError."""
    spaces = frozenset(namespaces)
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is no name", where=where, fix="Take letters, digits and ._@- inside, 63 characters at most"
        )
    if not role:
        raise UsageError("a user has a role, and none is named", where=where, fix=f"Name one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise UsageError(f"there is no role {role[:40]!r}", where=where, fix=f"There are {', '.join(ROLES)}")
    wrong = next((one for one in sorted(spaces - {EVERY}) if not NAMESPACE.fullmatch(one)), None)
    if wrong is not None:
        raise UsageError(
            f"{wrong[:80]!r} is no namespace", where=where, fix="Take small letters, digits and - inside, 63 at most"
        )
    if EVERY in spaces and len(spaces) > 1:
        raise UsageError(
            f"{EVERY} is every namespace, and others are named too", where=where, fix=f"Name {EVERY} alone"
        )
    if role == "admin" and spaces:
        raise UsageError("an admin has every namespace", where=where, fix="Leave the namespaces out, or the role")
    if role != "admin" and not spaces:
        raise UsageError(
            f"a {role} has the namespaces that are named, and none is", where=where, fix="Name one or more"
        )
    return CertName("user", name, role, spaces)


def name_in(uris: Iterable[str]) -> CertName | None:
    """Whose the certificate with these names is; None: nobody's here. One with two such names is nobody's either."""
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}://")]
    return _parse(ours[0]) if len(ours) == 1 else None


def _parse(uri: str) -> CertName | None:
    try:
        parts = urlsplit(uri)
        name = parts.path.removeprefix("/")
        pairs = parse_qsl(parts.query, strict_parsing=True) if parts.query else []
        roles = [value for key, value in pairs if key == "role"]
        spaces = [value for key, value in pairs if key == "namespace"]
        if len(roles) + len(spaces) != len(pairs):
            return None
        if parts.netloc == "node" and NAME.fullmatch(name) and not pairs:
            found = CertName("node", name)
        elif parts.netloc == "user" and len(roles) == 1:
            found = check_user(name.replace("%40", "@"), roles[0], spaces, "certificate")
        else:
            return None
    except (ValueError, UsageError):
        return None
    return found if found.uri == uri else None
