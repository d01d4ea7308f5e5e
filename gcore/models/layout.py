"""The files of a run folder (a job's output folder), and the verification of checkpoints.

    weights/{lineage}-{step}/        a model as engines load it: config, tokenizer, model.safetensors
    checkpoints/{lineage}-{step}/    the same with float32 weights, and the state of the optimizer:
                                     exp_avg.safetensors, exp_avg_sq.safetensors, manifest.json; for a job with a critic,
                                     the critic in critic/, in the same form
    receipts/{world}-{rank}.jsonl    what a rank trained on, one line per token (lineage, step, attempt)

The lineage is the training branch, which increases at every rollback. A folder with such a name is complete, because it
is renamed last (`gcore.system.files`). A checkpoint also has a manifest with every file's size and SHA-256, which
reveals later damage before a job rolls back to it.

`gcore.train.checkpoint.writer` writes weights; controllers decide which checkpoints are kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from gcore.errors import DataError, GcoreError, explain_os_errors
from gcore.models.hubs import ADAPTER_CONFIG, NETWORK_FILE
from gcore.models.tensors import TensorShape, header_bytes
from gcore.schema import Record, RecordPart, UnreadableRecord
from gcore.system.files import check_regular_file, sweep_drafts
from gcore.types import CHECKPOINTS, Version, checkpoint_file

FIRST_WEIGHTS = Version(0, 0)
"""Version of the weights in the initial model's own folder."""

MODEL_FILE = "model.safetensors"
EXP_AVG_FILE = "exp_avg.safetensors"
EXP_AVG_SQ_FILE = "exp_avg_sq.safetensors"
MANIFEST_FILE = "manifest.json"

ADAPTER_FILE = "adapter_model.safetensors"
"""The weights of a checkpoint that has only adapters (LoRA), as PEFT names the file; it has no `MODEL_FILE`."""

ADAPTER_PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules in its files."""
BASE_FILE = "base_model.json"
"""A file beside adapters with the digests of the base model's weights."""

PIPELINE_FILE = "base_pipeline.json"
"""A file beside the network of a pipeline with the folder of the pipeline, whose other parts are not trained."""

SAMPLE_FILE = "base_model.sample"
"""A file beside adapters that are staged for engines, with a sample of the base model on which they are trained
(`gcore.models.adapter_checks.BaseFiles.sample`)."""

FROZEN_FILE = "frozen.json"
"""A file in a folder of staged weights with the names of the parameters that it lacks, because they are not trained
(`train.freeze`). Engines keep them from the initial model."""

EMULATED_FILE = "emulated.json"
"""A file that marks folders written by emulated train ranks, which contain no weights."""

CRITIC_FOLDER = "critic"
"""Subfolder of a checkpoint that contains the critic."""

SERVED_FOLDER = "served"
"""Subfolder of a checkpoint that contains the network that engines serve in place of the trained one (`gcore.train.denoising.follower`)."""

AVERAGE_FOLDER = "average"
"""Subfolder of a checkpoint, and of staged weights, that contains the average of the trained network that is evaluated."""

INNER_FOLDERS = (CRITIC_FOLDER, SERVED_FOLDER, AVERAGE_FOLDER)
"""Subfolders of a checkpoint that contain further models."""

TRAINING_FILES = frozenset({EXP_AVG_FILE, EXP_AVG_SQ_FILE, MANIFEST_FILE, ADAPTER_CONFIG, BASE_FILE, PIPELINE_FILE})
"""Files of a checkpoint that are needed to continue training and are not part of a model."""

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
NESTED_SUFFIXES = frozenset({".jinja", ".json", ".txt", ".model", ".vocab", ".tiktoken", ".py"})
"""File types that count as companion files (a model's files other than weights) in subfolders, such as
`additional_chat_templates/tool_use.jinja`.
"""

READ_BYTES = 1 << 20

STAGED = 3
"""Number of newest versions of staged weights (folders for engines) to keep."""


class CheckpointDamaged(GcoreError):
    """A checkpoint's files do not match its manifest; `where` names the file."""


class FileEntry(RecordPart):
    """What a manifest records of a file: its size in bytes and its SHA-256 as 64 hex digits."""

    size: int
    sha256: str


