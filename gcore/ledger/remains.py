"""The highest number of the log, and the highest lineage, of which anything is left in a run's folder: archived entries, lines of
`metrics.jsonl`, copies of the records of a run that had ended.

They are higher than head's where the store was put back to an older state: what lies there is of a future that was cut off, and
would pass for what is written after it under the same number. So whoever begins a lineage goes on above all of it
(`gcore.ledger.chain.rolled_back`). Weights and checkpoints are named by their lineage alone (`gcore.weights.layout`).

Only the end of each file is read, for a long run's archive is large. Entries are archived in ascending order but for those of
forgotten checkpoints, which come later and are few; `metrics.jsonl` has all of them in order. Nothing is changed here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from gcore.ledger import archive, store_copy
from gcore.ledger.chain import Seen
from gcore.tracking import file as metrics

TAIL_BYTES = 4 << 20


def left_in(run_dir: Path) -> Seen:
    """Of all these files; zeros where there are none. Raises OSError."""
    found = [Seen(), store_copy.newest_head(run_dir)]
    paths = [*(run_dir / archive.FOLDER).glob("*.jsonl"), run_dir / metrics.FILE]
    for path in paths:
        found += [_of_line(line) for line in _last_lines(path)]
    return Seen(entry=max(one.entry for one in found), lineage=max(one.lineage for one in found))


def _last_lines(path: Path) -> Iterator[bytes]:
    """The whole lines at a file's end."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        first, *rest = file.read().split(b"\n")
        yield from (rest if start else [first, *rest])[:-1]


def _of_line(line: bytes) -> Seen:
    try:
        tree = json.loads(line)
        return Seen(entry=_number(tree.get("seq")), lineage=_number(tree.get("lineage")))
    except (ValueError, AttributeError, RecursionError):  # cut off, or somebody else's
        return Seen()


def _number(value: object) -> int:
    return value if type(value) is int else 0
