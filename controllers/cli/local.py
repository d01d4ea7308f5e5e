"""The local cluster: one etcd and several daemons on this machine, in one folder (the home folder).

`start_cluster` returns when every daemon is ready. If it fails, it raises an error and leaves nothing running. `stop_cluster` stops the
processes of the home folder and keeps the data, so that the next start continues the same jobs. It stops daemons first, because they would
restart workers. Then it stops workers, which stop their engines and train ranks, and at last etcd. Each process gets SIGTERM, and SIGKILL after a grace
period. Meanwhile, the file `stopping` prevents daemons from restarting processes (`controllers.daemon.keeper`). A file lock allows only
one start or stop at a time per home folder.

`stop_cluster` does not rely on records of `start_cluster`. It reads the command lines of this user's processes: daemons, workers and
trackers have `--home HOME`, etcd has its data folder, and the rest are descendants of workers. The command line tool itself is excluded.
Clusters of several machines are started by systemd, Kubernetes or Slurm.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from controllers.daemon.keeper import STOPPING, daemon_command
from gcore.errors import GcoreError, UsageError
from gcore.system.clock import Clock
from gcore.system.process import (
    KILL_WAIT_S,
    EndedBySignal,
    ProcessId,
    ending_signal,
    identify_process,
    is_running,
    send_signal,
    spawn_detached,
    wait_process_ended,
)

if TYPE_CHECKING:
    from gcore.config.local_cluster import ControllerProcess, EtcdProcess, LocalClusterState
    from gcore.config.node import NodeConfig
    from gcore.store.etcd import LocalEtcd


Kind = Literal["controller", "worker", "child", "etcd"]

_PROGRAMS: Mapping[str, Kind] = {
    "controllers.daemon": "controller",
    "gcore-controller": "controller",
    "gcore.worker.main": "worker",
    "gcore-worker": "worker",
    "gcore.emulated.host": "worker",
    "gcore.tracking": "child",
}


@dataclass(frozen=True, slots=True)
class HomeProcess:
    """A process of the home folder. `child`: an engine, a train rank, a tracker, or a descendant of one."""

    process: ProcessId
    kind: Kind


def real_path(path: Path) -> Path:
    """Resolve links. A link to itself is unchanged; `Path.resolve` would raise RuntimeError."""
    return Path(os.path.realpath(path))


def classify_process(arguments: Sequence[str], home: Path) -> Kind | None:
    """The kind of a process, from its command line; None if it is not a process of the home folder `home` (absolute,
    resolved)."""
    if not arguments:
        return None
    if Path(arguments[0]).name == "etcd":
        folders = [a.removeprefix("--data-dir=") for a in arguments if a.startswith("--data-dir=")]
        return "etcd" if any(_is_under(folder, home) for folder in folders) else None
    program = _program_of(arguments)
    return program if program is not None and _home_of(arguments) == home else None


def home_processes(home: Path) -> tuple[HomeProcess, ...]:
    """Every running process of `home`, except this one and its ancestors."""
    table = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    spared = _ancestors(os.getpid(), table)
    kinds: dict[int, Kind] = {}
    for pid in table.keys() - spared:
        kind = classify_process(_arguments(pid), home)
        if kind is not None:
            kinds[pid] = kind
    for pid in _descendants([p for p, kind in kinds.items() if kind == "worker"], table) - spared:
        kinds.setdefault(pid, "child")
    found = ((identify_process(pid), kind) for pid, kind in sorted(kinds.items()))
    return tuple(HomeProcess(process, kind) for process, kind in found if process is not None)


def _program_of(arguments: Sequence[str]) -> Kind | None:
    """The kind of process that a command line starts, by its module or script name; None if it is no process of gcore."""
    return next((_PROGRAMS[name] for word in arguments[:9] if (name := Path(word).name) in _PROGRAMS), None)


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """The supervisor process of an engine or a train rank, or the host process of emulated ones.

    `instance`: name of the worker; empty if its command line does not have it. `has_daemon`: whether a daemon of its
    home folder runs.
    """

    process: ProcessId
    instance: str
    home: Path
    has_daemon: bool


def local_workers() -> tuple[LocalWorker, ...]:
    """This user's workers of all home folders. If the home folder of a running daemon is unknown, every worker counts as having a daemon."""
    found: list[tuple[ProcessId, str, Path]] = []
    daemons: set[Path | None] = set()
    for pid in _pids():
        arguments = _arguments(pid)
        program, home = _program_of(arguments), _home_of(arguments)
        if program == "controller":
            daemons.add(home or _configured_home(pid, arguments))
        elif program == "worker" and home is not None and (process := identify_process(pid)) is not None:
            launch = arguments.index("--launch") + 1 if "--launch" in arguments[:-1] else None
            found.append((process, "" if launch is None else Path(arguments[launch]).stem, home))
    return tuple(
        LocalWorker(process, instance, home, home in daemons or None in daemons)
        for process, instance, home in sorted(found, key=lambda one: (one[2], one[1], one[0].pid))
    )


