"""Whether a flow's group can be trained as the spec says: what no rank would take is found where the group is made. Pure.

A flow of one's own may build and score its groups itself. What it lacks then is the prompt's failure, with the reason in its
outcome, and not the train world's.
"""

from __future__ import annotations

import math

from gcore.config.train import TrainSpec
from gcore.reward.registry import LARGEST
from gcore.types import Group


def misfit(group: Group, train: TrainSpec) -> str | None:
    """Why no rank could train the group as it is, or None."""
    if not group.samples:
        return "the flow gave a group without samples"
    if train.loss != "sft":
        if len(group.samples) < 2 and train.compares_group:
            return (
                f"the flow gave a group of one sample, and train.advantage {train.advantage!r} compares the samples of a "
                "group; at least 2 are needed"
            )
        if train.advantage == "remax" and group.baseline is None:
            return "the flow gave a group without a baseline, which train.advantage 'remax' holds its rewards against"
    for what, value in (("baseline", group.baseline), *(("reward", sample.reward) for sample in group.samples)):
        if value is not None and (not math.isfinite(value) or abs(value) > LARGEST):
            return f"the flow gave a {what} of {value}, which is not finite in float32"
    return None
