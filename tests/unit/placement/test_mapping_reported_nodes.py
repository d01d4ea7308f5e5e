"""Reported facts of nodes and jobs are the planner's input; missing facts are not guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapped_jobs import JUDGE, spec
from told_nodes import H100, QWEN, node

from gcore.ledger.records.cluster import ModelConfigs
from placement.mapping.cluster import DEVICES
from placement.mapping.search import CALLED, KnownNodes, describe_nodes, describe_workload
from placement.mapping.workload import Workload
from placement.slots import NodeSlots


def silent(name: str) -> NodeSlots:
    return NodeSlots(name, ("cuda:0",))


def test_a_device_that_is_known_by_its_drivers_name_has_its_figures_and_the_memory_that_the_driver_tells() -> None:
    found = describe_nodes([node("a", 79.6, 79.6), node("b", 79.6, 79.5)])
    assert isinstance(found, KnownNodes)
    assert found.untimed == ""
    device = found.cluster.device
    assert (device.memory_gib, device.tflops) == (79.5, DEVICES["h100"].tflops)
    assert (found.cluster.slots, found.cluster.node_count) == (4, 2)


def test_every_name_is_of_a_device_that_there_is() -> None:
    assert set(CALLED.values()) == set(DEVICES) - {"cpu-core"}


def test_of_a_device_that_is_not_known_memory_alone_is() -> None:
    found = describe_nodes([node("a", 94.0, device="NVIDIA H100 NVL")])
    assert isinstance(found, KnownNodes)
    assert found.untimed == "the speed of NVIDIA H100 NVL is not known"
    assert found.cluster.device.memory_gib == 94.0


def test_cores_share_their_hosts_memory() -> None:
    found = describe_nodes([node("a", None, None, host=16.0)])
    assert isinstance(found, KnownNodes)
    assert not found.cluster.device.is_gpu
    assert found.cluster.host_gib_of_a_slot == 8.0


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        pytest.param([], "no node is present", id="none"),
        pytest.param([node("a", 80.0), silent("b")], "b reports no memory", id="one of the version before"),
        pytest.param([silent("b"), silent("a")], "a and b report no memory", id="two"),
        pytest.param([silent(n) for n in "abcd"], "a, b and 2 more report no memory", id="many"),
        pytest.param([node("a", 80.0), node("b", None)], "nodes with GPUs and nodes with CPU cores", id="mixed"),
        pytest.param(
            [node("a", 80.0, None)], "a reports different devices or memory for its slots", id="mixed on a node"
        ),
        pytest.param([node("a", 80.0, host=0.0)], "should be greater than 0", id="no memory at all"),
    ],
)
def test_unknown_hardware_gives_a_sentence(nodes: list[NodeSlots], why: str) -> None:
    found = describe_nodes(nodes)
    assert isinstance(found, str)
    assert why in found


gpus = st.builds(
    node,
    st.sampled_from("abcdef"),
    st.floats(1, 200),
    st.floats(1, 200),
    device=st.sampled_from([H100, "NVIDIA L4", "another"]),
    host=st.floats(1, 4000),
)


@given(st.lists(gpus, min_size=1, max_size=6))
def test_planner_uses_the_weakest_node(nodes: list[NodeSlots]) -> None:
    found = describe_nodes(nodes)
    assert isinstance(found, KnownNodes)
    facts = [one.facts for one in nodes if one.facts is not None]
    assert found.cluster.device.memory_gib == min(s.memory_gib for f in facts for s in f.slots if s.memory_gib)
    assert found.cluster.host_gib_of_a_slot == min(f.host_memory_gib for f in facts) / 2
    assert found.cluster.slots == sum(len(one.slots) for one in nodes)
    assert bool(found.untimed) == any(slot.device == "another" for f in facts for slot in f.slots)


def test_a_jobs_work_follows_from_what_was_kept_of_its_models() -> None:
    job: dict[str, Any] = {"judges": [JUDGE], "reward": {"judge": "right"}, "train": {"advantage": "gae"}}
    found = describe_workload(spec(**job), ModelConfigs(policy=QWEN, judges={"right": QWEN}))
    assert isinstance(found, Workload)
    assert [judge.name for judge in found.judges] == ["judge right"]
    assert set(found.training.models) == {"policy training", "critic training"}


@pytest.mark.parametrize(
    ("models", "why"),
    [
        pytest.param(None, "the configurations of the job's models were not recorded", id="a job of before"),
        pytest.param(ModelConfigs(policy={"model_type": "gpt2"}), "architecture 'gpt2' is not supported", id="policy"),
        pytest.param(ModelConfigs(policy=QWEN), "judge right: the model's config.json", id="judge"),
    ],
)
def test_a_model_whose_size_is_not_known_is_told(models: ModelConfigs | None, why: str) -> None:
    found = describe_workload(spec(judges=[JUDGE], reward={"judge": "right"}), models)
    assert isinstance(found, str)
    assert why in found
