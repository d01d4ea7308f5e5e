"""The expected steps after which a job by steps evaluates and writes checkpoints."""

from __future__ import annotations

from gcore.config import JobSpec


def steps_with_checkpoint(spec: JobSpec) -> frozenset[int]:
    """The steps after which a checkpoint is written."""
    return frozenset(step for step in _steps(spec) if spec.checkpoints_after(step, last=step == spec.flow.steps))


def steps_evaluated(spec: JobSpec) -> frozenset[int]:
    """The steps after which the model is evaluated; 0 is before training."""
    return frozenset(step for step in _steps(spec) if spec.evaluates_after(step, last=step == spec.flow.steps))


def _steps(spec: JobSpec) -> range:
    assert spec.flow.steps is not None
    return range(spec.flow.steps + 1)
