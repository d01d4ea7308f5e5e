"""Run a program of train ranks (`train_rank_program.run`): a plain loop, one rank, two ranks, with all cases in each process.

With `make test-large` two ranks run everything at each ZeRO stage and with FSDP2. Otherwise they run stage 3 and FSDP2 only, and of the
gradients' cases at stage 3 those in which ranks exchange more than gradients or have unequal work, with FSDP2 those about the backend. A
single rank runs everything at one stage, because it shards nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rank_splits import FSDP2, named

WHOLE = "GCORE_ALL_STAGES" in os.environ
STAGES = (1, 2, 3, FSDP2) if WHOLE else (3, FSDP2)
"""At which two ranks run everything."""
WORLDS = [(1, 2), *((2, stage) for stage in STAGES)]
"""Number of ranks and ZeRO stage."""

RUNS = [pytest.param(size, stage, id=named(size, stage)) for size, stage in WORLDS]


def run_worlds(
    program: Path, folder: Path, *words: str, limit_s: float, crossing: Mapping[int, Sequence[str]] | None = None
) -> None:
    """`program WORDS FOLDER`, with all its processes, on a machine without a compiler.

    `crossing`: the cases that two ranks run, by ZeRO stage; all without it.
    """
    env = {
        **os.environ,
        "PATH": "/nonexistent",
        "PYTHONPATH": str(Path(__file__).parent),
        "STAGES": " ".join(map(str, STAGES)),
        "CROSSING": json.dumps({} if WHOLE or crossing is None else crossing),
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
