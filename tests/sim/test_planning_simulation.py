"""Whole clusters in simulated time with production's planning: the planner, the lender and a policy that requests random feasible placements.
Every process involved may be stopped, partitioned or killed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from invariants import Invariants
from simulated_cluster import tell_story
from simulated_planning import contradiction
from simulated_stories import Planning, planning

FIRST = int(os.environ.get("GCORE_SIM_FIRST", "0"))
CLUSTERS = int(os.environ.get("GCORE_SIM_CLUSTERS", "2"))


@pytest.fixture(autouse=True)
def moves_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each revision of the store."""
    revision = Invariants.revision

    def looked(invariants: Invariants, events: Any) -> None:
        before = invariants.mirror
        revision(invariants, events)
        if found := contradiction(before, invariants.mirror):
            invariants._wrong(found)

    monkeypatch.setattr(Invariants, "revision", looked)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, CLUSTERS // 4)))
def test_planning_cluster_loses_no_move_and_lends_no_slot_of_a_wanted_world(
    seed: int,
) -> None:
    ended = tell_story(planning(seed))
    assert not ended.wrong, ended.why
    assert ended.steps > 0


def test_where_nothing_happens_worlds_are_formed_and_slots_are_lent_in_one_job() -> None:
    ended = tell_story(Planning(seed=5, nodes=2, steps=9, prompts=40, faults_s=0.0))
    assert not ended.wrong, ended.why
    told = "\n".join(ended.history)
    assert ended.steps == 9
    assert ended.lineages >= 2, told
    assert told.count("place: won") >= 4, told
