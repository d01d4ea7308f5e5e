"""Files in the user's working directory are no modules: a `queue.py` there does not replace Python's."""

from __future__ import annotations

import subprocess
from pathlib import Path

from controllers.daemon.keeper import daemon_command
from controllers.workers.launch_documents import ENGINE_COMMANDS, RANK_COMMAND

SHADOWS = ("timeit.py", "queue.py", "random.py", "types.py", "secrets.py")


def test_a_daemon_an_engine_and_a_rank_start_where_files_are_called_as_pythons_modules(tmp_path: Path) -> None:
    for name in SHADOWS:
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    for command in (daemon_command("home", "file")[:4], ENGINE_COMMANDS["torch"], RANK_COMMAND):
        told = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "the wrong module" not in told.stderr
        assert "usage" in told.stdout or "use gcore run" in told.stderr  # it got as far as its own words
