"""Advantage estimators and losses of a user are tried in a process of their own before a job exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controllers.api.submission import checks
from controllers.api.submission.checks import try_objectives
from gcore.config.train import TrainSpec
from gcore.plugins import PluginFault
from gcore.train.objectives import find_plugin_advantage, find_plugin_loss

CODE = """
import os, signal, time

number = 3


def centered(outcomes, groups, *, scale=1.0):
    return scale * (outcomes - outcomes.mean())


def alone(outcomes):
    return outcomes


async def late(outcomes, groups):
    return outcomes


def leaves(outcomes, groups):
    os._exit(3)


def hangs(outcomes, groups):
    time.sleep(1000)


def plain(logp, old, advantages, mask, *, clip_low, clip_high):
    return -(logp - old).exp() * advantages


def summed(logp, old, advantages, mask, *, clip_low, clip_high):
    return logp.sum()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    own = tmp_path / "own.py"
    own.write_text(CODE)
    own.chmod(0o600)
    return own


def spec_of(file: Path, section: dict[str, str]) -> TrainSpec:
    return TrainSpec(**{key: f"{file}:{name}" for key, name in section.items()})  # type: ignore[arg-type]


def test_functions_that_work_are_accepted(file: Path) -> None:
    train = TrainSpec(advantage=f"{file}:centered", loss=f"{file}:plain", advantage_options={"scale": 2.0})
    try_objectives(train)


def test_no_process_starts_for_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "OBJECTIVES", "no.such.program")
    try_objectives(TrainSpec())


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"advantage": "absent"}, r"^train\.advantage: .*own\.py defines no 'absent'"),
        ({"advantage": "number"}, r"^train\.advantage: .* is an int, which cannot be called"),
        ({"advantage": "alone"}, r"^train\.advantage: .*own\.py:alone' raised TypeError: alone\(\) takes 1"),
        ({"advantage": "late"}, r"^train\.advantage: .* returned a coroutine, because"),
        ({"loss": "summed"}, r"^train\.loss: .* returned a tensor of shape \[\], not a tensor of shape \[2, 3\]"),
    ],
)
def test_a_function_that_a_rank_would_refuse_is_refused(file: Path, section: dict[str, str], said: str) -> None:
    find: Any = find_plugin_advantage if "advantage" in section else find_plugin_loss  # by the next test's process
    with pytest.raises(PluginFault, match=said):
        find(spec_of(file, section))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"advantage": "leaves"}, r"^train\.advantage: the trial of .* ended its process \(.* exit code 3\)\. Correct"),
        ({"loss": "summed"}, r"^train\.loss: .* returned a tensor of shape \[\], not a tensor of shape \[2, 3\]"),
    ],
)
def test_fault_of_the_process_that_tries_a_function_is_the_fault_of_the_job(
    file: Path, section: dict[str, str], said: str
) -> None:
    with pytest.raises(PluginFault, match=said):
        try_objectives(spec_of(file, section))


def test_a_function_that_never_returns_is_ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "OBJECTIVES_S", 0.01)
    with pytest.raises(
        PluginFault, match=r"^train\.advantage and train\.loss: the trial of .* took longer than 0\.01 s"
    ):
        try_objectives(TrainSpec(advantage=f"{file}:hangs", loss=f"{file}:plain"))
