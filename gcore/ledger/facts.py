"""What nodes and a job's models are, as far as it matters for what a job begins with: parts of records, told once.

What follows from it (whether a placement fits, how long a step takes) is `placement.mapping`'s.
"""

from __future__ import annotations

from pydantic import Field

from gcore.schema import Part

ConfigValue = bool | int | float | str


class SlotFacts(Part):
    """A slot. `memory_gib`: of its own, as the driver says it; None: it has a part of its host's. `device`: what the driver calls it;
    empty of a CPU, and where that is not known."""

    slot: str
    memory_gib: float | None = None
    device: str = ""


class NodeFacts(Part):
    """A node. `host_memory_gib`: what of its host's memory is the node's."""

    host_memory_gib: float
    slots: tuple[SlotFacts, ...]


class ModelConfigs(Part):
    """What of the models' configurations says how large they are, as they were when the job was created. `critic` None: it has none, or
    starts from the policy's; `judges`: by name, those that the cluster serves."""

    policy: dict[str, ConfigValue]
    critic: dict[str, ConfigValue] | None = None
    judges: dict[str, dict[str, ConfigValue]] = Field(default_factory=dict)