class Manifest(Record):
    """`manifest.json` of a checkpoint: which job wrote it after which step, and all other files of the folder.

    `updates`: optimizer updates so far. `skipped`: those of them without effect because their gradient was not finite.
    The learning rate depends on `updates`, Adam's step count on the difference. `critic_updates` and `critic_skipped`
    are the same for the critic.
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
        """The policy version of the weights."""
        return Version(self.lineage, self.step)


def weights_folder(run_dir: Path, version: Version) -> Path:
    """Return the folder in which the weights of `version` are staged for engines."""
    return run_dir / "weights" / f"{version.lineage}-{version.step}"


def delete_old_staged(parent: Path) -> None:
    """Delete all but the newest `STAGED` versions of the weights staged in `parent`."""
    versions: dict[Version, Path] = {}
    for path in parent.iterdir():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            versions[Version(int(lineage), int(step))] = path
    for version in sorted(versions)[:-STAGED]:
        shutil.rmtree(versions[version], ignore_errors=True)


def checkpoint_folder(run_dir: Path, version: Version) -> Path:
    """Return the path of the checkpoint of `version` in a run folder."""
    return run_dir / checkpoint_file(version)


def highest_lineage(run_dir: Path) -> int:
    """Return the highest lineage among weights and checkpoints in a run folder, including incomplete ones; 0 if there
    are none.
    """
    names = (path.name for parent in ("weights", CHECKPOINTS) for path in (run_dir / parent).glob("*-*"))
    numbers = (name.lstrip(".").partition("-")[0] for name in names)
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def sweep_unfinished(run_dir: Path, lineage: int) -> None:
    """Remove incomplete folders of weights and checkpoints that earlier or dead train worlds left in a run folder.

    `lineage`: of the caller's world. Files of a later lineage stay, because the caller may be outdated without knowing
    it.
    """

    def is_later(target: str) -> bool:
        of = target.partition("-")[0]
        return of.isdigit() and int(of) > lineage

    for parent in ("weights", CHECKPOINTS):
        sweep_drafts(run_dir / parent, is_later)


def checkpoints_in(run_dir: Path) -> dict[Version, Path]:
    """Return the folders of all checkpoints in a run folder, intact or damaged, by version."""
    found = {}
    parent = run_dir / CHECKPOINTS
    for path in parent.iterdir() if parent.is_dir() else ():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            found[Version(int(lineage), int(step))] = path
    return found


def critic_folder(checkpoint: Path) -> Path:
    """Return the folder of the critic in a checkpoint: a float32 model with a value head `score`, and its optimizer
    state.
    """
    return checkpoint / CRITIC_FOLDER


def has_critic(manifest: Manifest) -> bool:
    """Return whether a checkpoint contains a critic."""
    return f"{CRITIC_FOLDER}/{MODEL_FILE}" in manifest.files


def receipts_file(run_dir: Path, world: str, rank: int) -> Path:
    """Return the path of a rank's receipts (what it trained, for the audit)."""
    return run_dir / "receipts" / f"{world}-{rank}.jsonl"


def companion_files(model: Path) -> tuple[str, ...]:
    """Return the names of a model's files other than weights: config, tokenizer, templates, code. Sorted, relative to
    the folder.

    In subfolders only file types of tokenizers and code count, because other files are other formats of the weights or
    state of other trainings. Raises DataError if the folder has no config.json.
    """
    if not (model / "config.json").is_file():
        raise DataError("the folder is not a model: it has no config.json", where=str(model))
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
    return folder.is_dir() and folder.name not in INNER_FOLDERS and not (folder / "config.json").exists()


def copy_companions(model: Path, to: Path, copy: Callable[[Path, Path], object] = shutil.copyfile) -> tuple[str, ...]:
    """Copy a model's files other than weights into `to` and return their names. Raises DataError and OSError.

    `copy`: copies one file; may also link it.
    """
    names = companion_files(model)
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        copy(model / name, to / name)
    return names


def link_or_copy(source: Path, to: Path) -> None:
    """Make `to` a hard link to a file, or a copy where links are not possible. Raises OSError."""
    try:
        os.link(source.resolve(), to)
    except OSError:
        shutil.copyfile(source, to)  # another file system, or no support for links


