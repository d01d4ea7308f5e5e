"""Brings weights and checkpoints to the run's folder, and checkpoints back. Every rank takes part; rank 0 writes.

Tensors are gathered one by one and written as they come, so no rank ever holds a second copy of the model. A folder gets
its name when it is whole. Checkpoints are on the disk before that; staged weights are not forced there, because a
machine that loses power takes its world with it, and the next world stages its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gcore.train.critic import Critic
from gcore.train.launch import RankLaunch
from gcore.train.policy import Policy
from gcore.train.trained import Kind, TrainedModel
from gcore.types import Version
from gcore.weights.atomic import sweep, whole_folder
from gcore.weights.layout import (
    CRITIC_FOLDER,
    EXP_AVG_FILE,
    EXP_AVG_SQ_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    FileEntry,
    Manifest,
    checkpoint_folder,
    companions,
    critic_folder,
    file_entry,
    manifest_digest,
    weights_folder,
)
from gcore.weights.tensors_file import Dtype, TensorsFile, TensorShape

STAGED = 3
"""Versions of staged weights that are kept, the newest."""
CHECKPOINT_KINDS: Mapping[str, Kind] = {MODEL_FILE: "master", EXP_AVG_FILE: "exp_avg", EXP_AVG_SQ_FILE: "exp_avg_sq"}
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
NAMES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint: its folder relative to the run's, and the digest of its manifest. Empty on ranks that do not write."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Optimizer updates so far in the job, and those of them that were left out because of their gradient; the policy's,
    and the critic's."""

    updates: int
    skipped: int
    critic_updates: int = 0
    critic_skipped: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Progress:
        """As a checkpoint has it."""
        return cls(manifest.updates, manifest.skipped, manifest.critic_updates, manifest.critic_skipped)


@dataclass(frozen=True, slots=True)
class _Part:
    """A file: which tensors, of what type in it, and whether its digest is wanted."""

    file: str
    kind: Kind
    dtype: torch.dtype
    hashed: bool


class Saver:
    """Writes for one rank of a world.

    `tell` hears of each tensor, because a large model takes longer than a hang is given.
    """

    def __init__(self, launch: RankLaunch, policy: Policy, critic: Critic | None = None) -> None:
        self._launch = launch
        self._policy = policy
        self._critic = critic
        self._dtype = model_dtype(launch.model_path)
        self._writes = launch.rank == 0
        if self._writes:
            sweep(launch.run_path / "weights")
            sweep(launch.run_path / "checkpoints")

    def stage(self, version: Version, tell: Callable[[], None]) -> str:
        """Write the weights of `version` for engines; the folder relative to the run's. A collective."""
        target = weights_folder(self._launch.run_path, version)
        with self._folder(target, durable=False) as folder:
            if folder is not None:
                for source in companions(self._launch.model_path):
                    _link_or_copy(source, folder / source.name)
            self._write(folder, self._policy, _Part(MODEL_FILE, "served", self._dtype, hashed=False), tell)
        if self._writes:
            _keep_newest(target.parent)
        return str(target.relative_to(self._launch.run_path))

    def checkpoint(self, version: Version, count: Progress, tell: Callable[[], None]) -> Saved:
        """Write a checkpoint of `version`, whole and on the disk. A collective."""
        target = checkpoint_folder(self._launch.run_path, version)
        with self._folder(target, durable=True) as folder:
            files = self._whole(folder, self._policy, tell)
            if self._critic is not None:
                inner = None if folder is None else critic_folder(folder)
                if inner is not None:
                    inner.mkdir()
                    files |= {f"{CRITIC_FOLDER}/{name}": one for name, one in _copied(self._launch.critic_path, inner)}
                own = self._whole(inner, self._critic, tell)
                files |= {f"{CRITIC_FOLDER}/{name}": one for name, one in own.items()}
            if folder is not None:
                files |= dict(_copied(self._launch.model_path, folder))
                manifest = Manifest(
                    job_uid=self._launch.job_uid,
                    world=self._launch.world,
                    lineage=version.lineage,
                    step=version.step,
                    updates=count.updates,
                    skipped=count.skipped,
                    critic_updates=count.critic_updates,
                    critic_skipped=count.critic_skipped,
                    files=files,
                )
                (folder / MANIFEST_FILE).write_bytes(manifest.encode())
        file = str(target.relative_to(self._launch.run_path))
        return Saved(file, manifest_digest(target)) if self._writes else Saved(file, "")

    @contextlib.contextmanager
    def _folder(self, target: Path, *, durable: bool) -> Iterator[Path | None]:
        """The folder to fill, on the rank that writes; the others only take part."""
        if not self._writes:
            yield None
            return
        with whole_folder(target, owner=self._launch.world, durable=durable) as folder:
            yield folder

    def _whole(self, folder: Path | None, model: TrainedModel, tell: Callable[[], None]) -> dict[str, FileEntry]:
        """A model's weights and its optimizer's state; the files, by name, on the rank that writes."""
        parts = (_Part(name, kind, torch.float32, hashed=True) for name, kind in CHECKPOINT_KINDS.items())
        found = {part.file: self._write(folder, model, part, tell) for part in parts}
        return {name: entry for name, entry in found.items() if entry is not None}

    def _write(
        self, folder: Path | None, model: TrainedModel, part: _Part, tell: Callable[[], None]
    ) -> FileEntry | None:
        if folder is None:
            for _ in model.tensors(part.kind):
                tell()
            return None
        extra = list(model.buffers()) if part.file == MODEL_FILE else []
        shapes = {key: TensorShape(CODES[part.dtype], shape) for key, shape in model.shapes.items()}
        shapes |= {one.name: TensorShape(CODES[one.tensor.dtype], tuple(one.tensor.shape)) for one in extra}
        with TensorsFile(folder / part.file, shapes, hashed=part.hashed) as file:
            for one in model.tensors(part.kind):
                file.write(one.name, _bytes(one.tensor.to(part.dtype)))
                tell()
            for one in extra:
                file.write(one.name, _bytes(one.tensor))
        return file.entry if part.hashed else None


def restore_optimizer(policy: Policy, folder: Path, manifest: Manifest) -> None:
    """Put Adam's state back from a checkpoint that was verified. A collective."""
    _restore(policy, folder, manifest.updates - manifest.skipped)


def restore_critic(critic: Critic, folder: Path, manifest: Manifest) -> None:
    """Put the critic's optimizer back, likewise."""
    _restore(critic, critic_folder(folder), manifest.critic_updates - manifest.critic_skipped)


def _restore(model: TrainedModel, folder: Path, adam_steps: int) -> None:
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
    for source in companions(model):
        shutil.copyfile(source, to / source.name)
        yield source.name, file_entry(to / source.name)


def _link_or_copy(source: Path, to: Path) -> None:
    try:
        os.link(source.resolve(), to)
    except OSError:
        shutil.copyfile(source, to)  # another file system, or one without links


def _keep_newest(parent: Path) -> None:
    versions: dict[Version, Path] = {}
    for path in parent.iterdir():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            versions[Version(int(lineage), int(step))] = path
    for version in sorted(versions)[:-STAGED]:
        shutil.rmtree(versions[version], ignore_errors=True)
