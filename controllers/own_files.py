"""This node's own folders of runs, of jobs whose nodes share none: what is known of each beside what lies in it, and how its files
that only grow are continued by what peers have. A daemon without a job has this already, so it imports little.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from controllers.peer_files import PeerFiles
from gcore.errors import GcoreError
from gcore.ledger import archive, books_file, receipts
from gcore.samples import folder as samples
from gcore.tls.connecting import PLAIN, Connector
from gcore.types import Version

RECORDS = (archive.FOLDER, archive.EVALUATIONS, receipts.FOLDER)
"""The folders whose files only grow."""


@dataclass
class OwnFolder:
    """One job's, on one node, as long as the daemon lives."""

    files: PeerFiles
    brought: set[str] = field(default_factory=set)
    """Train worlds whose starting checkpoint was read here to its last byte."""
    damaged: set[tuple[Version, str]] = field(default_factory=set)
    """Checkpoints that lie here by name and are not what they were."""
    failing: dict[str, float] = field(default_factory=dict)
    """What has not been done since when, by the action's name."""


class OwnFolders:
    """All of a node's, by job: who writes there and who reads for people go through the same one."""

    def __init__(self, connector: Connector = PLAIN) -> None:
        self._connector = connector
        self._known: dict[str, OwnFolder] = {}

    @property
    def connector(self) -> Connector:
        """What other nodes are reached with."""
        return self._connector

    def of(self, uid: str, run_dir: Path) -> OwnFolder:
        """A job's, made at the first call."""
        if uid not in self._known:
            self._known[uid] = OwnFolder(PeerFiles(uid, run_dir, owner=uuid.uuid4().hex[:8], connector=self._connector))
        return self._known[uid]


async def collect_samples(own: OwnFolder, peers: Mapping[str, str]) -> None:
    """Before samples are read: what other nodes have kept, as far as they give it. A file of them is written once."""
    await grown(own, peers, (samples.FOLDER,))


async def collect_books(own: OwnFolder, peers: Mapping[str, str]) -> None:
    """Before books are read: what other nodes have booked, as far as they give it."""
    await grown(own, peers, (books_file.FOLDER,))


async def collect_records(own: OwnFolder, peers: Mapping[str, str]) -> None:
    """Before a run's records are read as a whole: what peers have more of them, as far as they give it."""
    await grown(own, peers, RECORDS)


async def grown(own: OwnFolder, peers: Mapping[str, str], names: Iterable[str]) -> tuple[str, ...]:
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
