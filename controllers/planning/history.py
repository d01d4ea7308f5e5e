"""The newest measured steps of a job, as input of placement policies; and `moves.jsonl` in the run folder, the list of
all placement changes.

Each controller records the steps as they are committed, so that any controller can plan. It must do so at the commit,
because the seal of a step, which has its response lengths, is deleted then; the slot accounts arrive a little later.
Steps that a controller did not see (it has just started, or was paused) are taken from the log, which has means only.
Their splits (slots per pool) are reconstructed from the present plan and the moves since. If a plan changed otherwise
(nodes came or went), the splits of earlier steps are not known, and these steps are left out: a step with a wrong split
misleads a policy more than a missing one.

The tokens of a response that a policy generates as a picture are its denoising steps. All pictures of a job have equally many, also
those that were filtered.

Policies count slots, but a slot of the reward pool has an awake engine of each judge. So the engines of one slot are
presented as one engine that runs the requests of all (`measured_by_slot`), with capacity for the requests of all
(`engine_rows`).

`moves.jsonl` has every move with a number; the store keeps only the newest moves. When more is known of a move (its
outcome), another line with its number is appended, and the last line counts. A hold period (steps without a move) is
written after its end, identified by its begin. The leader writes the file. If the folder rejects writes, lines are
lost and nothing is delayed.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gcore.config.spec import JobSpec
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry
from gcore.ledger.records.job import NEWEST_MOVES, HoldPeriod, Move, MoveKind, Moves, Plan
from gcore.ledger.records.slot_accounting import EngineSums, StepAccount, group_by_version, sum_engines
from gcore.ledger.transactions import Versioned
from gcore.schema import RecordPart
from gcore.system.files import append_lines, last_lines, parse_object
from gcore.types import Version
from placement.lending import EngineRows
from placement.measurements import MeasuredStep, measure_step, trained_lengths
from placement.moves import BETWEEN, CommittedStep, base_split, split_from
from placement.slots import Snapshot, Split, plan_sizes

MOST_STEPS = 64

log = logging.getLogger(__name__)

NAME = "moves.jsonl"

TAIL = 1 << 20
"""Number of bytes at the end of the file that a new writer reads to find the newest moves. Moves before them may be
written a second time."""

One = TypeVar("One", bound=RecordPart)


def question_s(books: Iterable[StepAccount]) -> float | None:
    """Return the mean seconds that a request ran in an engine of a judge in a step. `books`: the slot accounts of the
    nodes. None: there was no request, or no account has it."""
    reward = sum_engines(books).get("reward")
    return reward.running_s / reward.requests if reward is not None and reward.requests and reward.running_s else None


@dataclass
class _Seen:
    """A committed step in the history.

    `entry`: its log entry, without the outcomes of prompts. `lengths`: tokens of its responses; None if the seal was
    not seen. `split`: slots per pool; None: not known. `slots`: number of slots at its begin; 0: not known. `booked`:
    number of nodes whose accounts are in `measured`.
    """

    entry: LogEntry
    lengths: tuple[float, ...] | None
    split: Split | None
    slots: int = 0
    booked: int = -1
    measured: MeasuredStep | None = None
    question_s: float | None = None
    """Mean seconds that a request ran in an engine of a judge."""


class StepHistory:
    """The newest committed steps of one job with their measurements. Mutable."""

    def __init__(self, *, judges: int = 1, scores: bool = False, denoising_steps: int | None = None) -> None:
        """`judges`: number of judges that the cluster serves. `scores`: all of them are classifiers, which generate no
        tokens. `denoising_steps`: of each picture that the policy generates; None: it writes texts."""
        self._judges = max(judges, 1)
        self._scores = scores
        self._denoising_steps = denoising_steps
        self._seen: dict[Version, _Seen] = {}
        """The steps by version, oldest first."""
        self._slots = 0
        """Number of slots when the newest step was committed and the next one began."""
        self._log: Mapping[int, Versioned[LogEntry]] = {}
        """The log from which missed steps were taken."""

    @classmethod
    def of(cls, spec: JobSpec) -> StepHistory:
        """Create the history of a job."""
        served, drawn = spec.served_judges, spec.rollout.diffusion
        scores = bool(served) and all(judge.kind == "classifier" for judge in served)
        return cls(judges=len(served), scores=scores, denoising_steps=None if drawn is None else drawn.steps)

    def note(self, before: JobMirror, after: JobMirror, there: Callable[[], Snapshot]) -> None:
        """Record a step that was committed between two states of the job's records. `there`: returns the present nodes,
        because slots of absent ones do not count in the step's split."""
        if after.head is None or before.head is None or before.plan is None or before.head == after.head:
            return
        head = before.head.record
        later = (one.record for seq, one in sorted(after.log.items()) if seq > head.seq)
        entry = next((one for one in later if one.kind == "train"), None)
        if entry is None or (entry.lineage, entry.step) != (head.lineage, head.step + 1):
            return  # missed steps are taken from the log
        slot = before.seals.get(entry.step)
        lengths = trained_lengths(slot.record) if slot is not None and self._denoising_steps is None else None
        snapshot = there()
        began, self._slots = self._slots, snapshot.slots
        self._add({_version(entry): _Seen(self._kept(entry), lengths, base_split(before.plan.record, snapshot), began)})

    def steps(self, mirror: JobMirror) -> tuple[MeasuredStep, ...]:
        """Return the measured steps that no rollback has discarded, oldest first, with the slot accounts that have
        arrived by now."""
        assert mirror.head is not None
        assert mirror.plan is not None
        if mirror.log is not self._log:
            self._log = mirror.log
            self._take_missed(mirror.plan.record, mirror.moves)
        books = group_by_version({node: stored.record for node, stored in mirror.books.items()})
        newest: dict[int, MeasuredStep] = {}
        sizes = plan_sizes(mirror.plan.record)
        for version, seen in self._seen.items():
            if seen.split is None:
                newest.pop(version.step, None)
                continue
            there = books.get(version, {})
            if seen.measured is None or len(there) > seen.booked:
                accounts = map(count_questions, there.values()) if self._scores else there.values()
                found = measure_step(accounts, seen.entry, seen.lengths, seen.split, sizes, least=seen.slots)
                seen.measured = measured_by_slot(found, self._judges)
                seen.question_s = question_s(there.values())
                seen.booked = len(there)
            if version.step <= mirror.head.record.step:
                newest[version.step] = seen.measured  # a discarded step is replaced by a later one with its number
        return tuple(newest[step] for step in sorted(newest))

    def start_s(self) -> float | None:
        """Return the seconds that the newest start of a train rank took, from the log entry of a step; None: not
        known."""
        starts = (seen.entry.stats.get("start_seconds") for seen in reversed(self._seen.values()))
        return next((seconds for seconds in starts if seconds is not None), None)

    def committed(self, mirror: JobMirror) -> tuple[CommittedStep, ...]:
        """Return all steps whose duration is known, including those that a rollback discarded, oldest first."""
        self.steps(mirror)  # adds the accounts available by now
        return tuple(
            CommittedStep(
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
        """Return the duration in seconds of the first run of `step` that was committed after log entry `after`; None:
        it is not committed, or not known."""
        there = (seen.entry for version, seen in self._seen.items() if version.step == step and seen.entry.seq > after)
        entry = next(there, None)
        return None if entry is None else entry.stats.get("seconds")

    def _take_missed(self, plan: Plan, moves: Moves) -> None:
        """Add the steps in the log whose commit this controller did not see."""
        trained = [stored.record for _, stored in sorted(self._log.items()) if stored.record.kind == "train"]
        missed = [entry for entry in trained[-MOST_STEPS:] if _version(entry) not in self._seen]
        if missed:
            splits = committed_splits(trained, plan, moves)
            self._add({_version(entry): _Seen(self._kept(entry), None, splits.get(entry.seq)) for entry in missed})

    def _kept(self, entry: LogEntry) -> LogEntry:
        """Return a log entry without its large parts, to save memory: a step of a thousand prompts has thousands of objects. A
        picture counts with all its denoising steps, which are the work of its engine, whatever part of them is trained."""
        stats = entry.stats
        if self._denoising_steps is not None:
            stats = {name: value for name, value in stats.items() if name != "response_length_before_filter"}
            stats["response_length"] = float(self._denoising_steps)
        return entry.model_copy(update={"delta": (), "cursors": None, "tally": None, "stats": stats})

    def _add(self, more: dict[Version, _Seen]) -> None:
        together = sorted((self._seen | more).items(), key=lambda one: one[1].entry.seq)
        self._seen = dict(together[-MOST_STEPS:])


def engine_rows(spec: JobSpec) -> EngineRows:
    """Return, for each pool, the maximum of concurrent requests to all engines of a slot together."""
    return EngineRows(spec.rollout.batch_slots, sum(judge.serving.batch_slots for judge in spec.served_judges) or 1)


def measured_by_slot(step: MeasuredStep, judges: int) -> MeasuredStep:
    """Present the engines of several judges on one slot as one engine that has the requests of all. Assumes that all
    judges get equally many requests."""
    if judges == 1:
        return step
    speed = tuple(replace(one, running=one.running * judges) if one.pool == "reward" else one for one in step.speed)
    return replace(step, speed=speed)


def count_questions(book: StepAccount) -> StepAccount:
    """Count each question to a classifier as one token: pools are measured by tokens, and a classifier generates
    none."""

    def counted(sums: EngineSums) -> EngineSums:
        return sums.model_copy(update={"tokens": sums.requests})

    engines = {pool: counted(sums) if pool == "reward" else sums for pool, sums in book.engines.items()}
    loads = {pool: tuple(map(counted, one)) if pool == "reward" else one for pool, one in book.loads.items()}
    return book.model_copy(update={"engines": engines, "loads": loads})


def _version(entry: LogEntry) -> Version:
    return Version(entry.lineage, entry.step)


def committed_splits(trained: Sequence[LogEntry], plan: Plan, moves: Moves) -> dict[int, Split]:
    """Reconstruct the splits of committed steps from the present plan and the moves since, by number of the log entry.
    It goes back from the newest step and stops at the first whose split is not known. `trained`: log entries of the
    steps, oldest first."""
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
            break  # the plan changed in between, and no move describes the change
        found[entry.seq] = split
    return found


class MovesFile:
    """Writes `moves.jsonl` of one run, on one controller. Blocks: call it in a thread."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / NAME
        self._known: dict[int, dict[str, Any]] | None = None
        self._stays: dict[float, dict[str, Any]] = {}

    def keep(self, moves: Moves, *, to_the_end: bool = False) -> None:
        """Append the moves and hold periods that are new or changed. `to_the_end`: also the newest hold period, which
        could otherwise still continue. Never raises."""
        try:
            if self._known is None:
                lines = [line.decode(errors="replace") for line in last_lines(self._file, TAIL)]
                self._known, self._stays = _by_number(lines), _by_beginning(lines)
            known = self._known
            first = moves.total - len(moves.moves)
            trees = {
                first + place: tree
                for place, move in enumerate(moves.moves)
                if (tree := _tree(move, self._file)) is not None
            }
            news = {number: tree for number, tree in trees.items() if known.get(number) != tree}
            over = moves.stays if to_the_end else moves.stays[:-1]
            stays = {stay.began: tree for stay in over if (tree := _tree(stay, self._file)) is not None}
            more = [{"stay": tree} for began, tree in stays.items() if self._stays.get(began) != tree]
            if news or more:
                records = [*({"number": n, "move": tree} for n, tree in news.items()), *more]
                append_lines(self._file, "".join(json.dumps(tree) + "\n" for tree in records).encode())
            # The store keeps no older ones.
            self._known = dict(sorted((known | trees).items())[-NEWEST_MOVES:])
            self._stays = stays
        except OSError as error:
            self._known = None
            log.warning("cannot write to %s: %s", self._file, error)


def _tree(move: Move | HoldPeriod, file: Path) -> dict[str, Any] | None:
    """Return a move or hold period as a JSON object; None if its text cannot be encoded, for example because a policy's
    reason contains a lone surrogate."""
    try:
        tree: dict[str, Any] = json.loads(move.model_dump_json(exclude_defaults=True))
    except ValueError as error:
        log.warning("%s: cannot encode the move of step %s: %s", file, move.step, error)
        return None
    return tree


def read_lines_by_number(file: Path) -> dict[int, dict[str, Any]]:
    """Read the moves in a file as JSON objects, by number; incomplete lines are skipped. Raises OSError, except for a
    missing file."""
    return _by_number(_lines(file))


def _lines(file: Path) -> list[str]:
    """Read the lines of a file; none if it is missing. Raises OSError."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _by_number(lines: Iterable[str]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        tree = parse_object(line)
        if tree is not None and isinstance(tree.get("number"), int) and isinstance(tree.get("move"), dict):
            found[tree["number"]] = tree["move"]
    return dict(sorted(found.items()))


def _by_beginning(lines: Iterable[str]) -> dict[float, dict[str, Any]]:
    found: dict[float, dict[str, Any]] = {}
    for line in lines:
        stay = (parse_object(line) or {}).get("stay")
        if isinstance(stay, dict):
            with contextlib.suppress(ValueError, TypeError):
                found[float(stay.get("began", 0.0))] = stay
    return dict(sorted(found.items()))


def read_moves(file: Path) -> list[Move]:
    """Read the moves as records, oldest first; unreadable ones are skipped. Raises OSError."""
    return list(_records(read_lines_by_number(file).values(), Move))


def read_stays(file: Path) -> list[HoldPeriod]:
    """Read the hold periods, oldest first. Raises OSError."""
    return list(_records(_by_beginning(_lines(file)).values(), HoldPeriod))


def _records(trees: Iterable[dict[str, Any]], kind: type[One]) -> Iterator[One]:
    for tree in trees:
        with contextlib.suppress(ValueError):
            yield kind.model_validate_json(json.dumps(tree))
