"""Copies of a train world's state in the memory of its nodes: what they are called, what each says of itself, which lie there.

After each step every rank leaves its shard of the state (float32 weights and Adam's moments, of policy and critic) in the
memory of its own node, and in that of a neighbour on another node. A node's memory is a folder of its own in a file system
that is memory (`/dev/shm`): so a copy outlives the rank, its supervisor and the controller, whichever is killed, needs no
process that keeps it alive, and goes with the node.

    {memory_dir}/gcore-{user}/{installation}/{node}/{job uid}/{world}-{lineage}-{step}-{attempt}.{shard}.data
                                                              ... .json, written last: without it there is no copy

What a copy is of is told by the world and the token after which it was made: a world applies a token once, and only from
its READY seal, so all that carry the same world and token are parts of the same state (docs/develop/adr, "Copies of neighbours").

Writes and reads no tensors (`gcore.train.checkpoint.replicas`, `gcore.train.checkpoint.replicas`), and decides nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import NonNegativeInt

from gcore.ledger.records.chain import WorldState
from gcore.schema import Record, RecordPart, UnreadableRecord

KINDS = ("master", "exp_avg", "exp_avg_sq")
"""What is copied of each parameter, in the order in which it stands in the data: float32, little-endian."""

BYTES = 4
HOME_FILE = "home"

MEMORY = Path("/dev/shm")
"""Where Linux has a file system in memory; `NodeConfig.memory_dir` may name another."""


class Extent(RecordPart):
    """A piece of a parameter: `numel` elements from `start` on, of the flattened whole."""

    name: str
    start: NonNegativeInt
    numel: NonNegativeInt


class CopyHeader(Record):
    """`*.json`: one rank's shard of a state. The data hold, model by model, kind by kind, the extents one after another."""

    job_uid: str
    of: WorldState
    shard: NonNegativeInt
    """The rank whose it was, of `of.shards`."""
    updates: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    critic_updates: NonNegativeInt = 0
    critic_skipped: NonNegativeInt = 0
    extents: dict[str, tuple[Extent, ...]]
    """By model, `policy` and `critic`."""
    size: NonNegativeInt
    """Of the data, in bytes."""
    sha256: str
    """Of the data, 64 hex digits."""

    def places(self) -> Iterator[tuple[str, str, Extent, int]]:
        """Model, kind, extent, and where in the data it begins, in bytes."""
        offset = 0
        for model, extents in self.extents.items():
            for kind in KINDS:
                for extent in extents:
                    yield model, kind, extent, offset
                    offset += extent.numel * BYTES


def shard_bytes(extents: Iterable[Extent]) -> int:
    """What these extents of one model take in the data."""
    return len(KINDS) * BYTES * sum(extent.numel for extent in extents)


def memory_folder(root: Path, home: str, node: str, job_uid: str) -> Path:
    """Where the copies of a job lie on a node. `root`: of the file system that is memory; `home`: of the installation."""
    return home_folder(root, home) / node / job_uid


def home_folder(root: Path, home: str) -> Path:
    """Where all copies of an installation lie on a machine."""
    named = hashlib.blake2b(str(Path(home).absolute()).encode(), digest_size=8).hexdigest()
    return root / f"gcore-{os.getuid()}" / named


def data_file(folder: Path, of: WorldState, shard: int) -> Path:
    """The data of one shard of a state."""
    return folder / f"{of.world}-{of.lineage}-{of.step}-{of.attempt}.{shard}.data"


def header_file(folder: Path, of: WorldState, shard: int) -> Path:
    """Its header."""
    return data_file(folder, of, shard).with_suffix(".json")


def list_copies(folder: Path, job_uid: str) -> tuple[CopyHeader, ...]:
    """The copies in a node's folder that are there whole, as far as their headers and sizes tell. Sorted."""
    found = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        with contextlib.suppress(OSError, UnreadableRecord):
            header = CopyHeader.decode(path.read_bytes(), str(path))
            named = header_file(folder, header.of, header.shard) == path and header.job_uid == job_uid
            if named and data_file(folder, header.of, header.shard).stat().st_size == header.size:
                found.append(header)
    return tuple(sorted(found, key=lambda one: (one.of.lineage, one.of.step, one.of.attempt, one.of.world, one.shard)))


def drop_copies(folder: Path, job_uid: str, unwanted: Callable[[WorldState], bool]) -> None:
    """Delete the copies that `unwanted` says so of, headers first, and what never got a header of states like them."""
    for header in list_copies(folder, job_uid):
        if unwanted(header.of):
            header_file(folder, header.of, header.shard).unlink(missing_ok=True)
            data_file(folder, header.of, header.shard).unlink(missing_ok=True)
    for path in folder.glob("*.data") if folder.is_dir() else ():
        of = _named(path)
        if of is not None and unwanted(of) and not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)


def _named(path: Path) -> WorldState | None:
    """The state that a data file's name says, with no number of shards."""
    try:
        world, lineage, step, attempt = path.name.split(".")[0].rsplit("-", 3)
        return WorldState(world=world, lineage=int(lineage), step=int(step), attempt=int(attempt), shards=1)
    except ValueError:
        return None


def open_folder(folder: Path, home: str) -> bool:
    """Make a job's folder, with the installation's name beside its node. Whether it is there to be written in.

    Everybody may write where memory is: the topmost folder must be this user's own, and nobody else may look into it.
    """
    top = folder.parents[2]
    try:
        top.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            top.mkdir(mode=0o700)
        found = top.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parents[1] / HOME_FILE).write_text(str(Path(home).absolute()), encoding="utf-8")
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def sweep_memory(root: Path, home: str, node: str, active: Iterable[str]) -> None:
    """Give back what ended jobs left on this node, and what installations left whose folder is gone."""
    wanted = set(active)
    mine = home_folder(root, home)
    for folder in (mine / node).glob("*"):
        if folder.name not in wanted:
            shutil.rmtree(folder, ignore_errors=True)
    for other in mine.parent.glob("*"):
        with contextlib.suppress(OSError):
            if not Path((other / HOME_FILE).read_text(encoding="utf-8")).exists():
                shutil.rmtree(other, ignore_errors=True)


def second_keepers(nodes: Sequence[str]) -> tuple[int | None, ...]:
    """By rank, the rank whose node keeps a second copy of its shard: the next one on another node; None if there is none.

    Ranks of one node share its memory, so that a neighbour there would keep nothing that is not there already.
    """
    size = len(nodes)
    return tuple(
        next((r for r in ((rank + i) % size for i in range(1, size)) if nodes[r] != nodes[rank]), None)
        for rank in range(size)
    )
