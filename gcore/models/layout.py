"""What lies where in a run's folder, and whether a checkpoint is whole.

    weights/{lineage}-{step}/        a model as engines load it: config, tokenizer, model.safetensors
    checkpoints/{lineage}-{step}/    the same with float32 weights, and beside them what the optimizer needs:
                                     exp_avg.safetensors, exp_avg_sq.safetensors, manifest.json; and, of a job that has
                                     a critic, that one in critic/, likewise
    receipts/{world}-{rank}.jsonl    what a rank trained on, one line a token

A folder of that name is whole, because it got its name last (`gcore.system.files`). A checkpoint also carries a
manifest with every file's size and SHA-256, so that what was damaged later is found before a job is rolled back to it.

Does not write weights (`gcore.train.checkpoint.writer`), and does not decide which checkpoints are kept (controllers).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from gcore.errors import DataError, GcoreError, UsageError, explain_os_errors
from gcore.schema import Record, RecordPart, UnreadableRecord
from gcore.system.files import replace_folder, sweep_drafts
from gcore.types import CHECKPOINTS, Version, checkpoint_file

FIRST_WEIGHTS = Version(0, 0)
"""What the weights in the model's own folder are called."""

MODEL_FILE = "model.safetensors"
EXP_AVG_FILE = "exp_avg.safetensors"
EXP_AVG_SQ_FILE = "exp_avg_sq.safetensors"
MANIFEST_FILE = "manifest.json"

EMULATED_FILE = "emulated.json"
"""Lies in folders that emulated train ranks wrote: they hold no weights."""

CRITIC_FOLDER = "critic"

TRAINING_FILES = frozenset({EXP_AVG_FILE, EXP_AVG_SQ_FILE, MANIFEST_FILE})
"""What a checkpoint has beyond a model."""

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
NESTED_SUFFIXES = frozenset({".jinja", ".json", ".txt", ".model", ".vocab", ".tiktoken", ".py"})
"""Of companion files in folders of their own, such as `additional_chat_templates/tool_use.jinja`."""

READ_BYTES = 1 << 20

STAGED = 3
"""Versions of staged weights that are kept, the newest."""


class CheckpointDamaged(GcoreError):
    """A checkpoint is not what its manifest says; `where` names the file."""


class FileEntry(RecordPart):
    """A file of a checkpoint: its size in bytes and its SHA-256 as 64 hex digits."""

    size: int
    sha256: str


class Manifest(Record):
    """`manifest.json` of a checkpoint: where it comes from, and every other file of the folder.

    `updates` counts the optimizer updates up to here, `skipped` those of them that were left out because their gradient
    was not finite: the learning rate follows the first, Adam's own count the difference. The critic's likewise.
    """

    job_uid: str
    world: str
    lineage: int
    step: int
    updates: int
    skipped: int = 0
    critic_updates: int = 0
    critic_skipped: int = 0
    files: dict[str, FileEntry]

    @property
    def version(self) -> Version:
        """The policy version whose weights these are."""
        return Version(self.lineage, self.step)


def weights_folder(run_dir: Path, version: Version) -> Path:
    """Where the weights of `version` lie for engines."""
    return run_dir / "weights" / f"{version.lineage}-{version.step}"


def delete_old_staged(parent: Path) -> None:
    """Delete staged weights in `parent`, but for the newest few."""
    versions: dict[Version, Path] = {}
    for path in parent.iterdir():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            versions[Version(int(lineage), int(step))] = path
    for version in sorted(versions)[:-STAGED]:
        shutil.rmtree(versions[version], ignore_errors=True)


def checkpoint_folder(run_dir: Path, version: Version) -> Path:
    """Where the checkpoint made at `version` lies."""
    return run_dir / checkpoint_file(version)


def highest_lineage(run_dir: Path) -> int:
    """Of the weights and checkpoints that lie in a run's folder, half-written ones among them; 0 if none does."""
    names = (path.name for parent in ("weights", CHECKPOINTS) for path in (run_dir / parent).glob("*-*"))
    numbers = (name.lstrip(".").partition("-")[0] for name in names)
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def sweep_unfinished(run_dir: Path, lineage: int) -> None:
    """Remove what worlds before that of `lineage`, and what died in it, left half-written in a run's folder.

    Never what a later world is writing: whoever sweeps may have been given up meanwhile, and not know it.
    """

    def is_later(target: str) -> bool:
        of = target.partition("-")[0]
        return of.isdigit() and int(of) > lineage

    for parent in ("weights", CHECKPOINTS):
        sweep_drafts(run_dir / parent, is_later)


