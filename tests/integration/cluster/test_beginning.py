"""A job with dynamic placement starts, in a cluster on real cores, with a placement that memory and step time allow, and reports it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_run import gcore, run_to_the_end

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

DYNAMIC = ("--set", "placement.policy=dynamic", "--set", "flow.steps=2", "--set", "eval.every=2")


def test_nodes_and_models_are_known_so_the_way_that_is_predicted_to_take_least_is_begun_with(
    spec: Path, home: Path
) -> None:
    ended = run_to_the_end(spec, home, DYNAMIC)
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", 2)
    told = gcore("placement", "explain", ended.summary["job"], "--home", str(home)).stdout
    assert "at the start: began with " in told
    assert "because nothing is measured yet: of 2 ways that fit it is predicted to take least, " in told
    assert "Expected: a step was to take " in told
