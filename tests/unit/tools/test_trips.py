"""Four trips through the product enter at most this share of the modules that they entered before (`docs/develop/adr/trips-before.json`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.problem import ROOT

pytestmark = [pytest.mark.large, pytest.mark.serial, pytest.mark.timeout(300)]

LIMITS = {"prompt": 0.64, "submission": 0.62, "placement": 0.63, "sample": 0.62}
BEFORE: dict[str, Any] = json.loads((ROOT / "docs" / "develop" / "adr" / "trips-before.json").read_text())["trips"]


@pytest.fixture(scope="module")
def trips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As they are now."""
    file: Path = tmp_path_factory.mktemp("trips") / "now.json"
    subprocess.run([sys.executable, str(ROOT / "tools" / "trips.py"), "record", str(file)], check=True)
    found: dict[str, Any] = json.loads(file.read_text())["trips"]
    return found


@pytest.mark.parametrize(("trip", "limit"), LIMITS.items(), ids=list(LIMITS))
def test_a_trip_enters_fewer_modules_than_before(trips: dict[str, Any], trip: str, limit: float) -> None:
    before, now = BEFORE[trip]["counts"]["all"], trips[trip]["counts"]["all"]
    assert 0 < now <= limit * before, f"{now} of {before} modules: {', '.join(trips[trip]['modules'])}"
