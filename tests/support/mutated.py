"""A pytest plug-in (`-p mutated`) that runs the tests against gcore with the mutation that GCORE_MUTATION names.

It applies the mutation before any test is imported, so that names that tests import from gcore are mutated too. A mutation that raises
an unrelated error ends the run with the status `BROKEN`: no test has detected anything then.
"""

from __future__ import annotations

import os
from typing import Any

from mutations import MUTATIONS

BROKEN = 9
"""pytest itself has none above 5."""
IN_PLACE = MUTATIONS[os.environ["GCORE_MUTATION"]].applied()
FAULTS = IN_PLACE.__enter__()


def pytest_sessionfinish(session: Any) -> None:
    """Called by pytest."""
    if FAULTS:
        session.exitstatus = BROKEN


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Called by pytest."""
    if FAULTS:
        terminalreporter.write_line(f"the mutation is itself wrong: {FAULTS[0]}")
