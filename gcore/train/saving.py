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

from gcore.train.launch import RankLaunch
from gcore.train.policy import Kind, Policy
from gcore.types import Version
from gcore.weights.atomic import sweep, whole_folder
from gcore.weights.layout import (
    EXP_AVG_FILE,
    EXP_AVG_SQ_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    FileEntry,
    Manifest,
    checkpoint_folder,
    companions,
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
    """Optimizer updates so far in the job, and those of them that were left out because of their gradient."""

    updates: int
    skipped: int


@dataclass(frozen=True, slots=True)
class _As:
    """Which tensors, of what type in the file, and whether its digest is wanted."""

    kind: Kind
    dtype: torch.dtype
    hashed: bool


class Saver:
    """Writes for one rank of a world.

    `tell` hears of each tensor, because a large model takes longer than a hang is given.
    """

    def __init__(self, launch: RankLaunch, policy: Policy) -> None:
        self._launch = launch
        self._policy = policy
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
            self._write(folder, MODEL_FILE, _As("served", self._dtype, hashed=False), tell)
        if self._writes:
            _keep_newest(target.parent)
        return str(target.relative_to(self._launch.run_path))

    def checkpoint(self, version: Version, count: Progress, tell: Callable[[], None]) -> Saved:
        """Write a checkpoint of `version`, whole and on the disk. A collective."""
        target = checkpoint_folder(self._launch.run_path, version)
        with self._folder(target, durable=True) as folder:
            files = {}
            for name, kind in CHECKPOINT_KINDS.items():
                entry = self._write(folder, name, _As(kind, torch.float32, hashed=True), tell)
                if entry is not None:
                    files[name] = entry
            if folder is not None:
                for source in companions(self._launch.model_path):
                    shutil.copyfile(source, folder / source.name)
                    files[source.name] = file_entry(folder / source.name)
                manifest = Manifest(
                    job_uid=self._launch.job_uid,
                    world=self._launch.world,
                    lineage=version.lineage,
                    step=version.step,
                    updates=count.updates,
                    skipped=count.skipped,
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

    def _write(self, folder: Path | None, name: str, what: _As, tell: Callable[[], None]) -> FileEntry | None:
        if folder is None:
            for _ in self._policy.tensors(what.kind):
                tell()
            return None
        extra = list(self._policy.buffers()) if name == MODEL_FILE else []
        shapes = {key: TensorShape(CODES[what.dtype], shape) for key, shape in self._policy.shapes.items()}
        shapes |= {one.name: TensorShape(CODES[one.tensor.dtype], tuple(one.tensor.shape)) for one in extra}
        with TensorsFile(folder / name, shapes, hashed=what.hashed) as file:
            for one in self._policy.tensors(what.kind):
                file.write(one.name, _bytes(one.tensor.to(what.dtype)))
                tell()
            for one in extra:
                file.write(one.name, _bytes(one.tensor))
        return file.entry if what.hashed else None


def restore_optimizer(policy: Policy, folder: Path, manifest: Manifest) -> None:
    """Put Adam's state back from a checkpoint that was verified. A collective."""
    policy.restore_optimizer(
        {"exp_avg": folder / EXP_AVG_FILE, "exp_avg_sq": folder / EXP_AVG_SQ_FILE}, manifest.updates - manifest.skipped
    )


def model_dtype(model: Path) -> torch.dtype:
    """The type that a model's weights are kept in, by its config; float32 if that does not say."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return NAMES.get(str(name), torch.float32)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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
