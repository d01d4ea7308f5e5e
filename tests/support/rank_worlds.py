"""Runs a program of train ranks (`train_rank_program.run`): a plain loop, one rank, two, with all cases in each process.

Two ranks run everything at ZeRO 3, and with `make test-large` at 1 and 2 too, which are the same code of DeepSpeed's; a single one,
which has nothing to share out, at one of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STAGES = (1, 2, 3) if "GCORE_ALL_STAGES" in os.environ else (3,)
"""At which two ranks run everything."""
WORLDS = [(1, 2), *((2, stage) for stage in STAGES)]
"""Number of ranks and ZeRO stage."""
RUNS = [pytest.param(size, stage, id=f"{size} x ZeRO {stage}") for size, stage in WORLDS]


def run_worlds(program: Path, folder: Path, *words: str, limit_s: float) -> None:
    """`program WORDS FOLDER`, with all its processes, on a machine without a compiler."""
    env = {
        **os.environ,
        "PATH": "/nonexistent",
        "STAGES": " ".join(map(str, STAGES)),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, str(program), *words, str(folder)]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        assert process.returncode == 0, output[-6000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
