"""The section `flow` of a job spec: the RL program and its sizes."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from gcore.config.base import Section


class FlowSpec(Section):
    """The RL program and its sizes."""

    name: str = Field("grpo", description="Flow, by its entry-point name in `gcore.flows`")
    steps: PositiveInt = Field(le=1_000_000, description="Steps (sealed batches) until the job has succeeded")
    groups_per_step: PositiveInt = Field(32, description="The step's quota: kept groups in one sealed batch")
    samples_per_prompt: PositiveInt = Field(8, description="Responses in a group")
    max_reissues: PositiveInt = Field(
        8, description="Times a prompt is issued again after a failure before its outcome is failed"
    )
