"""The books of a node's slots, for one job: what is heard of engines and ranks goes in, a step's book comes out once all of it was heard.

A step's window is from when this node heard that head had moved to the version before until it heard of this one, on its own clock; a
rollback ends one as a commit does. What an engine's time was is booked on each slot that it spans. The book is closed as soon as every
engine that answers was read after the window's end, and ranks have had the time to tell (`WORD_S`); after `PATIENCE_S` in any case, with
what is missing unbooked.

An engine that does not answer for `SURE_S` is `failed` from when it was asked in vain; its time before that, since it was read last, stays
unbooked, for nobody can say what it was. What happened while the node's controller was away is told by `controllers.booking_gaps`. Nothing
is read or written here (`controllers.booking`).
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
    Cause,
    Pool,
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
    StepAccount,
    StepSpan,
    WorkerTotals,
)
from gcore.ledger.transactions import Versioned
from gcore.rollout.engine_time import ALMOST_S, EngineReading, EngineTime, EngineTimeSums, time_between
from gcore.types import Version
from gcore.worker.records import WorkerRecord
from placement.measurements import load_class

# -------------------- booking_gaps
# The time for which nobody kept a node's books: from the last step that the controller's life before had booked until this life began.
#
# A worker that was there then, and serves still, tells itself what it did meanwhile, and is waited for. One that was there and tells nothing
# more has failed, for the job had nothing of it: it is gone, was on its way out before it could be asked, is of a train world that is no
# more, or is silent. A slot on which nobody was before or is now had nobody: it was `unallocated`, or has failed if the plan has a place
# there, which nobody could fill.
#
# What a worker that began later has summed up says when it began; a rank's word of that is waited for, too. Of the time before it began, and of
# workers that sum nothing up, nothing is known: it stays unbooked. Who waits, and who reads, is `controllers.booked`.


class UnwatchedInterval:
    """From `begin` to `end`; there is none if these are the same. Mutable."""

    def __init__(self, begin: float, end: float, kept: Mapping[str, WorkerTotals]) -> None:
        """`kept`: of those that were there, when it began."""
        self._begin = begin
        self._end = end
        self._silent: dict[str, tuple[str, ...]] = {instance: (one.slot,) for instance, one in kept.items()}
        self._fresh: set[str] = set()
        """Ranks that began since."""
        self._is_seen = end <= begin

    @property
    def is_seen(self) -> bool:
        """Whether `look` was told who is there."""
        return self._is_seen

    def look(self, view: JobView, here: Mapping[str, WorkerRecord]) -> Iterator[tuple[str, TimeReport]]:
        """By slot, what is known as soon as it is seen who is there. `here`: the job's workers on this node."""
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
                yield slot, self._told("nobody", FAILED if slot in planned else UNALLOCATED)
        for instance in [name for name in self._silent if name not in here or here[name].state != "serving"]:
            yield from self.lost(instance)

    def waits(self, silent: Collection[str]) -> bool:
        """Whether somebody may still tell. `silent`: those who do not answer."""
        return not self._is_seen or bool((self._silent.keys() | self._fresh) - set(silent))

    def heard(self, instance: str) -> None:
        """It has told what it did."""
        self._silent.pop(instance, None)
        self._fresh.discard(instance)

    def lost(self, instance: str) -> Iterator[tuple[str, TimeReport]]:
        """It will not tell any more."""
        self._fresh.discard(instance)
        for slot in self._silent.pop(instance, ()):
            yield slot, self._told(instance, FAILED)

    def close(self) -> Iterator[tuple[str, TimeReport]]:
        """Nobody is waited for any more."""
        for instance in list(self._silent):
            yield from self.lost(instance)

    def _told(self, worker: str, state: State) -> TimeReport:
        return TimeReport(worker, self._begin, self._end, {state: self._end - self._begin})


# -------------------- booking_sums
# What the engines of a node did in a step, in sums: by pool, and of each pool by load; and what of their own sums is kept.


