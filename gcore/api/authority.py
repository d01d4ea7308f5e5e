"""A private certificate authority for nodes, users and etcd, and the folders of `gcore certs`.

Keys use the curve P-256 and leave the machine that made them only as files that only their owner can read. Certificates are valid for their names
and period, and as server or client certificates as their kind needs. There is no revocation list: after a leaked key, operators replace the
authority (docs/operate/security.md describes how, without downtime). So certificates should be short-lived.

AUTHORITY/ contains ca.pem, ca-key.pem and engines.key (the cluster's engine key, from which each engine's key is derived). NAME/ contains ca.pem,
cert.pem, key.pem, and for a node engines.key; this folder goes to the node. Keys have mode 0600, folders of keys 0700. Only `renew` overwrites
files. It leaves a matching certificate and key, and a reader in between keeps its old pair.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gcore.api.tls import NAME, CertName, check_user, parse_cert_name
from gcore.errors import UsageError, explain_os_errors
from gcore.system.files import replace_file

MAX_NAME = 64
"""Longest common name in X.509, in characters."""
SKEW = timedelta(minutes=5)
"""A certificate is valid from this long before its issue, because clocks differ."""

_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate and its private key, both as PEM."""

    cert: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """The fields of a certificate that gcore uses and displays. `whose`: the node or user that it names; None for another server, such as etcd.

    `serves` and `calls`: whether it is valid as a server and as a client certificate.
    """

    common_name: str
    issuer: str
    whose: CertName | None
    hosts: tuple[str, ...]
    begins: datetime
    ends: datetime
    is_authority: bool
    serves: bool
    calls: bool
    sha256: str


