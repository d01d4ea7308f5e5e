"""In-memory replicas: each rank copies its state shard to the memory of its node and of another node.

A new world (the training processes of a job, which are replaced together) restores from them if a rank or node is lost.

Replicas are made after a step, before the rank reports it as applied, so that no step is committed without a replica;
and once after loading, for a world that is lost before its first step. Each rank writes its shard into its node's
memory (`gcore.models.replicas`) and sends it over gloo, from host memory, to the rank that keeps the second copy.

At most two states exist. One is the state of head: the last committed step, known because the next step became READY.
The other is the next step's, whose commit may still fail. Older states are deleted when a step begins, because its seal
proves that the previous state is head's. States of older worlds are deleted too, but never those of newer worlds: a
discarded world may still run without knowing it. The starting state of a world counts as one of the two, so that the
memory of the previous world is enough.

A replica that does not fit into memory is skipped with a warning, and the step continues: a later loss then costs more
steps. Controllers decide whether a world starts from replicas.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gcore.errors import DataError, GcoreError
from gcore.ledger.records.chain import WorldState
from gcore.models.publisher import NamedTensor
from gcore.models.replicas import (
    BYTES,
    KINDS,
    CopyHeader,
    data_file,
    drop_copies,
    header_file,
    list_copies,
    second_keepers,
    shard_bytes,
)
from gcore.system.fault_injection import FaultPoint, fault_point
from gcore.train.backends.base import TrainBackend, trained_parameters
from gcore.train.backends.distributed import Collective
from gcore.train.checkpoint.writer import UpdateCounts
from gcore.train.denoising.follower import FollowingNetwork
from gcore.train.models import RankModels
from gcore.train.rank.launch import RankLaunch

log = logging.getLogger("gcore.train")

CHUNK_BYTES = 64 << 20
"""Bytes that are sent, received and written at once."""

STATES = 2
"""Maximum number of states (after different steps) whose shards are kept in memory at a time."""

SHARE = 4
"""Replicas use at most 1 / SHARE of a node's free memory, unless the spec sets a size (`train.copies_gb`)."""


