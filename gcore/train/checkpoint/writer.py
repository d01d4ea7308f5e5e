"""Brings weights and checkpoints to the run's folder, and checkpoints back. Every rank takes part; rank 0 writes.

Tensors are gathered one by one. Staged weights are written as they come, inside the step: engines wait for them. A disk that
does not take them is tried again (`gcore.train.checkpoint.run_files`). They are not forced to the disk, because a machine that loses
power takes its world with it, and the next world stages its own.

A checkpoint costs its step only a copy to rank 0's host memory (`gcore.train.checkpoint.writer`, which says how much). It goes to the
disk beside the steps that follow (`gcore.train.checkpoint.run_files`), forced there before its folder gets its name. The copy is one: a
checkpoint that is due while the one before it is still being written waits for that, with all ranks (`drain`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gcore.models.layout import (
    CRITIC_FOLDER,
    EXP_AVG_FILE,
    EXP_AVG_SQ_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    Dtype,
    FileEntry,
    Manifest,
    TensorsFile,
    TensorShape,
    copy_companions,
    critic_folder,
    delete_old_staged,
    file_entry,
    sweep_unfinished,
    weights_folder,
)
from gcore.models.publisher import NamedTensor
from gcore.rollout.api import FolderUpdate, WeightUpdate
from gcore.system.files import replace_folder
from gcore.train.backends.base import TensorKind, TrainBackend
from gcore.train.checkpoint.run_files import BackgroundWriter, Highest, RetryingWriter, WriteCallback
from gcore.train.rank.launch import RankLaunch
from gcore.types import Version

CHECKPOINT_KINDS: Mapping[str, TensorKind] = {
    MODEL_FILE: "master",
    EXP_AVG_FILE: "exp_avg",
    EXP_AVG_SQ_FILE: "exp_avg_sq",
}

CODES: Mapping[torch.dtype, Dtype] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

ALIGNED = 8
"""Each tensor's copy begins at a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class SnapshotTensor:
    """A tensor's shape and type in the file, and its bytes."""

    shape: TensorShape
    data: memoryview


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """What becomes a safetensors file: tensors by name, in the file's order."""

    name: str
    tensors: Mapping[str, SnapshotTensor]

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(one.shape.nbytes for one in self.tensors.values())


class HostSnapshot:
    """One model's tensors in host memory: a copy that the next steps do not change while it goes to the disk.

    Taken inside the step, tensor by tensor, so that a rank holds one gathered tensor at a time beside it. Only the
    rank that writes keeps it: 12 bytes a parameter (float32 weight and Adam's two), for the policy and for the critic
    alike. There is one copy at most; its memory is kept from one checkpoint to the next, which spares the machine
    finding it again.
    """

    def __init__(self, model: TrainBackend) -> None:
        self._model = model
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tell: Callable[[], None]) -> tuple[SnapshotFile, ...]:
        """The model's weights and its optimizer's state as they are now. A collective. What was taken before is overwritten."""
        return tuple(self._file(name, kind, tell) for name, kind in CHECKPOINT_KINDS.items())

    def take_part(self, tell: Callable[[], None]) -> None:
        """What the ranks that do not write do meanwhile."""
        for kind in CHECKPOINT_KINDS.values():
            for _ in self._model.tensors(kind):
                tell()

    def _file(self, name: str, kind: TensorKind, tell: Callable[[], None]) -> SnapshotFile:
        extra = list(self._model.buffers()) if name == MODEL_FILE else []
        sizes = [4 * torch.Size(shape).numel() for shape in self._model.shapes.values()]
        sizes += [one.tensor.numel() * one.tensor.element_size() for one in extra]
        memory = self._memory_of(name, sum(_aligned(size) for size in sizes))
        copied, at = {}, 0
        for one, dtype in self._all(kind, extra):
            size = one.tensor.numel() * dtype.itemsize
            place = memory[at : at + size]
            place.view(dtype).copy_(one.tensor.detach().reshape(-1))
            copied[one.name] = SnapshotTensor(TensorShape(CODES[dtype], tuple(one.tensor.shape)), place.numpy().data)
            at += _aligned(size)
            tell()
        return SnapshotFile(name, copied)

    def _all(self, kind: TensorKind, extra: list[NamedTensor]) -> Iterator[tuple[NamedTensor, torch.dtype]]:
        for one in self._model.tensors(kind):
            yield one, torch.float32
        for one in extra:
            yield one, one.tensor.dtype

    def _memory_of(self, name: str, size: int) -> Tensor:
        found = self._memory.get(name)
        if found is None or found.numel() != size:
            found = self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


