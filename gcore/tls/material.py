"""The files (PEM) with which a process speaks TLS: whom it trusts, and its own certificate with its key.

They are read anew whenever they have changed: a certificate that was renewed counts from the next connection on, without a
restart. Files that do not fit together, as in the moment in which one of two was replaced, do not replace what was read before.
A key that others can read is refused. Makes no certificates.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from gcore.errors import UsageError

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]
"""What tells that a file is another one: when it was written, its length, its inode."""


@dataclass(frozen=True, slots=True)
class Pem:
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

    def read(self) -> Pem:
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
        pem = Pem(ca, cert, key)
        self.context(pem)
        return pem

    def context(self, pem: Pem, *, serves: bool = False) -> ssl.SSLContext:
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


class Watched:
    """The newest material that fits together. `pem` reads the files again if they have changed; any thread."""

    def __init__(self, material: TlsMaterial) -> None:
        """Raises UsageError: what is wrong at the start is said at the start."""
        self.material = material
        self._stamp = material.stamp()
        self._pem = material.read()
        self.generation = 0
        """Counts the times that others were read."""

    @property
    def pem(self) -> Pem:
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
