"""Deletes what is not needed any more on this node, and holds a run's folder to its disk quota. `controllers.storage.rules` decides what goes.

- *Run folders* under `run_root` are known by the uid at the end of their name; only one that this store's record of that job names,
  and whose job has ended, may go, after an hour. One in which an unfinished job's spec names a file (a model, data) is needed.
- *Caches* are needed while they were used since the oldest unfinished job was created: each use touches the cache (`gcore.data.dataset`).
- *Logs* are those of supervisors; one whose worker is registered is needed.
- *Scratch* is what a job's processes left in their folder on this node; needed until the job has ended and no worker of it is left.

Whether a job needs something is asked again right before it is deleted. A folder is first renamed, and then deleted: of several daemons
that see the same folder one does it, and none finds half of one. What jobs used long ago, of all nodes, is forgotten in the same rounds
(`controllers.accounting.usage`).

`DiskQuota` measures a job's run folder against `limits.disk_gib`; it deletes nothing.
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
from gcore.worker.main import FOLDER as SCRATCH
from gcore.worker.records import WorkerRecord

log = logging.getLogger(__name__)

YOUNG_S = 3600.0
"""What was of use so lately is left alone: somebody may be about to use it again."""

GONE = ".gone-"
"""What a folder that is being deleted is called."""

_RUN = re.compile(r".+-([0-9a-f]{12})")

_LOG = re.compile(r"(.+)\.supervisor\.log|(emulated-.+)\.log")

MEASURE_S, MOST_NODES = 60.0, 10
"""Between two looks of a node that is alone; so many times as long at most."""

NEARLY = 0.9

BYTES_PER_GIB = 1 << 30

TOPIC = "disk"
"""What trouble with it is called in the store."""


@dataclass(frozen=True)
class UnfinishedJobs:
    """The names, paths and workers of the jobs that have not ended, as the store has them."""

    names: Mapping[str, str] = field(default_factory=dict)
    """By uid."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Paths that their specs name, with the name of the job."""
    since: float | None = None
    """When the oldest was created, seconds since the epoch; None: there is none."""
    workers: frozenset[str] = frozenset()
    """Instances that are registered."""
    busy: frozenset[str] = frozenset()
    """The uids of jobs of which a worker is registered, ended or not."""

    def user_of(self, folder: Path) -> str:
        """Which of them names something in `folder`; nothing if none does."""
        inside = f"{folder}/"
        return next((job for path, job in self.paths.items() if path == str(folder) or path.startswith(inside)), "")


class UnfinishedJobsReader:
    """Reads the unfinished jobs from the store, again and again; the paths in a job's record are read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, JobRecord] = {}

    async def now(self) -> UnfinishedJobs:
        """Read them from the store. Raises StoreUnavailable; also UnreadableRecord, since a job whose record cannot be read may need
        anything."""
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
    """Run folders of this store's jobs: the folder, the job's name, when it ended, whether it has. Raises StoreUnavailable."""
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
    """Everything that a policy may be about, at the wall clock's second `now`. Raises StoreUnavailable, UnreadableRecord."""
    # The disk first: what belongs to a job that is created meanwhile was not there yet.
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
    """Why something must stay, or nothing; a run whose job has ended is of use until then."""
    if found.kind == "run" and (user := using.user_of(found.path)):
        return f"job {user} uses it"
    if now - found.used < YOUNG_S:
        return "it was used within the hour"
    if found.kind == "run":
        return ""
    if found.kind == "cache":
        recent = using.since is not None and found.used >= using.since
        return "it was used since the oldest unfinished job was created" if recent else ""
    if found.kind == "log":
        match = _LOG.fullmatch(found.path.name)
        assert match is not None
        process = match[1] or match[2]  # a worker, or the process of many emulated ones, whose names have its name
        return "its worker is registered" if any(process in one for one in using.workers) else ""
    uid = found.path.name
    if uid in using.names:
        return f"job {using.names[uid]} has not ended"
    return "a worker of it is registered" if uid in using.busy else ""


def _at_home(home: Path) -> list[GarbageCandidate]:
    """Caches, logs and scratch of a daemon's home, whoever needs them."""
    found = []
    for file in _entries(home / "cache", hidden=True):
        if file.suffix != ".lock" and (used := _used(file)) is not None:
            # Rows and what is known of them are one thing; only of the latter the time may change (`gcore.data.dataset`).
            known = _used(file.with_suffix(".copy")) if file.suffix == ".rows" else None
            found.append(GarbageCandidate("cache", file, disk_bytes(file), max(used, known or 0.0)))
    for file in _entries(home / "logs"):
        if _LOG.fullmatch(file.name) and (used := _used(file)) is not None:
            found.append(GarbageCandidate("log", file, disk_bytes(file), used))
    for folder in _entries(home / SCRATCH):
        if (used := _used(folder)) is not None:
            found.append(GarbageCandidate("scratch", folder, disk_bytes(folder), used))
    return found


@dataclass(frozen=True)
class DeletionReport:
    """The result of a deletion: the decisions that were carried out. `problems`: what could not be deleted, a sentence each."""

    verdicts: tuple[GarbageDecision, ...]
    problems: tuple[str, ...] = ()


