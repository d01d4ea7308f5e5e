"""The folder of a blob store: files appear whole or not at all, never change, and damaged ones are removed."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gcore.errors import UsageError
from gcore.media import blobs as blobs_module
from gcore.media.blobs import BlobStore
from gcore.media.protocol import (
    Blob,
    BlobDamaged,
    BlobMismatch,
    BlobMissing,
    BlobRequestRefused,
    StoreDiskFull,
    StoreFailed,
    StoreFull,
)
from gcore.testing.clock import FakeClock

DATA = b"picture" * 1000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[BlobStore]:
    one = BlobStore(tmp_path / "store", 20_000, clock, grace_s=60.0)
    yield one
    one.close()


def restarted(store: BlobStore, clock: FakeClock, bound: int = 20_000) -> BlobStore:
    store.close()
    return BlobStore(store.folder, bound, clock, grace_s=60.0)


def blob_of(data: bytes) -> Blob:
    return Blob(hashlib.sha256(data).hexdigest(), len(data))


def files(folder: Path) -> list[str]:
    """The files of a store: blobs, and what was not finished."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(path.relative_to(folder).as_posix() for path in found)


def damage(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_stored_blob_is_a_read_only_file_under_job_and_hash(store: BlobStore) -> None:
    blob = store.put_bytes("job", DATA)
    assert blob == blob_of(DATA)
    path = store.path("job", blob.sha256)
    assert path == store.folder / "job" / blob.sha256[:2] / blob.sha256
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    with store.open("job", blob.sha256) as file:
        assert file.read() == DATA
    assert store.size("job", blob.sha256) == len(DATA)


def test_a_job_has_only_its_own_blobs(store: BlobStore) -> None:
    blob = store.put_bytes("one", DATA)
    assert not store.has("two", blob.sha256)
    with pytest.raises(BlobMissing, match="the store has no blob"):
        store.open("two", blob.sha256)


@pytest.mark.parametrize(
    ("announced", "message"),
    [
        (Blob("0" * 64, len(DATA)), "the SHA-256"),
        (blob_of(DATA)._replace(size=len(DATA) + 1), "7000 bytes in place of 7001"),
        (blob_of(DATA)._replace(size=len(DATA) - 1), "more than 6999 bytes"),
    ],
)
def test_other_bytes_than_announced_are_refused_and_leave_nothing(
    store: BlobStore, announced: Blob, message: str
) -> None:
    def put() -> None:
        with store.begin("job", announced) as incoming:
            incoming.write(DATA)
            incoming.commit()

    with pytest.raises(BlobMismatch, match=message):
        put()
    assert files(store.folder) == []
    assert store.counters().incoming == 0


def test_an_unfinished_blob_is_removed_at_once_and_after_a_crash_at_the_next_start(
    store: BlobStore, clock: FakeClock
) -> None:
    with store.begin("job", blob_of(DATA)) as incoming:
        incoming.write(DATA[:100])
    assert files(store.folder) == []
    store.begin("job", blob_of(DATA)).write(DATA[:100])
    assert len(files(store.folder)) == 1
    again = restarted(store, clock)
    assert files(again.folder) == []
    assert again.counters().incoming == 0


def test_a_restarted_store_has_its_blobs_and_finds_damaged_ones_at_their_first_use(
    store: BlobStore, clock: FakeClock
) -> None:
    good, bad = store.put_bytes("job", DATA), store.put_bytes("job", DATA[::-1])
    damage(store.path("job", bad.sha256))
    again = restarted(store, clock)
    assert again.counters().stored == 2 * len(DATA)
    with again.open("job", good.sha256) as file:
        assert file.read() == DATA
    with pytest.raises(BlobDamaged, match="have changed, so it was removed"):
        again.open("job", bad.sha256)
    assert not again.has("job", bad.sha256)
    assert (again.counters().stored, again.counters().blobs_damaged) == (len(DATA), 1)
    again.put_bytes("job", DATA[::-1])
    assert again.path("job", bad.sha256).read_bytes() == DATA[::-1]
    again.close()


def test_a_truncated_or_deleted_file_counts_as_missing(store: BlobStore) -> None:
    one, two = store.put_bytes("job", DATA), store.put_bytes("job", DATA[::-1])
    path = store.path("job", one.sha256)
    path.chmod(0o644)
    os.truncate(path, 10)
    store.path("job", two.sha256).unlink()
    assert not store.confirm("job", one)
    assert not store.confirm("job", two)
    assert store.counters().stored == 0
    assert files(store.folder) == []


def _becomes_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _becomes_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage_file", [_becomes_a_loop, _becomes_a_folder])
def test_a_blob_that_the_disk_cannot_read_counts_as_missing(
    store: BlobStore, tmp_path: Path, damage_file: Callable[[Path], None]
) -> None:
    """Otherwise a rank would ask for it without end, and no controller would issue its group again."""
    blob = store.put_bytes("job", DATA)
    damage_file(store.path("job", blob.sha256))
    assert store.link_to("job", [blob.sha256], tmp_path) == [blob.sha256]
    assert not store.confirm("job", blob)
    assert (store.counters().stored, store.counters().blobs_damaged) == (0, 1)


def test_a_blob_stays_if_an_error_is_not_about_its_file(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = store.put_bytes("job", DATA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with pytest.raises(StoreFailed, match="Too many open files"):
            store.open("job", blob.sha256)
    assert store.confirm("job", blob)


def test_bytes_that_are_stored_again_replace_a_damaged_file_and_begin_a_grace_time(
    store: BlobStore, clock: FakeClock
) -> None:
    """A controller stores a picture again when its blob is lost, and pins it after that."""
    blob = store.put_bytes("job", DATA)
    path = store.path("job", blob.sha256)
    path.chmod(0o644)
    os.truncate(path, 10)
    assert store.put_bytes("job", DATA) == blob
    assert path.read_bytes() == DATA
    clock.jump(1000.0)
    store.put_bytes("job", DATA)
    assert store.counters().held == len(DATA)


def test_a_request_with_another_size_than_the_stored_blob_is_refused(store: BlobStore) -> None:
    blob = store.put_bytes("job", DATA)
    assert store.confirm("job", blob)
    with pytest.raises(BlobMismatch, match="has 7000 bytes, but the request says 1"):
        store.confirm("job", Blob(blob.sha256, 1))


def test_a_restarted_store_keeps_every_file_for_one_grace_time(store: BlobStore, clock: FakeClock) -> None:
    first = store.put_bytes("job", DATA)
    store.put_bytes("job", DATA[::-1])
    store.pin("i", "job", [first.sha256], 1e6)
    clock.jump(1000.0)
    again = restarted(store, clock)
    with pytest.raises(StoreFull):
        again.put_bytes("job", b"x" * 7000)
    clock.jump(60.0)
    again.put_bytes("job", b"x" * 7000)
    assert again.counters().blobs == 2
    again.close()


def test_a_store_that_was_restarted_with_a_lower_bound_shrinks_when_room_is_needed(
    store: BlobStore, clock: FakeClock
) -> None:
    store.put_bytes("job", DATA)
    store.put_bytes("job", DATA[::-1])
    again = restarted(store, clock, bound=8000)
    with pytest.raises(StoreFull):
        again.put_bytes("job", b"x")
    clock.jump(61.0)
    again.put_bytes("job", b"x")
    assert again.counters().stored == 7001
    again.close()


def test_blobs_are_linked_into_a_folder_and_missing_ones_are_reported(store: BlobStore, tmp_path: Path) -> None:
    blob = store.put_bytes("job", DATA)
    world = tmp_path / "world"
    world.mkdir()
    (world / blob.sha256).write_bytes(b"left by an earlier world")
    for _ in range(2):
        assert store.link_to("job", [blob.sha256, "0" * 64], world) == ["0" * 64]
    assert (world / blob.sha256).samefile(store.path("job", blob.sha256))
    assert not (world / blob.sha256).is_symlink()
    assert os.listdir(world) == [blob.sha256]
    store.drop_job("job")
    assert (world / blob.sha256).read_bytes() == DATA


def test_blobs_are_copied_to_another_file_system(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = store.put_bytes("job", DATA)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert store.link_to("job", [blob.sha256], tmp_path) == []
    copy = tmp_path / blob.sha256
    assert copy.read_bytes() == DATA
    assert not copy.samefile(store.path("job", blob.sha256))
    assert stat.S_IMODE(copy.stat().st_mode) == 0o444


def test_a_damaged_blob_is_not_linked(store: BlobStore, clock: FakeClock, tmp_path: Path) -> None:
    blob = store.put_bytes("job", DATA)
    damage(store.path("job", blob.sha256))
    again = restarted(store, clock)
    assert again.link_to("job", [blob.sha256], tmp_path) == [blob.sha256]
    assert not (tmp_path / blob.sha256).exists()
    again.close()


def test_a_blob_that_was_damaged_after_its_first_use_is_not_linked(store: BlobStore, tmp_path: Path) -> None:
    blob = store.put_bytes("job", DATA)
    path = store.path("job", blob.sha256)
    path.chmod(0o644)
    path.write_bytes(DATA[::-1])
    assert store.link_to("job", [blob.sha256], tmp_path) == [blob.sha256]
    assert store.counters().blobs_damaged == 1
    assert not path.exists()


def test_a_link_into_a_missing_folder_is_an_error_of_the_disk(store: BlobStore, tmp_path: Path) -> None:
    blob = store.put_bytes("job", DATA)
    with pytest.raises(StoreFailed, match=r"cannot link a blob into .*absent"):
        store.link_to("job", [blob.sha256], tmp_path / "absent")
    assert store.has("job", blob.sha256)


def test_a_dropped_job_leaves_no_file_and_others_stay(store: BlobStore) -> None:
    store.put_bytes("one", DATA)
    kept = store.put_bytes("two", DATA)
    incoming = store.begin("one", blob_of(DATA[:100]))
    incoming.write(DATA[:100])
    store.drop_job("one")
    store.drop_job("unknown")
    with pytest.raises(BlobMissing, match="job one was dropped while blob"):
        incoming.commit()
    incoming.close()
    assert files(store.folder) == [f"two/{kept.sha256[:2]}/{kept.sha256}"]
    assert store.counters().stored == len(DATA)


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.ENOSPC, StoreDiskFull, "No space left on device.*Free space on the disk"),
        (errno.EIO, StoreFailed, "Input/output error.*Check the disk"),
    ],
)
def test_an_error_of_the_disk_is_explained_and_leaves_no_incomplete_file(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreFailed], message: str
) -> None:
    class Broken(blobs_module.IncomingBlob):
        def write(self, piece: bytes | memoryview) -> None:
            super().write(piece[:100])
            with self._open():
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(blobs_module, "IncomingBlob", Broken)
    with pytest.raises(kind, match=message):
        store.put_bytes("job", DATA)
    assert files(store.folder) == []
    assert store.counters().incoming == 0


