"""Watches this node's slots: asks the machine from time to time, and looks at the starts of workers at each change.

`controllers.cluster.rules` says which slots are sick; a daemon's next incarnation keeps what this one knew. Emulated slots are never sick.
The incarnation that holds the lease writes it to the store.

Devices: GPUs as the driver's own program lists them (asked only where a slot is a GPU), cores as the kernel lets this process use them. A driver
that answered and does not any more, or takes longer than `ASK_S`, has `SILENT` more tries before all its GPUs count as gone, since a machine
under load is slow. Without such a program nothing is known, and no slot is sick for it, unless the machine shows no GPU at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
SILENT = 3
_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)\s*$")
_PART = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)\s*$")
_DEVICE = re.compile(r"nvidia\d+|dxg")


@dataclass(frozen=True, slots=True)
class DriverReport:
    """What is known of the driver and its GPUs. `names`: "0", "1", ... and what the driver calls them. None: it never answered."""

    names: frozenset[str] | None = None
    silent: int = 0
    """Times in a row that it did not answer since it last did."""
    said: str = ""
    """What it said instead."""
    absent: bool = False
    """Whether there is no driver's program, and the machine shows no GPU."""

    def answered(self, text: str) -> DriverReport:
        """After an answer."""
        return DriverReport(names=parse_devices(text))

    def failed(self, said: str) -> DriverReport:
        """After a question in vain."""
        return replace(self, silent=self.silent + 1, said=said, absent=False)


def parse_devices(text: str) -> frozenset[str]:
    """What slots may be called after `cuda:`, by the driver's list."""
    found: set[str] = set()
    for line in text.splitlines():
        if whole := _GPU.match(line):
            found |= {whole[1], whole[2]}
        elif part := _PART.match(line):
            found.add(part[1])
    return frozenset(found)


def missing_devices(slots: Sequence[str], driver: DriverReport, cores: frozenset[int] | None) -> dict[str, str]:
    """The slots whose device is not there, and why. `cores`: those that this process may use; None: not known."""
    found: dict[str, str] = {}
    for slot in slots:
        if is_cuda(slot) and (why := _gpu_problem(slot.removeprefix("cuda:"), driver)):
            found[slot] = why
        gone = sorted(bound_cores(slot) - cores) if cores is not None else []
        if gone:
            listing = ", ".join(map(str, gone[:8])) + (" ..." if len(gone) > 8 else "")
            found[slot] = (
                f"this process may not run on the core{'s' * (len(gone) > 1)} {listing} (its CPU set, or cores switched off)"
            )
    return found


def _gpu_problem(name: str, driver: DriverReport) -> str:
    if driver.absent:
        return "this machine shows no GPU, and has no nvidia-smi"
    if driver.names is None:
        return ""
    if driver.silent >= SILENT:
        return f"the driver does not answer any more: {driver.said}"
    return "" if name in driver.names else "the driver does not list it (nvidia-smi -L)"


def usable_cores() -> frozenset[int] | None:
    """The cores that this process may run on."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


async def ask_driver(driver: DriverReport, command: Sequence[str] = ASK, dev: Path = Path("/dev")) -> DriverReport:
    """After asking once more."""
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
        with contextlib.suppress(TimeoutError):  # a driver that hangs may not let go of who asks it
            await asyncio.wait_for(process.wait(), KILLED_S)
        return driver.failed(f"{command[0]} did not answer in {ASK_S:.0f} s")
    text = out.decode(errors="replace")
    # It lists what it can, and complains of a GPU that is lost, with a code of its own.
    if parse_devices(text) or process.returncode == 0:
        return driver.answered(text)
    words = " ".join(text.split())[:200]
    return driver.failed(f"{command[0]} ended with {process.returncode}: {words}")


def _shows_gpus(dev: Path) -> bool:
    try:
        return any(_DEVICE.fullmatch(entry.name) for entry in dev.iterdir())
    except OSError:
        return True  # it cannot be told


log = logging.getLogger(__name__)

CHECK_S = 60.0
"""Between two questions to the machine."""


class SlotHealth:
    """Of one daemon. `ask` and `cores` are asked of the machine."""

    def __init__(
        self,
        node: str,
        slots: Sequence[str],
        clock: Clock,
        ask: Callable[[DriverReport], Awaitable[DriverReport]] = ask_driver,
        cores: Callable[[], frozenset[int] | None] = usable_cores,
    ) -> None:
        self._slots = tuple(slot for slot in slots if not is_emulated(slot))
        self._clock = clock
        self._ask = ask
        self._cores = cores
        self._driver = DriverReport()
        self._health = NodeHealth(node)
        self._missing: Mapping[str, str] = {}
        self._checked: float | None = None
        self._seen: tuple[object, object] = (None, None)
        self.sick: Mapping[str, str] = {}
        """The slots that are not to be used, and why; replaced, never changed."""

    async def check(self) -> None:
        """Ask the machine which devices are there."""
        self._checked = self._clock.monotonic()
        if any(map(is_cuda, self._slots)):
            self._driver = await self._ask(self._driver)
        bound = any(map(bound_cores, self._slots))
        self._missing = missing_devices(self._slots, self._driver, self._cores() if bound else None)
        self._conclude()

    def look(self, workers: Mapping[str, WorkerRecord], active: frozenset[str]) -> None:
        """See what has become of workers."""
        now, due = self._clock.monotonic(), next_check_at(self._health)
        fresh = self._seen[0] is not workers or self._seen[1] is not active
        if self._slots and (fresh or (due is not None and now >= due)):
            self._seen = (workers, active)
            self._health = update_health(self._health, workers, active, now)
            self._conclude()

    async def run(self, cluster: ClusterMirror, changes: ChangeSignal) -> None:
        """For ever, in a life; `changes` are notified when other slots are sick than before."""
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
        sick = {**self._health.sick, **self._missing}
        for slot in sorted(sick.keys() - self.sick.keys()):
            log.warning("slot %s is sick and is not used: %s", slot, sick[slot])
        for slot in sorted(self.sick.keys() - sick.keys()):
            log.info("slot %s may be used again", slot)
        if sick != self.sick:
            self.sick = sick
