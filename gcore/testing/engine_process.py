"""A torch engine as a process of its own, for tests and benchmarks: started by hand, stopped by its id."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gcore.errors import EngineError
from gcore.worker.threads import thread_environment

STOP_S = 20


@contextmanager
def engine_process(model: Path, **options: object) -> Iterator[str]:
    """An engine that serves `model`; its base URL. `options` as on its command line (`batch_slots=4`). Its errors show."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore.rollout.engine", "--model", str(model), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **thread_environment(1)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("serving on "):
            raise EngineError(f"the engine did not start (exit code {process.wait(STOP_S)})", where=str(model))
        yield f"http://{line.removeprefix('serving on ').strip()}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
