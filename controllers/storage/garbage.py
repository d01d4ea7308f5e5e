"""Delete files on this node that are no longer needed, and enforce a run folder's disk quota.
`controllers.storage.rules` decides what to delete.

- *Run folders* under `run_root` are identified by the job ID at the end of their name. A folder may be deleted only if
  this store's record of that job names it and the job ended more than an hour ago. It is kept while the spec of an
  unfinished job names a file in it (a model, data).
- *Caches* of data are kept if they were used since the oldest unfinished job was created. Each use updates the file's
  time (`gcore.data.dataset`).
- *Logs* are those of the supervisors of workers. A log is kept while its worker is registered.
- *Scratch* files are those that a job's processes left in their folder on this node. They are kept until the job has
  ended and none of its workers is left.

Right before the collector deletes a file or folder, it checks again whether a job needs it. It renames a folder before
it deletes it, so that one of several daemons deletes it, and no reader finds half of it. In the same rounds it deletes
old usage records of all nodes (`controllers.accounting.usage`).

`DiskQuota` measures a job's run folder against `limits.disk_gib`. It deletes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from controllers.accounting.usage import forget_old_usage
from controllers.storage.rules import GIB, GarbageCandidate, GarbageDecision, decide_garbage
from gcore.config.node import NodeConfig
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger.records.job import JobRecord, JobStatus
from gcore.ledger.usage import DAY_S
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.worker.records import JOBS_FOLDER, WorkerRecord

log = logging.getLogger(__name__)

YOUNG_S = 3600.0
"""A file that was used within these seconds is kept, because a process may be about to use it again."""

GONE = ".gone-"
"""Prefix of a folder that is being deleted."""

_RUN = re.compile(r".+-([0-9a-f]{12})")

_LOG = re.compile(r"(.+)\.supervisor\.log|(emulated-.+)\.log")

MEASURE_S, MOST_NODES = 60.0, 10
"""Seconds between two measurements of a run folder by a single node. With several nodes each measures less often, by a
factor of their number, at most `MOST_NODES`."""

NEARLY = 0.9
"""Share of the quota from which a job stops recording samples."""

BYTES_PER_GIB = 1 << 30

TOPIC = "disk"
"""Topic of warnings about the disk quota."""


@dataclass(frozen=True)
class UnfinishedJobs:
    """What the unfinished jobs in the store use: names, paths and workers."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Names of the unfinished jobs by job ID."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Paths that their specs name; the value is the name of the job."""
    since: float | None = None
    """When the oldest of them was created, in seconds since the epoch; None: there is none."""
    workers: frozenset[str] = frozenset()
    """Instances of all registered workers."""
    busy: frozenset[str] = frozenset()
    """IDs of jobs with a registered worker, including ended jobs."""

    def user_of(self, folder: Path) -> str:
        """Return the name of an unfinished job whose spec names a path in `folder`; empty if none does."""
        inside = f"{folder}/"
        return next((job for path, job in self.paths.items() if path == str(folder) or path.startswith(inside)), "")


class UnfinishedJobsReader:
    """Reads the unfinished jobs from the store. Keeps the job records, which never change, between calls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, JobRecord] = {}

    async def now(self) -> UnfinishedJobs:
        """Read the unfinished jobs. Raises StoreUnavailable; also UnreadableRecord, because a job with an unreadable
        record may need anything."""
        uids = [kv.key.removeprefix(keys.ACTIVE) for kv in (await self._store.list(keys.ACTIVE)).kvs]
        self._jobs = {uid: job for uid, job in self._jobs.items() if uid in uids}
        names: dict[str, str] = {}
        paths: dict[str, str] = {}
        for uid in uids:
            job = await self._job(uid)
            names[uid] = uid if job is None else job.name
            if job is not None:
                paths |= dict.fromkeys((job.run_dir, *_paths(job.spec)), job.name)
        workers = {}
        for kv in (await self._store.list(keys.WORKERS)).kvs:
            with contextlib.suppress(UnreadableRecord):
                workers[kv.key.removeprefix(keys.WORKERS)] = WorkerRecord.decode(kv.value, kv.key).job_uid
        since = min((job.created for job in self._jobs.values()), default=None)
        return UnfinishedJobs(names, paths, since, frozenset(workers), frozenset(workers.values()))

    async def _job(self, uid: str) -> JobRecord | None:
        if uid not in self._jobs and (kv := await self._store.get(JobKeys(uid).job)) is not None:
            self._jobs[uid] = JobRecord.decode(kv.value, kv.key)
        return self._jobs.get(uid)


