"""Files of the folder where a user stands are nobody's modules: a `queue.py` there must not be taken for Python's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from controllers.children import ENGINE_COMMANDS, RANK_COMMAND
from controllers.keeper import daemon_command

ROOT = Path(__file__).parents[2]
SHADOWS = ("timeit.py", "queue.py", "random.py", "types.py", "secrets.py")


def test_every_process_that_is_started_leaves_the_current_folder_out_of_its_path() -> None:
    commands = re.compile(r"sys\.executable,\s*(\"-[^m][^\"]*\",\s*)*\"-m\"")
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for package in ("gcore", "controllers")
        for path in (ROOT / package).rglob("*.py")
        for match in commands.finditer(path.read_text())
        if not {"testing", "__pycache__"} & set(path.parts) and '"-P"' not in match.group()
    }
    assert found == set()


def test_a_daemon_an_engine_and_a_rank_start_where_files_are_called_as_pythons_modules(tmp_path: Path) -> None:
    for name in SHADOWS:
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    for command in (daemon_command("home", "file")[:4], ENGINE_COMMANDS["torch"], RANK_COMMAND):
        told = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "the wrong module" not in told.stderr
        assert "usage" in told.stdout or "use gcore run" in told.stderr  # it got as far as its own words
