"""The expiry of etcd members' certificates, as a daemon sees it from outside: renewed, expired and foreign certificates."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from gcore.api.authority import (
    CertificateRequest,
    inspect_certificate,
    issue_certificate_into,
    make_authority,
    renew_certificate,
)
from gcore.store.etcd import EtcdBinary, find_etcd
from gcore.store.reference import StoreRef, TlsFiles, store_certificate_expiries, tls_endpoints
from gcore.system.clock import SystemClock
from gcore.system.network import free_ports
from gcore.system.process import spawn_detached, terminate_process

NOW = datetime.now(UTC)
CLOCK = SystemClock()


@pytest.fixture
async def member(tmp_path: Path) -> AsyncIterator[StoreRef]:
    """An etcd with a certificate of ten days, that asks for one, and how a daemon reaches it."""
    make_authority(tmp_path / "ca", "gcore", days=900, now=NOW - timedelta(days=100))
    issue_certificate_into(
        tmp_path / "etcd", tmp_path / "ca", CertificateRequest("etcd", "etcd-0", ("127.0.0.1",), days=10), NOW
    )
    issue_certificate_into(tmp_path / "node", tmp_path / "ca", CertificateRequest("node", "n", ("127.0.0.1",)), NOW)
    binary = find_etcd()
    assert isinstance(binary, EtcdBinary)
    client, peer, own = (f"{scheme}://127.0.0.1:{free_ports(1)[0]}" for scheme in ("https", "http", "http"))
    files = {"cert": "cert.pem", "key": "key.pem", "trusted-ca": "ca.pem"}
    process = spawn_detached(
        [
            str(binary.path),
            *(f"--data-dir={tmp_path / 'data'}", f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster=default={peer}", f"--listen-metrics-urls={own}", "--client-cert-auth"),
            *(f"--{kind}-file={tmp_path / 'etcd' / name}" for kind, name in files.items()),
        ],
        log_file=tmp_path / "log",
    )
    tls = TlsFiles(**{name: str(tmp_path / "node" / f"{name}.pem") for name in ("ca", "cert", "key")})
    store = StoreRef(endpoints=(client, f"https://127.0.0.1:{free_ports(1)[0]}"), tls=tls)
    # Over its plain port: a client that is closed while it connects would be an error in etcd's log.
    async with httpx.AsyncClient() as client:
        for _ in range(120):
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{own}/health")).is_success:
                    break
            await CLOCK.sleep(0.25)
    yield store
    terminate_process(process, 5.0)


async def test_the_end_of_a_members_certificate_is_seen_and_that_of_a_renewed_one_without_a_restart(
    member: StoreRef, tmp_path: Path
) -> None:
    (answers, _) = (endpoint.target for endpoint in tls_endpoints(member))
    folder, authority = tmp_path / "etcd", tmp_path / "ca"
    assert await store_certificate_expiries(member) == {answers: inspect_certificate(folder).ends.timestamp()}, (
        "of one that is away nothing is said"
    )
    renew_certificate(folder, authority, within_days=30, days=90, now=NOW)
    assert inspect_certificate(folder).ends > NOW + timedelta(days=89)
    assert await store_certificate_expiries(member) == {answers: inspect_certificate(folder).ends.timestamp()}
    renew_certificate(folder, authority, within_days=None, days=1, now=NOW - timedelta(days=50))
    assert await store_certificate_expiries(member) == {answers: inspect_certificate(folder).ends.timestamp()}, (
        "one that has ended is told of, too"
    )
    assert inspect_certificate(folder).ends < NOW
    log = (tmp_path / "log").read_text()
    assert "rejected connection" not in log, "a look is no error in etcd's log"


async def test_expiries_are_empty_for_a_foreign_server_and_for_missing_files(member: StoreRef, tmp_path: Path) -> None:
    make_authority(tmp_path / "theirs", "gcore", days=900, now=NOW)
    other = TlsFiles(ca=str(tmp_path / "theirs" / "ca.pem"))
    assert await store_certificate_expiries(member.model_copy(update={"tls": other})) == {}
    gone = TlsFiles(ca=str(tmp_path / "gone.pem"))
    assert await store_certificate_expiries(member.model_copy(update={"tls": gone})) == {}
    assert tls_endpoints(StoreRef(endpoints=("127.0.0.1:2379",))) == ()
