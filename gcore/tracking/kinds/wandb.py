"""Weights & Biases, through its own package. The run's id is the job's uid, so a process that goes on resumes the run.

Steps are a metric, `step`, and every curve is drawn over it: W&B's own counter cannot go back, and after a rollback steps
are made again. Both passes are shown, the later one drawn over the earlier; `lineage` tells them apart. Online or offline as
WANDB_MODE or the option `mode` says; the key comes from WANDB_API_KEY or `wandb login`, never from the spec.
"""

from __future__ import annotations

from gcore.tracking.api import Options, Point, TrackedRun, TrackerKind


class Wandb:
    """Implements `gcore.tracking.api.Tracker`."""

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


KIND = TrackerKind(Wandb, "wandb", "gcore[wandb]", frozenset({"project", "entity", "group", "mode"}))