def _configured_home(pid: int, arguments: Sequence[str]) -> Path | None:
    """The home folder of a daemon from its configuration file; None if the file cannot be read."""
    from gcore.config.node import NodeConfig

    names = [after for before, after in itertools.pairwise(arguments) if before == "--config"]
    names += [word.removeprefix("--config=") for word in arguments if word.startswith("--config=")]
    try:
        return real_path(Path(NodeConfig.load(Path(os.readlink(f"/proc/{pid}/cwd")) / names[0]).home))
    except (OSError, IndexError, GcoreError):
        return None


def end_leftover_workers(homes: Iterable[Path], *, clock: Clock) -> ShutdownResult:
    """Stop the workers of these home folders, which have no running daemon, and their child processes."""
    ended = killed = 0
    for home in homes:
        there = home_processes(home)  # List them before workers end: then their children would get another parent.
        for kind in ("worker", "child"):
            some = [one.process for one in there if one.kind == kind and is_running(one.process)]
            ended += len(some)
            killed += _end(some, GRACES_S[kind], clock)
    return ShutdownResult(ended, killed)


def _home_of(arguments: Sequence[str]) -> Path | None:
    for position, argument in enumerate(arguments):
        if argument == "--home" and position + 1 < len(arguments):
            return real_path(Path(arguments[position + 1]))
        if argument.startswith("--home="):
            return real_path(Path(argument.removeprefix("--home=")))
    return None


def _is_under(folder: str, home: Path) -> bool:
    return real_path(Path(folder)).is_relative_to(home)


