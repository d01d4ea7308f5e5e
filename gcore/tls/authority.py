"""A private authority, and the certificates that it signs: for nodes, for users, for etcd.

Keys are of the curve P-256, and never leave where they are made but as a file that its owner alone can read. Certificates are
good for their names and for their time, and for being a server or a client as their kind needs. There is no list of those that
were taken back: a key that came into wrong hands is answered by a new authority (docs/security.md says how, without a
pause), so certificates are best short-lived. Knows no folders (`gcore.tls.folder`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gcore.errors import UsageError
from gcore.tls.names import CertName, name_in

SKEW = timedelta(minutes=5)
"""So much earlier does a certificate begin: clocks differ."""
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, PEM."""

    cert: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Seen:
    """What is in a certificate."""

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


def new_authority(name: str, *, days: int, now: datetime) -> Pair:
    """An authority that signs nothing but certificates of others."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _begun(subject, subject, key.public_key(), days, now)
    cert = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _written(cert, key)


def issue(
    authority: Pair, common_name: str, whose: CertName | None, hosts: Sequence[str], *, days: int, now: datetime
) -> Pair:
    """A certificate for a node, a user, or (`whose` None) another server such as etcd's. Raises UsageError.

    `hosts`: where a server answers, as names or IP addresses. A user's is for calling only.
    """
    signer = _read(authority.cert)
    signing = _key(authority.key)
    if signing.public_key() != signer.public_key():
        raise UsageError("the authority's key is not that of its certificate", fix="Name the folder of one authority")
    ends = now + timedelta(days=days)
    if ends > signer.not_valid_after_utc:
        raise UsageError(
            f"the authority itself ends on {signer.not_valid_after_utc:%Y-%m-%d}",
            fix="Issue for fewer days, or make a new authority and trust both for a while",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [_host(host) for host in hosts]
    if whose is not None:
        names.append(x509.UniformResourceIdentifier(whose.uri))
    purposes = [_CLIENT] if whose is not None and whose.kind == "user" else [_SERVER, _CLIENT]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
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


def seen(pem: bytes) -> Seen:
    """What the first certificate of a file says. Raises UsageError."""
    cert = _read(pem)
    names = _names(cert)
    purposes = _purposes(cert)
    return Seen(
        common_name=_common_name(cert.subject),
        issuer=_common_name(cert.issuer),
        whose=name_in(names.get_values_for_type(x509.UniformResourceIdentifier)) if names else None,
        hosts=tuple(map(str, _hosts(names))) if names else (),
        begins=cert.not_valid_before_utc,
        ends=cert.not_valid_after_utc,
        is_authority=_is_authority(cert),
        serves=_SERVER in purposes,
        calls=_CLIENT in purposes,
        sha256=cert.fingerprint(hashes.SHA256()).hex(),
    )


def signed_by(pem: bytes, authority: bytes) -> bool:
    """Whether this authority signed the certificate. Raises UsageError for what is no certificate."""
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
            f"{host[:80]!r} is no host", where="--host", fix="Name a host or an IP address, without a port"
        )
    return x509.DNSName(host)


def _written(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    plain = serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return Pair(cert.public_bytes(serialization.Encoding.PEM), text)


def _read(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise UsageError("not a certificate (PEM)", fix="Name a file such as cert.pem or ca.pem") from error


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise UsageError(
            "the authority's key cannot be read", fix="It is the ca-key.pem of `gcore certs init`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError("the authority's key is of another kind than gcore makes", fix="Issue with your own tools")
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
