"""The newest steps of a job as whoever plans is shown them: each controller keeps them as they are committed, so that any can plan.

A step's seal, which has its lengths, is deleted with its commit; its books come a little later. What a controller did not see (it has
just begun, or was paused) it takes from the log, which knows means only. Which split such a step ran with is found back from the plan
there is, through the moves since; where a plan changed otherwise (nodes came or went), nobody knows it of the steps before, and
they are not shown: a step that is taken for one of another split teaches worse than none.

Whoever plans counts slots, and a slot that judges has an engine of each judge awake. So these are shown as one engine, which runs what all of
them run (`of_slots`), and has room for as many requests as all of them have (`rows_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gcore.config import JobSpec
from gcore.config.judges import JudgeSpec
from gcore.ledger.books import EngineSums, StepBook, by_version, engines_of
from gcore.ledger.guarded import Stored
from gcore.ledger.job import Plan
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import MoveKind, Moves
from gcore.ledger.records import LogEntry
from gcore.types import Version
from placement.measured import Measured
from placement.measuring import lengths_of, measured
from placement.moves import BETWEEN, base_split, split_from
from placement.outcomes import Committed
from placement.plan import Snapshot
from placement.replicas import spanned
from placement.speeds import Rows
from placement.split import Split

MOST_STEPS = 64


@dataclass
class _Seen:
    """A committed step. `entry`: without what the step did to each prompt; `lengths`: of its responses, None where nobody has its seal any
    more; `split` None: nobody knows which it was. `slots`: that were there when it began, as far as is known. `booked`: nodes whose books are
    in what was measured."""

    entry: LogEntry
    lengths: tuple[float, ...] | None
    split: Split | None
    slots: int = 0
    booked: int = -1
    measured: Measured | None = None
    question_s: float | None = None
    """What a question took of a judge's engine."""


class StepHistory:
    """Of one job, on one controller. Mutable."""

    def __init__(self, *, judges: int = 1, scores: bool = False) -> None:
        """`judges`: those that the cluster serves. `scores`: all of them are classifiers, which write nothing."""
        self._judges = max(judges, 1)
        self._scores = scores
        self._seen: dict[Version, _Seen] = {}
        """Oldest first."""
        self._slots = 0
        """That were there when the newest step was committed, and so when the next one began."""
        self._log: Mapping[int, Stored[LogEntry]] = {}
        """From which what was not seen was taken."""

    @classmethod
    def of(cls, served: Sequence[JudgeSpec]) -> StepHistory:
        """Of a job with these judges, which the cluster serves."""
        scores = bool(served) and all(judge.kind == "classifier" for judge in served)
        return cls(judges=len(served), scores=scores)

    def note(self, before: JobMirror, after: JobMirror, there: Callable[[], Snapshot]) -> None:
        """A change of the job's records. `there`: the nodes that there are now, for a step did not run on places of those that are away."""
        if after.head is None or before.head is None or before.plan is None or before.head == after.head:
            return
        head = before.head.record
        later = (one.record for seq, one in sorted(after.log.items()) if seq > head.seq)
        entry = next((one for one in later if one.kind == "train"), None)
        if entry is None or (entry.lineage, entry.step) != (head.lineage, head.step + 1):
            return  # what was missed is taken from the log
        slot = before.seals.get(entry.step)
        lengths = lengths_of(slot.record) if slot is not None else None
        snapshot = there()
        began, self._slots = self._slots, snapshot.slots
        self._add({_version(entry): _Seen(_kept(entry), lengths, base_split(before.plan.record, snapshot), began)})

    def steps(self, mirror: JobMirror) -> tuple[Measured, ...]:
        """The steps on head's chain, oldest first, with what the books say by now."""
        assert mirror.head is not None
        assert mirror.plan is not None
        if mirror.log is not self._log:
            self._log = mirror.log
            self._take_missed(mirror.plan.record, mirror.moves)
        books = by_version({node: stored.record for node, stored in mirror.books.items()})
        newest: dict[int, Measured] = {}
        sizes = spanned(mirror.plan.record)
        for version, seen in self._seen.items():
            if seen.split is None:
                newest.pop(version.step, None)
                continue
            there = books.get(version, {})
            if seen.measured is None or len(there) > seen.booked:
                told = map(in_questions, there.values()) if self._scores else there.values()
                found = measured(told, seen.entry, seen.lengths, seen.split, sizes, least=seen.slots)
                seen.measured = of_slots(found, self._judges)
                seen.question_s = question_s(there.values())
                seen.booked = len(there)
            if version.step <= mirror.head.record.step:
                newest[version.step] = seen.measured  # a step that was cut off has a later one of its number
        return tuple(newest[step] for step in sorted(newest))

    def start_s(self) -> float | None:
        """Seconds of the newest start of a rank that a step told."""
        told = (seen.entry.stats.get("start_seconds") for seen in reversed(self._seen.values()))
        return next((seconds for seconds in told if seconds is not None), None)

    def committed(self, mirror: JobMirror) -> tuple[Committed, ...]:
        """All steps that are known, those that were cut off too, oldest first; without those of which nobody knows what they took."""
        self.steps(mirror)  # with what the books say by now
        return tuple(
            Committed(
                step=version.step,
                seq=seen.entry.seq,
                seconds=seen.entry.stats["seconds"],
                tokens=seen.entry.stats.get("response_length"),
                question_s=seen.question_s,
            )
            for version, seen in self._seen.items()
            if "seconds" in seen.entry.stats
        )

    def took(self, step: int, after: int) -> float | None:
        """Seconds of that step, as it was committed first after head's sequence number was `after`; None: it was not, or nobody knows."""
        there = (seen.entry for version, seen in self._seen.items() if version.step == step and seen.entry.seq > after)
        entry = next(there, None)
        return None if entry is None else entry.stats.get("seconds")

    def _take_missed(self, plan: Plan, moves: Moves) -> None:
        trained = [stored.record for _, stored in sorted(self._log.items()) if stored.record.kind == "train"]
        missed = [entry for entry in trained[-MOST_STEPS:] if _version(entry) not in self._seen]
        if missed:
            splits = splits_of(trained, plan, moves)
            self._add({_version(entry): _Seen(_kept(entry), None, splits.get(entry.seq)) for entry in missed})

    def _add(self, more: dict[Version, _Seen]) -> None:
        together = sorted((self._seen | more).items(), key=lambda one: one[1].entry.seq)
        self._seen = dict(together[-MOST_STEPS:])


