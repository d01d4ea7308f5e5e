"""Which devices of this machine are there: GPUs as the driver lists them, cores as the kernel lets this process use them.

The driver's own program is asked now and then, and only where a slot is a GPU; no torch. A driver that answered and does not any
more, or takes longer than `ASK_S`, is given `SILENT` more tries before all its GPUs count as gone: a machine under load is slow.
Where there is no such program nothing is known, and nothing is said against a slot, unless the machine shows no GPU at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gcore.slots import bound_cores, is_cuda

ASK = ("nvidia-smi", "-L")
ASK_S, KILLED_S = 20.0, 1.0
SILENT = 3
_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)\s*$")
_PART = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)\s*$")
_DEVICE = re.compile(r"nvidia\d+|dxg")


@dataclass(frozen=True, slots=True)
class Driver:
    """What is known of the driver and its GPUs. `names`: "0", "1", ... and what the driver calls them. None: it never answered."""

    names: frozenset[str] | None = None
    silent: int = 0
    """Times in a row that it did not answer since it last did."""
    said: str = ""
    """What it said instead."""
    absent: bool = False
    """Whether there is no driver's program, and the machine shows no GPU."""

    def answered(self, text: str) -> Driver:
        """After an answer."""
        return Driver(names=listed(text))

    def failed(self, said: str) -> Driver:
        """After a question in vain."""
        return replace(self, silent=self.silent + 1, said=said, absent=False)


def listed(text: str) -> frozenset[str]:
    """What slots may be called after `cuda:`, by the driver's list."""
    found: set[str] = set()
    for line in text.splitlines():
        if whole := _GPU.match(line):
            found |= {whole[1], whole[2]}
        elif part := _PART.match(line):
            found.add(part[1])
    return frozenset(found)


def missing(slots: Sequence[str], driver: Driver, cores: frozenset[int] | None) -> dict[str, str]:
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


def _gpu_problem(name: str, driver: Driver) -> str:
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


async def asked(driver: Driver, command: Sequence[str] = ASK, dev: Path = Path("/dev")) -> Driver:
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
    if listed(text) or process.returncode == 0:
        return driver.answered(text)
    words = " ".join(text.split())[:200]
    return driver.failed(f"{command[0]} ended with {process.returncode}: {words}")


def _shows_gpus(dev: Path) -> bool:
    try:
        return any(_DEVICE.fullmatch(entry.name) for entry in dev.iterdir())
    except OSError:
        return True  # it cannot be told
