"""Launch document of a node's emulated engines, the start of their process, and the queue of later documents.

The durations of simulated work are not in the document: the environment variable `GCORE_EMULATED_LAW`, which daemons
and workers inherit, may name a JSON file with other values than the defaults (`law.TimingModel`). It may also give the
slots a device memory, which their node reports as hardware. Emulated slots are for tests and benchmarks and cannot be
set in a node's configuration.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from gcore.api.tls import ServingTls
from gcore.errors import explain_os_errors
from gcore.schema import Record, RecordPart
from gcore.store.reference import StoreRef
from gcore.system.files import parse_number, parse_object, replace_file
from gcore.system.process import CannotStart, ProcessId, spawn_detached

LAW_FILE = "GCORE_EMULATED_LAW"
KIND = "emulated"
SAID = "emulated slots compute nothing; for tests and benchmarks only"


def is_emulated(slot: str) -> bool:
    """Whether the slot of this name is emulated."""
    return slot.startswith(f"{KIND}:")


def emulation_remark(slots: Iterable[str]) -> str:
    """Return a warning to append to reports about these slots; empty if none of them is emulated."""
    return f" ({SAID})" if any(map(is_emulated, slots)) else ""


def emulated_memory(environment: Mapping[str, str]) -> float | None:
    """Return the device memory of each emulated slot in GiB, from the timing file; None: not known. `read_timing_model`
    reports a file that is missing or invalid."""
    try:
        found = parse_object(Path(environment[LAW_FILE]).read_text()) or {}
        return parse_number(found["memory_gib"])
    except (OSError, KeyError, TypeError):
        return None


class PlacedEngine(RecordPart):
    """One engine of the process. `instance`: name of the worker as which it registers. `judge`: name of the judge that
    it serves; empty: the policy. `further`: slots that it uses in addition to `slot`.
    """

    instance: str
    slot: str
    judge: str = ""
    further: tuple[str, ...] = ()
    api_key: str = ""
    """Required API key; empty: none."""

    @property
    def slots(self) -> tuple[str, ...]:
        """All slots that the engine uses."""
        return (self.slot, *self.further)


class ServedJudge(RecordPart):
    """A judge that emulated engines serve, with values of the job's spec.

    `rows`: maximum number of running sequences per engine. `longest`: the judge's `max_new_tokens`.
    """

    name: str
    model: str
    rows: PositiveInt
    longest: PositiveInt
    verdict: dict[str, Any]


class HostLaunch(Record):
    """Launch document: the file that `python -m gcore.emulated.host --launch` reads. Times in real seconds."""

    came_with: ClassVar[Mapping[str, int]] = {"blob_store": 3, "blob_key": 3, "guidance": 3, "height": 3, "width": 3}

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
    """Maximum number of slots that an engine of the job uses. Adjacent slots are simulated in blocks of this size."""
    weight_version: str
    guidance: float = 1.0
    height: PositiveInt | None = None
    width: PositiveInt | None = None
    """Guidance, height and width of the pictures that the policy generates; None: the pipeline's."""
    blob_store: str = ""
    """Base URL of the node's blob store; empty: the job has no pictures."""
    blob_key: str = Field("", repr=False)
    """Key of the job for that store."""
    lease_ttl_s: PositiveInt = 10
    orphan_grace_s: NonNegativeFloat = 60.0
    store_grace_s: PositiveFloat = 1800.0

    def block(self, slot: str) -> str:
        """Return the first slot of the block of adjacent slots that are simulated together with `slot`."""
        at = self.slots.index(slot) if self.widest > 1 and slot in self.slots else None
        return slot if at is None else self.slots[at - at % self.widest]

    def judge(self, name: str) -> ServedJudge:
        """Return the judge of this name. It must be in the document."""
        return next(judge for judge in self.judges if judge.name == name)


def start_host(launch: HostLaunch, home: Path) -> ProcessId:
    """Start a process for these engines, which outlives its starter. Raises CannotStart.

    If a process of the job already runs on the node, the new process hands its document over to that one and ends,
    because engines that share a slot must be in one process.
    """
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
    """Queue of launch documents for a job's emulated engines on one node, consumed by one process.

    A folder under the daemon's home contains the documents that no process has taken yet, and a lock file. The process
    that runs the engines holds the lock. The kernel releases it when that process dies; the remaining documents then
    belong to the next process. So engines that share a slot are in one process. Uses files only; never waits.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, launch: HostLaunch, home: Path) -> LaunchQueue:
        """Return the queue for the job and node of `launch`. `home`: the daemon's home folder."""
        return cls(home / "workers" / f"emulated-{launch.node}-{launch.job_uid}")

    def put(self, launch: HostLaunch) -> Path:
        """Write a document into the queue and return its file, which is deleted when a process takes the document."""
        file = self._folder / f"{launch.name}.json"
        replace_file(file, launch.encode(), mode=0o600)
        return file

    def claim(self) -> bool:
        """Try to become the consumer, until this process ends. Returns False if another process is."""
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
        """Remove and return all documents of the queue. Only for the consumer (`claim`).

        Raises UnreadableRecord for an invalid document.
        """
        found = []
        for file in sorted(self._folder.glob("*.json")):
            found.append(HostLaunch.decode(file.read_bytes(), str(file)))
            file.unlink()
        return found
