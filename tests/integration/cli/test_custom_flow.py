"""examples/custom_flow as its README describes it: installed beside gcore, it passes the contract kit, and its model learns."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cluster_run import PATIENCE_S, gcore
from documents import ROOT
from user_venv import make_user_venv

EXAMPLE = ROOT / "examples" / "custom_flow"
STEPS = 16


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the example, installed in an environment of its own."""
    folder = tmp_path_factory.mktemp("custom")
    copy = folder / "custom_flow"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = make_user_venv(folder / "venv")
    command = "pip install --quiet --no-build-isolation --no-deps --editable custom_flow"
    subprocess.run(command, shell=True, cwd=folder, env=environment, check=True)
    return copy, environment


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    ended = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_it_passes_the_contract_kit_and_its_own_tests(project: tuple[Path, dict[str, str]]) -> None:
    folder, environment = project
    assert "5 passed" in run("pytest -q -p no:cacheprovider", folder, environment)


def test_without_it_installed_the_spec_is_refused_by_name() -> None:
    ended = gcore("validate", str(EXAMPLE / "patient.yaml"), check=2)
    assert "flow.name: no flow is called 'patient'" in ended.stderr


@pytest.mark.serial
@pytest.mark.chaos
def test_it_learns_over_two_controllers(
    project: tuple[Path, dict[str, str]], example: Path, home: Path, tmp_path: Path
) -> None:
    folder, environment = project
    spec = folder / "patient.yaml"
    text = spec.read_text().replace("../../.cache/examples/arithmetic", str(example))
    (tmp_path / "patient.yaml").write_text(text)
    run(
        f"gcore run {tmp_path / 'patient.yaml'} --plain --home {home} --controllers 2 --slots cpu:2 "
        f"--set flow.steps={STEPS}",
        tmp_path,
        environment,
    )
    (file,) = (home / "runs").glob("patient-*/summary.json")
    summary = json.loads(file.read_text())
    assert (summary["state"], summary["audit"], summary["steps"]) == ("SUCCEEDED", "clean", STEPS)
    assert summary["eval_accuracy_after"] >= summary["eval_accuracy_before"] + 0.20
    logs = "".join(log.read_text(errors="replace") for log in (home / "logs").glob("*"))
    assert "prompts were tried again" in logs