DRAIN_S = 0.5
"""Between two looks at whether the checkpoint before is written."""

BLOCK_BYTES = 16 << 20
"""Brought to the disk at once: so often is it told that the disk takes something."""

NAMES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """Optimizer updates so far in the job, and those of them that were left out because of their gradient; the policy's,
    and the critic's."""

    updates: int
    skipped: int
    critic_updates: int = 0
    critic_skipped: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> UpdateCounts:
        """As a checkpoint has it."""
        return cls(manifest.updates, manifest.skipped, manifest.critic_updates, manifest.critic_skipped)


class FolderPublisher:
    """Implements `gcore.models.publisher.Publisher`: writes one folder a version, from which engines load.

    The newest few are kept.
    """

    def __init__(
        self,
        launch: RankLaunch,
        model: TrainBackend,
        writer: BackgroundWriter,
        insisting: RetryingWriter,
        highest: Highest,
    ) -> None:
        self._launch = launch
        self._model = model
        self._dtype = model_dtype(launch.model_path)
        self._writes = launch.rank == 0
        self._writer = writer
        self.insisting = insisting
        self._highest = highest

    def stage(self, version: Version, tell: Callable[[], None]) -> FolderUpdate:
        """Write the weights. Raises WriteRefused."""
        target = weights_folder(self._launch.run_path, version)
        what = f"the weights of step {version.step}"
        self.insisting.until_taken(what, target.parent, lambda: self._stage(target, tell), self._highest, tell)
        return FolderUpdate(version, str(target.relative_to(self._launch.run_path)))

    def _stage(self, target: Path, tell: Callable[[], None]) -> None:
        """One try, which takes part to its end, whatever the disk says on the way."""
        tensors = self._model.tensors("served")
        try:
            if self._writes:
                self._writer.folder.check()
                with replace_folder(target, owner=self._launch.world, durable=False) as folder:
                    copy_companions(self._launch.model_path, folder, _link_or_copy)
                    self._write_served(folder / MODEL_FILE, tensors, tell)
                delete_old_staged(target.parent)
        finally:
            for _ in tensors:
                tell()

    def send(self, update: WeightUpdate) -> None:
        """Nothing: engines read the folder."""

    def release(self, update: WeightUpdate) -> None:
        """Delete the folder."""
        if self._writes:
            shutil.rmtree(weights_folder(self._launch.run_path, update.version), ignore_errors=True)

    def _write_served(self, path: Path, tensors: Iterator[NamedTensor], tell: Callable[[], None]) -> None:
        model, extra = self._model, list(self._model.buffers())
        shapes = {key: TensorShape(CODES[self._dtype], shape) for key, shape in model.shapes.items()}
        shapes |= {one.name: TensorShape(CODES[one.tensor.dtype], tuple(one.tensor.shape)) for one in extra}
        with TensorsFile(path, shapes, hashed=False) as file:
            for one in tensors:
                file.write(one.name, _bytes(one.tensor.to(self._dtype)))
                tell()
            for one in extra:
                file.write(one.name, _bytes(one.tensor))


