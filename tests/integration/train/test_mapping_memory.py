"""The memory estimates of the first placement are close to the use of real processes: a smaller form of `make bench-memory`."""

from __future__ import annotations

import pytest

from benchmarks import memory


@pytest.mark.large
@pytest.mark.timeout(900)
def test_estimates_are_near_what_a_rank_of_each_stage_and_an_engine_take() -> None:
    case = memory.Case
    ranks = [case("rank", model, train={"zero_stage": stage}) for model in (memory.BASE, "8M") for stage in (1, 3)]
    engines = [case("engine", memory.BASE), case("engine", "8M")]
    long = case("rank", "8M", response=56)
    found = memory.rows(memory.measured([*ranks, *engines, long]))
    assert [row["what"] for row in found] == ["rank", "rank", "engine", "rank"]
    for row in found:
        assert -0.35 <= row["error"] <= 0.75, row
    assert found[3]["measured_mb"] > found[0]["measured_mb"], "more tokens at once take more"
