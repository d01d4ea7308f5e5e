"""The simulator's table keeps only rows whose inputs are unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import placement_simulation as simulator

LOADED = """
import sys
import placement.simulator.run
print(*(name for name in sys.modules if name.startswith("placement.") and not hasattr(sys.modules[name], "__path__")))
"""


def test_a_kept_row_depends_on_every_module_that_the_simulator_loads() -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout.split()
    files = {".".join(file.parts[file.parts.index("placement") :]) for file in simulator.decisive_modules()}
    assert {f"{name}.py" for name in loaded} == files


def test_rows_are_kept_until_a_module_or_a_scenario_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, scenario = tmp_path / "module.py", tmp_path / "one.yaml"
    monkeypatch.setattr(simulator, "decisive_modules", lambda: [module])
    monkeypatch.setattr(simulator, "SCENARIOS", tmp_path)
    found = []
    for text, slots in (("a", "1"), ("a", "1"), ("b", "1"), ("b", "2")):
        module.write_text(text)
        scenario.write_text(slots)
        found.append(simulator.fingerprint())
    assert found[0] == found[1]
    assert len(set(found)) == 3
