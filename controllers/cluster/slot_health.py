"""Finds unhealthy slots of this node: asks the machine for its devices every `CHECK_S`, and looks at the workers of the
cluster at each change.

`controllers.cluster.rules` decides from the workers. Emulated slots are always healthy. The state is kept when the
daemon gets a new lease; `controllers.cluster.registration` writes it to the store.

Devices are GPUs as the driver's own program lists them (it is run only if a slot is a GPU), and cores that the kernel
lets this process use. If a driver that has responded before fails `SILENT` times in a row, or takes longer than
`ASK_S`, all its GPUs count as missing; one failure is not enough, because a machine under load is slow. Without such a
program nothing is known, and no slot is unhealthy because of that, unless the machine has no GPU device at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.cluster.rules import NodeHealth, next_check_at, update_health
from gcore.engines.emulated.launch import is_emulated
from gcore.system.clock import Clock
from gcore.system.slots import bound_cores, is_cuda
from gcore.worker.records import WorkerRecord

ASK = ("nvidia-smi", "-L")
ASK_S, KILLED_S = 20.0, 1.0
"""Maximum seconds for the driver's program to respond, and to end after it was killed."""

SILENT = 3
"""Consecutive failed queries after which the driver's GPUs count as missing."""

_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)\s*$")
_PART = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)\s*$")
_DEVICE = re.compile(r"nvidia\d+|dxg")


@dataclass(frozen=True, slots=True)
class DriverReport:
    """What is known of the driver and its GPUs. `names`: of the GPUs, as numbers ("0", "1", ...) and as the driver's
    identifiers; None: the driver has never responded."""

    names: frozenset[str] | None = None
    silent: int = 0
    """Consecutive failed queries since the last response."""
    said: str = ""
    """The error of the last failed query."""
    absent: bool = False
    """Whether the driver's program is missing and the machine has no GPU device."""

    def answered(self, text: str) -> DriverReport:
        """Return the report after a response of the driver's program."""
        return DriverReport(names=parse_devices(text))

    def failed(self, said: str) -> DriverReport:
        """Return the report after a failed query. `said`: its error."""
        return replace(self, silent=self.silent + 1, said=said, absent=False)


def parse_devices(text: str) -> frozenset[str]:
    """Parse the driver's list of GPUs. Return the names that may follow `cuda:` in the name of a slot."""
    found: set[str] = set()
    for line in text.splitlines():
        if whole := _GPU.match(line):
            found |= {whole[1], whole[2]}
        elif part := _PART.match(line):
            found.add(part[1])
    return frozenset(found)


def missing_devices(slots: Sequence[str], driver: DriverReport, cores: frozenset[int] | None) -> dict[str, str]:
    """The slots whose device is missing, with the reason. `cores`: the cores that this process may use; None: not
    known."""
    found: dict[str, str] = {}
    for slot in slots:
        if is_cuda(slot) and (why := _gpu_problem(slot.removeprefix("cuda:"), driver)):
            found[slot] = why
        gone = sorted(bound_cores(slot) - cores) if cores is not None else []
        if gone:
            listing = ", ".join(map(str, gone[:8])) + (" ..." if len(gone) > 8 else "")
            found[slot] = (
                f"this process may not run on the core{'s' * (len(gone) > 1)} {listing} (excluded by its CPU set, or offline)"
            )
    return found


def _gpu_problem(name: str, driver: DriverReport) -> str:
    if driver.absent:
        return "this machine has no GPU device and no nvidia-smi"
    if driver.names is None:
        return ""
    if driver.silent >= SILENT:
        return f"the driver no longer responds: {driver.said}"
    return "" if name in driver.names else "the driver does not list this GPU (nvidia-smi -L)"


