"""Tests without their system tool: pytest skips and names them, unless `GCORE_REQUIRE_ALL` is set."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from system_tools import LEFT_OUT, REQUIRE_ALL, recorded

ROOT = Path(__file__).parents[3]


def alerts(path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of the alerts on a PATH without promtool."""
    test = "tests/unit/deploy/test_alerts.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "promtool", test, *options]
    inherited = {name: value for name, value in os.environ.items() if name != REQUIRE_ALL and "XDIST" not in name}
    given = {**inherited, "PATH": str(path), **environment}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "workers"])
def test_tests_whose_tool_is_missing_are_left_out_and_a_closing_line_names_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = alerts(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("Left out ")]
    assert len(lines) == 1, done.stdout
    skipped = re.search(r"(\d+) skipped", done.stdout)
    assert skipped is not None
    assert lines[0].startswith(f"Left out {skipped[1]} tests: {skipped[1]} need promtool (")
    assert lines[0].endswith("apt-get install prometheus")
    assert " passed" not in done.stdout


def test_a_missing_tool_is_a_failure_where_all_tests_are_required(tmp_path: Path) -> None:
    done = alerts(tmp_path, **{REQUIRE_ALL: "1"})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "promtool is missing: apt-get install prometheus" in done.stdout
    assert "Left out" not in done.stdout
    assert " skipped" not in done.stdout.splitlines()[-1]


def test_pytest_says_nothing_of_its_own_where_make_prints_the_closing_line(tmp_path: Path) -> None:
    file = tmp_path / "left-out"
    for calls in (1, 2):
        done = alerts(tmp_path, **{LEFT_OUT: str(file)})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Left out" not in done.stdout
        skipped = re.search(r"(\d+) skipped", done.stdout)
        assert skipped is not None
        assert recorded(file) == [["promtool"]] * int(skipped[1]) * calls
