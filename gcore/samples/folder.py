"""The folder `samples` of a run: one folder a step, one file a writer in it. Blocks on the disk; called off event loops.

A file is there whole or not at all. Of all steps the newest are kept; whoever has written removes the oldest. Nothing is
waited for: samples that cannot be written are missing, and the step they are of is none the worse.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gcore.atomic import whole_file
from gcore.samples.records import KeptAdvantage, KeptGroup
from gcore.schema import Record, UnreadableRecord
from gcore.types import PromptRef, Version

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)

FOLDER = "samples"
ADVANTAGES = "advantages-"


def step_folder(run_dir: Path, version: Version) -> Path:
    """Where the samples of the step that led to `version` lie."""
    return run_dir / FOLDER / f"{version.lineage}-{version.step}"


def write(run_dir: Path, version: Version, name: str, records: Iterable[Record]) -> None:
    """Write a file of `name` whole. Raises OSError."""
    folder = step_folder(run_dir, version)
    folder.mkdir(parents=True, exist_ok=True)
    whole_file(folder / f"{name}.jsonl", b"".join(record.encode() + b"\n" for record in records))


def advantages_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"{ADVANTAGES}{rank}"


def kept_steps(run_dir: Path) -> list[Version]:
    """The steps of which there are groups, oldest first. Raises OSError."""
    return [version for version in _step_folders(run_dir) if _files(run_dir, version, advantages=False)]


def prune(run_dir: Path, keep: int) -> None:
    """Remove the oldest steps beyond `keep`. Raises OSError."""
    for version in _step_folders(run_dir)[:-keep]:
        shutil.rmtree(step_folder(run_dir, version), ignore_errors=True)


@dataclass(frozen=True, slots=True)
class GroupLine:
    """Where a kept group lies, and what groups are picked by: without its texts, so that all of a step's are little together."""

    ref: PromptRef
    digest: str
    source: str
    mean_reward: float
    file: Path
    offset: int
    length: int


def list_groups(run_dir: Path, version: Version) -> list[GroupLine]:
    """The kept groups of a step, by ref. Raises OSError."""
    found: dict[str, GroupLine] = {}
    for file in _files(run_dir, version, advantages=False):
        for offset, line, group in _records(file, KeptGroup):
            digest, source, reward = group.digest, group.source, group.mean_reward
            found[digest] = GroupLine(group.ref, digest, source, reward, file, offset, len(line))
    return sorted(found.values(), key=lambda one: one.ref)


def read_group(where: GroupLine) -> KeptGroup:
    """One of them. Raises OSError: it was removed since; UnreadableRecord: something else was written there."""
    with where.file.open("rb") as file:
        file.seek(where.offset)
        return KeptGroup.decode(file.read(where.length), f"{where.file}, byte {where.offset}")


def read_groups(run_dir: Path, version: Version) -> list[KeptGroup]:
    """All of them with their texts, by ref. Raises OSError."""
    files = _files(run_dir, version, advantages=False)
    groups = {group.digest: group for file in files for _, _, group in _records(file, KeptGroup)}
    return sorted(groups.values(), key=lambda group: group.ref)


def list_advantages(run_dir: Path, version: Version) -> dict[str, list[bytes]]:
    """The known advantages of a step by the group's digest, as they are written (`advantages_in`). Raises OSError."""
    found: dict[str, list[bytes]] = {}
    for file in _files(run_dir, version, advantages=True):
        for _, line, one in _records(file, KeptAdvantage):
            found.setdefault(one.digest, []).append(line)
    return found


def advantages_in(lines: Iterable[bytes]) -> dict[int, KeptAdvantage]:
    """The advantages of one group, by the sample's index."""
    return {one.sample: one for one in (KeptAdvantage.decode(line, ADVANTAGES) for line in lines)}


def _step_folders(run_dir: Path) -> list[Version]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(run_dir / FOLDER):
            lineage, _, step = entry.name.partition("-")
            if lineage.isdigit() and step.isdigit():
                found.append(Version(int(lineage), int(step)))
    return sorted(found)


def _files(run_dir: Path, version: Version, *, advantages: bool) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):  # removed at this moment
        whole = step_folder(run_dir, version).glob("[!.]*.jsonl")
        return sorted(file for file in whole if file.name.startswith(ADVANTAGES) == advantages)
    return []


def _records(file: Path, kind: type[R]) -> Iterator[tuple[int, bytes, R]]:
    """Line by line: where each begins, the line, and what it says."""
    try:
        opened = file.open("rb")
    except FileNotFoundError:  # removed since its folder was listed
        return
    with opened:
        offset = 0
        for number, line in enumerate(opened, 1):
            begin, offset = offset, offset + len(line)
            try:
                yield begin, line, kind.decode(line, f"{file}:{number}")
            except UnreadableRecord as error:
                log.warning("%s", error)
