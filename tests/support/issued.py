"""Certificates and tokens for tests: a certificate authority in a folder, as `gcore certs` creates it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from gcore.api.authority import CertificateRequest, issue_certificate_into, make_authority
from gcore.api.tls import TlsMaterial

LOCAL = ("localhost", "127.0.0.1")


def authority(folder: Path) -> Path:
    """A new one."""
    make_authority(folder, "tests", days=400, now=datetime.now(UTC) - timedelta(days=100))
    return folder


def node(
    ca: Path, name: str, *, hosts: tuple[str, ...] = LOCAL, begun: timedelta = timedelta(), days: int = 2
) -> TlsMaterial:
    """A node's certificate. `begun`: so long ago."""
    issue_certificate_into(ca / name, ca, CertificateRequest("node", name, hosts, days=days), datetime.now(UTC) - begun)
    return material(ca / name)


def user(
    ca: Path, name: str, role: str = "admin", *namespaces: str, begun: timedelta = timedelta(), days: int = 2
) -> TlsMaterial:
    """A user's."""
    wanted = CertificateRequest("user", name, role=role, namespaces=namespaces, days=days)
    issue_certificate_into(ca / name, ca, wanted, datetime.now(UTC) - begun)
    return material(ca / name)


def material(folder: Path) -> TlsMaterial:
    """The files of a folder."""
    return TlsMaterial(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
