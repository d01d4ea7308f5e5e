"""TLS files: valid combinations are loaded, changed files are reloaded, and each mistake is one error sentence."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import issued
import pytest

from gcore.api.authority import renew_certificate
from gcore.api.tls import PLAIN, Connector, ReloadingFiles, TlsMaterial, key_of_engine, serving_context
from gcore.errors import UsageError


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    return issued.authority(tmp_path / "ca")


def test_renewed_files_are_used_from_the_next_read_on(ca: Path) -> None:
    watched = ReloadingFiles(issued.node(ca, "n1"))
    before = watched.pem
    assert watched.pem is before
    assert watched.generation == 0
    renew_certificate(ca / "n1", ca, within_days=None, days=2, now=datetime.now(UTC))
    assert watched.pem.cert != before.cert
    assert watched.generation == 1


def test_a_certificate_whose_key_is_not_there_yet_does_not_count(ca: Path) -> None:
    watched = ReloadingFiles(issued.node(ca, "n1"))
    before = watched.pem
    (ca / "n1" / "cert.pem").write_bytes((ca / "ca.pem").read_bytes())
    assert watched.pem == before
    (ca / "n1" / "cert.pem").unlink()
    assert watched.pem == before
    assert watched.generation == 0


def test_a_key_that_others_can_read_is_refused(ca: Path) -> None:
    material = issued.node(ca, "n1")
    assert material.key is not None
    material.key.chmod(0o640)
    with pytest.raises(UsageError, match="other users may read the key"):
        ReloadingFiles(material)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("ca", b"", "not an authority's certificate"),
        ("ca", b"\xff\xfe", "not an authority's certificate"),
        ("cert", b"junk", "not a certificate and its key"),
        ("key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "not a certificate and its key"),
    ],
)
def test_garbled_files_are_told_by_name(ca: Path, name: str, content: bytes, said: str) -> None:
    material = issued.node(ca, "n1")
    file: Path = getattr(material, name)
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        ReloadingFiles(material)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_told_by_name(tmp_path: Path, ca: Path) -> None:
    material = replace(issued.node(ca, "n1"), ca=tmp_path / "none.pem")
    with pytest.raises(UsageError, match=r"none.pem: cannot read the file"):
        ReloadingFiles(material)
    with pytest.raises(UsageError, match="only one of certificate and key is set"):
        TlsMaterial(ca / "ca.pem", ca / "n1" / "cert.pem").read()


def test_a_server_shows_a_renewed_certificate_to_the_next_connection(ca: Path) -> None:
    watched = ReloadingFiles(issued.node(ca, "n1"))
    context = serving_context(watched)

    def shown() -> bytes:
        client = watched.material.context(watched.pem)
        a, b, c, d = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO()
        asks = client.wrap_bio(a, b, server_hostname="localhost")
        serves = context.wrap_bio(c, d, server_side=True)
        for _ in range(6):
            for side, out, into in ((asks, b, c), (serves, d, a)):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                into.write(out.read())
        found = asks.getpeercert(binary_form=True)
        assert found
        return found

    first = shown()
    assert shown() == first
    renew_certificate(ca / "n1", ca, within_days=None, days=2, now=datetime.now(UTC))
    assert shown() != first


def test_a_token_is_sent_to_this_machine_or_over_tls_and_nowhere_else(ca: Path) -> None:
    plain = Connector(token="gcore_x")
    assert plain.metadata("127.0.0.1:1") == plain.metadata("[::1]:1") == (("authorization", "Bearer gcore_x"),)
    with pytest.raises(UsageError, match="the connection is not encrypted"):
        plain.metadata("node-1:7500")
    assert Connector(TlsMaterial(ca / "ca.pem"), token="gcore_x").metadata("node-1:7500")
    assert PLAIN.metadata("node-1:7500") == ()


def test_every_engine_has_a_key_of_its_own() -> None:
    keys = {key_of_engine(secret, name) for secret in (b"a" * 32, b"b" * 32) for name in ("one", "two")}
    assert len(keys) == 4
    assert PLAIN.engine_key("one") is None
    assert Connector(engines=b"a" * 32).engine_key("one") == key_of_engine(b"a" * 32, "one")
