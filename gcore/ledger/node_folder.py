"""What lies in one node's own folder of a run, of a job whose nodes share none (`storage.copies`).

A node says so under its controller's lease, after it has looked, or after what it fetched was proved whole. So whatever counts
copies counts those of nodes that are there; and when all was killed, each that comes back looks again, and no record has to
outlive it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import NonNegativeInt

from gcore.schema import Part, Record
from gcore.types import Version


class HeldCheckpoint(Part):
    """A checkpoint, and the digest of its manifest, which names its every file."""

    lineage: NonNegativeInt
    step: NonNegativeInt
    digest: str

    @property
    def version(self) -> Version:
        """The policy version that it was made at."""
        return Version(self.lineage, self.step)


class NodeFolder(Record):
    """`folder/{node}`. What it says of the log and of evaluations is of those alone that are next to leave the store."""

    came_with: ClassVar[Mapping[str, int]] = {"entry": 2}
    node: str
    by: str
    """The incarnation that looked."""
    lineage: NonNegativeInt = 0
    """Head's, before it looked."""
    checkpoints: tuple[HeldCheckpoint, ...] = ()
    receipts: str = ""
    """The newest token of which every rank's receipt lies here."""
    log: tuple[NonNegativeInt, ...] = ()
    """Entries that were written down here."""
    evaluations: tuple[str, ...] = ()
    """Versions whose evaluations were."""
    entry: NonNegativeInt = 0
    """The highest number of the log of which anything lay here when that incarnation first looked: higher than head's, if the store
    was put back (`gcore.ledger.remains`)."""

    def has(self, version: Version, digest: str) -> bool:
        """Whether that checkpoint lies here."""
        return any(one.version == version and one.digest == digest for one in self.checkpoints)
