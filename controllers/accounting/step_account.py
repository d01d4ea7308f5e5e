"""The slot account of one job on one node: turns readings of engines and messages of ranks into the accounts of steps.

The window of a step begins when this node learned of the previous commit, and ends when it learned of the commit of the
step, by the node's own clock. A rollback ends a window like a commit. A step is closed (its account is final) when
every responding engine was read after the end of the window and ranks had `REPORT_DELAY_S` to report. After
`PATIENCE_S` it is closed in any case, and missing time is unbooked. An engine's time counts on each slot that it spans.

An engine that does not respond for `UNREACHABLE_S` counts as `failed` from the first failed reading on. The time
between its last reading and that moment stays unbooked. Time in which this controller was absent (`UnwatchedInterval`)
is reported by the workers themselves if they still serve. A worker that was there before and is gone counts as failed
for all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType

from controllers.accounting.attribution import (
    Attribution,
    RankReports,
    VacantPlaces,
    engine_reports,
    make_attributions,
    own_workers,
    slots_left_by_ranks,
    step_phase,
)
from controllers.accounting.states import (
    FAILED,
    UNALLOCATED,
    IdleCause,
    SlotAccount,
    State,
    Timeline,
    TimeReport,
    add_times,
    idle,
)
from controllers.rules.memory import engines_asleep_for_ranks
from controllers.rules.view import JobView
from gcore.config.spec import JobSpec
from gcore.ledger.records.slot_accounting import (
    MOST_SWITCHES,
    AccountLine,
    EngineSums,
    Span,
    StepAccount,
    WorkerTotals,
)
from gcore.ledger.transactions import Versioned
from gcore.rollout.engine_time import ALMOST_S, EngineReading, EngineTime, EngineTimeSums, time_between
from gcore.types import Pool, Version
from gcore.worker.records import WorkerRecord
from placement.measurements import load_class

COUNTED = ("tokens", "requests")

REPORT_DELAY_S = 0.15
"""Maximum delay of a rank's message about a phase change, in seconds."""

PATIENCE_S = 5.0
"""Seconds that an ended step waits for engines that have not been read yet."""

UNREACHABLE_S = 1.5
"""Seconds for which an engine still counts as responding after a failed reading, because a connection may break
once."""

SHORTEST_S = 1e-3
"""A window that is shorter (seconds) is not counted as a step: several commits were received at once."""


