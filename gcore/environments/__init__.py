"""Public names for environments and tools; the code is in `gcore.rollout.environments`."""

from gcore.rollout.environments.api import (
    BadArgument,
    Done,
    Environment,
    EnvironmentFault,
    Observation,
    Setting,
    Tools,
    Turn,
)

__all__ = ["BadArgument", "Done", "Environment", "EnvironmentFault", "Observation", "Setting", "Tools", "Turn"]
