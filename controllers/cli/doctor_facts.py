"""Looks at this machine for `gcore doctor`: what there is, without a verdict (`doctor_checks`).

torch and DeepSpeed are asked in a process of their own. Whatever is started, an etcd on a fresh folder too, is ended and
removed again; the home is only written to with a file that is removed at once, and not made if it is absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import resource
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from controllers.cli.doctor_seen import EtcdTry, Home, Machine, Package, Probe
from gcore.clock import Clock
from gcore.errors import GcoreError
from gcore.host_memory import group_limits, host_memory
from gcore.store.launcher import EtcdBinary, ExternalEtcd, LocalEtcd, find_etcd
from gcore.worker.threads import thread_environment

PROBE_LIMIT_S = 90.0
SYNCS = 5
_HERE = Path(__file__).resolve().parents[2]


def packages() -> tuple[Package, ...]:
    """What gcore asks for, and what is installed. Pins only where gcore runs from a checkout."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = _pins(_HERE / "constraints")
    found = {}
    for line in importlib.metadata.requires("gcore") or ():
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        extra = ""
        if requirement.marker is not None:
            extra = next((e for e in _extras() if requirement.marker.evaluate({"extra": e})), "")
            if not extra:
                continue
        if name in found:
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        found[name] = Package(
            name=name,
            installed=installed,
            wanted=str(requirement.specifier),
            fits=installed is None or requirement.specifier.contains(installed, prereleases=True),
            # A build's own mark (2.13.0+cpu) is no other version.
            pinned=_like(installed, pins.get(name)),
            needed_for=extra,
        )
    return tuple(found.values())


async def probe(*, devices: bool) -> Probe:
    """torch and DeepSpeed. `devices` False: GPUs are not looked for."""
    environment = {**os.environ, **thread_environment(1), "DS_ACCELERATOR": "cpu"}
    if not devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gcore.train.selftest"),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PROBE_LIMIT_S)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        err += f"\nno end after {PROBE_LIMIT_S:.0f} s".encode()
    return read_probe(out.decode(errors="replace"), err.decode(errors="replace"), process.returncode or 0)


def read_probe(out: str, err: str, code: int) -> Probe:
    """What the probe's process told. Lines that are no JSON are its libraries' chatter."""
    told: dict[str, object] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            told |= message if isinstance(message, dict) else {}
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"ended with {code}")
    started = "deepspeed" in told
    devices = told.get("devices")
    return Probe(
        torch=_text(told.get("torch")),
        cuda=_text(told.get("cuda")),
        devices=tuple(map(str, devices)) if isinstance(devices, list) else (),
        deepspeed=_text(told.get("deepspeed")),
        started=started,
        error="" if started else last[:200],
    )


async def try_etcd(clock: Clock) -> EtcdTry:
    """Find an etcd, start it on a fresh folder, and end it."""
    try:
        binary = find_etcd()
    except GcoreError as error:
        return EtcdTry(error=error.what)
    if isinstance(binary, ExternalEtcd):  # cannot be: no endpoints were named
        return EtcdTry(error="no etcd is to be started here")
    path = str(binary.path)
    try:
        version = await asyncio.to_thread(binary.version)
    except GcoreError as error:
        return EtcdTry(path=path, error=error.what)
    with tempfile.TemporaryDirectory(prefix="gcore-doctor-", ignore_cleanup_errors=True) as folder:
        return await _start_etcd(binary, version, Path(folder), clock)


async def _start_etcd(binary: EtcdBinary, version: str, folder: Path, clock: Clock) -> EtcdTry:
    begun = clock.monotonic()
    try:
        etcd = await LocalEtcd.start(folder / "data", log_file=folder / "log", clock=clock, binary=binary)
    except GcoreError as error:
        return EtcdTry(str(binary.path), version, error=f"{error.what}: {error.fix}")
    answered = clock.monotonic() - begun
    await etcd.stop(grace_s=2.0)
    return EtcdTry(str(binary.path), version, answered_s=answered)


def machine(clock: Clock) -> Machine:
    """This machine, as this process may use it."""
    memory, quota = host_memory(), group_limits().cores
    cores = os.cpu_count() or 1
    usable = float(len(os.sched_getaffinity(0)))
    try:
        shared = os.statvfs("/dev/shm")
        shared_bytes = shared.f_frsize * shared.f_blocks
    except OSError:
        shared_bytes = None
    return Machine(
        cpus=min(usable, quota) if quota is not None else usable,
        cores=cores,
        memory=memory.total,
        available=memory.available,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        loopback=_loopback(),
        shared=shared_bytes,
        wall=clock.wall(),
    )


def home(folder: Path, clock: Clock) -> Home:
    """A cluster's folder, or the nearest folder above it that is there."""
    path = folder
    try:
        path = folder.absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        status = os.statvfs(there)
        times, apart = _write_in(there, clock)
    except OSError as error:
        return Home(path, error=error.strerror or str(error))
    return Home(path, status.f_frsize * status.f_bavail, sync_ms=statistics.median(times), clock_apart_s=apart)


def _write_in(folder: Path, clock: Clock) -> tuple[list[float], float]:
    """Milliseconds of a few small synced writes, and how far the new file's date is from now. Raises OSError."""
    if not folder.is_dir():
        raise NotADirectoryError(20, "not a folder")
    times = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".gcore-doctor-") as file:
        apart = os.fstat(file.fileno()).st_mtime - clock.wall()
        for _ in range(SYNCS):
            begun = clock.monotonic()
            file.write(b"x" * 512)
            file.flush()
            os.fsync(file.fileno())
            times.append((clock.monotonic() - begun) * 1000)
    return times, apart


def _loopback() -> str:
    try:
        with socket.socket() as listener, socket.socket() as caller:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            caller.settimeout(2.0)
            caller.connect(listener.getsockname())
    except OSError as error:
        return f"127.0.0.1: {error.strerror or error}"
    return ""


def _pins(folder: Path) -> dict[str, str]:
    from packaging.utils import canonicalize_name

    try:
        lines = (folder / "cpu.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def _like(installed: str | None, pinned: str | None) -> str | None:
    return installed if installed and pinned and installed.split("+")[0] == pinned else pinned


def _extras() -> Sequence[str]:
    return [e for e in importlib.metadata.metadata("gcore").get_all("Provides-Extra") or () if e != "dev"]


def _text(value: object) -> str | None:
    return str(value) if value else None
