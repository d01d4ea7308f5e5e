"""Telemetry of a running job on one controller, and the files in its run folder.

`JobTelemetry` is the runner's interface to telemetry: it receives every change of the job's records and passes it to the job's events,
metrics, slot accounting and trace spans. `RunRecorder` writes the run's metrics, samples and held-out pictures to the run folder
(`MetricsFileWriter`, `SampleWriter`, `HeldOutPictures`) and feeds the experiment trackers.

The recorder's tasks run concurrently and never delay the job. A failure (a full disk, an unavailable tracker) is reported and retried. A bug in
one of these tasks is logged and ends only that task, not the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from controllers.accounting.attribution import IdleEngines
from controllers.accounting.collector import AccountCollector
from controllers.changes import ChangeSignal
from controllers.identity import Identity
from controllers.rules.view import TURN_SECONDS, JobView, turn_of
from controllers.telemetry.events import EventLog
from controllers.telemetry.gauges import JobStoreSize, show_job, show_placement
from controllers.telemetry.step_stats import StepTimer
from controllers.telemetry.trackers import TrackerProcess, TrackerTimeouts, WarnPeople
from gcore.config.spec import JobSpec, TrackerSpec
from gcore.data.stream import PromptSource, PromptStream
from gcore.errors import DataError, GcoreError, StoreUnavailable
from gcore.ledger import archive
from gcore.ledger.evaluation import evaluations_with_pictures
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Seal, SealState
from gcore.ledger.records.job import EvalSample, Evaluation, Trouble
from gcore.ledger.records.slot_accounting import AccountLine
from gcore.observability.contact_sheet import SHEET_FILE, draw_sheet, held_out_section, read_stamp, sheet_step
from gcore.observability.metrics import Metrics
from gcore.observability.metrics_file import FileBusy, MetricsFile, MetricsSource, has_missing_lines
from gcore.observability.samples import (
    EVALUATION_SHARE,
    KeptGroup,
    choose_groups,
    choose_pictures,
    evaluation_folder,
    keep_pictures,
    make_kept_group,
    prune_evaluations,
    prune_pictures,
    prune_steps,
    step_folder,
    write_samples,
)
from gcore.observability.tracing import StepTraces
from gcore.rollout.client import EngineReach
from gcore.store.keys import JobKeys
from gcore.store.types import Put, Store, WatchBatch
from gcore.system.clock import Clock
from gcore.system.files import replace_file
from gcore.types import Group, Token, Version, entry_text

log = logging.getLogger(__name__)

RETRY_S = 2.0

GAP_PATIENCE = 15
"""Attempts to find log entries that are missing for `metrics.jsonl`; then the file skips their steps."""

END_PATIENCE_S = 10.0
"""Seconds for writing the last lines of `metrics.jsonl` when the job has ended."""

MOST_WAITING = 4
"""Maximum number of steps whose samples wait to be written. If the disk is too slow, the oldest are dropped."""

GroupLookup = Callable[[str], Group | None]
"""Finds a finished group of this controller by its digest."""

COPY_TURN_S = 0.5
"""Seconds that each controller in the order of turns waits for those before it to write the copy of the records."""

SHEET_PATIENCE_S, SHEET_RETRY_S = 5.0, 0.5
"""Seconds for which the sheet waits for pictures that other controllers are keeping, and seconds between two looks."""

EVALUATIONS_WHOLE = 4
"""Number of evaluations whose displayed pictures fit into the bound for pictures of evaluations."""

STOP_S = 10.0
"""Timeout for tracker processes to exit after their input was closed."""


class JobTelemetry:
    """Reports one job on this controller: events, metrics, slot accounting, trace spans, and fields for log lines.

    Receives every change of the job's records. It decides nothing, and no other task waits for it.
    """

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        identity: Identity,
        metrics: Metrics,
        clock: Clock,
        reach: EngineReach,
        traces: StepTraces | None,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        """`reach`: connects to this node's engines. `traces`: exports each step as trace spans; None: no export.

        `released`: called after the last read from workers, so that they may stop.
        """
        self._keys = keys
        self._incarnation = identity.incarnation
        self._metrics = metrics
        self._clock = clock
        self._traces = traces
        self._mirror = JobMirror(keys)
        self._size = JobStoreSize()
        self.events = EventLog(keys)
        self.stopwatch = StepTimer()
        self.slot_accounting = AccountCollector(
            store, keys, identity.node, identity.lease, metrics, clock, reach, self._trace, released
        )

    @property
    def about(self) -> dict[str, object]:
        """Fields that every log line about this job gets: uid, name and newest committed step."""
        told: dict[str, object] = {"job": self._keys.uid}
        if self._mirror.job is not None:
            told["job_name"] = self._mirror.job.record.full_name
        if self._mirror.head is not None:
            told["step"] = self._mirror.head.record.step
        return told

    def note(self, before: JobMirror, batch: WatchBatch, now: JobMirror) -> None:
        """Update metrics, step times and slot accounting: `batch` changed the job's records from `before` to `now`.

        The caller adds events to `events` itself, one revision at a time.
        """
        self._mirror = now
        self.stopwatch.note(before, now, self._clock.monotonic())
        if now.head is not None:
            self.slot_accounting.head_moved(now.head.record.version)
        show_job(self._metrics, now, batch, self._incarnation)
        show_placement(self._metrics, before, now)
        self._size.note(batch)
        if now.job is not None:
            self._size.show(self._metrics, now.job.record.full_name)

    def note_engines(self, view: JobView, busy: Collection[str], *, held_back: bool) -> None:
        """Attribute the time of this controller's idle engines to a cause. `busy`: engines with outstanding requests.

        `held_back`: whether new prompts wait because a judge has too much to score.
        """
        self.slot_accounting.look(view, held_back=held_back)
        idle = IdleEngines.of(view, busy, self.slot_accounting.stage)
        self.stopwatch.engines.note(idle, self._clock.monotonic())

    def stats(self, view: JobView) -> dict[str, float]:
        """The metrics of the step that is about to be committed, for its log entry (`StepTimer.stats`)."""
        return self.stopwatch.stats(view, self._clock.monotonic())

    def close(self) -> None:
        """Remove the job's labels from the Prometheus metrics of this controller."""
        if self._mirror.job is not None:
            self._metrics.forget_job(self._mirror.job.record.full_name)

    def _trace(self, line: AccountLine) -> None:
        if self._traces is not None and self._mirror.job is not None:
            self._traces.tell(self._mirror.job.record.full_name, self._keys.uid, line)