async def ended_runs(store: Store, run_root: Path) -> list[tuple[Path, str, float, bool]]:
    """Return the run folders of this store's jobs: folder, job name, end time, whether it has ended. Raises
    StoreUnavailable."""
    found = []
    for folder in await asyncio.to_thread(_run_folders, run_root):
        match = _RUN.fullmatch(folder.name)
        assert match is not None
        job_keys = JobKeys(match[1])
        job, state = await store.get(job_keys.job), await store.get(job_keys.state)
        if job is None or state is None:
            continue
        try:
            record, status = JobRecord.decode(job.value, job.key), JobStatus.decode(state.value, state.key)
        except UnreadableRecord:
            continue
        if Path(record.run_dir).name == folder.name:
            found.append((folder, record.name, status.changed, status.phase.ended))
    return found


async def find_garbage(config: NodeConfig, store: Store, now: float) -> tuple[GarbageCandidate, ...]:
    """List all caches, logs, scratch folders and run folders, with the reason if one is needed. `now`: seconds since
    the epoch. Raises StoreUnavailable, UnreadableRecord."""
    # List the disk first: files of jobs created meanwhile did not exist then.
    at_home = await asyncio.to_thread(_at_home, Path(config.home))
    runs = await ended_runs(store, Path(config.run_root))
    using = await UnfinishedJobsReader(store).now()
    found = [replace(one, needed_by=_who_needs(one, using, now)) for one in at_home]
    for folder, name, ended, has_ended in runs:
        run = GarbageCandidate("run", folder, 0, ended)
        needed = _who_needs(run, using, now) if has_ended else f"job {name} has not ended"
        size = 0 if needed else await asyncio.to_thread(disk_bytes, folder)
        found.append(replace(run, bytes=size, needed_by=needed))
    return tuple(found)


def _who_needs(found: GarbageCandidate, using: UnfinishedJobs, now: float) -> str:
    """Return why a candidate must be kept; empty if it is not needed. Run folders of unfinished jobs are not handled
    here."""
    if found.kind == "run" and (user := using.user_of(found.path)):
        return f"job {user} uses it"
    if now - found.used < YOUNG_S:
        return "it was used within the last hour"
    if found.kind == "run":
        return ""
    if found.kind == "cache":
        recent = using.since is not None and found.used >= using.since
        return "it was used since the oldest unfinished job was created" if recent else ""
    if found.kind == "log":
        match = _LOG.fullmatch(found.path.name)
        assert match is not None
        process = (
            match[1] or match[2]
        )  # a worker, or the process of emulated engines, whose instance names contain its name
        return "its worker is registered" if any(process in one for one in using.workers) else ""
    uid = found.path.name
    if uid in using.names:
        return f"job {using.names[uid]} has not ended"
    return "the job has a registered worker" if uid in using.busy else ""


def _at_home(home: Path) -> list[GarbageCandidate]:
    """List the caches, logs and scratch folders in a daemon's home, needed or not."""
    found = []
    for file in _entries(home / "cache", hidden=True):
        if file.suffix != ".lock" and (used := _used(file)) is not None:
            # Rows and their metadata belong together; only the time of the metadata changes (`gcore.data.dataset`).
            known = _used(file.with_suffix(".copy")) if file.suffix == ".rows" else None
            found.append(GarbageCandidate("cache", file, disk_bytes(file), max(used, known or 0.0)))
    for file in _entries(home / "logs"):
        if _LOG.fullmatch(file.name) and (used := _used(file)) is not None:
            found.append(GarbageCandidate("log", file, disk_bytes(file), used))
    for folder in _entries(home / JOBS_FOLDER):
        if (used := _used(folder)) is not None:
            found.append(GarbageCandidate("scratch", folder, disk_bytes(folder), used))
    return found


