"""A process of the next schema version works beside those of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gcore.schema import NEXT

ROOT = Path(__file__).parents[3]


def test_what_holds_between_two_versions_holds_between_this_one_and_an_invented_next() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/next_schema")
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, NEXT: "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
