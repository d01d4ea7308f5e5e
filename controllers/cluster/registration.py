"""The registration of a node in the store, under the lease of its daemon: the node's record, its unhealthy slots, and
the schema version that it reads.

The record is written when that of an earlier run of the daemon has disappeared, and again when the schema version
changes. The daemon is ready while its lease is certainly valid and its node is registered.

Hardware facts: the driver's own program runs once in a daemon's life, and only if a slot is a GPU; torch is not imported. If the GPUs of a
machine differ, each slot reports the smallest memory and no name, because CUDA may number them differently from the driver. Uncertain facts
(a driver that does not respond, partitioned GPUs) are left out. Emulated slots have the memory that their timing file gives them, if any.

Schema version: a daemon writes records in the newest version that all daemons can read. The store records a version
before any record uses it. Without that, a new daemon that sees an older node could write an older version while others
already write a newer one, and lose data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.cluster.rules import choose_version, parse_version
from controllers.cluster.slot_health import SlotHealth
from controllers.identity import Identity
from gcore import schema
from gcore.config.node import NodeConfig
from gcore.engines.emulated.launch import emulated_memory, is_emulated
from gcore.engines.environments import SGLANG_DIFFUSION
from gcore.errors import StoreUnavailable
from gcore.ledger.records.cluster import NodeFacts, SickSlots, SlotFacts
from gcore.ledger.records.job import NodeRecord
from gcore.schema import set_written_version, written_version
from gcore.store import keys
from gcore.store.session import Session
from gcore.store.types import Compare, Delete, Put, Store
from gcore.system.clock import Clock
from gcore.system.fault_injection import FaultPoint, fault_point
from gcore.system.memory import host_memory
from gcore.system.slots import is_cuda

log = logging.getLogger(__name__)
GIB = 1 << 30
ASK = ("nvidia-smi", "--query-gpu=name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
ASK_S, KILLED_S = 10.0, 1.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver reports it. `whole`: it is not partitioned (MIG)."""

    name: str
    memory_gib: float
    whole: bool = True


async def node_facts(
    names: Sequence[str], host_memory_gib: float | None = None, command: Sequence[str] = ASK
) -> NodeFacts | None:
    """Determine the hardware facts of a node with the slots `names`; None: not known. `host_memory_gib`: the host
    memory that the node may use; None: all. `command`: lists the GPUs."""
    host = host_memory_gib
    try:
        host = host_memory().total / GIB if host is None else host
    except (OSError, ValueError) as error:
        log.warning("cannot determine the memory of this machine: %s", error)
        return None
    if any(map(is_emulated, names)):
        memory = emulated_memory(os.environ)
        slots = None if memory is None else tuple(SlotFacts(slot=slot, memory_gib=memory) for slot in names)
    else:
        slots = slot_facts(names, await _gpus(command) if any(map(is_cuda, names)) else ())
    return None if slots is None else NodeFacts(host_memory_gib=round(host, 3), slots=slots)


