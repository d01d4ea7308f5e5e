"""MLflow, through its own package: one MLflow run a job, found again by its tag `gcore.uid`.

Where to comes from the option `uri` or MLFLOW_TRACKING_URI; without either, files beside the runs' folders (`mlruns`). After
a rollback steps are made again: MLflow keeps both values of a step, and the later one counts as the metric's. The tag
`gcore.lineage` says how often. Names are spelt with what MLflow allows in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from gcore.tracking.api import Options, Point, TrackedRun, TrackerKind, flattened

STATUS = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "CANCELLED": "KILLED"}
LONGEST_PARAMETER = 500
PARAMETERS_AT_ONCE = 100
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class MLflow:
    """Implements `gcore.tracking.api.Tracker`."""

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


KIND = TrackerKind(MLflow, "mlflow", "gcore[mlflow]", frozenset({"uri", "experiment"}))
