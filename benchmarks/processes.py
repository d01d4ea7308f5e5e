"""What the kernel says of a process, for benchmarks: memory, processor time, wake-ups, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
MB = 1e6


@dataclass(frozen=True)
class Reading:
    """At one moment. Memory in MB (10^6 bytes), processor time in seconds."""

    rss: float
    pss: float
    anonymous: float
    processor_s: float
    switches: int
    threads: int


def read(pid: int) -> Reading:
    """Raises OSError if the process is gone."""
    proc = Path(f"/proc/{pid}")
    rollup = _fields(proc / "smaps_rollup")
    stat = (proc / "stat").read_text().rpartition(")")[2].split()
    tasks = [_fields(task / "status") for task in (proc / "task").iterdir()]
    switches = sum(t["voluntary_ctxt_switches"] + t["nonvoluntary_ctxt_switches"] for t in tasks)
    return Reading(
        rss=round(rollup["Rss"] * 1024 / MB, 1),
        pss=round(rollup["Pss"] * 1024 / MB, 1),
        anonymous=round(rollup["Anonymous"] * 1024 / MB, 1),
        processor_s=(int(stat[11]) + int(stat[12])) / TICKS,
        switches=switches,
        threads=len(tasks),
    )


def _fields(file: Path) -> dict[str, int]:
    found = {}
    for line in file.read_text().splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and words and words[0].isdigit():
            found[name] = int(words[0])
    return found
