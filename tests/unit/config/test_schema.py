"""The JSON schema of a spec file, by an independent validator: it accepts what specs may say, and refuses other keys."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
import yaml

from gcore.config.spec import job_schema

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*/*.yaml"))
SCHEMA: Any = fastjsonschema.compile(job_schema())


def spec(**sections: Any) -> dict[str, Any]:
    basic = {
        "name": "job",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 2},
        "rollout": {"max_new_tokens": 8},
    }
    return deepcopy(basic | sections)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_examples_follow_the_schema(path: Path) -> None:
    SCHEMA(yaml.safe_load(path.read_text(encoding="utf-8")))


FILE = {"file": "own.py:score"}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"reward": FILE},
        {"reward": [FILE, {"name": "numeric", "weight": 0.5}, {"judge": "j"}]},
        {"reward": {"parts": [FILE], "compose": "min"}},
        {"environment": FILE | {"max_turns": 2}},
        {"agent": FILE},
        {"flow": FILE | {"steps": 2}},
        {"data": {"sources": [{"name": "a", "path": "d", "reward": [FILE]}]}},
        {"rollout": {"engine": "diffusers"}},
        {"flow": {"name": "flow_grpo", "steps": 2}, "rollout": {"diffusion": {"steps": 4}}},
    ],
)
def test_short_forms_follow_the_schema(sections: dict[str, Any]) -> None:
    SCHEMA(spec(**sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"reward": []},
        {"reward": {"file": "own.py"}},
        {"reward": {"file": "own:score"}},
        {"reward": FILE | {"name": "numeric"}},
        {"reward": [{"nam": "numeric"}]},
        {"environment": {"max_turns": 2}},
        {"agent": FILE | {"name": "a"}},
        {"data": {"path": "d"} | FILE},
        {"flow": {"step": 2}},
        {"rollout": {}},
        {"rollout": {"engine": "torch"}},
    ],
)
def test_other_keys_and_values_are_refused(sections: dict[str, Any]) -> None:
    with pytest.raises(fastjsonschema.JsonSchemaException):
        SCHEMA(spec(**sections))
