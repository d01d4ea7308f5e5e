"""The sections `placement` and `scheduling` of a job spec: which slots a job uses, and its priority among other jobs.

`placement.shares` decides which job gets which slots.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from gcore.config.base import MOST_SLOTS, Section

FIXED_POLICIES = ("colocated", "static")
"""Policies whose placement does not change while the job runs."""

PLUGIN_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
HIGHEST_PRIORITY = 1000


class SchedulingSpec(Section):
    """The job's priority and limits when jobs compete for slots."""

    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = Field(
        0,
        description="Jobs with a higher priority get slots first, and preempt lower jobs at their next commit",
    )
    slots_min: PositiveInt = Field(
        1,
        le=MOST_SLOTS,
        description="Fewest slots the job runs on. The job waits until they are available, and until its pools and ranks fit",
    )
    slots_max: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="Maximum number of slots the job uses. Default: all slots that no other job is entitled to",
    )

    @model_validator(mode="after")
    def _check_slots(self) -> SchedulingSpec:
        if self.slots_max is not None and self.slots_max < self.slots_min:
            raise ValueError(
                f"slots_max ({self.slots_max}) is less than slots_min ({self.slots_min}); raise one or lower the other"
            )
        return self


class PlacementSpec(Section):
    """How the job places its pools on slots."""

    policy: Annotated[str, Field(pattern=PLUGIN_NAME)] = Field(
        "colocated",
        description="How slots are shared. colocated: every slot runs rollout, judges and train in turn. static: each pool has its "
        "own slots while the job runs. Any other name: a policy that runs after each step and moves slots",
    )
    train: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="Slots of train ranks, one rank each. Needs policy: static, or a policy that moves slots (then the initial number)",
    )
    reward: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="Slots of judges; each judge runs serving.replicas engines on them, or one on each. Needs policy: static, or a "
        "policy that moves slots (then the initial number)",
    )
    memory: Literal["kept", "in_turns"] | None = Field(
        None,
        description="Memory of slots that engines and a train rank share. kept: everything stays in memory. in_turns: engines release "
        "their memory while the rank trains, and the rank releases its memory while they generate. Default: in_turns on GPUs, kept on CPUs",
    )
    lend: bool | None = Field(
        None,
        description="Reassign slots between rollout and judges within a step: one engine sleeps and another wakes. Default: true with "
        "policy: dynamic, otherwise false",
    )
    dry_run: bool = Field(
        False,
        description="A policy that moves slots only reports what it would do (gcore placement explain) and moves none",
    )

    @property
    def is_live(self) -> bool:
        """Whether slots may move while the job runs."""
        return self.policy not in FIXED_POLICIES

    @property
    def lends(self) -> bool:
        """Whether slots are reassigned between rollout and judges within a step."""
        return self.policy == "dynamic" if self.lend is None else self.lend

    @model_validator(mode="after")
    def _check_pools(self) -> PlacementSpec:
        if self.policy == "static" and self.train is None:
            raise ValueError("policy: static needs train, the number of slots for train ranks; set it")
        if self.policy == "colocated" and (self.train is not None or self.reward is not None):
            raise ValueError(
                "with policy: colocated all pools share all slots; leave train and reward out, or set policy: static"
            )
        if self.is_live and self.reward is not None and self.train is None:
            raise ValueError(
                f"policy: {self.policy} starts from both reward and train, but only reward is set; set both or neither"
            )
        if not self.is_live and self.dry_run:
            raise ValueError(
                f"dry_run needs a policy that moves slots, and policy: {self.policy} moves none; leave dry_run out"
            )
        if not self.is_live and self.lend:
            raise ValueError(
                f"lend needs a policy that moves slots, and policy: {self.policy} moves none; leave lend out, or set policy: dynamic"
            )
        return self
