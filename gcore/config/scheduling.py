"""What a job says of itself where several share a cluster. Who gets which slots is `placement.shares`' business."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from gcore.config.base import Section
from gcore.store.keys import DEFAULT_NAMESPACE

NAMESPACE = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
HIGHEST_PRIORITY = 1000
MOST_SLOTS = 1_000_000
"""No number of slots is higher, of whatever."""
__all__ = ["DEFAULT_NAMESPACE", "HIGHEST_PRIORITY", "MOST_SLOTS", "NAMESPACE", "SchedulingSpec"]


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
