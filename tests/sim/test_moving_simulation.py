"""Whole clusters in made-up time whose placement moves all the while: engines sleep and wake, worlds get other sizes, and whoever leads,
carries it out or is carried out may be stopped, cut off or dead. Which move is made next follows from head; nobody measures anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from simulated_cluster import Story, tell_story
from simulated_controller import SimulatedJob
from simulated_workers import Engine

from gcore.config import JobSpec
from gcore.config.spec import PlacementSpec
from gcore.ledger.job import Plan
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import Move, MoveKind, Moves
from placement.assign import split_of
from placement.moves import Proposal, part_of
from placement.split import Split

FIRST = int(os.environ.get("GCORE_SIM_FIRST", "0"))
CLUSTERS = int(os.environ.get("GCORE_SIM_CLUSTERS", "16"))


@dataclass(frozen=True)
class Moving(Story):
    """A story whose slots move."""

    @property
    def spec(self) -> JobSpec:
        """The same job, with as many ranks as a policy wants."""
        spec = super().spec
        train = spec.train.model_copy(update={"ranks": None})
        return spec.model_copy(update={"placement": PlacementSpec(policy="dynamic"), "train": train})


def of(seed: int) -> Moving:
    """The seed's: the same story, moving."""
    told = vars(Story.of(seed))
    return Moving(**{**told, "nodes": max(told["nodes"], 2), "part": None})


def next_move(mirror: JobMirror, me: str) -> tuple[Proposal | None, Moves | None]:
    """What whoever leads wants now: one move a step."""
    leader, head, stored = mirror.leader, mirror.head, mirror.plan
    if leader is None or leader.record.incarnation != me or head is None or stored is None or head.record.step == 0:
        return None, None
    newest, plan = mirror.moves.newest, stored.record
    if newest is not None and newest.step == head.record.step:
        return None, None
    if head.record.step % 2 == 0:
        return _another_world(plan, head.record.step, head.record.seq), None
    return _another_sleeper(plan, head.record.step, head.record.seq), None


def _another_world(plan: Plan, step: int, seq: int) -> Proposal:
    now = split_of(plan)
    nodes = len({*(p.node for p in plan.engines), *(p.node for p in plan.ranks)})
    together = Split("colocated", nodes, 0, nodes)
    apart = Split("coexisting", nodes - 1, 0, 1)
    return Proposal(
        _move(plan, MoveKind.WORLD, now, apart if now.mode == "colocated" else together, step, seq, "wanted"), None
    )


def _another_sleeper(plan: Plan, step: int, seq: int) -> Proposal | None:
    engines = sorted(plan.engines, key=lambda place: place.node)
    if len(engines) < 2:
        return None
    sleeper = engines[step // 2 % len(engines)]
    changed = tuple(place.model_copy(update={"asleep": place == sleeper}) for place in engines)
    after = plan.model_copy(update={"generation": plan.generation + 1, "engines": changed})
    return Proposal(_move(plan, MoveKind.LEND, split_of(plan), split_of(after), step, seq, "done"), after)


def _move(plan: Plan, kind: MoveKind, before: Split, after: Split, step: int, seq: int, state: str) -> Move:
    fields: Mapping[str, Any] = {"before": part_of(before), "after": part_of(after), "time": float(seq), "state": state}
    return Move.model_validate({"generation": plan.generation + 1, "step": step, "seq": seq, "kind": kind, **fields})


@pytest.fixture(autouse=True)
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedJob, "_proposed", lambda self: next_move(self.mirror, self.me), raising=False)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(2, CLUSTERS // 4)))
def test_whatever_happens_to_a_cluster_whose_slots_move_its_job_ends_with_every_account_right(seed: int) -> None:
    ended = tell_story(of(seed))
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