class StateReplicator:
    """Makes and deletes the in-memory replicas of one rank. All methods are collectives.

    `wanted`: whether replicas are made: the spec allows them and they fit into the memory of all nodes.
    """

    def __init__(self, launch: RankLaunch, collective: Collective, models: RankModels, base_sample: str = "") -> None:
        """`base_sample`: as of `CopyHeader`."""
        self._launch = launch
        self._base_sample = base_sample
        self._collective = collective
        self._models: Mapping[str, TrainBackend | FollowingNetwork] = trained_models(models)
        self._folder = Path(launch.memory_dir)
        self._keepers = second_keepers(launch.nodes)
        self._group = host_group(collective)
        self._extents = {name: tuple(one.extents()) for name, one in self._models.items()}
        self._settle()
        self.wanted = self._chosen and self._fits()

    @property
    def _chosen(self) -> bool:
        """Whether the spec and the launch document ask for replicas; the same on all ranks of the job."""
        return self._launch.spec.train.copies_gb != 0 and len(self._launch.nodes) == self._launch.world_size

    def _settle(self) -> None:
        """Delete replicas of older worlds, except for the starting state of this one."""
        launch = self._launch
        self._drop(lambda of: of.lineage < launch.lineage and of != launch.start.state)

    def begin(self, step: int) -> None:
        """Delete replicas of states before step - 1, because `step` starts to train from its READY seal.

        That seal proves that step - 1 is committed. A world that makes no replicas has only its starting state, which
        stays until its first step is finished.
        """
        launch = self._launch
        start = launch.start.state if not self.wanted and step == launch.start.step + 1 else None
        self._drop(
            lambda of: (
                (of.lineage < launch.lineage and of != start) or (of.world == launch.world and of.step < step - 1)
            )
        )

    def _drop(self, unwanted: Callable[[WorldState], bool]) -> None:
        if self._launch.memory_dir:
            drop_copies(self._folder, self._launch.job_uid, unwanted)

    def keep(self, step: int, attempt: int, progress: UpdateCounts, tell: Callable[[], None]) -> int:
        """Make replicas of the state after (step, attempt). Returns the bytes stored on this rank's node, 0 if none are
        made.

        `progress`: update counts to store with the state.
        """
        if not self.wanted:
            return 0
        launch = self._launch
        of = WorldState(
            world=launch.world, lineage=launch.lineage, step=step, attempt=attempt, shards=launch.world_size
        )
        fault_point(FaultPoint.COPIES, "before")
        mine = self._write(of, progress, tell)
        size = (mine.size if mine is not None else 0) + self._exchange(of, mine, tell)
        fault_point(FaultPoint.COPIES, "after")
        return size

    def _fits(self) -> bool:
        """Whether all ranks have room for as many replicas as may exist at a time. A collective."""
        rank, nodes = self._launch.rank, self._launch.nodes
        sizes = [0.0] * len(nodes)
        sizes[rank] = float(sum(shard_bytes(extents) for extents in self._extents.values()))
        sizes = self._collective.sum(sizes)
        here = [r for r, node in enumerate(nodes) if node == nodes[rank]]
        kept = sum(sizes[r] for r, keeper in enumerate(self._keepers) if r in here or keeper in here)
        # The starting state takes the place of the older of two states; its memory becomes available later.
        start = self._lying()
        # Without a memory folder on its node a rank has no room at all.
        needed = max(STATES * kept, start + kept) / len(here) if self._launch.memory_dir else 1.0
        limit = self._launch.spec.train.copies_gb
        try:
            free = (shutil.disk_usage(self._folder).free + start) / len(here) if self._launch.memory_dir else 0.0
        except OSError:
            free = 0.0
        budget = min(free, limit * 1e9) if limit is not None else free / SHARE
        lacking = self._collective.max([max(0.0, needed - budget)])[0]
        if lacking:
            log.warning(
                "no in-memory replicas: a rank lacks %.3f GB of memory for them (this one needs %.3f and may use %.3f in "
                "%r); a lost world restarts from a checkpoint",
                *(lacking / 1e9, needed / 1e9, budget / 1e9, self._launch.memory_dir),
            )
        return not lacking

    def _lying(self) -> float:
        """Bytes of this job's replicas in the memory of this node, after all of its ranks have deleted outdated
        ones.
        """
        return (
            float(sum(one.size for one in list_copies(self._folder, self._launch.job_uid)))
            if self._launch.memory_dir
            else 0.0
        )

    def _write(self, of: WorldState, progress: UpdateCounts, tell: Callable[[], None]) -> CopyHeader | None:
        """Write this rank's own shard into the memory of its node; returns its header, or None if there was no room."""
        path, digest, size = data_file(self._folder, of, self._launch.rank), hashlib.sha256(), 0
        try:
            with path.open("wb") as file:
                for values in self._values():
                    digest.update(values)
                    file.write(values)
                    size += values.nbytes
                    tell()
            header = CopyHeader(
                job_uid=self._launch.job_uid,
                of=of,
                shard=self._launch.rank,
                extents=self._extents,
                size=size,
                sha256=digest.hexdigest(),
                base_sample=self._base_sample,
                **asdict(progress),
            )
            _show(header_file(self._folder, of, self._launch.rank), header.encode())
        except OSError as error:
            self._give_up(path, error)
            return None
        return header

    def _values(self) -> Iterator[memoryview]:
        for name, model in self._models.items():
            for kind in KINDS:
                for values in model.pieces(kind, self._extents[name]):
                    yield values.detach().to("cpu", torch.float32).contiguous().view(torch.uint8).numpy().data

    def _exchange(self, of: WorldState, mine: CopyHeader | None, tell: Callable[[], None]) -> int:
        """Send this rank's shard to the rank that keeps the second copy, and store the shards that others send here.

        Returns the bytes stored for others.
        """
        rank, keeper = self._launch.rank, self._keepers[self._launch.rank]
        sending: list[dist.Work] = []
        held: list[Tensor] = []  # keeps buffers alive while they are sent
        if keeper is not None:
            data = self._mapped(of, mine)
            mine = None if data is None else mine
            encoded = b"" if mine is None else mine.encode()
            held.append(torch.tensor([len(encoded), 0 if mine is None else mine.size], dtype=torch.int64))
            if encoded:
                held.append(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
            if data is not None and data.numel():
                held += data.split(CHUNK_BYTES)
            sending = [work for one in held if (work := dist.isend(one, keeper, group=self._group)) is not None]
        kept = sum(
            self._receive(of, sender, tell) for sender in range(len(self._keepers)) if self._keepers[sender] == rank
        )
        for work in sending:
            work.wait()
            tell()
        return kept

    def _mapped(self, of: WorldState, mine: CopyHeader | None) -> Tensor | None:
        """This rank's written shard as a memory-mapped tensor, to be sent; None if it was not written or its file was
        removed.
        """
        if mine is None or not mine.size:
            return None if mine is None else torch.empty(0, dtype=torch.uint8)
        path = data_file(self._folder, of, self._launch.rank)
        try:
            return torch.from_file(str(path), shared=False, size=mine.size, dtype=torch.uint8)
        except RuntimeError:  # torch raises it for a missing or truncated file
            log.warning("cannot send an in-memory replica, because its file was removed: %s", path)
            return None

    def _receive(self, of: WorldState, sender: int, tell: Callable[[], None]) -> int:
        """Receive and store the shard of rank `sender`, on another node; returns the bytes stored.

        If there is no room, the data are received and dropped.
        """
        lengths = torch.empty(2, dtype=torch.int64)
        dist.recv(lengths, sender, group=self._group)
        encoded, size = (int(value) for value in lengths)
        if not encoded:
            return 0
        header = torch.empty(encoded, dtype=torch.uint8)
        dist.recv(header, sender, group=self._group)
        path, room = data_file(self._folder, of, sender), True
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("wb"))
            except OSError as error:
                room = self._give_up(path, error)
            for start in range(0, size, CHUNK_BYTES):
                chunk = torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
                dist.recv(chunk, sender, group=self._group)
                try:
                    if room:
                        file.write(chunk.numpy().data)
                except OSError as error:
                    room = self._give_up(path, error)
                tell()
        try:
            if room:
                _show(header_file(self._folder, of, sender), header.numpy().tobytes())
        except OSError as error:
            room = self._give_up(path, error)
        return size if room else 0

    def _give_up(self, path: Path, error: OSError) -> bool:
        log.warning("skipped an in-memory replica (%s): %s", error.strerror or error, path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return False


def trained_models(models: RankModels) -> dict[str, TrainBackend | FollowingNetwork]:
    """The models whose states a rank keeps, by the names that they have in replicas: `policy`, `critic`, `served`."""
    named: dict[str, TrainBackend | FollowingNetwork] = {"policy": models.policy}
    if models.critic is not None:
        named["critic"] = models.critic
    if models.follower is not None:
        named["served"] = models.follower
    return named


def host_group(collective: Collective) -> dist.ProcessGroup | None:
    """A gloo process group of all ranks for tensors in host memory; None if the default group supports them. A
    collective.
    """
    if collective.size == 1 or collective.device.type == "cpu":
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _show(path: Path, data: bytes) -> None:
    """Write a replica's header file atomically, after its data, so that a replica is either complete or absent."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


class CopiesLost(GcoreError):
    """The state to restore is not complete and intact in the memory of this world's nodes."""


class ReplicaRestore:
    """Restores a state from in-memory replicas, into a world with any number of ranks and any ZeRO stage.

    All methods are collectives. Every rank scans its own node's memory. Each shard is read once, by the first rank that
    has it; that rank verifies its digest first, and then broadcasts it parameter by parameter. The launch document
    names the state (which the log's rollback entry recorded). Replicas of other worlds or steps, and incomplete ones,
    are ignored. If a shard is missing or damaged, the world does not start and the error names the shard; the next
    world starts from a checkpoint.
    """

    def __init__(
        self,
        launch: RankLaunch,
        of: WorldState,
        collective: Collective,
        tell: Callable[[], None],
        base_sample: str = "",
    ) -> None:
        """Find the shards of the state `of` and verify them. `progress` has the update counts of the state afterwards.

        `base_sample`: of the base model on this rank's node, as of `CopyHeader`. Raises CopiesLost, on every rank or on the one
        that found damage; DataError on the ranks whose base model is not the one on which the adapters were trained.
        """
        self._folder = Path(launch.memory_dir)
        self._job_uid = launch.job_uid
        self._of = of
        self._collective = collective
        self._group = host_group(collective)
        self._tell = tell
        self._sources = self._find()
        self._mine = {
            s: _Shard.open(self._folder, self._job_uid, of, s, tell)
            for s, source in enumerate(self._sources)
            if source == collective.rank
        }
        # All ranks learn of damage before any of them waits for the shard.
        damaged = collective.max([0.0 if self._mine.get(s, "") is not None else 1.0 for s in range(of.shards)])
        if any(damaged):
            shards = ", ".join(str(s) for s, bad in enumerate(damaged) if bad)
            raise CopiesLost(f"the replicas of shard {shards} of {of} are damaged", where=str(self._folder))
        self._headers = [self._shared(shard) for shard in range(of.shards)]
        if base_sample and any(one.base_sample not in ("", base_sample) for one in self._headers):
            raise DataError(
                "the in-memory replicas have adapters of another base model",
                where=str(launch.model_path),
                fix="Restore the model that was in model.path when the job started",
            )
        self.progress = self._agreed()

    def fill(self, model: str, module: nn.Module) -> None:
        """Replace the trained float32 weights of a complete (not partitioned) module by those of `model` in the state.

        `model`: `policy` or `critic`. Raises CopiesLost.
        """
        parameters = trained_parameters(module)
        with torch.no_grad():
            for one in self._values(model, "master", {name: p.shape for name, p in parameters.items()}):
                parameters[one.name].copy_(one.tensor)

    def restore(self, models: RankModels) -> None:
        """Restore Adam's moments and step counts of all trained models. Raises CopiesLost."""
        done = {
            "policy": self.progress.updates - self.progress.skipped,
            "critic": self.progress.critic_updates - self.progress.critic_skipped,
            "served": 0,
        }
        for name, model in trained_models(models).items():
            shapes = {key: torch.Size(shape) for key, shape in model.shapes.items()}
            model.restore("exp_avg", self._values(name, "exp_avg", shapes))
            model.restore("exp_avg_sq", self._values(name, "exp_avg_sq", shapes))
            model.count_updates(done[name])

    def _find(self) -> list[int]:
        """For each shard of the state, the rank that reads it. Raises CopiesLost if no rank has a shard."""
        rank, size, shards = self._collective.rank, self._collective.size, self._of.shards
        held = {header.shard for header in list_copies(self._folder, self._job_uid) if header.of == self._of}
        mine = [float(rank == r and s in held) for s in range(shards) for r in range(size)]
        found = self._collective.sum(mine)
        sources = [next((r for r in range(size) if found[s * size + r]), None) for s in range(shards)]
        missing = [str(s) for s, source in enumerate(sources) if source is None]
        if missing:
            raise CopiesLost(
                f"no node of this world has shard {', '.join(missing)} of {self._of.shards} of {self._of} in memory",
                where=str(self._folder),
            )
        return [source for source in sources if source is not None]

    def _shared(self, shard: int) -> CopyHeader:
        """Broadcast a shard's header from the rank that reads it to all ranks."""
        source, own = self._sources[shard], self._mine.get(shard)
        data = own.header.encode() if own is not None else b""
        length = torch.tensor([len(data)], dtype=torch.int64)
        self._spread(length, source)
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if own is None:
            encoded = torch.empty(int(length), dtype=torch.uint8)
        self._spread(encoded, source)
        return CopyHeader.decode(encoded.numpy().tobytes(), f"shard {shard} of {self._of}")

    def _agreed(self) -> UpdateCounts:
        counts = {(h.updates, h.skipped, h.critic_updates, h.critic_skipped) for h in self._headers}
        if len(counts) != 1:
            raise CopiesLost(f"the shards of {self._of} have different update counts: {sorted(counts)}")
        return UpdateCounts(*counts.pop())

    def _values(self, model: str, kind: str, shapes: Mapping[str, torch.Size]) -> Iterator[NamedTensor]:
        """Every parameter's values of `kind` in full, in the order of `shapes`, in host memory, on every rank."""
        places: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in shapes}
        for shard, header in enumerate(self._headers):
            for of_model, of_kind, extent, offset in header.places():
                if (of_model, of_kind) == (model, kind):
                    if extent.name not in places:
                        raise CopiesLost(
                            f"{self._of} has a parameter {extent.name} of the {model}, but the job's model does not"
                        )
                    places[extent.name].append((extent.start, extent.numel, shard, offset))
        for name, shape in shapes.items():
            whole, end = torch.empty(shape.numel(), dtype=torch.float32), 0
            for start, numel, shard, offset in sorted(places[name]):
                if start != end:
                    break
                end = start + numel
                part, own = whole[start:end], self._mine.get(shard)
                if own is not None:
                    part.copy_(own.data[offset : offset + numel * BYTES].view(torch.float32))
                self._spread(part, self._sources[shard])
            if end != shape.numel():
                raise CopiesLost(f"{self._of} has only {end} of the {shape.numel()} elements of {name} of the {model}")
            self._tell()
            yield NamedTensor(name, whole.view(shape))

    def _spread(self, values: Tensor, source: int) -> None:
        if self._collective.size > 1 and values.numel():
            dist.broadcast(values, source, group=self._group)


class _Shard:
    """A shard that this rank reads: its header and its memory-mapped data."""

    def __init__(self, header: CopyHeader, data: Tensor) -> None:
        self.header = header
        self.data = data

    @classmethod
    def open(cls, folder: Path, job_uid: str, of: WorldState, shard: int, tell: Callable[[], None]) -> _Shard | None:
        """Map a shard of the state and verify its digest; None if it was removed or the digest differs."""
        header = next((h for h in list_copies(folder, job_uid) if h.of == of and h.shard == shard), None)
        if header is None:
            return None
        if not header.size:
            return cls(header, torch.empty(0, dtype=torch.uint8))
        try:
            path = str(data_file(folder, of, shard))
            data = torch.from_file(path, shared=False, size=header.size, dtype=torch.uint8)
        except RuntimeError:  # torch raises it for a missing or truncated file
            return None
        digest = hashlib.sha256()
        for chunk in data.split(CHUNK_BYTES):
            digest.update(chunk.numpy().data)
            tell()
        return cls(header, data) if digest.hexdigest() == header.sha256 else None
