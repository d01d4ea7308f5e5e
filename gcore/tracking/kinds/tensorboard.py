"""TensorBoard, through its own package: event files in the run's folder, no TensorFlow and no torch.

`tensorboard --logdir RUN_FOLDER/tensorboard`. A rollback, and a process that goes on after another, write the mark by which
TensorBoard drops the points from the next step on, so each curve shows every step once: as it was trained last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gcore.tracking.api import Options, Point, TrackedRun, TrackerKind, flattened


class TensorBoard:
    """Implements `gcore.tracking.api.Tracker`."""

    def __init__(self, run: TrackedRun, options: Options) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        folder = (
            Path(str(options["folder"])) / f"{run.name}-{run.uid}"
            if "folder" in options
            else run.run_dir / "tensorboard"
        )
        self._writer = EventFileWriter(str(folder))
        if run.next_step is None:
            self._hyperparameters(run)
        else:
            self._restarted(run.next_step)

    def log(self, point: Point) -> None:
        """One scalar a number."""
        summary = self._summaries.Summary()
        for name, value in point.metrics.items():
            summary.value.add(tag=name, simple_value=value)
        self._write(summary, point.step, point.time)

    def rolled_back(self, point: Point, reason: str) -> None:
        """What comes after that step is dropped from the curves."""
        self._restarted(point.step + 1)

    def flush(self) -> None:
        """To the disk."""
        self._writer.flush()

    def finish(self, state: str | None) -> None:
        """Close the file."""
        self._writer.close()

    def _restarted(self, step: int) -> None:
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=step, session_log=start))

    def _write(self, summary: Any, step: int, time: float) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=time, summary=summary))

    def _hyperparameters(self, run: TrackedRun) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        spec = json.dumps(run.spec, indent=2)
        indented = "\n".join(f"    {line}" for line in spec.splitlines())
        self._write(text_pb("spec", indented), 0, 0.0)
        self._write(hparams_pb(flattened(run.spec), trial_id=run.uid), 0, 0.0)


KIND = TrackerKind(TensorBoard, "tensorboard", "gcore[tensorboard]", frozenset({"folder"}))
