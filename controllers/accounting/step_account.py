"""The account of one job on one node: readings of engines and ranks in, closed steps out.

A step's window begins when this node learned that head moved to the previous version, and ends when it learned of this
version, on the node's own clock. A rollback ends a window like a commit. A step is closed when every responding engine
was read after the window's end and ranks had `REPORT_DELAY_S` to report; after `PATIENCE_S` in any case, with missing
time unbooked. An engine's time counts on each slot that it spans.

An engine that does not respond for `UNREACHABLE_S` is `failed` from the first failed reading on. The time between its
last reading and that moment stays unbooked. Time for which this controller was absent (`UnwatchedInterval`) is reported
by the workers themselves if they still serve. A worker that was present before and is gone counts as failed for all of
it.
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
"""Maximum delay of a rank's message about a phase change."""

PATIENCE_S = 5.0
"""How long a step waits for an engine that should have been read."""

UNREACHABLE_S = 1.5
"""How long an engine counts as responding after a failed reading, because a connection may break once."""

SHORTEST_S = 1e-3
"""A shorter window is not a step: several changes were received at once."""


class UnwatchedInterval:
    """The time for which this controller was absent: from the last step that its previous incarnation closed until this
    one began. Mutable.

    A worker that was present then and still serves reports its time itself; the step waits for it. A worker that was
    present and does not report any more has failed: it is gone, was ending before it could be read, is of an earlier
    train world, or does not respond. A slot without a worker then and now was `unallocated`, or has failed if the plan
    has a place there.

    The totals of a worker that started later include its start time; a rank's first message is waited for, too. Time
    before a worker started, and time of workers without totals, stays unbooked. The interval is empty if `begin` and
    `end` are equal.
    """

    def __init__(self, begin: float, end: float, kept: Mapping[str, WorkerTotals]) -> None:
        """`kept`: totals of the workers that were present at its begin."""
        self._begin = begin
        self._end = end
        self._silent: dict[str, tuple[str, ...]] = {instance: (one.slot,) for instance, one in kept.items()}
        self._fresh: set[str] = set()
        """Ranks that started since."""
        self._is_seen = end <= begin

    @property
    def is_seen(self) -> bool:
        """Whether `look` was called with the present workers."""
        return self._is_seen

    def look(self, view: JobView, here: Mapping[str, WorkerRecord]) -> Iterator[tuple[str, TimeReport]]:
        """Yield, by slot, what the present workers show. `here`: the job's workers on this node."""
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
        """Whether a worker may still report. `silent`: workers that do not respond."""
        return not self._is_seen or bool((self._silent.keys() | self._fresh) - set(silent))

    def heard(self, instance: str) -> None:
        """Record that a worker has reported its time."""
        self._silent.pop(instance, None)
        self._fresh.discard(instance)

    def lost(self, instance: str) -> Iterator[tuple[str, TimeReport]]:
        """Record that a worker will not report any more."""
        self._fresh.discard(instance)
        for slot in self._silent.pop(instance, ()):
            yield slot, self._report(instance, FAILED)

    def close(self) -> Iterator[tuple[str, TimeReport]]:
        """End the wait for reports."""
        for instance in list(self._silent):
            yield from self.lost(instance)

    def _report(self, worker: str, state: State) -> TimeReport:
        return TimeReport(worker, self._begin, self._end, {state: self._end - self._begin})


class EngineWork:
    """Work of engines in a step, as sums by pool and load, so its size does not grow with the step. Mutable."""

    def __init__(self) -> None:
        self.sums: dict[str, EngineSums] = {}
        """By pool."""
        self._loads: dict[str, dict[int, EngineSums]] = {}

    @property
    def loads(self) -> dict[str, tuple[EngineSums, ...]]:
        """Sums of each pool by load class: 1 request, 2 to 3, 4 to 7 and so on."""
        return {pool: tuple(found for _, found in sorted(by_load.items())) for pool, by_load in self._loads.items()}

    def add(self, pool: Pool, passed: EngineTime, begin: float, end: float) -> None:
        """Add the part of an engine's time between two moments, as if its work were spread evenly."""
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
    """Return the reading at the start of the engine; None if that was before `since` or is not known.

    If the engine started before `since`, while it loaded, and was seen to begin to serve at `came`, return the reading
    at `came`. It had no request before, so it was idle or asleep.
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
    """Return the totals of an engine at a reading, in their stored form."""
    assert reading.sums is not None
    counted = {name: float(getattr(reading, name)) for name in COUNTED}
    return WorkerTotals(slot, reading.at, {**asdict(reading.sums), **counted})


def reading_from_totals(kept: WorkerTotals) -> EngineReading | None:
    """Inverse of `engine_totals`; None if these are not an engine's totals."""
    try:
        sums = EngineTimeSums(**{one.name: kept.sums[one.name] for one in fields(EngineTimeSums)})
        return EngineReading(kept.at, sums, 0.0, 0.0, *(int(kept.sums[name]) for name in COUNTED))
    except KeyError:
        return None


