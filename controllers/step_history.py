"""The newest steps of a job as whoever plans is shown them: each controller keeps them as they are committed, so that any can plan.

A step's seal, which has its lengths, is deleted with its commit; its books come a little later. What a controller did not see (it has
just begun) it takes from the log, which knows means only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from gcore.ledger.books import of_version
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import LogEntry, Seal
from gcore.types import Version
from placement.measured import Measured
from placement.measuring import measured
from placement.moves import base_split
from placement.split import Split

MOST_STEPS = 64


@dataclass
class _Seen:
    """A committed step. `booked`: nodes whose books are in what was measured."""

    entry: LogEntry
    seal: Seal | None
    split: Split
    booked: int = -1
    measured: Measured | None = None


class StepHistory:
    """Of one job, on one controller. Mutable."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Version, _Seen] = OrderedDict()

    def note(self, before: JobMirror, after: JobMirror) -> None:
        """A change of the job's records."""
        if after.head is None or after.plan is None or (before.head is not None and before.head == after.head):
            return
        entry = after.log.get(after.head.record.seq)
        if entry is None or entry.record.kind != "train":
            return
        slot = before.seals.get(entry.record.step)
        plan = (before.plan or after.plan).record
        version = Version(entry.record.lineage, entry.record.step)
        self._add(version, _Seen(entry.record, slot.record if slot is not None else None, base_split(plan)))

    def steps(self, mirror: JobMirror) -> tuple[Measured, ...]:
        """The steps on head's chain, oldest first, with what the books say by now."""
        assert mirror.head is not None
        assert mirror.plan is not None
        if not self._seen:
            split = base_split(mirror.plan.record)
            for _, stored in sorted(mirror.log.items()):
                if stored.record.kind == "train":
                    entry = stored.record
                    self._add(Version(entry.lineage, entry.step), _Seen(entry, None, split))
        books = {node: stored.record for node, stored in mirror.books.items()}
        newest: dict[int, Measured] = {}
        for version, seen in self._seen.items():
            there = of_version(books, version)
            if seen.measured is None or len(there) > seen.booked:
                seen.measured = measured(there.values(), seen.entry, seen.seal, seen.split)
                seen.booked = len(there)
            if version.step <= mirror.head.record.step:
                newest[version.step] = seen.measured  # a step that was cut off has a later one of its number
        return tuple(newest[step] for step in sorted(newest))

    def start_s(self) -> float | None:
        """Seconds of the newest start of a rank that a step told."""
        told = (seen.entry.stats.get("start_seconds") for seen in reversed(self._seen.values()))
        return next((seconds for seconds in told if seconds is not None), None)

    def seconds(self) -> dict[int, float]:
        """Of each step."""
        return {
            version.step: seen.entry.stats["seconds"]
            for version, seen in self._seen.items()
            if "seconds" in seen.entry.stats
        }

    def _add(self, version: Version, seen: _Seen) -> None:
        self._seen[version] = seen
        while len(self._seen) > MOST_STEPS:
            self._seen.popitem(last=False)
