"""One run for a benchmark: read, checked, and its cluster always stopped. `gcore` is a script that leaves a run's files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness

SPEC = Path("/somewhere/job.yaml")
GCORE = """
import json, os, sys, time
from pathlib import Path

words, told = sys.argv[1:], Path(__file__).with_name("told.jsonl")
with told.open("a") as file:
    file.write(json.dumps({"words": words, "folder": os.getcwd(), "law": os.environ.get("A_LAW")}) + "\\n")
home = Path(words[words.index("--home") + 1])
if words[0] == "down":
    sys.exit(0)
asked = json.loads(Path(__file__).with_name("asked.json").read_text())
print("what it says", flush=True)
time.sleep(asked.get("sleeps", 0))
run = home / "runs" / "job-1"
run.mkdir(parents=True)
for name, text in asked["files"].items():
    (run / name).write_text(text)
sys.exit(asked.get("code", 0))
"""
SUMMARY = {"state": "SUCCEEDED", "reason": "", "audit": "clean", "steps": 3}
EVENTS: list[dict[str, Any]] = [
    {"kind": "job", "time": 9.0},
    *({"kind": "step", "time": time, "data": {"stats": {"tokens": 10 * time}}} for time in (10.0, 12.5, 14.0)),
]
EVALUATIONS: list[dict[str, Any]] = [
    {"kind": "eval", "step": 3, "metrics": {"accuracy": 0.75001}},
    {"kind": "step", "step": 1, "metrics": {"reward": 1.0}},
    {"kind": "eval", "step": 0, "metrics": {"accuracy": 0.5}},
]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


class Gcore:
    """The script, and what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "gcore.py").write_text(GCORE)

    def leaves(self, summary: dict[str, Any], *, moves: list[dict[str, Any]] | None = None, **how: float) -> None:
        files = {
            "summary.json": json.dumps(summary),
            "events.jsonl": lines(EVENTS),
            "metrics.jsonl": lines(EVALUATIONS),
        }
        if moves is not None:
            files["moves.jsonl"] = lines(moves)
        (self.folder / "asked.json").write_text(json.dumps({"files": files, **how}))

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "told.jsonl").read_text().splitlines()]

    def verbs(self) -> list[str]:
        return [call["words"][0] for call in self.calls()]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(harness, "GCORE", [sys.executable, str(tmp_path / "gcore.py")])
    return harness


@pytest.fixture
def gcore(tmp_path: Path) -> Gcore:
    return Gcore(tmp_path)


def test_files_of_a_run_are_read_and_its_folder_is_deleted(runs: Any, gcore: Gcore) -> None:
    gcore.leaves(SUMMARY)
    run = runs.finished_run(SPEC, "flow.steps=3", controllers=1, slots="emulated:2", environment={"A_LAW": "law.json"})
    assert run.summary == SUMMARY
    assert run.step_times == [10.0, 12.5, 14.0]
    assert run.step_seconds == [2.5, 1.5]
    assert [one["tokens"] for one in run.stats] == [100.0, 125.0, 140.0]
    assert run.curve == [[0, 0.5], [3, 0.75]]
    assert (run.moves, run.move_lines, run.stays, run.books) == ([], [], [], [])
    assert run.seconds > 0
    first, last = gcore.calls()
    home = first["words"][first["words"].index("--home") + 1]
    words = ["run", str(SPEC), "--plain", "--controllers", "1", "--slots", "emulated:2", "--set", "flow.steps=3"]
    assert first == {"words": [*words, "--home", home], "folder": str(Path(home).parent), "law": "law.json"}
    assert last["words"] == ["down", "--home", home]
    assert not Path(home).parent.exists()


