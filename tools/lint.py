"""Run the checkers of the repository in one process: `python -m tools.lint [CHECK ...]`, part of `make lint`."""

from __future__ import annotations

import gc
import sys

from tools import (
    check_code,
    check_commands,
    check_deploy,
    check_docs,
    check_house,
    check_metrics,
    check_prose,
    check_simulation,
    check_spec,
    reference_pages,
)
from tools.problem import Check, main

CHECKS: dict[str, Check] = {
    "code": check_code.check,
    "commands": check_commands.check,
    "deploy": check_deploy.check,
    "docs": check_docs.check,
    "house": check_house.check,
    "metrics": check_metrics.check,
    "prose": check_prose.check,
    "reference": reference_pages.check,
    "simulation": check_simulation.check,
    "spec": check_spec.check,
}

if __name__ == "__main__":
    gc.disable()  # syntax trees of all modules live to the end: the collector would walk over them again and again
    sys.exit(main(CHECKS, __doc__))
