"""Pictures of kept samples: `samples/LINEAGE-STEP/SHA256.png`, links to the blobs of the node's store, or copies.

The record of a group (`gcore.observability.samples`) names its pictures by SHA-256. Their files have a bound of their
own, `samples.picture_mib`: those of the oldest steps are deleted first. A picture without a file is shown by its
SHA-256. All functions block on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from gcore.observability.samples import FOLDER, kept_steps, step_folder
from gcore.types import Version

SUFFIXES = (".png", ".jpg", ".webp")
"""Of the formats in which blob stores keep pictures."""

_CANNOT_LINK = frozenset({errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP})


def keep_pictures(run_dir: Path, version: Version, sha256s: Iterable[str], blobs: Path) -> None:
    """Link pictures into the folder of a step, or copy them to another file system. `blobs`: folder of the job in the
    node's blob store. A picture that the store has deleted is left out. Raises OSError.
    """
    folder = step_folder(run_dir, version)
    for sha256 in dict.fromkeys(sha256s):
        if find_picture(run_dir, version, sha256) is None:
            with contextlib.suppress(FileNotFoundError):
                blob = blobs / sha256[:2] / sha256
                _link(blob, folder / f"{sha256}{_suffix(blob)}")


def find_picture(run_dir: Path, version: Version, sha256: str) -> Path | None:
    """Return the file of a kept picture of a step; None if it was deleted."""
    files = (step_folder(run_dir, version) / f"{sha256}{suffix}" for suffix in SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def prune_pictures(run_dir: Path, most_bytes: int) -> None:
    """Delete pictures of the oldest steps until all have at most `most_bytes` bytes. Raises OSError."""
    room = most_bytes
    for version in reversed(kept_steps(run_dir)):
        for file, size in _pictures_of(run_dir, version):
            room -= size
            if room < 0:
                file.unlink(missing_ok=True)


def is_picture(name: str) -> bool:
    """Return whether a path below the run's folder is that of a kept picture."""
    return name.startswith(f"{FOLDER}/") and name.endswith(SUFFIXES)


def _pictures_of(run_dir: Path, version: Version) -> Iterator[tuple[Path, int]]:
    for file in sorted(step_folder(run_dir, version).glob("[!.]*")):
        if file.suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):  # another controller has deleted it
                yield file, file.stat().st_size


def _suffix(file: Path) -> str:
    with file.open("rb") as opened:
        head = opened.read(4)
    return {b"\x89PNG": ".png", b"RIFF": ".webp"}.get(head, ".jpg")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(source, draft)
        draft.replace(target)
