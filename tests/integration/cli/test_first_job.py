"""The commands of docs/start/first-job.md work in an empty folder, print what the page shows, and train the model.

The test reads the commands from the page and changes only the number of steps, to be short.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cluster_run import PATIENCE_S
from documented import commands_run_by
from documents import mismatch
from user_venv import make_user_venv

from tools.documents import Typed

pytestmark = [pytest.mark.serial, pytest.mark.chaos]
STEPS = 16
THIS = (
    "integration/cli/test_first_job.py::"
    "test_the_page_is_walked_from_an_empty_folder_to_an_export_of_a_model_that_has_learned"
)


def shortened(command: str) -> str:
    """The command, with fewer steps if it is the run of the whole job."""
    return f"{command} --set flow.steps={STEPS}" if command == "gcore run grpo.yaml" else command


def test_the_page_is_walked_from_an_empty_folder_to_an_export_of_a_model_that_has_learned(tmp_path: Path) -> None:
    environment = make_user_venv(tmp_path / "venv")
    folder = tmp_path / "empty"
    folder.mkdir()
    said: dict[str, str] = {}
    try:
        with commands_run_by(THIS) as walk:
            for command in walk.commands:
                if command.text.startswith("cd "):
                    folder = folder / command.text.removeprefix("cd ")
                    assert folder.is_dir()
                    walk.passed(command)
                    continue
                ended = subprocess.run(
                    shortened(command.text), shell=True, cwd=folder, env=environment,
                    capture_output=True, text=True, timeout=PATIENCE_S, check=False,
                )  # fmt: skip
                assert ended.returncode == 0, f"{command.text}\n{ended.stdout}\n{ended.stderr}"
                said[command.text] = ended.stdout
                if not _measured(command):
                    wrong = mismatch(command.printed, ended.stdout)
                    assert wrong is None, f"{command.text} does not print {wrong!r}:\n{ended.stdout}"
                walk.passed(command)
    finally:
        subprocess.run("gcore down", shell=True, cwd=folder, env=environment, capture_output=True, check=False)
    found = [json.loads(file.read_text()) for file in (folder / ".gcore" / "runs").glob("sorting-*/summary.json")]
    (summary,) = (one for one in found if one["steps"] == STEPS)  # a later command of the page trains 2 steps
    assert (summary["state"], summary["audit"]) == ("SUCCEEDED", "clean")
    assert summary["eval_accuracy_before"] <= 0.6
    assert summary["eval_accuracy_after"] >= 0.85
    assert (folder / "trained" / "model.safetensors").is_file()
    assert len(said) >= 12


def _measured(command: Typed) -> bool:
    """Whether the output has numbers that differ between machines; the test asserts their bounds instead."""
    return command.text.startswith(("gcore init", "gcore run", "pytest", "python -c"))
