"""File transfer between the run folders of simulated nodes that share none: `controllers.storage.peer_files` without its calls.

A peer serves its files if its daemon runs and no partition separates the two nodes. Receipts belong to the simulated storage,
so for them only availability counts.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from simulated_network import Network
from simulated_workers import Floor

from controllers.storage.peer_files import FetchFailed, FileMissing, PeerFiles

SILENT_S = 5.0


class SimulatedFiles(PeerFiles):
    """One node's, of the job. `serves`: whether a node's daemon runs. An address is a node's name."""

    def __init__(self, floor: Floor, node: str, serves: Callable[[str], bool], owner: str) -> None:
        super().__init__("job", floor.folder(node), owner, SILENT_S)
        self._floor = floor
        self._network: Network = floor.network
        self._node = node
        self._serves = serves

    async def folder(
        self, address: str, folder: str, prove: Callable[[Path], object] = lambda _: None, *, durable: bool
    ) -> Path:
        await self._reach(address)
        source, target = self._floor.folder(address) / folder, self.run_dir / folder
        if not source.is_dir():
            raise FileMissing(f"{folder} is not at {address}")
        with self.new_draft(target, durable=False) as draft:
            shutil.copytree(source, draft, dirs_exist_ok=True)
            prove(draft)
            await self._reach(address)  # it may die in the midst
        self._floor.restage()
        self._floor.tell(f"{self._node} has {folder} from {address}")
        return target

    async def grown(self, address: str, folder: str) -> int:
        await self._reach(address)
        total = 0
        for theirs in sorted((self._floor.folder(address) / folder).glob("*.jsonl")):
            mine = self.run_dir / folder / theirs.name
            have = mine.stat().st_size if mine.exists() else 0
            more = theirs.read_bytes()[have:]
            mine.parent.mkdir(parents=True, exist_ok=True)
            with mine.open("ab") as file:
                file.write(more)
            total += len(more)
        return total

    async def _reach(self, peer: str) -> None:
        """A call to a peer. Raises FetchFailed."""
        await asyncio.sleep(self._floor.chance.expovariate(10.0))
        cut = self._network.cut
        if not self._serves(peer) or (self._node, peer) in cut or (peer, self._node) in cut:
            await asyncio.sleep(self._floor.chance.choice([0.0, SILENT_S]))
            raise FetchFailed(f"{peer} does not answer")