class UnwatchedInterval:
    """The time in which no controller watched this node: from the last step that an earlier run of the controller
    closed until this run began. Collects what workers report about it. Mutable.

    A worker that was there before and still serves reports its time itself; the step waits for it. One that does not
    report any more counts as failed: it is gone, was ending before it could be read, belongs to an earlier train world,
    or does not respond. A slot that had no worker then and has none now was `unallocated`, or `failed` if the plan has
    a place there.

    A worker that started in the interval reports its time since its start; the step waits for the first message of such
    a rank too. Time before a worker started, and time of workers without totals, stays unbooked. The interval is empty
    if `begin` and `end` are equal.
    """

    def __init__(self, begin: float, end: float, kept: Mapping[str, WorkerTotals]) -> None:
        """`kept`: totals at `begin` of the workers that were present then."""
        self._begin = begin
        self._end = end
        self._silent: dict[str, tuple[str, ...]] = {instance: (one.slot,) for instance, one in kept.items()}
        self._fresh: set[str] = set()
        """Ranks that started in the interval and have not reported yet."""
        self._is_seen = end <= begin

    @property
    def is_seen(self) -> bool:
        """Whether `look` was called, so that the present workers are known."""
        return self._is_seen

    def look(self, view: JobView, here: Mapping[str, WorkerRecord]) -> Iterator[tuple[str, TimeReport]]:
        """Compare the workers that were present before with the present ones. Yield (slot, report) for what this shows.
        `here`: the job's workers on this node."""
        self._is_seen = True
        plan, node = view.mirror.plan, view.nodes.get(view.node)
        planned = set()
        if plan is not None:
            planned = {slot for place in plan.record.engines if place.node == view.node for slot in place.slots}
            planned |= {rank.slot for rank in plan.record.ranks if rank.node == view.node}
        self._silent |= {instance: here[instance].slots for instance in self._silent.keys() & here.keys()}
        serving = {
            instance for instance, worker in here.items() if worker.role == "train" and worker.state == "serving"
        }
        self._fresh = serving - self._silent.keys()
        taken = {slot for worker in here.values() for slot in worker.slots}
        taken |= {slot for slots in self._silent.values() for slot in slots}
        for slot in node.slots if node is not None else ():
            if slot not in taken:
                yield slot, self._report("nobody", FAILED if slot in planned else UNALLOCATED)
        for instance in [name for name in self._silent if name not in here or here[name].state != "serving"]:
            yield from self.lost(instance)

    def waits(self, silent: Collection[str]) -> bool:
        """Whether a worker may still report its time in the interval. `silent`: workers that do not respond."""
        return not self._is_seen or bool((self._silent.keys() | self._fresh) - set(silent))

    def heard(self, instance: str) -> None:
        """Record that a worker has reported its time in the interval."""
        self._silent.pop(instance, None)
        self._fresh.discard(instance)

    def lost(self, instance: str) -> Iterator[tuple[str, TimeReport]]:
        """Record that a worker will not report any more. Yield (slot, report) that it failed."""
        self._fresh.discard(instance)
        for slot in self._silent.pop(instance, ()):
            yield slot, self._report(instance, FAILED)

    def close(self) -> Iterator[tuple[str, TimeReport]]:
        """Stop waiting: yield (slot, report) that the workers which have not reported failed."""
        for instance in list(self._silent):
            yield from self.lost(instance)

    def _report(self, worker: str, state: State) -> TimeReport:
        return TimeReport(worker, self._begin, self._end, {state: self._end - self._begin})


class EngineWork:
    """Work of this node's engines in a step (active seconds, requests, tokens), summed by pool and load. Mutable."""

    def __init__(self) -> None:
        self.sums: dict[str, EngineSums] = {}
        """Sums of all loads, by pool."""
        self._loads: dict[str, dict[int, EngineSums]] = {}

    @property
    def loads(self) -> dict[str, tuple[EngineSums, ...]]:
        """Sums of each pool by the mean number of concurrent requests: about 1, 2 to 3, 4 to 7 and so on."""
        return {pool: tuple(found for _, found in sorted(by_load.items())) for pool, by_load in self._loads.items()}

    def add(self, pool: Pool, passed: EngineTime, begin: float, end: float) -> None:
        """Add the part of an engine's work that lies between two moments, as if the work were spread evenly."""
        share = (min(passed.end, end) - max(passed.begin, begin)) / (passed.end - passed.begin)
        if share <= 0:
            return
        part = EngineSums(
            active_s=passed.active_s * share,
            running_s=passed.running_s * share,
            tokens=round(passed.tokens * share),
            requests=round(passed.requests * share),
        )
        self.sums[pool] = self.sums[pool].plus(part) if pool in self.sums else part
        if part.active_s > 0:
            load = load_class(passed.running_s / passed.active_s)
            by_load = self._loads.setdefault(pool, {})
            by_load[load] = by_load[load].plus(part) if load in by_load else part


def reading_at_start(reading: EngineReading, since: float, came: float | None = None) -> EngineReading | None:
    """Reconstruct the reading with which to compare the first `reading` of an engine: its totals when it started, which
    are zero. None if it started before `since`, or this is not known.

    If it started before `since` but was seen to begin to serve at `came`, return its totals at `came` (or at `since`,
    if that is later). It had no request before, so it was idle or asleep.
    """
    sums = reading.sums
    if sums is None:
        return None
    life = sums.busy_s + sums.idle_s + sums.paused_s + sums.asleep_s
    if reading.at - life >= since:
        return EngineReading(reading.at - life, type(sums)(sums.at - life), 0.0, 0.0, 0, 0)
    begin = None if came is None else max(since, came)
    if begin is None or begin >= reading.at:
        return None
    rested = life - (reading.at - begin)
    idle_s = min(sums.idle_s, rested)
    asleep_s = rested - idle_s
    if asleep_s > sums.asleep_s + ALMOST_S:
        return None
    return EngineReading(begin, type(sums)(sums.at - life + rested, idle_s=idle_s, asleep_s=asleep_s), 0.0, 0.0, 0, 0)


