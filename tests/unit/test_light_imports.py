"""Controllers, supervisors and the command line start without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "deepspeed", "safetensors.torch", "sglang", "pyarrow")
LIGHT = (
    "controllers.daemon",
    "controllers.wire",
    "controllers.cli.main",
    "gcore.worker.main",
    "gcore.client",
    "gcore.emulated.host",
    "gcore.emulated.rank",
    "gcore.flows",
    "gcore.rollout.sglang.adapter",
    "gcore.testing.contract",
    "placement.plan",
)


@pytest.mark.parametrize("module", LIGHT)
def test_starts_without_torch(module: str) -> None:
    program = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_daemon_without_a_job_that_moves_slots_has_no_numpy() -> None:
    """It would be a sixth larger."""
    program = "import sys, controllers.daemon, controllers.wire; print('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_daemon_without_a_job_plans_nothing() -> None:
    """What a first placement is searched with comes with the first job."""
    program = "import sys, controllers.daemon, controllers.wire; print('placement.mapping' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