@dataclass(frozen=True)
class DeletionReport:
    """Result of a deletion. `verdicts`: the decisions as carried out. `problems`: one sentence for each failed
    deletion."""

    verdicts: tuple[GarbageDecision, ...]
    problems: tuple[str, ...] = ()


async def delete_garbage(store: Store, verdicts: Collection[GarbageDecision], clock: Clock) -> DeletionReport:
    """Carry out the decisions to delete, except for candidates that are needed by now, because measuring sizes and
    earlier deletions may have taken minutes. Raises StoreUnavailable, UnreadableRecord; then the rest is kept."""
    users, done, problems = UnfinishedJobsReader(store), list[GarbageDecision](), list[str]()
    for verdict in verdicts:
        if not verdict.goes:
            done.append(verdict)
            continue
        found, now = verdict.found, clock.wall()
        used = await asyncio.to_thread(_used, found.path) if found.kind != "run" else None
        needed = _who_needs(found if used is None else replace(found, used=used), await users.now(), now)
        done.append(replace(verdict, goes=False, why=needed) if needed else verdict)
        if not needed:
            log.info("deleting %s (%.2f GiB): %s", found.path, found.bytes / GIB, verdict.why)
            try:
                await asyncio.to_thread(_delete, found.path)
            except OSError as error:
                problems.append(f"cannot delete {found.path}: {error.strerror or error}")
    return DeletionReport(tuple(done), tuple(problems))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        gone = path.with_name(f"{GONE}{path.name}")
        with contextlib.suppress(FileNotFoundError):  # another daemon deletes it
            path.rename(gone)
            shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


