"""Writes the dashboards' JSON from their description: `python deploy/grafana/make.py [FOLDER]`, after a change of one of the boards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from control_board import CONTROL
from describing import Dashboard, tree_of
from fleet_board import FLEET
from job_board import JOB
from judges_board import JUDGES
from placement_board import PLACEMENT

ALL = (FLEET, JOB, PLACEMENT, CONTROL, JUDGES)
FOLDER = Path(__file__).parent / "dashboards"


def text_of(dashboard: Dashboard) -> str:
    """The file's content."""
    return json.dumps(tree_of(dashboard), indent=1) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(exist_ok=True)
    for one in ALL:
        (folder / f"{one.name}.json").write_text(text_of(one), encoding="utf-8")