def _pids() -> Iterable[int]:
    """Process IDs of this user. Processes that end meanwhile are skipped."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.getuid():
                    yield int(entry.name)
            except OSError:
                continue


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _arguments(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="surrogateescape") for part in raw.split(b"\0")[:-1]]


def _ancestors(pid: int, table: Mapping[int, int]) -> frozenset[int]:
    found = {pid}
    while (parent := table.get(pid)) is not None and parent not in found:
        found.add(parent)
        pid = parent
    return frozenset(found)


def _descendants(roots: Iterable[int], table: Mapping[int, int]) -> frozenset[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in table.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return frozenset(found)


GRACES_S: Mapping[Kind, float] = {"controller": 10.0, "worker": 15.0, "child": 0.0, "etcd": 10.0}
"""Seconds from SIGTERM to SIGKILL, in the order of shutdown. A worker itself gives its child ten seconds."""

ROUNDS = 5
"""Maximum rounds of a shutdown, because daemons may start processes meanwhile."""


@dataclass(frozen=True, slots=True)
class ShutdownResult:
    """Result of a shutdown. `ended`: processes that were stopped; `killed`: how many of these needed SIGKILL."""

    ended: int
    killed: int


def end_processes(home: Path, *, clock: Clock, grace_s: float | None = None) -> ShutdownResult:
    """Stop every process of the cluster in `home` (absolute, resolved). `grace_s` 0: send SIGKILL only.

    Raises GcoreError if a process does not end.
    """
    ended = killed = 0
    # Further rounds are only needed if a process was started meanwhile.
    for _ in range(ROUNDS):
        for kind, grace in GRACES_S.items():
            some = [p.process for p in home_processes(home) if p.kind == kind]
            ended += len(some)
            killed += _end(some, grace if grace_s is None else grace_s, clock)
        left = home_processes(home)
        if not left:
            return ShutdownResult(ended, killed)
    pids = ", ".join(str(p.process.pid) for p in left)
    raise GcoreError(f"processes {pids} are still running", where=str(home), fix="Inspect them with `ps`")


def _end(processes: Sequence[ProcessId], grace_s: float, clock: Clock) -> int:
    """Send SIGTERM to the processes, and SIGKILL to those that still run after `grace_s` seconds. Returns how many were
    killed."""
    if grace_s > 0:
        for process in processes:
            send_signal(process, signal.SIGTERM)
    end = clock.monotonic() + grace_s
    late = [p for p in processes if not wait_process_ended(p, max(0.0, end - clock.monotonic()))]
    for process in late:
        send_signal(process, signal.SIGKILL)
    for process in late:
        wait_process_ended(process, KILL_WAIT_S)
    return len(late)


_GPU = re.compile(r"nvidia\d+")


def check_gpus(wanted: int, dev: Path = Path("/dev")) -> None:
    """Check that this machine has `wanted` GPUs. Raises UsageError."""
    there = count_gpus(dev)
    if there is not None and there < wanted:
        shows = "no GPU" if there == 0 else f"{there} GPU{'s' * (there > 1)}"
        raise UsageError(
            f"cuda:{wanted} needs {wanted} GPU{'s' * (wanted > 1)}, but this machine has {shows}",
            where="--slots",
            fix="Use --slots cpu:2, and see `gcore doctor`" if there == 0 else f"Use --slots cuda:{there}",
        )


def count_gpus(dev: Path = Path("/dev")) -> int | None:
    """Number of GPUs of the machine; None if unknown."""
    try:
        names = [entry.name for entry in dev.iterdir()]
    except OSError:
        return None
    if "dxg" in names:  # Under WSL, one device file represents all GPUs.
        return None
    return sum(_GPU.fullmatch(name) is not None for name in names)


def check_timing_model(environment: MutableMapping[str, str]) -> None:
    """Check the timing file of emulated devices, and make its path in `environment` absolute, because workers have another working directory.

    Raises UsageError for an invalid file, before every engine fails on it.
    """
    from gcore.engines.emulated.launch import LAW_FILE

    name = environment.get(LAW_FILE)
    if not name:
        return
    whole = environment[LAW_FILE] = str(Path(name).absolute())
    command = [sys.executable, "-P", "-m", "gcore.engines.emulated.law", whole]
    asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise UsageError(asked.stdout.strip() or asked.stderr.strip()[-300:], where=LAW_FILE)


HOST = "127.0.0.1"

READY_S = 90.0
"""Timeout from a daemon's start to its readiness. Imports from a cold disk are slow."""

RETURN_S = 30.0
"""How long to wait until a daemon that died is restarted by the others."""

STARTS = 3
"""Maximum number of attempts to start a cluster, if a signal ends a process before it is ready."""

POLL_S = 0.1
START_FAILED_GRACE_S = 3.0
DaemonCommand = Callable[[str, str], Sequence[str]]
"""Returns the command line of a daemon for its home folder and its configuration file."""


