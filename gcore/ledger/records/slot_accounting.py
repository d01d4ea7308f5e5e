"""Stored slot accounting (utilization): the newest steps of each node in the store, every step in the run folder.

Slot accounting assigns every second of every slot (accelerator) to one state, such as busy, idle or switching. The
record `placement/books/{node}` has the newest steps of a node; its controller writes it once per step under its lease.
It is a report: no transaction compares it, and a step without a report is still valid. The file `books/NODE.jsonl` in
the run folder has one line per step, with the states of each slot over time; `gcore trace` reads it. A step that was
rolled back and repeated has a line in each lineage. Unreadable lines are skipped: the last line of a killed run may be
incomplete.

`controllers.accounting` measures these times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from gcore.schema import Record, RecordPart
from gcore.system.files import append_lines, last_lines, parse_number, parse_object
from gcore.types import Version

NEWEST_STEPS = 4
"""Number of steps in a node's record. The placement planner reads each step when it arrives."""

MOST_SWITCHES = 16
"""Maximum number of role changes of slots that a step keeps per kind ("from>to"); the newest are kept."""

MAX_ACCOUNT_BYTES = 8192
"""Maximum size in bytes of a step in the record: about forty states, and role changes of about twelve kinds."""


class EngineSums(RecordPart):
    """Work of the inference engines of one pool, as sums over engines.

    `active_s`: seconds in which an engine had at least one running request. `running_s`: the same, weighted by the
    number of running requests. `tokens`: tokens generated in these seconds. `requests`: requests received.
    """

    active_s: NonNegativeFloat = 0.0
    running_s: NonNegativeFloat = 0.0
    tokens: NonNegativeInt = 0
    requests: NonNegativeInt = 0

    def plus(self, other: EngineSums) -> EngineSums:
        """Sum of both."""
        return EngineSums.together((self, other))

    @classmethod
    def together(cls, parts: Sequence[EngineSums]) -> EngineSums:
        """Sum of any number of `parts`."""
        return cls(
            active_s=sum(one.active_s for one in parts),
            running_s=sum(one.running_s for one in parts),
            tokens=sum(one.tokens for one in parts),
            requests=sum(one.requests for one in parts),
        )


class StepAccount(RecordPart):
    """Slot accounting of one step on one node, from the previous step's commit to the commit of `version`.

    `seconds`: length of the step. `slots`: number of the node's slots. `booked`: slot-seconds by state
    (`controllers.accounting.states.State`, as text), over all slots. `unbooked`: slot-seconds in no known state;
    `booked` and `unbooked` sum to `seconds` times `slots`. `overbooked`: seconds that workers reported beyond the time
    that passed, which are not included elsewhere.
    """

    version: Version
    began: float
    """Seconds since the epoch, for display."""
    seconds: NonNegativeFloat
    slots: NonNegativeInt
    booked: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    unbooked: NonNegativeFloat = 0.0
    overbooked: NonNegativeFloat = 0.0
    engines: dict[str, EngineSums] = Field(default_factory=dict)
    """Work of the engines, by pool."""
    loads: dict[str, tuple[EngineSums, ...]] = Field(default_factory=dict)
    """Engine time by pool and number of concurrent requests: 1, 2 to 3, 4 to 7 and so on."""
    switches: dict[str, tuple[NonNegativeFloat, ...]] = Field(default_factory=dict)
    """Role changes of slots that ended in this step: the seconds that each took, by "from>to"."""

    @property
    def error(self) -> float:
        """Share of the slot time that is unaccounted or counted twice."""
        total = self.seconds * self.slots
        return (self.unbooked + self.overbooked) / total if total else 0.0


class NodeAccounts(Record):
    """Record `placement/books/{node}`: slot accounting of the newest steps on one node, oldest first."""

    called: ClassVar[str] = "books of a node"

    node: str
    steps: tuple[StepAccount, ...] = ()

    def at(self, version: Version) -> StepAccount | None:
        """Accounting of the step that produced `version`, or None."""
        return next((step for step in reversed(self.steps) if step.version == version), None)

    def plus(self, step: StepAccount) -> NodeAccounts:
        """Return the record with `step` added, in place of one of the same version. Keeps `NEWEST_STEPS` steps."""
        kept = [one for one in self.steps if one.version != step.version]
        return self.model_copy(update={"steps": (*kept, step)[-NEWEST_STEPS:]})


def group_by_version(books: Mapping[str, NodeAccounts]) -> dict[Version, dict[str, StepAccount]]:
    """Rearrange the records of all nodes: accounting by version, then by node. `books`: by node."""
    found: dict[Version, dict[str, StepAccount]] = {}
    for node, book in sorted(books.items()):
        for step in book.steps:
            found.setdefault(step.version, {})[node] = step
    return found


def sum_engines(books: Iterable[StepAccount]) -> dict[str, EngineSums]:
    """Add up the engines' work of several nodes, by pool."""
    parts: dict[str, list[EngineSums]] = {}
    for book in books:
        for pool, more in book.engines.items():
            parts.setdefault(pool, []).append(more)
    return {pool: EngineSums.together(found) for pool, found in parts.items()}


FOLDER = "books"

MOST_LINE_BYTES = 1 << 20
"""Number of bytes at the end of a file that are searched for its last readable line."""

