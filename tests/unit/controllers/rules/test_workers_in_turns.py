"""Workers that time-share a GPU load one after the other: a loading engine measures free memory, and a rank needs all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import KEYS, bare_job, stored, with_mirror, worker_record

from controllers.rules.view import EngineView, JobView, RankView
from controllers.rules.workers import Launch, Launches, StartEngine, StartRank, schedule_workers
from gcore.config import parse_spec
from gcore.ledger.records.job import RankClaim
from gcore.ledger.transactions import Versioned
from gcore.system.process import ProcessId
from gcore.train.rank.launch import PARTS
from gcore.worker.records import WorkerRecord

SLOT = "cuda:0"
ENGINE = worker_record("e", "rollout", "node-0", slot=SLOT)
RANK = worker_record("t", "train", "node-0", world="w", rank=0, slot=SLOT)
ASLEEP = EngineView("e", "h:1", None, asleep=True)
AWAKE = RankView(0)
RESTING = RankView(0, released=PARTS)
ON_ITS_WAY = Launch("x", ProcessId(1, 1), 99.0)


def spec(memory: str | None) -> object:
    return parse_spec(
        {
            "name": "j",
            "model": {"path": "m"},
            "data": {"path": "d", "shards": 2},
            "flow": {"steps": 3},
            "rollout": {"max_new_tokens": 4},
            "placement": {"memory": memory},
        }
    )


def view(
    *workers: WorkerRecord,
    engine: EngineView | None = None,
    rank: RankView | None = None,
    memory: str | None = None,
    slot: str = SLOT,
) -> JobView:
    claims = {KEYS.world_rank("w", 0): stored(RankClaim(instance="t"), 1)} if RANK in workers else {}
    seen = with_mirror(bare_job(spec(memory), workers={w.instance: w for w in workers}), claims=claims)  # type: ignore[arg-type]
    assert seen.mirror.plan is not None
    plan = seen.mirror.plan.record
    here = {
        "engines": tuple(one.model_copy(update={"slot": slot}) for one in plan.engines if one.node == "node-0"),
        "ranks": tuple(one.model_copy(update={"slot": slot}) for one in plan.ranks if one.node == "node-0"),
    }
    return replace(
        seen,
        mirror=replace(seen.mirror, plan=Versioned(plan.model_copy(update=here), 2)),
        nodes={},
        engines={} if engine is None else {"e": engine},
        ranks={} if rank is None else {0: rank},
    )


def starts(seen: JobView, *pending: str, tries: dict[str, int] | None = None) -> list[type]:
    launches = Launches(dict.fromkeys(pending, ON_ITS_WAY), tries or {})
    found = [type(action) for action in schedule_workers(seen, launches, 1000.0)]
    return [kind for kind in found if kind in (StartEngine, StartRank)]


def test_at_a_jobs_start_the_engine_loads_and_sleeps_before_the_rank_loads() -> None:
    assert starts(view()) == [StartEngine]
    assert starts(view(), f"rollout {SLOT}") == []
    assert starts(view(ENGINE.model_copy(update={"state": "starting"}))) == []
    assert starts(view(ENGINE, engine=EngineView("e", "h:1", None))) == []
    assert starts(view(ENGINE, engine=ASLEEP)) == [StartRank]


def test_an_engine_that_died_is_not_started_while_its_rank_has_the_memory() -> None:
    for rank in (None, AWAKE, replace(RESTING, released=frozenset(list(PARTS)[:1]))):
        assert starts(view(RANK, rank=rank)) == []
    assert starts(view(RANK.model_copy(update={"state": "starting"}), rank=RESTING)) == [StartEngine]
    assert starts(view(RANK, rank=RESTING)) == [StartEngine]
    assert starts(view(RANK, rank=replace(AWAKE, unrested="no room on the host"))) == [StartEngine]
    assert starts(view(), "train w 0", tries={f"rollout {SLOT}": 1}) == []


def test_a_rank_of_an_earlier_world_that_still_ends_keeps_an_engine_from_its_memory() -> None:
    earlier = RANK.model_copy(update={"instance": "old", "world": "v"})
    assert starts(view(earlier, rank=RESTING)) == []


def test_a_rank_does_not_wait_for_an_engine_that_does_not_start_or_does_not_sleep() -> None:
    failed = {f"rollout {SLOT}": 3}
    assert StartRank in starts(view(), tries=failed)
    assert starts(view(ENGINE, engine=EngineView("e", "h:1", None, trouble="it refuses"))) == [StartRank]


@pytest.mark.parametrize(("memory", "slot"), [("kept", SLOT), (None, "cpu:0"), ("in_turns", "cpu:0")])
def test_workers_that_share_no_gpu_in_turns_start_at_once(memory: str | None, slot: str) -> None:
    assert starts(view(memory=memory, slot=slot)) == [StartEngine, StartRank]