@dataclass(frozen=True, slots=True)
class UpRequest:
    """The cluster that `start_cluster` shall start. `port`: API port of the first daemon, the others use the next ones;
    None: free ports.

    `sglang_python`, `vllm_python`: the Python interpreters with SGLang and vLLM, or None. `lease_ttl_s`: lease TTL of the daemons; None: the
    default, which assumes at least one core per daemon.
    """

    home: Path
    controllers: int
    slots: str
    port: int | None = None
    etcd_port: int | None = None
    sglang_python: Path | None = None
    vllm_python: Path | None = None
    lease_ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class UpResult:
    """The running cluster. `started`: false if it was already running. `absent`: names of its daemons that do not
    respond."""

    cluster: LocalClusterState
    started: bool
    absent: tuple[str, ...] = ()


MOST_SLOTS = 4096
SLOT_KINDS = ("cpu", "cuda", "emulated")
LAST_PORT = 65535


def deal_slots(text: str, controllers: int) -> tuple[tuple[str, ...], ...]:
    """Divide slots among controllers: `cpu:4` over two gives ("cpu:0", "cpu:1"), ("cpu:2", "cpu:3"). Raises UsageError."""
    kind, colon, number = text.partition(":")
    if colon and kind not in SLOT_KINDS:
        raise UsageError(
            f"there is no kind of slot {kind!r}",
            where="--slots",
            fix=f"Use one of {', '.join(SLOT_KINDS)}; for example --slots cpu:2 or --slots cuda:8",
        )
    if not colon or not number.isascii() or not number.isdigit() or not number.strip("0"):
        raise UsageError(
            f"{text!r} is not KIND:NUMBER", where="--slots", fix="For example --slots cpu:2 or --slots cuda:8"
        )
    count = int(number) if len(number) < 7 else MOST_SLOTS + 1
    if count > MOST_SLOTS:
        raise UsageError(
            f"{text[:40]!r} exceeds the maximum of {MOST_SLOTS} slots",
            where="--slots",
            fix=f"Use --slots {kind}:N with the number of cores or devices of this machine",
        )
    if controllers < 1:
        raise UsageError(
            f"{controllers} is not a valid number of controllers", where="--controllers", fix="Use at least 1"
        )
    if count < controllers:
        raise UsageError(
            f"{count} slots cannot be divided among {controllers} controllers",
            where="--slots",
            fix=f"Use --slots {kind}:{controllers}, or fewer controllers",
        )
    bounds = [index * count // controllers for index in range(controllers + 1)]
    return tuple(tuple(f"{kind}:{slot}" for slot in range(first, end)) for first, end in itertools.pairwise(bounds))


def check_port(option: str, first: int | None, count: int) -> None:
    """Check that `count` consecutive port numbers from `first` on are valid. `option`: for the message. Raises
    UsageError."""
    highest = LAST_PORT - count + 1
    if first is not None and not 1 <= first <= highest:
        what = (
            f"{first} is not a port" if not 1 <= first <= LAST_PORT else f"there are no {count} ports from {first} on"
        )
        raise UsageError(what, where=option, fix=f"Give a port from 1 to {highest}, or omit the option")


async def start_cluster(
    request: UpRequest,
    *,
    clock: Clock,
    command: DaemonCommand = daemon_command,
    say: Callable[[str], None] = lambda what: None,
) -> UpResult:
    """Start the cluster if it is not running. On an error, stops what it started and raises GcoreError.

    `command`: returns the command line of a daemon. `say`: called with a message before a slow operation.
    """
    from gcore.config.local_cluster import FILE_NAME, LocalClusterState
    from gcore.engines.emulated.launch import KIND, SAID

    home = real_path(request.home)
    shares = deal_slots(request.slots, request.controllers)
    check_port("--port", request.port, request.controllers)
    check_port("--etcd-port", request.etcd_port, 1)
    with _alone(home):
        known = LocalClusterState.load(home)
        if known is not None and any(is_running(c.process) for c in known.controllers):
            (home / STOPPING).unlink(missing_ok=True)
            absent = await _absent(home, clock)
            return UpResult(LocalClusterState.load(home) or known, started=False, absent=absent)
        if request.slots.startswith("cuda:"):
            check_gpus(sum(len(share) for share in shares))
        if request.slots.startswith(f"{KIND}:"):
            check_timing_model(os.environ)
            say(f"{SAID.capitalize()}.")
        say(f"Starting etcd and {request.controllers} controllers in {home} ...")
        end_processes(home, clock=clock)
        (home / FILE_NAME).unlink(missing_ok=True)
        (home / STOPPING).unlink(missing_ok=True)
        for left in reversed(range(STARTS)):
            try:
                return UpResult(await _start(home, request, shares, clock, command), started=True)
            except EndedBySignal as error:
                if not left:
                    raise
                say(f"{error}. Starting again ({STARTS - left + 1} of {STARTS}) ...")
        raise AssertionError("each start returns or raises")


def stop_cluster(home: Path, *, clock: Clock, grace_s: float | None = None) -> ShutdownResult:
    """Stop every process of the cluster in `home`. `grace_s`: seconds until SIGKILL, 0 at once, None the default. Raises GcoreError if a process does not end."""
    from gcore.config.local_cluster import FILE_NAME
    from gcore.models.replicas import MEMORY, home_folder

    home = real_path(home)
    if not home.is_dir():
        return ShutdownResult(0, 0)
    with _alone(home):
        (home / STOPPING).touch()
        try:
            # If a daemon is just restarting a process, wait until it has finished, so that the new process is found.
            with _locked(home / "keeper.lock", wait=grace_s != 0):
                pass
        except BlockingIOError:  # With grace_s 0 do not wait: the next round finds the new process.
            pass
        try:
            ended = end_processes(home, clock=clock, grace_s=grace_s)
            (home / FILE_NAME).unlink(missing_ok=True)
            # Free the memory of in-memory replicas: a job that continues later starts from a checkpoint.
            shutil.rmtree(home_folder(MEMORY, str(home)), ignore_errors=True)
        finally:
            (home / STOPPING).unlink(missing_ok=True)
        return ended


def memory_share_gib(slots: int, of_all: int) -> float | None:
    """The share of this machine's memory in GiB for a daemon with `slots` of `of_all` slots; None: all of it, or unknown.

    Each node's plan reserves memory for the system. The shares are chosen so that the machine reserves it only once.
    """
    from gcore.system.memory import host_memory
    from placement.mapping.cluster import GIB, NODE_GIB

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
) -> LocalClusterState:
    from gcore.config.local_cluster import FILE_NAME, LocalClusterState, write_owner_key
    from gcore.config.node import NodeConfig
    from gcore.store.reference import StoreRef
    from gcore.system.files import replace_file

    ports = _ports(2 * len(shares), request.port, len(shares))
    if request.etcd_port is not None:
        _ports(1, request.etcd_port, 1, option="--etcd-port")
    try:
        write_owner_key(home)
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
                vllm_python=str(request.vllm_python) if request.vllm_python else None,
                host_memory_gib=memory_share_gib(len(slots), sum(map(len, shares))),
                local_cluster=True,
                **({} if request.lease_ttl_s is None else {"lease_ttl_s": request.lease_ttl_s}),
            )
            file = home / "controllers" / f"{config.node}.json"
            file.parent.mkdir(exist_ok=True)
            replace_file(file, config.model_dump_json(indent=2).encode())
            process = spawn_detached(command(str(home), str(file)), log_file=home / "logs" / f"{config.node}.log")
            controllers.append(_remembered(config, file, process))
        cluster = LocalClusterState(home=str(home), etcd=_remembered_etcd(etcd), controllers=tuple(controllers))
        await asyncio.gather(*(_ready(one, etcd.process, home, clock) for one in controllers))
        replace_file(home / FILE_NAME, cluster.model_dump_json(indent=2).encode())
    except BaseException:
        (home / FILE_NAME).unlink(missing_ok=True)
        # This blocks on purpose, because it also runs while Ctrl-C closes the event loop. It stops all processes of the home folder, because a
        # daemon with an unfinished job may already have started workers.
        end_processes(home, clock=clock, grace_s=START_FAILED_GRACE_S)
        raise
    return cluster


