"""`python -m gcore.rollout.sglang`: the process's edge. Started by a supervisor; imports no torch."""

from __future__ import annotations

import asyncio
import os
import sys

from gcore.clock import SystemClock
from gcore.errors import GcoreError, UsageError
from gcore.rollout.engine.launch import check_folder
from gcore.rollout.sglang.adapter import Adapter
from gcore.rollout.sglang.launch import from_document
from gcore.worker.child import Control


def main() -> int:
    """Serve; the exit code."""
    control = Control.inherit()
    if control is None:
        error = UsageError(
            "this is a worker, started by its supervisor",
            fix="Set rollout.engine: sglang in a job, or start SGLang by hand with python -m sglang.launch_server",
        )
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    try:
        launch = from_document(control.launch)
        check_folder(launch.model)
        asyncio.run(Adapter(launch, control, SystemClock()).run())
    except GcoreError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        control.send("failed", reason=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Threads that wait on the line and on the server's output are left behind.
    os._exit(code)
