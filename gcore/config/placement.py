"""The sections `placement` and `scheduling` of a job spec: which slots a job uses, and its place among other jobs.

`placement.shares` decides which job gets which slots.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from gcore.config.base import MOST_SLOTS, Section

FIXED_POLICIES = ("colocated", "static")
"""What stays as it is for as long as the job runs."""

PLUGIN_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
HIGHEST_PRIORITY = 1000


class SchedulingSpec(Section):
    """The job's place among those that want the same slots."""

    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = Field(
        0,
        description="A job of a higher priority gets its slots first, and takes them from those below it at their next commit",
    )
    slots_min: PositiveInt = Field(
        1,
        le=MOST_SLOTS,
        description="Fewer slots it does not run on: until so many are there for it, it waits; what its pools and ranks need counts too",
    )
    slots_max: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="More it does not take; default: all that nobody else has a better claim to",
    )

    @model_validator(mode="after")
    def _most_is_enough(self) -> SchedulingSpec:
        if self.slots_max is not None and self.slots_max < self.slots_min:
            raise ValueError(
                f"slots_max ({self.slots_max}) is less than slots_min ({self.slots_min}); raise one or lower the other"
            )
        return self


class PlacementSpec(Section):
    """The slots that the job uses."""

    policy: Annotated[str, Field(pattern=PLUGIN_NAME)] = Field(
        "colocated",
        description="How slots are shared. colocated: every slot runs rollout, judges and train in turn; static: each pool has slots "
        "of its own, for as long as the job runs; any other: a policy that is asked after each step and moves slots",
    )
    train: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="With static: slots of train ranks, one rank each. With a policy that moves slots: as many to begin with",
    )
    reward: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="With static: slots of judges; each judge has an engine on serving.replicas of them, or on all. With a policy that "
        "moves slots: as many to begin with",
    )
    memory: Literal["kept", "in_turns"] | None = Field(
        None,
        description="Of a slot that engines and a train rank share: kept: all stays in memory; in_turns: engines give theirs back "
        "while the rank trains, and the rank its own while they work. Default: in_turns on GPUs, kept on CPUs",
    )
    lend: bool | None = Field(
        None,
        description="Slots are lent between rollout and judges within a step, by putting one engine to sleep and waking another; "
        "default: with policy: dynamic",
    )
    dry_run: bool = Field(
        False,
        description="A policy that moves slots moves none, and only says what it would do (gcore placement explain)",
    )

    @property
    def is_live(self) -> bool:
        """Whether slots move while the job runs."""
        return self.policy not in FIXED_POLICIES

    @property
    def lends(self) -> bool:
        """Whether slots are lent within a step."""
        return self.policy == "dynamic" if self.lend is None else self.lend

    @model_validator(mode="after")
    def _pools_are_statics(self) -> PlacementSpec:
        if self.policy == "static" and self.train is None:
            raise ValueError("policy: static needs train, the number of slots that train")
        if self.policy == "colocated" and (self.train is not None or self.reward is not None):
            raise ValueError(
                "with policy: colocated all pools share all slots; train and reward belong to policy: static"
            )
        if self.is_live and self.reward is not None and self.train is None:
            raise ValueError(
                f"reward says what policy: {self.policy} begins with, and so must train; give both or none"
            )
        if not self.is_live and self.dry_run:
            raise ValueError(
                f"policy: {self.policy} moves nothing, so there is nothing that dry_run could only say; leave it out"
            )
        if not self.is_live and self.lend:
            raise ValueError(
                f"policy: {self.policy} moves nothing, so no slot is lent; leave lend out, or set policy: dynamic"
            )
        return self
