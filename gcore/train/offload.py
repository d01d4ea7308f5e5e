"""Offloads a rank's memory between two steps, and restores it bit for bit.

If an engine and a train rank share a slot, the slot is time-shared: each uses its memory while the other is idle
(`controllers.rules.memory`). A rank has two memory parts that are released separately: `optimizer` (Adam's state,
float32 weights and gradient buffers, which only an update needs) and `weights` (which the forward pass of policy,
critic and reference uses).

Not tensors but their storages are moved: each storage is saved, freed and filled again later. All tensors, and all of
the optimizer's views, stay valid at any ZeRO stage, so nothing has to be rebuilt. (The optimizer's own `offload_states`
rebuilds all its views, keeps the reference and other engines' buffers, and works on GPUs only.)

On a GPU a storage is resized to zero and its bytes are kept in pinned host memory, which is reused. On a CPU slot,
bytes go to a file in the system's temporary folder (`TMPDIR`) with their digest, and the pages are returned to the
system, because storages that were shared with numpy cannot be resized. The file has no name, so nothing is left however
the process ends.

Runs in the training thread without communication with other ranks. The service and the controllers decide when.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO

import torch
from torch import Tensor

from gcore.config.train import TrainSpec
from gcore.errors import GcoreError
from gcore.system.clock import Clock
from gcore.system.fault_injection import MoveFaultPoint, fault_point
from gcore.system.memory import drop_pages, release_free_memory, view_memory
from gcore.train.backends.base import TrainBackend
from gcore.train.backends.distributed import Collective
from gcore.train.hf_models import explain_memory_error
from gcore.train.models import RankModels
from gcore.train.rank.launch import OPTIMIZER, WEIGHTS, CannotOffload

Tell = Callable[[str], None]

SMALLEST = 16 * 1024
"""Minimum size in bytes of a storage that is offloaded; smaller ones, such as counters, stay in memory."""

CHUNK_BYTES = 64 << 20
"""Bytes that are written, read and hashed at once."""


class OffloadedLost(GcoreError):
    """Offloaded bytes differ from what was saved when they are read back; the rank's state is lost."""


@dataclass
class _Aside:
    """One offloaded storage: its size in bytes, and where its bytes are.

    `host`: their copy in pinned memory (GPU). On a CPU slot they are in the part's file, with the digest `sha256`.
    """

    storage: torch.UntypedStorage
    size: int
    sha256: bytes = b""
    host: Tensor | None = None


@dataclass
class _Part:
    """A released memory part. `file`: the bytes of its storages in sequence, only on a CPU slot."""

    aside: list[_Aside] = field(default_factory=list)
    file: IO[bytes] | None = None


