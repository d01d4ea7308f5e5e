"""TLS between gcore's processes: certificate files, names in certificates, connections, HTTPS servers.

Certificate files (PEM) are read again when they change, so a renewed certificate is used from the next connection on, without a restart. Files that
do not match, as while one of two is being replaced, do not replace what was read before. A key that other users can read is rejected.

A certificate's identity is a URI among its names, `gcore://node/NAME` or `gcore://user/NAME?role=ROLE&namespace=NAME...`. A certificate of the same
authority without such a URI, such as etcd's, has no identity here.

Clients use a `Connector` and know nothing about certificates and tokens; `PLAIN` has neither, for loopback. `generation` tells owners of long-lived
connections when to reconnect. Tokens are sent only over TLS or to this machine. If a server requests client certificates, a client without one from
the cluster's authority fails the handshake; `gcore.api.rpc` has the server side for gRPC.

Engines and the SGLang adapter serve HTTP with this module and never load gRPC: only `Connector.channel` imports it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import ssl
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pydantic import BaseModel, ConfigDict

from gcore.errors import UsageError
from gcore.system.network import ChannelOptions, is_loopback, open_channel

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]
"""Identifies a version of files: modification time, size and inode of each."""


@dataclass(frozen=True, slots=True)
class PemFiles:
    """The content of the TLS files: the trusted authorities, and this process's certificate and private key. Never displayed."""

    ca: bytes = field(repr=False)
    cert: bytes | None = field(repr=False)
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Paths of the TLS files. `ca`: the authority that signs the peers' certificates. `cert` and `key`: this process's own, set together."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Paths of all files that are set."""
        return tuple(file for file in (self.ca, self.cert, self.key) if file is not None)

    def stamp(self) -> Stamp:
        """Return modification time, size and inode of each file, to detect changes. Raises UsageError if a file is missing."""
        try:
            found = [file.stat() for file in self.files]
        except OSError as error:
            raise _unreadable(error) from error
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def read(self) -> PemFiles:
        """Read the files and check that certificate and key match. Raises UsageError, also if other users may read the key."""
        if (self.cert is None) != (self.key is None):
            raise UsageError("only one of certificate and key is set", where="tls", fix="Set both or neither")
        try:
            ca = self.ca.read_bytes()
            cert, key = (None if file is None else file.read_bytes() for file in (self.cert, self.key))
            if self.key is not None and stat.S_IMODE(self.key.stat().st_mode) & 0o077:
                raise UsageError("other users may read the key", where=str(self.key), fix=f"Run chmod 600 {self.key}")
        except OSError as error:
            raise _unreadable(error) from error
        pem = PemFiles(ca, cert, key)
        self.context(pem)
        return pem

    def context(self, pem: PemFiles, *, serves: bool = False) -> ssl.SSLContext:
        """Return an SSL context from the files' content. Raises UsageError if certificate and key do not match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
        try:  # trust only this authority
            context.load_verify_locations(cadata=pem.ca.decode("ascii"))
        except (UnicodeDecodeError, ValueError, ssl.SSLError) as error:
            raise UsageError(
                f"the file is not an authority's certificate ({getattr(error, 'reason', None) or 'not PEM'})",
                where=str(self.ca),
                fix="Name the ca.pem that `gcore certs init` wrote",
            ) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if pem.cert is None or pem.key is None:
            return context
        try:
            # OpenSSL loads these from a file only. A temporary file makes sure that the checked content is what is used.
            with tempfile.NamedTemporaryFile(dir=_memory()) as both:
                os.fchmod(both.fileno(), 0o600)
                both.write(pem.key.rstrip() + b"\n" + pem.cert)
                both.flush()
                context.load_cert_chain(both.name)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(
                f"the files are not a certificate and its key ({getattr(error, 'reason', None) or error})",
                where=f"{self.cert}, {self.key}",
                fix="Inspect a file with `gcore certs show FILE`, or issue a pair with `gcore certs issue`",
            ) from error
        return context


class ReloadingFiles:
    """Keeps the content of TLS files and reads them again when they change; keeps the old content if the new files do not match. Thread-safe."""

    def __init__(self, material: TlsMaterial) -> None:
        """Read the files. Raises UsageError."""
        self.material = material
        self._stamp = material.stamp()
        self._pem = material.read()
        self.generation = 0
        """Number of times that changed files were read."""

    @property
    def pem(self) -> PemFiles:
        """The newest valid content; reads the files first if they changed."""
        self.look()
        return self._pem

    def look(self) -> bool:
        """Read the files if they changed; return whether they did and could be read."""
        try:
            return self.material.stamp() != self._stamp and self.reload()
        except UsageError as error:
            log.warning("the certificate files changed but cannot be used, keeping the previous ones: %s", error)
            return False

    def reload(self) -> bool:
        """Read the files and return whether their content changed. Raises UsageError, and then keeps the previous content."""
        stamp = self.material.stamp()
        pem = self.material.read()
        changed = pem != self._pem
        self._stamp, self._pem = stamp, pem
        if changed:
            self.generation += 1
            log.info("loaded changed certificates: %s", ", ".join(map(str, self.material.files)))
        return changed


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _unreadable(error: OSError) -> UsageError:
    return UsageError(
        f"cannot read the file ({error.strerror or error})",
        where=str(error.filename),
        fix="Check the path and its permissions; `gcore certs issue` creates missing files",
    )


AUTHORIZATION = "authorization"


class Connector:
    """Opens the connections of a process to daemons, train ranks and engines, with its certificates and token.

    `token`: the user's token; empty: none. `engines`: the cluster's engine key, from which `engine_key` derives each engine's key.
    """

    def __init__(self, tls: TlsMaterial | None = None, *, token: str = "", engines: bytes | None = None) -> None:
        """Read the TLS files. Raises UsageError if they cannot be used."""
        self._watched = None if tls is None else ReloadingFiles(tls)
        self._token = token
        self._engines = engines
        self._context: tuple[int, ssl.SSLContext] | None = None

    @property
    def secure(self) -> bool:
        """Whether connections use TLS."""
        return self._watched is not None

    @property
    def generation(self) -> int:
        """A number that changes when certificates change; then long-lived connections should reconnect."""
        if self._watched is None:
            return 0
        self._watched.look()
        return self._watched.generation

    def channel(self, address: str, options: ChannelOptions = ()) -> grpc.aio.Channel:
        """Open a channel to `host:port`."""
        if self._watched is None:
            return open_channel(address, options=options)
        import grpc

        pem = self._watched.pem
        return open_channel(address, grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert), options)

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Return the credentials for calls to `address`. Raises UsageError instead of sending a token over an unencrypted network."""
        if not self._token:
            return ()
        if self._watched is None and not is_loopback(address.rpartition(":")[0]):
            raise UsageError(
                "the connection is not encrypted, so gcore does not send the token",
                where=address,
                fix="Set the cluster's ca.pem in the context (`ca:`) or in GCORE_CA",
            )
        return ((AUTHORIZATION, f"Bearer {self._token}"),)

    @property
    def http(self) -> ssl.SSLContext | None:
        """The SSL context for HTTP to engines; None: plain HTTP."""
        if self._watched is None:
            return None
        generation = self.generation
        if self._context is None or self._context[0] != generation:
            self._context = generation, self._watched.material.context(self._watched.pem)
        return self._context[1]

    def engine_key(self, instance: str) -> str | None:
        """Return the key that the engine `instance` requires; None if engines require none."""
        return None if self._engines is None else key_of_engine(self._engines, instance)