def new_authority(name: str, *, days: int, now: datetime) -> CertificatePair:
    """Create a self-signed authority that signs certificates, but no further authorities. Raises UsageError."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(name)
    builder = _begun(subject, subject, key.public_key(), days, now)
    cert = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _written(cert, key)


def _named(common_name: str) -> x509.Name:
    if not 1 <= len(common_name) <= MAX_NAME:
        raise UsageError(
            f"a certificate's name has 1 to {MAX_NAME} characters, not {len(common_name)}", fix="Choose another name"
        )
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def issue_certificate(
    authority: CertificatePair,
    common_name: str,
    whose: CertName | None,
    hosts: Sequence[str],
    *,
    days: int,
    now: datetime,
) -> CertificatePair:
    """Issue a certificate for a node, a user, or (`whose` None) another server such as etcd. Raises UsageError.

    `hosts`: names or IP addresses of a server. A user's certificate is a client certificate only.
    """
    signer = _read(authority.cert)
    signing = _key(authority.key)
    if signing.public_key() != signer.public_key():
        raise UsageError(
            "the authority's key does not match its certificate", fix="Use ca.pem and ca-key.pem of the same authority"
        )
    ends = now + timedelta(days=days)
    if ends > signer.not_valid_after_utc:
        raise UsageError(
            f"the authority itself expires on {signer.not_valid_after_utc:%Y-%m-%d}, before the new certificate would",
            fix="Issue for fewer days, or create a new authority and trust both for a while",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [_host(host) for host in hosts]
    if whose is not None:
        names.append(x509.UniformResourceIdentifier(whose.uri))
    purposes = [_CLIENT] if whose is not None and whose.kind == "user" else [_SERVER, _CLIENT]
    subject = _named(common_name)
    builder = _begun(subject, signer.subject, key.public_key(), days, now)
    cert = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    return _written(cert, key)


def read_certificate(pem: bytes) -> CertificateInfo:
    """Read the first certificate of a PEM file. Raises UsageError."""
    cert = _read(pem)
    names = _names(cert)
    purposes = _purposes(cert)
    return CertificateInfo(
        common_name=_common_name(cert.subject),
        issuer=_common_name(cert.issuer),
        whose=parse_cert_name(names.get_values_for_type(x509.UniformResourceIdentifier)) if names else None,
        hosts=tuple(map(str, _hosts(names))) if names else (),
        begins=cert.not_valid_before_utc,
        ends=cert.not_valid_after_utc,
        is_authority=_is_authority(cert),
        serves=_SERVER in purposes,
        calls=_CLIENT in purposes,
        sha256=cert.fingerprint(hashes.SHA256()).hex(),
    )


def is_signed_by(pem: bytes, authority: bytes) -> bool:
    """Return whether the authority signed the certificate. Raises UsageError if either is not a certificate."""
    try:
        _read(pem).verify_directly_issued_by(_read(authority))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _begun(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int, now: datetime
) -> x509.CertificateBuilder:
    begins = now.astimezone(UTC) - SKEW
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(now.astimezone(UTC) + timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host or len(host) > 253 or not all(c.isascii() and (c.isalnum() or c in "-.*") for c in host):
        raise UsageError(
            f"{host[:80]!r} is not a host", where="--host", fix="Name a host or an IP address, without a port"
        )
    return x509.DNSName(host)


def _written(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> CertificatePair:
    plain = serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return CertificatePair(cert.public_bytes(serialization.Encoding.PEM), text)


def _read(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise UsageError("the file is not a certificate (PEM)", fix="Name a file such as cert.pem or ca.pem") from error


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise UsageError("cannot read the authority's key", fix="Use the ca-key.pem of `gcore certs init`") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(
            f"the authority's key is a {type(key).__name__}, and gcore signs with elliptic-curve keys only",
            fix="Issue the certificate with the tools of that authority",
        )
    return key


def _names(cert: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _hosts(names: x509.SubjectAlternativeName) -> Iterable[object]:
    yield from names.get_values_for_type(x509.DNSName)
    yield from names.get_values_for_type(x509.IPAddress)


def _purposes(cert: x509.Certificate) -> x509.ExtendedKeyUsage | tuple[()]:
    try:
        return cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ()


def _is_authority(cert: x509.Certificate) -> bool:
    try:
        return cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


CA, CA_KEY, ENGINES, CERT, KEY = "ca.pem", "ca-key.pem", "engines.key", "cert.pem", "key.pem"
MOST_DAYS = 36500
Purpose = Literal["node", "user", "etcd"]


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """What a new certificate shall contain. `role` and `namespaces`: only for a user. `hosts`: only for a server. `days`: validity."""

    purpose: Purpose
    name: str
    hosts: tuple[str, ...] = ()
    role: str = ""
    namespaces: tuple[str, ...] = ()
    days: int = 90

    @property
    def whose(self) -> CertName | None:
        """The node or user that the certificate names; None for a server other than a node. Raises UsageError if the request is not valid."""
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name[:80]!r} is not a valid name",
                where="NAME",
                fix="Use letters, digits and ._@- inside, at most 63 characters",
            )
        if self.purpose == "user":
            if self.hosts:
                raise UsageError("a user's certificate cannot contain a host", where="--host", fix="Leave --host out")
            return check_user(self.name, self.role, self.namespaces, "--role, --namespace")
        if self.role or self.namespaces:
            raise UsageError(
                f"a certificate for {self.purpose} cannot have a role", where="--role", fix="Use --for user"
            )
        if not self.hosts:
            raise UsageError(
                "a server's certificate needs the hosts at which it is reached",
                where="--host",
                fix="Name each host and IP address with --host",
            )
        return CertName("node", self.name) if self.purpose == "node" else None


def make_authority(folder: Path, name: str, *, days: int, now: datetime) -> None:
    """Create an authority named `name` and the cluster's engine key in `folder`. Raises UsageError if there is one already."""
    _check_days(days)
    if (folder / CA_KEY).exists() or (folder / CA).exists():
        raise UsageError(
            "the folder already contains an authority, which stays valid", where=str(folder), fix="Name another folder"
        )
    made = new_authority(name, days=days, now=now)
    _write(folder, {CA_KEY: made.key, ENGINES: secrets.token_hex(32).encode() + b"\n", CA: made.cert})


