"""The blob stores of a simulated cluster, and the tools whose pictures they keep.

A store has production's accounts (`gcore.media.accounts`): pins, reservations, grace times and a bound. Files and requests are
simulated: a store does not answer while its node's daemon is dead, while it restarts itself, or across a cut. Responses of several
turns are production's episodes; only their environment is simulated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulated_network import Network

from gcore.media.accounts import BlobAccounts, BlobKey
from gcore.media.client import BlobFetch
from gcore.media.protocol import TRANSFERS, Blob, StoreFull, StoreUnreachable
from gcore.rollout.environments.api import PICTURE, Done, Observation, Setting, Turn
from gcore.types import Medium, PictureRef

SIZE = 60_000
"""Bytes of every picture: below what is reserved for one of a tool with `SIDE` pixels."""
SIDE = 16
"""Height and width of every picture, in pixels."""
GRACE_S = 10.0
"""Seconds for which a store keeps a blob without a pin: few, so that missing pins matter."""


class NodeStore:
    """The store of one node. `bound`: in bytes."""

    def __init__(self, bound: int, now: Callable[[], float], job: str) -> None:
        self.down = False
        """Whether its process restarts."""
        self._bound = bound
        self._now = now
        self._job = job
        self._accounts = BlobAccounts(bound, GRACE_S)

    @property
    def names(self) -> list[str]:
        """The blobs that it has."""
        return sorted(key.sha256 for key in self._accounts.keys_of(self._job))

    def has(self, sha256: str, *, confirm: bool = False) -> bool:
        """Whether it has a blob, which counts as a use. `confirm`: its grace time begins again."""
        key = BlobKey(self._job, sha256)
        found = self._accounts.find(key) is not None
        if found:
            self._accounts.use(key, self._now(), confirm=confirm)
        return found

    def take(self, sha256: str, holder: str = "", size: int = SIZE) -> None:
        """Store a blob of `size` bytes. Raises StoreFull."""
        if not self.has(sha256, confirm=True):
            admission, _ = self._accounts.admit(BlobKey(self._job, sha256), size, holder, self._now())
            self._accounts.store(admission, self._now())

    def size_of(self, sha256: str) -> int:
        """The bytes of a blob that it has."""
        found = self._accounts.find(BlobKey(self._job, sha256))
        assert found is not None
        return found.size

    def lose(self, names: Collection[str]) -> None:
        """The disk loses blobs."""
        for name in names:
            self._accounts.remove(BlobKey(self._job, name), self._now())

    def restart(self) -> None:
        """A new process has the same files, and neither pins nor reservations."""
        sizes = {name: self.size_of(name) for name in self.names}
        self._accounts = BlobAccounts(self._bound, GRACE_S)
        for name, size in sizes.items():
            self._accounts.add(BlobKey(self._job, name), size, self._now(), verified=False)

    def pin(self, incarnation: str, blobs: Collection[str], ttl_s: float) -> None:
        """As a request of that incarnation."""
        self._accounts.pin(incarnation, self._job, blobs, self._now() + ttl_s, self._now())

    def unpin(self, incarnation: str, blobs: Collection[str], *, ends_grace: bool) -> None:
        """As a request of that incarnation."""
        self._accounts.unpin(incarnation, self._job, blobs, self._now(), ends_grace=ends_grace)

    def reserve(self, holder: str, size: int, ttl_s: float) -> bool:
        """Whether there is room."""
        return self._accounts.reserve(self._job, holder, size, self._now() + ttl_s, self._now())

    def forget(self) -> None:
        """The job has ended."""
        self._accounts.drop_job(self._job, self._now())


@dataclass
class Stores:
    """The stores of all nodes, by name."""

    network: Network
    chance: random.Random
    bound: int
    job: str
    alive: Callable[[str], bool]
    """Whether a node's daemon is alive; a store ends with it."""
    nodes: dict[str, NodeStore] = field(default_factory=dict)

    def of(self, node: str) -> NodeStore:
        """The store of a node."""
        if node not in self.nodes:
            self.nodes[node] = NodeStore(self.bound, lambda: self.network.loop.time(), self.job)
        return self.nodes[node]

    def restart(self, node: str) -> None:
        """The store of a node starts again, with its daemon or by itself."""
        if node in self.nodes:
            self.nodes[node].down = False
            self.nodes[node].restart()

    def reaches(self, source: str, target: str) -> bool:
        """Whether a store answers requests of a node."""
        cut = {(source, target), (target, source)} & self.network.cut
        return self.alive(target) and not self.of(target).down and not cut

    def transfer(self, sha256: str, nodes: Collection[str], target: str, holder: str = TRANSFERS) -> bool | None:
        """Have the store of `target` fetch a blob from those of `nodes`: whether it has it now; None: some do not answer.

        Raises StoreFull.
        """
        store, others = self.of(target), [node for node in sorted(nodes) if node != target]
        if store.has(sha256, confirm=True):
            return True
        reached = [node for node in others if self.reaches(target, node)]
        source = next((node for node in reached if self.of(node).has(sha256)), None)
        if source is not None:
            store.take(sha256, holder, self.of(source).size_of(sha256))
            return True
        return False if len(reached) == len(others) else None