class MemoryOffloader:
    """Releases and restores the memory parts of one rank, and measures what that costs."""

    def __init__(self, models: RankModels, train: TrainSpec, device: torch.device, clock: Clock) -> None:
        self._models = models
        self._train = train
        self._device = device
        self._clock = clock
        self._parts: dict[str, _Part] = {}
        self._pinned: dict[str, list[Tensor]] = {}
        """Pinned host memory by part, as large as the last release of that part; kept while the rank lives, to be
        reused.
        """
        self._seconds = {"release_s": 0.0, "restore_s": 0.0}
        self._bytes = 0

    @property
    def released(self) -> frozenset[str]:
        """The memory parts that are released now. Thread-safe."""
        return frozenset(self._parts)

    def rest(self, what: Collection[str], tell: Tell) -> None:
        """Release the memory parts in `what` and restore all others. `tell`: called with the phase at progress.

        Raises CannotOffload if there is no room for a part, after which each part is either released or unchanged;
        OffloadedLost; OutOfMemory.
        """
        if self._device.type != "cpu":
            torch.cuda.synchronize()  # no stream may still use the memory
        began = self._clock.monotonic()
        fewer, more = self.released - set(what), set(what) - self.released
        if fewer:
            tell("restoring")
            fault_point(MoveFaultPoint.RESTORE, "before")
            for name in sorted(fewer, reverse=True):
                with explain_memory_error(f"restoring the {name}", self._train, ()):
                    self._restore(name, tell)
            fault_point(MoveFaultPoint.RESTORE, "after")
            self._seconds["restore_s"] += self._clock.monotonic() - began
        if more:
            began = self._clock.monotonic()
            tell("releasing")
            fault_point(MoveFaultPoint.RELEASE, "before")
            for name in sorted(more):
                self._release(name, tell)
            self._give_back()
            fault_point(MoveFaultPoint.RELEASE, "after")
            self._seconds["release_s"] += self._clock.monotonic() - began

    def costs(self, collective: Collective) -> Mapping[str, float]:
        """What offloading has cost since the last call, as metrics of a step; empty if no rank has offloaded. A
        collective.

        `release_s` and `restore_s`: seconds on the slowest rank. `released_bytes`: bytes freed, summed over ranks.
        """
        slowest = collective.max(list(self._seconds.values()))
        freed = collective.sum([float(self._bytes)])[0]
        found = dict(zip(self._seconds, slowest, strict=True))
        self._seconds, self._bytes = dict.fromkeys(self._seconds, 0.0), 0
        return found | {"released_bytes": freed} if freed or any(slowest) else {}

    def _release(self, name: str, tell: Tell) -> None:
        aside = [_Aside(storage, storage.nbytes()) for storage in self._storages(name)]
        part = _Part(aside)
        if self._device.type == "cpu":
            part.file = _written(aside, name, tell)
        else:
            self._pinned[name] = _places([one.size for one in aside], self._pinned.pop(name, []))
            for one, place in zip(aside, self._pinned[name], strict=True):
                one.host = place
                one.host.copy_(_bytes_of(one.storage, self._device))
                tell("releasing")
        self._parts = {**self._parts, name: part}
        for one in aside:
            if part.file is None:
                one.storage.resize_(0)
            else:
                drop_pages(one.storage.data_ptr(), one.size)
        self._bytes += sum(one.size for one in aside)

    def _restore(self, name: str, tell: Tell) -> None:
        part = self._parts[name]
        if part.file is not None:
            part.file.seek(0)
        for one in part.aside:
            if part.file is None:
                assert one.host is not None
                one.storage.resize_(one.size)
                _bytes_of(one.storage, self._device).copy_(one.host)
                tell("restoring")
            elif _read(part.file, one, tell) != one.sha256:
                raise OffloadedLost(
                    f"the offloaded {name} came back damaged",
                    where=tempfile.gettempdir(),
                    fix="Check the disk, or set TMPDIR to another folder",
                )
        if part.file is not None:
            part.file.close()
        self._parts = {key: value for key, value in self._parts.items() if key != name}

    def _storages(self, name: str) -> list[torch.UntypedStorage]:
        """The storages of a memory part that are large enough to offload, each once."""
        forward = _unique(self._forward())
        if name == WEIGHTS:
            found = forward
        else:
            assert name == OPTIMIZER
            every = _unique(tensor for model in self._trained() for tensor in model.optimizer_tensors())
            found = {key: storage for key, storage in every.items() if key not in forward}
        return [storage for storage in found.values() if self._worth_it(storage)]

    def _trained(self) -> Iterator[TrainBackend]:
        yield self._models.policy
        if self._models.critic is not None:
            yield self._models.critic

    def _forward(self) -> Iterator[Tensor]:
        for model in self._trained():
            yield from model.forward_tensors()
        for frozen in (self._models.reference, self._models.follower):
            if frozen is not None:
                yield from frozen.forward_tensors()

    def _worth_it(self, storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() >= SMALLEST and storage.device.type == self._device.type

    def _give_back(self) -> None:
        if self._device.type == "cpu":
            release_free_memory()
        else:
            torch.cuda.empty_cache()


def _unique(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The distinct storages behind the tensors, by identity; tensors that are views of one storage share it."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return found


def _places(sizes: Iterable[int], before: list[Tensor]) -> list[Tensor]:
    """Pinned host buffers of these sizes in bytes. Reuses buffers of `before` that fit, and drops the others."""
    free = {size: [one for one in before if one.numel() == size] for size in {one.numel() for one in before}}
    return [free[n].pop() if free.get(n) else torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in sizes]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _chunks(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    whole = view_memory(storage.data_ptr(), storage.nbytes())
    for start in range(0, len(whole), CHUNK_BYTES):
        yield whole[start : start + CHUNK_BYTES]


def _written(aside: Iterable[_Aside], name: str, tell: Tell) -> IO[bytes]:
    """Save the bytes of all storages in sequence to an unnamed file, and record their digests. Raises CannotOffload."""
    file = tempfile.TemporaryFile(prefix="gcore-rests-")  # noqa: SIM115  # open until the part is restored
    try:
        for one in aside:
            digest = hashlib.sha256()
            for chunk in _chunks(one.storage):
                file.write(chunk)
                digest.update(chunk)
                tell("releasing")
            one.sha256 = digest.digest()
        file.flush()
    except OSError as error:
        file.close()
        raise CannotOffload(
            f"the {name} cannot be offloaded ({error.strerror or error})",
            where=tempfile.gettempdir(),
            fix="Free disk space there, or set TMPDIR to another folder",
        ) from error
    return file


def _read(file: IO[bytes], one: _Aside, tell: Tell) -> bytes:
    """Fill a storage with the next bytes of the file. Returns their digest, or b"" if the file is too short."""
    digest = hashlib.sha256()
    for chunk in _chunks(one.storage):
        if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
            return b""
        digest.update(chunk)
        tell("restoring")
    return digest.digest()
