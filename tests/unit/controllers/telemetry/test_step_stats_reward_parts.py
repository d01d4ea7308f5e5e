"""The parts of rewards, as a step's numbers and as metrics."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from controllers.flow.group_buffer import GroupBuffer
from controllers.telemetry.step_stats import MOST, group_parts, part_stats, parts_by_name
from gcore.ledger.records.chain import SealedGroup
from gcore.observability.metrics import Metrics
from gcore.types import Group, PromptRef, Sample, Version, VersionSpan

Parts = tuple[tuple[str, float], ...]


def group(seq: int, *parts: Parts, source: str = "sums") -> Group:
    span = (VersionSpan(Version(0, 0), 0, 1),)
    samples = tuple(Sample((1,), (0.0,), "x", "stop", span, 1.0, of_it) for of_it in parts)
    return Group(PromptRef(0, 0, seq), (1,), samples, source)


def sealed(*groups: Group) -> list[SealedGroup]:
    buffer = GroupBuffer()
    for one in groups:
        buffer.add_group(one)
    return [SealedGroup(**offered.model_dump(), holder="me") for offered in buffer.offers.values()]


def test_a_group_carries_the_mean_of_each_part_and_what_is_not_there_counts_as_nothing() -> None:
    found = group_parts(group(0, (("math", 1.0), ("form", 0.5)), (("math", 0.0), ("form", 1.0), ("overlong", -0.5))))
    assert found == {"math": 0.5, "form": 0.75, "overlong": -0.25}


def test_a_group_carries_few_parts_with_short_names() -> None:
    many = tuple((f"{n}{'x' * 100}", 1 / 3) for n in range(100))
    found = group_parts(group(0, many))
    assert len(found) == MOST
    assert all(len(name) == 32 for name in found)
    assert set(found.values()) == {0.333333}


def test_a_steps_part_is_the_mean_over_the_groups_of_the_sources_that_have_it() -> None:
    groups = sealed(
        group(0, (("math", 1.0),), (("math", 1.0), ("overlong", -1.0))),
        group(1, (("math", 0.0),), (("math", 1.0),)),
        group(2, (("form", 0.25),), source="letters"),
    )
    assert part_stats(groups) == {
        "reward_part/math": pytest.approx(0.75),
        "reward_part/overlong": pytest.approx(-0.25),
        "reward_part/form": pytest.approx(0.25),
    }
    assert part_stats([]) == {}


def test_parts_are_gauges_that_go_with_the_job() -> None:
    metrics = Metrics()
    metrics.show_parts("j", parts_by_name({"reward_part/form": 0.25, "reward": 1.0, "reward/sums": 0.5}))
    assert b'gcore_reward_part{job="j",part="form"} 0.25' in generate_latest(metrics.registry)
    metrics.forget_job("j")
    assert b'part="form"' not in generate_latest(metrics.registry)
