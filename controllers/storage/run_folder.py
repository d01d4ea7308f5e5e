"""The run folder as one node sees it: the proof that nodes share it, the weights that are ready for weight sync in it,
and the run folders of nodes that share none.

Weights for weight sync (staged weights), checkpoints, receipts and old log entries are exchanged through the run
folder: one node writes them and another reads them. So `StorageProof` proves that all nodes of a job see the same
folder, before any node relies on it. Each controller that prepares a job writes a random number into its own file in
the folder, publishes the number in the store, and only then lists the other controllers that have done so and reads
their files. Of any two controllers, the later one checks the file of the earlier one. So no two nodes can miss each
other, and a node that joins later is checked against all. If nodes must not share a folder (`storage.copies`), the same
procedure proves that no two do, and each has the run folder under its own run root.

A file that is missing at first is checked again, because a mounted folder may show files of other machines late. The
proof says nothing about the speed of the folder or the durability of its disk. On one machine it costs almost nothing.

`StagedWeightsMonitor` finds out which weights the folder contains. `LocalRunFolders` keeps what is known of this node's
own run folders besides their files, and fetches files from other nodes. A daemon without a job has it too, so this
module imports little.
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
"""Folder in the run folder with one small file for each node that has worked on the job."""

PROOF_LOOK_AGAIN_S = 0.5
"""Seconds between two checks for the files of other nodes."""

LOOKS = 30
"""Maximum number of checks for the files of other nodes."""

SHARE_IT = (
    "Mount one folder at this path on every node, and set it as storage.root, or as run_root of the daemons. If they must "
    "not share a folder, set storage.copies: 2"
)

Pause = Callable[[float], Awaitable[None]]

STAGED_LOOK_AGAIN_S = 0.2
"""Seconds between two checks of the folder while weights are missing."""

ANSWER_S = 10.0
"""Seconds after which a check that has not returned is reported as hanging."""

TOPIC = "storage"

NOTHING_STAGED = frozenset({FIRST})
"""Versions that engines can load before a rank has written weights: the initial model only."""

HOW = "check its disk or mount on this node"

Tell = Callable[[str, str], None]

Look = Callable[[Path], frozenset[Version]]
"""Lists the versions whose weights a run folder contains."""

RECORDS = (archive.LOG_FOLDER, archive.EVALUATIONS, receipts.FOLDER)
"""The folders in the run folder with growing files of records."""


def folder_loss(run_dir: Path, node: str) -> str:
    """Return why `node` no longer sees the run folder in which it wrote its file for the proof; empty if it does.
    Blocks.

    It is not enough that a folder of that name exists: if the mount is gone, the writer of a log creates one on the
    local disk.
    """
    try:
        (run_dir / FOLDER / node).stat()
    except OSError as error:
        return (
            f"{node} no longer sees the run's folder {run_dir} ({error.strerror or error}); "
            "meanwhile no missing file counts as damaged: check the mount on this node"
        )
    return ""


class StorageNotShared(GcoreError):
    """A node cannot write to the shared folder, or does not see what another wrote."""


def run_folder(job: JobRecord, run_root: Path) -> Path:
    """Return a job's run folder on this node: the shared one, or the node's own."""
    return run_root / Path(job.run_dir).name if has_own_folder(job) else Path(job.run_dir)


def has_own_folder(job: JobRecord) -> bool:
    """Whether each node has its own folder for the run."""
    storage = job.spec.get("storage")
    return isinstance(storage, dict) and storage.get("copies") is not None


def localize_mirror(mirror: JobMirror, run_root: Path) -> JobMirror:
    """Return the mirror of a job's records with the path of the run folder on this node in the job's record."""
    if mirror.job is None or not has_own_folder(mirror.job.record):
        return mirror
    here = str(run_folder(mirror.job.record, run_root))
    if mirror.job.record.run_dir == here:
        return mirror
    job = replace(mirror.job, record=mirror.job.record.model_copy(update={"run_dir": here}))
    return replace(mirror, job=job)


@dataclass(frozen=True)
class StorageProof:
    """One node's proof that it shares a job's run folder with the other nodes. `is_apart`: prove instead that no two
    nodes share a folder, because two copies in one folder would count as safe. `pause`: waits for the given seconds, or
    until the job has ended."""

    store: Store
    keys: JobKeys
    identity: Identity
    run_dir: Path
    pause: Pause
    is_apart: bool = False

    async def run(self) -> None:
        """Write this node's file and publish its number, then check the files of the others. Raises StorageNotShared,
        StoreUnavailable."""
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
            f"{self.identity.node} does not see what {names} wrote to the job's folder, so the nodes do not share it",
            where=str(self.run_dir),
            fix=SHARE_IT,
        )

    async def _refuse_shared(self) -> None:
        seen = [mark.node for mark in await self._others() if await asyncio.to_thread(self._sees, mark)]
        if seen:
            raise StorageNotShared(
                f"{self.identity.node} sees what {', '.join(sorted(seen))} wrote to the job's folder. The nodes share it, so "
                "one file would count as several copies",
                where=str(self.run_dir),
                fix="Remove storage.copies from the spec, or give each node its own run_root",
            )

    def _write(self, nonce: str) -> None:
        path = self._file_of(self.identity.node)
        with explain_os_errors(
            f"{self.identity.node} cannot write to the job's folder", StorageNotShared, where=self.run_dir, fix=SHARE_IT
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
        """Return the numbers that the other nodes have published in the store. A node that is gone has none and is not
        checked."""
        listing = await self.store.list(self.keys.storage_prefix)
        marks = (StorageMark.decode(kv.value, kv.key) for kv in listing.kvs)
        return [mark for mark in marks if mark.node != self.identity.node]


def staged_versions(run_dir: Path) -> frozenset[Version]:
    """Return the versions whose weights the run folder contains completely, and the initial one, with which engines
    start. Raises OSError."""
    return versions_in(weights_folder(run_dir, FIRST).parent) | {FIRST}


class StagedWeightsMonitor:
    """Checks which weights a job's run folder contains, while the newest committed ones are missing there.

    The folder may be on a mount that hangs or fails for a while. A call into a hanging mount does not return, so it
    runs in a thread of its own, for which neither the lease renewal, nor shared threads, nor the exit of the daemon
    wait. One check runs at a time. A check that takes too long, or fails, is reported until the folder responds. The
    last known state remains valid meanwhile.

    `wanted`: returns the newest committed version. `tell`: called with a topic and a sentence about a problem, empty
    when it is over. `found`: called when `versions` changes.
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
        """Check the folder whenever the newest weights are missing, until cancelled."""
        while True:
            await self._changes.until(self._misses)
            await self._see()
            if self._misses():
                await self._clock.sleep(STAGED_LOOK_AGAIN_S)

    def _misses(self) -> bool:
        wanted = self._wanted()
        return wanted is not None and wanted not in self.versions

    async def _see(self) -> None:
        """Check the folder once, and wait for the result however long it takes."""
        look = _in_a_thread(lambda: self._look(self._folder))
        if not (await asyncio.wait({look}, timeout=self._answer_s))[0]:
            self._tell(TOPIC, self._sentence(f"has not responded for {self._answer_s:.0f} s"))
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
        return f"{self._node}: the run's folder {self._folder} {what}; engines on this node get no new weights until it works again: {HOW}"


