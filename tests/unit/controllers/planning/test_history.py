"""The newest steps in the planner's history: each with the split that it ran with, or absent.

The file of a run's moves has every move; its writer keeps only the newest in memory.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import running_job, stored
from hypothesis import given
from hypothesis import strategies as st

from controllers.cli.commands.placement import collect_stays
from controllers.planning import history as moves_file
from controllers.planning.history import (
    MOST_STEPS,
    NAME,
    MovesFile,
    StepHistory,
    committed_splits,
    read_lines_by_number,
    read_moves,
)
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry, Seal, SealedGroup, SealState
from gcore.ledger.records.job import NEWEST_MOVES, HoldPeriod, Move, MoveKind, Moves, Plan
from gcore.ledger.records.slot_accounting import EngineSums, NodeAccounts, StepAccount
from gcore.types import PromptRef, Version
from placement.assign import assign_split
from placement.moves import split_part
from placement.slots import NodeSlots, Snapshot, Split

FIRST, SECOND, THIRD = (Split("coexisting", n, 7 - n, 1) for n in (6, 3, 4))
LARGER = Split("coexisting", 4, 2, 2)


def plan_of(split: Split, *, world: str = "w", slots: int = 8) -> Plan:
    snapshot = Snapshot((NodeSlots("node-0", tuple(f"cpu:{n}" for n in range(slots))),))
    plan = assign_split(split, None, snapshot, ("tutor",), world=world, generation=1)
    assert plan is not None
    return plan


def entry(step: int, *, seq: int | None = None, lineage: int = 0, world: str = "w", ranks: int = 1) -> LogEntry:
    seq = step if seq is None else seq
    stats = {"seconds": 3.0, "samples": 2.0, "response_length": 9.0, "start_seconds": float(step)}
    return LogEntry(
        kind="train",
        step=step,
        lineage=lineage,
        seq=seq,
        parent=seq - 1,
        world=world,
        nonce="n",
        ranks=ranks,
        stats=stats,
    )


def moved(seq: int, before: Split, after: Split, kind: MoveKind = MoveKind.SPLIT, state: Any = "done") -> Move:
    return Move(
        generation=1, step=seq, seq=seq, kind=kind, before=split_part(before), after=split_part(after), state=state
    )


def mirror_of(plan: Plan, entries: list[LogEntry], moves: Moves | None = None) -> JobMirror:
    mirror, newest = running_job().mirror, entries[-1]
    assert mirror.head is not None
    at = {"step": newest.step, "seq": newest.seq, "lineage": newest.lineage}
    return replace(
        mirror,
        head=stored(mirror.head.record.model_copy(update=at)),
        plan=stored(plan),
        log={one.seq: stored(one) for one in entries},
        movings={"": stored(moves or Moves())},
    )


def shown(history: StepHistory, mirror: JobMirror) -> list[tuple[int, Split]]:
    return [(one.step, one.split) for one in history.steps(mirror)]


def test_each_step_of_the_log_has_the_split_that_it_ran_with() -> None:
    moves = Moves().plus(moved(2, FIRST, SECOND)).plus(moved(5, SECOND, THIRD))
    mirror = mirror_of(plan_of(THIRD), [entry(step) for step in range(1, 8)], moves)
    assert shown(StepHistory(), mirror) == [
        *((n, FIRST) for n in (1, 2)),
        *((n, SECOND) for n in (3, 4, 5)),
        (6, THIRD),
        (7, THIRD),
    ]


def test_loans_and_unfinished_moves_are_no_split_of_a_step() -> None:
    moves = Moves().plus(moved(2, FIRST, SECOND))
    moves = moves.plus(moved(3, SECOND, THIRD, MoveKind.LEND)).plus(moved(4, THIRD, SECOND, MoveKind.RETURN))
    for state in ("wanted", "lapsed", "would"):
        moves = moves.plus(moved(4, SECOND, THIRD, state=state))
    mirror = mirror_of(plan_of(SECOND), [entry(step) for step in range(1, 6)], moves)
    assert [split for _, split in shown(StepHistory(), mirror)] == [FIRST, FIRST, SECOND, SECOND, SECOND]


def test_steps_of_another_train_world_are_known_by_the_move_that_formed_the_one_there_is() -> None:
    moves = Moves().plus(moved(2, SECOND, LARGER, MoveKind.WORLD))
    entries = [entry(1), entry(2), entry(3, seq=4, lineage=1, world="x", ranks=2)]
    mirror = mirror_of(plan_of(LARGER, world="x"), entries, moves)
    assert shown(StepHistory(), mirror) == [(1, SECOND), (2, SECOND), (3, LARGER)]


def test_steps_before_a_plan_that_changed_without_a_move_are_not_shown_and_their_seconds_are_known() -> None:
    placed_anew = mirror_of(plan_of(SECOND, world="x"), [entry(1), entry(2), entry(3, seq=4, lineage=1, world="x")])
    history = StepHistory()
    assert shown(history, placed_anew) == [(3, SECOND)]
    assert {one.step for one in history.committed(placed_anew)} == {1, 2, 3}
    joined = mirror_of(plan_of(THIRD), [entry(1), entry(2), entry(3)], Moves().plus(moved(1, FIRST, SECOND)))
    assert shown(StepHistory(), joined) == []


def test_of_a_step_that_was_made_anew_it_is_known_what_each_took() -> None:
    again = entry(2, seq=5, lineage=1)
    again = again.model_copy(update={"stats": {**again.stats, "seconds": 9.0}})
    history = StepHistory()
    history.steps(mirror_of(plan_of(SECOND), [entry(1), entry(2), entry(3), again]))
    assert history.took(2, 1) == entry(2).stats["seconds"]
    assert history.took(2, 4) == 9.0
    assert history.took(2, 5) is None
    assert history.took(4, 0) is None


def test_of_each_step_it_is_known_when_it_was_committed_and_what_its_work_was() -> None:
    again = entry(2, seq=5, lineage=1)
    mirror = mirror_of(plan_of(SECOND), [entry(1), entry(2), entry(3), again])
    sums = EngineSums(active_s=9.0, running_s=40.0, tokens=400, requests=16)
    book = StepAccount(version=Version(1, 2), began=0.0, seconds=3.0, slots=8, engines={"reward": sums})
    told = replace(mirror, books={"node-0": stored(NodeAccounts(node="node-0", steps=(book,)))})
    found = [(one.step, one.seq, one.tokens, one.question_s) for one in StepHistory().committed(told)]
    assert found == [(1, 1, 9.0, None), (2, 2, 9.0, None), (3, 3, 9.0, None), (2, 5, 9.0, 2.5)]


def test_beyond_the_moves_that_are_kept_nobody_knows_the_split() -> None:
    moves = Moves(moves=(moved(3, FIRST, SECOND),), total=7)
    mirror = mirror_of(plan_of(SECOND), [entry(step) for step in range(1, 6)], moves)
    assert shown(StepHistory(), mirror) == [(4, SECOND), (5, SECOND)]


def test_a_rollback_moves_nothing_that_was_moved_back() -> None:
    moves = Moves().plus(moved(3, FIRST, SECOND))
    entries = [entry(1), entry(2), entry(3), entry(4), entry(3, seq=6, lineage=1), entry(4, seq=7, lineage=1)]
    mirror = mirror_of(plan_of(SECOND), entries, moves)
    assert shown(StepHistory(), mirror) == [(1, FIRST), (2, FIRST), (3, SECOND), (4, SECOND)]


def seal_of(step: int) -> Seal:
    group = SealedGroup(
        ref=PromptRef(0, 0, step), digest="d", prompt_tokens=5, response_tokens=(7, 8), versions=(), holder="me"
    )
    return Seal(
        lineage=0, step=step, attempt=1, state=SealState.READY, world="w", world_size=1, mini_batches=1, groups=(group,)
    )


def test_a_picture_counts_with_all_its_denoising_steps_also_untrained_ones() -> None:
    """Also where groups were filtered, and where the window of trained steps moves."""
    plan = plan_of(FIRST)
    one = entry(1).model_copy(
        update={"stats": {**entry(1).stats, "prompts_per_group": 1.5, "response_length_before_filter": 4.0}}
    )
    history = StepHistory(denoising_steps=10)
    begun, noted = mirror_of(plan, [entry(0)]), mirror_of(plan, [entry(0), one])
    history.note(replace(begun, seals={1: stored(seal_of(1))}), noted, there)
    later = entry(2).model_copy(update={"stats": {**entry(2).stats, "response_length": 2.0}})
    missed = mirror_of(plan, [entry(0), one, later])
    assert [step.lengths for step in history.steps(missed)] == [(10.0,) * 2, (10.0,) * 3, (10.0,) * 2]
    assert {step.tokens for step in history.committed(missed)} == {10.0}, "no move is said to have had other responses"


def there(*nodes: str) -> Snapshot:
    return Snapshot(tuple(NodeSlots(node, tuple(f"cpu:{n}" for n in range(8))) for node in nodes or ("node-0",)))


def test_a_step_is_not_taken_for_one_of_a_split_whose_nodes_were_away() -> None:
    whole = Split("coexisting", 10, 4, 2)
    plan = assign_split(whole, None, there("node-0", "node-1"), ("tutor",), world="w", generation=1)
    assert plan is not None
    history, mirrors = StepHistory(), [mirror_of(plan, [entry(n) for n in range(step + 1)]) for step in range(4)]
    present = [("node-0", "node-1"), ("node-0",), ("node-0",)]

    def book(node: str, step: int) -> NodeAccounts:
        judges = {"reward": EngineSums(active_s=1.0, running_s=2.0, tokens=40, requests=2)}
        one = StepAccount(version=Version(0, step), began=0.0, seconds=3.0, slots=8, engines=judges)
        return NodeAccounts(node=node, steps=(one,))

    for step, nodes in enumerate(present, start=1):
        before = replace(mirrors[step - 1], seals={step: stored(seal_of(step))})
        history.note(before, mirrors[step], functools.partial(there, *nodes))
        booked = replace(mirrors[step], books={node: stored(book(node, step)) for node in nodes})
        found = history.steps(booked)[-1]
        slots = found.split.rollout + found.split.reward + found.split.train
        assert slots == 8 * len(nodes)
        # Of the step within which the node was lost, nobody knows all judgements.
        assert found.judged == {1: (40.0, 40.0), 2: (), 3: (20.0, 20.0)}[step]


def test_steps_that_were_missed_in_a_pause_come_in_their_order_with_the_split_they_had() -> None:
    history, plans = StepHistory(), {FIRST: plan_of(FIRST), SECOND: plan_of(SECOND)}
    begun = mirror_of(plans[FIRST], [entry(0)])
    one = mirror_of(plans[FIRST], [entry(0), entry(1)])
    history.note(replace(begun, seals={1: stored(seal_of(1))}), one, there)
    moves = Moves().plus(moved(3, FIRST, SECOND))
    later = mirror_of(plans[SECOND], [entry(step) for step in range(7)], moves)
    history.note(replace(one, seals={2: stored(seal_of(2))}), later, there)  # of five steps at once
    last = mirror_of(plans[SECOND], [entry(step) for step in range(8)], moves)
    history.note(replace(later, seals={7: stored(seal_of(7))}), last, there)
    assert shown(history, last) == [*((n, FIRST) for n in range(4)), *((n, SECOND) for n in range(4, 8))]
    steps = {one.step: one.lengths for one in history.steps(last)}
    assert steps[1] == steps[2] == steps[7] == (7.0, 8.0)
    assert steps[5] == (9.0, 9.0)
    assert history.start_s() == 7.0


def test_it_keeps_the_newest_steps_only() -> None:
    history, plan = StepHistory(), plan_of(FIRST)
    for newest in (100, 101):
        mirror = mirror_of(plan, [entry(step) for step in range(1, newest + 1)])
        assert [step for step, _ in shown(history, mirror)] == list(range(newest + 1 - MOST_STEPS, newest + 1))


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([FIRST, SECOND, THIRD])), min_size=1, max_size=12))
def test_committed_steps_are_found_with_their_splits(runs: list[tuple[int, Split]]) -> None:
    moves, entries, expected, before = Moves(), list[LogEntry](), dict[int, Split](), runs[0][1]
    for steps, split in runs:
        if split != before:
            moves = moves.plus(moved(len(entries), before, split))
        before = split
        for _ in range(steps):
            entries.append(entry(len(entries) + 1))
            expected[entries[-1].seq] = split
    assert committed_splits(entries, plan_of(before), moves) == expected


def test_versions_name_steps_of_several_lineages() -> None:
    plan = plan_of(FIRST)
    given_up = mirror_of(plan, [entry(1), entry(2), entry(3)])
    history = StepHistory()
    assert len(history.steps(given_up)) == 3
    back = mirror_of(plan, [entry(1), entry(2), entry(3), entry(2, seq=5, lineage=1)])
    found = history.steps(back)
    assert [one.step for one in found] == [1, 2]
    assert Version(1, 2) in history._seen


ONE, OTHER = split_part(Split("coexisting", 4, 1, 1)), split_part(Split("coexisting", 3, 2, 1))


def move(number: int) -> Move:
    return Move(generation=number, step=number, kind=MoveKind.LEND, before=ONE, after=OTHER, reason="r" * 200)


def many(count: int) -> Moves:
    moves = Moves()
    for number in range(count):
        moves = moves.plus(move(number))
    return moves


def test_the_file_has_every_move_and_who_writes_it_remembers_the_newest(tmp_path: Path) -> None:
    moves, file = Moves(), MovesFile(tmp_path)
    for number in range(140):
        moves = moves.plus(move(number))
        file.keep(moves)
    assert list(read_lines_by_number(tmp_path / NAME)) == list(range(140))
    assert len((tmp_path / NAME).read_text().splitlines()) == 140
    assert file._known is not None
    assert list(file._known) == list(range(140 - NEWEST_MOVES, 140))
    file.keep(Moves())  # nothing is heard of it for a moment
    file.keep(moves)
    assert len((tmp_path / NAME).read_text().splitlines()) == 140


def test_resumed_moves_file_reads_only_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves, file = many(NEWEST_MOVES), MovesFile(tmp_path)
    file.keep(moves)
    for number in range(NEWEST_MOVES, 140):
        moves = moves.plus(move(number))
        file.keep(moves)
    monkeypatch.setattr(moves_file, "read_lines_by_number", None)
    monkeypatch.setattr(moves_file, "TAIL", 100 * 400)
    MovesFile(tmp_path).keep(moves)
    assert len((tmp_path / NAME).read_text().splitlines()) == 140


def test_after_a_line_that_was_cut_off_the_next_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    MovesFile(tmp_path).keep(many(2))
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[:-20])
    file = MovesFile(tmp_path)
    file.keep(many(2))
    file.keep(many(3))
    assert [one.generation for one in read_moves(tmp_path / NAME)] == [0, 1, 2]


def test_moves_beyond_the_tail_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = many(20)
    MovesFile(tmp_path).keep(moves)
    monkeypatch.setattr(moves_file, "TAIL", 1000)
    MovesFile(tmp_path).keep(moves.plus(move(20)))
    assert [one.generation for one in read_moves(tmp_path / NAME)] == list(range(21))
    assert 21 < len((tmp_path / NAME).read_text().splitlines()) < 41


def test_of_a_stretch_without_moves_that_is_told_which_is_known_last_wherever_it_stands(tmp_path: Path) -> None:
    def stays(*steps: int) -> Moves:
        return Moves(
            stays=tuple(HoldPeriod(since=1, step=step, began=float(n), time=step) for n, step in enumerate(steps))
        )

    MovesFile(tmp_path).keep(stays(3, 5, 9), to_the_end=True)
    reply = pb.PlacementReply(folder=str(tmp_path), moves=stays(3, 7, 8).encode())
    assert [one.step for one in collect_stays(reply)] == [3, 7, 9]
    elsewhere = pb.PlacementReply(folder=str(tmp_path / "elsewhere"), moves=stays(3, 7, 8).encode())
    assert [one.step for one in collect_stays(elsewhere)] == [3, 7, 8]
