"""Public names for agents that speak the OpenAI API and are trained as they are; the code is in `gcore.rollout.agents`."""

from gcore.rollout.agents.api import AgentFault, AgentRollout

__all__ = ["AgentFault", "AgentRollout"]
