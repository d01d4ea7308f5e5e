"""A cluster file gives the available hardware or one error sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gcore.errors import UsageError
from placement.mapping.cluster import DEVICES, ClusterSpec, parse_cluster

NODE: dict[str, Any] = {"accelerators": 8, "device": "h100", "host_memory_gib": 1000}


def of(*nodes: dict[str, Any], **more: Any) -> ClusterSpec:
    return parse_cluster({"nodes": list(nodes)} | more, where="c.yaml")


def test_slots_and_nodes_are_counted() -> None:
    cluster = of(NODE | {"count": 3}, NODE | {"accelerators": 4})
    assert (cluster.slots, cluster.node_count, cluster.smallest_node) == (28, 4, 4)
    assert cluster.alike


def test_a_figure_beside_a_name_replaces_the_named_one() -> None:
    each = of(NODE | {"memory_gib": 40}).device
    assert each.memory_gib == 40
    assert each.tflops == DEVICES["h100"].tflops


def test_of_nodes_that_differ_the_weakest_figure_is_planned_with() -> None:
    cluster = of(NODE, NODE | {"device": "a100-40gb"}, NODE | {"device": "l4"})
    assert not cluster.alike
    device = cluster.device
    assert (device.memory_gib, device.tflops, device.bandwidth_gb_s) == (22.5, 121.0, 300.0)


def test_an_accelerator_without_a_name_is_described_by_its_figures() -> None:
    figures = {"memory_gib": 96, "tflops": 800, "bandwidth_gb_s": 4000, "link_gb_s": 200}
    assert of({"accelerators": 4, "host_memory_gib": 100} | figures).device.tflops == 800


def test_every_device_has_a_source_and_figures_above_zero() -> None:
    for device in DEVICES.values():
        assert device.source
        assert min(device.tflops, device.bandwidth_gb_s, device.link_gb_s, device.launch_s) > 0
        assert device.memory_gib is None or device.memory_gib > 0


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "'nodes' is missing"),
        ({"nodes": []}, "nodes: it should have at least one item"),
        ({"nodes": [NODE], "network": 3}, r"unknown key 'network', did you mean 'network_gb_s'\?"),
        ({"nodes": [NODE | {"acelerators": 3}]}, r"unknown key 'nodes.0.acelerators', did you mean 'accelerators'\?"),
        ({"nodes": [NODE | {"device": "h10"}]}, r"there is no device 'h10', did you mean 'h100'\?; known are a10, "),
        (
            {"nodes": [{"accelerators": 8, "host_memory_gib": 1}]},
            "memory_gib, tflops, bandwidth_gb_s, link_gb_s are required",
        ),
        ({"nodes": [{"accelerators": 8, "device": "h100"}]}, "'nodes.0.host_memory_gib' is missing"),
        ({"nodes": [NODE | {"accelerators": 0}]}, "nodes.0.accelerators: .* greater than 0 .got 0."),
        ({"nodes": [NODE | {"memory_gib": -3}]}, "nodes.0.memory_gib: "),
        ({"nodes": [NODE | {"tflops": math.inf}]}, "nodes.0.tflops: it should be a number that is not infinite"),
        ({"nodes": [NODE | {"count": True}]}, "put quotes around it"),
        ({"nodes": [NODE | {"count": 99_999}]}, "has 799992 accelerators; gcore plans for at most 100000"),
        ({"nodes": [NODE, NODE | {"device": "cpu-core"}]}, "use one kind only"),
        ({"nodes": "h100"}, "nodes: it should be a list"),
        ({"nodes": [[1]]}, "nodes.0: it should be a mapping"),
        ({"nodes": [NODE | {"accelerators": 8.5}]}, "nodes.0.accelerators: it should be a whole number .got 8.5."),
        (
            {"nodes": [NODE | {"host_memory_gib": "much"}]},
            "nodes.0.host_memory_gib: it should be a number .got 'much'.",
        ),
        ({"nodes": [NODE | {"name": "a b"}]}, "nodes.0.name: "),
    ],
)
def test_errors_are_one_sentence_with_the_key(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_cluster(tree, where="c.yaml")
    assert str(caught.value).startswith("c.yaml: ")
    assert "\n" not in str(caught.value)