def _in_a_thread(look: Callable[[], frozenset[Version]]) -> asyncio.Future[frozenset[Version]]:
    """Call `look` in a new daemon thread, for which the process does not wait at exit (unlike `asyncio.to_thread`)."""
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
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=work, name="staged weights", daemon=True).start()
    return future


@dataclass
class LocalRunFolder:
    """State of one job's run folder on one node, kept for the lifetime of the daemon."""

    files: PeerFiles
    """Fetches files of the run from other nodes."""
    brought: set[str] = field(default_factory=set)
    """Train worlds whose start checkpoint was completely read and verified here."""
    damaged: set[tuple[Version, str]] = field(default_factory=set)
    """Version and digest of the local checkpoints that are damaged."""
    fetching: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Locks by checkpoint folder, because two fetches of one checkpoint would use the same temporary folder."""
    failing: dict[str, float] = field(default_factory=dict)
    """Since when (monotonic seconds) a folder action fails, by name of the action."""


class LocalRunFolders:
    """The states of this node's own run folders, by job. The jobs and the API use the same object."""

    def __init__(self, connector: Connector = PLAIN) -> None:
        self._connector = connector
        self._known: dict[str, LocalRunFolder] = {}

    @property
    def connector(self) -> Connector:
        """Connects to other nodes."""
        return self._connector

    def of(self, uid: str, run_dir: Path) -> LocalRunFolder:
        """Return the state of a job's run folder; it is created at the first call."""
        if uid not in self._known:
            self._known[uid] = LocalRunFolder(
                PeerFiles(uid, run_dir, owner=uuid.uuid4().hex[:8], connector=self._connector)
            )
        return self._known[uid]


async def collect_samples(own: LocalRunFolder, peers: Mapping[str, str]) -> None:
    """Fetch the recorded samples of other nodes, so that they can be read here, as far as the nodes respond."""
    await extend_files(own, peers, (samples.FOLDER,))


async def collect_accounts(own: LocalRunFolder, peers: Mapping[str, str]) -> None:
    """Fetch the slot accounts of other nodes, so that they can be read here, as far as the nodes respond."""
    await extend_files(own, peers, (slot_accounting.FOLDER,))


async def collect_records(own: LocalRunFolder, peers: Mapping[str, str]) -> None:
    """Fetch the log entries, evaluations and receipts that this node lacks from other nodes, as far as they respond."""
    await extend_files(own, peers, RECORDS)


async def extend_files(own: LocalRunFolder, peers: Mapping[str, str], names: Iterable[str]) -> tuple[str, ...]:
    """Extend the growing files in the folders `names` by the lines that other nodes have and this node lacks. `peers`:
    addresses by node. Return a sentence for each node that failed."""
    wrong = []
    for node, address in sorted(peers.items()):
        for name in names:
            try:
                await own.files.grown(address, name)
            except GcoreError as error:
                wrong.append(f"{node}: {error}")
                break
    return tuple(wrong)
