"""Ctrl-C of `gcore run` costs no committed step: the same command continues from the last commit for any `checkpoint.every`."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from cluster_run import ClusterRun
from emulated_job import write_emulated_job

from controllers.cli.commands.run import CHECKPOINT_S

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(600)]

STEPS = 8
SEVERAL_S = CHECKPOINT_S + 20
"""With the end of the cluster."""


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    flow = {"steps": STEPS, "groups_per_step": 16, "samples_per_prompt": 2}
    return write_emulated_job(tmp_path, monkeypatch, speedup=8.0, flow=flow, checkpoint={"every": 1000})


def test_the_same_command_goes_on_from_the_last_commit(emulated: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = ClusterRun(emulated, home, "--slots", "emulated:4")
    try:
        first.until_step(3)
        os.kill(first.process.pid, signal.SIGINT)
        assert first.process.wait(timeout=SEVERAL_S) == 130
    finally:
        first.close()
    again = ClusterRun(emulated, home, "--slots", "emulated:4")
    try:
        ended = again.wait()
    finally:
        again.close()
    assert ended.code == 0, ended.output
    said = again.log.read_text()  # it shows what was before, too
    assert re.findall(r"^step (\d+)/", said, re.MULTILINE) == [str(step) for step in range(1, STEPS + 1)]
    # Paused for a checkpoint, or, where that was registered first, without its workers: no step is lost either way.
    lost = re.findall(r"^rollback: .*; (\w+) steps? (?:is|are) lost$", said, re.MULTILINE)
    assert lost
    assert set(lost) == {"no"}
