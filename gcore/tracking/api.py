"""What a tracker is: something that shows a run's numbers, fed line by line from `metrics.jsonl`.

A tracker is a plug-in under the entry-point group `gcore.trackers`: a `TrackerKind`, or just a function that opens one. It
runs in a process of its own (`gcore.tracking.process`), which may end at any moment and is started again, also on another
node: what was logged last may be logged once more. A tracker of one's own needs nothing of gcore but this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gcore.config.base import Option

Options = Mapping[str, Option]


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers of one moment of a run.

    `step` counts anew from where a rollback went back to, in the next `lineage`; `seq` only ever grows, and is that of the
    newest line of the chain. `time` is in seconds since the epoch.
    """

    seq: int
    lineage: int
    step: int
    time: float
    metrics: Mapping[str, float]
    """Finite numbers, named "train/loss", "eval/accuracy"."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run, as a tracker is told of it. `uid` names it for ever, `folder` (which exists) is the tracker's own."""

    uid: str
    name: str
    run_dir: Path
    folder: Path
    spec: Mapping[str, Any]
    """The resolved job spec: the hyperparameters."""
    next_step: int | None = None
    """What comes first; None: nothing of this run was logged before."""


class Tracker(Protocol):
    """Takes numbers. Whatever it raises ends its process, which is started again. May block; nobody waits for it."""

    def log(self, point: Point) -> None:
        """A step's numbers, or an evaluation's."""
        ...

    def rolled_back(self, point: Point, reason: str) -> None:
        """The steps after `point.step` are made again, from here on in `point.lineage`."""
        ...

    def flush(self) -> None:
        """Let go of what was logged: after this it is not logged again."""
        ...

    def finish(self, state: str | None) -> None:
        """The job has ended (SUCCEEDED, FAILED, CANCELLED); None: it goes on, but this process does not."""
        ...


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """How a tracker is opened, and what can be checked before: the module it needs, what installs it, its options."""

    opens: Callable[[TrackedRun, Options], Tracker]
    module: str = ""
    install: str = ""
    options: frozenset[str] | None = None
    """None: whatever the spec gives."""

    def __call__(self, run: TrackedRun, options: Options) -> Tracker:
        """Open it. Raises what its package raises."""
        return self.opens(run, options)


def flattened(spec: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Hyperparameters with dotted names; lists and what is not set as text."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return found
