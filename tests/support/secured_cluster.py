"""A cluster with certificates for etcd, daemons, ranks and engines, and tokens for users, on loopback.

The processes are real; the jobs run on emulated slots. `everything_written` is every output of the cluster that could leak a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import issued
import yaml

from controllers.cli.local import end_processes
from gcore.api.authority import ENGINES, CertificateRequest, issue_certificate_into
from gcore.api.tls import Connector, TlsMaterial
from gcore.api.tokens import UserToken, new_token
from gcore.client import JobsClient, WaitPolicy
from gcore.store.client import EtcdStore
from gcore.store.connection import StoreTls
from gcore.store.etcd import EtcdBinary, find_etcd
from gcore.system.clock import SystemClock
from gcore.system.network import free_ports
from gcore.system.process import ProcessId, is_running, spawn_detached, terminate_process

CLOCK = SystemClock()
READY_S = 60.0


@dataclass
class SecuredCluster:
    """`root`: everything is below it. `more`: further sections of each daemon's configuration."""

    root: Path
    slots: int = 4
    apart: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir()
        self.ca = issued.authority(self.root / "ca")
        self.admin: UserToken = new_token()
        file = self.root / "admin.token"
        file.write_text(self.admin.text)
        file.chmod(0o600)
        now = datetime.now(UTC)
        issue_certificate_into(self.ca / "etcd", self.ca, CertificateRequest("etcd", "etcd", issued.LOCAL, days=2), now)
        self.names = ("node-0", "node-1")
        for name in self.names:
            issued.node(self.ca, name)
        client, peer, *ports = free_ports(2 + 3 * len(self.names))
        self.etcd_urls = f"https://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self.api = dict(zip(self.names, ports[0::3], strict=True))
        self.peers = dict(zip(self.names, ports[1::3], strict=True))
        self.metrics = dict(zip(self.names, ports[2::3], strict=True))
        self.processes: list[ProcessId] = []

    @property
    def addresses(self) -> list[str]:
        """Where people ask."""
        return [f"127.0.0.1:{self.api[name]}" for name in self.names]

    def home(self, name: str) -> Path:
        """A node's."""
        return self.root / name

    def connector(self, token: str | None = None) -> Connector:
        """As a person; None: the first admin."""
        return Connector(TlsMaterial(self.ca / "ca.pem"), token=self.admin.text if token is None else token)

    def client(self, token: str | None = None) -> JobsClient:
        """The job API's."""
        return JobsClient(self.addresses, clock=CLOCK, patience=WaitPolicy(), connector=self.connector(token))

    @property
    def engines_key(self) -> str:
        """The cluster's."""
        return (self.ca / ENGINES).read_text().strip()

    def start(self) -> None:
        """Etcd, then the daemons. Returns when they are spawned."""
        binary = find_etcd()
        assert isinstance(binary, EtcdBinary)
        tls, (client, peer) = issued.material(self.ca / "etcd"), self.etcd_urls
        self.processes.append(
            spawn_detached(
                [
                    str(binary.path),
                    *(f"--data-dir={self.root / 'etcd'}", f"--listen-client-urls={client}"),
                    *(f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"),
                    *(f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"),
                    *(f"--cert-file={tls.cert}", f"--key-file={tls.key}", f"--trusted-ca-file={tls.ca}"),
                    "--client-cert-auth",
                ],
                log_file=self.root / "etcd.log",
            )
        )
        for number, name in enumerate(self.names):
            self.home(name).mkdir()
            file = self.home(name) / "node.yaml"
            file.write_text(yaml.safe_dump(self._config(name, number)))
            command = [sys.executable, "-P", "-m", "controllers.daemon", "--config", str(file)]
            log = self.home(name) / "logs" / "daemon.log"
            log.parent.mkdir()
            self.processes.append(spawn_detached(command, log_file=log, env={**os.environ, **self.env}))

    def _config(self, name: str, number: int) -> dict[str, object]:
        files = {kind: str(self.ca / name / f"{kind}.pem") for kind in ("ca", "cert", "key")}
        first = number * self.slots
        return {
            "node": name,
            "home": str(self.home(name)),
            "run_root": str((self.home(name) if self.apart else self.root) / "runs"),
            "slots": [f"emulated:{slot}" for slot in range(first, first + self.slots)],
            "listen_port": self.api[name],
            "metrics_port": self.metrics[name],
            "etcd": {"endpoints": [self.etcd_urls[0]], "tls": files},
            "tls": {**files, "engines_key": str(self.ca / name / ENGINES), "peer_port": self.peers[name]},
            "auth": {"admin_token_file": str(self.root / "admin.token")},
            "orphan_grace_s": 5.0,
            **self.more,
        }

    async def until_ready(self) -> None:
        """Every daemon says that it serves. Raises AssertionError with the last words of one that ended."""
        begun = CLOCK.monotonic()
        async with self.client() as client:
            for name, address in zip(self.names, self.addresses, strict=True):
                while not await client.is_serving(address):
                    said = (self.home(name) / "logs" / "daemon.log").read_text()[-2000:]
                    assert all(map(is_running, self.processes)), said
                    assert CLOCK.monotonic() - begun < READY_S, said
                    await CLOCK.sleep(0.1)

    async def store(self) -> EtcdStore:
        """What the daemons agree through."""
        tls = issued.material(self.ca / "node-0")
        return await EtcdStore.connect([self.etcd_urls[0]], clock=CLOCK, tls=StoreTls(tls.ca, tls.cert, tls.key))

    def gcore(self, *words: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
        """A command, whose context is this cluster. `token`: in place of the first admin's."""
        file = self.root / "config.yaml"
        if not file.exists():
            context = {"addresses": self.addresses, "ca": "ca/ca.pem", "token_file": "admin.token"}
            file.write_text(yaml.safe_dump({"current": "lab", "contexts": {"lab": context}}))
        env = {key: value for key, value in os.environ.items() if not key.startswith("GCORE_")}
        env |= {"GCORE_CONFIG": str(file), "GCORE_HOME": str(self.root / "nowhere")}
        env |= {} if token is None else {"GCORE_TOKEN": token}
        command = [sys.executable, "-P", "-m", "controllers.cli.main", *words]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)

    def close(self) -> None:
        """Nothing is left running."""
        for process in self.processes[1:]:
            terminate_process(process, 5.0)
        for name in self.names:
            if self.home(name).exists():
                end_processes(self.home(name), clock=CLOCK, grace_s=2.0)
        for process in self.processes[:1]:
            terminate_process(process, 5.0)

    def everything_written(self) -> Iterator[tuple[str, bytes]]:
        """Each file below the root but for what the cluster was given, by name."""
        given = {self.root / "ca", self.root / "admin.token"}
        for file in self.root.rglob("*"):
            if file.is_file() and not any(file.is_relative_to(one) for one in given):
                yield str(file.relative_to(self.root)), file.read_bytes()


@contextlib.asynccontextmanager
async def secured(cluster: SecuredCluster) -> AsyncIterator[SecuredCluster]:
    """The cluster, up and ready."""
    try:
        await asyncio.to_thread(cluster.start)
        await cluster.until_ready()
        yield cluster
    finally:
        await asyncio.to_thread(cluster.close)
