"""The simulator's table goes on only with rows that everything which decides on them is the same for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOADED = """
import sys
import placement.simulate.table
print(*(name for name in sys.modules if name.startswith("placement.") and not hasattr(sys.modules[name], "__path__")))
"""


def test_a_kept_row_depends_on_every_module_that_the_simulator_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from placement_table import DECIDE  # type: ignore[import-not-found, unused-ignore]

    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout.split()
    assert {name.removeprefix("placement.").replace(".", "/") for name in loaded} == set(DECIDE)
