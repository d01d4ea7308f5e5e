"""Public names for agents; the code is in `gcore.rollout.agents`."""

from gcore.rollout.agents.api import AgentFault, AgentRollout

__all__ = ["AgentFault", "AgentRollout"]
