"""Runs on emulated slots with dynamic placement: a job with a judge, and test policies in a package of their own.

`swing` moves slots back and forth between rollout and the judge at each step, `sway` every three steps. `regrow` grows and shrinks the train world.
`tight` does so on four slots, where a node gives away its last engine of the policy. `broken` raises. `keep` never moves anything, so that every
moved slot was lent. `pairs` moves two slots at a time, for engines that span two.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gcore.engines.emulated.launch import LAW_FILE
from gcore.ledger.records.job import Move, MoveKind
from gcore.system.fault_injection import VARIABLE
from gcore.testing.models import make_tiny_model
from placement.moves import move_in_words, numbers_in_words, outcome_in_words

NAME = "placed"
LAW: Mapping[str, Any] = {
    "speedup": 4.0,
    "load_s": 0.2,
    "decode_s": 0.05,
    "response_tokens": 30,
    "response_spread": 0.5,
    "judge_decode_s": 0.05,
    "judge_response_tokens": 10,
    "sleep_s": 0.2,
    "wake_s": 0.2,
    "train_s": 1.0,
}
POLICIES = """
from placement.policies.base import Decision
from placement.slots import Split


class Stepwise:
    def __init__(self, start, splits):
        self.splits = splits

    def plan(self, situation):
        step = situation.history[-1].step if situation.history else 0
        reward, train = self.splits[step % len(self.splits)]
        split = Split("coexisting", situation.bounds.slots - reward - train, reward, train)
        return Decision(split, f"step {step} is over", expected_s=2.0, before_s=3.0, idle={"reward": 0.5})


def swing(start):
    return Stepwise(start, [(1, 1), (2, 1), (3, 1)])


def regrow(start):
    return Stepwise(start, [(1, 1), (1, 2), (1, 2), (1, 1)])


class Sway(Stepwise):
    def plan(self, situation):
        step = situation.history[-1].step if situation.history else 0
        decision = super().plan(situation)
        return Decision(decision.split, decision.reason, expected_s=2.0 + step % 3, before_s=5.0, idle=decision.idle)


def sway(start):
    return Sway(start, [(1, 1)] * 3 + [(2, 1)] * 3)


def tight(start):
    return Stepwise(start, [(1, 1), (2, 1)])


def pairs(start):
    return Stepwise(start, [(2, 2), (4, 2)])


def keep(start):
    return Stepwise(start, [(1, 1)])


class broken:
    def __init__(self, start):
        pass

    def plan(self, situation):
        raise RuntimeError("it has no plan")
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policies, for every process that is started from here on."""
    info = folder / "packages" / "test_policies-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-policies\nVersion: 1.0\n")
    names = "\n".join(
        f"{name} = test_policies:{name}" for name in ("swing", "sway", "tight", "regrow", "pairs", "keep", "broken")
    )
    (info / "entry_points.txt").write_text(f"[gcore.placement]\n{names}\n")
    (folder / "packages" / "test_policies.py").write_text(POLICIES)
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", str(folder / "packages") + (f":{known}" if known else ""))


def write_job(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: Mapping[str, Any],
    *,
    steps: int = 8,
    law: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """The spec's file; the policies are installed, and the law is set."""
    install(folder, monkeypatch)
    (folder / "law.json").write_text(json.dumps({**LAW, **(law or {})}))
    monkeypatch.setenv(LAW_FILE, str(folder / "law.json"))
    make_tiny_model(folder / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(30) for b in range(30)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    job: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 32},
        "flow": {"steps": steps, "groups_per_step": 16, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 80, "batch_slots": 8},
        "judges": [
            {
                "name": "tutor",
                "model": {"path": "model"},
                "template": "{{ prompt }}{{ response }}",
                "max_new_tokens": 40,
                "serving": {"batch_slots": 8},
                "verdict": {"parser": "words", "words": {"y": 1, "n": 0}},
            }
        ],
        "reward": {"judge": "tutor"},
        "placement": dict(placement),
        "checkpoint": {"every": 3},
    } | more
    file = folder / "job.yaml"
    file.write_text(f"name: {NAME}\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in job.items()) + "\n")
    return file


def arm(folder: Path, monkeypatch: pytest.MonkeyPatch, **points: str) -> Path:
    """Fault points, by name with `_` for the dot (`place_after="kill 2"`); where they stand."""
    armed = folder / "points"
    armed.mkdir()
    for name, deed in points.items():
        (armed / name.replace("_", ".")).write_text(deed)
    monkeypatch.setenv(VARIABLE, str(armed))
    return armed


def moves_of(home: Path) -> list[Move]:
    """The run's moves, oldest first, without what it began with."""
    from controllers.planning.history import NAME as FILE
    from controllers.planning.history import read_moves

    (run,) = (home / "runs").glob(f"{NAME}-*")
    return [move for move in read_moves(run / FILE) if move.kind is not MoveKind.BEGIN]


def check_account(told: str, moves: Sequence[Move]) -> None:
    """Whether what `gcore placement explain` told is an account of these moves that a person can follow."""
    paragraphs = told.split("\n\n")
    for move in moves:
        said = [one for one in paragraphs if move_in_words(move) in one]
        assert said, f"nothing is told of it: {move_in_words(move)}"
        mine = said[0]
        paragraphs = paragraphs[paragraphs.index(mine) + 1 :]
        assert move.reason, mine
        assert move.reason in mine
        assert numbers_in_words(move) in mine
        assert outcome_in_words(move) in mine
    for line in told.splitlines():
        assert not re.search(r"\b(None|nan|inf)\b|[{}]|: \.|\.\.|  \S+  |because[ ;,.]*$|, ,|;\.", line.strip()), line
        assert not line or line.endswith("."), line