def slot_facts(slots: Sequence[str], gpus: Sequence[Gpu]) -> tuple[SlotFacts, ...] | None:
    """Determine device and memory of each slot on a machine with `gpus`; None: not known."""
    cuda = [slot for slot in slots if is_cuda(slot)]
    numbers = [slot.partition(":")[2] for slot in cuda]
    known = all(number.isdecimal() and int(number) < len(gpus) for number in numbers)
    if cuda and not (known and all(one.whole for one in gpus)):
        return None
    name = gpus[0].name if len(set(gpus)) == 1 else ""
    least = min((one.memory_gib for one in gpus), default=None)
    return tuple(SlotFacts(slot=s, memory_gib=least, device=name) if s in cuda else SlotFacts(slot=s) for s in slots)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse the list of GPUs that the driver's program prints; empty if it has another format."""
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
        log.warning("cannot determine the GPUs: %s: %s", command[0], error.strerror or error)
        return ()
    try:
        out, _ = await asyncio.wait_for(process.communicate(), ASK_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # A hung driver may block its client forever, so the wait for its end is limited.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILLED_S)
        log.warning("cannot determine the GPUs: %s did not respond within %.0f s", command[0], ASK_S)
        return ()
    if process.returncode:
        log.warning("cannot determine the GPUs: %s ended with exit code %d", command[0], process.returncode)
        return ()
    return parse_gpus(out.decode(errors="replace"))


class NodeFactsReader:
    """Reads the hardware facts of the node once per daemon process."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._found: tuple[NodeFacts | None] | None = None

    async def read(self) -> NodeFacts | None:
        """Return the facts; None: not known. The first call reads them."""
        if self._found is None:
            self._found = (await node_facts(self._config.slots, self._config.host_memory_gib),)
        return self._found[0]


RETRY_S = 0.5

READINESS_S = 1.0
"""Seconds between checks whether the lease is valid."""

WAITS_FOR_ANOTHER = (
    "%s is already registered under lease %x by an earlier incarnation; waiting until that lease expires. If it does not expire, another "
    "daemon uses the name of this node"
)


class NodeRegistration:
    """Registers the node under one lease, and keeps the registration current. `ready`: called whenever it changes
    whether the daemon can work, with that and a sentence."""

    def __init__(
        self,
        config: NodeConfig,
        health: SlotHealth,
        facts: NodeFactsReader,
        is_version_agreed: Callable[[], bool],
        clock: Clock,
        store: Store,
        identity: Identity,
        metrics_address: str,
        blob_address: str,
        changes: ChangeSignal,
        session: Session,
        ready: Callable[[bool, str], Awaitable[None]],
    ) -> None:
        self._config = config
        self._health = health
        self._facts = facts
        self._is_version_agreed = is_version_agreed
        self._clock = clock
        self._store = store
        self._identity = identity
        self._metrics_address = metrics_address
        self._blob_address = blob_address
        self._changes = changes
        self._session = session
        self._ready = ready
        self._registered = False
        self._published: tuple[bool, str] | None = None
        self._written = 0
        """The schema version in which the record was last written."""
        self._sick: dict[str, str] = {}
        """The unhealthy slots as last written."""
        self._key = keys.node(config.node)

    async def run(self) -> None:
        """Register the node, then write the record again when the schema version or the unhealthy slots change; never
        returns."""
        await self._health.check()
        record = self._record(await self._facts.read())
        # The other nodes and the schema version must be known first.
        await self._changes.until(self._is_version_agreed)
        await self._register(record)
        self._registered = True
        await self._tell_readiness()
        while True:
            await self._changes.until(lambda: written_version() != self._written or self._health.sick != self._sick)
            if not await self._is_written_anew(record):
                await self._clock.sleep(RETRY_S)

    async def watch_readiness(self) -> None:
        """Report every `READINESS_S` whether the daemon can work; never returns. It cannot while the store is
        unavailable, because the lease is then not renewed."""
        while True:
            await self._tell_readiness()
            await self._clock.sleep(READINESS_S)

    async def _tell_readiness(self) -> None:
        alive = self._session.alive(self._clock.monotonic())
        ready = alive and self._registered
        if ready:
            status = f"ready: {len(self._config.slots)} slots, {len(self._health.sick)} of them unhealthy"
        else:
            status = "waiting for the store: the lease is not renewed" if not alive else "registering the node"
        if (ready, status) != self._published:
            self._published = ready, status
            await self._ready(ready, status)

    async def _register(self, record: NodeRecord) -> None:
        config, lease, store = self._config, self._identity.lease, self._store
        waited_for = 0
        reads = Put(keys.readable_version(config.node), str(schema.SCHEMA_VERSION).encode(), lease=lease)
        while True:
            with contextlib.suppress(StoreUnavailable):
                self._written, self._sick = written_version(), dict(self._health.sick)
                put = Put(self._key, record.encode(), lease=lease)
                fault_point(FaultPoint.NODE, "before")
                # In the same transaction as the registration: no job may get a slot that is known to be unhealthy.
                sick = self._sick_now() if self._sick else ()
                result = await store.transact((Compare(self._key, 0),), (put, reads, *sick))
                fault_point(FaultPoint.NODE, "after")
                if result.won:
                    return
                holder = await store.get(self._key)
                if holder is not None and holder.lease == lease:
                    # Written by an attempt without a response: its schema version and unhealthy slots may be outdated.
                    self._written = 0
                    return
                if holder is not None and holder.lease != waited_for:
                    waited_for = holder.lease
                    log.warning(WAITS_FOR_ANOTHER, config.node, waited_for)
            await self._clock.sleep(RETRY_S)

    async def _is_written_anew(self, record: NodeRecord) -> bool:
        """Write the node's record again. Return whether that succeeded."""
        with contextlib.suppress(StoreUnavailable):
            there = await self._store.get(self._key)
            compare = Compare(self._key, there.mod_revision if there is not None else 0)
            version, sick = written_version(), dict(self._health.sick)
            put = Put(self._key, record.encode(), lease=self._identity.lease)
            if (await self._store.transact((compare,), (put, *self._sick_now()))).won:
                self._written, self._sick = version, sick
                return True
        return False

    def _sick_now(self) -> tuple[Put | Delete, ...]:
        key, sick = keys.sick_slots(self._config.node), dict(self._health.sick)
        return (Put(key, SickSlots(slots=sick).encode(), lease=self._identity.lease) if sick else Delete(key),)

    def _record(self, facts: NodeFacts | None) -> NodeRecord:
        config, identity = self._config, self._identity
        return NodeRecord(
            name=config.node,
            incarnation=identity.incarnation,
            address=identity.address,
            peer_address=identity.peer_address,
            metrics_address=self._metrics_address,
            slots=config.slots,
            pid=os.getpid(),
            started=self._clock.wall(),
            sglang=config.sglang_python is not None,
            sglang_diffusion=config.sglang_python is not None and SGLANG_DIFFUSION.is_in(Path(config.sglang_python)),
            vllm=config.vllm_python is not None,
            blobs=self._blob_address,
            blob_bytes=config.blob_bytes if self._blob_address else 0,
            facts=facts,
        )


async def raise_version(
    spoken: int, node: str, cluster: ClusterMirror, store: Store, changes: ChangeSignal, clock: Clock
) -> int:
    """Wait until all nodes can read a newer schema version than `spoken` (0: any version); then make it the version
    that this process writes, and return it. `node`: the name of this daemon's node."""

    def due() -> int:
        return choose_version(cluster.nodes.keys() - {node}, cluster.reads, cluster.written)

    while True:
        await changes.until(lambda: cluster.is_complete and due() > spoken)
        version = due()
        with contextlib.suppress(StoreUnavailable):
            if await _tell(store, version):
                set_written_version(version)
                log.info(
                    "now writing schema version %d (this release supports up to %d)", version, schema.NEWEST_VERSION
                )
                return version
        await clock.sleep(RETRY_S)


async def _tell(store: Store, version: int) -> bool:
    """Record in the store that records of schema `version` are written from now on. Return whether the store names that
    version or a newer one."""
    stored = await store.get(keys.WRITTEN)
    said = parse_version(stored.value) if stored is not None else None
    if said is not None and said >= version:
        return True
    compare = Compare(keys.WRITTEN, stored.mod_revision if stored is not None else 0)
    return (await store.transact((compare,), (Put(keys.WRITTEN, str(version).encode()),))).won
