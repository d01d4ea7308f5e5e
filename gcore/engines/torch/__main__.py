"""`python -m gcore.engines.torch`: the torch engine, under its supervisor or started by hand.

Reports invalid arguments in one sentence. Sets environment variables, and keeps torch's compiler from being imported,
before it imports the server: torch, transformers and OpenMP read the variables at import.
"""

from __future__ import annotations

import os
import sys

from gcore.engines.launch import check_folder, parse_engine_arguments, parse_engine_launch
from gcore.errors import GcoreError
from gcore.system.daemon import set_up_logging
from gcore.system.process import thread_environment
from gcore.worker.control import ControlLine

INTERRUPTED_EXIT = 130


def main() -> int:
    """Parse the launch document or the command line, serve, and return the exit code."""
    # No network access, no other frameworks, no spinning threads.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("USE_TORCH", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    control = ControlLine.inherit()
    set_up_logging(level="WARNING")
    try:
        launch = parse_engine_arguments(sys.argv[1:]) if control is None else parse_engine_launch(control.launch)
        check_folder(launch.model)
        for name, value in thread_environment(launch.threads).items():
            os.environ.setdefault(name, value)
        from gcore.system.torch_imports import leave_compiler_out

        leave_compiler_out()
        from gcore.engines.torch.server import serve_engine

        serve_engine(launch, control)
    except GcoreError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        if control is not None:
            control.send("failed", reason=str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    return 0


def run() -> None:
    """Run `main` and end the process with its exit code."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter shutdown: with torch's threads it is slow and may abort. Everything is closed by now.
    os._exit(code)


if __name__ == "__main__":
    run()
