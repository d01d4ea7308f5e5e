"""Benchmarks: `python -m benchmarks run NAME`, `python -m benchmarks report`, `python -m benchmarks check`.

Read `run` first (the list of benchmarks), then `harness` (their common parts). A benchmark writes `results/NAME.json`. `report`
makes the tables of the documents from these files. `check` compares them with the bounds in `bounds.json`.

Some benchmarks use the simulations and clusters of `tests/support`, so that folder is on the path.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
