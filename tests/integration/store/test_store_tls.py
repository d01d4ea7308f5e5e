"""The etcd client with certificates and users: accepted and refused credentials, and an expired token."""

import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
from aetcd import rpc
from tcp_proxy import Proxy

from gcore.errors import StoreUnavailable
from gcore.store.client import EtcdStore
from gcore.store.connection import StoreRefused, StoreTls, StoreUser
from gcore.store.etcd import EtcdBinary, LocalEtcd, find_etcd
from gcore.store.types import Put
from gcore.system.clock import SystemClock
from gcore.system.network import free_ports
from gcore.system.process import spawn_detached, terminate_process

CLOCK = SystemClock()


# --- certificates


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str) -> StoreTls:
        """A certificate for this machine, good for servers and clients."""
        key, request, certificate = (self.folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        extensions = self.folder / "extensions"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("req", "-new", *NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed_by = ("-CA", self.certificate, "-CAkey", self.folder / "ca.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", request, *signed_by, "-days", "2", "-extfile", extensions, "-out", certificate)
        return StoreTls(ca=self.certificate, cert=certificate, key=key)


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(folder: Path) -> Authority:
    folder.mkdir()
    openssl(
        *("req", "-x509", *NEW_KEY, "-keyout", folder / "ca.key", "-out", folder / "ca.pem"),
        *("-subj", "/CN=test authority", "-days", "2"),
    )
    return Authority(folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("pki") / "ours")


@pytest.fixture
async def secure_endpoint(ours: Authority, tmp_path: Path) -> AsyncIterator[str]:
    """An etcd that shows a certificate and asks for one."""
    binary = find_etcd()
    assert isinstance(binary, EtcdBinary)
    tls, client, peer = (
        ours.issue("server"),
        f"https://127.0.0.1:{free_ports(1)[0]}",
        f"http://127.0.0.1:{free_ports(1)[0]}",
    )
    process = spawn_detached(
        [
            str(binary.path),
            *(f"--data-dir={tmp_path / 'data'}", f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            f"--initial-cluster=default={peer}",
            *(f"--cert-file={tls.cert}", f"--key-file={tls.key}", f"--trusted-ca-file={tls.ca}", "--client-cert-auth"),
        ],
        log_file=tmp_path / "log",
    )
    yield client
    terminate_process(process, 5.0)


@pytest.mark.needs("openssl")
async def test_a_client_with_a_certificate_is_let_in(secure_endpoint: str, ours: Authority) -> None:
    store = await EtcdStore.connect([secure_endpoint], clock=CLOCK, tls=ours.issue("client"), timeout_s=60.0)
    assert (await store.transact([], [Put("k", b"1")])).won
    lease = await store.grant(60)
    assert await store.keep_alive(lease) == 60.0
    async with aclosing(store.watch("")) as batches:
        assert [event.kv.value for event in (await anext(batches)).events] == [b"1"]
    await store.close()


@pytest.mark.needs("openssl")
async def test_behind_a_dead_first_endpoint_certificates_are_checked_by_name(
    secure_endpoint: str, ours: Authority
) -> None:
    _, _, port = secure_endpoint.rpartition(":")
    endpoints = [f"https://127.0.0.1:{free_ports(1)[0]}", f"https://localhost:{port}"]
    store = await EtcdStore.connect(endpoints, clock=CLOCK, tls=ours.issue("client"), timeout_s=60.0)
    assert (await store.transact([], [Put("k", b"1")])).won
    await store.close()


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("how", ["no certificate", "another authority", "plain text"])
async def test_any_other_client_is_refused(secure_endpoint: str, ours: Authority, tmp_path: Path, how: str) -> None:
    welcome = await EtcdStore.connect([secure_endpoint], clock=CLOCK, tls=ours.issue("client"), timeout_s=60.0)
    await welcome.get("k")  # it is up: whoever is not let in now is refused
    await welcome.close()
    endpoint = secure_endpoint
    tls: StoreTls | None = StoreTls(ca=ours.certificate)
    if how == "another authority":
        tls = authority(tmp_path / "theirs").issue("client")
    elif how == "plain text":
        tls, endpoint = None, secure_endpoint.removeprefix("https://")
    store = await EtcdStore.connect([endpoint], clock=CLOCK, tls=tls, timeout_s=1.0)
    with pytest.raises(StoreUnavailable):
        await store.get("k")
    await store.close()


@pytest.mark.needs("openssl")
async def test_a_certificate_that_was_replaced_counts_without_a_restart(
    secure_endpoint: str, ours: Authority, tmp_path: Path
) -> None:
    welcome = await EtcdStore.connect([secure_endpoint], clock=CLOCK, tls=ours.issue("client"), timeout_s=60.0)
    await welcome.get("k")
    await welcome.close()
    mine = StoreTls(ca=ours.certificate, cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")

    def put(shown: StoreTls) -> None:
        for source, target in ((shown.cert, mine.cert), (shown.key, mine.key)):
            assert source is not None
            assert target is not None
            target.write_bytes(source.read_bytes())

    put(authority(tmp_path / "theirs").issue("client"))
    store = await EtcdStore.connect([secure_endpoint], clock=CLOCK, tls=mine, timeout_s=1.0)
    with pytest.raises(StoreUnavailable):
        await store.get("k")
    put(ours.issue("renewed"))
    await store.get("k")
    await store.close()


# --- users


ROOT = StoreUser("root", "root's secret")
READER = StoreUser("reader", "reader's secret")


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[LocalEtcd]:
    """An etcd with users: root, and one that may only read /open/."""
    etcd = await LocalEtcd.start(tmp_path / "data", log_file=tmp_path / "log", clock=CLOCK)
    store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    readable = rpc.Permission(permType=rpc.Permission.READ, key=b"/open/", range_end=b"/open0")
    for method, request in (
        ("UserAdd", rpc.AuthUserAddRequest(name=ROOT.name, password=ROOT.password)),
        ("RoleAdd", rpc.AuthRoleAddRequest(name="root")),
        ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user=ROOT.name, role="root")),
        ("UserAdd", rpc.AuthUserAddRequest(name=READER.name, password=READER.password)),
        ("RoleAdd", rpc.AuthRoleAddRequest(name="reading")),
        ("RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name="reading", perm=readable)),
        ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user=READER.name, role="reading")),
        ("AuthEnable", rpc.AuthEnableRequest()),
    ):
        await administer(store, method, request)
    await store.close()
    yield etcd
    await etcd.stop()


async def administer(store: EtcdStore, method: str, request: object) -> None:
    await store._caller.call(
        lambda connection, metadata, within: getattr(connection.auth, method)(
            request, metadata=metadata, timeout=within
        ),
        repeatable=False,
    )


async def test_a_user_does_what_it_may(guarded: LocalEtcd) -> None:
    root = await EtcdStore.connect([guarded.endpoint], clock=CLOCK, user=ROOT)
    reader = await EtcdStore.connect([guarded.endpoint], clock=CLOCK, user=READER)
    lease = await root.grant(60)
    assert (await root.transact([], [Put("/open/k", b"1", lease), Put("/shut/k", b"1")])).won
    assert await root.keep_alive(lease) == 60.0
    assert [kv.key for kv in (await reader.list("/open/")).kvs] == ["/open/k"]
    async with aclosing(reader.watch("/open/")) as batches:
        await anext(batches)
        await root.revoke(lease)
        assert [event.kind for event in (await anext(batches)).events] == ["delete"]
    with pytest.raises(StoreRefused, match="permission denied"):
        await reader.get("/shut/k")
    with pytest.raises(StoreRefused, match="permission denied"):
        await reader.transact([], [Put("/open/k", b"2")])
    with pytest.raises(StoreRefused, match="permission denied"):
        await anext(reader.watch("/shut/"))
    await root.close()
    await reader.close()


@pytest.mark.parametrize(
    "user",
    [
        pytest.param(None, id="nobody"),
        pytest.param(StoreUser("root", "wrong"), id="wrong password"),
        pytest.param(StoreUser("nobody", "x"), id="unknown user"),
    ],
)
async def test_unknown_users_are_refused_at_once(guarded: LocalEtcd, user: StoreUser | None) -> None:
    store = await EtcdStore.connect([guarded.endpoint], clock=CLOCK, user=user, timeout_s=60.0)
    with pytest.raises(StoreRefused):
        await store.get("/open/k")
    await store.close()


async def test_a_token_that_is_no_longer_valid_is_replaced(guarded: LocalEtcd) -> None:
    """etcd forgets simple tokens when it restarts, and when they were not used for five minutes."""
    root = await EtcdStore.connect([guarded.endpoint], clock=CLOCK, user=ROOT)
    proxy = await Proxy.start(guarded.endpoint)
    reader = await EtcdStore.connect([proxy.endpoint], clock=CLOCK, user=READER)
    await root.transact([], [Put("/open/k", b"1")])
    async with aclosing(reader.watch("/open/")) as batches:
        await anext(batches)
        await proxy.cut()
        root._caller._token = reader._caller._token = "forgotten.1"
        assert (await root.transact([], [Put("/open/k", b"2")])).won
        await proxy.heal()
        assert [event.kv.value for event in (await anext(batches)).events] == [b"2"]
    kv = await reader.get("/open/k")
    assert kv is not None
    assert kv.value == b"2"
    await root.close()
    await reader.close()
    await proxy.close()


async def test_a_change_of_users_does_not_disturb_those_who_are_there(guarded: LocalEtcd) -> None:
    root = await EtcdStore.connect([guarded.endpoint], clock=CLOCK, user=ROOT)
    assert (await root.transact([], [Put("/open/k", b"1")])).won
    await administer(root, "UserAdd", rpc.AuthUserAddRequest(name="another", password="x"))
    assert (await root.transact([], [Put("/open/k", b"2")])).won
    await root.close()
