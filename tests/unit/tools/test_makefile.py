"""The Makefile's rules for the tests of one subject."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.run import MODULES

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile, what its set-up follows from, and the tests of two subjects; `records` has no tests."""
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    for file in (
        "Makefile",
        "pyproject.toml",
        "deploy/local/setup.sh",
        "deploy/sglang/setup.sh",
        "deploy/vllm/setup.sh",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    for file in ("unit/ledger/test_a.py", "contract/ledger/test_b.py", "unit/store/test_c.py", "unit/records/one.json"):
        (tmp_path / "tests" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / file).touch()
    return tmp_path


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The suite runs under make itself, whose settings a make inside would take over.
    env = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}
    return subprocess.run(["make", *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


def pytest_call(folder: Path, target: str) -> str:
    """The only call of pytest that `make TARGET` would do."""
    done = make(folder, "--dry-run", target)
    assert done.returncode == 0, done.stderr
    (call,) = (line for line in done.stdout.splitlines() if " -m pytest " in line)
    return call


@pytest.mark.parametrize(
    ("subject", "folders"),
    [("ledger", ["tests/contract/ledger", "tests/unit/ledger"]), ("store", ["tests/unit/store"])],
)
def test_a_subject_is_its_folders_of_unit_and_contract_tests(checkout: Path, subject: str, folders: list[str]) -> None:
    words = pytest_call(checkout, f"test-{subject}").split()
    assert sorted(word for word in words if word.startswith("tests/")) == folders
    assert words[words.index("-n") + 1] == "2"


def test_a_subject_runs_no_test_that_another_target_runs(checkout: Path) -> None:
    marks = pytest_call(checkout, "test-ledger").split('"')[1]
    assert marks.split(" and ") == [
        f"not {mark}"
        for mark in (
            "serial",
            "gpu",
            "sglang",
            "vllm",
            "hf",
            "trackers",
            "deploy",
            "notebook",
            "chaos",
            "large",
            "documents",
        )
    ]


@pytest.mark.parametrize("subject", ["lodger", "records", "unit"])
def test_an_unknown_subject_is_an_error_that_lists_the_subjects(checkout: Path, subject: str) -> None:
    done = make(checkout, f"test-{subject}")
    assert done.returncode == 2
    assert f"make test-{subject}: no subject '{subject}'; subjects: ledger store\n" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    "target",
    [
        "test-sglang",
        "test-vllm",
        "test-trackers",
        "test-deploy",
        "test-docs",
        "test-notebook",
        "test-upgrade",
        "test-gpu",
    ],
)
def test_a_target_of_its_own_is_no_subject(checkout: Path, target: str) -> None:
    name = target.removeprefix("test-")
    (checkout / "tests" / "unit" / name).mkdir()
    (checkout / "tests" / "unit" / name / "test_d.py").touch()
    assert f"tests/unit/{name}" not in pytest_call(checkout, target).split()


def test_gpu_tests_start_with_the_python_that_is_there_and_carried_wheels(checkout: Path) -> None:
    assert pytest_call(checkout, "test-gpu").startswith(".venv/bin/python ")
    bare = make(checkout, "--dry-run", "test-gpu", "PYTHON=python3").stdout
    assert ".venv" not in bare
    assert "pip install" not in bare, "nothing was carried"
    (checkout / ".whl").mkdir()
    (checkout / ".whl" / "one-1-py3-none-any.whl").touch()
    said = make(checkout, "--dry-run", "test-gpu", "PYTHON=python3").stdout
    assert "python3 -m pip install -q --no-index" in said
    assert ".venv" not in said
    (call,) = (line for line in said.splitlines() if " -m pytest " in line)
    assert f'PYTHONPATH="{checkout}:{checkout}/.gpu-site"' in call
    assert "python3 -m pytest -p pytest_asyncio.plugin -p pytest_timeout " in call
    assert call.endswith(" tests/gpu tests/contract/train tests/contract/engine ")


def test_wheels_are_carried_for_every_package_in_its_pinned_version(checkout: Path) -> None:
    text = (checkout / "Makefile").read_text().replace("\\\n", " ")
    (packages,) = re.findall(r"^GPU_PACKAGES := (.*)$", text, re.MULTILINE)
    pins = (checkout / "constraints" / "cuda.txt").read_text().lower().replace("_", "-")
    assert [name for name in packages.split() if f"{name.replace('_', '-')}==" not in pins] == []


def test_help_names_the_rules_of_subjects_and_of_benchmarks(checkout: Path) -> None:
    said = make(checkout, "help").stdout
    assert "make test-SUBJECT " in said
    assert "make bench-NAME " in said
    assert "%" not in said


def test_every_target_of_help_is_a_rule(checkout: Path) -> None:
    rules = set(re.findall(r"^([a-z%-]+):", (checkout / "Makefile").read_text(), re.MULTILINE))
    targets = [line.split()[1] for line in make(checkout, "help").stdout.splitlines()]
    assert {target.replace("SUBJECT", "%").replace("NAME", "%") for target in targets} <= rules


def test_every_benchmark_that_needs_more_is_one(checkout: Path) -> None:
    needs = re.findall(r"^(bench-[a-z -]+): ", (checkout / "Makefile").read_text(), re.MULTILINE)
    named = {name.removeprefix("bench-") for line in needs for name in line.split()}
    assert named - {"check", "page"} <= set(MODULES)