MOST_SLOTS = 65_536
"""Maximum number of slots per node; lines with more are damaged."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time interval, and how many of its seconds were spent in each state of a slot, or in each phase of the job.

    `begin` and `end`: in seconds; in the file they count from the start of the step.
    """

    begin: float
    end: float
    seconds: Mapping[str, float]

    @property
    def unbooked(self) -> float:
        """Seconds of the interval in no known state."""
        return self.end - self.begin - sum(self.seconds.values())

    @property
    def most(self) -> str:
        """The state with the most seconds; empty if `unbooked` is larger."""
        return self.longest(lambda state: 0)

    def longest(self, order: Callable[[str], int]) -> str:
        """Like `most`; of states with equal seconds, the one with the lowest `order(state)`."""
        most = max(self.seconds, key=lambda state: (self.seconds[state], -order(state)), default="")
        return most if most and self.seconds[most] >= self.unbooked else ""


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """Counters of one worker (engine or train rank) since its start: seconds and counts, by name.

    `at`: when they were read, in seconds of the machine's monotonic clock.
    """

    slot: str
    at: float
    sums: Mapping[str, float]


@dataclass(frozen=True)
class AccountLine:
    """One line of `books/NODE.jsonl`: accounting of one step on one node, with its course over time.

    `phases`: phases of the job during the step, as seen by the node. `spans`: states of each slot, by slot name.
    """

    node: str
    book: StepAccount
    phases: Sequence[Span] = ()
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    kept: Mapping[str, WorkerTotals] = field(default_factory=dict)
    """Counters of engines and ranks at the end of the step, by worker instance. If the node's controller restarts, it
    continues from them.
    """

    @property
    def until(self) -> float:
        """End of the step, in seconds since the epoch."""
        return self.book.began + self.book.seconds


def encode_line(line: AccountLine) -> str:
    """Encode a step as one JSON line of the file, with newline."""
    tree = {
        "node": line.node,
        "step": line.book.version.step,
        "book": line.book.model_dump(mode="json", exclude_defaults=True),
        "error": round(line.book.error, 6),
        "phases": [_tree(one) for one in line.phases],
        "spans": {slot: [_tree(one) for one in spans] for slot, spans in line.spans.items()},
        "kept": {instance: [one.slot, one.at, dict(one.sums)] for instance, one in line.kept.items()},
    }
    return json.dumps(tree, separators=(",", ":")) + "\n"


def _tree(one: Span) -> list[Any]:
    seconds = {state: round(seconds, 4) for state, seconds in one.seconds.items() if seconds >= 5e-5}
    return [round(one.begin, 4), round(one.end, 4), seconds]


def parse_line(line: str | bytes) -> AccountLine | None:
    """Parse a line that `encode_line` wrote. None if it is unreadable or has more than `MOST_SLOTS` slots."""
    try:
        tree = parse_object(line if isinstance(line, str) else line.decode(errors="replace")) or {}
        book = StepAccount.model_validate_json(json.dumps(tree["book"]))
        if book.slots > MOST_SLOTS:
            return None
        return AccountLine(
            str(tree["node"]),
            book,
            [_parse_span(one) for one in tree["phases"]],
            {slot: [_parse_span(one) for one in spans] for slot, spans in tree["spans"].items()},
            {instance: _parse_totals(one) for instance, one in tree["kept"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _parse_span(tree: Any) -> Span:
    begin, end, seconds = tree
    return Span(
        parse_number(begin), parse_number(end), {state: parse_number(value) for state, value in seconds.items()}
    )


def _parse_totals(tree: Any) -> WorkerTotals:
    slot, at, sums = tree
    if not isinstance(slot, str):
        raise TypeError(f"{slot!r} is not a slot name")
    return WorkerTotals(slot, parse_number(at), {name: parse_number(value) for name, value in sums.items()})


def append_line(run_dir: Path, line: AccountLine) -> None:
    """Append a step to the node's file. Raises OSError. Blocks."""
    path = run_dir / FOLDER / f"{line.node}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    append_lines(path, encode_line(line).encode())


def newest_line(run_dir: Path, node: str) -> AccountLine | None:
    """Read the last readable line of a node's file; None if there is none. Raises OSError. Blocks."""
    texts = [*last_lines(run_dir / FOLDER / f"{node}.jsonl", MOST_LINE_BYTES)]
    return next((line for text in reversed(texts) if (line := parse_line(text)) is not None), None)


def read_lines(run_dir: Path, step: int | None = None) -> Iterator[AccountLine]:
    """Yield the lines of all nodes, node by node, oldest first. `step`: only of this step. Raises OSError. Blocks."""
    return (line for _, _, line in _lines(run_dir, step))


def read_step_lines(run_dir: Path, step: int) -> Iterator[AccountLine]:
    """Yield the lines of a step in its newest lineage, node by node, read one by one. Raises OSError. Blocks."""
    newest, places = Version(0, step), dict[Path, int]()
    for path, offset, line in _lines(run_dir, step):
        if line.book.version > newest:
            newest, places = line.book.version, {}
        if line.book.version == newest:
            places[path] = offset
    for path, offset in sorted(places.items()):
        with path.open("rb") as file:
            file.seek(offset)
            again = parse_line(file.readline())
        if again is not None:
            yield again


def _lines(run_dir: Path, step: int | None) -> Iterator[tuple[Path, int, AccountLine]]:
    """Yield each readable line with its file and byte offset. `step`: only lines of this step; None: all."""
    mark = None if step is None else f'"step":{step},'.encode()
    for path in sorted((run_dir / FOLDER).glob("*.jsonl")):
        with path.open("rb") as file:
            offset = 0
            for text in file:
                begin, offset = offset, offset + len(text)
                if mark is None or mark in text[: len(path.stem.encode()) + 64]:
                    line = parse_line(text)
                    if line is not None and step in (None, line.book.version.step):
                        yield path, begin, line
