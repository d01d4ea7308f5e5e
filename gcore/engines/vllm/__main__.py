"""The vLLM engine's program, under its supervisor or started by hand: PYTHON gcore/engines/vllm/__main__.py.

PYTHON is one with vLLM, in which gcore is not installed. So the program is run by its path and makes only the package
gcore importable, from the folder where it is: the rest of gcore's environment would replace vLLM's packages. Processes
that vLLM spawns run this file too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[2]
INTERRUPTED_EXIT = 130


class PackageFinder:
    """Finds the package gcore, and nothing else beside it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where the package is."""
        if name != PACKAGE.name:
            return None
        return importlib.util.spec_from_file_location(
            name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
        )


sys.meta_path.append(PackageFinder)


def main() -> int:
    """Parse the launch document or the command line, serve, and return the exit code."""
    from gcore.engines.launch import check_folder, parse_vllm_arguments, parse_vllm_launch
    from gcore.engines.vllm.command import ENVIRONMENT
    from gcore.errors import GcoreError
    from gcore.system.daemon import set_up_logging
    from gcore.system.process import thread_environment
    from gcore.worker.control import ControlLine

    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    control = ControlLine.inherit()
    set_up_logging(level="WARNING")
    try:
        launch = parse_vllm_arguments(sys.argv[1:]) if control is None else parse_vllm_launch(control.launch)
        check_folder(launch.model)
        for name, value in thread_environment(launch.threads).items():
            os.environ.setdefault(name, value)
        from gcore.engines.torch.server import serve_engine
        from gcore.engines.vllm.model import start_vllm

        serve_engine(launch, control, start_vllm)
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