class RunRecorder:
    """Writes the metrics file and the samples of one job, and feeds its experiment trackers. `look`: returns the job's
    newest records."""

    def __init__(
        self,
        identity: Identity,
        home: Path,
        store: Store,
        keys: JobKeys,
        look: Callable[[], JobMirror],
        changes: ChangeSignal,
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._home = home
        self._store = store
        self._keys = keys
        self._look = look
        self._clock = clock
        self._recorder = MetricsFileWriter(identity.incarnation, look, changes, self._warn, clock)
        self.samples = SampleWriter(identity.incarnation, self._warn)
        self.held_out = HeldOutPictures(identity.incarnation, look, changes, self.samples, self._warn, clock)
        self._writing: list[asyncio.Task[None]] = []
        self._trackers: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start the background tasks, which run until `finish` or `stop`. The job's record must have been read before."""
        job = self._look().job
        assert job is not None
        for work in (self._recorder.run(), self.samples.run(), self.held_out.run()):
            self._writing.append(start_background_task(work, "reading"))
        for tree in job.record.spec.get("tracking", []):
            tracker = TrackerSpec.model_validate(tree)
            keeper = TrackerProcess(
                self._identity.incarnation,
                self._home,
                tracker,
                self._look,
                self._recorder.told,
                self._warn,
                self._clock,
            )
            self._trackers.append(start_background_task(keeper.run(), f"tracker {tracker.name}"))

    def note(self, mirror: JobMirror, find_group: GroupLookup) -> None:
        """Pass a change of the job's records to the sample writer, which copies the groups of new batches.

        Must be called before this controller drops groups that are trained or discarded from its buffer.
        """
        self.samples.note(mirror, find_group)

    async def finish(self) -> None:
        """Write the remaining metrics, samples and the copy of the records of an ended job, then wait for the trackers.
        Takes a bounded time."""
        for task in self._writing:
            task.cancel()
        last = {"records": self._recorder.finish(), "samples": self.samples.write(), "copy": self._leave_copy()}
        last["held-out pictures"] = self.held_out.finish()
        await asyncio.wait([start_background_task(work, name) for name, work in last.items()])
        if self._trackers:
            await asyncio.wait(self._trackers, timeout=TrackerTimeouts().end_s + STOP_S)

    async def stop(self) -> None:
        """Stop immediately. Closes the input of tracker processes and waits for them."""
        tasks = [*self._writing, *self._trackers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave_copy(self) -> None:
        """Write a copy of the job's records to the run folder, so that the run can be audited without its cluster.

        Does nothing if another controller has written it.
        """
        mirror = self._look()
        run_dir, me = mirror.run_dir, self._identity.incarnation
        await self._clock.sleep(COPY_TURN_S * turn_of(mirror.members, me, "copy"))
        try:
            if await asyncio.to_thread(archive.has_copy, run_dir, mirror.head.record if mirror.head else None):
                return
            listing = await self._store.list(self._keys.prefix)
            await asyncio.to_thread(archive.write_copy, run_dir, me, mirror.keys.uid, listing)
        except (StoreUnavailable, OSError) as error:  # A later audit writes the copy.
            log.warning("the copy of the job's records was not written to the run folder: %s", error)

    async def _warn(self, topic: str, sentence: str) -> None:
        key = self._keys.trouble(topic)
        trouble = Trouble(topic=topic, node=self._identity.node, sentence=sentence, time=self._clock.wall())
        with contextlib.suppress(StoreUnavailable):  # The warning is in the log.
            await self._store.transact((), (Put(key, trouble.encode()),))


class MetricsFileWriter:
    """Appends the metrics of new steps and evaluations to `metrics.jsonl` of a run. `look`: returns the job's newest
    records.

    Every controller can write the file, but normally the first in the order of turns does. The next one writes if lines
    have been missing for longer than its delay in that order. The content of the file determines what is missing
    (`gcore.observability.metrics_file`); it is read in a thread, under a lock. When the job has ended, each controller
    checks once more, so that the last lines are written even if others died. A folder that is not writable is retried
    forever and reported once; it never ends a run.
    """

    def __init__(
        self, me: str, look: Callable[[], JobMirror], changes: ChangeSignal, warn: WarnPeople, clock: Clock
    ) -> None:
        self._me = me
        self._warn = warn
        self._look = look
        self._changes = changes
        self._clock = clock
        self._file: MetricsFile | None = None
        self._gaps = 0
        self._settled: JobMirror | None = None
        """The records for which the file was found complete, so that it is not checked again for the same ones."""
        self._trouble = ""
        self.told = ChangeSignal()
        """Notified when this controller has written new lines."""

    async def run(self) -> None:
        """Write missing lines, until cancelled."""
        behind: float | None = None
        while True:
            if not self._lacks():
                behind = None
                await self._changes.wait()
                continue
            now = self._clock.monotonic()
            behind = now if behind is None else behind
            wait = behind + TURN_SECONDS * turn_of(self._look().members, self._me, "metrics") - now
            if wait > 0:
                await self._changes.wait(timeout=wait)
            elif not await self._bring():
                await self._clock.sleep(RETRY_S)

    async def finish(self) -> None:
        """Write the last lines of an ended job, for at most `END_PATIENCE_S` seconds."""
        end = self._clock.monotonic() + END_PATIENCE_S
        while self._lacks() and self._clock.monotonic() < end:
            if not await self._bring():
                await self._clock.sleep(TURN_SECONDS / 4)

    def _lacks(self) -> bool:
        """Whether the file lacks lines that the job's records have."""
        mirror = self._look()
        if mirror is self._settled:
            return False
        source = _source(mirror)
        missing = source is not None and (self._file is None or has_missing_lines(self._file.written, source))
        self._settled = None if missing else mirror
        return missing

    async def _bring(self) -> bool:
        """Write the missing lines. False if another process has the file locked, or if it cannot be written or
        completed now."""
        source = _source(self._look())
        assert source is not None
        run_dir = Path(source.job.run_dir)
        file = self._file = self._file or MetricsFile(run_dir)
        whole, wall = self._gaps < GAP_PATIENCE, self._clock.wall()
        try:
            new = await asyncio.to_thread(file.bring, source, wall, lambda: archive.read_entries(run_dir), whole=whole)
        except FileBusy:
            return False
        except (OSError, ValueError) as error:
            self._gaps += isinstance(error, ValueError)
            if (trouble := f"{file.path} cannot be written: {error}") != self._trouble:
                self._trouble = trouble
                log.warning("%s", trouble)
                await self._warn("metrics", trouble)
            return False
        self._gaps, self._trouble = 0, ""
        if new:
            self.told.notify()
        return True


class SampleWriter:
    """Writes samples (prompts with responses and rewards) of each step to the run folder, from the groups that this
    controller generated.

    When the seal (the list of groups of a step) arrives, the writer copies some of its groups from the buffer. It
    writes them in a thread once the batch is READY (all train ranks have it) or committed, and nothing for an abandoned
    batch. A step must not wait for samples, so if writing fails they are lost, and the error is reported once until
    writing works again.
    """

    def __init__(self, me: str, warn: WarnPeople) -> None:
        self._me = me
        self._warn = warn
        self._in_trouble = False
        self._stream: PromptStream | None = None
        self.spec: JobSpec | None = None
        """The job's spec; None before `open`."""
        self._held: dict[Token, tuple[_Held, ...]] = {}
        self._ready: deque[tuple[Version, tuple[_Held, ...]]] = deque(maxlen=MOST_WAITING)
        self._changes = ChangeSignal()
        self._run_dir = Path()
        self.blobs: Path | None = None
        self.has_room = True
        """Whether the disk has space for more samples; set by the owner. If false, no more groups are copied."""

    def open(self, spec: JobSpec, stream: PromptStream, run_dir: Path, blobs: Path | None = None) -> None:
        """Set the spec, the prompt stream and the run folder. Samples are only kept after this call. `blobs`: folder of
        the job in this node's blob store; None: prompts have no pictures."""
        self.spec, self._stream, self._run_dir, self.blobs = spec, stream, run_dir, blobs

    def note(self, mirror: JobMirror, find_group: GroupLookup) -> None:
        """Process a change of the job's records: copy groups of new seals, and queue those of READY or committed
        batches for writing.

        `find_group`: finds a group in this controller's buffer. Must be called before trained or discarded groups leave
        the buffer.
        """
        if self.spec is None or mirror.head is None:
            return
        for stored in mirror.seals.values():
            seal = stored.record
            sealed = seal.state in (SealState.SEALED, SealState.READY)
            if self.has_room and sealed and seal.token not in self._held and self.spec.samples.due(seal.step):
                self._held[seal.token] = tuple(self._mine(seal, find_group))
        if not self._held:
            return
        head = mirror.head.record
        ready = {s.record.token for s in mirror.seals.values() if s.record.state is SealState.READY}
        ready |= {s.record.token for s in mirror.log.values() if s.record.token is not None}
        for token in list(self._held):
            if token in ready:
                held = self._held[token]
                if held:
                    self._ready.append((Version(token.lineage, token.step), held))
                    self._changes.notify()
                self._held[token] = ()  # Write it only once.
            if token.lineage != head.lineage or token.step <= head.step:
                del self._held[token]

    async def run(self) -> None:
        """Write samples when they are ready, until cancelled."""
        while True:
            await self.write()
            await self._changes.wait()

    async def write(self) -> None:
        """Write the samples that are ready now."""
        while self._ready:
            version, held = self._ready.popleft()
            try:
                await asyncio.to_thread(self._write, version, held)
            except OSError as error:
                told = f"the samples of step {version.step} were not written: {error}"
                log.warning("%s", told)
                if not self._in_trouble:
                    self._in_trouble = True
                    await self._warn("samples", told)
            else:
                self._in_trouble = False

    def _mine(self, seal: Seal, find_group: GroupLookup) -> list[_Held]:
        """The groups of a seal that are chosen as samples and that this controller holds."""
        assert self._stream is not None
        assert self.spec is not None
        found = []
        for sealed in choose_groups(seal, self.spec.samples.groups):
            group = find_group(sealed.digest) if sealed.holder == self._me else None
            if group is not None:
                found.append(_Held(group, sealed.digest, *self._stream.found(sealed.ref)))
        return found

    def _write(self, version: Version, held: tuple[_Held, ...]) -> None:
        assert self.spec is not None
        samples = self.spec.samples
        groups = [self._kept(one, samples.characters) for one in held]
        write_samples(self._run_dir, version, self._me, groups)
        prune_steps(self._run_dir, samples.keep)
        if self.blobs is not None and samples.picture_mib:
            most = samples.picture_mib << 20
            keep_pictures(step_folder(self._run_dir, version), choose_pictures(groups, most), self.blobs)
            prune_pictures(self._run_dir, most)

    def _kept(self, held: _Held, characters: int) -> KeptGroup:
        try:
            prompt = held.source.unfiltered(held.entry, held.group.ref)
            text, answer = prompt.text, entry_text(prompt.fields, held.source.source.reward.answer)
        except GcoreError as error:
            text, answer = f"(the prompt cannot be read: {error})", ""
        return make_kept_group(held.group, held.digest, text, answer, self._me, characters)


class HeldOutPictures:
    """Keeps the pictures that the policy generated for held-out prompts, and draws the contact sheet of the run: the first,
    the best and the newest evaluation side by side. `samples`: has the settings; writes no pictures without room.

    Each controller links the displayed pictures that its blob store has, as soon as a part of an evaluation is recorded.
    The first controller in the order of turns draws the sheet; the next ones draw it if it is still missing. The sheet
    names its evaluations, so it is drawn once for them. Nodes that share no folder draw one each, with their own pictures.
    If a file cannot be written, it is missing, and the error is reported.
    """

    def __init__(
        self,
        me: str,
        look: Callable[[], JobMirror],
        changes: ChangeSignal,
        samples: SampleWriter,
        warn: WarnPeople,
        clock: Clock,
    ) -> None:
        self._me = me
        self._look = look
        self._changes = changes
        self._samples = samples
        self._warn = warn
        self._clock = clock
        self._noted: tuple[object, object] = (None, None)
        self._known: set[tuple[Version, str]] = set()
        self._drawn = ""
        """Names the evaluations of the newest sheet that this controller drew or found."""

    async def run(self) -> None:
        """Keep pictures and draw the sheet when there are new ones, until cancelled."""
        since: float | None = None
        while True:
            seen = self._changes.count
            await self._keep()
            if self._missing_sheet() is None:
                since = None
                if self._changes.count == seen:
                    await self._changes.wait()
                continue
            now = self._clock.monotonic()
            since = now if since is None else since
            turn = since + TURN_SECONDS * turn_of(self._look().members, self._me, "sheet")
            if now < turn:
                await self._changes.wait(timeout=turn - now)
            elif not await self._draw(patient=now < turn + SHEET_PATIENCE_S):
                await self._clock.sleep(SHEET_RETRY_S)

    async def finish(self) -> None:
        """Keep the last pictures and draw the last sheet of an ended job. Takes a bounded time."""
        await self._keep()
        if self._missing_sheet() is not None:
            await self._clock.sleep(COPY_TURN_S * turn_of(self._look().members, self._me, "sheet"))
            if not await self._draw(patient=True):  # another controller is keeping its pictures now
                await self._clock.sleep(SHEET_RETRY_S)
                await self._draw(patient=False)

    @property
    def _most_bytes(self) -> int:
        """The bound for all pictures of the run; 0 for a job that keeps none."""
        spec = self._samples.spec
        if spec is None or spec.rollout.diffusion is None or not self._samples.has_room:
            return 0
        return spec.samples.picture_mib << 20

    async def _keep(self) -> None:
        """Link the pictures that are new in the records."""
        mirror, blobs = self._look(), self._samples.blobs
        noted = (mirror.eval_parts, mirror.evaluations)
        if blobs is None or not self._most_bytes or (noted[0] is self._noted[0] and noted[1] is self._noted[1]):
            return
        self._noted = noted
        parts = (stored.record for stored in mirror.eval_parts.values())
        shown = [(part.version, sha256) for part in parts for sha256 in self._fitting(part.shown, part.first)]
        every = (stored.record for stored in mirror.evaluations.values())
        shown += [(one.version, sha256) for one in every for sha256 in self._fitting(one.samples)]
        new: dict[Version, list[str]] = {}
        for version, sha256 in shown:
            if (version, sha256) not in self._known:
                new.setdefault(version, []).append(sha256)
        self._known = set(shown)
        if new:
            await self._write("the pictures of an evaluation were not kept", partial(self._link, mirror, new, blobs))

    def _fitting(self, samples: Sequence[EvalSample], first: int = 0) -> Iterator[str]:
        """The SHA-256 of the pictures of the first prompts, so many that several evaluations fit into the bound. So all keep
        the same prompts. `first`: index of the first sample in its set."""
        assert self._samples.spec is not None
        sets = len(self._samples.spec.eval.drawn)
        room = self._most_bytes // EVALUATION_SHARE // EVALUATIONS_WHOLE // max(sets, 1)
        places = Counter[str]()
        for sample in samples:
            place = first + places[sample.source]
            places[sample.source] += 1
            if sample.picture is not None and (place == 0 or (place + 1) * sample.picture.size <= room):
                yield sample.picture.sha256

    def _link(self, mirror: JobMirror, new: Mapping[Version, Sequence[str]], blobs: Path) -> bool:
        for version, names in new.items():
            keep_pictures(evaluation_folder(mirror.run_dir, version), names, blobs)
        chosen = [one.version for one in self._chosen(mirror)]
        spared = dict.fromkeys([*chosen[:1], *sorted(new, reverse=True), *reversed(chosen)])
        prune_evaluations(mirror.run_dir, self._most_bytes, list(spared))
        return True

    def _chosen(self, mirror: JobMirror) -> list[Evaluation]:
        """The evaluations of the sheet."""
        assert self._samples.spec is not None
        if mirror.head is None:
            return []
        every = (stored.record for stored in mirror.evaluations.values())
        return evaluations_with_pictures(mirror.head.record, every, self._samples.spec.best_metric)

    def _missing_sheet(self) -> str | None:
        """Names the evaluations of the sheet that is not drawn yet; None if there is none to draw."""
        if not self._most_bytes:
            return None
        name = " ".join(str(one.version) for one in self._chosen(self._look()))
        return name if name not in ("", self._drawn) else None

    async def _draw(self, *, patient: bool) -> bool:
        """Draw the sheet, unless another controller has drawn it. False if pictures are missing, which others may still
        add; without `patient` it is drawn without them."""
        mirror, name = self._look(), self._missing_sheet()
        if name is None:
            return True
        return await self._write(
            "the contact sheet was not drawn", partial(self._draw_now, mirror, name, patient=patient)
        )

    def _draw_now(self, mirror: JobMirror, name: str, *, patient: bool) -> bool:
        run_dir, job = mirror.run_dir, mirror.job_record
        if read_stamp(run_dir / SHEET_FILE) != name:
            steps = [sheet_step(one, run_dir) for one in self._chosen(mirror)]
            if patient and any(picture.file is None for step in steps for picture in step.pictures):
                return False
            title = f"{job.full_name} ({job.uid})"
            replace_file(run_dir / SHEET_FILE, draw_sheet(title, [held_out_section(steps)], stamp=name))
        self._drawn = name
        return True

    async def _write(self, trouble: str, work: Callable[[], bool]) -> bool:
        """Run `work` in a thread. True if it returned True, or failed, which is reported; it is not repeated."""
        try:
            return await asyncio.to_thread(work)
        except (OSError, DataError) as error:
            self._drawn = self._missing_sheet() or self._drawn
            log.warning("%s: %s", trouble, error)
            await self._warn("held-out-pictures", f"{trouble}: {error}")
            return True


@dataclass(frozen=True, slots=True)
class _Held:
    """A group that was chosen as a sample, until it is written. `entry`: number of its prompt in `source`."""

    group: Group
    digest: str
    source: PromptSource
    entry: int


def _source(mirror: JobMirror) -> MetricsSource | None:
    """The records from which the metrics file is written; None before the job record is known."""
    if mirror.job is None:
        return None
    return MetricsSource(
        mirror.job.record,
        mirror.status.record if mirror.status else None,
        {seq: stored.record for seq, stored in mirror.log.items()},
        {id_: stored.record for id_, stored in mirror.evaluations.items()},
    )


def start_background_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task. An exception in it is logged and does not affect the caller. `name`: for the log."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_defect)
    return task


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (defect := task.exception()) is not None:
        log.error(
            "background task %r of the run recorder failed and is not restarted", task.get_name(), exc_info=defect
        )
