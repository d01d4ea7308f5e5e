"""Writes weights and checkpoints to the run folder, and restores checkpoints. Every rank takes part; rank 0 writes.

Tensors are gathered one by one. The weights of a step are staged (written to a folder from which engines load) within
the step, because engines wait for them, with retries on disk errors (`gcore.train.checkpoint.run_files`). They are not
fsynced: a power loss ends the world too, and the next world stages its own weights.

A checkpoint costs its step only a snapshot in rank 0's host memory (`HostSnapshot`). It is written during the following
steps (`gcore.train.checkpoint.run_files`), with fsync before its folder gets its name. There is one snapshot: if a
checkpoint is due while the previous one is still being written, all ranks wait for that write (`drain`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from gcore.config.capabilities import ENGINES
from gcore.config.train import LoraSpec
from gcore.errors import DataError
from gcore.models.adapter_checks import BaseFiles
from gcore.models.adapters import (
    AdapterConfig,
    check_unchanged,
    describe_base,
    file_shapes,
    merged_tensors,
    served_shapes,
    stored_name,
    stored_shapes,
    tensor_bytes,
)
from gcore.models.dtypes import CODES, model_dtype
from gcore.models.hubs import ADAPTER_CONFIG, weights_file
from gcore.models.layout import (
    ADAPTER_FILE,
    AVERAGE_FOLDER,
    BASE_FILE,
    CRITIC_FOLDER,
    EXP_AVG_FILE,
    EXP_AVG_SQ_FILE,
    FROZEN_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    PIPELINE_FILE,
    SAMPLE_FILE,
    FileEntry,
    Manifest,
    TensorsFile,
    copy_companions,
    critic_folder,
    delete_old_staged,
    file_entry,
    link_or_copy,
    sweep_unfinished,
    weights_folder,
)
from gcore.models.publisher import NamedTensor
from gcore.models.tensors import TensorShape
from gcore.rollout.api import FolderUpdate, WeightUpdate
from gcore.system.files import replace_folder
from gcore.train.backends.adapters import adapter_config
from gcore.train.backends.base import AdamKind, TensorKind, TrainBackend
from gcore.train.checkpoint.run_files import BackgroundWriter, Highest, RetryingWriter, WriteCallback
from gcore.train.denoising.follower import FollowingNetwork
from gcore.train.rank.launch import RankLaunch
from gcore.types import Version

MOMENTS: Mapping[str, AdamKind] = {EXP_AVG_FILE: "exp_avg", EXP_AVG_SQ_FILE: "exp_avg_sq"}
"""Which of Adam's moments each safetensors file of a checkpoint contains; another file has the float32 weights."""

ALIGNED = 8
"""Alignment in bytes of each tensor in the snapshot's memory."""


@dataclass(frozen=True, slots=True)
class SnapshotTensor:
    """One tensor of a snapshot: its shape and dtype as in the file, and its bytes."""

    shape: TensorShape
    data: memoryview


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """The content of one safetensors file of a checkpoint, in memory: tensors by name, in the file's order."""

    name: str
    tensors: Mapping[str, SnapshotTensor]

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes, without the file's header."""
        return sum(one.shape.nbytes for one in self.tensors.values())


