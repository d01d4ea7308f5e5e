"""In-memory replicas: copies of a train world's state in the memory of its nodes. Names, headers and listings.

After each step every rank of the world (the job's training processes) writes its shard of the state (float32 weights
and Adam's moments, of policy and critic) to the memory of its own node and of another node. A node's memory is a folder
on an in-memory file system (`/dev/shm`). So a copy survives a killed rank, supervisor or controller, needs no process
to keep it, and is lost only with the node.

    {memory_dir}/gcore-{user}/{installation}/{node}/{job uid}/{world}-{lineage}-{step}-{attempt}.{shard}.data
                                                              ... .json, written last: without it the copy does not count

The world and the token (lineage, step, attempt) identify the state of a copy: a world applies a token once, and only
from its READY seal, so copies with the same world and token belong to the same state (docs/develop/adr, "Copies of
neighbours").

This module does not read or write tensors (`gcore.train.checkpoint.replicas` does) and makes no decisions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import NonNegativeInt

from gcore.ledger.records.chain import WorldState
from gcore.schema import Record, RecordPart, UnreadableRecord

KINDS = ("master", "exp_avg", "exp_avg_sq")
"""Values stored for each parameter (float32 weight, Adam's two moments), in the order of the data; little-endian."""

BYTES = 4
"""Bytes per value."""
HOME_FILE = "home"
"""File in an installation's folder with the path of its home folder, by which other installations see whether it
exists.
"""

MEMORY = Path("/dev/shm")
"""The in-memory file system of Linux. `NodeConfig.memory_dir` may name another."""


class Extent(RecordPart):
    """A contiguous range of a parameter that one rank updates: `numel` elements from element `start` of the flat
    parameter.
    """

    name: str
    start: NonNegativeInt
    numel: NonNegativeInt


class CopyHeader(Record):
    """The header of a copy, stored as `*.json`: which shard of which state it is, and what its data file contains.

    The data file contains the values of all extents without gaps: for each model, for each of `KINDS`, each extent.
    `updates` and the other counts are the optimizer's update counts in this state.
    """

    came_with: ClassVar[Mapping[str, int]] = {"base_sample": 3}
    job_uid: str
    of: WorldState
    shard: NonNegativeInt
    """Index of the shard, which is the rank that wrote it; the state has `of.shards` of them."""
    updates: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    critic_updates: NonNegativeInt = 0
    critic_skipped: NonNegativeInt = 0
    extents: dict[str, tuple[Extent, ...]]
    """By model (`policy`, `critic`): the ranges of parameters that the shard contains."""
    size: NonNegativeInt
    """Size of the data in bytes."""
    sha256: str
    """SHA-256 of the data, 64 hex digits."""
    base_sample: str = ""
    """`gcore.models.adapter_checks.BaseFiles.sample` of the adapters' base model; empty without adapters."""

    def places(self) -> Iterator[tuple[str, str, Extent, int]]:
        """Yield each extent's model, kind, range, and byte offset in the data file."""
        offset = 0
        for model, extents in self.extents.items():
            for kind in KINDS:
                for extent in extents:
                    yield model, kind, extent, offset
                    offset += extent.numel * BYTES


def shard_bytes(extents: Iterable[Extent]) -> int:
    """Return how many bytes these extents of one model occupy in a data file."""
    return len(KINDS) * BYTES * sum(extent.numel for extent in extents)


def memory_folder(root: Path, home: str, node: str, job_uid: str) -> Path:
    """Return the folder of a job's copies on a node.

    `root`: the in-memory file system. `home`: the home folder of the installation.
    """
    return home_folder(root, home) / node / job_uid


def home_folder(root: Path, home: str) -> Path:
    """Return the folder of all copies of one installation of gcore on a machine, named by a hash of its home folder."""
    named = hashlib.blake2b(str(Path(home).absolute()).encode(), digest_size=8).hexdigest()
    return root / f"gcore-{os.getuid()}" / named


def data_file(folder: Path, of: WorldState, shard: int) -> Path:
    """Return the path of the data file for one shard of the state `of`."""
    return folder / f"{of.world}-{of.lineage}-{of.step}-{of.attempt}.{shard}.data"


def header_file(folder: Path, of: WorldState, shard: int) -> Path:
    """Return the path of the header file for one shard of the state `of`."""
    return data_file(folder, of, shard).with_suffix(".json")


def list_copies(folder: Path, job_uid: str) -> tuple[CopyHeader, ...]:
    """Return the headers of a job's complete copies in a node's folder, sorted by lineage, step, attempt, world and
    shard.

    A copy is complete if its header is readable and its data file has the header's size; the digest is not checked.
    """
    found = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        with contextlib.suppress(OSError, UnreadableRecord):
            header = CopyHeader.decode(path.read_bytes(), str(path))
            named = header_file(folder, header.of, header.shard) == path and header.job_uid == job_uid
            if named and data_file(folder, header.of, header.shard).stat().st_size == header.size:
                found.append(header)
    return tuple(sorted(found, key=lambda one: (one.of.lineage, one.of.step, one.of.attempt, one.of.world, one.shard)))


def drop_copies(folder: Path, job_uid: str, unwanted: Callable[[WorldState], bool]) -> None:
    """Delete the copies of all states for which `unwanted` returns true, headers first.

    Also deletes data files of such states that have no header.
    """
    for header in list_copies(folder, job_uid):
        if unwanted(header.of):
            header_file(folder, header.of, header.shard).unlink(missing_ok=True)
            data_file(folder, header.of, header.shard).unlink(missing_ok=True)
    for path in folder.glob("*.data") if folder.is_dir() else ():
        of = _named(path)
        if of is not None and unwanted(of) and not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)


def _named(path: Path) -> WorldState | None:
    """Return the state that a data file's name states, with `shards` 1 because the name does not say it; None for other
    names.
    """
    try:
        world, lineage, step, attempt = path.name.split(".")[0].rsplit("-", 3)
        return WorldState(world=world, lineage=int(lineage), step=int(step), attempt=int(attempt), shards=1)
    except ValueError:
        return None


def open_folder(folder: Path, home: str) -> bool:
    """Create a job's folder for copies and record the installation's path. Return whether the folder can be used.

    Every user may write to the in-memory file system, so the topmost folder must belong to this user and be closed to
    others.
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
    """Delete copies of ended jobs on this node, and those of installations whose home folder no longer exists.

    `active`: uids of the jobs whose copies stay.
    """
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
    """Return, by rank, the rank that keeps the second copy of its shard: the next rank on another node; None if there
    is none.

    Ranks of one node share its memory, so a copy by a rank on the same node would add nothing.
    """
    size = len(nodes)
    return tuple(
        next((r for r in ((rank + i) % size for i in range(1, size)) if nodes[r] != nodes[rank]), None)
        for rank in range(size)
    )
