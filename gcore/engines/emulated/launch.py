"""Launch document of a node's emulated engines, the start of their process, and the queue of later launches.

The parameters of the law are not in the document: `GCORE_EMULATED_LAW`, which daemons and workers inherit, may name a
JSON file with values other than the defaults. Emulated slots are for tests and benchmarks and cannot be set in a node's
configuration.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from gcore.api.tls import ServingTls
from gcore.errors import explain_os_errors
from gcore.schema import Record, RecordPart
from gcore.store.reference import StoreRef
from gcore.system.files import replace_file
from gcore.system.process import CannotStart, ProcessId, spawn_detached

LAW_FILE = "GCORE_EMULATED_LAW"
KIND = "emulated"
SAID = "emulated slots compute nothing; for tests and benchmarks only"


def is_emulated(slot: str) -> bool:
    """Whether a slot is emulated."""
    return slot.startswith(f"{KIND}:")


def emulation_remark(slots: Iterable[str]) -> str:
    """Return the remark to append to reports about these slots; empty unless some are emulated."""
    return f" ({SAID})" if any(map(is_emulated, slots)) else ""


class PlacedEngine(RecordPart):
    """An engine of the process: the worker that it registers as, its slot, the further slots that it spans, and the
    judge that it serves, if any."""

    instance: str
    slot: str
    judge: str = ""
    further: tuple[str, ...] = ()
    api_key: str = ""
    """Required API key; empty: none."""

    @property
    def slots(self) -> tuple[str, ...]:
        """All slots that it spans."""
        return (self.slot, *self.further)


class ServedJudge(RecordPart):
    """A judge of the job that emulated engines serve, as in the job's spec. `longest`: its `max_new_tokens`."""

    name: str
    model: str
    rows: PositiveInt
    longest: PositiveInt
    verdict: dict[str, Any]


class HostLaunch(Record):
    """The file that `python -m gcore.engines.emulated.host --launch` reads. Times in real seconds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    node: str
    job_uid: str
    store: StoreRef
    engines: Annotated[tuple[PlacedEngine, ...], Field(min_length=1)]
    model: str
    """The model's folder: its tokenizer and vocabulary are real."""
    host: str = "127.0.0.1"
    tls: ServingTls | None = None
    rows: PositiveInt
    """Maximum number of running sequences of a rollout engine."""
    longest: PositiveInt | None = None
    """Maximum tokens of a response that the job requests from the policy."""
    judges: tuple[ServedJudge, ...] = ()
    slots: tuple[str, ...] = ()
    """The slots of the node, in order."""
    widest: PositiveInt = 1
    """Maximum number of slots that an engine of the job spans. So many adjacent slots are shared by the engines on
    them."""
    weight_version: str
    lease_ttl_s: PositiveInt = 10
    orphan_grace_s: NonNegativeFloat = 60.0
    store_grace_s: PositiveFloat = 1800.0

    def block(self, slot: str) -> str:
        """Return the first of the slots that share engines with `slot`."""
        at = self.slots.index(slot) if self.widest > 1 and slot in self.slots else None
        return slot if at is None else self.slots[at - at % self.widest]

    def judge(self, name: str) -> ServedJudge:
        """Return the judge of this name, which an engine of the document serves."""
        return next(judge for judge in self.judges if judge.name == name)


def start_host(launch: HostLaunch, home: Path) -> ProcessId:
    """Start the process so that it outlives its starter. If one of the job already runs on the node, the new one hands
    its engines over to it and ends, because engines that share a slot must be in one process. Raises CannotStart."""
    file = home / "workers" / f"{launch.name}.json"
    with explain_os_errors(
        "cannot write the launch document", CannotStart, where=file, fix="Make the home folder writable"
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, launch.encode(), mode=0o600)
    # `gcore down` finds the process by this name, also one started by an older daemon.
    command = (sys.executable, "-P", "-m", "gcore.emulated.host", "--home", str(home), "--launch", str(file))
    return spawn_detached(command, log_file=home / "logs" / f"{launch.name}.log", cwd=home)


class LaunchQueue:
    """The launch documents of a job's emulated engines on one node, and which process takes them.

    A folder under the home contains the documents that no process has taken yet, and a file that the taking process
    locks. The kernel releases the lock when that process dies; the remaining documents then belong to the next process.
    So each document is taken by one process, and engines that share a slot are in one. Uses files only; does not wait.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, launch: HostLaunch, home: Path) -> LaunchQueue:
        """Return the queue of this job and node."""
        return cls(home / "workers" / f"emulated-{launch.node}-{launch.job_uid}")

    def put(self, launch: HostLaunch) -> Path:
        """Add a document. It is deleted when a process has taken it."""
        file = self._folder / f"{launch.name}.json"
        replace_file(file, launch.encode(), mode=0o600)
        return file

    def claim(self) -> bool:
        """Whether this process takes the documents from now on, until it ends."""
        if self._lock is None:
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def take(self) -> list[HostLaunch]:
        """Take the present documents. Only for the process with the claim. Raises UnreadableRecord for an invalid
        document."""
        found = []
        for file in sorted(self._folder.glob("*.json")):
            found.append(HostLaunch.decode(file.read_bytes(), str(file)))
            file.unlink()
        return found
