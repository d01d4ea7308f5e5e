"""Engines that span several slots, in a whole cluster on emulated slots: they change pools and restart as a whole, and each slot is booked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_run import ClusterRun, gcore
from placement_run import NAME, moves_of, write_job

from gcore.ledger.records.slot_accounting import AccountLine, parse_line

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

STEPS = 8
WIDE = {"engine": "sglang", "slots_per_engine": 2, "batch_slots": 8}


def books_of(home: Path) -> list[AccountLine]:
    (run,) = (home / "runs").glob(f"{NAME}-*")
    lines = [line for file in (run / "books").glob("*.jsonl") for line in file.read_text().splitlines()]
    return [book for book in map(parse_line, lines) if book is not None]


def seconds_of(line: AccountLine, slot: str, state: str) -> float:
    return sum(span.seconds.get(state, 0.0) for span in line.spans[slot])


def test_engines_over_two_slots_serve_change_over_and_come_back_whole_and_all_their_slots_are_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = {
        "name": "tutor",
        "model": {"path": "model"},
        "template": "{{ prompt }}{{ response }}",
        "max_new_tokens": 40,
        "serving": WIDE,
        "verdict": {"parser": "words", "words": {"y": 1, "n": 0}},
    }
    placement = {"policy": "pairs", "train": 2, "reward": 2}
    rollout = WIDE | {"max_new_tokens": 80}
    law = {"speedup": 8.0}
    spec = write_job(tmp_path, monkeypatch, placement, steps=STEPS, law=law, rollout=rollout, judges=[judge])
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until_step(1)
        run.kill_worker("rollout", child=False)
        run.until_step(2)
        shown = json.loads(gcore("placement", "show", NAME, "--home", str(home), "-o", "json").stdout)
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", STEPS)
    done = [move for move in moves_of(home) if move.state == "done"]
    assert {move.after.reward for move in done} >= {2, 4}
    assert all(move.after.rollout + move.after.reward == 6 for move in done if move.kind == "split")
    assert shown["split"]["train"] == 2
    assert len(shown["slots"]) == 8, "every slot is told of"
    books = books_of(home)
    assert {line.book.version.step for line in books} >= set(range(1, STEPS + 1))
    assert all(line.book.slots == 4 for line in books)
    # What an engine did is booked on each of its slots: the two of a pair are told the same.
    for line in books:
        for first, second in (("emulated:0", "emulated:1"), ("emulated:2", "emulated:3")):
            own = (
                (first, second)
                if first in line.spans
                else (f"emulated:{int(first[-1]) + 4}", f"emulated:{int(second[-1]) + 4}")
            )
            for state in ("busy rollout", "busy reward"):
                assert seconds_of(line, own[0], state) == pytest.approx(seconds_of(line, own[1], state), abs=0.02)
    assert sum(line.book.booked.get("busy rollout", 0.0) for line in books) > 0
