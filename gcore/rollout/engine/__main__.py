"""`python -m gcore.rollout.engine`: the process's edge. What is wrong with its arguments is told in one sentence."""

from __future__ import annotations

import os
import sys

from gcore import logs
from gcore.errors import GcoreError
from gcore.rollout.engine.launch import check_folder, from_arguments, from_document
from gcore.worker.child import Control
from gcore.worker.threads import thread_environment

INTERRUPTED_EXIT = 130


def main() -> int:
    """Serve; the exit code."""
    # Before torch and transformers are imported: no look-ups, no other frameworks, no threads that spin.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("USE_TORCH", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    control = Control.inherit()
    logs.set_up(level="WARNING")
    try:
        launch = from_arguments(sys.argv[1:]) if control is None else from_document(control.launch)
        check_folder(launch.model)
        for name, value in thread_environment(launch.threads).items():
            os.environ.setdefault(name, value)
        from gcore.uncompiled import leave_compiler_out

        leave_compiler_out()
        from gcore.rollout.engine.serve import serve

        serve(launch, control)
    except GcoreError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        if control is not None:
            control.send("failed", reason=str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown with torch's threads costs time and can abort; everything is closed.
    os._exit(code)