async def _start_etcd(home: Path, port: int | None, clock: Clock) -> LocalEtcd:
    from gcore.store.etcd import EtcdNotFound, LocalEtcd

    try:
        return await LocalEtcd.start(home / "etcd", log_file=home / "logs" / "etcd.log", clock=clock, client_port=port)
    except EtcdNotFound as error:
        raise EtcdNotFound(error.what, fix="Put an `etcd` binary on PATH, or install gcore[local]") from error


async def _ready(controller: ControllerProcess, etcd: ProcessId, home: Path, clock: Clock) -> None:
    """Wait until the daemon is ready. Raises GcoreError if it exits before or takes too long; EndedBySignal if a signal ended it or etcd."""
    from gcore.client.calls import WaitPolicy
    from gcore.client.jobs import JobsClient

    log_file = home / "logs" / f"{controller.name}.log"
    begun = clock.monotonic()
    async with JobsClient([controller.address], clock=clock, patience=WaitPolicy(probe_s=1.0)) as client:
        while not await client.is_serving(controller.address):
            for name, process in ((controller.name, controller.process), ("etcd", etcd)):
                if killed := ending_signal(process):
                    where = home / "logs" / f"{name}.log"
                    raise EndedBySignal(f"{name} was ended by {killed} before it was ready", where=str(where))
            ended = not is_running(controller.process)
            if ended or clock.monotonic() - begun > READY_S:
                why = "exited right after its start" if ended else f"is not ready after {READY_S:.0f} s"
                fix = f"Last line of its log: {_last_line(log_file)}"
                raise GcoreError(f"{controller.name} {why}", where=str(log_file), fix=fix)
            await clock.sleep(POLL_S)


