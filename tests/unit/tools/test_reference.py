"""The tools that compare moves of modules with the record: they find differences and count the entries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.problem import ROOT
from tools.reference import differences, key
from tools.reference_answers import form_of, without_varying
from tools.reference_stories import STORIES, Played, played, text_of, without_modules

ALL = ["simulations", "help", "json", "metrics"]


def recording(**changes: Any) -> dict[str, Any]:
    """Of one seed; each story has the same three lines."""
    stories = {key(kind, 0): vars(played(["begun", "step 1", "ended"])) for kind in STORIES}
    long_job = {"long job": vars(played(["k v"]))}
    rest = {"help": {"gcore": "Usage"}, "json": {"list": "[]"}, "metrics": {"gcore_x": {"type": "gauge", "labels": []}}}
    return {"simulations": {**stories, **long_job}, **rest, **changes}


def test_equal_recordings_do_not_differ() -> None:
    assert list(differences(recording(), recording(), [0], ALL)) == []


def test_a_history_that_differs_is_shown_from_the_first_line_that_does() -> None:
    now = recording()
    now["simulations"][key("cluster", 0)] = vars(played(["begun", "step 2", "ended"]))
    (found,) = differences(recording(), now, [0], ALL)
    assert found.startswith("simulations: cluster, seed 0\n")
    assert "-step 1\n+step 2" in found


def test_records_that_differ_under_equal_histories_are_a_difference() -> None:
    before, now = recording(), recording()
    before["simulations"][key("race", 0)] = vars(played(["ended"], b"one"))
    now["simulations"][key("race", 0)] = vars(played(["ended"], b"two"))
    (found,) = differences(before, now, [0], ALL)
    assert "what was written to the store differs" in found


@pytest.mark.parametrize(
    ("section", "now", "expected"),
    [
        ("help", {"gcore": "Usage:"}, "help: gcore"),
        ("json", {}, "json: list"),
        ("metrics", {"gcore_x": {"type": "gauge", "labels": ["job"]}}, "metrics: gcore_x"),
    ],
)
def test_changed_or_missing_output_is_a_difference(section: str, now: Any, expected: str) -> None:
    (found,) = differences(recording(), recording(**{section: now}), [0], ALL)
    assert found.startswith(expected)


def test_a_history_does_not_depend_on_where_modules_lie_and_keeps_everything_else() -> None:
    before, now = (
        "controllers.job raised gcore.errors.GcoreError: no",
        "controllers.job.session raised gcore.errors.GcoreError: no",
    )
    assert without_modules(before) == without_modules(now) == "MODULE raised MODULE: no"
    assert without_modules("/gcore/jobs/u/head 0.1") == "/gcore/jobs/u/head 0.1"
    one: Played = played([before, "step 1"])
    assert one == played([now, "step 1"])
    assert text_of(one.history)[1] == "step 1"


def test_of_an_error_in_a_history_its_message_stays_and_its_traceback_does_not() -> None:
    def history(function: str, message: str) -> Played:
        trace = f'  | Traceback (most recent call last):\n  |   File "x.py", line 3, in {function}\n  | Damaged: {message}\n  +----\n'
        return played([f"   1.00  WRONG: job u raised: {trace}"])

    assert history("apply", "no manifest") == history("carry_out", "no manifest")
    assert history("apply", "no manifest") != history("apply", "no folder")
    assert text_of(history("apply", "no manifest").history) == ["   1.00  WRONG: job u raised: no manifest"]


def test_of_an_answer_only_what_differs_from_run_to_run_is_left_out(tmp_path: Path) -> None:
    answer = f'{{"uid": "0a1b2c3d4e5f", "run_dir": "{tmp_path}/r", "at": "127.0.0.1:4711", "step": 3}}'
    assert without_varying(answer, tmp_path) == '{"uid": "UID", "run_dir": "FOLDER/r", "at": "ADDRESS", "step": 3}'
    assert form_of('[{"name": "n", "pid": 5, "up": true}]\nexit code 0\n') == {
        "exit code": "0",
        "form": [{"name": "n", "pid": "int", "up": True}],
    }


PROGRAM = """
import os, signal
import trip_hook
from gcore.types import Version

os.kill(os.getpid(), signal.SIGUSR1)
trip_hook.in_flow.set(True)
str(Version(0, 1))
os.kill(os.getpid(), signal.SIGUSR1)
trip_hook.in_flow.set(False)
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_trip_counts_modules_by_the_calls_into_them_and_not_by_their_import(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "tools" / "trip_hook"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "GCORE_TRIPS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=60)
    (announced,) = (file for file in tmp_path.glob("*.json") if file.stem.isdigit())
    assert json.loads(announced.read_text())["parent"] == os.getpid()
    dumps = [json.loads((tmp_path / f"{announced.stem}-{number}.json").read_text()) for number in (1, 2, 3)]
    assert dumps[0] == {"flow": [], "others": []}
    assert dumps[1] == {"flow": ["gcore/types.py"], "others": []}
    assert dumps[2] == {"flow": [], "others": []}


def test_a_process_without_the_variable_is_left_as_it_is(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools" / "trip_hook")}
    environment.pop("GCORE_TRIPS", None)
    program = "import signal, sys; print(sys.getprofile(), signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "True"]
