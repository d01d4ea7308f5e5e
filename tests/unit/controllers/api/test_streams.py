"""The numbers of steps as a stream: in the chain's order, from any position, also across a rollback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import KEYS
from builders import stored as at
from hypothesis import given
from hypothesis import strategies as st

from controllers.api.edge.errors import BadFields
from controllers.api.streams import (
    StreamPosition,
    all_steps,
    has_no_values,
    parse_position,
    step_message,
    stored_steps,
)
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger import archive
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import EndedRef, LogEntry
from gcore.types import PromptRef


def entry(seq: int, kind: Any, lineage: int, step: int, **stats: float) -> LogEntry:
    return LogEntry(
        seq=seq, parent=seq - 1 or None, kind=kind, lineage=lineage, step=step, world="w", nonce=f"n{seq}", stats=stats
    )


# Three steps, back to the first, and the other two again.
CHAIN = [
    entry(0, "base", 0, 0),
    entry(1, "train", 0, 1, reward=0.1),
    entry(2, "train", 0, 2, reward=0.2),
    entry(3, "account", 0, 2),
    entry(4, "train", 0, 3, reward=0.3),
    entry(5, "rollback", 1, 1),
    entry(6, "train", 1, 2, reward=0.4),
    entry(7, "train", 1, 3, reward=0.5),
]
STEPS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]


def named(entries: Any) -> list[tuple[int, int]]:
    return [(one.lineage, one.step) for one in entries]


def test_steps_come_in_the_order_of_the_chain_from_folder_and_store_together(tmp_path: Path) -> None:
    archive.append_entries(tmp_path, "w", CHAIN[:4])
    newest = {one.seq: one for one in CHAIN[3:]}
    assert named(all_steps(tmp_path, newest, StreamPosition(0))) == STEPS
    assert named(all_steps(tmp_path, newest, StreamPosition(1))) == STEPS[1:]
    assert named(all_steps(tmp_path, newest, StreamPosition(2, lineage=0))) == STEPS[2:]
    assert named(all_steps(tmp_path / "nowhere", newest, StreamPosition(0))) == STEPS[2:]


@given(st.integers(0, 5))
def test_a_stream_that_goes_on_from_another_controller_loses_no_step_and_doubles_none(broken: int) -> None:
    mirror = JobMirror(KEYS, log={one.seq: at(one) for one in CHAIN})
    first = named(stored_steps(mirror, StreamPosition(0)))[:broken]
    place = StreamPosition(first[-1][1], first[-1][0]) if first else StreamPosition(0)
    assert first + named(stored_steps(mirror, place)) == STEPS


def test_a_step_tells_its_finite_numbers_and_what_came_of_its_prompts() -> None:
    trained = EndedRef(ref=PromptRef(0, 0, 0), kind="trained")
    failed = EndedRef(ref=PromptRef(0, 0, 1), kind="failed", reason="r")
    one = entry(1, "train", 2, 5, reward=0.25, loss=float("nan")).model_copy(update={"delta": (trained, failed)})
    told = step_message(one, ())
    assert (told.lineage, told.step) == (2, 5)
    assert dict(told.values) == {"reward": 0.25, "groups": 1.0, "filtered": 0.0, "failed": 1.0}
    assert dict(step_message(one, {"reward", "nothing"}).values) == {"reward": 0.25}


@pytest.mark.parametrize("names", [[], ["reward"], ["kl", "groups"], ["own/number", "reward"], ["own/number"]])
def test_a_number_that_a_step_has_told_or_gcore_has_is_known(names: list[str]) -> None:
    some = [entry(1, "train", 0, 1, reward=0.1), entry(2, "train", 0, 2, **{"own/number": 1.0})]
    assert not has_no_values(names, some)


def test_a_number_that_no_step_has_told_and_gcore_has_not_is_unknown() -> None:
    some = [entry(1, "train", 0, 1, reward=0.1), entry(2, "train", 0, 2, **{"own/number": 1.0})]
    for name, near in (("rewrad", "reward"), ("own/numbr", "own/number"), ("clip_fractoin", "clip_fraction")):
        with pytest.raises(
            BadFields, match=f"{name!r} is not a metric of this job's steps so far, did you mean {near!r}"
        ):
            has_no_values(["reward", name], some)


def test_before_the_first_step_nothing_is_known_to_be_wrong() -> None:
    assert has_no_values(["rewrad"], [])
    assert not has_no_values(["reward"], [])


def test_a_place_that_is_none_names_its_field() -> None:
    assert parse_position(pb.StreamMetricsRequest(after_step=3)) == StreamPosition(3)
    assert parse_position(pb.StreamMetricsRequest(after_step=3, after_lineage=0)) == StreamPosition(3, 0)
    with pytest.raises(BadFields) as error:
        parse_position(pb.StreamMetricsRequest(after_step=-1, after_lineage=-1, names=["x"] * 999))
    assert [one.field for one in error.value.violations] == ["after_step", "after_lineage", "names"]
