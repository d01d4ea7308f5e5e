"""What a rank trained on, on paper: one JSON line a token, on the disk before anybody hears that the token is applied.

The audit compares receipts with the log. A line that has no end was being written when its rank died; nothing was
reported then. Receipts of a world that was rolled back stay; they name their world.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from gcore.ledger.balance import SampleSlot
from gcore.schema import SCHEMA_VERSION
from gcore.train.feed_state import Work
from gcore.weights.layout import receipts_file


@dataclass(frozen=True, slots=True)
class ReceiptBook:
    """Where one rank of a world writes."""

    run_dir: Path
    world: str
    rank: int

    def write(self, work: Work, loss: float | None) -> None:
        """Append the receipt of a step that was trained on, and wait until it is on the disk. Raises OSError."""
        path = receipts_file(self.run_dir, self.world, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(self._fields(work, loss), separators=(",", ":"), allow_nan=False) + "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

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
