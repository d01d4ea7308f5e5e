"""Slot accounting of a whole run: the nodes' records, and a check of their sums."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from controllers.accounting.states import precedence
from gcore.ledger.records.slot_accounting import AccountLine, read_lines

MOST_ERROR = 0.01
"""Share of a step's time that may be booked wrongly or not at all."""
ROUNDED_S = 5e-3
"""Tolerance between the spans of a slot and its booked time: spans are rounded to tenths of a millisecond."""
MOST_LOST = 0.05
"""Allowed unbooked share of a run's time after a kill: a dead process does not report its last second."""


def books_of(home: Path) -> tuple[Path, list[AccountLine]]:
    """The run's folder, and what its nodes have booked, start-up first."""
    (folder,) = (home / "runs").iterdir()
    return folder, list(read_lines(folder))


def check_sums(lines: Sequence[AccountLine]) -> None:
    """Each book sums to its time, and to what its slots were, span by span: the spans fill the step's window without a gap, and what they
    are is what is booked, and what nobody can say of them is what is unbooked."""
    for line in lines:
        book = line.book
        total = book.seconds * book.slots
        assert sum(book.booked.values()) + book.unbooked == pytest.approx(total, rel=1e-3, abs=1e-3)
        assert min(book.booked.values(), default=0) >= 0
        assert all(precedence(state) >= 0 for state in book.booked)
        assert len(line.spans) == book.slots
        told, unknown, near = defaultdict[str, float](float), 0.0, ROUNDED_S * max(book.slots, 1)
        for spans in line.spans.values():
            ends = [0.0, *(span.end for span in spans)]
            assert [span.begin for span in spans] == pytest.approx(ends[:-1], abs=1e-3)
            assert ends[-1] == pytest.approx(book.seconds, abs=1e-3)
            for span in spans:
                of_it = sum(span.seconds.values())
                assert of_it <= span.end - span.begin + 1e-3
                unknown += span.end - span.begin - of_it
                for state, seconds in span.seconds.items():
                    told[state] += seconds
        for state in {*told, *book.booked}:
            assert told[state] == pytest.approx(book.booked.get(state, 0.0), rel=1e-3, abs=near), state
        assert unknown == pytest.approx(book.unbooked, rel=1e-3, abs=near)


def unbooked(lines: Sequence[AccountLine]) -> float:
    """Share of the time of all slots without a known state."""
    return sum(line.book.unbooked for line in lines) / sum(line.book.seconds * line.book.slots for line in lines)


def check_steps(folder: Path, lines: list[AccountLine], steps: int) -> None:
    """Every step was booked by every node, and a node's steps take as long together as the log entries say. A single step may differ: a
    node learns of a commit later than the node that commits, which lengthens one step there and shortens the next."""
    told = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    took = {line["step"]: line["metrics"]["seconds"] for line in told if line["kind"] == "step"}
    nodes = {line.node for line in lines}
    booked = Counter(line.book.version.step for line in lines)
    assert [booked[step] for step in range(1, steps + 1)] == [len(nodes)] * steps
    expected = sum(took[step] for step in range(2, steps + 1))  # a rank that starts late finds the first already begun
    for node in nodes:
        seconds = sum(line.book.seconds for line in lines if line.node == node and 1 < line.book.version.step <= steps)
        assert seconds == pytest.approx(expected, rel=0.1)


def check_accounted(folder: Path, lines: list[AccountLine], steps: int) -> None:
    """Every second of every slot of a run of real engines and two ranks."""
    check_sums(lines)
    check_steps(folder, lines, steps)
    for line in lines:
        assert line.book.error < MOST_ERROR, line
    for line in lines:
        if line.book.version.step > 1:
            assert {"busy rollout", "busy train"} <= line.book.booked.keys()
            assert line.book.engines["rollout"].tokens > 0
    # What ranks say of their own steps, in the log, is what was booked for them.
    read = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [line["metrics"] for line in read if line["kind"] == "step"]
    phases = ("cut", "reference", "old_logprobs", "values", "update", "copies", "checkpoint")
    worked = sum(metrics.get(f"{phase}_seconds", 0.0) for metrics in told for phase in phases)
    booked = sum(line.book.booked.get("busy train", 0.0) for line in lines) / 2
    assert booked == pytest.approx(worked, rel=0.15)