class GarbageCollector:
    """Finds and deletes unneeded files on a daemon's node every `gc.every_s` seconds."""

    def __init__(self, config: NodeConfig, store: Store, clock: Clock) -> None:
        self._config = config
        self._store = store
        self._clock = clock

    async def run(self) -> None:
        """Run one round after the other until cancelled."""
        while True:
            await self._clock.sleep(self._config.gc.every_s)
            await self.round()

    async def round(self) -> None:
        """Find and delete unneeded files once. Errors are logged; the next round tries again."""
        now = self._clock.wall()
        await forget_old_usage(self._store, int(now // DAY_S))
        try:
            verdicts = decide_garbage(await find_garbage(self._config, self._store, now), self._config.gc, now)
            for folder in (Path(self._config.run_root), Path(self._config.home) / JOBS_FOLDER):
                await asyncio.to_thread(finish_deletions, folder)
            for problem in (await delete_garbage(self._store, verdicts, self._clock)).problems:
                log.warning("%s", problem)
        except (GcoreError, OSError) as error:
            log.warning("garbage collection stops until the next round: %s", error)


def finish_deletions(folder: Path) -> None:
    """Complete deletions in `folder` that a dead daemon had started."""
    for one in _entries(folder, hidden=True):
        if one.name.startswith(GONE):
            shutil.rmtree(one, ignore_errors=True)


def disk_bytes(path: Path) -> int:
    """Return the bytes on disk of a file, or of all files below a folder. Links are not followed."""
    total, left = 0, [path]
    while left:
        here = left.pop()
        try:
            seen = here.lstat()
        except OSError:
            continue
        total += seen.st_blocks * 512
        if stat.S_ISDIR(seen.st_mode):
            left += _entries(here, hidden=True)
    return total


def _entries(folder: Path, *, hidden: bool = False) -> list[Path]:
    """List the entries of a folder; with `hidden` also those whose name begins with a dot. Empty if it cannot be
    read."""
    try:
        with os.scandir(folder) as found:
            return sorted(Path(one.path) for one in found if hidden or not one.name.startswith("."))
    except OSError:
        return []


def _run_folders(run_root: Path) -> list[Path]:
    return [one for one in _entries(run_root) if one.is_dir() and not one.is_symlink() and _RUN.fullmatch(one.name)]


def _used(path: Path) -> float | None:
    """Return when a file was last written or touched, in seconds since the epoch; None if it does not exist."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _paths(spec: Any) -> Iterator[str]:
    """Yield every absolute path in a spec."""
    if isinstance(spec, str) and spec.startswith("/"):
        yield spec.rstrip("/")
    elif isinstance(spec, Mapping):
        for value in spec.values():
            yield from _paths(value)
    elif isinstance(spec, list | tuple):
        for value in spec:
            yield from _paths(value)


class QuotaLevel(Enum):
    """How full a run folder is: below 90 % of its quota, above 90 %, or over the quota."""

    FREE = "free"
    NEARLY = "nearly"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """How much of its quota a run folder uses. `sentence`: for users; empty below 90 %."""

    level: QuotaLevel
    sentence: str = ""


def measure_disk_usage(taken: int, quota_gib: float, run_dir: Path) -> DiskUsage:
    """Compare the `taken` bytes of a run folder with its quota."""
    share = taken / (quota_gib * BYTES_PER_GIB)
    what = f"the run's folder {run_dir} uses {taken / BYTES_PER_GIB:.2f} GiB of its limit of {quota_gib:g} GiB (limits.disk_gib)"
    if share > 1:
        return DiskUsage(
            QuotaLevel.OVER,
            f"{what}: the job is paused; delete files that it does not need (samples, old checkpoints) or raise the limit, then "
            "run `gcore resume`",
        )
    if share >= NEARLY:
        return DiskUsage(
            QuotaLevel.NEARLY, f"{what}: the job stops recording samples, and pauses if it exceeds the limit"
        )
    return DiskUsage(QuotaLevel.FREE)


class DiskQuota:
    """Measures the disk usage of a job's run folder against its quota (`limits.disk_gib`), and pauses a job that
    exceeds it.

    At 90 % of the quota the job stops recording samples, which training does not need. Above the quota the job is
    paused at a commit, with a checkpoint, and reports why. Nothing is lost: a user frees space (or the quota is raised)
    and resumes the job. It does not fail, because a failed job cannot continue, and its writes are not refused, because
    that could end it at any point. So the quota is not a hard limit: the checkpoint of the pause is written in
    addition.

    The folder that this node sees (the shared one, or its own) is measured in a thread, less often if several nodes do
    so. `members`: returns their number. `show`: called with the usage when the level changes. `pause`: pauses the job
    at its next commit.
    """

    def __init__(
        self,
        run_dir: Path,
        quota_gib: float,
        members: Callable[[], int],
        show: Callable[[DiskUsage], None],
        pause: Callable[[], Awaitable[None]],
        clock: Clock,
        measure: Callable[[Path], int] = disk_bytes,
    ) -> None:
        self._run_dir = run_dir
        self._quota_gib = quota_gib
        self._members = members
        self._show = show
        self._pause = pause
        self._clock = clock
        self._measure = measure
        self._level = QuotaLevel.FREE

    async def run(self) -> None:
        """Measure the folder again and again until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(self.rest_s)

    @property
    def rest_s(self) -> float:
        """Seconds until the next measurement."""
        return MEASURE_S * min(max(self._members(), 1), MOST_NODES)

    async def look(self) -> None:
        """Measure the folder once, and pause the job if it exceeds its quota."""
        found = measure_disk_usage(
            await asyncio.to_thread(self._measure, self._run_dir), self._quota_gib, self._run_dir
        )
        if found.level is not self._level:
            self._show(
                found
                if found.sentence
                else DiskUsage(found.level, f"the run's folder {self._run_dir} is below its limit again")
            )
            self._level = found.level
        if found.level is QuotaLevel.OVER:
            try:
                await self._pause()
            except StoreUnavailable as error:  # the next measurement retries
                log.warning("cannot pause the job, retrying: %s", error)
