"""Interface of agents, which is mostly OpenAI's API, and their errors.

    async def agent(rollout: AgentRollout) -> float | None      (or without async)

It is called once per response, in a process that runs nothing else meanwhile. It calls the policy at `rollout.base_url`
with any client; OPENAI_BASE_URL and OPENAI_API_KEY have the same values. It returns the reward of the response, for the
reward called `agent`, or None if another reward scores the response.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gcore.plugins import RAISED, PluginKind, error_sentence, find_plugin, plugin_trace
from gcore.rollout.environments.api import EnvironmentFault
from gcore.types import LARGEST_REWARD

MODEL = "policy"
"""Name of the policy at a rollout's address; agents may use any name."""


@dataclass(frozen=True, slots=True)
class AgentRollout:
    """One response to generate. The address serves only this response, and ends when the agent returns."""

    base_url: str
    """For OpenAI clients: http://127.0.0.1:PORT/r/TOKEN/v1."""
    api_key: str
    """For clients that require one."""
    fields: Mapping[str, Any]
    """The prompt's entry."""
    options: Mapping[str, Any]
    """`agent.options`."""
    seed: int
    """Seed of this response; 63 bits. Derive the agent's randomness from it."""


Agent = Callable[[AgentRollout], Awaitable[float | None] | float | None]
"""An entry point in `gcore.agents`."""


class AgentFault(EnvironmentFault):
    """An agent raised, timed out, died, or never called the policy. `trace`: the traceback of its own code, or empty."""


class AgentRequestRefused(Exception):
    """A request of an agent is refused. `code`: the error code in the response."""

    def __init__(self, status: int, code: str, what: str, *, param: str | None = None) -> None:
        super().__init__(what)
        self.status = status
        self.code = code
        self.what = what
        self.param = param


AGENTS = PluginKind("agent", "gcore.agents", "agent.name")


def find_agent(name: str) -> Agent:
    """Find an agent among the entry points `gcore.agents`. Raises PluginFault, with the nearest name if there is none."""
    found: Agent = find_plugin(AGENTS, name)
    return found


def call_agent(agent: Agent, rollout: AgentRollout) -> dict[str, Any]:
    """Run the agent; returns `{"reward": ...}` or the error. Blocks; an async agent gets its own event loop."""
    try:
        made: Any = agent(rollout)
        if inspect.isawaitable(made):
            made = asyncio.run(_awaited(made))
    except (*RAISED, asyncio.CancelledError) as error:  # foreign code
        return {"what": f"raised {error_sentence(error)}", "trace": plugin_trace(error)}
    return parse_result(made)


def parse_result(made: Any) -> dict[str, Any]:
    """The reward in an agent's return value; None is valid."""
    if made is None:
        return {"reward": None}
    try:
        number = float(made)
    except (TypeError, ValueError, OverflowError):
        return {"what": f"returned {made!r:.100}, which is not a number", "trace": ""}
    if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
        return {"what": f"returned {number}, which is not finite in float32", "trace": ""}
    return {"reward": number}


async def _awaited(made: Any) -> Any:
    return await made
