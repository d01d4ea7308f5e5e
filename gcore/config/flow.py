"""The section `flow` of a job spec: the RL program, its sizes, and how far it goes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from gcore.config.base import Option, Section


class FilterSpec(Section):
    """A filter: which groups are not trained."""

    name: str = Field(description="Filter, by its entry-point name in `gcore.filters`")
    options: dict[str, Option] = Field({}, description="Settings of the filter's own, by name")


MOST_STEPS = 1_000_000
LIMIT_QUOTAS, LEAST_LIMIT = 10, 256
"""`max_prompts_per_step: auto` is so many quotas, and never fewer prompts than that."""

OnLimit = Literal["train_smaller", "pad_masked", "fail"]


class FlowSpec(Section):
    """The RL program, its sizes, and how far it goes: by `steps` or by `epochs`."""

    name: str = Field("grpo", description="Flow, by its entry-point name in `gcore.flows`")
    steps: Annotated[int, Field(gt=0, le=MOST_STEPS)] | None = Field(
        None, description="Steps (sealed batches) until the job has succeeded; either these or `epochs`"
    )
    epochs: Annotated[int, Field(gt=0, le=MOST_STEPS)] | None = Field(
        None, description="Data epochs until the job has succeeded; either these or `steps`"
    )
    count: Literal["prompts", "steps"] = Field(
        "prompts",
        description="What an epoch is: over when each of its prompts is trained, filtered or failed; or as many steps as "
        "it would take if every prompt were trained",
    )
    groups_per_step: PositiveInt = Field(32, description="The step's quota: kept groups in one sealed batch")
    samples_per_prompt: PositiveInt = Field(8, description="Responses in a group")
    issue_cap: Annotated[float, Field(ge=1, le=16)] = Field(
        4.0,
        description="Prompts issued at once for each group that is still wanted, at most; within it, as many as recent "
        "steps took for a kept group. 1: never more than are wanted",
    )
    max_prompts_per_step: PositiveInt | Literal["auto"] | None = Field(
        "auto",
        description=f"Prompts that one step may use up; auto: {LIMIT_QUOTAS} times groups_per_step, at least "
        f"{LEAST_LIMIT}; null: no limit",
    )
    on_limit: OnLimit = Field(
        "train_smaller",
        description="When a step has used up its prompts, or those in the windows, without its quota: train on the groups "
        "there are; the same, with the lacking groups counted in the loss's denominators; or fail the job",
    )
    filters: tuple[FilterSpec, ...] = Field(
        (),
        description="What groups must pass to be trained, in this order; the first that refuses one names the reason",
    )
    max_reissues: PositiveInt = Field(
        8, description="Times a prompt is issued again after a failure before its outcome is failed"
    )

    @model_validator(mode="after")
    def _goes_so_far_and_no_further(self) -> FlowSpec:
        if (self.steps is None) == (self.epochs is None):
            both = "both are given. Take one out, on the command line with --set flow.steps=null or flow.epochs=null"
            given = both if self.steps is not None else "neither is given"
            raise ValueError(f"a job goes by flow.steps or by flow.epochs, exactly one of them; {given}")
        if self.prompt_limit is not None and self.prompt_limit < self.groups_per_step:
            raise ValueError(
                f"max_prompts_per_step ({self.prompt_limit}) is below groups_per_step ({self.groups_per_step}), so no step "
                "could meet its quota"
            )
        return self

    @property
    def prompt_limit(self) -> int | None:
        """Prompts that one step may use up; None: any number."""
        if self.max_prompts_per_step == "auto":
            return max(LIMIT_QUOTAS * self.groups_per_step, LEAST_LIMIT)
        return self.max_prompts_per_step

    def last_step(self, prompts: int) -> int | None:
        """The job's last step with `prompts` prompts in an epoch; None if that depends on what is filtered."""
        if self.epochs is None or self.steps is not None:
            return self.steps
        return self.epochs * -(-prompts // self.groups_per_step) if self.count == "steps" else None
