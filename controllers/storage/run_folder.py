"""A run's folder as one node has it: the proof that nodes share it, the weights staged in it, and a node's own folder where they share none.

Staged weights, checkpoints, receipts and old log entries go through the run's folder: one node writes them and another reads them. So
`StorageProof` proves that all nodes of a job see one and the same folder, before any of them counts on it. Each controller that prepares a
job writes a random number into a file of its own there, puts file and number into the store, and only then looks which others have done so,
and reads their files. Of any two, the one that came second looks for the other's: so no two nodes get past each other unproven, and a node
that comes later is proved against all. Where nodes are to share none (`storage.copies`), the same proves that no two do, and each has the
run's folder under its own run root.

A file that is not there at once is looked for again: a mounted folder may show late what another machine wrote. The proof says nothing
about how fast the folder is, nor that its disk keeps what it takes. On one machine it is as good as free.

`StagedWeightsMonitor` looks which weights are staged there. `LocalRunFolders` are this node's own folders of jobs whose nodes share none:
what is known of each beside its files, and how files that only grow are continued from what peers have. A daemon without a job has them
already, so this module imports little.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from controllers.changes import ChangeSignal
from controllers.identity import Identity
from controllers.storage.peer_files import PeerFiles
from gcore.api.tls import PLAIN, Connector
from gcore.errors import GcoreError, explain_os_errors
from gcore.ledger import archive
from gcore.ledger.audit import receipts
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import slot_accounting
from gcore.ledger.records.job import JobRecord, StorageMark
from gcore.models.layout import FIRST, versions_in, weights_folder
from gcore.observability import samples
from gcore.store.keys import JobKeys
from gcore.store.types import Put, Store
from gcore.system.clock import Clock
from gcore.system.files import replace_file
from gcore.types import Version

FOLDER = ".nodes"
"""In the run's folder: one small file for each node that has worked on the job."""

PROOF_LOOK_AGAIN_S = 0.5

LOOKS = 30
"""Times a node looks for what another wrote, `PROOF_LOOK_AGAIN_S` apart."""

SHARE_IT = (
    "Mount one folder at this path on every node, and name it in storage.root, or in run_root of the daemons; or, if they are to "
    "share none, set storage.copies: 2"
)

Pause = Callable[[float], Awaitable[None]]

STAGED_LOOK_AGAIN_S = 0.2
"""While weights are missed, until the folder is looked at again."""

ANSWER_S = 10.0
"""So long may a look take before it is told."""

TOPIC = "storage"

NOTHING_STAGED = frozenset({FIRST})
"""What engines can have before a rank has staged anything: the model they start with."""

HOW = "see whether its disk or mount is well on this node"

Tell = Callable[[str, str], None]

Look = Callable[[Path], frozenset[Version]]

RECORDS = (archive.LOG_FOLDER, archive.EVALUATIONS, receipts.FOLDER)
"""The folders whose files only grow."""


def folder_loss(run_dir: Path, node: str) -> str:
    """Why `node` does not see the folder any more in which it proved to write, or nothing. Blocks.

    A folder of that name is not enough: where a mount is gone, whoever writes a log makes one beneath it.
    """
    try:
        (run_dir / FOLDER / node).stat()
    except OSError as error:
        return (
            f"{node} does not see the run's folder {run_dir} as it did ({error.strerror or error}); "
            "nothing in it is taken for damaged until it does: see whether its mount is there on this node"
        )
    return ""


class StorageNotShared(GcoreError):
    """A node cannot write where the others read, or does not see what another wrote."""


def run_folder(job: JobRecord, run_root: Path) -> Path:
    """The folder of a job's run on this node: the one that all share, or where they share none, its own of that name."""
    return run_root / Path(job.run_dir).name if has_own_folder(job) else Path(job.run_dir)


def has_own_folder(job: JobRecord) -> bool:
    """Whether each node has a folder of its own for the run."""
    storage = job.spec.get("storage")
    return isinstance(storage, dict) and storage.get("copies") is not None


def localize_mirror(mirror: JobMirror, run_root: Path) -> JobMirror:
    """The mirror, whose job's record names the run's folder as it is on this node."""
    if mirror.job is None or not has_own_folder(mirror.job.record):
        return mirror
    here = str(run_folder(mirror.job.record, run_root))
    if mirror.job.record.run_dir == here:
        return mirror
    job = replace(mirror.job, record=mirror.job.record.model_copy(update={"run_dir": here}))
    return replace(mirror, job=job)