class EngineWork:
    """What engines did in a step, as much of it as is known. Mutable; however long the step is, it takes no more room."""

    def __init__(self) -> None:
        self.sums: dict[str, EngineSums] = {}
        """By pool."""
        self._loads: dict[str, dict[int, EngineSums]] = {}

    @property
    def loads(self) -> dict[str, tuple[EngineSums, ...]]:
        """Of each pool by load: of 1 request, of 2 and 3, of 4 to 7 and so on."""
        return {pool: tuple(found for _, found in sorted(by_load.items())) for pool, by_load in self._loads.items()}

    def add(self, pool: Pool, passed: EngineTime, begin: float, end: float) -> None:
        """What is of an engine's time between two moments, as if it had been even throughout."""
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
    """What would have been read when the engine began; None if that was before `since`, or nobody knows.

    One that began before that, while it loaded, and was seen to begin to serve at `came`: what would have been read then. Nobody has asked it
    for anything before, so it rested."""
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


COUNTED = ("tokens", "requests")


def engine_totals(slot: str, reading: EngineReading) -> WorkerTotals:
    """What an engine had summed up when it was read, to be written down."""
    assert reading.sums is not None
    counted = {name: float(getattr(reading, name)) for name in COUNTED}
    return WorkerTotals(slot, reading.at, {**asdict(reading.sums), **counted})


def reading_from_totals(kept: WorkerTotals) -> EngineReading | None:
    """Inverse of `engine_totals`; None for what is no engine's."""
    try:
        sums = EngineTimeSums(**{one.name: kept.sums[one.name] for one in fields(EngineTimeSums)})
        return EngineReading(kept.at, sums, 0.0, 0.0, *(int(kept.sums[name]) for name in COUNTED))
    except KeyError:
        return None


# -------------------- booking_steps
# What a step comes to in a node's books: where it ends, and what of its slots' times is cut off there.


@dataclass(frozen=True)
class ClosedStep:
    """A step, booked. `phases`: of the job, as it was seen here; `spans`: by slot. Both in seconds since the step began."""

    book: StepAccount
    phases: tuple[StepSpan, ...]
    spans: Mapping[str, tuple[StepSpan, ...]]
    kept: Mapping[str, WorkerTotals]

    def line(self, node: str) -> AccountLine:
        """As it is written down."""
        return AccountLine(node, self.book, self.phases, self.spans, self.kept)


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """Where a step ends that is not closed yet, and what engines did in it. `kept`: what workers said last before it, of those who have
    said something since."""

    at: float
    wall: float
    version: Version
    work: EngineWork
    kept: dict[str, WorkerTotals] = field(default_factory=dict)

    def passed(self, instance: str, before: WorkerTotals, at: float) -> None:
        """A worker said something at `at`, and the time before that was `before`."""
        if before.at <= self.at < at:
            self.kept[instance] = before


def close_step(
    slots: Mapping[str, SlotAccount], boundary: StepBoundary, begun: float, began: float
) -> tuple[StepAccount, dict[str, tuple[StepSpan, ...]]]:
    """The step that ends there, of slots that are settled until then, and their spans. `begun`, `began`: when it did, on both clocks."""
    booked: dict[State, float] = {}
    unbooked = overbooked = 0.0
    switches: dict[str, tuple[float, ...]] = {}
    spans = {}
    for slot, book in sorted(slots.items()):
        times = book.cut()
        booked = add_times(booked, times.booked)
        unbooked += times.unbooked
        overbooked += times.overbooked
        for change, took in times.switches.items():
            switches[change] = (*switches.get(change, ()), *took)[-MOST_SWITCHES:]
        spans[slot] = tuple(StepSpan(span.begin - begun, span.end - begun, span.seconds) for span in times.spans)
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


WORD_S = 0.15
"""So long may a rank's word of a change of its phase be under way."""


PATIENCE_S = 5.0
"""For an engine that should have been read."""


SURE_S = 1.5
"""So long an engine that was asked in vain is waited for as one that answers: a connection may break once."""


SHORTEST_S = 1e-3
"""A window below this is none: several changes were heard of at once."""


@dataclass
class _Engine:
    """One that serves. `came`: when it was seen to begin to; None: it did already when the job was looked at first. `failing`: since when it is
    asked in vain."""

    worker: WorkerRecord
    rows: int
    line: Timeline[Attribution]
    came: float | None = None
    last: EngineReading | None = None
    failing: float | None = None


