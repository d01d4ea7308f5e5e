"""Engines that span several slots: spec, launch settings, wake-up, and accounting of their slots."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from builders import SPEC, running_job, stored
from placed_views import engine, place, placed

from controllers.accounting.attribution import VacantPlaces, slots_left_by_ranks
from controllers.accounting.step_account import StepAccountBuilder
from controllers.api.submission.checks import check_freeze, check_heads
from controllers.api.submission.nodes import check_engine, check_spans
from controllers.cli.view.placement import slot_roles
from controllers.rules.actions import SleepEngine, WakeEngine
from controllers.rules.memory import apply_sleep_plan, owned_engines
from controllers.rules.view import EngineView, JobView
from controllers.rules.workers import Launches, StartEngine, StopWorker, schedule_workers
from controllers.rules.world import lacking_slots
from controllers.workers.launch_documents import emulated_engine, emulated_host, engine_document
from gcore.config import JobSpec, NodeConfig, parse_spec
from gcore.engines.launch import SglangLaunch, parse_launch
from gcore.engines.sglang.command import server_command
from gcore.errors import SpecError
from gcore.ledger.records.chain import Member
from gcore.ledger.records.cluster import ModelConfigs, Slot
from gcore.ledger.records.job import EnginePlace, NodeRecord, Plan
from gcore.rollout.engine_time import EngineReading, EngineTimeSums
from gcore.store.reference import StoreRef
from gcore.types import Version
from placement.assign import assign_split, split_of
from placement.initial import make_initial_plan
from placement.lending import EngineLoad, EngineRows, JobLoads, decide_lending, make_lending_move, pool_speeds
from placement.mapping.workload import relevant_sizes
from placement.measurements import EngineSpeed, MeasuredStep
from placement.moves import DecisionContext
from placement.slots import NodeSlots, ReplicaSizes, Snapshot, Split

WIDE = {"engine": "sglang", "slots_per_engine": 2}
NODE = NodeConfig(
    node="n",
    home="/h",
    etcd=StoreRef(endpoints=("h:1",)),
    slots=("cuda:4", "cuda:5"),
    run_root="/r",
    sglang_python="/p",
)


def judge(name: str = "tutor", **serving: Any) -> dict[str, Any]:
    return {"name": name, "model": {"path": "/j"}, "template": "{{ response }}", "serving": serving}


def spec(
    rollout: dict[str, Any] | None = None,
    *judges: dict[str, Any],
    placement: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
) -> JobSpec:
    tree: dict[str, Any] = {"name": "j", "model": {"path": "/m"}, "data": {"path": "d"}, "flow": {"steps": 3}}
    tree |= {"rollout": {"max_new_tokens": 4} | (rollout or {}), "placement": placement or {}, "train": train or {}}
    parts = [{"label": one["name"], "judge": one["name"]} for one in judges]
    return parse_spec(tree | ({"judges": list(judges), "reward": {"parts": parts}} if judges else {}))


@pytest.mark.parametrize(
    ("rollout", "judges", "placement", "said"),
    [
        pytest.param(
            {"slots_per_engine": 2}, [], {}, "slots_per_engine needs engine: sglang or vllm, not torch", id="torch"
        ),
        pytest.param(
            {},
            [judge(slots_per_engine=2)],
            {},
            "slots_per_engine needs engine: sglang or vllm, not torch",
            id="a judge's torch",
        ),
        pytest.param(WIDE | {"slots_per_engine": 0}, [], {}, "slots_per_engine", id="none"),
        pytest.param(WIDE, [judge(**(WIDE | {"slots_per_engine": 3}))], {}, "one divides the other", id="2 and 3"),
        pytest.param({}, [judge("a", **WIDE), judge("b")], {}, "judges share the slots of their pool", id="two judges"),
        pytest.param(
            {},
            [judge(**WIDE)],
            {"policy": "static", "train": 1, "reward": 3},
            "a judge's engine uses 2 slots; use a multiple",
            id="half a judge",
        ),
        pytest.param(
            {},
            [judge(**WIDE, replicas=2)],
            {"policy": "static", "train": 1, "reward": 2},
            "needs 2 engines of 2 slots .*, but placement.reward is 2",
            id="replicas",
        ),
    ],
)
def test_sizes_that_cannot_be_had_are_refused_in_a_sentence(
    rollout: dict[str, Any], judges: list[dict[str, Any]], placement: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        spec(rollout, *judges, placement=placement)


def node(name: str, *slots: str) -> NodeRecord:
    return NodeRecord(name=name, incarnation=f"{name}.1", address="h:1", slots=slots, pid=1)


def test_a_job_is_refused_where_a_nodes_slots_cannot_be_divided() -> None:
    job, even, odd = spec(WIDE, judge(**WIDE)), node("a", "cuda:0", "cuda:1"), node("b", "cuda:0")
    check_spans(job, [even])
    check_spans(spec(), [odd])
    with pytest.raises(
        SpecError, match=r"rollout\.slots_per_engine: 2 slots per engine do not divide the 1 slot of node b"
    ):
        check_spans(job, [even, odd])
    with pytest.raises(SpecError, match=r"judges\.0\.serving\.slots_per_engine"):
        check_spans(spec({}, judge(**WIDE)), [odd])
    with pytest.raises(SpecError, match="no node has that many"):
        make_initial_plan(Snapshot((NodeSlots("b", ("cuda:0",)),)), job, None)


def test_a_job_that_waits_for_whole_engines_slots_says_that_it_counts_those() -> None:
    """Of two slots on two nodes it said that there were none."""
    view = running_job()
    nodes = {name: node(name, "cuda:0") for name in ("a", "b")}
    said = lacking_slots(replace(view, spec=spec(WIDE), nodes=nodes, mirror=replace(view.mirror, plan=None)))
    assert "only 0 in whole engines of 2 slots are available (on a, b)" in said


def test_heads_that_cannot_be_divided_are_refused_as_far_as_they_are_known() -> None:
    job = spec(WIDE, judge(**WIDE))
    check_heads(job, ModelConfigs(policy={"num_attention_heads": 4}, judges={"tutor": {}}))
    with pytest.raises(SpecError, match=r"judges\.0\.serving\.slots_per_engine: .* the model's 7 attention heads"):
        check_heads(job, ModelConfigs(policy={}, judges={"tutor": {"num_attention_heads": 7}}))
    with pytest.raises(SpecError, match=r"rollout\.slots_per_engine: .* 5 attention heads"):
        check_heads(job, ModelConfigs(policy={"num_attention_heads": 5}))


def test_the_heads_of_a_vision_language_model_are_those_of_its_language_model() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "qwen3_vl", "text_config": heads, "vision_config": {"num_heads": 16}}
    check_heads(spec(WIDE | {"slots_per_engine": 4}), ModelConfigs(policy=relevant_sizes(config)))
    with pytest.raises(SpecError, match=r"rollout\.slots_per_engine: 8 .* the model's 4 attention heads"):
        check_heads(spec(WIDE | {"slots_per_engine": 8}), ModelConfigs(policy=relevant_sizes(config)))


def test_heads_that_a_sequence_group_cannot_share_are_refused_as_far_as_they_are_known() -> None:
    job = spec()
    job = job.model_copy(update={"train": job.train.model_copy(update={"sequence_parallel": 4})})
    check_heads(job, ModelConfigs(policy={"num_attention_heads": 8}, critic={}))
    with pytest.raises(SpecError, match=r"train\.sequence_parallel: .* 4 ranks cannot share the 6 .* Use 2 or 3 or 6"):
        check_heads(job, ModelConfigs(policy={"num_attention_heads": 6}))
    with pytest.raises(SpecError, match=r"train\.sequence_parallel: .* of the critic equally\. Leave it out"):
        check_heads(job, ModelConfigs(policy={}, critic={"num_attention_heads": 1}))


def test_emulated_slots_have_every_engine() -> None:
    check_engine(spec(WIDE), [node("e", "emulated:0", "emulated:1")])
    with pytest.raises(SpecError, match="SGLang is missing on g"):
        check_engine(spec(WIDE), [node("e", "emulated:0"), node("g", "cuda:0")])


def test_sglang_is_started_over_all_the_gpus_of_its_place_in_their_order() -> None:
    child = engine_document(spec(WIDE), EnginePlace(node="n", slot="cuda:4", further=("cuda:5",)), NODE)
    assert child.env["CUDA_VISIBLE_DEVICES"] == "4,5"
    words = server_command(parse_launch(SglangLaunch, child.document), 1)
    said = dict(pairwise(words))
    assert (said["--tp-size"], said["--base-gpu-id"], said["--device"]) == ("2", "0", "cuda")
    alone = engine_document(spec({"engine": "sglang"}), EnginePlace(node="n", slot="cuda:5"), NODE)
    assert alone.env["CUDA_VISIBLE_DEVICES"] == "5"
    assert "--tp-size 1" in " ".join(server_command(parse_launch(SglangLaunch, alone.document), 1))
    cores = engine_document(spec(WIDE), EnginePlace(node="n", slot="cpu:0", further=("cpu:1",)), NODE)
    assert (cores.document["threads"], cores.env["CUDA_VISIBLE_DEVICES"]) == (2, ""), "on cores it has as many threads"


def test_emulated_engines_that_share_slots_are_in_one_block_whatever_they_span() -> None:
    config = NODE.model_copy(update={"slots": tuple(f"emulated:{n}" for n in range(4, 8))})
    places = [place("emulated:4"), place("emulated:5"), place("emulated:4", "tutor"), place("emulated:6", "tutor")]
    wide = [
        one.model_copy(update={"further": (f"emulated:{int(one.slot[-1]) + 1}",)}) if one.judge else one
        for one in places
    ]
    engines = tuple(emulated_engine(one, "h") for one in wide)
    launch = emulated_host(spec({}, judge(**WIDE)), config, "u", "h", engines)
    assert [launch.block(one.slot) for one in engines] == ["emulated:4", "emulated:4", "emulated:4", "emulated:6"]
    assert next(one.slots for one in launch.engines if one.judge) == ("emulated:4", "emulated:5")
    alone = emulated_host(spec(), config, "u", "h", engines[:2])
    assert [alone.block(one.slot) for one in alone.engines] == ["emulated:4", "emulated:5"]


def pair(first: int, judge: str = "", *, asleep: bool = False, kind: str = "cpu") -> EnginePlace:
    return place(f"{kind}:{first}", judge, asleep=asleep).model_copy(update={"further": (f"{kind}:{first + 1}",)})


def there(view: JobView, **further: tuple[str, ...]) -> JobView:
    """With workers that span these slots too."""
    workers = {i: w.model_copy(update={"further": further.get(i, ())}) for i, w in view.workers.items()}
    return replace(view, workers=workers)


def test_an_engine_wakes_once_all_of_its_slots_are_free() -> None:
    places = (place("cpu:1", asleep=True), place("cpu:2", asleep=True), pair(1, "j"))
    sleeps = EngineView("j_cpu1", "h:1", None, asleep=True)
    view = there(placed(*places, j_cpu1=sleeps), j_cpu1=("cpu:2",))
    assert [intent.action for intent in apply_sleep_plan(view)] == [
        SleepEngine("policy_cpu1", ""),
        SleepEngine("policy_cpu2", ""),
    ]
    one = view.engines | {"policy_cpu1": EngineView("policy_cpu1", "h:1", None, asleep=True)}
    assert [intent.action for intent in apply_sleep_plan(replace(view, engines=one))] == [
        SleepEngine("policy_cpu2", "")
    ]
    both = one | {"policy_cpu2": EngineView("policy_cpu2", "h:1", None, asleep=True)}
    assert [intent.action for intent in apply_sleep_plan(replace(view, engines=both))] == [WakeEngine("j_cpu1", "j")]


def test_a_worker_on_some_of_a_places_slots_is_none_for_it() -> None:
    view = placed(pair(1))
    deeds = list(schedule_workers(view, Launches(), 0.0))
    assert StartEngine(pair(1)) in deeds
    assert any(isinstance(deed, StopWorker) and deed.instance == "policy_cpu1" for deed in deeds)
    assert not [
        deed
        for deed in schedule_workers(there(view, policy_cpu1=("cpu:2",)), Launches(), 0.0)
        if isinstance(deed, StartEngine)
    ]


def test_on_gpus_an_engine_is_started_only_when_those_on_any_of_its_slots_sleep() -> None:
    places = (place("cuda:1", asleep=True), place("cuda:2", asleep=True), pair(1, "j", kind="cuda"))
    view = placed(*places)
    view = replace(view, workers={i: w for i, w in view.workers.items() if i != "j_cuda1"}, judges={})
    assert StartEngine(places[2]) not in list(schedule_workers(view, Launches(), 0.0))
    asleep = {name: replace(one, asleep=True) for name, one in view.engines.items()}
    assert StartEngine(places[2]) in list(schedule_workers(replace(view, engines=asleep), Launches(), 0.0))


SLOTS = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def test_engine_time_is_booked_on_each_of_its_slots_and_the_account_sums() -> None:
    plan = Plan(generation=2, world="w", ranks=(), engines=(pair(0), pair(2)))
    view = placed(pair(0), pair(2))
    worker = engine("e", "cpu:0").model_copy(update={"further": ("cpu:1",)})
    there_ = {"node-0": NodeRecord(name="node-0", incarnation="node-0.aaaa", address="a:1", slots=SLOTS, pid=1)}
    view = replace(
        view, mirror=replace(view.mirror, plan=stored(plan)), nodes=there_, workers={"e": worker}, engines={}, judges={}
    )
    books = StepAccountBuilder(SPEC, 0.0, 1000.0)
    books.update(view, "no_work", 0.0)
    books.engine_read("e", EngineReading(10.0, EngineTimeSums(10.0, 4.0, 6.0, 0.0, 0.0), 0, 0, 0, 0))
    books.head_moved(Version(0, 1), 10.0, 1010.0)
    books.engine_read("e", EngineReading(10.5, EngineTimeSums(10.5, 4.5, 6.0, 0.0, 0.0), 0, 0, 0, 0))
    (closed,) = books.close(11.0)
    booked = closed.book.booked
    assert closed.book.slots == 4
    assert sum(booked.values()) + closed.book.unbooked == pytest.approx(40.0)
    assert booked["busy rollout"] == pytest.approx(8.0), "two slots, four seconds each"
    assert booked["idle rollout no_work"] == pytest.approx(12.0)
    assert booked["switching none>rollout"] == pytest.approx(20.0), (
        "the other engine has not come up: both of its slots wait"
    )
    assert closed.spans["cpu:0"] == closed.spans["cpu:1"]
    assert closed.book.engines["rollout"].active_s <= 10.0, "an engine's own sums count it once"


def test_lending_takes_whole_engines_and_only_where_both_pools_have_the_same() -> None:
    snapshot = Snapshot(
        (NodeSlots("a", tuple(f"cuda:{n}" for n in range(8))), NodeSlots("b", tuple(f"cuda:{n}" for n in range(8))))
    )
    speeds = (
        *(EngineSpeed("rollout", running, seconds) for running, seconds in ((2.0, 0.01), (9.0, 0.02), (16.0, 0.03))),
        EngineSpeed("reward", 8.0, 0.05),
    )
    rows, at = EngineRows(16, 16), DecisionContext(step=3, seq=7, by="a", time=100.0)
    for sizes, split in (
        (ReplicaSizes(2, 2), Split("coexisting", 10, 2, 2)),
        (ReplicaSizes(2, 1), Split("coexisting", 10, 2, 2)),
    ):
        plan = assign_split(split, None, snapshot, ("j",), world="w", generation=1, sizes=sizes)
        assert plan is not None
        step = MeasuredStep(3, split, (100.0,) * 8, (50.0,) * 8, 800.0, 5.0, 1.0, 0.1, speeds, {})
        fast = pool_speeds([step], rows, 0, 0)
        assert fast is not None
        told = [
            EngineLoad(p.node, p.slot, p.judge, 8 if p.judge and not p.asleep else 0, 0, not p.asleep, p.asleep)
            for p in plan.engines
        ]
        loads = JobLoads(tuple(told), {})
        found = make_lending_move(plan, loads, fast, 0.1, frozenset({"a", "b"}), rows, at)
        if sizes.rollout != sizes.reward:
            assert found is None
            assert decide_lending(plan, loads, fast, 0.1, rows) is None
            continue
        assert found is not None
        assert found.plan is not None
        lent = split_of(found.plan)
        assert lent.reward > 2
        assert (lent.reward % 2, lent.rollout % 2, lent.rollout + lent.reward) == (0, 0, 12)
        assert {p.node for p in found.plan.engines if not p.judge and not p.asleep} == {"a", "b"}


def test_slot_roles_name_all_slots_of_a_spanning_engine() -> None:
    plan = Plan(generation=1, world="w", ranks=(), engines=(pair(0), pair(0, "j", asleep=True), place("cpu:2")))
    assert slot_roles(plan) == {
        Slot("node-0", "cpu:0"): ["rollout on 0+1", "judge j on 0+1 (asleep)"],
        Slot("node-0", "cpu:1"): ["rollout on 0+1", "judge j on 0+1 (asleep)"],
        Slot("node-0", "cpu:2"): ["rollout"],
    }
    assert Plan.decode(plan.encode()) == plan
    assert "further" not in json.loads(plan.encode())["engines"][2], "a place of one slot is written as it was"


def test_slots_whose_engine_sleeps_for_a_rank_on_another_of_them_wait_for_the_step() -> None:
    sleeps = EngineView("policy_cpu0", "h:1", None, asleep=True)
    view = there(placed(pair(0), policy_cpu0=sleeps), policy_cpu0=("cpu:1",))
    assert view.mirror.plan is not None
    assert [rank.slot for rank in view.mirror.plan.record.ranks if rank.node == "node-0"] == ["cpu:0"]
    here = {name: worker for name, worker in view.workers.items() if worker.node == "node-0"}
    assert slots_left_by_ranks(view, here, ["policy_cpu0"]) == {("cpu:1", "rollout")}, (
        "the rank's own slot is the rank's"
    )
    assert slots_left_by_ranks(view, here, []) == frozenset()
    awake = replace(view, engines={"policy_cpu0": replace(sleeps, asleep=False)})
    assert slots_left_by_ranks(awake, here, ["policy_cpu0"]) == frozenset(), (
        "it says itself what it does until it sleeps"
    )
    places = VacantPlaces()
    places.update(view, here, 0.0, slots_left_by_ranks(view, here, ["policy_cpu0"]))
    told = dict(places.reports(dict.fromkeys(("cpu:0", "cpu:1"), 0.0), 3.0))
    assert told["cpu:1"].seconds == {"idle rollout barrier": 3.0}


def test_engines_that_have_slots_in_common_are_one_controllers_while_their_nodes_is_away() -> None:
    workers = {}
    for at in range(0, 32, 2):
        for first, second in ((f"cpu:{at}", f"cpu:{at + 1}"), (f"cpu:{at + 1}", "")):
            name, judge = (f"p{first}", "") if second else (f"j{first}", "j")
            one = engine(name, first, "gone", judge)
            workers[name] = one.model_copy(update={"further": (second,) if second else ()})
    members = {name: Member(node=name, address="h:1", incarnation=name) for name in ("a", "b", "c")}
    of = {name: owned_engines("u", workers, members, name) for name in members}
    judges = {name: owned_engines("u", workers, members, name, role="reward") for name in members}
    assert sum(map(len, of.values())) == sum(map(len, judges.values())) == 16
    assert all(len(found) < 16 for found in of.values()), "they are shared out"
    for name, found in of.items():
        assert {int(one.slot[4:]) + 1 for one in found.values()} == {int(one.slot[4:]) for one in judges[name].values()}


def test_parts_are_frozen_only_in_models_that_have_a_vision_tower() -> None:
    job = spec(train={"freeze": ["projector"]})
    check_freeze(job, {"model_type": "qwen3_vl", "vision_config": {"depth": 1}})
    check_freeze(spec(), {"model_type": "qwen3"})
    with pytest.raises(SpecError, match=r"train\.freeze: the model \(qwen3\) has no vision tower"):
        check_freeze(job, {"model_type": "qwen3"})
