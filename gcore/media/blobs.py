"""The folder of a node's blob store: `FOLDER/JOB/ab/SHA256`, one file per blob and job.

A blob is written to a temporary name and hashed meanwhile. It gets its name only if size and SHA-256 are right, and
then never changes (mode 0444). So a crash leaves at most temporary files, which the next start removes. Nothing is
synced to disk: a blob that a power failure damaged is detected like any other damaged one.

Pins, reservations and times of use are in memory only (`gcore.media.accounts`). After a restart each file gets one grace
time, and its SHA-256 is computed again at its first use, and whenever it is linked for a train rank. A file with other
bytes is removed and counts as missing.

All methods may be called from any thread. They read and write files, so an event loop calls them in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from gcore.errors import UsageError
from gcore.media.accounts import BlobAccounts, BlobAdmission, BlobKey, StoredBlob
from gcore.media.protocol import (
    PIECE_BYTES,
    Blob,
    BlobDamaged,
    BlobError,
    BlobMismatch,
    BlobMissing,
    StoreFailed,
    blob_path,
    check_job,
    check_sha256,
    disk_error,
    is_disk_full,
)
from gcore.system.clock import Clock

T = TypeVar("T")

GRACE_S = 120.0
"""Seconds in which a new blob is kept without a pin."""

_DRAFTS = ".incoming"
_LOCK = ".lock"
_MODE = 0o444
_UNREADABLE = frozenset({errno.EIO, errno.EACCES, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EBADMSG})
"""Errors of the disk about one file."""

_CANNOT_LINK = frozenset({errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """Counts of a blob store since its start, in blobs and bytes; the second group is the present state."""

    bytes_stored: int = 0
    """Bytes of blobs that were stored, from clients and from other stores."""
    bytes_linked: int = 0
    """Bytes of blobs that were linked or copied into other folders."""
    blobs_deleted: int = 0
    """Blobs that were deleted to make room."""
    blobs_damaged: int = 0
    """Blobs that were removed because their bytes had changed, or cannot be read."""

    blobs: int = 0
    stored: int = 0
    pinned: int = 0
    held: int = 0
    incoming: int = 0
    reserved: int = 0
    bound: int = 0


class BlobStore:
    """The blobs of a node in one folder, with at most `bound_bytes` bytes."""

    def __init__(self, folder: Path, bound_bytes: int, clock: Clock, *, grace_s: float = GRACE_S) -> None:
        """Create or open the folder. `grace_s`: seconds in which a new blob is kept without a pin.

        Raises StoreFailed if the disk does, and UsageError if another process uses the folder.
        """
        self.folder = folder
        self._clock = clock
        self._accounts = BlobAccounts(bound_bytes, grace_s)
        self._lock = threading.Lock()  # accounts, and the names of files
        self._numbers = itertools.count()
        self._counted = StoreCounters(bound=bound_bytes)
        try:
            (folder / _DRAFTS).mkdir(parents=True, exist_ok=True)
            self._own = _lock_folder(folder)
            self._sweep_drafts()
            self._scan()
        except OSError as error:
            raise disk_error(f"cannot open the blob store {folder}", error) from error

    def close(self) -> None:
        """Let another process use the folder."""
        self._own.close()

    def counters(self) -> StoreCounters:
        """Return the counters."""
        with self._lock:
            accounts = self._accounts
            return replace(
                self._counted,
                reserved=accounts.reserved(self._clock.monotonic()),
                blobs=len(accounts),
                stored=accounts.stored,
                pinned=accounts.pinned,
                held=accounts.held,
                incoming=accounts.incoming,
            )

    # Blobs that arrive.

    def begin(self, job: str, blob: Blob, *, holder: str = "") -> IncomingBlob:
        """Make room for a blob, and return the file to write. `holder`: uses up the reservation of this holder.

        Raises StoreFull and StoreFailed.
        """
        key = BlobKey(check_job(job), check_sha256(blob.sha256))
        with self._lock:
            admission, deleted = self._accounts.admit(key, blob.size, holder, self._clock.monotonic())
            try:
                for one in deleted:
                    self._unlink(one)
            except StoreFailed:
                self._accounts.cancel(admission)
                raise
            self._count(blobs_deleted=len(deleted))
        draft = self.folder / _DRAFTS / str(next(self._numbers))
        try:
            self.unless_full(partial(draft.parent.mkdir, exist_ok=True), 0)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            handle = self.unless_full(partial(os.open, draft, flags, 0o600), blob.size)
            file = os.fdopen(handle, "wb", buffering=0)
        except OSError as error:
            with self._lock:
                self._accounts.cancel(admission)
            raise disk_error(f"cannot write a blob to {draft.parent}", error) from error
        return IncomingBlob(self, admission, draft, file)

    def put_bytes(self, job: str, data: bytes, *, holder: str = "") -> Blob:
        """Store bytes, and return their blob. It begins its grace time, also if it is stored already. Raises StoreFull and
        StoreFailed.
        """
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        if not self.confirm(job, blob):
            with self.begin(job, blob, holder=holder) as incoming:
                incoming.write(data)
                incoming.commit()
        return blob

    # Blobs that are stored.

    def has(self, job: str, sha256: str) -> bool:
        """Return whether the blob is stored. After a restart its bytes may not be verified yet (`confirm`)."""
        with self._lock:
            return self._accounts.find(BlobKey(check_job(job), check_sha256(sha256))) is not None

    def size(self, job: str, sha256: str) -> int:
        """Return the size of a blob in bytes. Raises BlobMissing."""
        with self._lock:
            return self._find(BlobKey(check_job(job), check_sha256(sha256))).size

    def confirm(self, job: str, blob: Blob) -> bool:
        """Return whether the store has the blob, with right bytes; if so, begin its grace time again.

        Raises BlobMismatch if the stored blob has another size than `blob`, and StoreFailed.
        """
        try:
            with self.open(job, blob.sha256) as file:
                size = os.fstat(file.fileno()).st_size
            with self._lock:
                key = BlobKey(job, blob.sha256)
                self._find(key)
                self._accounts.use(key, self._clock.monotonic(), confirm=True)
        except BlobMissing:
            return False
        if size != blob.size:
            raise BlobMismatch(f"blob {blob.sha256} has {size} bytes, but the request says {blob.size}")
        return True

    def path(self, job: str, sha256: str) -> Path:
        """Return the path of a blob with verified bytes. Without a pin the file may be deleted at any time.

        Raises BlobMissing, BlobDamaged and StoreFailed.
        """
        self.open(job, sha256).close()
        return self._path(BlobKey(job, sha256))

    def open(self, job: str, sha256: str, *, again: bool = False) -> BinaryIO:
        """Open a blob with verified bytes for reading; it can be read to the end even if it is deleted meanwhile.

        `again`: compute its SHA-256 also if this process has done so. Raises BlobMissing, BlobDamaged and StoreFailed.
        """
        key = BlobKey(check_job(job), check_sha256(sha256))
        with self._lock:
            blob = self._find(key)
            self._accounts.use(key, self._clock.monotonic())
        path = self._path(key)
        try:
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0)
        except FileNotFoundError as error:
            self._forget(key, blob)
            raise BlobMissing(f"blob {sha256} of job {job} was deleted from the folder of the store") from error
        except OSError as error:
            self._drop_unreadable(key, blob, error)
            raise disk_error(f"cannot open {path}", error) from error
        try:
            self._verify(key, blob, file, again=again)
        except BaseException:
            file.close()
            raise
        return file

    def link_to(self, job: str, sha256s: Iterable[str], folder: Path) -> list[str]:
        """Verify blobs and give them a second name `folder/SHA256`, or copy them to another file system; return those that
        are missing.

        A file of that name is replaced. Raises StoreFailed if the folder does not exist or cannot be written.
        """
        missing = []
        for sha256 in sha256s:
            try:
                self._link(job, sha256, folder)
            except BlobMissing:
                missing.append(sha256)
        return missing

    # Pins and reservations.

    def pin(self, incarnation: str, job: str, sha256s: Iterable[str], ttl_s: float) -> None:
        """Protect blobs from deletion for `ttl_s` seconds, in the name of an incarnation; a later call renews the pins."""
        with self._lock:
            now = self._clock.monotonic()
            names = [check_sha256(one) for one in sha256s]
            self._accounts.pin(incarnation, check_job(job), names, now + ttl_s, now)

    def unpin(self, incarnation: str, job: str, sha256s: Iterable[str], *, ends_grace: bool = False) -> None:
        """End pins of an incarnation. `ends_grace`: as in `BlobAccounts.unpin`."""
        with self._lock:
            self._accounts.unpin(incarnation, check_job(job), sha256s, self._clock.monotonic(), ends_grace=ends_grace)

    def reserve(self, job: str, holder: str, size: int, ttl_s: float) -> bool:
        """Set the reservation of a holder to `size` bytes for `ttl_s` seconds; return whether there is room.

        If there is no room, the previous reservation stays.
        """
        with self._lock:
            now = self._clock.monotonic()
            return self._accounts.reserve(check_job(job), holder, size, now + ttl_s, now)

    def drop_job(self, job: str) -> None:
        """Delete all blobs, pins and reservations of a job. Its blobs that are arriving are refused. Raises StoreFailed."""
        aside = self.folder / _DRAFTS / f"job-{next(self._numbers)}"
        with self._lock:
            self._accounts.drop_job(check_job(job), self._clock.monotonic())
            try:
                (self.folder / job).rename(aside)
            except FileNotFoundError:
                return
            except OSError as error:
                raise disk_error(f"cannot delete {self.folder / job}", error) from error
        shutil.rmtree(aside, ignore_errors=True)

    # Inside.

    def finish(self, incoming: IncomingBlob) -> None:
        """Give a complete draft its name; for `IncomingBlob.commit`. Raises BlobMissing if the job was dropped, OSError."""
        key = incoming.admission.key
        path = self._path(key)
        self.unless_full(partial(path.parent.mkdir, parents=True, exist_ok=True), 0)
        with self._lock:
            is_new = self._accounts.find(key) is None
            if not self._accounts.store(incoming.admission, self._clock.monotonic()):
                raise BlobMissing(f"job {key.job} was dropped while blob {key.sha256} arrived")
            if not is_new:
                incoming.draft.unlink()
                return
            try:
                incoming.draft.rename(path)
            except OSError:
                self._accounts.remove(key, self._clock.monotonic())
                raise
            self._count(bytes_stored=incoming.admission.size)

    def unless_full(self, action: Callable[[], T], size: int) -> T:
        """Run `action`, again after each time that it fails because the disk is full while blobs can be deleted for it.

        The disk may be full before the store has reached its bound. `size`: bytes that the action needs. Raises OSError.
        """
        while True:
            try:
                return action()
            except OSError as error:
                if not is_disk_full(error) or not self._delete_free(size):
                    raise

    def _delete_free(self, size: int) -> bool:
        """Delete blobs that are not held, with about `size` bytes in all. Return whether there were any. Raises StoreFailed."""
        with self._lock:
            deleted = self._accounts.delete_free(size, self._clock.monotonic())
            for one in deleted:
                self._unlink(one)
            self._count(blobs_deleted=len(deleted))
        return bool(deleted)

    def abandon(self, admission: BlobAdmission) -> None:
        """Give back the room of a blob that is not stored; for `IncomingBlob.close`."""
        with self._lock:
            self._accounts.cancel(admission)

    def job_folder(self, job: str) -> Path:
        """The folder of a job's blobs."""
        return self.folder / job

    def _path(self, key: BlobKey) -> Path:
        return self.job_folder(key.job) / blob_path(key.sha256)

    def _find(self, key: BlobKey) -> StoredBlob:
        blob = self._accounts.find(key)
        if blob is None:
            raise BlobMissing(f"the store has no blob {key.sha256} of job {key.job}")
        return blob

    def _verify(self, key: BlobKey, blob: StoredBlob, file: BinaryIO, *, again: bool) -> None:
        """Compare the size, and once per process or with `again` the SHA-256. Leaves the file at its start. Raises
        BlobDamaged.
        """
        try:
            right = os.fstat(file.fileno()).st_size == blob.size
            if right and (again or not blob.verified):
                right = _hash(file) == key.sha256
                file.seek(0)
                blob.verified = right
        except OSError as error:
            self._drop_unreadable(key, blob, error)
            raise disk_error(f"cannot read {self._path(key)}", error) from error
        if not right:
            self._forget(key, blob)
            with self._lock:
                self._count(blobs_damaged=1)
            raise BlobDamaged(f"the bytes of blob {key.sha256} of job {key.job} have changed, so it was removed")

    def _drop_unreadable(self, key: BlobKey, blob: StoredBlob, error: OSError) -> None:
        """Remove a blob that the disk cannot read, so that the store gets it again from elsewhere. Raises BlobDamaged; returns
        for an error that is not about this file."""
        if error.errno not in _UNREADABLE:
            return
        with contextlib.suppress(StoreFailed):  # what cannot be deleted stays, and no longer counts
            self._forget(key, blob)
        with self._lock:
            self._count(blobs_damaged=1)
        raise BlobDamaged(
            f"blob {key.sha256} of job {key.job} cannot be read ({os.strerror(error.errno)}), so it was removed"
        ) from error

    def _forget(self, key: BlobKey, blob: StoredBlob) -> None:
        """Remove a blob that cannot be used, unless it was replaced meanwhile."""
        with self._lock:
            if self._accounts.find(key) is blob:
                self._accounts.remove(key, self._clock.monotonic())
                self._unlink(key)

    def _link(self, job: str, sha256: str, folder: Path) -> None:
        target = folder / check_sha256(sha256)
        with self.open(job, sha256, again=True) as file:  # what a rank has linked counts as verified
            source = os.fstat(file.fileno())
            with contextlib.suppress(OSError):
                found = target.lstat()
                if (found.st_dev, found.st_ino) == (source.st_dev, source.st_ino):
                    return
            draft = folder / f".{sha256}.{os.getpid()}.{next(self._numbers)}"
            try:
                try:
                    os.link(self._path(BlobKey(job, sha256)), draft)
                except OSError as error:
                    if error.errno not in _CANNOT_LINK:
                        raise
                    _copy(file, draft)
                if draft.lstat().st_size != source.st_size:
                    raise BlobError(f"{draft} has another size than the blob", where=str(folder))
                draft.rename(target)
            except FileNotFoundError as error:
                if folder.is_dir():
                    raise BlobMissing(f"blob {sha256} of job {job} was deleted while it was linked") from error
                raise disk_error(f"cannot link a blob into {folder}", error) from error
            except OSError as error:
                raise disk_error(f"cannot link a blob into {folder}", error) from error
            finally:
                with contextlib.suppress(OSError):
                    draft.unlink()
        with self._lock:
            self._count(bytes_linked=source.st_size)

    def _unlink(self, key: BlobKey) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(f"cannot delete {self._path(key)}", error) from error

    def _count(self, **more: int) -> None:
        self._counted = replace(
            self._counted, **{name: getattr(self._counted, name) + value for name, value in more.items()}
        )

    def _sweep_drafts(self) -> None:
        for path in (self.folder / _DRAFTS).iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()

    def _scan(self) -> None:
        """Add the files of an earlier process to the accounts, the oldest first."""
        found = sorted(_stored_files(self.folder))
        for _, key, size in found:
            self._accounts.add(key, size, self._clock.monotonic(), verified=False)


