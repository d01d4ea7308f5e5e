"""Slots: what they did, by the books; how the placement shares them out, which moves it made and what came of those.

A move's numbers are those of the newest move of its kind: what was expected of it beside what was measured. A gain
may be negative, so it is no counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gcore.metrics.declared import Declared

EXPECTED, MEASURED = "expected", "measured"
POOLS = ("rollout", "reward", "train")


@dataclass(frozen=True, slots=True)
class MoveFigures:
    """Seconds that a step was to become shorter by and did, and that the move was to take and took; None: not known."""

    expected_gain_s: float | None = None
    gain_s: float | None = None
    expected_s: float | None = None
    took_s: float | None = None


class SlotMetrics(Declared):
    """Of this node's slots, and of the placement of its jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_seconds = self._counter(
            "gcore_slot_seconds_total",
            "Seconds of this node's slots by what they were: busy and idle (with cause) of a pool, switching (to the pool, from the one "
            "in cause), syncing, failed, unallocated; unbooked is what nobody can say.",
            "pool",
            "state",
            "cause",
        )
        self.moves = self._counter(
            "gcore_placement_moves_total",
            "Moves of the placement that this process decided, by kind (split, world, lend, return, mend) and state (done, wanted, would).",
            "kind",
            "state",
        )
        self._split = self._gauge("gcore_split_slots", "Slots that the plan gives to a pool of the job.", "job", "pool")
        self._move_gain = self._gauge(
            "gcore_move_gain_seconds",
            "Seconds a step by which the newest move of a kind was expected, and is measured, to shorten steps.",
            "job",
            "kind",
            "measure",
        )
        self._move_took = self._gauge(
            "gcore_move_seconds",
            "Seconds that the newest move of a kind was expected to take, and took.",
            "job",
            "kind",
            "measure",
        )

    def show_split(self, job: str, slots: Mapping[str, int]) -> None:
        """Set how many slots each pool has by the plan."""
        for pool in POOLS:
            self._split.labels(job, pool).set(slots.get(pool, 0))

    def show_move(self, job: str, kind: str, figures: MoveFigures) -> None:
        """Set the numbers of the newest move of a kind; of what is not known nothing is shown."""
        told = (
            (self._move_gain, EXPECTED, figures.expected_gain_s),
            (self._move_gain, MEASURED, figures.gain_s),
            (self._move_took, EXPECTED, figures.expected_s),
            (self._move_took, MEASURED, figures.took_s),
        )
        for gauge, measure, seconds in told:
            if seconds is not None:
                gauge.labels(job, kind, measure).set(seconds)
            else:
                gauge.remove_by_labels({"job": job, "kind": kind, "measure": measure})
