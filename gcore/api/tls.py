"""TLS between processes of gcore: the files in use, the names in certificates, connections, and HTTPS servers.

Certificate files (PEM) are read again whenever they have changed: a renewed certificate counts from the next connection on,
without a restart. Files that do not fit together, as while one of two is replaced, do not replace what was read before. A key
that others can read is refused.

A certificate's identity is a URI among its names, `gcore://node/NAME` or `gcore://user/NAME?role=ROLE&namespace=NAME...`; a
certificate of the same authority without one, such as etcd's, has no identity here.

A client takes a `Connector` and knows nothing of certificates and tokens; `PLAIN` has none, for loopback. `generation` tells
those that keep connections open when to reconnect. A token is sent over TLS or to this machine only. Where a server asks for
client certificates, a client without one of the cluster's authority fails the handshake; `gcore.api.rpc` has what gRPC servers do.

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
"""What tells that a file is another one: when it was written, its length, its inode."""


@dataclass(frozen=True, slots=True)
class PemFiles:
    """What was in the files. Never shown."""

    ca: bytes = field(repr=False)
    cert: bytes | None = field(repr=False)
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """`ca`: who signs the certificates of those that are talked to. `cert` and `key` go together: this process's own."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All that there are."""
        return tuple(file for file in (self.ca, self.cert, self.key) if file is not None)

    def stamp(self) -> Stamp:
        """Changes with the files. Raises UsageError."""
        try:
            found = [file.stat() for file in self.files]
        except OSError as error:
            raise _unreadable(error) from error
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def read(self) -> PemFiles:
        """The files, if they fit together. Raises UsageError."""
        if (self.cert is None) != (self.key is None):
            raise UsageError(
                "of the certificate and its key only one is given", where="tls", fix="Give both or neither"
            )
        try:
            ca = self.ca.read_bytes()
            cert, key = (None if file is None else file.read_bytes() for file in (self.cert, self.key))
            if self.key is not None and stat.S_IMODE(self.key.stat().st_mode) & 0o077:
                raise UsageError("others may read the key", where=str(self.key), fix=f"chmod 600 {self.key}")
        except OSError as error:
            raise _unreadable(error) from error
        pem = PemFiles(ca, cert, key)
        self.context(pem)
        return pem

    def context(self, pem: PemFiles, *, serves: bool = False) -> ssl.SSLContext:
        """For Python's own connections, with what was read. Raises UsageError if it does not fit together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
        try:  # nobody but this authority is trusted
            context.load_verify_locations(cadata=pem.ca.decode("ascii"))
        except (UnicodeDecodeError, ValueError, ssl.SSLError) as error:
            raise UsageError(
                f"no certificate of an authority ({getattr(error, 'reason', None) or 'not PEM'})",
                where=str(self.ca),
                fix="Name the ca.pem that `gcore certs init` made",
            ) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if pem.cert is None or pem.key is None:
            return context
        try:
            # OpenSSL takes these from a file only. Both in one, and that gone at once: what was checked is what is used.
            with tempfile.NamedTemporaryFile(dir=_memory()) as both:
                os.fchmod(both.fileno(), 0o600)
                both.write(pem.key.rstrip() + b"\n" + pem.cert)
                both.flush()
                context.load_cert_chain(both.name)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(
                f"not a certificate and its key ({getattr(error, 'reason', None) or error})",
                where=f"{self.cert}, {self.key}",
                fix="`gcore certs show FILE` says what is in one; `gcore certs issue` makes a pair",
            ) from error
        return context


class ReloadingFiles:
    """The newest material that fits together. `pem` reads the files again if they have changed; any thread."""

    def __init__(self, material: TlsMaterial) -> None:
        """Raises UsageError: what is wrong at the start is said at the start."""
        self.material = material
        self._stamp = material.stamp()
        self._pem = material.read()
        self.generation = 0
        """Counts the times that others were read."""

    @property
    def pem(self) -> PemFiles:
        """What counts now."""
        self.look()
        return self._pem

    def look(self) -> bool:
        """Whether other files were there than last time, and they are read."""
        try:
            return self.material.stamp() != self._stamp and self.reload()
        except UsageError as error:
            log.warning("what was read before goes on to count: %s", error)
            return False

    def reload(self) -> bool:
        """Read them, whether they are new; whether they were. Raises UsageError, and then nothing has changed."""
        stamp = self.material.stamp()
        pem = self.material.read()
        changed = pem != self._pem
        self._stamp, self._pem = stamp, pem
        if changed:
            self.generation += 1
            log.info("read other certificates: %s", ", ".join(map(str, self.material.files)))
        return changed


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _unreadable(error: OSError) -> UsageError:
    return UsageError(
        f"cannot be read ({error.strerror or error})",
        where=str(error.filename),
        fix="Check the path and its permissions; `gcore certs issue` makes what is lacking",
    )


AUTHORIZATION = "authorization"


class Connector:
    """Makes the channels of one process. `token`: what it shows of itself; `engines`: the cluster's key of engines."""

    def __init__(self, tls: TlsMaterial | None = None, *, token: str = "", engines: bytes | None = None) -> None:
        """Raises UsageError for files that cannot be used."""
        self._watched = None if tls is None else ReloadingFiles(tls)
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

    def channel(self, address: str, options: ChannelOptions = ()) -> grpc.aio.Channel:
        """A channel to `host:port`."""
        if self._watched is None:
            return open_channel(address, options=options)
        import grpc

        pem = self._watched.pem
        return open_channel(address, grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert), options)

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


def serving_context(watched: ReloadingFiles, *, ask: bool = False) -> ssl.SSLContext:
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


def parse_cert_name(uris: Iterable[str]) -> CertName | None:
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