@dataclass(frozen=True)
class ClosedStep:
    """A closed step. `phases` of the job as seen here and `spans` by slot, in seconds since the begin of the step.
    `kept`: totals of workers at its end."""

    book: StepAccount
    phases: tuple[Span, ...]
    spans: Mapping[str, tuple[Span, ...]]
    kept: Mapping[str, WorkerTotals]

    def line(self, node: str) -> AccountLine:
        """Return the line for the node's file."""
        return AccountLine(node, self.book, self.phases, self.spans, self.kept)


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """The end of a step that is not closed yet, and the engines' work in the step. `kept`: last totals before it of
    workers that have reported since."""

    at: float
    wall: float
    version: Version
    work: EngineWork
    kept: dict[str, WorkerTotals] = field(default_factory=dict)

    def passed(self, instance: str, before: WorkerTotals, at: float) -> None:
        """Record that a worker reported at `at`, with the totals `before` its previous report."""
        if before.at <= self.at < at:
            self.kept[instance] = before


def close_step(
    slots: Mapping[str, SlotAccount], boundary: StepBoundary, begun: float, began: float
) -> tuple[StepAccount, dict[str, tuple[Span, ...]]]:
    """Close the step that ends there, from slots that are settled until then. Return it with the spans by slot.
    `begun`, `began`: its begin on both clocks."""
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
    """A serving engine. `came`: when it was seen to begin to serve; None: it served at the first update. `failing`:
    since when readings fail."""

    worker: WorkerRecord
    rows: int
    line: Timeline[Attribution]
    came: float | None = None
    last: EngineReading | None = None
    failing: float | None = None


class StepAccountBuilder:
    """Builds the account of each step from readings of engines and reports of ranks."""

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
        """`gap_s`: seconds for which this controller was absent, since its previous incarnation. `kept`: totals of
        workers from that incarnation. Idle time in the gap counts as `no_work`, because no work was given."""
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
        """By instance: the slot, its reports, and the attribution of its waiting."""
        self._places = VacantPlaces()
        self._work = EngineWork()
        """Work since the newest step ended."""
        self._boundaries: deque[StepBoundary] = deque()
        self._head = head
        self._phase = Timeline("start", now)
        self._seen: tuple[object, ...] | None = None
        self._placed: tuple[object, ...] | None = None
        """Input from which attributions and vacant places were computed."""

    @property
    def engines(self) -> Mapping[str, str]:
        """Engines to read: address by instance."""
        return {instance: engine.worker.address for instance, engine in self._engines.items()}

    @property
    def unread(self) -> frozenset[str]:
        """Engines that were not read since the end of the oldest open step."""
        if not self._boundaries:
            return frozenset()
        at = self._boundaries[0].at
        return frozenset(
            instance for instance, engine in self._engines.items() if engine.last is None or engine.last.at < at
        )

    @property
    def is_behind(self) -> bool:
        """Whether a step waits to be closed."""
        return bool(self._boundaries)

    def head_moved(self, version: Version, now: float, wall: float) -> None:
        """Head is now at `version`: the previous step has ended."""
        if self._head != version:
            self._head = version
            self._boundaries.append(StepBoundary(now, wall, version, self._work))
            self._work = EngineWork()

    def update(self, view: JobView, cause: IdleCause, now: float) -> None:
        """Update the state of the job, and the cause of idleness."""
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
        """`came`: when new engines began to serve, if known."""
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
        """Record a reading of an engine."""
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
        """Record that an engine did not respond to the reading at `asked_at`."""
        engine = self._engines.get(instance)
        if engine is not None and engine.failing is None:
            engine.failing = asked_at

    def close(self, now: float, *, final: bool = False) -> list[ClosedStep]:
        """Return the steps that can be closed, oldest first. `final`: no more reports will arrive.

        A controller that was absent closes none before its first update, however late that is, because workers' totals
        include all the time before it.
        """
        if not self._gap.is_seen and not final:
            return []
        failing = {
            name
            for name, one in self._engines.items()
            if one.failing is not None and one.failing <= now - UNREACHABLE_S
        }
        answering = [engine for instance, engine in self._engines.items() if instance not in failing]
        heard = min((engine.last.at if engine.last is not None else self._begun for engine in answering), default=now)
        if now < self._since + PATIENCE_S and self._gap.waits(failing):
            heard = self._begun
        until = now if final else min(heard, now - REPORT_DELAY_S)
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
        if not worker.judge:
            return self._spec.rollout.batch_slots
        judge = next((one for one in self._spec.judges if one.name == worker.judge), None)
        return judge.serving.batch_slots if judge is not None else self._spec.rollout.batch_slots

    def _slot(self, slot: str) -> SlotAccount:
        return self._slots.setdefault(slot, SlotAccount(self._begun))

    def _line(self, worker: WorkerRecord, meaning: Attribution, now: float) -> Timeline[Attribution]:
        """Return how a worker's reports count from now on, and before that, while this controller was absent."""
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
        if engine.failing is not None and engine.failing < until:
            for slot in engine.worker.slots:
                begin = max(engine.failing, self._slot(slot).settled_until)
                self._add((slot,), TimeReport(instance, begin, until, {FAILED: until - begin}))

    def _settle(self, until: float) -> None:
        """Settle all slots until then."""
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
        """Yield the job's phases in the window that ends then."""
        begin = 0.0
        for phase, seconds in self._phase.between(self._begun, until):
            yield Span(begin, begin + seconds, {phase: seconds})
            begin += seconds
        self._phase.forget(until)


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether nothing has changed. Stored records are compared by identity."""
    return all(a is b or (not isinstance(a, Versioned) and a == b) for a, b in zip(one, other, strict=True))