def engine_totals(slot: str, reading: EngineReading) -> WorkerTotals:
    """Convert a reading of an engine to the stored form of its totals."""
    assert reading.sums is not None
    counted = {name: float(getattr(reading, name)) for name in COUNTED}
    return WorkerTotals(slot, reading.at, {**asdict(reading.sums), **counted})


def reading_from_totals(kept: WorkerTotals) -> EngineReading | None:
    """Convert stored totals to a reading of an engine; None if they are not those of an engine."""
    try:
        sums = EngineTimeSums(**{one.name: kept.sums[one.name] for one in fields(EngineTimeSums)})
        return EngineReading(kept.at, sums, 0.0, 0.0, *(int(kept.sums[name]) for name in COUNTED))
    except KeyError:
        return None


@dataclass(frozen=True)
class ClosedStep:
    """The final account of a step. For the trace: `phases` of the job and `spans` (intervals with states) by slot, in
    seconds since the begin of the step. `kept`: totals of the workers at its end."""

    book: StepAccount
    phases: tuple[Span, ...]
    spans: Mapping[str, tuple[Span, ...]]
    kept: Mapping[str, WorkerTotals]

    def line(self, node: str) -> AccountLine:
        """Return the line for the file of accounts of this node."""
        return AccountLine(node, self.book, self.phases, self.spans, self.kept)


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """The end of a step that is not closed yet. `at`: monotonic time; `wall`: the same in seconds since the epoch.
    `version`: the step. `work`: work of engines in it. `kept`: last totals before the end of those workers that have
    reported since."""

    at: float
    wall: float
    version: Version
    work: EngineWork
    kept: dict[str, WorkerTotals] = field(default_factory=dict)

    def passed(self, instance: str, before: WorkerTotals, at: float) -> None:
        """Record that a worker has reported at the time `at`. `before`: totals at its previous report."""
        if before.at <= self.at < at:
            self.kept[instance] = before


def close_step(
    slots: Mapping[str, SlotAccount], boundary: StepBoundary, begun: float, began: float
) -> tuple[StepAccount, dict[str, tuple[Span, ...]]]:
    """Make the account of the step that ends at `boundary`, from slots that are settled up to it. Return it with the
    intervals by slot. `begun`, `began`: begin of the step in monotonic seconds and in seconds since the epoch."""
    booked: dict[State, float] = {}
    unbooked = overbooked = 0.0
    switches: dict[str, tuple[float, ...]] = {}
    spans = {}
    for slot, account in sorted(slots.items()):
        times = account.close()
        booked = add_times(booked, times.booked)
        unbooked += times.unbooked
        overbooked += times.overbooked
        for change, took in times.switches.items():
            switches[change] = (*switches.get(change, ()), *took)[-MOST_SWITCHES:]
        spans[slot] = tuple(Span(span.begin - begun, span.end - begun, span.seconds) for span in times.spans)
    step = StepAccount(
        version=boundary.version,
        began=began,
        seconds=boundary.at - begun,
        slots=len(slots),
        booked={state: round(seconds, 6) for state, seconds in booked.items() if seconds > 0},
        unbooked=unbooked,
        overbooked=overbooked,
        engines=boundary.work.sums,
        loads=boundary.work.loads,
        switches=switches,
    )
    return step, spans


@dataclass
class _Engine:
    """A serving engine. `rows`: maximum of concurrent requests. `line`: its attribution over time. `came`: when it was
    seen to begin to serve; None: it served before that. `last`: last reading. `failing`: since when readings fail."""

    worker: WorkerRecord
    rows: int
    line: Timeline[Attribution]
    came: float | None = None
    last: EngineReading | None = None
    failing: float | None = None


