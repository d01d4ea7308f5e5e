"""The requirements on each configuration in `deploy/`."""

from __future__ import annotations

from controllers.api.submission.allowlist import Allowlist
from gcore.config import NodeConfig, parse_spec


def specs_may_name(config: NodeConfig, *roots: str) -> None:
    """Users of a daemon with authentication may name paths in these folders only."""
    assert config.tells_apart
    assert config.allow.roots == roots
    for root in roots:
        tree = {
            "name": "job",
            "model": {"path": f"{root}/model"},
            "data": {"path": f"{root}/data.jsonl"},
            "flow": {"steps": 1},
            "rollout": {"max_new_tokens": 8},
        }
        Allowlist.of(config).check(parse_spec(tree))
