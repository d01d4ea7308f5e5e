"""Stored slot accounting: the newest steps of each node in the store, every step in the run folder.

`placement/books/{node}` has the newest steps of a node: one small record, written once per step under its controller's
lease. It is a report. No transaction compares it, and a step without a report is still valid. `books/NODE.jsonl` in the
run folder has one line per step with the states of each slot over time; `gcore trace` reads it. A step that was rolled
back and repeated has a line in each lineage. Unreadable lines are skipped: the last line of a killed run may be
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
"""Number of steps in a node's record. The planner reads each as it arrives."""

MOST_SWITCHES = 16
"""Maximum number of switches of one kind per step; the newest are kept."""

MAX_ACCOUNT_BYTES = 8192
"""Maximum size of a step in the record: about forty states, and switches of about twelve kinds."""


class EngineSums(RecordPart):
    """Sums over the engines of a pool. Sums of several nodes can be added.

    `active_s`: seconds in which an engine had at least one request. `running_s`: the same, weighted by the number of
    requests. `tokens`: generated in these seconds. `requests`: received.
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
        """Sum of `parts`, created as one object."""
        return cls(
            active_s=sum(one.active_s for one in parts),
            running_s=sum(one.running_s for one in parts),
            tokens=sum(one.tokens for one in parts),
            requests=sum(one.requests for one in parts),
        )


class StepAccount(RecordPart):
    """One step on one node: from the commit of the previous step to the commit of `version`, as seen by this node.

    `booked`: seconds by state (`controllers.accounting.states.State`, as text), over all slots. With `unbooked`, the
    slot-seconds in no known state, they sum to `seconds` times `slots`. `overbooked`: seconds that workers reported
    beyond their own time, which were cut off.
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
    """By pool."""
    loads: dict[str, tuple[EngineSums, ...]] = Field(default_factory=dict)
    """Engine time by pool and number of concurrent requests: 1, 2 to 3, 4 to 7 and so on."""
    switches: dict[str, tuple[NonNegativeFloat, ...]] = Field(default_factory=dict)
    """By "from>to": seconds of each change of a slot's role that ended in this step."""

    @property
    def error(self) -> float:
        """Share of the slot time that is unaccounted or counted twice."""
        total = self.seconds * self.slots
        return (self.unbooked + self.overbooked) / total if total else 0.0


class NodeAccounts(Record):
    """`placement/books/{node}`: the newest steps, oldest first."""

    called: ClassVar[str] = "books of a node"

    node: str
    steps: tuple[StepAccount, ...] = ()

    def at(self, version: Version) -> StepAccount | None:
        """The step that produced `version`, or None."""
        return next((step for step in reversed(self.steps) if step.version == version), None)

    def plus(self, step: StepAccount) -> NodeAccounts:
        """With `step` added; drops the oldest beyond `NEWEST_STEPS`."""
        kept = [one for one in self.steps if one.version != step.version]
        return self.model_copy(update={"steps": (*kept, step)[-NEWEST_STEPS:]})


def group_by_version(books: Mapping[str, NodeAccounts]) -> dict[Version, dict[str, StepAccount]]:
    """Accounts by step, and for each step by node."""
    found: dict[Version, dict[str, StepAccount]] = {}
    for node, book in sorted(books.items()):
        for step in book.steps:
            found.setdefault(step.version, {})[node] = step
    return found


def sum_engines(books: Iterable[StepAccount]) -> dict[str, EngineSums]:
    """Sums per pool over all nodes."""
    parts: dict[str, list[EngineSums]] = {}
    for book in books:
        for pool, more in book.engines.items():
            parts.setdefault(pool, []).append(more)
    return {pool: EngineSums.together(found) for pool, found in parts.items()}


FOLDER = "books"

MOST_LINE_BYTES = 1 << 20
"""Number of bytes at the end of the file that are searched for the last line."""

MOST_SLOTS = 65_536
"""Maximum number of slots of a node."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time interval with seconds by state, or by phase of the job.

    In the file, `begin` and `end` count from the start of the step.
    """

    begin: float
    end: float
    seconds: Mapping[str, float]

    @property
    def unbooked(self) -> float:
        """Seconds in no known state."""
        return self.end - self.begin - sum(self.seconds.values())

    @property
    def most(self) -> str:
        """The state with the most seconds; empty if `unbooked` is larger."""
        return self.longest(lambda state: 0)

    def longest(self, order: Callable[[str], int]) -> str:
        """Like `most`; among equal states the one with the lowest `order`."""
        most = max(self.seconds, key=lambda state: (self.seconds[state], -order(state)), default="")
        return most if most and self.seconds[most] >= self.unbooked else ""


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """Totals of a worker at time `at` (monotonic clock of the machine): seconds and counts by name."""

    slot: str
    at: float
    sums: Mapping[str, float]


@dataclass(frozen=True)
class AccountLine:
    """A step on a node. `phases`: of the job, as seen by the node. `spans`: by slot."""

    node: str
    book: StepAccount
    phases: Sequence[Span] = ()
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    kept: Mapping[str, WorkerTotals] = field(default_factory=dict)
    """Totals of engines and ranks at the end of the step, by instance. The next incarnation of the node's controller
    continues from them.
    """

    @property
    def until(self) -> float:
        """End of the step, in seconds since the epoch."""
        return self.book.began + self.book.seconds


def encode_line(line: AccountLine) -> str:
    """One line of the file, with newline."""
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
    told = {state: round(seconds, 4) for state, seconds in one.seconds.items() if seconds >= 5e-5}
    return [round(one.begin, 4), round(one.end, 4), told]


def parse_line(line: str | bytes) -> AccountLine | None:
    """Inverse of `encode_line`. None for an unreadable line or one with more than `MOST_SLOTS` slots."""
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
    return Span(parse_number(begin), parse_number(end), {state: parse_number(told) for state, told in seconds.items()})


def _parse_totals(tree: Any) -> WorkerTotals:
    slot, at, sums = tree
    if not isinstance(slot, str):
        raise TypeError(f"{slot!r} is not a slot name")
    return WorkerTotals(slot, parse_number(at), {name: parse_number(told) for name, told in sums.items()})


def append_line(run_dir: Path, line: AccountLine) -> None:
    """Append a step to the node's file. Raises OSError. Blocks."""
    path = run_dir / FOLDER / f"{line.node}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    append_lines(path, encode_line(line).encode())


def newest_line(run_dir: Path, node: str) -> AccountLine | None:
    """The last step in a node's file, or None. Raises OSError. Blocks."""
    texts = [*last_lines(run_dir / FOLDER / f"{node}.jsonl", MOST_LINE_BYTES)]
    return next((line for text in reversed(texts) if (line := parse_line(text)) is not None), None)


def read_lines(run_dir: Path, step: int | None = None) -> Iterator[AccountLine]:
    """Lines of all nodes (of one step, if given), node by node, oldest first. Raises OSError. Blocks."""
    return (line for _, _, line in _lines(run_dir, step))


def read_step_lines(run_dir: Path, step: int) -> Iterator[AccountLine]:
    """Lines of a step in its newest lineage, node by node; each is read on demand. Raises OSError. Blocks."""
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
    """Yield each line with its file and offset."""
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
