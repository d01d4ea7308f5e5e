"""SwanLab, through its own package. In the cloud the run's id is the job's uid, and a process that goes on resumes the run.

SwanLab keeps one value a step, the first, and its steps cannot go back. So curves are drawn over the place in the job's
chain, which only ever grows: it is the step until the first rollback; `train/step` and `train/lineage` are curves beside.
Online, local or offline as SWANLAB_MODE or the option `mode` says; the key comes from SWANLAB_API_KEY or `swanlab login`.
"""

from __future__ import annotations

import contextlib
import os

from gcore.tracking.api import Options, Point, TrackedRun, TrackerKind


class SwanLab:
    """Implements `gcore.tracking.api.Tracker`."""

    def __init__(self, run: TrackedRun, options: Options) -> None:
        import swanlab

        self._swanlab = swanlab
        mode = str(options.get("mode", "")) or os.environ.get("SWANLAB_MODE", "cloud")
        chosen = {name: str(options[name]) for name in ("workspace",) if name in options}
        if mode in ("cloud", "online"):
            chosen |= {"id": run.uid, "resume": "allow"}
        swanlab.init(
            project=str(options.get("project", "gcore")),
            experiment_name=run.name,
            description=f"gcore job {run.uid}",
            config=dict(run.spec),
            logdir=str(options.get("folder", run.run_dir.parent / "swanlog")),
            mode=mode,
            **chosen,
        )

    def log(self, point: Point) -> None:
        """One row of numbers."""
        place = {"train/step": float(point.step), "train/lineage": float(point.lineage)}
        self._swanlab.log({**place, **point.metrics}, step=point.seq)

    def rolled_back(self, point: Point, reason: str) -> None:
        """Seen in the curves of step and lineage."""
        self._swanlab.log({"train/step": float(point.step), "train/lineage": float(point.lineage)}, step=point.seq)

    def flush(self) -> None:
        """SwanLab's own threads have it, and write and send it; it offers no way to wait for that."""

    def finish(self, state: str | None) -> None:
        """Wait until it is sent, or on the disk."""
        if state in (None, "SUCCEEDED"):
            self._swanlab.finish()
            return
        crashed: object = "crashed"
        with contextlib.suppress(ImportError):  # older versions take a member of an enumeration
            from swanlab.data.run.helper import SwanLabRunState

            crashed = SwanLabRunState.CRASHED
        self._swanlab.finish(state=crashed, error=f"the job is {state}")


KIND = TrackerKind(SwanLab, "swanlab", "gcore[swanlab]", frozenset({"project", "workspace", "mode", "folder"}))