def checkpoints_in(run_dir: Path) -> dict[Version, Path]:
    """The checkpoints that lie in a run's folder, whole or damaged, by the version they are of."""
    found = {}
    parent = run_dir / CHECKPOINTS
    for path in parent.iterdir() if parent.is_dir() else ():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            found[Version(int(lineage), int(step))] = path
    return found


def critic_folder(checkpoint: Path) -> Path:
    """Where a checkpoint has the critic: a model with a head `score`, float32, and what its optimizer needs."""
    return checkpoint / CRITIC_FOLDER


def has_critic(manifest: Manifest) -> bool:
    """Whether a checkpoint holds a critic."""
    return f"{CRITIC_FOLDER}/{MODEL_FILE}" in manifest.files


def receipts_file(run_dir: Path, world: str, rank: int) -> Path:
    """Where a rank leaves its receipts."""
    return run_dir / "receipts" / f"{world}-{rank}.jsonl"


def companion_files(model: Path) -> tuple[str, ...]:
    """What belongs to a model besides its weights: config, tokenizer, templates, code. Sorted names below the folder.

    Of folders within it only files of the kinds that a tokenizer or a model's code has count: others hold other formats of the weights,
    or another training's state. Raises DataError if the folder has no config.json.
    """
    if not (model / "config.json").is_file():
        raise DataError("no model here: there is no config.json", where=str(model))
    top = (path for path in model.iterdir() if path.name not in TRAINING_FILES)
    nested = (path for folder in model.iterdir() if _is_companion(folder) for path in folder.rglob("*"))
    found = (*top, *(path for path in nested if path.suffix in NESTED_SUFFIXES))
    names = ((path, path.relative_to(model).as_posix()) for path in found)
    return tuple(
        sorted(
            name
            for path, name in names
            if path.is_file()
            and not any(part.startswith(".") for part in name.split("/"))
            and not name.endswith(WEIGHT_SUFFIXES)
        )
    )


def _is_companion(folder: Path) -> bool:
    return folder.is_dir() and folder.name != CRITIC_FOLDER and not (folder / "config.json").exists()


def copy_companions(model: Path, to: Path, copy: Callable[[Path, Path], object] = shutil.copyfile) -> tuple[str, ...]:
    """Copy what belongs to a model besides its weights into `to`; the names. Raises DataError and OSError."""
    names = companion_files(model)
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        copy(model / name, to / name)
    return names


