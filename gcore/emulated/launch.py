"""The document that starts a node's emulated engines, and starting them. Knows no durations.

The numbers of the law (`gcore.emulated.law`) do not stand in it: who wants others than the default names a JSON file in
`GCORE_EMULATED_LAW`, which daemons and workers inherit. Emulated slots are for tests and benchmarks, and have no place in a
node's configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from gcore.atomic import whole_file
from gcore.schema import Part, Record
from gcore.worker.process import CannotStart, ProcessId, spawn_detached
from gcore.worker.records import StoreRef

LAW_FILE = "GCORE_EMULATED_LAW"
KIND = "emulated"
SAID = "emulated slots compute nothing; for tests and benchmarks only"


def is_emulated(slot: str) -> bool:
    """Whether a slot is no device."""
    return slot.startswith(f"{KIND}:")


def remark(slots: Iterable[str]) -> str:
    """What is said behind whatever was done on these slots: nothing, unless some compute nothing."""
    return f" ({SAID})" if any(map(is_emulated, slots)) else ""


class PlacedEngine(Part):
    """An engine of the process: the worker that it registers as, and its slot."""

    instance: str
    slot: str


class HostLaunch(Record):
    """The file that `python -m gcore.emulated.host --launch` reads. Times in real seconds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    node: str
    job_uid: str
    store: StoreRef
    engines: Annotated[tuple[PlacedEngine, ...], Field(min_length=1)]
    model: str
    """The model's folder: its tokenizer and its vocabulary are real."""
    host: str = "127.0.0.1"
    rows: PositiveInt
    """Sequences that an engine runs at once."""
    weight_version: str
    lease_ttl_s: PositiveInt = 10
    orphan_grace_s: NonNegativeFloat = 60.0
    store_grace_s: PositiveFloat = 1800.0


def start_host(launch: HostLaunch, home: Path) -> ProcessId:
    """Start the process, so that it outlives its starter. Raises CannotStart."""
    file = home / "workers" / f"{launch.name}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole_file(file, launch.encode(), mode=0o600)
    except OSError as error:
        raise CannotStart(
            f"cannot write the launch document ({error.strerror or error})",
            where=str(file),
            fix="Make the home folder writable",
        ) from error
    command = (sys.executable, "-m", "gcore.emulated.host", "--home", str(home), "--launch", str(file))
    return spawn_detached(command, log_file=home / "logs" / f"{launch.name}.log", cwd=home)
