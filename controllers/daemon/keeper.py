"""Restarts dead processes of a local cluster (all on one machine): etcd with its data, and daemons.

On a real cluster, systemd, Kubernetes or Slurm does this; a laptop has none of them. Each daemon does it for the
others, and `gcore run` for all of them. Only one of them acts at a time, under a file lock, and writes the new process
to `cluster.json`. A daemon is restarted only after its lease has expired, so that other daemons take its shards in
between, as on a real cluster. While `gcore down` runs (the file `stopping` exists), nothing is restarted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import signal
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from gcore.config.local_cluster import FILE_NAME, ControllerProcess, LocalClusterState
from gcore.errors import GcoreError, StoreUnavailable
from gcore.store import keys
from gcore.store.etcd import LocalEtcd, last_error_line
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.system.files import replace_file
from gcore.system.process import ProcessId, ending_signal, is_running, send_signal, spawn_detached

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Seconds between two checks."""

RESTARTS, RELAPSE_S = 3, 60.0
"""etcd is reported as failing if it was started `RESTARTS` times within `RELAPSE_S` seconds."""

STOPPING = "stopping"


def daemon_command(home: str, config_file: str) -> list[str]:
    """The command that starts a daemon of the local cluster."""
    return [sys.executable, "-P", "-m", "controllers.daemon", "--home", home, "--config", config_file]


class ProcessKeeper:
    """Checks the processes of a local cluster every second, and restarts dead ones."""

    def __init__(self, home: Path, node: str, store: Store, clock: Clock) -> None:
        """`home`: folder of the local cluster. `node`: name of the daemon in this process; empty: this is not a
        daemon."""
        self._home = home
        self._node = node
        self._store = store
        self._clock = clock
        self.trouble = ""
        """Why a dead process could not be restarted at the last check, or why etcd keeps ending; empty if all is
        well."""
        self._known: tuple[tuple[int, int, int], LocalClusterState] | None = None
        """Inode, time and size of the cluster document when it was last read, and its contents."""
        self._etcd: ProcessId | None = None
        self._etcd_changed: deque[float] = deque(maxlen=RESTARTS)
        """Times at which a new etcd process was seen."""

    async def run(self) -> None:
        """Check every `LOOK_S`; never returns."""
        while True:
            await self._clock.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Check all processes once, and restart those that have died; on errors set `trouble`."""
        try:
            await self._look()
        except (GcoreError, OSError) as error:
            log.warning("keeper: %s", error)
            self.trouble = str(error)
        else:
            self.trouble = self._relapse()

    def _relapse(self) -> str:
        """A sentence about etcd if it keeps ending, whichever process restarts it; else empty."""
        changed = self._etcd_changed
        if len(changed) < RESTARTS or self._clock.monotonic() - changed[0] > RELAPSE_S:
            return ""
        why = last_error_line(self._home / "logs" / "etcd.log")
        return f"etcd has ended {RESTARTS} times within {RELAPSE_S:.0f} s after being started; its last log line: {why}"

    async def _look(self) -> None:
        cluster = self._read()
        if cluster is None or (self._home / STOPPING).exists():
            return
        if cluster.etcd.process != self._etcd:
            if self._etcd is not None:
                self._etcd_changed.append(self._clock.monotonic())
            self._etcd = cluster.etcd.process
        if not is_running(cluster.etcd.process):
            with self._alone() as alone:
                if alone is not None and not is_running(alone.etcd.process):
                    try:
                        await self._bring_back_etcd(alone)
                    except (GcoreError, OSError) as error:
                        raise GcoreError(f"etcd has ended and cannot be started again: {error}") from error
            return
        for daemon in cluster.controllers:
            if daemon.name != self._node and not is_running(daemon.process):
                with contextlib.suppress(StoreUnavailable):
                    if await self._store.get(keys.node(daemon.name)) is None:
                        with self._alone() as alone:
                            if alone is not None:
                                self._bring_back(alone, daemon.name)

    def _read(self) -> LocalClusterState | None:
        """Return the cluster document (`cluster.json`); None if there is none. It is large if there are many slots, so
        it is only read again if the file has changed. Raises UsageError.
        """
        try:
            found = (self._home / FILE_NAME).stat()
        except FileNotFoundError:
            return None
        stamp = found.st_ino, found.st_mtime_ns, found.st_size
        if self._known is None or self._known[0] != stamp:
            cluster = LocalClusterState.load(self._home)
            if cluster is None:
                return None
            self._known = stamp, cluster
        return self._known[1]

    async def _bring_back_etcd(self, cluster: LocalClusterState) -> None:
        known = cluster.etcd
        started = await LocalEtcd.start(
            Path(known.data_dir),
            client_port=known.client_port,
            peer_port=known.peer_port,
            log_file=self._home / "logs" / "etcd.log",
            clock=self._clock,
        )
        how = _ending(known.process)
        log.warning("etcd %s and was restarted on the same data as process %d", how, started.pid)
        changed = known.model_copy(update={"pid": started.process.pid, "started": started.process.started})
        self._write(cluster.model_copy(update={"etcd": changed}), started.process)

    def _bring_back(self, cluster: LocalClusterState, name: str) -> None:
        daemon = next((c for c in cluster.controllers if c.name == name), None)
        if daemon is None or is_running(daemon.process):
            return
        process = spawn_detached(
            daemon_command(cluster.home, daemon.config_file), log_file=self._home / "logs" / f"{name}.log"
        )
        log.warning("%s %s and was restarted as process %d", name, _ending(daemon.process), process.pid)
        self._write(_replaced(cluster, daemon, process), process)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[LocalClusterState | None]:
        """Context manager that holds the lock of all keepers and provides the present cluster document; None if another
        keeper holds the lock or the cluster is stopping."""
        with (self._home / "keeper.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            yield None if (self._home / STOPPING).exists() else LocalClusterState.load(self._home)

    def _write(self, cluster: LocalClusterState, started: ProcessId) -> None:
        """Write the cluster document, which names the new process `started`. If that fails, kill the process, because
        it would block the next attempt. Raises OSError."""
        try:
            replace_file(self._home / FILE_NAME, cluster.model_dump_json(indent=2).encode())
        except OSError:
            send_signal(started, signal.SIGKILL)
            raise


def _ending(process: ProcessId) -> str:
    killed = ending_signal(process)
    return f"was ended by {killed}" if killed else "had died"


def _replaced(cluster: LocalClusterState, daemon: ControllerProcess, process: ProcessId) -> LocalClusterState:
    new = daemon.model_copy(update={"pid": process.pid, "started": process.started})
    controllers = tuple(new if c.name == daemon.name else c for c in cluster.controllers)
    return cluster.model_copy(update={"controllers": controllers})
