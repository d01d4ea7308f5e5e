"""Three daemons, started as in a deployment, and a real etcd of three members, on one machine. By default the slots are emulated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from controllers.cli.local import home_processes
from gcore.client import JobsClient
from gcore.config.node import NodeConfig
from gcore.store.etcd import EtcdBinary, find_etcd
from gcore.store.reference import StoreRef
from gcore.system.clock import SystemClock
from gcore.system.network import free_ports, join_host_port
from gcore.system.process import ProcessId, send_signal, spawn_detached, terminate_process, wait_process_ended

CLOCK = SystemClock()
READY_S = 120.0


def start_etcd(folder: Path, members: int = 3, host: str = "127.0.0.1") -> tuple[list[str], list[ProcessId]]:
    """Their endpoints, and the processes."""
    binary = find_etcd()
    assert isinstance(binary, EtcdBinary)
    ports = [join_host_port(host, port) for port in free_ports(2 * members, host)]
    clients, peers = ports[:members], ports[members:]
    cluster = ",".join(f"m{i}=http://{peer}" for i, peer in enumerate(peers))
    processes = []
    folder.mkdir(parents=True, exist_ok=True)
    for i, (client, peer) in enumerate(zip(clients, peers, strict=True)):
        at, beside = f"http://{client}", f"http://{peer}"
        command = [
            *(str(binary.path), f"--name=m{i}", f"--data-dir={folder / str(i)}", f"--initial-cluster={cluster}"),
            *(f"--listen-client-urls={at}", f"--advertise-client-urls={at}"),
            *(f"--listen-peer-urls={beside}", f"--initial-advertise-peer-urls={beside}"),
        ]
        processes.append(spawn_detached(command, log_file=folder / f"{i}.log"))
    return clients, processes


@dataclass
class Nodes:
    """`addresses`, by node; `device`: what their slots are."""

    folder: Path
    endpoints: list[str]
    host: str = "127.0.0.1"
    device: str = "emulated"
    addresses: dict[str, str] = field(default_factory=dict)
    processes: dict[str, ProcessId] = field(default_factory=dict)

    def start(self, name: str, slots: int) -> None:
        """A daemon."""
        (port,) = free_ports(1, self.host)
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        config = NodeConfig(
            node=name,
            home=str(home),
            listen_host=self.host,
            listen_port=port,
            etcd=StoreRef(endpoints=tuple(self.endpoints)),
            slots=tuple(f"{self.device}:{number}" for number in range(slots)),
            run_root=str(self.folder / "runs"),
            orphan_grace_s=5.0,
        )
        file = home / "node.json"
        file.write_text(json.dumps(config.model_dump(mode="json", exclude_none=True)))
        command = [sys.executable, "-P", "-m", "controllers.daemon", "--home", str(home), "--config", str(file)]
        self.processes[name] = spawn_detached(command, log_file=home / "daemon.log")
        self.addresses[name] = join_host_port(self.host, port)

    def kill(self, name: str) -> None:
        """As a crash does."""
        send_signal(self.processes[name], signal.SIGKILL)
        wait_process_ended(self.processes[name], 10.0)

    def client(self, *names: str) -> JobsClient:
        """That asks these, in this order."""
        return JobsClient([self.addresses[name] for name in names or self.addresses], clock=CLOCK)


@contextlib.asynccontextmanager
async def three_nodes(
    folder: Path, slots: int = 4, *, host: str = "127.0.0.1", device: str = "emulated"
) -> AsyncIterator[Nodes]:
    """Ready; all of it has ended afterwards."""
    endpoints, members = start_etcd(folder / "etcd", host=host)
    nodes = Nodes(folder, endpoints, host, device)
    try:
        (folder / "runs").mkdir()
        for name in ("node-0", "node-1", "node-2"):
            nodes.start(name, slots)
        async with nodes.client() as client, asyncio.timeout(READY_S):
            for address in nodes.addresses.values():
                for _ in range(int(READY_S / 0.2)):
                    if await client.is_serving(address):
                        break
                    await asyncio.sleep(0.2)
        yield nodes
    finally:
        for process in nodes.processes.values():
            terminate_process(process, 5.0)
        for name in nodes.addresses:
            for left in home_processes((folder / name).resolve()):
                terminate_process(left.process, 2.0)
        for member in members:
            terminate_process(member, 0.0)
