"""The numbers of a job's steps, in the order of its chain: those that left the store from the run's folder, the others from the log.

A step is named by lineage and number; the chain's order is that of both together, for each lineage begins behind the one before. So
a stream goes on behind any step, also across a rollback. Pure, but for what reads the folder.

Which numbers a job has is not known before it tells them: its flow, its rewards and its losses have names of their own. So a name is
unknown if it is neither in the catalogue nor a number of any step so far; before the first step nothing is known to be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from controllers.service.refusals import BadFields, bad_field
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError
from gcore.ledger.archive import ArchivedLog
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import LogEntry
from gcore.metrics.step_stats import STEP_STATS
from gcore.nearest import did_you_mean
from gcore.rpc_status import Violation
from gcore.tracking.lines import numbers

MOST_NAMES = 256
KINDS = ("trained", "filtered", "failed")
COUNTS = ("groups", "filtered", "failed")
"""What each step has of these, as the API calls it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Behind which steps come. `lineage` None: steps of any lineage with a greater number."""

    step: int
    lineage: int | None = None

    def is_before(self, entry: LogEntry) -> bool:
        """Whether the entry's step comes behind it."""
        if self.lineage is None:
            return entry.step > self.step
        return (entry.lineage, entry.step) > (self.lineage, self.step)


def place_of(request: pb.StreamMetricsRequest) -> Place:
    """Where a stream begins. Raises BadFields."""
    wrong = []
    if request.after_step < 0:
        wrong.append(Violation("after_step", f"{request.after_step} is negative"))
    if request.HasField("after_lineage") and request.after_lineage < 0:
        wrong.append(Violation("after_lineage", f"{request.after_lineage} is negative"))
    if len(request.names) > MOST_NAMES:
        wrong.append(Violation("names", f"has more than {MOST_NAMES} names"))
    if wrong:
        raise BadFields(wrong)
    return Place(request.after_step, request.after_lineage if request.HasField("after_lineage") else None)


def stored(mirror: JobMirror, behind: Place) -> Iterator[LogEntry]:
    """The steps that the store has, in order."""
    for seq in sorted(mirror.log):
        entry = mirror.log[seq].record
        if entry.kind == "train" and behind.is_before(entry):
            yield entry


def all_of(run_dir: Path, log: Mapping[int, LogEntry], behind: Place) -> Iterator[LogEntry]:
    """The same with those that left the store. Reads them one by one. Raises GcoreError. Blocks on the disk."""
    try:
        archived = ArchivedLog(run_dir, log)
        for seq in sorted(archived):
            entry = archived.get(seq)
            if entry is not None and entry.kind == "train" and behind.is_before(entry):
                yield entry
    except OSError as error:
        raise GcoreError(f"the run's folder cannot be read ({error.strerror or error})", where=str(run_dir)) from error


def unheard(names: Collection[str], entries: Iterable[LogEntry]) -> bool:
    """Whether nothing can be said of some of `names`, for no step has been told. Raises BadFields for one that is unknown. Blocks, if
    the entries do."""
    asked = set(names) - STEP_STATS.keys() - set(COUNTS)
    told: set[str] = set()
    for entry in entries if asked else ():
        told |= numbers(entry.stats).keys()
        if asked <= told:
            return False
    if asked and told and (unknown := sorted(asked - told)):
        near = did_you_mean(unknown[0], told | STEP_STATS.keys() | set(COUNTS))
        raise bad_field(
            "names",
            f"{unknown[0][:80]!r} is no number of this job's steps so far{near}",
            "Ask without names for all there are",
        )
    return bool(asked)


def message(entry: LogEntry, names: Collection[str]) -> pb.StepMetrics:
    """A step as the API tells it."""
    kinds = (float(sum(one.kind == kind for one in entry.delta)) for kind in KINDS)
    values = {**numbers(entry.stats), **dict(zip(COUNTS, kinds, strict=True))}
    chosen = {name: value for name, value in values.items() if (not names or name in names) and math.isfinite(value)}
    return pb.StepMetrics(lineage=entry.lineage, step=entry.step, values=chosen)