async def delete_garbage(store: Store, verdicts: Collection[GarbageDecision], clock: Clock) -> DeletionReport:
    """Delete what goes, if nobody needs it by now: it may have taken minutes to find out how much everything takes, and takes more to
    delete what came before it. Raises StoreUnavailable, UnreadableRecord: then the rest stays."""
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
            log.info("deletes %s (%.2f GiB): %s", found.path, found.bytes / GIB, verdict.why)
            try:
                await asyncio.to_thread(_delete, found.path)
            except OSError as error:
                problems.append(f"{found.path} cannot be deleted: {error.strerror or error}")
    return DeletionReport(tuple(done), tuple(problems))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        gone = path.with_name(f"{GONE}{path.name}")
        with contextlib.suppress(FileNotFoundError):  # another daemon was quicker
            path.rename(gone)
            shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


class GarbageCollector:
    """Deletes garbage on a daemon's node, again and again."""

    def __init__(self, config: NodeConfig, store: Store, clock: Clock) -> None:
        self._config = config
        self._store = store
        self._clock = clock

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._clock.sleep(self._config.gc.every_s)
            await self.round()

    async def round(self) -> None:
        """One. What goes wrong is logged, and left for the next."""
        now = self._clock.wall()
        await forget_old_usage(self._store, int(now // DAY_S))
        try:
            verdicts = decide_garbage(await find_garbage(self._config, self._store, now), self._config.gc, now)
            for folder in (Path(self._config.run_root), Path(self._config.home) / SCRATCH):
                await asyncio.to_thread(finish_deletions, folder)
            for problem in (await delete_garbage(self._store, verdicts, self._clock)).problems:
                log.warning("%s", problem)
        except (GcoreError, OSError) as error:
            log.warning("nothing more is deleted: %s", error)


def finish_deletions(folder: Path) -> None:
    """Delete in `folder` what a daemon that died had begun to delete."""
    for one in _entries(folder, hidden=True):
        if one.name.startswith(GONE):
            shutil.rmtree(one, ignore_errors=True)


def disk_bytes(path: Path) -> int:
    """The bytes that a file, or all files below a folder, take on the disk. Links are not followed."""
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
    """The entries of a folder, hidden ones only if they are asked for. Empty if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return sorted(Path(one.path) for one in found if hidden or not one.name.startswith("."))
    except OSError:
        return []


def _run_folders(run_root: Path) -> list[Path]:
    return [one for one in _entries(run_root) if one.is_dir() and not one.is_symlink() and _RUN.fullmatch(one.name)]


def _used(path: Path) -> float | None:
    """When it was last written or touched; None if it is not there."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _paths(spec: Any) -> Iterator[str]:
    """Every absolute path that stands anywhere in a spec."""
    if isinstance(spec, str) and spec.startswith("/"):
        yield spec.rstrip("/")
    elif isinstance(spec, Mapping):
        for value in spec.values():
            yield from _paths(value)
    elif isinstance(spec, list | tuple):
        for value in spec:
            yield from _paths(value)


class QuotaLevel(Enum):
    """How full a run's folder is."""

    FREE = "free"
    NEARLY = "nearly"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """How much a run's folder takes of its quota. `sentence`: for people; empty while there is room."""

    level: QuotaLevel
    sentence: str = ""


def measure_disk_usage(taken: int, quota_gib: float, run_dir: Path) -> DiskUsage:
    """How a run stands whose folder takes `taken` bytes."""
    share = taken / (quota_gib * BYTES_PER_GIB)
    what = f"the run's folder {run_dir} takes {taken / BYTES_PER_GIB:.2f} of the {quota_gib:g} GiB that a job may take (limits.disk_gib)"
    if share > 1:
        return DiskUsage(
            QuotaLevel.OVER,
            f"{what}: the job is paused; delete what it does not need (samples, old checkpoints), or have the limit raised, then "
            "`gcore resume` it",
        )
    if share >= NEARLY:
        return DiskUsage(QuotaLevel.NEARLY, f"{what}: no more samples are kept; beyond it the job is paused")
    return DiskUsage(QuotaLevel.FREE)


class DiskQuota:
    """Measures how much of its disk quota (`limits.disk_gib`) a job's run folder takes, and pauses a job that takes more.

    At nine tenths no more samples are kept: they are for people, and the run goes on without them. Beyond the quota the job is paused, at a
    commit, with a checkpoint, and says why. Nothing is lost: a person makes room (or has the quota raised) and resumes it. The job is not
    failed, for a failed job does not go on; nor are its writes refused, which would end it anywhere. So the quota is no wall: the checkpoint
    with which the job is paused comes on top.

    Every file is looked at, in a thread, the more rarely the more nodes do so: they see the same folder, or each its own. What is limited
    is what this node sees. `members`: how many nodes measure; `show`: called with the usage whenever the level changes; `pause`: pauses the
    job at its next commit.
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
        """For ever."""
        while True:
            await self.look()
            await self._clock.sleep(self.rest_s)

    @property
    def rest_s(self) -> float:
        """Until the next look."""
        return MEASURE_S * min(max(self._members(), 1), MOST_NODES)

    async def look(self) -> None:
        """Once."""
        found = measure_disk_usage(
            await asyncio.to_thread(self._measure, self._run_dir), self._quota_gib, self._run_dir
        )
        if found.level is not self._level:
            self._show(
                found if found.sentence else DiskUsage(found.level, f"the run's folder {self._run_dir} has room again")
            )
            self._level = found.level
        if found.level is QuotaLevel.OVER:
            try:
                await self._pause()
            except StoreUnavailable as error:  # the next look tries it again
                log.warning("the job is not paused yet: %s", error)