PLAIN = Connector()
"""Connects without TLS, token and engine key, for loopback."""


def key_of_engine(secret: bytes, instance: str) -> str:
    """Derive the key that the engine `instance` requires from the cluster's engine key `secret`, which all nodes have."""
    return hmac.new(secret, b"gcore engine " + instance.encode(), hashlib.sha256).hexdigest()


class ServingTls(BaseModel):
    """Paths of the node's TLS files, in the launch document (the JSON file with which the daemon starts a worker)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca: str
    cert: str
    key: str

    @property
    def material(self) -> TlsMaterial:
        """The same paths as `TlsMaterial`."""
        return TlsMaterial(Path(self.ca), Path(self.cert), Path(self.key))


def serving_context(watched: ReloadingFiles, *, ask: bool = False) -> ssl.SSLContext:
    """Return the SSL context of an HTTPS server; new connections use the newest certificate files.

    `ask`: request a client certificate; a client may have none, but one of another authority fails the handshake. Raises UsageError.
    """

    def made() -> ssl.SSLContext:
        context = watched.material.context(watched.pem, serves=True)
        context.verify_mode = ssl.CERT_OPTIONAL if ask else ssl.CERT_NONE
        return context

    first = made()
    newest = [watched.generation, first]

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Switch to a newer certificate, if there is one, before the handshake sends it."""
        watched.look()
        if newest[0] != watched.generation:
            newest[:] = [watched.generation, made()]
        if newest[1] is not first:
            connection.context = newest[1]

    first.sni_callback = choose
    return first


Kind = Literal["node", "user"]

ROLES = ("viewer", "submitter", "admin")
"""Roles of users."""

SCHEME = "gcore"

EVERY = "*"
"""Namespace that stands for all."""

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class CertName:
    """The node or user that a certificate or token identifies. `role` and `namespaces` are set for users; an admin, or `*`, has all namespaces."""

    kind: Kind
    name: str
    role: str = ""
    namespaces: frozenset[str] = frozenset()

    @property
    def uri(self) -> str:
        """The URI in the certificate."""
        more = [("role", self.role)] if self.role else []
        more += [("namespace", one) for one in sorted(self.namespaces)]
        return f"{SCHEME}://{self.kind}/{quote(self.name, safe='')}" + (f"?{urlencode(more)}" if more else "")


def check_user(name: str, role: str, namespaces: Iterable[str], where: str) -> CertName:
    """Return the identity of a user after checking name, role and namespaces. `where`: place to name in errors. Raises UsageError."""
    spaces = frozenset(namespaces)
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is not a valid name",
            where=where,
            fix="Use letters, digits and ._@- inside, at most 63 characters",
        )
    if not role:
        raise UsageError("a user needs a role", where=where, fix=f"Set one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise UsageError(f"there is no role {role[:40]!r}", where=where, fix=f"Use one of {', '.join(ROLES)}")
    wrong = next((one for one in sorted(spaces - {EVERY}) if not NAMESPACE.fullmatch(one)), None)
    if wrong is not None:
        raise UsageError(
            f"{wrong[:80]!r} is not a valid namespace",
            where=where,
            fix="Use lower-case letters, digits and - inside, at most 63 characters",
        )
    if EVERY in spaces and len(spaces) > 1:
        raise UsageError(
            f"{EVERY} means all namespaces, but others are listed too", where=where, fix=f"List {EVERY} alone"
        )
    if role == "admin" and spaces:
        raise UsageError(
            "an admin has all namespaces, so none can be listed",
            where=where,
            fix="Leave the namespaces out, or use another role",
        )
    if role != "admin" and not spaces:
        raise UsageError(f"a {role} needs namespaces, but none is listed", where=where, fix="List one or more")
    return CertName("user", name, role, spaces)


def parse_cert_name(uris: Iterable[str]) -> CertName | None:
    """Return the identity in a certificate from the URIs among its names; None if no URI, or more than one, has gcore's scheme, or it is not valid."""
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