def test_a_move_and_what_became_of_it_are_two_lines_and_one_move(runs: Any, gcore: Gcore) -> None:
    split = {"mode": "coexisting", "rollout": 2, "reward": 1, "train": 1}
    move = {"generation": 2, "step": 3, "kind": "split", "before": split, "after": split, "reason": "idle"}
    moves = [{"number": 0, "move": move}, {"number": 0, "move": {**move, "outcome": {"step_s": 1.5, "steps": 2}}}]
    stay = {"since": 1, "step": 2, "reason": "nothing is quicker", "began": 1.0}
    gcore.leaves(SUMMARY, moves=[*moves, {"stay": stay}])
    run = runs.finished_run(SPEC)
    assert run.move_lines == moves
    assert [(one.reason, one.outcome.step_s) for one in run.moves] == [("idle", 1.5)]
    assert [one.reason for one in run.stays] == ["nothing is quicker"]


def test_a_run_that_fails_shows_what_it_said_and_its_cluster_is_ended(runs: Any, gcore: Gcore) -> None:
    gcore.leaves(SUMMARY, code=1)
    with pytest.raises(SystemExit, match=r"(?s)job\.yaml train\.ranks=1: ended with 1.*what it says"):
        runs.finished_run(SPEC, "train.ranks=1")
    assert gcore.verbs() == ["run", "down"]


def test_a_run_that_takes_too_long_is_given_up_and_its_cluster_is_ended(runs: Any, gcore: Gcore) -> None:
    gcore.leaves(SUMMARY, sleeps=60)
    with pytest.raises(SystemExit, match=r"job\.yaml: not at its end after 1\.0 s"):
        runs.finished_run(SPEC, limit_s=1.0)
    assert gcore.verbs()[-1] == "down"


@pytest.mark.parametrize(
    "wrong",
    [{"audit": ["0/1/2 was trained twice"]}, {"state": "FAILED", "reason": "an engine was lost"}],
)
def test_a_run_that_did_not_succeed_with_a_clean_audit_is_refused(
    runs: Any, gcore: Gcore, wrong: dict[str, Any]
) -> None:
    gcore.leaves(SUMMARY | wrong)
    with pytest.raises(SystemExit, match=r"trained twice|an engine was lost"):
        runs.finished_run(SPEC)
    assert gcore.verbs() == ["run", "down"]


def test_a_cluster_is_ended_when_what_is_measured_on_it_raises(runs: Any, gcore: Gcore) -> None:
    with pytest.raises(KeyboardInterrupt), runs.own_home():
        raise KeyboardInterrupt
    assert gcore.verbs() == ["down"]


def test_alternating_pairs_swap_the_first_side_and_keep_one_order_of_names(
    runs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def side(name: str, seconds: float) -> tuple[str, Callable[[], dict[str, Any]]]:
        def run() -> dict[str, Any]:
            ran.append(name)
            return {"seconds": seconds, "number": len(ran)}

        return name, run

    pairs = runs.alternating_pairs(3, side("whole", 6.0), side("streamed", 4.0))
    assert ran == ["whole", "streamed", "streamed", "whole", "whole", "streamed"]
    assert [list(pair) for pair in pairs] == [["whole", "streamed"]] * 3
    assert [(pair["whole"]["number"], pair["streamed"]["number"]) for pair in pairs] == [(1, 2), (4, 3), (5, 6)]
    assert "pair 3/3: 1.500 times as fast" in capsys.readouterr().out


def test_a_stopwatch_counts_a_sleep_as_own_seconds_and_not_as_processor_time() -> None:
    watch = harness.Stopwatch()
    time.sleep(0.2)
    spent = watch.spent()
    assert spent["seconds"] >= 0.2
    assert 0.15 <= spent["own_seconds"] <= spent["seconds"]
    assert spent["cpu_seconds"] < 0.15


def test_a_slowed_function_computes_for_as_long_again() -> None:
    spent = []

    def work(rounds: int) -> int:
        began = time.process_time()
        total = sum(range(rounds))
        spent.append(time.process_time() - began)
        return total

    began = time.process_time()
    assert harness.slowed(work)(2_000_000) == 1_999_999_000_000
    assert time.process_time() - began >= 2 * spent[0] > 0
