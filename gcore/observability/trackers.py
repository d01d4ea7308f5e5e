"""Built-in experiment trackers, each through its own package: MLflow, SwanLab, TensorBoard, Weights & Biases.

After a rollback, steps repeat in a new lineage, and each tracker handles this differently:

- MLflow: one run per job, found by its tag `gcore.uid`. It keeps both values of a step, and the later one counts; the
  tag `gcore.lineage` counts rollbacks. Address: the option `uri` or MLFLOW_TRACKING_URI; otherwise files next to the
  run folders (`mlruns`). Characters that MLflow does not allow in names are replaced.
- SwanLab: in the cloud, the run's ID is the job's uid, and a process that takes over resumes the run. SwanLab keeps the
  first value of a step and cannot go back, so curves are drawn over the number of the log entry, which only grows;
  `train/step` and `train/lineage` are additional curves. Mode: SWANLAB_MODE or the option `mode`; key: SWANLAB_API_KEY
  or `swanlab login`.
- TensorBoard: event files in the run folder (`tensorboard --logdir RUN_FOLDER/tensorboard`), without TensorFlow and
  torch. After a rollback or a takeover, the tracker writes a marker that makes TensorBoard drop the points from the
  next step on.
- Weights & Biases: the run's ID is the job's uid. Steps are a metric, `step`, over which all curves are drawn, because
  W&B's own counter cannot go back. The values of both lineages are displayed; `lineage` distinguishes them. Mode:
  WANDB_MODE or the option `mode`; key: WANDB_API_KEY or `wandb login`, never the spec.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore.observability.tracking import Options, Point, TrackedRun, TrackerKind, flattened

STATUS = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "CANCELLED": "KILLED"}
LONGEST_PARAMETER = 500
PARAMETERS_AT_ONCE = 100
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class MLflow:
    """Implements `gcore.observability.tracking.Tracker`."""

    def __init__(self, run: TrackedRun, options: Options) -> None:
        uri = str(options.get("uri", "")) or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            # Files are the only store of the small package, and MLflow requires an explicit permission for it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.run_dir.parent / "mlruns").as_uri()
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._id = self._find(run, str(options.get("experiment", "gcore")))

    def log(self, point: Point) -> None:
        """Log a batch of metrics."""
        from mlflow.entities import Metric

        moment = int(point.time * 1000)
        numbers = [
            Metric(_FORBIDDEN.sub("_", name), value, moment, point.step) for name, value in point.metrics.items()
        ]
        self._client.log_batch(self._id, metrics=numbers)

    def rolled_back(self, point: Point, reason: str) -> None:
        """Record the rollback in the tags `gcore.lineage` and `gcore.rollback`."""
        self._client.set_tag(self._id, "gcore.lineage", str(point.lineage))
        self._client.set_tag(self._id, "gcore.rollback", f"to step {point.step}: {reason}")

    def flush(self) -> None:
        """No-op, because every call waits for its response."""

    def finish(self, state: str | None) -> None:
        """Terminate the run if the job has ended."""
        if state is not None:
            self._client.set_terminated(self._id, STATUS.get(state, "FINISHED"))

    def _find(self, run: TrackedRun, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        known = self._client.search_runs([experiment_id], f"tags.`gcore.uid` = '{run.uid}'", max_results=1)
        if known:
            return str(known[0].info.run_id)
        tags = {"gcore.uid": run.uid, "gcore.lineage": "0"}
        created = self._client.create_run(experiment_id, tags=tags, run_name=run.name)
        self._parameters(str(created.info.run_id), flattened(run.spec))
        return str(created.info.run_id)

    def _parameters(self, run_id: str, spec: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        every = [Param(_FORBIDDEN.sub("_", name), str(value)[:LONGEST_PARAMETER]) for name, value in spec.items()]
        for first in range(0, len(every), PARAMETERS_AT_ONCE):
            self._client.log_batch(run_id, params=every[first : first + PARAMETERS_AT_ONCE])


MLFLOW_KIND = TrackerKind(MLflow, "mlflow", "gcore[mlflow]", frozenset({"uri", "experiment"}))


class SwanLab:
    """Implements `gcore.observability.tracking.Tracker`."""

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
        """Log a row of metrics."""
        place = {"train/step": float(point.step), "train/lineage": float(point.lineage)}
        self._swanlab.log({**place, **point.metrics}, step=point.seq)

    def rolled_back(self, point: Point, reason: str) -> None:
        """Log step and lineage, whose curves show the rollback."""
        self._swanlab.log({"train/step": float(point.step), "train/lineage": float(point.lineage)}, step=point.seq)

    def flush(self) -> None:
        """No-op: SwanLab's own threads write and send, and offer no way to wait for it."""

    def finish(self, state: str | None) -> None:
        """Wait until everything is sent or on disk."""
        if state in (None, "SUCCEEDED"):
            self._swanlab.finish()
            return
        crashed: object = "crashed"
        with contextlib.suppress(ImportError):  # older versions need an enumeration member
            from swanlab.data.run.helper import SwanLabRunState

            crashed = SwanLabRunState.CRASHED
        self._swanlab.finish(state=crashed, error=f"the job is {state}")


SWANLAB_KIND = TrackerKind(SwanLab, "swanlab", "gcore[swanlab]", frozenset({"project", "workspace", "mode", "folder"}))


class TensorBoard:
    """Implements `gcore.observability.tracking.Tracker`."""

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
        """Write one scalar per metric."""
        summary = self._summaries.Summary()
        for name, value in point.metrics.items():
            summary.value.add(tag=name, simple_value=value)
        self._write(summary, point.step, point.time)

    def rolled_back(self, point: Point, reason: str) -> None:
        """Write a marker that makes TensorBoard drop the points after `point.step`."""
        self._restarted(point.step + 1)

    def flush(self) -> None:
        """Write buffered events to disk."""
        self._writer.flush()

    def finish(self, state: str | None) -> None:
        """Close the event file."""
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


TENSORBOARD_KIND = TrackerKind(TensorBoard, "tensorboard", "gcore[tensorboard]", frozenset({"folder"}))


class Wandb:
    """Implements `gcore.observability.tracking.Tracker`."""

    def __init__(self, run: TrackedRun, options: Options) -> None:
        import wandb

        chosen = {name: str(options[name]) for name in ("entity", "group", "mode") if name in options}
        self._run = wandb.init(
            project=str(options.get("project", "gcore")),
            id=run.uid,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.spec),
            settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True),
            **chosen,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, point: Point) -> None:
        """Log a row of metrics."""
        self._run.log({"step": point.step, "lineage": point.lineage, **point.metrics})

    def rolled_back(self, point: Point, reason: str) -> None:
        """Record the rollback in the run's summary."""
        self._run.summary["rollback"] = f"to step {point.step}, lineage {point.lineage}: {reason}"

    def flush(self) -> None:
        """No-op: W&B's own process writes to disk, and offers no way to wait for it."""

    def finish(self, state: str | None) -> None:
        """Wait until everything is sent or on disk."""
        if state is not None:
            self._run.summary["state"] = state
        self._run.finish(exit_code=0 if state in (None, "SUCCEEDED") else 1)


WANDB_KIND = TrackerKind(Wandb, "wandb", "gcore[wandb]", frozenset({"project", "entity", "group", "mode"}))