class StepAccountBuilder:
    """Mutable; one event loop."""

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
        """`head`: where the job is. `gap_s`: for so long nobody has kept the books here, since another life of this controller's, which
        has `kept` what workers had summed up by then. Those that serve still say what they did since; who of them is idle has
        no work, for nobody gave it any; who says nothing more has failed."""
        self._spec = spec
        self._since = now
        self._kept = {instance: one for instance, one in kept.items() if one.at <= now}
        self._begun = now - gap_s
        self._gap = UnwatchedInterval(self._begun, now, self._kept)
        self._began = wall - gap_s
        self._slots: dict[str, SlotAccount] = {}
        self._engines: dict[str, _Engine] = {}
        self._served: set[str] = set()
        """Engines that have served, those that are gone too."""
        self._ranks: dict[str, tuple[str, RankReports, Timeline[Attribution]]] = {}
        """By instance: the slot, what it tells, and what its waiting means."""
        self._places = VacantPlaces()
        self._work = EngineWork()
        """Since the newest step ended."""
        self._boundaries: deque[StepBoundary] = deque()
        self._head = head
        self._phase = Timeline("start", now)
        self._seen: tuple[object, ...] | None = None
        self._placed: tuple[object, ...] | None = None
        """What meanings, and places, were worked out from."""

    @property
    def engines(self) -> Mapping[str, str]:
        """Whom to read: their addresses, by instance."""
        return {instance: engine.worker.address for instance, engine in self._engines.items()}

    @property
    def unheard(self) -> frozenset[str]:
        """Those that were not read since the step ended that waits to be closed."""
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
        """Head is at `version` now."""
        if self._head != version:
            self._head = version
            self._boundaries.append(StepBoundary(now, wall, version, self._work))
            self._work = EngineWork()

    def look(self, view: JobView, stage: Cause, now: float) -> None:
        """The job is so now."""
        self._phase.note(step_phase(view, stage), now)
        here = view.remembered.get("mine here", (view.workers,), lambda: own_workers(view))
        # Most looks are about something else, and a node may have very many engines.
        turn, resting = engines_asleep_for_ranks(view), frozenset(r for r, rank in view.ranks.items() if rank.released)
        seen = (here, view.mirror.plan, view.mirror.head, stage, view.engines, view.under_way, turn, resting)
        if self._seen is None or not _same(seen, self._seen):
            came = None if self._seen is None else now
            self._seen = seen
            self._note_meanings(here, make_attributions(view, here, stage), now, came)
        if not self._gap.is_seen:
            self._tell_all(self._gap.look(view, here))
        plan, node = view.mirror.plan, view.nodes.get(view.node)
        resting_wide = slots_left_by_ranks(view, here, turn)
        placed = (here, plan, node, view.mirror.head is None, resting_wide)
        if self._placed is None or not _same(placed, self._placed):
            self._placed = placed
            self._places.note(view, here, now, resting_wide)
            for slot in self._places.slots:
                self._slot(slot)
        for instance, (slot, claims, line) in self._ranks.items():
            worker = here[instance]
            rank = view.ranks.get(worker.rank) if worker.rank is not None else None
            if rank is not None and view.mirror.head is not None and worker.world == view.head.world:
                before = claims.said
                self._tell((slot,), *claims.hear(rank, line))
                if claims.said is not None:
                    self._gap.heard(instance)
                if claims.said is not None and before is not None:
                    for ended in self._boundaries:
                        ended.passed(instance, WorkerTotals(slot, *before), claims.said[0])

    def _note_meanings(
        self, here: Mapping[str, WorkerRecord], found: Mapping[str, Attribution], now: float, came: float | None
    ) -> None:
        """`came`: when those that are new began to serve, if that is known."""
        for instance, meaning in found.items():
            worker = here[instance]
            if worker.role == "train":
                if instance not in self._ranks:
                    claims = RankReports(instance, self._kept.get(instance), None if self._gap.is_seen else self._begun)
                    self._ranks[instance] = worker.slot, claims, self._line(worker, meaning, now)
                self._ranks[instance][2].note(meaning, now)
            elif instance in self._engines:
                self._engines[instance].line.note(meaning, now)
            else:
                last = reading_from_totals(self._kept[instance]) if instance in self._kept else None
                is_new = instance not in self._served  # else it may have been asked for much before
                self._served.add(instance)
                self._engines[instance] = _Engine(
                    worker, self._rows(worker), self._line(worker, meaning, now), came if is_new else None, last=last
                )
        self._kept = {}
        for gone in self._engines.keys() - found.keys():
            self._tell_all(self._gap.lost(gone))
            self._tell_failing(gone, self._engines.pop(gone), now)
        for gone in self._ranks.keys() - found.keys():
            self._tell_all(self._gap.lost(gone))
            slot, claims, line = self._ranks.pop(gone)
            self._tell((slot,), *claims.extend(now, line))

    def read(self, instance: str, reading: EngineReading) -> None:
        """An engine was read."""
        engine = self._engines.get(instance)
        if engine is None:
            return
        engine.failing = None
        before, engine.last = engine.last or reading_at_start(reading, self._begun, engine.came), reading
        passed = time_between(before, reading, engine.rows) if before is not None else None
        if passed is not None and before is not None:
            self._gap.heard(instance)
            pool, begin = engine.worker.role, self._begun
            self._tell(engine.worker.slots, *engine_reports(instance, pool, passed, engine.line))
            for ended in self._boundaries:
                ended.work.add(pool, passed, begin, ended.at)
                begin = ended.at
                if before.sums is not None:
                    ended.passed(instance, engine_totals(engine.worker.slot, before), reading.at)
            self._work.add(pool, passed, begin, passed.end)
            engine.line.forget(passed.end)

    def unread(self, instance: str, asked: float) -> None:
        """An engine was asked at `asked`, and has not answered."""
        engine = self._engines.get(instance)
        if engine is not None and engine.failing is None:
            engine.failing = asked

    def close(self, now: float, *, last: bool = False) -> list[ClosedStep]:
        """The steps that are over and of which all was heard; and what lies before is settled. `last`: nothing more will be heard."""
        failing = {
            name for name, one in self._engines.items() if one.failing is not None and one.failing <= now - SURE_S
        }
        answering = [engine for instance, engine in self._engines.items() if instance not in failing]
        heard = min((engine.last.at if engine.last is not None else self._begun for engine in answering), default=now)
        if now < self._since + PATIENCE_S and self._gap.waits(failing):
            heard = self._begun
        until = now if last else min(heard, now - WORD_S)
        closed = []
        while self._boundaries and (self._boundaries[0].at <= until or self._boundaries[0].at <= now - PATIENCE_S):
            boundary = self._boundaries.popleft()
            self._settle(boundary.at)
            # Before the job was looked at nobody knows of a slot: its start may be over by then.
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
        """What a worker's words mean from now on; and before that, while nobody kept the books."""
        if self._gap.is_seen:
            return Timeline(meaning, now)
        line = Timeline(Attribution(idle(worker.role, "no_work"), UNALLOCATED), self._begun)
        line.note(meaning, now)
        return line

    def _tell(self, slots: Iterable[str], *tellings: TimeReport) -> None:
        for slot in slots:
            for telling in tellings:
                self._slot(slot).tell(telling)

    def _tell_all(self, tellings: Iterable[tuple[str, TimeReport]]) -> None:
        for slot, telling in tellings:
            self._tell((slot,), telling)

    def _tell_failing(self, instance: str, engine: _Engine, until: float) -> None:
        if engine.failing is not None and engine.failing < until:
            for slot in engine.worker.slots:
                begin = max(engine.failing, self._slot(slot).settled)
                self._tell((slot,), TimeReport(instance, begin, until, {FAILED: until - begin}))

    def _settle(self, until: float) -> None:
        """Book all time until then."""
        if until > self._begun:
            self._tell_all(self._gap.close())
        for slot, claims, line in self._ranks.values():
            self._tell((slot,), *claims.extend(until, line))
            line.forget(until)
        for instance, engine in self._engines.items():
            self._tell_failing(instance, engine, until)
        settled = {slot: max(self._slot(slot).settled, self._since) for slot in self._places.slots}
        self._tell_all(self._places.told(settled, until))
        for book in self._slots.values():
            book.settle(until)

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
            elif (said := claims.said) is not None:
                yield instance, WorkerTotals(slot, said[0], said[1])

    def _phases_until(self, until: float) -> Iterator[StepSpan]:
        """Those of the window that ends then."""
        begin = 0.0
        for phase, seconds in self._phase.over(self._begun, until):
            yield StepSpan(begin, begin + seconds, {phase: seconds})
            begin += seconds
        self._phase.forget(until)


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether nothing has changed; what is the same object is not compared further."""
    return all(a is b or (not isinstance(a, Versioned) and a == b) for a, b in zip(one, other, strict=True))