def rows_of(spec: JobSpec) -> Rows:
    """Requests that the engines of a slot run at once, at most, by pool."""
    return Rows(spec.rollout.batch_slots, sum(judge.serving.batch_slots for judge in spec.served_judges) or 1)


def question_s(books: Iterable[StepBook]) -> float | None:
    """Seconds that a question ran in a judge's engine, on average. None: nobody was asked, or booked it."""
    reward = engines_of(books).get("reward")
    return reward.running_s / reward.requests if reward is not None and reward.requests and reward.running_s else None


def of_slots(step: Measured, judges: int) -> Measured:
    """What a slot's engines of so many judges do together, in place of what each does. All of them are taken to be asked equally often."""
    if judges == 1:
        return step
    speed = tuple(replace(one, running=one.running * judges) if one.pool == "reward" else one for one in step.speed)
    return replace(step, speed=speed)


def in_questions(book: StepBook) -> StepBook:
    """Pools are measured by tokens, and a classifier writes none: each question that it is asked counts as one."""

    def counted(sums: EngineSums) -> EngineSums:
        return sums.model_copy(update={"tokens": sums.requests})

    engines = {pool: counted(sums) if pool == "reward" else sums for pool, sums in book.engines.items()}
    loads = {pool: tuple(map(counted, one)) if pool == "reward" else one for pool, one in book.loads.items()}
    return book.model_copy(update={"engines": engines, "loads": loads})


def _kept(entry: LogEntry) -> LogEntry:
    """What is kept of it: of a step of a thousand prompts the rest is thousands of objects."""
    return entry.model_copy(update={"delta": (), "cursors": None, "tally": None})


def _version(entry: LogEntry) -> Version:
    return Version(entry.lineage, entry.step)


def splits_of(trained: Sequence[LogEntry], plan: Plan, moves: Moves) -> dict[int, Split]:
    """The splits of committed steps, by their entries' numbers: from the newest back to the first of which nobody can say. `trained`:
    oldest first; `plan`, `moves`: as they are now."""
    split, world = base_split(plan), plan.world
    done = [move for move in moves.moves if move.state == "done" and move.kind in (MoveKind.BEGIN, *BETWEEN)]
    forgotten = moves.moves[0].seq if moves.total > len(moves.moves) else -1
    found: dict[int, Split] = {}
    for entry in reversed(trained):
        while done and done[-1].seq >= entry.seq:
            move = done.pop()
            split, world = split_from(move.before), entry.world if move.kind is MoveKind.WORLD else world
        is_made_so = not done or split_from(done[-1].after) == split
        is_of_world = entry.world == world and entry.ranks in (None, split.train)
        if not is_made_so or not is_of_world or entry.seq <= forgotten:
            break  # the plan changed in between, and no move says how
        found[entry.seq] = split
    return found
