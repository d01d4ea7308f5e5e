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
    """Whether a slot is no device."""
    return slot.startswith(f"{KIND}:")


def emulation_remark(slots: Iterable[str]) -> str:
    """What is said behind whatever was done on these slots: nothing, unless some compute nothing."""
    return f" ({SAID})" if any(map(is_emulated, slots)) else ""


class PlacedEngine(RecordPart):
    """An engine of the process: the worker that it registers as, its slot, those behind it that it spans, and the judge that it serves if
    it does not the policy."""

    instance: str
    slot: str
    judge: str = ""
    further: tuple[str, ...] = ()
    api_key: str = ""
    """What it asks of whoever asks it; empty: nothing."""

    @property
    def slots(self) -> tuple[str, ...]:
        """All that it spans."""
        return (self.slot, *self.further)


class ServedJudge(RecordPart):
    """A judge of the job that emulated engines serve. As in the job's spec; `longest` is its `max_new_tokens`."""

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
    """The model's folder: its tokenizer and its vocabulary are real."""
    host: str = "127.0.0.1"
    tls: ServingTls | None = None
    rows: PositiveInt
    """Sequences that an engine of the policy runs at once."""
    longest: PositiveInt | None = None
    """Tokens of the longest response that the job asks the policy for."""
    judges: tuple[ServedJudge, ...] = ()
    slots: tuple[str, ...] = ()
    """The node's, in their order."""
    widest: PositiveInt = 1
    """Slots that an engine of the job spans, at most: so many that follow one another are shared among the engines there."""
    weight_version: str
    lease_ttl_s: PositiveInt = 10
    orphan_grace_s: NonNegativeFloat = 60.0
    store_grace_s: PositiveFloat = 1800.0

    def block(self, slot: str) -> str:
        """The first of the slots with which `slot` has engines in common."""
        at = self.slots.index(slot) if self.widest > 1 and slot in self.slots else None
        return slot if at is None else self.slots[at - at % self.widest]

    def judge(self, name: str) -> ServedJudge:
        """The judge of that name, which an engine of the document serves."""
        return next(judge for judge in self.judges if judge.name == name)


def start_host(launch: HostLaunch, home: Path) -> ProcessId:
    """Start the process, so that it outlives its starter. Where one of the job runs on the node already, the new one hands the engines
    over to it and ends: those that share a slot have to be in one process. Raises CannotStart."""
    file = home / "workers" / f"{launch.name}.json"
    with explain_os_errors(
        "cannot write the launch document", CannotStart, where=file, fix="Make the home folder writable"
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, launch.encode(), mode=0o600)
    # `gcore down` finds the process by this name, also one that an older daemon started.
    command = (sys.executable, "-P", "-m", "gcore.emulated.host", "--home", str(home), "--launch", str(file))
    return spawn_detached(command, log_file=home / "logs" / f"{launch.name}.log", cwd=home)


class LaunchQueue:
    """The launch documents of a job's emulated engines on one node, and which process takes them.

    A folder under the home holds the documents that no process has taken yet, and a file that the process which takes
    them locks. The kernel releases the lock when that process dies; the documents in the folder are the next one's then.
    So a document is taken by one process, and engines that share a slot are in one. Files only; waits for nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, launch: HostLaunch, home: Path) -> LaunchQueue:
        """That of whoever has the engines of this job and node."""
        return cls(home / "workers" / f"emulated-{launch.node}-{launch.job_uid}")

    def put(self, launch: HostLaunch) -> Path:
        """Lay a document down. It is gone once somebody has taken it."""
        file = self._folder / f"{launch.name}.json"
        replace_file(file, launch.encode(), mode=0o600)
        return file

    def claim(self) -> bool:
        """Whether this process takes them from now on, until it ends."""
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
        """Those that lie there now. Only for who has the claim. Raises UnreadableRecord for what is no launch document."""
        found = []
        for file in sorted(self._folder.glob("*.json")):
            found.append(HostLaunch.decode(file.read_bytes(), str(file)))
            file.unlink()
        return found
