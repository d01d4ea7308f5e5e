"""A job's records in its run's folder, word for word as the store had them when the job had ended.

With the archived log and the ranks' receipts they are all that an audit needs, so a run can be audited when its cluster is gone.
Whoever notices the end first leaves the copy; several may, each in a file of its own, and the newest counts: that of the highest
lineage, for a job whose store was put back to before its end comes to another one, in a later lineage and at lower revisions. A copy
is whole or not there. Nothing here decides when a job has ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from gcore.atomic import whole_file
from gcore.ledger.chain import Seen
from gcore.ledger.job import JobRecord
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import Head
from gcore.schema import Record, UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, Listing, WatchBatch, WatchEvent

FOLDER = "ended"


class StoreCopy(Record):
    """`ended/{writer}.json`: every key of the job (without its prefix) and its value, of one revision."""

    called: ClassVar[str] = "copy of a job's records"
    uid: str
    revision: int
    records: dict[str, str]

    @property
    def job(self) -> JobRecord:
        """Which job it is of. Raises UnreadableRecord."""
        return JobRecord.decode(self.records.get("job", "").encode(), JobKeys(self.uid).job)

    @property
    def head(self) -> Seen:
        """Head's lineage and number; zeros if it has none, or none that can be read."""
        try:
            head = Head.decode(self.records.get("head", "").encode())
        except UnreadableRecord:
            return Seen()
        return Seen(lineage=head.lineage, entry=head.seq)

    @property
    def batch(self) -> WatchBatch:
        """The records as if just heard."""
        prefix = JobKeys(self.uid).prefix
        kvs = (
            KeyValue(prefix + key, value.encode(), self.revision, self.revision) for key, value in self.records.items()
        )
        return WatchBatch(tuple(WatchEvent("put", kv) for kv in kvs), self.revision, reset=True)


def leave(run_dir: Path, writer: str, uid: str, listing: Listing) -> None:
    """Write a copy of all the keys of a job that has ended. Of one that was deleted meanwhile there is nothing to keep, and its folder
    is not made again. Raises OSError."""
    prefix = JobKeys(uid).prefix
    if not any(kv.key == JobKeys(uid).job for kv in listing.kvs):
        return
    records = {kv.key.removeprefix(prefix): kv.value.decode(errors="replace") for kv in listing.kvs}
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    whole_file(folder / f"{writer}.json", StoreCopy(uid=uid, revision=listing.revision, records=records).encode())


def is_left(run_dir: Path, head: Head | None) -> bool:
    """Whether there is a copy of this end: one that cannot be read counts, one of an end that was cut off does not. Raises OSError."""
    try:
        copy = read(run_dir)
    except UnreadableRecord:
        return True
    return copy is not None and (head is None or copy.head.lineage >= head.lineage)


def newest_head(run_dir: Path) -> Seen:
    """That of the newest copy; zeros without one. Raises OSError."""
    try:
        copy = read(run_dir)
    except UnreadableRecord:
        return Seen()
    return Seen() if copy is None else copy.head


def read(run_dir: Path) -> StoreCopy | None:
    """The newest copy; None if there is none. Raises UnreadableRecord if none of those there are can be read, OSError."""
    newest: StoreCopy | None = None
    problem: UnreadableRecord | None = None
    for file in sorted((run_dir / FOLDER).glob("*.json")):
        try:
            copy = StoreCopy.decode(file.read_bytes(), str(file))
        except UnreadableRecord as error:
            problem = error
            continue
        if newest is None or (copy.head.lineage, copy.revision) > (newest.head.lineage, newest.revision):
            newest = copy
    if newest is None and problem is not None:
        raise problem
    return newest


def mirror_of(uid: str, batch: WatchBatch) -> JobMirror:
    """A job as it stands by a batch of all its records. Raises UnreadableRecord."""
    return JobMirror(JobKeys(uid)).fold(batch)
