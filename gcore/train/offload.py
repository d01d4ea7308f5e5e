"""What a rank does with its memory between two steps: gives it back, and takes it again, bit for bit.

On a slot that an engine and a train rank share, one of the two needs the memory at a time (`controllers.rules.memory`). Of a rank
there are two parts, each released by itself: `optimizer` (Adam's state, the float32 weights and the buffers of gradients, all that
only an update needs) and `weights` (what the forward pass of the policy, the critic and the reference computes with).

Not tensors are moved but the memory under them: the storage of each is put aside and filled again later. Every tensor, and every
view that the optimizer has of it, stays what it was, at any ZeRO stage, so nothing has to be put together again. (The optimizer's own
`offload_states` makes all its views anew, keeps the reference and other engines' buffers, and works on GPUs alone.)

On a GPU a storage is cut to nothing, and its bytes are in pinned host memory, which is kept from one time to the next. Where the
slot is the host's, they go to a file under the system's temporary folder (`TMPDIR`), with their digest, and the system gets the
pages: storages that were ever shown to numpy cannot be cut. The file has no name, so none is left behind however the process ends.

Runs in the thread that trains, and meets no other rank. Does not decide when (`service`, `serving`).
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
"""Bytes of a storage that is worth it: counters and the like stay."""

CHUNK_BYTES = 64 << 20
"""Written, read and hashed at once."""


class OffloadedLost(GcoreError):
    """What was put aside is not what comes back."""


@dataclass
class _Aside:
    """One storage whose memory is given back: its size, and where its bytes are."""

    storage: torch.UntypedStorage
    size: int
    sha256: bytes = b""
    host: Tensor | None = None


@dataclass
class _Part:
    """A part that is released. `file`: of a rank on the host."""

    aside: list[_Aside] = field(default_factory=list)
    file: IO[bytes] | None = None


class MemoryOffloader:
    """Of one rank."""

    def __init__(self, models: RankModels, train: TrainSpec, device: torch.device, clock: Clock) -> None:
        self._models = models
        self._train = train
        self._device = device
        self._clock = clock
        self._parts: dict[str, _Part] = {}
        self._pinned: dict[str, list[Tensor]] = {}
        """By part: places in host memory. As large as what was released of it the last time, for as long as the rank lives."""
        self._seconds = {"release_s": 0.0, "restore_s": 0.0}
        self._bytes = 0

    @property
    def released(self) -> frozenset[str]:
        """What is given back now. May be asked from any thread."""
        return frozenset(self._parts)

    def rest(self, what: Collection[str], tell: Tell) -> None:
        """Have exactly these parts released. Raises CannotOffload, and each part is released or as it was; OffloadedLost, OutOfMemory."""
        if self._device.type != "cpu":
            torch.cuda.synchronize()  # of what is released nothing may be in use on any stream
        began = self._clock.monotonic()
        fewer, more = self.released - set(what), set(what) - self.released
        if fewer:
            tell("restoring")
            fault_point(MoveFaultPoint.RESTORE, "before")
            for name in sorted(fewer, reverse=True):
                with explain_memory_error(f"taking memory for the {name} again", self._train, ()):
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
        """What resting took since it was asked last, and how much it freed, as metrics of a step: the slowest rank's, and the sum
        over ranks. Nothing if no rank has rested. A collective."""
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
                    f"the {name} that were put aside came back damaged",
                    where=tempfile.gettempdir(),
                    fix="See whether the disk there is sound, or let TMPDIR name another folder",
                )
        if part.file is not None:
            part.file.close()
        self._parts = {key: value for key, value in self._parts.items() if key != name}

    def _storages(self, name: str) -> list[torch.UntypedStorage]:
        """The memory of a part that is still there, each once."""
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
        if self._models.reference is not None:
            yield from self._models.reference.forward_tensors()

    def _worth_it(self, storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() >= SMALLEST and storage.device.type == self._device.type

    def _give_back(self) -> None:
        if self._device.type == "cpu":
            release_free_memory()
        else:
            torch.cuda.empty_cache()


def _unique(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Their storages, by identity; views share one."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return found


def _places(sizes: Iterable[int], before: list[Tensor]) -> list[Tensor]:
    """Pinned memory of these sizes: what there was before, as far as it fits; the rest of that is let go."""
    free = {size: [one for one in before if one.numel() == size] for size in {one.numel() for one in before}}
    return [free[n].pop() if free.get(n) else torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in sizes]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _chunks(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    whole = view_memory(storage.data_ptr(), storage.nbytes())
    for start in range(0, len(whole), CHUNK_BYTES):
        yield whole[start : start + CHUNK_BYTES]


def _written(aside: Iterable[_Aside], name: str, tell: Tell) -> IO[bytes]:
    """A file with the bytes of all of them, one behind the other. Raises CannotOffload."""
    file = tempfile.TemporaryFile(prefix="gcore-rests-")  # noqa: SIM115  # open until they are back
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
            f"the {name} cannot be put aside ({error.strerror or error})",
            where=tempfile.gettempdir(),
            fix="Make room there, or let TMPDIR name another folder",
        ) from error
    return file


def _read(file: IO[bytes], one: _Aside, tell: Tell) -> bytes:
    """Fill a storage; the digest of what came."""
    digest = hashlib.sha256()
    for chunk in _chunks(one.storage):
        if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
            return b""
        digest.update(chunk)
        tell("restoring")
    return digest.digest()