def file_entry(path: Path) -> FileEntry:
    """Size and digest of a file, by reading it. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(size=size, sha256=digest.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, without looking at its files. Raises CheckpointDamaged."""
    path = folder / MANIFEST_FILE
    try:
        return Manifest.decode(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointDamaged(f"no manifest can be read ({error.strerror or error})", where=str(path)) from error
    except UnreadableRecord as error:
        raise CheckpointDamaged(error.what, where=str(path)) from error


def verify_checkpoint(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with its manifest. Raises CheckpointDamaged naming the file."""
    manifest = read_manifest(folder)
    for needed in (MODEL_FILE, EXP_AVG_FILE, EXP_AVG_SQ_FILE, "config.json"):
        if needed not in manifest.files:
            raise CheckpointDamaged(f"the manifest does not name {needed}", where=str(folder / MANIFEST_FILE))
    for name, expected in sorted(manifest.files.items()):
        path = folder / name
        with explain_os_errors("the file cannot be read", CheckpointDamaged, where=path):
            size = path.stat().st_size
            if size != expected.size:
                raise CheckpointDamaged(f"the file has {size} bytes, not {expected.size}", where=str(path))
            if file_entry(path).sha256 != expected.sha256:
                raise CheckpointDamaged("the file's content is not what was saved", where=str(path))
    return manifest


def manifest_digest(folder: Path) -> str:
    """Names a checkpoint with all its files: SHA-256 of its manifest, 64 hex digits. Raises CheckpointDamaged."""
    path = folder / MANIFEST_FILE
    with explain_os_errors("no manifest can be read", CheckpointDamaged, where=path):
        return hashlib.sha256(path.read_bytes()).hexdigest()


def copy_model(checkpoint: Path, to: Path, digest: str = "") -> None:
    """Copy the model out of a checkpoint, without the optimizer's part and without what the manifest does not name; all or
    nothing.

    Every byte is read and compared first. `digest`: of the manifest that was registered; empty where that is not known.
    Raises UsageError if `to` exists and is not an empty folder, CheckpointDamaged, and DataError if there is no model.
    """
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UsageError(
            "the target is there already and is not an empty folder", where=str(to), fix="Name a folder that is new"
        )
    if (checkpoint / EMULATED_FILE).exists():
        raise DataError(
            "no weights here: emulated train ranks wrote this, which compute nothing", where=str(checkpoint)
        )
    proven = verify_checkpoint(checkpoint).files
    if digest and manifest_digest(checkpoint) != digest:
        raise CheckpointDamaged("it is not the checkpoint that was registered", where=str(checkpoint / MANIFEST_FILE))
    weights = sorted(path.name for path in checkpoint.glob("*.safetensors*") if path.name not in TRAINING_FILES)
    names = [name for name in (*companion_files(checkpoint), *weights) if name in proven]
    to.parent.mkdir(parents=True, exist_ok=True)
    with replace_folder(to, owner="copy", durable=True) as temporary:
        for name in names:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, temporary / name)


FIRST = Version(0, 0)


def versions_in(folder: Path) -> frozenset[Version]:
    """The versions after which folders in `folder` are called. Raises OSError."""
    found = set()
    for path in folder.glob("*-*") if folder.is_dir() else ():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            found.add(Version(int(lineage), int(step)))
    return frozenset(found)


Dtype = Literal["F64", "F32", "BF16", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL"]

BYTES: Mapping[Dtype, int] = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Type and shape of a tensor that will be written."""

    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return BYTES[self.dtype] * math.prod(self.shape)


class TensorsFile:
    """A safetensors file being written tensor by tensor, so that a model never has to lie whole in the memory of one process.

    Use as a context manager; `entry` is there after the last tensor. Tensors come in the order of `tensors`; another one, or
    one of the wrong size, is a ValueError. Without `hashed` no digest is computed, which for a large model takes a while, and
    there is no `entry`.

    The format: eight bytes with the header's length, a JSON header with type, shape and place of each tensor, then
    their bytes, little-endian, without gaps. All names and shapes must therefore be known before the first tensor.
    Reading is left to the safetensors library.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorShape], *, hashed: bool = True) -> None:
        self._waiting = list(tensors.items())
        self._hashed = hashed
        self._digest = hashlib.sha256()
        self._size = 0
        self._unforced = 0
        self._file = path.open("wb")
        self._put(_header(tensors))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._waiting:
            raise ValueError(f"{len(self._waiting)} tensors were never written, the first is {self._waiting[0][0]}")

    def write(self, name: str, data: memoryview) -> None:
        """The next tensor's bytes."""
        self._expect(name, data)
        self._put(data)

    def write_through(self, name: str, data: memoryview, block: int, tick: Callable[[int], None]) -> None:
        """The next tensor's bytes, about `block` at a time; `tick` hears how many more were brought to the disk."""
        self._expect(name, data)
        flat = data.cast("B")
        for start in range(0, len(flat), block):
            part = flat[start : start + block]
            self._put(part)
            self._unforced += len(part)
            if self._unforced >= block:
                self.force(tick)

    def force(self, tick: Callable[[int], None]) -> None:
        """Bring what `write_through` wrote to the disk."""
        self._file.flush()
        os.fdatasync(self._file.fileno())
        forced, self._unforced = self._unforced, 0
        tick(forced)

    @property
    def entry(self) -> FileEntry:
        """Size and digest of what was written so far. ValueError if it was not hashed."""
        if not self._hashed:
            raise ValueError("this file was written without a digest")
        return FileEntry(size=self._size, sha256=self._digest.hexdigest())

    def _expect(self, name: str, data: memoryview) -> None:
        expected, shape = self._waiting.pop(0)
        if name != expected or data.nbytes != shape.nbytes:
            raise ValueError(f"{name} of {data.nbytes} bytes where {expected} of {shape.nbytes} is due")

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        if self._hashed:
            self._digest.update(data)
        self._size += memoryview(data).nbytes


def _header(tensors: Mapping[str, TensorShape]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        fields[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight
    return struct.pack("<Q", len(text)) + text