def file_entry(path: Path) -> FileEntry:
    """Read a file and return its size and digest. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(size=size, sha256=digest.hexdigest())


HASHED_AT_ONCE = 8
"""Files that `hash_files` reads at the same time."""

HASH_TICK_S = 0.2
"""Seconds between two calls of `tick` in `hash_files`."""


def hash_files(paths: Collection[Path], tick: Callable[[int], None] = lambda _: None) -> dict[Path, str]:
    """Return the SHA-256 of each file, 64 hex digits. Reads several files at once.

    `tick`: called in this thread with the number of bytes read since the last call; what it raises ends the reading.
    Raises OSError with the file's name.
    """
    lock, ended = threading.Lock(), threading.Event()
    unreported = 0

    def hashed(path: Path) -> str:
        nonlocal unreported
        digest = hashlib.sha256()
        try:
            check_regular_file(path)
            with path.open("rb") as file:
                while not ended.is_set() and (block := file.read(READ_BYTES)):
                    digest.update(block)
                    with lock:
                        unreported += len(block)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # an error of reading names no file
        return digest.hexdigest()

    with ThreadPoolExecutor(HASHED_AT_ONCE, "hash") as pool:
        running = {path: pool.submit(hashed, path) for path in paths}
        try:
            unfinished = True
            while unfinished:
                unfinished = bool(wait(running.values(), HASH_TICK_S).not_done)
                with lock:
                    fresh, unreported = unreported, 0
                if fresh:
                    tick(fresh)
            return {path: one.result() for path, one in running.items()}
        finally:
            ended.set()


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 over the digests of an adapter's configuration and weights, 64 hex digits. Raises OSError."""
    digests = hash_files([folder / ADAPTER_CONFIG, folder / ADAPTER_FILE])
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint without checking its files. Raises CheckpointDamaged."""
    path = folder / MANIFEST_FILE
    try:
        check_regular_file(path)
        return Manifest.decode(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointDamaged(f"cannot read the manifest ({error.strerror or error})", where=str(path)) from error
    except UnreadableRecord as error:
        raise CheckpointDamaged(error.what, where=str(path)) from error


def verify_checkpoint(folder: Path, tick: Callable[[int], None] = lambda _: None) -> Manifest:
    """Read every byte of a checkpoint and compare it with its manifest. `tick`: as of `hash_files`.

    Raises CheckpointDamaged with the file's name.
    """
    manifest = read_manifest(folder)
    weights = next((name for name in (ADAPTER_FILE, NETWORK_FILE) if name in manifest.files), MODEL_FILE)
    for needed in (weights, EXP_AVG_FILE, EXP_AVG_SQ_FILE, "config.json"):
        if needed not in manifest.files:
            raise CheckpointDamaged(f"the manifest does not list {needed}", where=str(folder / MANIFEST_FILE))
    expected = {folder / name: entry for name, entry in sorted(manifest.files.items())}
    for path, entry in expected.items():
        with explain_os_errors("cannot read the file", CheckpointDamaged, where=path):
            size = path.stat().st_size
        if size != entry.size:
            raise CheckpointDamaged(f"the file has {size} bytes, not {entry.size}", where=str(path))
    try:
        found = hash_files(expected, tick)
    except OSError as error:
        raise CheckpointDamaged(f"cannot read the file ({error.strerror})", where=error.filename) from error
    for path, entry in expected.items():
        if found[path] != entry.sha256:
            raise CheckpointDamaged("the file's content differs from what was saved", where=str(path))
    return manifest


def manifest_digest(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, 64 hex digits; it covers all files, whose digests the manifest
    lists.

    Raises CheckpointDamaged if the manifest cannot be read.
    """
    path = folder / MANIFEST_FILE
    with explain_os_errors("cannot read the manifest", CheckpointDamaged, where=path):
        return hashlib.sha256(path.read_bytes()).hexdigest()


FIRST = Version(0, 0)


def versions_in(folder: Path) -> frozenset[Version]:
    """Return the versions that the names of the folders in `folder` state. Raises OSError."""
    found = set()
    for path in folder.glob("*-*") if folder.is_dir() else ():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            found.add(Version(int(lineage), int(step)))
    return frozenset(found)


class TensorsFile:
    """Writes a safetensors file tensor by tensor, so that no process needs a complete model in memory.

    Use it as a context manager; `entry` is available after the last tensor. Tensors must come in the order of `tensors`
    and with the declared size, otherwise ValueError. `hashed` False: compute no digest, which takes a while for a large
    model; there is no `entry` then.

    Format: eight bytes with the header's length, a JSON header with dtype, shape and position of each tensor, then
    their bytes, little-endian, without gaps. So all names and shapes must be known before the first tensor. Files are
    read with the safetensors library.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorShape], *, hashed: bool = True) -> None:
        self._waiting = list(tensors.items())
        self._hashed = hashed
        self._digest = hashlib.sha256()
        self._size = 0
        self._unforced = 0
        self._file = path.open("wb")
        self._put(header_bytes(tensors))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._waiting:
            raise ValueError(f"{len(self._waiting)} tensors were never written, the first is {self._waiting[0][0]}")

    def write(self, name: str, data: memoryview) -> None:
        """Write the bytes of the next tensor, whose name must be `name`."""
        self._expect(name, data)
        self._put(data)

    def write_through(self, name: str, data: memoryview, block: int, tick: Callable[[int], None]) -> None:
        """Write the bytes of the next tensor, and force them to disk (fdatasync) about every `block` bytes.

        `tick` is called with the number of bytes forced to disk. Call `force` after the last tensor.
        """
        self._expect(name, data)
        flat = data.cast("B")
        for start in range(0, len(flat), block):
            part = flat[start : start + block]
            self._put(part)
            self._unforced += len(part)
            if self._unforced >= block:
                self.force(tick)

    def force(self, tick: Callable[[int], None]) -> None:
        """Force the bytes that `write_through` has written to disk, and call `tick` with their number."""
        self._file.flush()
        os.fdatasync(self._file.fileno())
        forced, self._unforced = self._unforced, 0
        tick(forced)

    @property
    def entry(self) -> FileEntry:
        """Size and SHA-256 of the bytes written so far. Raises ValueError if the file is written without a digest."""
        if not self._hashed:
            raise ValueError("this file was written without a digest")
        return FileEntry(size=self._size, sha256=self._digest.hexdigest())

    def _expect(self, name: str, data: memoryview) -> None:
        expected, shape = self._waiting.pop(0)
        if name != expected or data.nbytes != shape.nbytes:
            raise ValueError(f"got {name} with {data.nbytes} bytes, expected {expected} with {shape.nbytes}")

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        if self._hashed:
            self._digest.update(data)
        self._size += memoryview(data).nbytes