@dataclass(frozen=True)
class StorageProof:
    """One node's proof that it shares one job's folder with the others. `is_apart`: it is proved that no two share a folder, or a copy on
    the one would be taken
    for a second one. `pause` waits so many seconds, or until there is nothing to wait for any more."""

    store: Store
    keys: JobKeys
    identity: Identity
    run_dir: Path
    pause: Pause
    is_apart: bool = False

    async def run(self) -> None:
        """Write, then read what the others wrote. Raises StorageNotShared, StoreUnavailable."""
        nonce = uuid.uuid4().hex
        await asyncio.to_thread(self._write, nonce)
        mark = StorageMark(node=self.identity.node, nonce=nonce)
        put = Put(self.keys.storage(mark.node), mark.encode(), lease=self.identity.lease)
        await self.store.transact((), (put,))
        if self.is_apart:
            await self._refuse_shared()
            return
        unseen: list[StorageMark] = []
        for _ in range(LOOKS):
            unseen = [other for other in await self._others() if not await asyncio.to_thread(self._sees, other)]
            if not unseen:
                return
            await self.pause(PROOF_LOOK_AGAIN_S)
        names = ", ".join(sorted(mark.node for mark in unseen))
        raise StorageNotShared(
            f"{self.identity.node} does not see what {names} wrote in the job's folder; the nodes share no storage there",
            where=str(self.run_dir),
            fix=SHARE_IT,
        )

    async def _refuse_shared(self) -> None:
        seen = [mark.node for mark in await self._others() if await asyncio.to_thread(self._sees, mark)]
        if seen:
            raise StorageNotShared(
                f"{self.identity.node} sees what {', '.join(sorted(seen))} wrote in the job's folder; the nodes share it, so what "
                "lies there once would count as several copies",
                where=str(self.run_dir),
                fix="Leave storage.copies out of the spec, or give each node a run_root of its own",
            )

    def _write(self, nonce: str) -> None:
        path = self._file_of(self.identity.node)
        with explain_os_errors(
            f"{self.identity.node} cannot write in the job's folder", StorageNotShared, where=self.run_dir, fix=SHARE_IT
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, nonce.encode())

    def _sees(self, mark: StorageMark) -> bool:
        with contextlib.suppress(OSError):
            return self._file_of(mark.node).read_text(encoding="utf-8", errors="replace") == mark.nonce
        return False

    def _file_of(self, node: str) -> Path:
        return self.run_dir / FOLDER / node

    async def _others(self) -> list[StorageMark]:
        """The other nodes' marks in the store now; a node that is gone has proved nothing, and need not be seen."""
        listing = await self.store.list(self.keys.storage_prefix)
        marks = (StorageMark.decode(kv.value, kv.key) for kv in listing.kvs)
        return [mark for mark in marks if mark.node != self.identity.node]


def staged_versions(run_dir: Path) -> frozenset[Version]:
    """The versions whose weights lie whole in the run's folder, and the first, which engines start with. Raises OSError."""
    return versions_in(weights_folder(run_dir, FIRST).parent) | {FIRST}