def usable_cores() -> frozenset[int] | None:
    """The cores that this process may run on; None: not known."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


async def ask_driver(driver: DriverReport, command: Sequence[str] = ASK, dev: Path = Path("/dev")) -> DriverReport:
    """Run the driver's program and return the new report. `driver`: the report so far. `dev`: folder with the device
    files."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        if driver.names is not None:
            return driver.failed(f"{command[0]}: {error.strerror or error}")
        return replace(driver, absent=not _shows_gpus(dev))
    try:
        out, _ = await asyncio.wait_for(process.communicate(), ASK_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):  # a hung driver may block its client forever
            await asyncio.wait_for(process.wait(), KILLED_S)
        return driver.failed(f"{command[0]} did not respond within {ASK_S:.0f} s")
    text = out.decode(errors="replace")
    # If a GPU is lost, the program lists the others, prints an error and exits with a code of its own.
    if parse_devices(text) or process.returncode == 0:
        return driver.answered(text)
    words = " ".join(text.split())[:200]
    return driver.failed(f"{command[0]} ended with exit code {process.returncode}: {words}")


def _shows_gpus(dev: Path) -> bool:
    try:
        return any(_DEVICE.fullmatch(entry.name) for entry in dev.iterdir())
    except OSError:
        return True  # unknown


log = logging.getLogger(__name__)

CHECK_S = 60.0
"""Seconds between two checks of the machine's devices."""


class SlotHealth:
    """Finds unhealthy slots of a daemon's node."""

    def __init__(self, node: str, slots: Sequence[str], clock: Clock) -> None:
        self._slots = tuple(slot for slot in slots if not is_emulated(slot))
        self._clock = clock
        self._driver = DriverReport()
        self._health = NodeHealth(node)
        self._missing: Mapping[str, str] = {}
        self._checked: float | None = None
        self._seen: tuple[object, object] = (None, None)
        self.sick: Mapping[str, str] = {}
        """The unhealthy slots, with the reason; replaced, never changed."""

    async def check(self) -> None:
        """Ask the machine for its devices, and update the unhealthy slots."""
        self._checked = self._clock.monotonic()
        if any(map(is_cuda, self._slots)):
            self._driver = await ask_driver(self._driver)
        bound = any(map(bound_cores, self._slots))
        self._missing = missing_devices(self._slots, self._driver, usable_cores() if bound else None)
        self._conclude()

    def look(self, workers: Mapping[str, WorkerRecord], active: frozenset[str]) -> None:
        """Update the unhealthy slots from the workers of the cluster. `active`: IDs of the jobs that have not ended."""
        now, due = self._clock.monotonic(), next_check_at(self._health)
        fresh = self._seen[0] is not workers or self._seen[1] is not active
        if self._slots and (fresh or (due is not None and now >= due)):
            self._seen = (workers, active)
            self._health = update_health(self._health, workers, active, now)
            self._conclude()

    async def run(self, cluster: ClusterMirror, changes: ChangeSignal) -> None:
        """Check again and again while the daemon has its lease; never returns. Notifies `changes` when the unhealthy
        slots change."""
        if not self._slots:
            await asyncio.Event().wait()
        while True:
            before = self.sick
            if self._checked is None or self._clock.monotonic() - self._checked >= CHECK_S:
                await self.check()
            self.look(cluster.workers, cluster.active)
            if self.sick != before:
                changes.notify()
            await changes.wait(self._pause())

    def _pause(self) -> float:
        now, due = self._clock.monotonic(), next_check_at(self._health)
        checked = now if self._checked is None else self._checked
        return max(0.05, min(checked + CHECK_S, due if due is not None else checked + CHECK_S) - now)

    def _conclude(self) -> None:
        """Combine missing devices and failed starts into `sick`, and log changes."""
        sick = {**self._health.sick, **self._missing}
        for slot in sorted(sick.keys() - self.sick.keys()):
            log.warning("slot %s is unhealthy and will not be used: %s", slot, sick[slot])
        for slot in sorted(self.sick.keys() - sick.keys()):
            log.info("slot %s is healthy again", slot)
        if sick != self.sick:
            self.sick = sick
