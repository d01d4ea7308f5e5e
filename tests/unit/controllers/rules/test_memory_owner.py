"""The owner of an engine."""

from __future__ import annotations

from typing import Any

from controllers.rules.memory import owned_engines
from gcore.ledger.records.chain import Member
from gcore.worker.records import WorkerRecord

NODES = ("n0", "n1", "n2")
MEMBERS = {f"{node}.x": Member(incarnation=f"{node}.x", node=node, address="a:1") for node in NODES}


def engine(node: str, number: int, **more: Any) -> WorkerRecord:
    fields = {
        "role": "rollout",
        "job_uid": "u",
        "slot": f"cpu:{number}",
        "pid": 1,
        "pid_started": 1,
        "state": "serving",
    }
    return WorkerRecord.model_validate({"instance": f"{node}-{number}", "node": node} | fields | more)


ENGINES = {e.instance: e for e in (engine(node, i) for node in NODES for i in range(20))}


def owned(members: dict[str, Member], joining: tuple[str, ...] = ()) -> dict[str, set[str]]:
    return {me: set(owned_engines("u", ENGINES, members, me, joining)) for me in members}


def test_an_engine_is_its_nodes_controllers() -> None:
    assert owned(MEMBERS) == {f"{n}.x": {f"{n}-{i}" for i in range(20)} for n in NODES}


def test_engines_of_a_node_without_a_controller_are_dealt_out_and_each_is_one_peers() -> None:
    rest = {name: member for name, member in MEMBERS.items() if member.node != "n2"}
    found = owned(rest)
    strays = {me: {e for e in mine if e.startswith("n2")} for me, mine in found.items()}
    assert set.union(*strays.values()) == {f"n2-{i}" for i in range(20)}
    assert not set.intersection(*strays.values())
    assert all(strays.values())


def test_all_engines_of_a_slot_are_one_peers_for_one_wakes_when_the_other_sleeps() -> None:
    rest = {name: member for name, member in MEMBERS.items() if member.node != "n2"}
    judges = [engine("n2", i, instance=f"judge-{i}", role="reward", judge="j") for i in range(20)]
    workers = ENGINES | {one.instance: one for one in judges}
    for me in rest:
        rollout = {workers[name].slot for name in owned_engines("u", workers, rest, me) if name.startswith("n2")}
        reward = {workers[name].slot for name in owned_engines("u", workers, rest, me, role="reward")}
        assert rollout == reward


def test_engines_of_a_node_whose_controller_is_about_to_join_are_nobodys() -> None:
    first = {"n0.x": MEMBERS["n0.x"]}
    assert owned(first, joining=("n1", "n2")) == {"n0.x": {f"n0-{i}" for i in range(20)}}
    assert owned(first)["n0.x"] == set(ENGINES)


def test_joined_node_owns_its_engines_although_it_was_awaited() -> None:
    assert owned(MEMBERS, joining=NODES) == owned(MEMBERS)


def test_only_serving_engines_of_the_job_are_anybodys() -> None:
    others = [engine("n0", 90, state="starting"), engine("n0", 91, job_uid="v"), engine("n0", 92, role="reward")]
    assert owned_engines("u", {e.instance: e for e in others}, MEMBERS, "n0.x") == {}