class SmallDisk:
    """Opens files for writing, on a disk with room for so many bytes below a folder."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder = folder
        self.room = room
        self._fdopen = os.fdopen

    def open(self, handle: int, mode: str, **options: Any) -> Any:
        file, disk = self._fdopen(handle, mode, **options), self

        class File:
            closed = property(lambda self: file.closed)
            close = file.close

            def write(self, data: memoryview) -> int:
                left = disk.room - sum((disk.folder / one).stat().st_size for one in files(disk.folder))
                if left <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return int(file.write(data[:left]))

        return File() if "w" in mode else file


def test_a_full_disk_gets_the_room_of_blobs_that_are_not_held(
    store: BlobStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full long before the store reaches its bound; the job would never go on."""
    first, second, third = (DATA[:size] for size in (5000, 5001, 5002))
    disk = SmallDisk(store.folder, 10_100)
    oldest, newer = store.put_bytes("job", first), store.put_bytes("job", second)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", disk.open)
        with pytest.raises(StoreDiskFull):
            store.put_bytes("job", third)  # the others are in their grace time
        assert files(store.folder) == sorted(f"job/{one.sha256[:2]}/{one.sha256}" for one in (oldest, newer))
        clock.jump(61.0)
        newest = store.put_bytes("job", third)
    assert (store.has("job", oldest.sha256), store.has("job", newer.sha256)) == (False, True)
    assert store.path("job", newest.sha256).read_bytes() == third
    assert store.counters().blobs_deleted == 1


