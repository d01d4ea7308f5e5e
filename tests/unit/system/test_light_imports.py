"""Controllers, supervisors, the command line and the edges of all workers start without torch."""

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
    "gcore.engines.sglang.__main__",
    "gcore.engines.torch.__main__",
    "gcore.flows",
    "gcore.engines.sglang.adapter",
    "gcore.models.__main__",
    "gcore.testing.contracts",
    "gcore.tracking.__main__",
    "gcore.train.__main__",
    "placement.placer",
)


def loaded(modules: tuple[str, ...], heavy: tuple[str, ...]) -> str:
    """What of `heavy` a fresh process has loaded after each import, one line an import that loaded any."""
    program = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        f"    found = [one for one in {heavy!r} if one in sys.modules]\n    if found: print(name, found)\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_programs_import_no_heavy_package_before_they_start_their_work() -> None:
    """Engines and ranks set variables and leave torch's compiler out before they load torch: an import at the top is too soon."""
    assert loaded(LIGHT, HEAVY) == ""


def test_engines_serve_http_without_grpc() -> None:
    assert loaded(("gcore.engines.torch.server", "gcore.engines.sglang.adapter"), ("grpc",)) == ""


def test_a_daemon_without_a_job_has_neither_numpy_nor_the_search_of_placements() -> None:
    """With numpy it would be a sixth larger; a first placement comes with the first job."""
    assert loaded(("controllers.daemon", "controllers.daemon.daemon"), ("numpy", "placement.mapping")) == ""


def test_a_heavy_package_would_be_found() -> None:
    assert loaded(("json", "numpy"), ("numpy",)) == "numpy ['numpy']\n"
