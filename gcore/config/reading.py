"""What of a run is kept for people to read: samples, and where its numbers go besides the run's own folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from gcore.config.base import Option, Section


class TrackerSpec(Section):
    """A tracker that shows the run's curves. Its package is installed where controllers run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")] = Field(
        description="tensorboard, wandb, mlflow, swanlab, or one of your own (an entry point of gcore.trackers)"
    )
    options: dict[str, Option] = Field(
        {}, description="Settings of the tracker's own, by name; never a key or password"
    )


class SamplesSpec(Section):
    """Which prompts and responses are kept in the run's folder for `gcore samples`."""

    every: PositiveInt = Field(1, description="Steps between steps whose samples are kept; the first always are")
    groups: Annotated[int, Field(ge=0)] = Field(
        64, description="Groups kept of a step, of each controller; spread evenly over the step. 0: none are kept"
    )
    keep: PositiveInt = Field(50, description="Newest steps whose samples are kept")
    characters: PositiveInt = Field(20_000, description="Of a prompt or a response; a longer one is cut, and says so")

    def due(self, step: int) -> bool:
        """Whether the samples of `step` are kept."""
        return self.groups > 0 and (step == 1 or step % self.every == 0)
