"""The example of each built-in flow: its meaning with the flow's settings, and no repeated setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from due_steps import steps_evaluated

from gcore.config import load_spec
from gcore.config.load import flow_settings
from gcore.flows import find_flow

EXAMPLES = Path(__file__).parents[3] / "examples"
ARITHMETIC = EXAMPLES / "arithmetic"


@pytest.mark.parametrize(
    ("name", "advantage", "loss", "in_reward", "filters"),
    [
        ("grpo", "grpo", "ppo", False, []),
        ("dapo", "grpo", "ppo", False, ["signal"]),
        ("ppo", "gae", "ppo", False, []),
        ("remax", "remax", "ppo", True, []),
        ("rloo", "rloo", "ppo", True, []),
        ("reinforce_pp", "reinforce_pp", "ppo", True, []),
        ("sft", "grpo", "sft", False, []),
    ],
)
def test_an_example_is_what_its_paper_says(
    name: str, advantage: str, loss: str, in_reward: bool, filters: list[str]
) -> None:
    spec = load_spec(ARITHMETIC / f"{name}.yaml")
    assert (spec.flow.name, spec.train.advantage, spec.train.loss) == (name, advantage, loss)
    assert (spec.train.kl_in == "reward") == in_reward
    assert [one.name for one in spec.flow.filters] == filters
    assert spec.flow.steps is not None
    assert spec.flow.steps <= 40
    assert steps_evaluated(spec) >= {0, spec.flow.steps}


@pytest.mark.parametrize("name", ["dapo", "remax", "rloo", "sft"])
def test_it_says_only_what_differs_from_what_the_flow_sets(name: str) -> None:
    tree: dict[str, Any] = yaml.safe_load((ARITHMETIC / f"{name}.yaml").read_text())
    for section, values in flow_settings(find_flow(name)).items():
        repeated = [key for key, value in values.items() if tree.get(section, {}).get(key) == value]
        assert not repeated, f"{section}: {repeated}"