class StagedWeightsMonitor:
    """Looks which weights are staged in a job's folder, beside the event loop, while head's weights are missing.

    The folder may be on a mount that hangs, or that fails for a while. A call into a mount that hangs does not come back, so it is made in
    a thread that nothing waits for: neither the lease's renewal, nor the threads that others share, nor the daemon's end. One look is under
    way at a time. A look that takes too long is reported, and so is an error; both reports end when the folder answers. What is known stays
    what was seen last.

    `wanted`: head's version; `tell`: called with a topic and a sentence about trouble, an empty sentence when it is over; `found`: called
    when other versions are there.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        wanted: Callable[[], Version | None],
        changes: ChangeSignal,
        tell: Tell,
        found: Callable[[], None],
        clock: Clock,
        look: Look = staged_versions,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._folder = folder
        self._node = node
        self._wanted = wanted
        self._changes = changes
        self._tell = tell
        self._found = found
        self._clock = clock
        self._look = look
        self._answer_s = answer_s
        self.versions: frozenset[Version] = NOTHING_STAGED

    async def run(self) -> None:
        """For ever: look while head's weights are missed."""
        while True:
            await self._changes.until(self._misses)
            await self._see()
            if self._misses():
                await self._clock.sleep(STAGED_LOOK_AGAIN_S)

    def _misses(self) -> bool:
        wanted = self._wanted()
        return wanted is not None and wanted not in self.versions

    async def _see(self) -> None:
        """Look once, however long it takes."""
        look = _in_a_thread(lambda: self._look(self._folder))
        if not (await asyncio.wait({look}, timeout=self._answer_s))[0]:
            self._tell(TOPIC, self._sentence(f"does not answer for {self._answer_s:.0f} s"))
            await asyncio.wait({look})
        try:
            versions = look.result()
        except OSError as error:
            self._tell(TOPIC, self._sentence(f"cannot be read ({error.strerror or error})"))
            return
        self._tell(TOPIC, "")
        if versions != self.versions:
            self.versions = versions
            self._found()

    def _sentence(self, what: str) -> str:
        return f"{self._node}: the run's folder {self._folder} {what}; engines here get no new weights until it does: {HOW}"


def _in_a_thread(look: Callable[[], frozenset[Version]]) -> asyncio.Future[frozenset[Version]]:
    """As `asyncio.to_thread`, in a thread that is nobody else's, and that the process does not wait for at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[frozenset[Version]] = loop.create_future()

    def settle(found: frozenset[Version] | OSError) -> None:
        if future.cancelled():
            return
        if isinstance(found, OSError):
            future.set_exception(found)
        else:
            future.set_result(found)

    def work() -> None:
        found: frozenset[Version] | OSError
        try:
            found = look()
        except OSError as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=work, name="staged weights", daemon=True).start()
    return future


@dataclass
class LocalRunFolder:
    """One job's run folder on one node, as long as the daemon lives."""

    files: PeerFiles
    brought: set[str] = field(default_factory=set)
    """Train worlds whose starting checkpoint was read here to its last byte."""
    damaged: set[tuple[Version, str]] = field(default_factory=set)
    """Checkpoints that lie here by name and are not what they were."""
    fetching: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """By a checkpoint's folder: two fetches of it at once would write into the same draft, and one would delete the other's."""
    failing: dict[str, float] = field(default_factory=dict)
    """What has not been done since when, by the action's name."""


class LocalRunFolders:
    """A node's run folders by job: writers, and readers for people, go through the same one."""

    def __init__(self, connector: Connector = PLAIN) -> None:
        self._connector = connector
        self._known: dict[str, LocalRunFolder] = {}

    @property
    def connector(self) -> Connector:
        """What other nodes are reached with."""
        return self._connector

    def of(self, uid: str, run_dir: Path) -> LocalRunFolder:
        """A job's, made at the first call."""
        if uid not in self._known:
            self._known[uid] = LocalRunFolder(
                PeerFiles(uid, run_dir, owner=uuid.uuid4().hex[:8], connector=self._connector)
            )
        return self._known[uid]


async def collect_samples(own: LocalRunFolder, peers: Mapping[str, str]) -> None:
    """Before samples are read: what other nodes have kept, as far as they give it. A file of them is written once."""
    await extend_files(own, peers, (samples.FOLDER,))


async def collect_accounts(own: LocalRunFolder, peers: Mapping[str, str]) -> None:
    """Before slot accounting is read: what other nodes have accounted for, as far as they give it."""
    await extend_files(own, peers, (slot_accounting.FOLDER,))


async def collect_records(own: LocalRunFolder, peers: Mapping[str, str]) -> None:
    """Before a run's records are read as a whole: what peers have more of them, as far as they give it."""
    await extend_files(own, peers, RECORDS)


async def extend_files(own: LocalRunFolder, peers: Mapping[str, str], names: Iterable[str]) -> tuple[str, ...]:
    """Continue files by what peers have; what was wrong with whom."""
    wrong = []
    for node, address in sorted(peers.items()):
        for name in names:
            try:
                await own.files.grown(address, name)
            except GcoreError as error:
                wrong.append(f"{node}: {error}")
                break
    return tuple(wrong)
