"""Slot accounting as it is stored: the newest steps of each node in the store, every step in the run's folder.

`placement/books/{node}` has the newest steps of a node, one small record written once a step under the lease of its controller. It is a
report: no transaction compares it, and a step that was not accounted for is a step all the same. `books/NODE.jsonl` in the run's folder
has a line a step, with what each slot was when; `gcore trace` reads it. A step that was rolled back and made again has a line in each
lineage. Lines that cannot be read are skipped: the last line of a run that was killed may be cut off.

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
"""Steps in a node's record. The planner reads them as they come, and keeps what it needs."""

MOST_SWITCHES = 16
"""Of one kind, in a step: the newest. More would be no news."""

MAX_ACCOUNT_BYTES = 8192
"""Of a step in the record: there are some forty states, and switches of a dozen kinds."""


class EngineSums(RecordPart):
    """What the engines of a pool did, in sums, so that those of several nodes can be added.

    `active_s`: seconds in which an engine had anything to run; `running_s`: the same, counted as often as it had requests;
    `tokens`: made in them; `requests`: that it was given.
    """

    active_s: NonNegativeFloat = 0.0
    running_s: NonNegativeFloat = 0.0
    tokens: NonNegativeInt = 0
    requests: NonNegativeInt = 0

    def plus(self, other: EngineSums) -> EngineSums:
        """Both together."""
        return EngineSums.together((self, other))

    @classmethod
    def together(cls, parts: Sequence[EngineSums]) -> EngineSums:
        """The sum of all of them, with one object made."""
        return cls(
            active_s=sum(one.active_s for one in parts),
            running_s=sum(one.running_s for one in parts),
            tokens=sum(one.tokens for one in parts),
            requests=sum(one.requests for one in parts),
        )


class StepAccount(RecordPart):
    """One step on one node: from when head moved to the step before until it moved to `version`, as this node received it.

    `booked`: seconds by state (`controllers.accounting.states.State`, as text), over all slots; with `unbooked`, the slot-seconds in no
    known state, they sum to `seconds` times `slots`. `overbooked`: what workers reported beyond their own time, which was cut off.
    """

    version: Version
    began: float
    """Seconds since the epoch, for people."""
    seconds: NonNegativeFloat
    slots: NonNegativeInt
    booked: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    unbooked: NonNegativeFloat = 0.0
    overbooked: NonNegativeFloat = 0.0
    engines: dict[str, EngineSums] = Field(default_factory=dict)
    """By pool."""
    loads: dict[str, tuple[EngineSums, ...]] = Field(default_factory=dict)
    """The same of their time, by how many requests ran in one: of 1, of 2 and 3, of 4 to 7 and so on, where there was any."""
    switches: dict[str, tuple[NonNegativeFloat, ...]] = Field(default_factory=dict)
    """By "from>to": how many seconds each change of a slot's role took that ended in this step."""

    @property
    def error(self) -> float:
        """Share of the slots' time that is not accounted for, or accounted for twice."""
        total = self.seconds * self.slots
        return (self.unbooked + self.overbooked) / total if total else 0.0


class NodeAccounts(Record):
    """`placement/books/{node}`: the newest steps, oldest first."""

    called: ClassVar[str] = "books of a node"

    node: str
    steps: tuple[StepAccount, ...] = ()

    def at(self, version: Version) -> StepAccount | None:
        """The step that made `version`, if it is still there."""
        return next((step for step in reversed(self.steps) if step.version == version), None)

    def plus(self, step: StepAccount) -> NodeAccounts:
        """With one step more, and without the oldest where there are too many."""
        kept = [one for one in self.steps if one.version != step.version]
        return self.model_copy(update={"steps": (*kept, step)[-NEWEST_STEPS:]})


def group_by_version(books: Mapping[str, NodeAccounts]) -> dict[Version, dict[str, StepAccount]]:
    """The accounts by step, and of each step by node."""
    found: dict[Version, dict[str, StepAccount]] = {}
    for node, book in sorted(books.items()):
        for step in book.steps:
            found.setdefault(step.version, {})[node] = step
    return found


def sum_engines(books: Iterable[StepAccount]) -> dict[str, EngineSums]:
    """By pool, all nodes together."""
    parts: dict[str, list[EngineSums]] = {}
    for book in books:
        for pool, more in book.engines.items():
            parts.setdefault(pool, []).append(more)
    return {pool: EngineSums.together(found) for pool, found in parts.items()}


FOLDER = "books"

MOST_LINE_BYTES = 1 << 20
"""Bytes at the end of the file that are searched for the last line."""

MOST_SLOTS = 65_536
"""Of a node."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time from `begin` to `end`: its seconds by state, or by phase of the job. In a line of the file both count from the step's begin."""

    begin: float
    end: float
    seconds: Mapping[str, float]

    @property
    def unbooked(self) -> float:
        """Seconds of it in no known state."""
        return self.end - self.begin - sum(self.seconds.values())

    @property
    def most(self) -> str:
        """The state that it had longest; empty: it was in no known state for longer."""
        return self.longest(lambda state: 0)

    def longest(self, order: Callable[[str], int]) -> str:
        """Like `most`; of states that it had equally long, the one that `order` puts first."""
        most = max(self.seconds, key=lambda state: (self.seconds[state], -order(state)), default="")
        return most if most and self.seconds[most] >= self.unbooked else ""


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """Totals of a worker at `at` (the machine's monotonic clock): seconds, and counts, by name."""

    slot: str
    at: float
    sums: Mapping[str, float]


@dataclass(frozen=True)
class AccountLine:
    """A step on a node. `phases`: of the job, as the node saw it; `spans`: by slot."""

    node: str
    book: StepAccount
    phases: Sequence[Span] = ()
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    kept: Mapping[str, WorkerTotals] = field(default_factory=dict)
    """By instance: totals of engines and ranks at its end, from which the next incarnation of the node's controller continues."""

    @property
    def until(self) -> float:
        """Its end, in seconds since the epoch."""
        return self.book.began + self.book.seconds


def encode_line(line: AccountLine) -> str:
    """The line of the file, with its line end."""
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
    """Inverse of `encode_line`; None for what cannot be read, or has more slots than a node can have."""
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
        raise TypeError(f"{slot!r} is no slot")
    return WorkerTotals(slot, parse_number(at), {name: parse_number(told) for name, told in sums.items()})


def append_line(run_dir: Path, line: AccountLine) -> None:
    """Append a step to the node's file. Raises OSError. Blocks."""
    path = run_dir / FOLDER / f"{line.node}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    append_lines(path, encode_line(line).encode())


def newest_line(run_dir: Path, node: str) -> AccountLine | None:
    """The last step in a node's file; None: there is none. Raises OSError. Blocks."""
    texts = [*last_lines(run_dir / FOLDER / f"{node}.jsonl", MOST_LINE_BYTES)]
    return next((line for text in reversed(texts) if (line := parse_line(text)) is not None), None)


def read_lines(run_dir: Path, step: int | None = None) -> Iterator[AccountLine]:
    """The lines of all nodes (of one step), node by node, oldest first. Raises OSError. Blocks."""
    return (line for _, _, line in _lines(run_dir, step))


def read_step_lines(run_dir: Path, step: int) -> Iterator[AccountLine]:
    """The lines of a step in the newest lineage that has it, node by node; each is read when it is asked for. Raises OSError. Blocks."""
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
    """With the file and the offset of each."""
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