class StepAccountBuilder:
    """Builds the account of each step from readings of engines and messages of ranks."""

    def __init__(
        self,
        spec: JobSpec,
        now: float,
        wall: float,
        *,
        head: Version | None = None,
        gap_s: float = 0.0,
        kept: Mapping[str, WorkerTotals] = MappingProxyType({}),
    ) -> None:
        """`now`, `wall`: monotonic time and seconds since the epoch. `head`: the newest version. `gap_s`: seconds for
        which no controller ran here, since an earlier run. `kept`: totals of workers at the end of that run. Idle time
        in the gap counts as `no_work`, because no work was given."""
        self._spec = spec
        self._since = now
        self._kept = {instance: one for instance, one in kept.items() if one.at <= now}
        self._begun = now - gap_s
        self._gap = UnwatchedInterval(self._begun, now, self._kept)
        self._began = wall - gap_s
        self._slots: dict[str, SlotAccount] = {}
        self._engines: dict[str, _Engine] = {}
        self._served: set[str] = set()
        """Engines that have served, including those that are gone."""
        self._ranks: dict[str, tuple[str, RankReports, Timeline[Attribution]]] = {}
        """Train ranks by instance: slot, reports, and attribution over time."""
        self._places = VacantPlaces()
        self._work = EngineWork()
        """Work of engines since the end of the newest step."""
        self._boundaries: deque[StepBoundary] = deque()
        self._head = head
        self._phase = Timeline("start", now)
        self._seen: tuple[object, ...] | None = None
        self._placed: tuple[object, ...] | None = None
        """The input from which vacant places were last computed; `_seen`: that of attributions."""

    @property
    def engines(self) -> Mapping[str, str]:
        """The engines to read: address by instance."""
        return {instance: engine.worker.address for instance, engine in self._engines.items()}

    @property
    def unread(self) -> frozenset[str]:
        """Engines that were not read since the end of the oldest step that is not closed."""
        if not self._boundaries:
            return frozenset()
        at = self._boundaries[0].at
        return frozenset(
            instance for instance, engine in self._engines.items() if engine.last is None or engine.last.at < at
        )

    @property
    def is_behind(self) -> bool:
        """Whether an ended step is not closed yet."""
        return bool(self._boundaries)

    def head_moved(self, version: Version, now: float, wall: float) -> None:
        """Record that head has moved to `version`, so that a step has ended."""
        if self._head != version:
            self._head = version
            self._boundaries.append(StepBoundary(now, wall, version, self._work))
            self._work = EngineWork()

    def update(self, view: JobView, cause: IdleCause, now: float) -> None:
        """Update the state of the job from a new view, and process new messages of ranks. `cause`: why idle workers are
        idle."""
        self._phase.set(step_phase(view, cause), now)
        here = view.remembered.get("mine here", (view.workers,), lambda: own_workers(view))
        # Most updates change nothing of this, and a node may have many engines.
        turn, resting = engines_asleep_for_ranks(view), frozenset(r for r, rank in view.ranks.items() if rank.released)
        seen = (here, view.mirror.plan, view.mirror.head, cause, view.engines, view.under_way, turn, resting)
        if self._seen is None or not _same(seen, self._seen):
            came = None if self._seen is None else now
            self._seen = seen
            self._set_attributions(here, make_attributions(view, here, cause), now, came)
        if not self._gap.is_seen:
            self._add_all(self._gap.look(view, here))
        plan, node = view.mirror.plan, view.nodes.get(view.node)
        left = slots_left_by_ranks(view, here, turn)
        placed = (here, plan, node, view.mirror.head is None, left)
        if self._placed is None or not _same(placed, self._placed):
            self._placed = placed
            self._places.update(view, here, now, left)
            for slot in self._places.slots:
                self._slot(slot)
        for instance, (slot, claims, line) in self._ranks.items():
            worker = here[instance]
            rank = view.ranks.get(worker.rank) if worker.rank is not None else None
            if rank is not None and view.mirror.head is not None and worker.world == view.head.world:
                before = claims.totals
                self._add((slot,), *claims.receive(rank, line))
                if claims.totals is not None:
                    self._gap.heard(instance)
                if claims.totals is not None and before is not None:
                    for ended in self._boundaries:
                        ended.passed(instance, WorkerTotals(slot, *before), claims.totals[0])

    def _set_attributions(
        self, here: Mapping[str, WorkerRecord], found: Mapping[str, Attribution], now: float, came: float | None
    ) -> None:
        """Set how the time of each serving worker counts from `now` on (`found`); add new workers and remove those that
        are gone. `came`: when new engines began to serve, if known."""
        for instance, meaning in found.items():
            worker = here[instance]
            if worker.role == "train":
                if instance not in self._ranks:
                    claims = RankReports(instance, self._kept.get(instance), None if self._gap.is_seen else self._begun)
                    self._ranks[instance] = worker.slot, claims, self._line(worker, meaning, now)
                self._ranks[instance][2].set(meaning, now)
            elif instance in self._engines:
                self._engines[instance].line.set(meaning, now)
            else:
                last = reading_from_totals(self._kept[instance]) if instance in self._kept else None
                is_new = instance not in self._served  # otherwise it may have had requests before
                self._served.add(instance)
                self._engines[instance] = _Engine(
                    worker, self._rows(worker), self._line(worker, meaning, now), came if is_new else None, last=last
                )
        self._kept = {}
        for gone in self._engines.keys() - found.keys():
            self._add_all(self._gap.lost(gone))
            self._add_failing(gone, self._engines.pop(gone), now)
        for gone in self._ranks.keys() - found.keys():
            self._add_all(self._gap.lost(gone))
            slot, claims, line = self._ranks.pop(gone)
            self._add((slot,), *claims.extend(now, line))

    def engine_read(self, instance: str, reading: EngineReading) -> None:
        """Add the time and work of an engine since its previous reading."""
        engine = self._engines.get(instance)
        if engine is None:
            return
        engine.failing = None
        before, engine.last = engine.last or reading_at_start(reading, self._begun, engine.came), reading
        passed = time_between(before, reading, engine.rows) if before is not None else None
        if passed is not None and before is not None:
            self._gap.heard(instance)
            pool, begin = engine.worker.role, self._begun
            self._add(engine.worker.slots, *engine_reports(instance, pool, passed, engine.line))
            for ended in self._boundaries:
                ended.work.add(pool, passed, begin, ended.at)
                begin = ended.at
                if before.sums is not None:
                    ended.passed(instance, engine_totals(engine.worker.slot, before), reading.at)
            self._work.add(pool, passed, begin, passed.end)
            engine.line.forget(passed.end)

    def engine_unreachable(self, instance: str, asked_at: float) -> None:
        """Record that an engine did not respond to a reading that was sent at `asked_at`."""
        engine = self._engines.get(instance)
        if engine is not None and engine.failing is None:
            engine.failing = asked_at

    def close(self, now: float, *, final: bool = False) -> list[ClosedStep]:
        """Close the steps for which all reports have arrived or are overdue; return them, oldest first. `final`: no
        more reports will arrive.

        A controller that was absent closes no step before its first `update`, because only then it knows which workers
        report time before it began.
        """
        if not self._gap.is_seen and not final:
            return []
        failing = {
            name
            for name, one in self._engines.items()
            if one.failing is not None and one.failing <= now - UNREACHABLE_S
        }
        answering = [engine for instance, engine in self._engines.items() if instance not in failing]
        reported = min(
            (engine.last.at if engine.last is not None else self._begun for engine in answering), default=now
        )
        if now < self._since + PATIENCE_S and self._gap.waits(failing):
            reported = self._begun
        until = now if final else min(reported, now - REPORT_DELAY_S)
        closed = []
        while self._boundaries and (self._boundaries[0].at <= until or self._boundaries[0].at <= now - PATIENCE_S):
            boundary = self._boundaries.popleft()
            self._settle(boundary.at)
            # Before the first update no slot is known, and the job's start may be over by then.
            if self._placed is not None and boundary.at - self._begun >= SHORTEST_S:
                closed.append(self._closed(boundary))
            self._begun, self._began = boundary.at, boundary.wall
        if not self._boundaries:
            self._settle(until)
        return closed

    def _rows(self, worker: WorkerRecord) -> int:
        """Maximum of concurrent requests of an engine."""
        if not worker.judge:
            return self._spec.rollout.batch_slots
        judge = next((one for one in self._spec.judges if one.name == worker.judge), None)
        return judge.serving.batch_slots if judge is not None else self._spec.rollout.batch_slots

    def _slot(self, slot: str) -> SlotAccount:
        return self._slots.setdefault(slot, SlotAccount(self._begun))

    def _line(self, worker: WorkerRecord, meaning: Attribution, now: float) -> Timeline[Attribution]:
        """Return the attribution over time of a new worker: `meaning` from now on. Before that, in an unwatched
        interval, idle time counts as `no_work`."""
        if self._gap.is_seen:
            return Timeline(meaning, now)
        line = Timeline(Attribution(idle(worker.role, "no_work"), UNALLOCATED), self._begun)
        line.set(meaning, now)
        return line

    def _add(self, slots: Iterable[str], *reports: TimeReport) -> None:
        for slot in slots:
            for report in reports:
                self._slot(slot).add(report)

    def _add_all(self, reports: Iterable[tuple[str, TimeReport]]) -> None:
        for slot, report in reports:
            self._add((slot,), report)

    def _add_failing(self, instance: str, engine: _Engine, until: float) -> None:
        """Report an engine whose readings fail as failed up to `until`."""
        if engine.failing is not None and engine.failing < until:
            for slot in engine.worker.slots:
                begin = max(engine.failing, self._slot(slot).settled_until)
                self._add((slot,), TimeReport(instance, begin, until, {FAILED: until - begin}))

    def _settle(self, until: float) -> None:
        """Assign the time of all slots up to `until` to states."""
        if until > self._begun:
            self._add_all(self._gap.close())
        for slot, claims, line in self._ranks.values():
            self._add((slot,), *claims.extend(until, line))
            line.forget(until)
        for instance, engine in self._engines.items():
            self._add_failing(instance, engine, until)
        settled = {slot: max(self._slot(slot).settled_until, self._since) for slot in self._places.slots}
        self._add_all(self._places.reports(settled, until))
        for account in self._slots.values():
            account.settle(until)

    def _closed(self, boundary: StepBoundary) -> ClosedStep:
        book, spans = close_step(self._slots, boundary, self._begun, self._began)
        return ClosedStep(book, tuple(self._phases_until(boundary.at)), spans, dict(self._keeping(boundary)))

    def _keeping(self, boundary: StepBoundary) -> Iterator[tuple[str, WorkerTotals]]:
        """Yield the totals of each worker at the end of the step, for a later run of the controller."""
        for instance, engine in self._engines.items():
            if instance in boundary.kept:
                yield instance, boundary.kept[instance]
            elif engine.last is not None and engine.last.sums is not None:
                yield instance, engine_totals(engine.worker.slot, engine.last)
        for instance, (slot, claims, _) in self._ranks.items():
            if instance in boundary.kept:
                yield instance, boundary.kept[instance]
            elif (said := claims.totals) is not None:
                yield instance, WorkerTotals(slot, said[0], said[1])

    def _phases_until(self, until: float) -> Iterator[Span]:
        """Yield the phases of the job in the step that ends at `until`."""
        begin = 0.0
        for phase, seconds in self._phase.between(self._begun, until):
            yield Span(begin, begin + seconds, {phase: seconds})
            begin += seconds
        self._phase.forget(until)


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether two tuples of inputs are equal. Stored records are compared by identity, which is fast."""
    return all(a is b or (not isinstance(a, Versioned) and a == b) for a, b in zip(one, other, strict=True))
