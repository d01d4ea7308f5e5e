"""Tests in a process of an invented next schema version (`gcore.schema.NEXT`), beside records and callers of the first one.

`tests/unit/ledger/test_next_schema.py` runs them; in any other process there is nothing to collect. When there is a second version,
they go back to their subjects.
"""

from __future__ import annotations

import os

from gcore.schema import NEXT

collect_ignore_glob = [] if os.environ.get(NEXT) == "1" else ["test_*.py"]
