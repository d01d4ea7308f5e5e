"""What a daemon deletes of what is not needed any more: a section of its configuration. What that comes to is `controllers.garbage`'s."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from gcore.config.base import Section


class Keep(Section):
    """What stays of one kind. The newest `newest` stay. Of the others those go that are older than `days`, and the oldest for as
    long as all together take more than `total_gib`; where neither is named, all of them. With nothing named at all, everything stays."""

    newest: NonNegativeInt | None = None
    days: PositiveFloat | None = None
    total_gib: PositiveFloat | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing ever goes."""
        return (self.newest, self.days, self.total_gib) == (None, None, None)


class GarbageSection(Section):
    """What of an unfinished job is never touched, whatever stands here."""

    every_s: Annotated[float, Field(ge=60.0)] = 3600.0
    """Between two rounds of a daemon."""
    runs: Keep = Keep()
    """Run folders of jobs that have ended, under `run_root`: checkpoints, samples, logs. Everything stays unless something is named."""
    caches: Keep = Keep()
    """Copies and indices of data, under `home`; they are made again when they are needed. A hub's cache is the hub's."""
    logs: Keep = Keep(days=30.0)
    """Logs of supervisors that have ended, under `home`."""