class HostSnapshot:
    """A copy of one model and its optimizer state in host memory, from which a checkpoint is written during later
    steps.

    It is taken within the step, tensor by tensor, so that a rank holds only one gathered tensor at a time in addition.
    Only the writing rank keeps it: 12 bytes per parameter (float32 weight and Adam's two moments), for policy and
    critic alike. There is at most one snapshot; its memory is reused for the next checkpoint.
    """

    def __init__(
        self,
        model: TrainBackend | FollowingNetwork,
        weights_file: str = MODEL_FILE,
        frozen: Mapping[str, Tensor] = MappingProxyType({}),
        moments: Mapping[str, AdamKind] = MOMENTS,
    ) -> None:
        """`weights_file`: name of the file with the float32 weights. `frozen`: parameters that it has in addition, float32 in
        host memory; they never change and are not copied. `moments`: files with Adam's moments; empty without an optimizer.
        """
        self._model = model
        self._frozen = {
            name: SnapshotTensor(TensorShape("F32", tuple(one.shape)), one.contiguous().reshape(-1).numpy().data)
            for name, one in frozen.items()
        }
        self._kinds: Mapping[str, TensorKind] = {weights_file: "master", **moments}
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tell: Callable[[], None]) -> tuple[SnapshotFile, ...]:
        """Copy the model's weights and its optimizer's state, on the writing rank. A collective. Overwrites the
        previous snapshot.
        """
        return tuple(self._file(name, kind, tell) for name, kind in self._kinds.items())

    def take_part(self, tell: Callable[[], None]) -> None:
        """Take part in the collectives of another rank's `take`, and keep nothing."""
        for kind in self._kinds.values():
            for _ in self._model.tensors(kind):
                tell()

    def _file(self, name: str, kind: TensorKind, tell: Callable[[], None]) -> SnapshotFile:
        extra = list(self._model.buffers()) if kind == "master" else []
        sizes = [4 * torch.Size(shape).numel() for shape in self._model.shapes.values()]
        sizes += [one.tensor.numel() * one.tensor.element_size() for one in extra]
        memory = self._memory_of(name, sum(_aligned(size) for size in sizes))
        copied, at = {}, 0
        for one, dtype in self._all(kind, extra):
            size = one.tensor.numel() * dtype.itemsize
            place = memory[at : at + size]
            place.view(dtype).copy_(one.tensor.detach().reshape(-1))
            copied[stored_name(one.name)] = SnapshotTensor(
                TensorShape(CODES[dtype], tuple(one.tensor.shape)), place.numpy().data
            )
            at += _aligned(size)
            tell()
        return SnapshotFile(name, copied | self._frozen if kind == "master" else copied)

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
"""Interval in seconds at which `drain` checks whether the previous checkpoint is written."""

BLOCK_BYTES = 16 << 20
"""Bytes that are written between two fsyncs; progress is reported after each."""


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """How many optimizer updates policy and critic have made so far in the job.

    `updates` includes `skipped`: updates without effect because their gradient was not finite.
    """

    updates: int
    skipped: int
    critic_updates: int = 0
    critic_skipped: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> UpdateCounts:
        """The counts that a checkpoint's manifest records."""
        return cls(manifest.updates, manifest.skipped, manifest.critic_updates, manifest.critic_skipped)


class ServedWeights(Protocol):
    """The tensors of a complete model, as its files have them."""

    def shapes(self) -> Mapping[str, TensorShape]:
        """Dtype and shape of each tensor, in the order of `tensors`. Not a collective."""

    def tensors(self, *, writes: bool, tell: Callable[[], None]) -> Iterator[NamedTensor]:
        """Yield every tensor on the rank that `writes`; the others must read their iterator to the end too."""