def test_a_store_without_its_folder_refuses_blobs_and_does_not_create_it_again(store: BlobStore) -> None:
    blob = store.put_bytes("job", DATA)
    store.folder.rename(store.folder.with_name("elsewhere"))
    with pytest.raises(StoreFailed, match="No such file or directory"):
        store.put_bytes("job", DATA[::-1])
    assert not store.confirm("job", blob)
    assert not store.folder.exists()


def test_a_transfer_that_was_closed_takes_no_more_bytes(store: BlobStore) -> None:
    incoming = store.begin("job", blob_of(DATA))
    incoming.close()
    with pytest.raises(StoreFailed, match="was ended"):
        incoming.write(DATA)
    assert store.counters().incoming == 0


def test_two_processes_do_not_share_a_folder(store: BlobStore, clock: FakeClock) -> None:
    with pytest.raises(UsageError, match="another process uses this blob store"):
        BlobStore(store.folder, 100, clock)


@pytest.mark.parametrize("job", ["", "..", ".incoming", "a/b", "a" * 129])
def test_names_that_are_no_jobs_are_refused(store: BlobStore, job: str) -> None:
    with pytest.raises(BlobRequestRefused, match="is not a job UID"):
        store.begin(job, blob_of(DATA))
    with pytest.raises(BlobRequestRefused, match="is not a SHA-256"):
        store.open("job", "../" + "0" * 61)


def test_foreign_files_in_the_folder_are_ignored(store: BlobStore, clock: FakeClock) -> None:
    (store.folder / "job" / "ab").mkdir(parents=True)
    (store.folder / "job" / "ab" / "notes.txt").write_text("not a blob")
    (store.folder / "job" / "ab" / ("cd" * 32)).write_text("in the wrong subfolder")
    (store.folder / "job" / "ab" / ("ab" * 32)).symlink_to("/etc/hostname")
    again = restarted(store, clock)
    assert again.counters().blobs == 0
    again.close()