class SimulatedStores:
    """The blob stores of all nodes, as the controller of `me` reaches that of `node` (`controllers.workers.blobs.NodeBlobs`)."""

    trouble = ""
    """Stores have their problems here without sentences about them."""

    def __init__(self, me: str, node: str, stores: Stores) -> None:
        self._me = me
        self._node = node
        self._stores = stores

    def need(self) -> None:
        """They always run."""

    @property
    def node(self) -> str:
        """The name of the node."""
        return self._node

    async def client(self, job: str, address: str = "") -> SimulatedStores:
        return self

    def nodes_with_stores(self) -> list[str]:
        """The nodes that have a store."""
        return sorted(self._stores.nodes)

    async def client_of(self, job: str, node: str) -> SimulatedStores:
        return SimulatedStores(self._me, node, self._stores)

    async def _request(self) -> NodeStore:
        """A request on its way. Raises StoreUnreachable."""
        await asyncio.sleep(0.05 * self._stores.chance.random())
        if not self._stores.reaches(self._me, self._node):
            raise StoreUnreachable(f"the store of {self._node} does not answer {self._me}")
        return self._stores.of(self._node)

    async def fetch(self, blobs: Sequence[Blob], nodes: Sequence[str], *, holder: str = TRANSFERS) -> BlobFetch:
        """Copy blobs from the stores of nodes that have them."""
        await self._request()
        failed: dict[str, str] = {}
        found: dict[str, bool] = {}
        for name in sorted({blob.sha256 for blob in blobs}):
            try:
                there = self._stores.transfer(name, nodes, self._node, holder)
            except StoreFull as error:
                failed[name] = str(error)
                continue
            if there is None:
                failed[name] = "a store does not answer"
            else:
                found[name] = there
        available = frozenset(name for name, there in found.items() if there)
        return BlobFetch(available, frozenset(found) - available, failed, str(self.job_folder("")))

    async def make_picture(self, picture: PictureRef, incarnation: str, ttl_s: float) -> Medium:
        """Make a blob, which differs each time. Raises StoreFull, StoreUnreachable."""
        store = await self._request()
        medium = Medium("picture", f"{self._stores.chance.getrandbits(256):064x}", SIZE, (SIDE, SIDE, 3), "uint8")
        store.take(medium.sha256, incarnation)
        store.pin(incarnation, [medium.sha256], ttl_s)
        return medium

    async def pin(self, incarnation: str, blobs: Collection[str], ttl_s: float) -> None:
        (await self._request()).pin(incarnation, blobs, ttl_s)

    async def unpin(self, incarnation: str, blobs: Collection[str], *, ends_grace: bool = False) -> None:
        (await self._request()).unpin(incarnation, blobs, ends_grace=ends_grace)

    async def reserve(self, holder: str, size: int, ttl_s: float) -> bool:
        return (await self._request()).reserve(holder, size, ttl_s)

    async def forget(self, job: str) -> None:
        self._stores.of(self._node).forget()

    def job_folder(self, job: str) -> Path:
        """A folder that does not exist: nothing is recorded here."""
        return Path("/simulated/blobs") / job

    async def find_lost(self, job: str, media: Sequence[Medium]) -> str | None:
        """A blob that is not among the files of this node; None if all are."""
        names = self._stores.of(self._node).names
        return next((one.sha256 for one in media if one.sha256 not in names), None)

    async def wait_for_secret(self) -> None:
        """It is known."""

    async def sweep_worlds(self, job: str, worlds: Callable[[], Collection[str]]) -> None:
        """Blobs of train worlds are in the ranks' own state."""

    async def locate(self, job: str, blobs: Collection[str]) -> Mapping[str, Collection[str]]:
        """The nodes that answer and have a blob."""
        await asyncio.sleep(0.2 * self._stores.chance.random())
        reached = [node for node in sorted(self._stores.nodes) if self._stores.reaches(self._me, node)]
        return {blob: [node for node in reached if self._stores.of(node).has(blob)] for blob in blobs}


def picture_of(name: str) -> PictureRef:
    """A picture whose file does not exist."""
    return PictureRef(f"/{name}.png", "0" * 64, SIDE, SIDE, SIDE, SIDE, SIZE)


class Showing:
    """An environment that shows pictures, as its tools would return them: how many, the response's seed says."""

    def __init__(self, setting: Setting) -> None:
        self._chance = random.Random(setting.seed)
        self._left = self._chance.randint(0, int(setting.options["pictures"]))

    async def reset(self) -> Observation:
        return Observation()

    async def step(self, turn: Turn) -> Observation | Done:
        if not self._left:
            return Done()
        self._left -= 1
        return Observation(PICTURE, pictures=(picture_of(f"{self._chance.getrandbits(63):x}"),))

    async def close(self) -> None:
        """Nothing is open."""


class NoTools:
    """The tools of that environment: it has none."""

    waits = None
    """Called while a response waits for a process; there is none."""

    def within(self, *_: Any) -> NoTools:
        return self

    def discard_pictures(self) -> None:
        """There are no files."""

    async def close(self) -> None:
        """Nothing runs."""
