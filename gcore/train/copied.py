"""Brings a state back from copies in the memory of nodes, into a world of any number of ranks and any ZeRO stage.

Every rank looks into its own node's memory; each shard is read, once, by the first rank that has it there, which proves it
against its digest before anybody uses it, and goes from there to all others, parameter by parameter. What the copies are to
be of stands in the launch document, which has it from the rollback in the log: whatever else lies in memory, of another
world, another step, or not whole, is passed over. If a shard is missing, or is damaged, the world does not start, and a
sentence says which; the next one starts from a checkpoint.

Does not decide that copies are used, and makes none (`gcore.train.copying`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gcore.errors import GcoreError
from gcore.ledger.world_state import WorldState
from gcore.train.collective import Collective
from gcore.train.copying import CHUNK_BYTES, host_group, trained_models
from gcore.train.launch import RankLaunch
from gcore.train.models import Models
from gcore.train.saving import Progress
from gcore.train.trained import NamedTensor
from gcore.weights.copies import BYTES, CopyHeader, data_file, lying


class CopiesLost(GcoreError):
    """A state is not there whole, in the memory of the nodes of this world."""


class Copies:
    """A state that is there whole, from one rank. All methods are collectives."""

    def __init__(self, launch: RankLaunch, of: WorldState, collective: Collective, tell: Callable[[], None]) -> None:
        """Find it, and prove it. Raises CopiesLost, on every rank or on the one that found damage."""
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
        # What is damaged on one rank is known to all before any of them waits for it.
        damaged = collective.max([0.0 if self._mine.get(s, "") is not None else 1.0 for s in range(of.shards)])
        if any(damaged):
            shards = ", ".join(str(s) for s, bad in enumerate(damaged) if bad)
            raise CopiesLost(f"the copies of shard {shards} of {of} are not what was copied", where=str(self._folder))
        self._headers = [self._shared(shard) for shard in range(of.shards)]
        self.progress = self._agreed()

    def fill(self, model: str, module: nn.Module) -> None:
        """Put the weights of `model` into a whole module, in float32, in place of its own. Raises CopiesLost."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for one in self._values(model, "master", {name: p.shape for name, p in parameters.items()}):
                parameters[one.name].copy_(one.tensor)

    def restore(self, models: Models) -> None:
        """Put Adam's state back, of all models."""
        done = {
            "policy": self.progress.updates - self.progress.skipped,
            "critic": self.progress.critic_updates - self.progress.critic_skipped,
        }
        for name, model in trained_models(models).items():
            shapes = {key: torch.Size(shape) for key, shape in model.shapes.items()}
            model.restore("exp_avg", self._values(name, "exp_avg", shapes))
            model.restore("exp_avg_sq", self._values(name, "exp_avg_sq", shapes))
            model.count_updates(done[name])

    def _find(self) -> list[int]:
        """By shard, the rank that reads it."""
        rank, size, shards = self._collective.rank, self._collective.size, self._of.shards
        held = {header.shard for header in lying(self._folder, self._job_uid) if header.of == self._of}
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
        """A shard's header, on all ranks."""
        source, own = self._sources[shard], self._mine.get(shard)
        data = own.header.encode() if own is not None else b""
        length = torch.tensor([len(data)], dtype=torch.int64)
        self._spread(length, source)
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if own is None:
            encoded = torch.empty(int(length), dtype=torch.uint8)
        self._spread(encoded, source)
        return CopyHeader.decode(encoded.numpy().tobytes(), f"shard {shard} of {self._of}")

    def _agreed(self) -> Progress:
        counts = {(h.updates, h.skipped, h.critic_updates, h.critic_skipped) for h in self._headers}
        if len(counts) != 1:
            raise CopiesLost(f"the shards of {self._of} do not count the same updates: {sorted(counts)}")
        return Progress(*counts.pop())

    def _values(self, model: str, kind: str, shapes: Mapping[str, torch.Size]) -> Iterator[NamedTensor]:
        """Every parameter of a model whole, in the order of `shapes`, in host memory, on every rank."""
        places: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in shapes}
        for shard, header in enumerate(self._headers):
            for of_model, of_kind, extent, offset in header.places():
                if (of_model, of_kind) == (model, kind):
                    if extent.name not in places:
                        raise CopiesLost(
                            f"{self._of} has a parameter {extent.name} of the {model} that this job has not"
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
                raise CopiesLost(f"{self._of} has {end} of the {shape.numel()} elements of {name} of the {model}")
            self._tell()
            yield NamedTensor(name, whole.view(shape))

    def _spread(self, values: Tensor, source: int) -> None:
        if self._collective.size > 1 and values.numel():
            dist.broadcast(values, source, group=self._group)


class _Shard:
    """A shard that this rank reads: its header and its data, mapped, never read into memory twice."""

    def __init__(self, header: CopyHeader, data: Tensor) -> None:
        self.header = header
        self.data = data

    @classmethod
    def open(cls, folder: Path, job_uid: str, of: WorldState, shard: int, tell: Callable[[], None]) -> _Shard | None:
        """None if it is gone by now, or its digest is another."""
        header = next((h for h in lying(folder, job_uid) if h.of == of and h.shard == shard), None)
        if header is None:
            return None
        if not header.size:
            return cls(header, torch.empty(0, dtype=torch.uint8))
        try:
            path = str(data_file(folder, of, shard))
            data = torch.from_file(path, shared=False, size=header.size, dtype=torch.uint8)
        except RuntimeError:  # torch says so of a file that is gone, or shorter
            return None
        digest = hashlib.sha256()
        for chunk in data.split(CHUNK_BYTES):
            digest.update(chunk.numpy().data)
            tell()
        return cls(header, data) if digest.hexdigest() == header.sha256 else None
