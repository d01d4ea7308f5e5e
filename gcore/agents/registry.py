"""Agents by name: plug-ins under the entry points `gcore.agents`, and one call of one, looked at as foreign code is."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

from gcore.agents.api import Agent, AgentRollout
from gcore.config.reward import LARGEST
from gcore.plugins import RAISED, PluginKind, find_plugin, sentence_of, trace_of

AGENTS = PluginKind("agent", "gcore.agents", "agent.name")


def find_agent(name: str) -> Agent:
    """The agent of that entry-point name. Raises PluginFault, with the nearest name if there is none."""
    found: Agent = find_plugin(AGENTS, name)
    return found


def called(agent: Agent, rollout: AgentRollout) -> dict[str, Any]:
    """What it returns, as `{"reward": ...}`, or what went wrong. Blocks; an agent that is async has a loop of its own."""
    try:
        made: Any = agent(rollout)
        if inspect.isawaitable(made):
            made = asyncio.run(_awaited(made))
    except (*RAISED, asyncio.CancelledError) as error:  # the edge to foreign code
        return {"what": f"raised {sentence_of(error)}", "trace": trace_of(error)}
    return result_of(made)


def result_of(made: Any) -> dict[str, Any]:
    """The reward in what an agent returned; None is fine."""
    if made is None:
        return {"reward": None}
    try:
        number = float(made)
    except (TypeError, ValueError, OverflowError):
        return {"what": f"returned {made!r:.100}, no number", "trace": ""}
    if not math.isfinite(number) or abs(number) > LARGEST:
        return {"what": f"returned {number}, which is not finite in float32", "trace": ""}
    return {"reward": number}


async def _awaited(made: Any) -> Any:
    return await made
