"""The trackers that come with gcore, each through its own package: MLflow, SwanLab, TensorBoard, Weights & Biases.

After a rollback steps are made again, and no tracker goes back in the same way:

- MLflow: one run a job, found again by its tag `gcore.uid`. It keeps both values of a step, and the later one counts; the tag
  `gcore.lineage` says how often. Address: the option `uri` or MLFLOW_TRACKING_URI; without either, files beside the runs' folders
  (`mlruns`). Names are spelt with the characters that MLflow allows.
- SwanLab: in the cloud the run's id is the job's uid, and a process that takes over resumes the run. It keeps the first value of a
  step and cannot go back, so curves are drawn over the place in the job's chain, which only grows; `train/step` and
  `train/lineage` are curves beside. Mode: SWANLAB_MODE or the option `mode`; key: SWANLAB_API_KEY or `swanlab login`.
- TensorBoard: event files in the run's folder (`tensorboard --logdir RUN_FOLDER/tensorboard`), no TensorFlow and no torch. A
  rollback, and a process that takes over, write the mark by which TensorBoard drops the points from the next step on.
- Weights & Biases: the run's id is the job's uid. Steps are a metric, `step`, over which every curve is drawn, because its own
  counter cannot go back; both passes are shown, and `lineage` tells them apart. Mode: WANDB_MODE or the option `mode`; key:
  WANDB_API_KEY or `wandb login`, never the spec.
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
            # Files are the one store that the small package has; MLflow wants to be told that it is meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.run_dir.parent / "mlruns").as_uri()
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._id = self._find(run, str(options.get("experiment", "gcore")))

    def log(self, point: Point) -> None:
        """One batch of numbers."""
        from mlflow.entities import Metric

        moment = int(point.time * 1000)
        numbers = [
            Metric(_FORBIDDEN.sub("_", name), value, moment, point.step) for name, value in point.metrics.items()
        ]
        self._client.log_batch(self._id, metrics=numbers)

    def rolled_back(self, point: Point, reason: str) -> None:
        """Tags say so."""
        self._client.set_tag(self._id, "gcore.lineage", str(point.lineage))
        self._client.set_tag(self._id, "gcore.rollback", f"to step {point.step}: {reason}")

    def flush(self) -> None:
        """Every call has been answered."""

    def finish(self, state: str | None) -> None:
        """End the run, if the job has ended."""
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
        """One row of numbers."""
        self._run.log({"step": point.step, "lineage": point.lineage, **point.metrics})

    def rolled_back(self, point: Point, reason: str) -> None:
        """Said in the run's summary."""
        self._run.summary["rollback"] = f"to step {point.step}, lineage {point.lineage}: {reason}"

    def flush(self) -> None:
        """W&B's own process has it and writes it to the disk; it offers no way to wait for that."""

    def finish(self, state: str | None) -> None:
        """Wait until it is sent, or on the disk."""
        if state is not None:
            self._run.summary["state"] = state
        self._run.finish(exit_code=0 if state in (None, "SUCCEEDED") else 1)


WANDB_KIND = TrackerKind(Wandb, "wandb", "gcore[wandb]", frozenset({"project", "entity", "group", "mode"}))
