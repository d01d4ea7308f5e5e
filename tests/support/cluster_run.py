"""Local clusters as users run them, for tests.

`cluster_up` is a cluster that stays up and `run_job` a job on it, for tests without kills. `ClusterRun` is a `gcore run`
with a private cluster, for tests that kill processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gcore.api.v1 import jobs_pb2 as pb
from gcore.client import JobsClient
from gcore.config.local_cluster import LocalClusterState
from gcore.errors import GcoreError
from gcore.store.client import EtcdStore
from gcore.system.clock import SystemClock

T = TypeVar("T")
GCORE = [sys.executable, "-m", "controllers.cli.main"]
PATIENCE_S = 280.0
"""Long enough for a machine that is busy with something else; a test fails, it does not hang."""


@dataclass
class Outcome:
    """How a run ended."""

    code: int
    output: str
    summary: dict[str, Any]


class ClusterRun:
    """`gcore run` in a folder of its own."""

    def __init__(
        self,
        spec: Path,
        home: Path,
        *more: str,
        controllers: int = 2,
        slots: int = 2,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.home = home
        self.patience_s = patience_s
        self.name = name_in(spec)
        self.log = home.parent / f"{home.name}-{time.monotonic_ns()}.log"
        command = [*GCORE, "run", str(spec), "--home", str(home), "--plain"]
        command += ["--controllers", str(controllers), "--slots", f"cpu:{slots}", *more]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def ask(self, question: Callable[[JobsClient], Awaitable[T]]) -> T | None:
        """One question to any controller; None if none answers yet."""

        async def asked() -> T | None:
            cluster = LocalClusterState.load(self.home)
            if cluster is None:
                return None
            async with JobsClient(cluster.addresses, clock=SystemClock()) as client:
                return await question(client)

        try:
            return asyncio.run(asked())
        except GcoreError:
            return None

    def job(self) -> pb.Job | None:
        """The job now."""
        return self.ask(lambda client: client.get_job(self.name))

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait for `condition`; what it returned. Fails with the run's output."""
        end = time.monotonic() + self.patience_s
        while time.monotonic() < end:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.text()}"
            time.sleep(0.2)
        raise AssertionError(f"no {what} within {self.patience_s} s:\n{self.text()}")

    def until_step(self, step: int) -> None:
        """Wait until `step` is committed."""

        def reached() -> bool:
            job = self.job()
            return job is not None and job.step >= step

        self.until(f"step {step}", reached)

    def kill_controller(self, name: str) -> None:
        """kill -9."""
        cluster = LocalClusterState.load(self.home)
        assert cluster is not None
        os.kill(next(c.pid for c in cluster.controllers if c.name == name), signal.SIGKILL)

    def kill_worker(self, role: str, *, child: bool) -> None:
        """kill -9 of one worker of a role: its computing child, or its supervisor."""
        nodes = self.ask(lambda client: client.list_nodes())
        assert nodes is not None, "no controller answers"
        worker = next(w for w in nodes.workers if w.role == role and w.state == "serving")
        pid = worker.pid
        if child:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pid = int(children[0])
        os.kill(pid, signal.SIGKILL)

    def kill_everything(self) -> None:
        """kill -9 of every process that carries this home on its command line, and of the run."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for pid in processes_of(self.home):
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while processes_of(self.home) and time.monotonic() < end:
            time.sleep(0.05)

    def text(self) -> str:
        """The output of the run, and the ends of the daemons' logs."""
        logs = [
            f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in sorted((self.home / "logs").glob("*"))
        ]
        return self.log.read_text(errors="replace") + "\n".join(logs)

    def wait(self) -> Outcome:
        """Until the run has ended."""
        try:
            code = self.process.wait(timeout=self.patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end:\n{self.text()}") from None
        return Outcome(code, self.text(), summary_of(self.home, self.name))

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.kill_everything()


def name_in(spec: Path) -> str:
    """The job's name."""
    return next(line.split(":", 1)[1].strip(' "') for line in spec.read_text().splitlines() if line.startswith("name:"))


def summary_of(home: Path, name: str) -> dict[str, Any]:
    """What the newest run of this name came to; empty if it did not end."""
    folders = sorted((home / "runs").glob(f"{name}-*"), key=lambda p: p.stat().st_mtime)
    file = folders[-1] / "summary.json" if folders else None
    return json.loads(file.read_text()) if file is not None and file.exists() else {}


def processes_of(home: Path) -> list[int]:
    """Every process that names `home` on its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(str(home).encode() in argument for argument in arguments):
                found.append(int(entry.name))
    return found


def gcore(*arguments: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    """One command."""
    result = subprocess.run([*GCORE, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if check is not None:
        assert result.returncode == check, result.stdout + result.stderr
    return result


@contextlib.contextmanager
def cluster_up(home: Path, *, controllers: int = 2, slots: int = 2) -> Iterator[LocalClusterState]:
    """A cluster without a job; nothing of it is left running."""
    gcore("up", "--home", str(home), "--controllers", str(controllers), "--slots", f"cpu:{slots}")
    try:
        found = LocalClusterState.load(home)
        assert found is not None
        yield found
    finally:
        gcore("down", "--home", str(home), check=None)
    assert processes_of(home) == []


def run_job(cluster: LocalClusterState, spec: Path, *more: str) -> Outcome:
    """A job on a cluster that is up, followed to its end."""
    ended = gcore("run", str(spec), "--home", cluster.home, "--plain", *more, check=None)
    return Outcome(ended.returncode, ended.stdout + ended.stderr, summary_of(Path(cluster.home), name_in(spec)))


def stored(cluster: LocalClusterState, prefix: str) -> dict[str, bytes]:
    """The cluster's store under a prefix, by key."""

    async def read() -> dict[str, bytes]:
        store = await EtcdStore.connect((cluster.etcd.endpoint,), clock=SystemClock())
        try:
            return {kv.key: kv.value for kv in (await store.list(prefix)).kvs}
        finally:
            await store.close()

    return asyncio.run(read())


def run_to_the_end(spec: Path, home: Path, more: Sequence[str] = (), **kwargs: int) -> Outcome:
    """An undisturbed run."""
    run = ClusterRun(spec, home, *more, **kwargs)
    try:
        return run.wait()
    finally:
        run.close()