class IncomingBlob:
    """A blob that is being received. Use as a context manager: without `commit`, the end of the block removes it.

    The calls may come from different threads: when a task is cancelled, `close` waits for a write that still runs.
    """

    def __init__(self, store: BlobStore, admission: BlobAdmission, draft: Path, file: BinaryIO) -> None:
        self.admission = admission
        self.draft = draft
        self.written = 0
        """Bytes received so far."""
        self._store = store
        self._file = file
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()

    def __enter__(self) -> IncomingBlob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, piece: bytes | memoryview) -> None:
        """Append a piece. Raises BlobMismatch if the blob gets larger than announced, and StoreFailed."""
        if self.written + len(piece) > self.admission.size:
            raise self._mismatch(f"more than {self.admission.size} bytes")
        rest = memoryview(piece)
        with self._open():
            self._hash.update(piece)
            self.written += len(piece)
            while len(rest):
                rest = rest[self._store.unless_full(partial(self._file.write, rest), len(rest)) :]

    def restart(self) -> None:
        """Discard what was received, to receive it from another source. Raises StoreFailed."""
        with self._open():
            self._file.seek(0)
            self._file.truncate()
            self._hash = hashlib.sha256()
            self.written = 0

    def commit(self) -> None:
        """Store the blob. Raises BlobMismatch if size or SHA-256 differ, BlobMissing if the job was dropped, StoreFailed."""
        if self.written != self.admission.size:
            raise self._mismatch(f"{self.written} bytes in place of {self.admission.size}")
        if self._hash.hexdigest() != self.admission.key.sha256:
            raise self._mismatch(f"the SHA-256 {self._hash.hexdigest()}")
        with self._open():
            os.chmod(self.draft, _MODE)
            self._store.finish(self)

    def close(self) -> None:
        """Remove what was not committed. Never raises."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self.draft.unlink()
            self._store.abandon(self.admission)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Exclude other threads, and explain errors of the disk."""
        with self._lock:
            if self._file.closed:
                raise StoreFailed(f"the transfer of blob {self.admission.key.sha256} was ended")
            try:
                yield
            except OSError as error:
                raise disk_error(f"cannot write a blob to {self._store.folder}", error) from error

    def _mismatch(self, what: str) -> BlobMismatch:
        return BlobMismatch(
            f"the bytes sent as blob {self.admission.key.sha256} have {what}", fix="Send the bytes that the name says"
        )


