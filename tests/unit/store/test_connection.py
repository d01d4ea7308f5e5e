"""The syntax of endpoints, certificates, and the meaning of etcd's errors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gcore.errors import StoreUnavailable, UsageError
from gcore.store.connection import (
    TELL_AGAIN_S,
    ConnectionPool,
    ErrorClass,
    EtcdCaller,
    EtcdEndpoint,
    StoreTls,
    StoreUser,
    classify_error,
)
from gcore.testing import FakeClock


@pytest.mark.parametrize(
    ("text", "target", "secure"),
    [
        pytest.param("10.0.0.1:2379", "10.0.0.1:2379", False, id="address"),
        pytest.param("etcd-0.etcd:2379", "etcd-0.etcd:2379", False, id="name"),
        pytest.param("http://etcd:2379", "etcd:2379", False, id="http"),
        pytest.param("https://etcd:2379/", "etcd:2379", True, id="https"),
        pytest.param("[::1]:2379", "[::1]:2379", False, id="version 6"),
        pytest.param("https://[fe80::1]:1", "[fe80::1]:1", True, id="version 6 with https"),
    ],
)
def test_an_endpoint_is_read(text: str, target: str, secure: bool) -> None:
    endpoint = EtcdEndpoint.parse(text)
    assert (endpoint.target, endpoint.secure) == (target, secure)


@pytest.mark.parametrize(
    "text", ["", "etcd", "etcd:", "etcd:port", "etcd:99999", "ftp://etcd:1", "http://etcd:1/v3", ":2379"]
)
def test_invalid_endpoints_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="is not an etcd endpoint") as caught:
        EtcdEndpoint.parse(text)
    assert "host:port" in str(caught.value)


def test_a_store_needs_an_endpoint() -> None:
    with pytest.raises(UsageError, match="no etcd endpoint"):
        ConnectionPool.open([], None)


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only one of etcd client certificate and key is set"):
        StoreTls(cert=tmp_path / "cert.pem").credentials()


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ca\.pem"):
        StoreTls(ca=tmp_path / "ca.pem").credentials()


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in repr(StoreUser("root", "hunter2"))


@pytest.mark.parametrize(
    ("code", "details", "meaning"),
    [
        pytest.param("NOT_FOUND", "etcdserver: requested lease not found", ErrorClass.LEASE_GONE, id="lease"),
        pytest.param(
            "OUT_OF_RANGE",
            "etcdserver: mvcc: required revision has been compacted",
            ErrorClass.COMPACTED,
            id="compacted",
        ),
        pytest.param("UNAUTHENTICATED", "etcdserver: invalid auth token", ErrorClass.TOKEN_STALE, id="token"),
        pytest.param(
            "INVALID_ARGUMENT", "etcdserver: revision of auth store is old", ErrorClass.TOKEN_STALE, id="auth revision"
        ),
        pytest.param("UNAVAILABLE", "etcdserver: no leader", ErrorClass.NOT_BEGUN, id="no leader"),
        pytest.param("RESOURCE_EXHAUSTED", "etcdserver: too many requests", ErrorClass.NOT_BEGUN, id="too many"),
        pytest.param("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", ErrorClass.FULL, id="full"),
        pytest.param("PERMISSION_DENIED", "etcdserver: permission denied", ErrorClass.REFUSED, id="permission"),
        pytest.param("UNAVAILABLE", "etcdserver: leader changed", ErrorClass.UNKNOWN, id="leader changed"),
        pytest.param("UNAVAILABLE", "etcdserver: request timed out", ErrorClass.UNKNOWN, id="timed out"),
        pytest.param("UNAVAILABLE", "Socket closed", ErrorClass.UNKNOWN, id="socket"),
        pytest.param("DEADLINE_EXCEEDED", "Deadline Exceeded", ErrorClass.UNKNOWN, id="deadline"),
        pytest.param("CANCELLED", "", ErrorClass.UNKNOWN, id="cancelled"),
    ],
)
def test_an_error_of_etcd_says_what_became_of_the_call(code: str, details: str, meaning: ErrorClass) -> None:
    assert classify_error(grpc.StatusCode[code], details) is meaning


async def test_a_store_that_is_full_is_told_in_the_log_now_and_then_and_not_at_every_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    connection = SimpleNamespace(endpoint=EtcdEndpoint.parse("127.0.0.1:1"))

    async def ready(within_s: float) -> Any:
        return connection

    pool: Any = SimpleNamespace(ready=ready)
    caller = EtcdCaller(pool, clock, user=None, timeout_s=1.0)

    async def full(connection: Any, metadata: Any, within: float) -> None:
        nothing = grpc.aio.Metadata()
        details = "etcdserver: mvcc: database space exceeded"
        raise grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, nothing, nothing, details)

    for told in (1, 1, 2):
        with pytest.raises(StoreUnavailable, match="database is full"):
            await caller.call(full, repeatable=False)
        assert len([line for line in caplog.messages if "the store's database is full" in line]) == told
        await clock.advance(TELL_AGAIN_S / 2)