def issue_certificate_into(folder: Path, authority: Path, wanted: CertificateRequest, now: datetime) -> CertificateInfo:
    """Issue a certificate by the authority in the folder `authority`, and write it with its key into `folder`. Raises UsageError."""
    _check_days(wanted.days)
    whose = wanted.whose
    if (folder / CERT).exists() or (folder / KEY).exists():
        raise UsageError(
            "the folder already contains a certificate",
            where=str(folder),
            fix="Renew it with `gcore certs renew`, or name another folder with --to",
        )
    signer = _authority(authority)
    made = issue_certificate(signer, wanted.name, whose, wanted.hosts, days=wanted.days, now=now)
    files = {KEY: made.key, CERT: made.cert, CA: signer.cert}
    if wanted.purpose == "node":
        files[ENGINES] = _bytes(authority / ENGINES)
    _write(folder, files)
    return read_certificate(made.cert)


def renew_certificate(
    folder: Path, authority: Path, *, within_days: int | None, days: int | None, now: datetime
) -> CertificateInfo | None:
    """Issue the certificate in `folder` again, with a new key and for the same names.

    `within_days`: do nothing and return None if the old one is valid for longer than this. `days`: validity of the new one; None: as long as the old
    one's. Raises UsageError.
    """
    before = read_certificate(_bytes(folder / CERT))
    if within_days is not None and before.ends > now + timedelta(days=within_days):
        return None
    signer = _authority(authority)
    span = (before.ends - before.begins).days if days is None else days
    _check_days(span)
    made = issue_certificate(signer, before.common_name, before.whose, before.hosts, days=span, now=now)
    _write(folder, {KEY: made.key, CERT: made.cert, CA: _trusted(folder / CA, signer.cert)})
    return read_certificate(made.cert)


def add_trust(folder: Path, authority: Path, *, only: bool) -> int:
    """Add the authority in the folder `authority` to those that a certificate's `folder` trusts (its ca.pem); with `only`, replace them.

    Return the number of trusted authorities. Raises UsageError.
    """
    signer = _bytes(authority / CA)
    if not read_certificate(signer).is_authority:
        raise UsageError(
            "the certificate is not an authority's", where=str(authority / CA), fix="Create one with `gcore certs init`"
        )
    if only and not is_signed_by(_bytes(folder / CERT), signer):
        raise UsageError(
            "the folder's own certificate is from another authority and would no longer be trusted",
            where=str(folder / CERT),
            fix="Renew it with this authority first: `gcore certs renew`",
        )
    trusted = signer if only else _trusted(folder / CA, signer)
    _write(folder, {CA: trusted})
    return trusted.count(b"BEGIN CERTIFICATE")


def inspect_certificate(file: Path) -> CertificateInfo:
    """Read a certificate file, or the certificate in a folder: cert.pem, or else ca.pem. Raises UsageError."""
    if file.is_dir():
        file = file / CERT if (file / CERT).exists() else file / CA
    try:
        return read_certificate(_bytes(file))
    except UsageError as error:
        raise UsageError(error.what, where=error.where or str(file), fix=error.fix) from error


def _trusted(file: Path, signer: bytes) -> bytes:
    """Return the authorities in `file` plus `signer` (PEM). While an authority is being replaced, a folder trusts the old and the new one."""
    before = file.read_bytes() if file.exists() else b""
    return before if signer.strip() in before else signer + before


def _authority(folder: Path) -> CertificatePair:
    pair = CertificatePair(_bytes(folder / CA), _bytes(folder / CA_KEY))
    if not is_signed_by(pair.cert, pair.cert):
        raise UsageError(
            "the certificate is not a self-signed authority's",
            where=str(folder / CA),
            fix="Create one with `gcore certs init`",
        )
    return pair


def _bytes(file: Path) -> bytes:
    with explain_os_errors(
        "cannot read the file",
        UsageError,
        where=file,
        fix="Name a folder that `gcore certs init` or `gcore certs issue` made",
    ):
        return file.read_bytes()


def _write(folder: Path, files: dict[str, bytes]) -> None:
    with explain_os_errors("cannot write the folder", UsageError, where=folder, fix="Name another folder"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, data in files.items():
            replace_file(folder / name, data, mode=0o644 if name in (CA, CERT) else 0o600)


def _check_days(days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"{days} is not a valid number of days", where="--days", fix=f"Use 1 to {MOST_DAYS}")


def parse_hosts(words: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts in the values of `--host`, each of which may list several, separated by commas."""
    return tuple(host for word in words for host in word.split(",") if host)
