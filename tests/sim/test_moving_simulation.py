"""Whole clusters in simulated time with constant changes of placement: engines sleep and wake, worlds are resized, and every process
involved may be stopped, partitioned or killed. The next move follows from head; no measurement is involved.
"""

from __future__ import annotations

import os

import pytest
from simulated_cluster import tell_story
from simulated_stories import Moving, moving, propose_moves
from simulated_workers import Engine

FIRST = int(os.environ.get("GCORE_SIM_FIRST", "0"))
CLUSTERS = int(os.environ.get("GCORE_SIM_CLUSTERS", "2"))


@pytest.fixture(autouse=True)
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    propose_moves(monkeypatch)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, CLUSTERS // 4)))
def test_job_with_moving_slots_completes_with_correct_accounts(seed: int) -> None:
    ended = tell_story(moving(seed))
    assert not ended.wrong, ended.why
    assert ended.steps > 0


def test_where_nothing_happens_engines_sleep_and_worlds_change_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[Engine] = []
    sleep = Engine.sleep
    monkeypatch.setattr(Engine, "sleep", lambda engine: (slept.append(engine), sleep(engine)))
    ended = tell_story(Moving(seed=5, nodes=3, steps=9, prompts=40, faults_s=0.0))
    assert not ended.wrong, ended.why
    told = "\n".join(ended.history)
    assert ended.steps == 9
    assert told.count("place: won") >= 3, told
    assert ended.lineages >= 3, told
    assert len(slept) >= 3