def _hash(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _copy(source: BinaryIO, target: Path) -> None:
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        source.seek(0)
        shutil.copyfileobj(source, file, PIECE_BYTES)
        os.fchmod(file.fileno(), _MODE)


def is_in_use(folder: Path) -> bool:
    """Whether a process has opened the blob store in this folder. Raises OSError."""
    if not (folder / _LOCK).exists():
        return False
    try:
        _lock_folder(folder).close()
    except UsageError:
        return True
    return False


def _lock_folder(folder: Path) -> BinaryIO:
    file = (folder / _LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UsageError(
            "another process uses this blob store", where=str(folder), fix="Stop it, or choose another folder"
        ) from error
    return file


def _stored_files(folder: Path) -> Iterator[tuple[float, BlobKey, int]]:
    """Yield time of modification, key and size of each blob in the folder of a store; ignore other files."""
    for job in folder.iterdir():
        if job.name.startswith(".") or not job.is_dir():
            continue
        for path in job.glob("*/*"):
            facts = path.lstat()
            try:
                key = BlobKey(check_job(job.name), check_sha256(path.name))
            except BlobError:
                continue
            if stat.S_ISREG(facts.st_mode) and path.parent.name == key.sha256[:2]:
                yield facts.st_mtime, key, facts.st_size