async def _absent(home: Path, clock: Clock) -> tuple[str, ...]:
    """Names of the daemons of a running cluster that still do not respond after `RETURN_S` seconds, the time for a
    restart."""
    from gcore.client.calls import WaitPolicy
    from gcore.client.jobs import JobsClient
    from gcore.config.local_cluster import LocalClusterState

    begun = clock.monotonic()
    while True:
        cluster = LocalClusterState.load(home)
        assert cluster is not None
        async with JobsClient(cluster.addresses, clock=clock, patience=WaitPolicy(probe_s=1.0)) as client:
            serving = await asyncio.gather(*(client.is_serving(c.address) for c in cluster.controllers))
        absent = tuple(c.name for c, serves in zip(cluster.controllers, serving, strict=True) if not serves)
        if not absent or clock.monotonic() - begun > RETURN_S:
            return absent
        await clock.sleep(POLL_S)


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Create the home folder and hold its exclusive lock while the block runs.

    Raises UsageError if another command holds the lock, or if the folder is not writable.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / "up.lock", wait=False):
            yield
    except BlockingIOError as error:
        what, fix = "another `gcore up`, `run` or `down` is using this folder", "Wait until it has ended"
        raise UsageError(what, where=str(home), fix=fix) from error
    except OSError as error:
        what, fix = f"the folder is not writable ({error.strerror or error})", "Choose another --home"
        raise UsageError(what, where=str(home), fix=fix) from error


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _ports(count: int, first: int | None, listening: int, option: str = "--port") -> tuple[int, ...]:
    """Find `count` free ports. If `first` is given, the first `listening` of them are consecutive from `first`; raises
    UsageError if one is used."""
    from gcore.system.network import free_ports

    asked = () if first is None else range(first, first + min(listening, count))
    for port in asked:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except (OSError, OverflowError) as error:
                raise UsageError(
                    f"port {port} is in use or not allowed", where=option, fix="Choose another port, or omit the option"
                ) from error
    return (*asked, *free_ports(count - len(asked), HOST))


def _remembered(config: NodeConfig, file: Path, process: ProcessId) -> ControllerProcess:
    from gcore.config.local_cluster import ControllerProcess

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
    from gcore.config.local_cluster import EtcdProcess

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