class WholeModel:
    """A policy without adapters: its trained weights, and those that are frozen for engines that need a complete folder;
    implements `ServedWeights`.
    """

    def __init__(
        self,
        policy: TrainBackend | FollowingNetwork,
        dtype: torch.dtype,
        frozen: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """`frozen`: on the writing rank, the frozen weights to serve."""
        self._policy = policy
        self._dtype = dtype
        self._frozen = frozen

    def shapes(self) -> Mapping[str, TensorShape]:
        """Parameters in the served dtype, and buffers in their own."""
        parameters = {**self._policy.shapes, **{name: tuple(one.shape) for name, one in self._frozen.items()}}
        found = {name: TensorShape(CODES[self._dtype], shape) for name, shape in parameters.items()}
        buffers = ((one.name, one.tensor) for one in self._policy.buffers())
        return found | {name: TensorShape(CODES[one.dtype], tuple(one.shape)) for name, one in buffers}

    def tensors(self, *, writes: bool, tell: Callable[[], None]) -> Iterator[NamedTensor]:
        """Gather the parameters one by one. A collective."""
        for one in self._policy.tensors("served"):
            yield NamedTensor(one.name, one.tensor.to(self._dtype))
        for name, tensor in self._frozen.items():
            yield NamedTensor(name, tensor.to(self._dtype))
        yield from self._policy.buffers()


class MergedModel:
    """A policy with adapters; implements `ServedWeights`.

    The sum is computed in float32 from the base model's files and rounded once.
    """

    def __init__(
        self,
        policy: TrainBackend,
        lora: LoraSpec,
        base: Path,
        dtype: torch.dtype,
        highest: Highest,
        loaded: BaseFiles | None = None,
    ) -> None:
        """`highest`: maximum of each number over the ranks. `loaded`: the base's files when the rank loaded it; None: as they
        are now."""
        self._loaded = BaseFiles.of(base) if loaded is None else loaded
        self._policy = policy
        self._highest = highest
        self._scale = lora.scale
        self._base = base
        self._dtype = dtype

    def shapes(self) -> Mapping[str, TensorShape]:
        """As in the base model's files, floating-point tensors in the served dtype. Raises DataError if these changed."""
        check_unchanged(self._loaded)
        return served_shapes(stored_shapes(self._base), self._dtype)

    def tensors(self, *, writes: bool, tell: Callable[[], None]) -> Iterator[NamedTensor]:
        """Gather the adapters, a collective; then merge them on the rank that writes."""
        adapters = {}
        for one in self._policy.tensors("master"):
            adapters[stored_name(one.name)] = one.tensor.detach().cpu().clone()
            tell()
        # All ranks wait for each merged tensor: the watchdog would end ranks that wait for the whole model in silence.
        if writes:
            for merged in merged_tensors(self._base, adapters, self._scale, self._dtype):
                yield merged
                self._highest([0.0])
            check_unchanged(self._loaded)
        else:
            for _ in stored_shapes(self._base):
                self._highest([0.0])
                tell()


class AdaptersAlone:
    """The adapters of a policy without its base model; implements `ServedWeights`. Engines add them to the base."""

    def __init__(self, policy: TrainBackend) -> None:
        self._policy = policy

    def shapes(self) -> Mapping[str, TensorShape]:
        """The adapters in float32, by their names in files."""
        return {stored_name(name): TensorShape("F32", shape) for name, shape in self._policy.shapes.items()}

    def tensors(self, *, writes: bool, tell: Callable[[], None]) -> Iterator[NamedTensor]:
        """Gather the adapters one by one. A collective."""
        for one in self._policy.tensors("master"):
            yield NamedTensor(stored_name(one.name), one.tensor)


class FolderPublisher:
    """Implements `gcore.models.publisher.Publisher`: writes each version's weights to a folder, from which engines
    load.

    Keeps only the folders of the newest few versions.
    """

    def __init__(
        self,
        launch: RankLaunch,
        model: TrainBackend,
        writer: BackgroundWriter,
        insisting: RetryingWriter,
        highest: Highest,
        base: BaseFiles | None = None,
        frozen: Mapping[str, Tensor] = MappingProxyType({}),
        follower: FollowingNetwork | None = None,
    ) -> None:
        """`base`: files of the adapters' base model when the rank loaded it; None: as they are now. `frozen`: parameters that
        are not trained, if this rank writes. Engines that keep theirs from the initial model get only what is trained.
        `follower`: a network that engines serve in place of the model, or evaluate.
        """
        self._launch = launch
        partial = ENGINES[launch.spec.rollout.engine].partial_updates
        self._left_out = sorted(frozen) if partial else []
        lora, dtype = launch.spec.train.lora, model_dtype(launch.model_path)
        self._adapters: AdapterConfig | None = None
        """Description of the adapters, if they are published alone."""
        self._served: ServedWeights
        if lora is None:
            served = follower if follower is not None and follower.serves else model
            self._served = WholeModel(served, dtype, {} if partial else frozen)
        elif lora.publish == "merged":
            self._served = MergedModel(model, lora, launch.model_path, dtype, highest, base)
        else:
            self._served = AdaptersAlone(model)
            self._adapters = adapter_config(model.module, lora, launch.model_path)
        self._loaded = BaseFiles({})
        """The files of the adapters' base model; none without adapters, or if another rank writes."""
        self._average = None if follower is None or follower.serves else WholeModel(follower, dtype)
        """The average of the trained weights that engines evaluate, beside those that they serve."""
        self._weights_file = weights_file(launch.model_path)
        self._writes = launch.rank == 0
        if lora is not None and self._writes:
            self._loaded = base or BaseFiles.of(launch.model_path)
        self._sample = "" if self._adapters is None else self._loaded.sample()
        self._writer = writer
        self.insisting = insisting
        self._highest = highest

    def stage(self, version: Version, tell: Callable[[], None]) -> FolderUpdate:
        """Write the current weights to the folder of `version`, with retries on disk errors. A collective. Raises
        WriteRefused, and DataError if the adapters' base model changed.
        """
        _end_on_change(self._loaded)
        target = weights_folder(self._launch.run_path, version)
        what = f"the weights of step {version.step}"
        self.insisting.until_taken(what, target.parent, lambda: self._stage(target, tell), self._highest, tell)
        return FolderUpdate(version, str(target.relative_to(self._launch.run_path)))

    def _stage(self, target: Path, tell: Callable[[], None]) -> None:
        """Try once to write the weights to `target`. Takes part in all collectives even after a disk error."""
        tensors = self._served.tensors(writes=self._writes, tell=tell)
        try:
            if self._writes:
                self._writer.folder.check()
                with replace_folder(target, owner=self._launch.world, durable=False) as folder:
                    if self._adapters is None:
                        copy_companions(self._launch.model_path, folder, link_or_copy)
                        if self._left_out:
                            (folder / FROZEN_FILE).write_text(json.dumps(self._left_out), encoding="utf-8")
                        self._write_served(folder / self._weights_file, self._served, tensors, tell)
                        if self._average is not None:
                            inner = folder / AVERAGE_FOLDER
                            inner.mkdir()
                            averages = self._average.tensors(writes=True, tell=tell)
                            self._write_served(inner / self._weights_file, self._average, averages, tell)
                    else:
                        (folder / ADAPTER_CONFIG).write_bytes(self._adapters.encode())
                        (folder / SAMPLE_FILE).write_text(self._sample, encoding="ascii")
                        self._write_served(folder / ADAPTER_FILE, self._served, tensors, tell)
                delete_old_staged(target.parent)
        finally:
            for _ in tensors:
                tell()

    def send(self, update: WeightUpdate) -> None:
        """Do nothing: engines read the folder themselves."""

    def release(self, update: WeightUpdate) -> None:
        """Delete the folder of the version's weights."""
        if self._writes:
            shutil.rmtree(weights_folder(self._launch.run_path, update.version), ignore_errors=True)

    def _write_served(
        self, path: Path, served: ServedWeights, tensors: Iterator[NamedTensor], tell: Callable[[], None]
    ) -> None:
        with TensorsFile(path, served.shapes(), hashed=False) as file:
            for one in tensors:
                file.write(one.name, tensor_bytes(one.tensor))
                tell()


class CheckpointWriter:
    """Takes the snapshots of policy and critic and has rank 0 write them as checkpoints. Every rank has one.

    `tell` is called for each tensor, because a large model takes longer than the watchdog's limit.
    """

    def __init__(
        self,
        launch: RankLaunch,
        policy: TrainBackend,
        critic: TrainBackend | None = None,
        writer: BackgroundWriter | None = None,
        base: BaseFiles | None = None,
        frozen: Mapping[str, Tensor] = MappingProxyType({}),
        follower: FollowingNetwork | None = None,
    ) -> None:
        """`base`: as of `FolderPublisher`. `frozen`: the policy's parameters that are not trained, if this rank writes.
        `follower`: a network that follows the policy."""
        self._launch = launch
        self._writes = launch.rank == 0
        lora = launch.spec.train.lora
        self._base = b""
        """Digests of the adapters' base model, once the first checkpoint is written."""
        self._loaded = BaseFiles({})
        """The files of the adapters' base model when the rank loaded it; none without adapters, or if another rank writes."""
        if lora is not None and self._writes:
            self._loaded = base or BaseFiles.of(launch.model_path)
        self._base_bytes = sum(size for size, _, _ in self._loaded.stamps.values())
        """Size of the base model's weights, which the first checkpoint reads."""
        self._adapters = None if lora is None else adapter_config(policy.module, lora, launch.model_path)
        weights = weights_file(launch.model_path)
        snapshot = HostSnapshot(policy, weights if lora is None else ADAPTER_FILE, frozen)
        self._copies = [_Model("", snapshot, launch.model_path)]
        if critic is not None:
            self._copies.append(_Model(f"{CRITIC_FOLDER}/", HostSnapshot(critic), launch.critic_path))
        if follower is not None:
            second = HostSnapshot(follower, weights, moments={})
            self._copies.append(_Model(f"{follower.folder}/", second, launch.model_path))
        self.writer = writer or BackgroundWriter(launch.run_path, launch.world)
        self.insisting = RetryingWriter(self.writer.hindered, launch.spec.train.watchdog_s)
        if self._writes:
            sweep_unfinished(launch.run_path, launch.lineage)

    def drain(self, highest: Highest, tell: Callable[[], None]) -> None:
        """Wait until no checkpoint is being written. A collective.

        `tell` is called on every rank when bytes were written. If the disk makes no progress, it is not called, and the
        watchdog ends the rank. `highest`: maximum of each number over the ranks.
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
        """Take the snapshot of `version` and start to write it in the background. A collective; only after `drain`.

        `count`: update counts for the manifest. `insist`: retry after disk errors until it is written.
        """
        if not self._writes:
            for model in self._copies:
                model.copy.take_part(tell)
            return
        _end_on_change(self._loaded)
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
            if self._adapters is not None:
                if not self._base:
                    self._loaded.check()
                    described = describe_base(self._launch.model_path, tick)
                    self._loaded.check()
                    self._base = described
                for name, data in ((ADAPTER_CONFIG, self._adapters.encode()), (BASE_FILE, self._base)):
                    (folder / name).write_bytes(data)
                    files[name] = file_entry(folder / name)
            if self._launch.spec.rollout.diffusion is not None:
                pipeline = json.dumps({"path": self._launch.spec.model.path})
                (folder / PIPELINE_FILE).write_text(pipeline, encoding="utf-8")
                files[PIPELINE_FILE] = file_entry(folder / PIPELINE_FILE)
            (folder / MANIFEST_FILE).write_bytes(Manifest.model_validate(fields | {"files": files}).encode())

        total = sum(one.nbytes for _, copies in taken for one in copies)
        self.writer.begin(version, total if self._base else total + self._base_bytes, fill, insist=insist)


def _end_on_change(base: BaseFiles) -> None:
    """Raise DataError if a file of the base model changed. A missing file is an error only for what reads it."""
    with contextlib.suppress(OSError):
        base.check()


@dataclass(frozen=True, slots=True)
class _Model:
    """One model of a checkpoint.

    `prefix`: of its file names in the checkpoint. `copy`: its snapshot. `source`: the folder from which config and
    tokenizer are copied.
    """

    prefix: str
    copy: HostSnapshot
    source: Path


def _write_copy(path: Path, copied: SnapshotFile, tick: WriteCallback) -> FileEntry:
    """Write one safetensors file from a snapshot; returns its size and digest.

    Data are fsynced in blocks instead of once at the end, so that progress reflects the disk and the end is fast.
    """
    with TensorsFile(path, {name: one.shape for name, one in copied.tensors.items()}) as file:
        for name, one in copied.tensors.items():
            file.write_through(name, one.data, BLOCK_BYTES, tick)
        file.force(tick)
    return file.entry


def restore_optimizer(policy: TrainBackend, folder: Path, manifest: Manifest) -> None:
    """Restore the policy's optimizer (Adam's moments and step count) from a verified checkpoint. A collective. Raises
    DataError if the moments are missing or belong to another model.
    """
    _restore(policy, folder, manifest.updates - manifest.skipped)


def restore_critic(critic: TrainBackend, folder: Path, manifest: Manifest) -> None:
    """Restore the critic's optimizer; the same as `restore_optimizer`."""
    _restore(critic, critic_folder(folder), manifest.critic_updates - manifest.critic_skipped)


def _restore(model: TrainBackend, folder: Path, adam_steps: int) -> None:
    files = {kind: folder / name for name, kind in MOMENTS.items()}
    for path in files.values():
        _check_moments(path, {stored_name(name): shape for name, shape in model.shapes.items()})
    model.restore_optimizer(files, adam_steps)


def _check_moments(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    found = {name: one.shape for name, one in file_shapes(path).items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        sizes = (f"{list(one[name])}" if name in one else "none" for one in (found, wanted))
        raise DataError(
            "the optimizer state of this checkpoint belongs to another model: for {!r} it has {}, and the model {}".format(
                name, *sizes
            ),
            where=str(path),
            fix="Export the checkpoint's model (`gcore export`) and start a new job from it, or use another checkpoint",
        )


def _copied(model: Path, to: Path) -> Iterator[tuple[str, FileEntry]]:
    """Copy a model's files other than its weights to `to`; yields the name, size and digest of each."""
    for name in copy_companions(model, to):
        yield name, file_entry(to / name)
