"""Engines and train ranks that time-share a slot's memory: release, acquisition, order and waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from builders import KEYS, ME, PEER, SPEC, running_job, sealed_job, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.rules.actions import Intent, ReleaseRank, RestoreRank, SleepEngine, TrainBatch, WakeEngine
from controllers.rules.memory import (
    AWAY_S,
    PATIENCE_S,
    apply_sleep_plan,
    blocking_nodes,
    sleeping_engines,
    take_turns,
    takes_turns,
)
from controllers.rules.step import train_step
from controllers.rules.view import EngineView, JobView, Memo
from controllers.rules.waits import current_waits
from gcore.config import parse_spec
from gcore.errors import SpecError
from gcore.ledger.records.job import EnginePlace, RankClaim
from gcore.train.rank.launch import PARTS
from gcore.worker.records import WorkerRecord

IN_TURNS = SPEC.model_copy(update={"placement": SPEC.placement.model_copy(update={"memory": "in_turns"})})
COLLECTING, READY = running_job(), sealed_job(ready=True)
PLACES = tuple(EnginePlace(node=f"node-{i}", slot="cpu:0") for i in range(2))
JUDGE = EnginePlace(node="node-0", slot="cpu:0", judge="j")
ELSEWHERE = EnginePlace(node="node-0", slot="cpu:1")


def engine(place: EnginePlace, state: str = "serving") -> WorkerRecord:
    fields = {"slot": place.slot, "pid": 1, "pid_started": 1, "state": state, "address": "h:1", "job_uid": "u"}
    role = "reward" if place.judge else "rollout"
    more = {"instance": name_of(place), "role": role, "node": place.node, "judge": place.judge}
    return WorkerRecord.model_validate(more | fields)


def name_of(place: EnginePlace) -> str:
    return f"{place.judge or 'e'}-{place.node}-{place.slot}"


@dataclass
class Cluster:
    """Two nodes with a rank and an engine on one slot each, and a judge and a slot without a rank. Every action is executed at once."""

    ready: bool = False
    released: dict[int, frozenset[str]] = field(default_factory=lambda: dict.fromkeys(range(2), PARTS))
    applied: set[int] = field(default_factory=set)
    asleep: set[str] = field(default_factory=set)
    loading: set[int] = field(default_factory=set)
    steps: int = 0
    places = (*PLACES, JUDGE, ELSEWHERE)

    def view(self, me: str = ME) -> JobView:
        view = READY if self.ready else COLLECTING
        node = me.split(".")[0]
        assert view.mirror.plan is not None
        plan = view.mirror.plan.record.model_copy(update={"engines": self.places})
        workers = {**view.workers, **{name_of(one): engine(one) for one in self.places}}
        for rank in self.loading:
            workers[f"t{rank}"] = workers[f"t{rank}"].model_copy(update={"state": "starting"})
        lines = {
            name_of(one): EngineView(name_of(one), "h:1", None, asleep=name_of(one) in self.asleep)
            for one in self.places
            if one.node == node
        }
        judges = {name_of(JUDGE): EngineView(name_of(JUDGE), "h:1", None, asleep=name_of(JUDGE) in self.asleep)}
        if node != JUDGE.node:  # who did not put it to sleep does not know
            judges = {name_of(JUDGE): EngineView(name_of(JUDGE), "h:1", None)}
        ranks = {
            rank: replace(
                known,
                released=self.released[rank],
                applied=view.seal.token if view.seal is not None and rank in self.applied else None,
            )
            for rank, known in view.ranks.items()
            if rank not in self.loading
        }
        return replace(
            view,
            spec=IN_TURNS,
            me=me,
            node=node,
            mirror=replace(view.mirror, plan=stored(plan)),
            workers=workers,
            engines={name: known for name, known in lines.items() if name[0] == "e"},
            judges=judges,
            ranks=ranks,
            remembered=Memo(),
        )

    def intents(self, me: str = ME) -> list[Intent]:
        view = self.view(me)
        found = [*take_turns(view), *apply_sleep_plan(view)]
        found += [one for one in train_step(view) if isinstance(one.action, TrainBatch)]
        return found

    def awake_beside(self, rank: int) -> set[str]:
        here = {name_of(one) for one in self.places if (one.node, one.slot) == (f"node-{rank}", "cpu:0")}
        return here - self.asleep

    def do(self, action: Any) -> None:
        match action:
            case SleepEngine():
                self.asleep.add(action.instance)
            case WakeEngine():
                self.asleep.remove(action.instance)
            case ReleaseRank():
                if not self.ready:
                    self.released[action.rank] = PARTS
            case RestoreRank():
                self.released[action.rank] = frozenset()
            case TrainBatch():
                self.released[action.rank] = frozenset()
                self.applied.add(action.rank)
                if len(self.applied) == 2:
                    self.ready, self.applied, self.steps = False, set(), self.steps + 1
            case _:
                raise AssertionError(action)


def deeds(intents: Iterator[Intent] | list[Intent]) -> list[Any]:
    return [intent.action for intent in intents if not intent.after]


def test_before_a_batch_is_ready_the_memory_is_the_engines() -> None:
    assert Cluster().intents() == []
    assert sleeping_engines(Cluster().view()) == frozenset()


def test_for_a_ready_batch_the_engines_of_the_ranks_slots_sleep_first_and_then_the_ranks_take_their_memory() -> None:
    cluster = Cluster(ready=True)
    assert deeds(cluster.intents()) == [SleepEngine("e-node-0-cpu:0", ""), SleepEngine("j-node-0-cpu:0", "j")]
    assert sleeping_engines(cluster.view()) == {"e-node-0-cpu:0", "e-node-1-cpu:0", "j-node-0-cpu:0"}
    cluster.asleep = {"e-node-0-cpu:0"}
    assert deeds(cluster.intents()) == [SleepEngine("j-node-0-cpu:0", "j")], "a judge has memory too"
    cluster.asleep = {"e-node-0-cpu:0", "j-node-0-cpu:0"}
    assert deeds(cluster.intents()) == [RestoreRank(0)]
    assert deeds(cluster.intents(PEER)) == [SleepEngine("e-node-1-cpu:0", "")]


def test_a_rank_that_has_its_memory_is_told_to_train_by_who_sees_its_engines_sleep_and_later_by_whoever_hears_it() -> (
    None
):
    cluster = Cluster(ready=True, asleep={"e-node-0-cpu:0", "j-node-0-cpu:0", "e-node-1-cpu:0"})
    cluster.released = {0: frozenset(), 1: PARTS}
    assert [action.rank for action in deeds(cluster.intents()) if isinstance(action, TrainBatch)] == [0]
    applies = [i for i in cluster.intents(PEER) if isinstance(i.action, TrainBatch)]
    assert {i.action.rank: i.after for i in applies} == {0: AWAY_S, 1: PATIENCE_S}, "nobody waits without end"
    cluster.asleep = set()  # it has just loaded, and nobody slept meanwhile
    applies = [i for i in cluster.intents() if isinstance(i.action, TrainBatch)]
    assert {i.action.rank: i.after for i in applies} == {0: PATIENCE_S, 1: PATIENCE_S}


def test_engines_wake_behind_a_commit_when_the_rank_beside_them_has_given_its_memory_back() -> None:
    cluster = Cluster(asleep={"e-node-0-cpu:0", "j-node-0-cpu:0", "e-node-1-cpu:0"})
    cluster.released = {0: frozenset({"weights"}), 1: PARTS}
    assert deeds(cluster.intents()) == [ReleaseRank(0, 0)]
    assert deeds(cluster.intents(PEER)) == [WakeEngine("e-node-1-cpu:0", "")]
    cluster.released[0] = PARTS
    assert deeds(cluster.intents()) == [WakeEngine("e-node-0-cpu:0", ""), WakeEngine("j-node-0-cpu:0", "j")]


def test_a_rank_whose_nodes_controller_is_away_gives_its_memory_back_a_little_later() -> None:
    cluster = Cluster(asleep={"e-node-0-cpu:0", "j-node-0-cpu:0"}, released={0: frozenset(), 1: PARTS})
    (intent,) = (i for i in cluster.intents(PEER) if isinstance(i.action, ReleaseRank))
    assert (intent.action, intent.after) == (ReleaseRank(0, 0), AWAY_S)


def test_a_rank_that_cannot_give_its_memory_back_keeps_it_and_the_engines_wake_beside_it() -> None:
    cluster = Cluster(asleep={"e-node-0-cpu:0", "j-node-0-cpu:0"}, released={0: frozenset(), 1: PARTS})
    view = cluster.view()
    full = replace(view, ranks={**view.ranks, 0: replace(view.ranks[0], unrested="No space left on device")})
    assert list(take_turns(full)) == []
    assert deeds(apply_sleep_plan(full)) == [WakeEngine("e-node-0-cpu:0", ""), WakeEngine("j-node-0-cpu:0", "j")]


def test_while_a_rank_loads_its_slot_is_its_own() -> None:
    cluster = Cluster(loading={0})
    assert deeds(cluster.intents()) == [SleepEngine("e-node-0-cpu:0", ""), SleepEngine("j-node-0-cpu:0", "j")]
    assert deeds(cluster.intents(PEER)) == []
    unclaimed = cluster.view()
    nobody = {KEYS.world_rank("w", 1): stored(RankClaim(instance="t1"))}
    assert sleeping_engines(replace(unclaimed, mirror=replace(unclaimed.mirror, claims=nobody))) == {
        "e-node-0-cpu:0",
        "j-node-0-cpu:0",
    }


@pytest.mark.parametrize("asleep", [False, True])
def test_of_a_rank_that_nobody_has_heard_yet_all_stays_as_it_is(*, asleep: bool) -> None:
    view = Cluster(asleep={"e-node-0-cpu:0", "j-node-0-cpu:0"} if asleep else set()).view()
    deaf = replace(view, ranks={1: view.ranks[1]})
    assert deeds(apply_sleep_plan(deaf)) == []
    assert ("e-node-0-cpu:0" in sleeping_engines(deaf)) == asleep


def test_a_job_that_keeps_its_memory_knows_no_turns() -> None:
    for ready in (False, True):
        view = replace(Cluster(ready=ready, released={0: frozenset(), 1: frozenset()}).view(), spec=SPEC)
        assert [*take_turns(view), *apply_sleep_plan(view)] == []
        assert {i.after for i in train_step(view)} <= {0.0}


def test_a_rank_on_a_slot_of_its_own_keeps_its_memory_once_no_engine_is_left_there() -> None:
    alone = Cluster(released={0: PARTS, 1: frozenset()}, ready=True)
    alone.places = (PLACES[0], JUDGE, ELSEWHERE)
    assert {i.action.rank: i.after for i in alone.intents(PEER) if isinstance(i.action, TrainBatch)} == {
        0: PATIENCE_S,
        1: 0.0,
    }
    assert blocking_nodes(alone.view()) == ("node-0",)
    alone.ready = False
    assert list(take_turns(alone.view(PEER))) == []
    view = alone.view(PEER)
    left_over = replace(view, workers={**view.workers, "old": engine(PLACES[1], "starting")}, remembered=Memo())
    assert deeds(take_turns(left_over)) == [ReleaseRank(1, 0)]


def test_wait_report_names_the_nodes_that_release_memory() -> None:
    cluster = Cluster(ready=True)
    (wait,) = (one for one in current_waits(cluster.view()) if one.cause == "train")
    assert "on node-0, node-1 engines are releasing memory for the ranks" in wait.what
    cluster.released = {0: frozenset(), 1: PARTS}
    assert blocking_nodes(cluster.view()) == ("node-1",)


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_memory_never_belongs_to_both_sides_and_every_step_is_trained(
    random: Random,
) -> None:
    cluster = Cluster(loading={0, 1}, released={0: frozenset(), 1: frozenset()})
    for _ in range(400):
        if cluster.steps == 2 and not cluster.asleep:
            break
        doable = [i for me in (ME, PEER) for i in cluster.intents(me) if not i.after]
        if cluster.loading:
            doable.append(Intent(None, "loaded"))  # type: ignore[arg-type]
        if not cluster.ready and not cluster.loading and not cluster.asleep and cluster.steps < 2:
            doable.append(Intent(None, "sealed"))  # type: ignore[arg-type]
        assert doable, f"nobody can do anything: {cluster}"
        intent = random.choice(doable)
        action = intent.action
        if intent.condition == "loaded":
            cluster.loading.pop()
        elif intent.condition == "sealed":
            cluster.ready = True
        else:
            if isinstance(action, (TrainBatch, RestoreRank)):
                assert not cluster.awake_beside(action.rank)
            if isinstance(action, WakeEngine):
                rank = int(action.instance.split("-")[2])
                assert cluster.released[rank] == PARTS
            cluster.do(action)
    assert cluster.steps == 2
    assert cluster.released == dict.fromkeys(range(2), PARTS)


def spec(**sections: Any) -> dict[str, Any]:
    tree = {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 3, "groups_per_step": 4},
        "rollout": {"max_new_tokens": 4},
    }
    return {
        key: {**tree.get(key, {}), **sections[key]} if key in sections else tree[key] for key in {**tree, **sections}
    }  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("sections", "slot", "turns"),
    [
        pytest.param({}, "cuda:0", True, id="GPUs take turns"),
        pytest.param({}, "cpu:0", False, id="CPUs do not"),
        pytest.param({"placement": {"memory": "in_turns"}}, "cpu:0", True, id="unless they are to"),
        pytest.param({"placement": {"memory": "kept"}}, "cuda:0", False, id="and GPUs may keep all"),
        pytest.param({"placement": {"policy": "static", "train": 1}}, "cuda:0", False, id="slots that are not shared"),
        pytest.param(
            {"rollout": {"staleness": 1, "correction": "tis", "max_new_tokens": 4}}, "cuda:0", False, id="staleness"
        ),
        pytest.param({"train": {"stream": True}}, "cuda:0", False, id="steps that come in parts"),
    ],
)
def test_which_slots_take_turns(sections: dict[str, Any], slot: str, turns: bool) -> None:
    assert takes_turns(parse_spec(spec(**sections)), slot) == turns


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        pytest.param(
            {"rollout": {"staleness": 1, "correction": "tis", "max_new_tokens": 4}}, "staleness 1", id="stale"
        ),
        pytest.param({"train": {"stream": True}}, "with train.stream ranks train at that time", id="streamed"),
        pytest.param({"placement": {"policy": "static", "train": 1}}, "policy: static shares none", id="static"),
    ],
)
def test_turns_where_both_sides_work_at_once_are_refused(sections: dict[str, Any], words: str) -> None:
    placement = {**sections.get("placement", {}), "memory": "in_turns"}
    with pytest.raises(SpecError, match=words):
        parse_spec(spec(**{**sections, "placement": placement}))
