"""What a rank trained on, on paper: one JSON line a token, on the disk before anybody hears that the token is applied.

The audit compares receipts with the log. A line that has no end was being written when its rank died; nothing was
reported then. Receipts of a world that was rolled back stay; they name their world.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from gcore.atomic import sync
from gcore.ledger.balance import SampleSlot
from gcore.schema import SCHEMA_VERSION
from gcore.train.feed_state import Work
from gcore.train.run_folder import RunFolder
from gcore.weights.layout import receipts_file


@dataclass(frozen=True, slots=True)
class ReceiptBook:
    """Where one rank of a world writes."""

    run_dir: Path
    world: str
    rank: int
    folder: RunFolder | None = None
    """Looked at before each write, if it is known."""

    @property
    def file(self) -> Path:
        """The file of this rank."""
        return receipts_file(self.run_dir, self.world, self.rank)

    def write(self, work: Work, loss: float | None) -> None:
        """Append the receipt of a step that was trained on, and wait until it is on the disk. Raises OSError; then nothing of
        it is there, and it may be written again."""
        if self.folder is not None:
            self.folder.check()
        path = self.file
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(self._fields(work, loss), separators=(",", ":"), allow_nan=False) + "\n"
        with path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                _write_all(file, line.encode())
                os.fsync(file.fileno())
                if is_new:  # its name, too
                    sync(path.parent)
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise

    def _fields(self, work: Work, loss: float | None) -> dict[str, object]:
        by_group: dict[int, list[int]] = {}
        slot: SampleSlot
        for slot in work.layout.of_rank(work.rank):
            by_group.setdefault(slot.group, []).append(slot.sample)
        groups = [(work.seal.groups[number], samples) for number, samples in sorted(by_group.items())]
        return {
            "schema_version": SCHEMA_VERSION,
            "token": str(work.seal.token),
            "world": self.world,
            "rank": self.rank,
            "groups": [[str(group.ref), group.digest, samples] for group, samples in groups],
            "loss": loss,
        }


def _write_all(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:  # a disk that fills up takes a part, and says so at the next
        left = left[file.write(left) :]
