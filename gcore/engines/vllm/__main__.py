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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore.engines.launch import VllmLaunch
    from gcore.system.control_line import ControlLine

PACKAGE = Path(__file__).resolve().parents[2]


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


def run() -> None:
    """Serve until stopped, and end the process."""
    from gcore.engines.launch import VllmLaunch, end_process, serve_launch
    from gcore.engines.vllm.command import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    end_process(serve_launch(VllmLaunch, "python gcore/engines/vllm/__main__.py", _serve))


def _serve(launch: VllmLaunch, control: ControlLine | None) -> None:
    from gcore.engines.torch.server import serve_engine
    from gcore.engines.vllm.model import start_vllm

    serve_engine(launch, control, start_vllm)


if __name__ == "__main__":
    run()
