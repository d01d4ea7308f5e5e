"""Controllers, supervisors and the command line start without torch."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "deepspeed", "safetensors.torch", "sglang", "pyarrow")
LIGHT = (
    "controllers.daemon",
    "controllers.daemon.daemon",
    "controllers.cli.main",
    "gcore.worker.main",
    "gcore.client",
    "gcore.emulated.host",
    "gcore.emulated.rank",
    "gcore.flows",
    "gcore.engines.sglang.adapter",
    "gcore.testing.contracts",
    "placement.placer",
)


def loaded(modules: tuple[str, ...], heavy: tuple[str, ...]) -> str:
    """What of `heavy` a fresh process has loaded after each import, one line an import that loaded any."""
    program = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        f"    found = [one for one in {heavy!r} if one in sys.modules]\n    if found: print(name, found)\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_programs_of_controllers_and_commands_import_no_heavy_package() -> None:
    assert loaded(LIGHT, HEAVY) == ""


def test_a_daemon_without_a_job_has_neither_numpy_nor_the_search_of_placements() -> None:
    """With numpy it would be a sixth larger; a first placement comes with the first job."""
    assert loaded(("controllers.daemon", "controllers.daemon.daemon"), ("numpy", "placement.mapping")) == ""


def test_a_heavy_package_would_be_found() -> None:
    assert loaded(("json", "numpy"), ("numpy",)) == "numpy ['numpy']\n"