class CheckpointWriter:
    """Writes for one rank of a world.

    `tell` hears of each tensor, because a large model takes longer than a hang is given.
    """

    def __init__(
        self,
        launch: RankLaunch,
        policy: TrainBackend,
        critic: TrainBackend | None = None,
        writer: BackgroundWriter | None = None,
    ) -> None:
        self._launch = launch
        self._writes = launch.rank == 0
        self._copies = [_Model("", HostSnapshot(policy), launch.model_path)]
        if critic is not None:
            self._copies.append(_Model(f"{CRITIC_FOLDER}/", HostSnapshot(critic), launch.critic_path))
        self.writer = writer or BackgroundWriter(launch.run_path, launch.world)
        self.insisting = RetryingWriter(self.writer.hindered, launch.spec.train.watchdog_s)
        if self._writes:
            sweep_unfinished(launch.run_path, launch.lineage)

    def drain(self, highest: Highest, tell: Callable[[], None]) -> None:
        """Wait until no checkpoint is being written any more; `tell` hears of its progress, on every rank. A collective.

        Nobody waits longer than the disk takes something: a rank that tells nothing is ended by its watchdog.
        """
        known = -1.0
        while True:
            busy = self._writes and not self.writer.wait(0.0 if known < 0 else DRAIN_S)
            writing = self.writer.writing
            busy_somewhere, written = highest([float(busy), float(writing.written) if busy and writing else 0.0])
            if not busy_somewhere:
                return
            if written != known:
                tell()
            known = written

    def checkpoint(
        self, version: Version, count: UpdateCounts, tell: Callable[[], None], *, insist: bool = False
    ) -> None:
        """Copy the state as `version`'s and begin to write it; `insist`: until the disk takes it. A collective.

        Only when none is being written.
        """
        if not self._writes:
            for model in self._copies:
                model.copy.take_part(tell)
            return
        taken = [(model, model.copy.take(tell)) for model in self._copies]
        fields = {
            "job_uid": self._launch.job_uid,
            "world": self._launch.world,
            "lineage": version.lineage,
            "step": version.step,
            "updates": count.updates,
            "skipped": count.skipped,
            "critic_updates": count.critic_updates,
            "critic_skipped": count.critic_skipped,
        }

        def fill(folder: Path, tick: WriteCallback) -> None:
            files: dict[str, FileEntry] = {}
            for model, copies in taken:
                inner = folder / model.prefix
                inner.mkdir(exist_ok=True)
                for one in copies:
                    files[model.prefix + one.name] = _write_copy(inner / one.name, one, tick)
                files |= {model.prefix + name: entry for name, entry in _copied(model.source, inner)}
            (folder / MANIFEST_FILE).write_bytes(Manifest.model_validate(fields | {"files": files}).encode())

        total = sum(one.nbytes for _, copies in taken for one in copies)
        self.writer.begin(version, total, fill, insist=insist)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model in a checkpoint: before its files' names, its copy, and the folder its config and tokenizer come from."""

    prefix: str
    copy: HostSnapshot
    source: Path


def _write_copy(path: Path, copied: SnapshotFile, tick: WriteCallback) -> FileEntry:
    """A safetensors file of what was copied. What lies in the machine's memory goes to the disk on the way, not at the end:
    so progress is what the disk took, and the end is short."""
    with TensorsFile(path, {name: one.shape for name, one in copied.tensors.items()}) as file:
        for name, one in copied.tensors.items():
            file.write_through(name, one.data, BLOCK_BYTES, tick)
        file.force(tick)
    return file.entry


def restore_optimizer(policy: TrainBackend, folder: Path, manifest: Manifest) -> None:
    """Put Adam's state back from a checkpoint that was verified. A collective."""
    _restore(policy, folder, manifest.updates - manifest.skipped)


def restore_critic(critic: TrainBackend, folder: Path, manifest: Manifest) -> None:
    """Put the critic's optimizer back, likewise."""
    _restore(critic, critic_folder(folder), manifest.critic_updates - manifest.critic_skipped)


def _restore(model: TrainBackend, folder: Path, adam_steps: int) -> None:
    model.restore_optimizer({"exp_avg": folder / EXP_AVG_FILE, "exp_avg_sq": folder / EXP_AVG_SQ_FILE}, adam_steps)


def model_dtype(model: Path) -> torch.dtype:
    """The type that a model's weights are kept in, by its config; float32 if that does not say."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return NAMES.get(str(name), torch.float32)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _copied(model: Path, to: Path) -> Iterator[tuple[str, FileEntry]]:
    """What belongs to a model besides its weights, copied."""
    for name in copy_companions(model, to):
        yield name, file_entry(to / name)


def _link_or_copy(source: Path, to: Path) -> None:
    try:
        os.link(source.resolve(), to)
    except OSError:
        shutil.copyfile(source, to)  # another file system, or one without links
