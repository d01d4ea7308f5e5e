"""How a train rank is told to start where no cluster starts it: for tests and benchmarks that run ranks by themselves.

Says nothing of the spec, which is the caller's, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore.train.launch import RankLaunch


def rank_launch(
    spec: Mapping[str, Any],
    run_dir: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    start: Mapping[str, Any] | None = None,
) -> RankLaunch:
    """Rank `rank` of a world of `world_size`. `spec`: a job spec as a tree; `start`: the step it begins behind, 0 if None."""
    return RankLaunch.model_validate(
        {
            "kind": "rank",
            "job_uid": "j",
            "world": "w",
            "lineage": 0,
            "rank": rank,
            "world_size": world_size,
            "spec": spec,
            "run_dir": str(run_dir),
            "start": start or {"step": 0},
        }
    )
