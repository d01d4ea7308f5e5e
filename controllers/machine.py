"""What a daemon tells of its node: how much memory its accelerators and its host have, and what its accelerators are called.

The driver's own program is asked, once in a daemon's life, and only where a slot is a GPU; no torch. Where GPUs of one machine differ,
each slot is told the least memory of them and no name, for CUDA numbers them otherwise than the driver. What cannot be told for
sure (a driver that does not answer, GPUs in parts, emulated slots) is not told: who plans does without it then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from gcore.emulated.launch import is_emulated
from gcore.host_memory import host_memory
from gcore.ledger.facts import NodeFacts, SlotFacts
from gcore.slots import is_cuda

log = logging.getLogger(__name__)

GIB = 1 << 30
ASK = ("nvidia-smi", "--query-gpu=name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
ASK_S, KILLED_S = 10.0, 1.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """As the driver tells of it. `whole`: whether it is not divided up."""

    name: str
    memory_gib: float
    whole: bool = True


async def node_facts(
    names: Sequence[str], host_memory_gib: float | None = None, command: Sequence[str] = ASK
) -> NodeFacts | None:
    """What a node with the slots of these `names` is; None: not known. `host_memory_gib`: what of its host's memory it may take, None:
    all."""
    if any(map(is_emulated, names)):
        return None
    host = host_memory_gib
    try:
        host = host_memory().total / GIB if host is None else host
    except (OSError, ValueError) as error:
        log.warning("how much memory this machine has is not known: %s", error)
        return None
    gpus = await _gpus(command) if any(map(is_cuda, names)) else ()
    slots = slot_facts(names, gpus)
    return None if slots is None else NodeFacts(host_memory_gib=round(host, 3), slots=slots)


def slot_facts(slots: Sequence[str], gpus: Sequence[Gpu]) -> tuple[SlotFacts, ...] | None:
    """What each slot is, on a machine with `gpus`. None: not known."""
    cuda = [slot for slot in slots if is_cuda(slot)]
    numbers = [slot.partition(":")[2] for slot in cuda]
    known = all(number.isdecimal() and int(number) < len(gpus) for number in numbers)
    if cuda and not (known and all(one.whole for one in gpus)):
        return None
    name = gpus[0].name if len(set(gpus)) == 1 else ""
    least = min((one.memory_gib for one in gpus), default=None)
    return tuple(SlotFacts(slot=s, memory_gib=least, device=name) if s in cuda else SlotFacts(slot=s) for s in slots)


def gpus_in(text: str) -> tuple[Gpu, ...]:
    """The driver's answer; none where it is no such answer."""
    found = []
    for line in text.splitlines():
        name, _, rest = line.partition(",")
        memory, _, divided = (part.strip() for part in rest.partition(","))
        if not memory.isdecimal():
            return ()
        found.append(Gpu(name.strip(), round(int(memory) / 1024, 3), divided != "Enabled"))
    return tuple(found)


async def _gpus(command: Sequence[str]) -> tuple[Gpu, ...]:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        log.warning("what the GPUs are is not known: %s: %s", command[0], error.strerror or error)
        return ()
    try:
        out, _ = await asyncio.wait_for(process.communicate(), ASK_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # A driver that hangs may not let go of who asks it: that is not waited for.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILLED_S)
        log.warning("what the GPUs are is not known: %s did not answer in %.0f s", command[0], ASK_S)
        return ()
    if process.returncode:
        log.warning("what the GPUs are is not known: %s ended with %d", command[0], process.returncode)
        return ()
    return gpus_in(out.decode(errors="replace"))
