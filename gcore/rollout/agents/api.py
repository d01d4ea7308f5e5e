"""Interface of agents (user programs that call the policy through OpenAI's API), and their errors.

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

from gcore.plugins import RAISED, PluginKind, check_parameters, error_sentence, find_plugin, plugin_trace
from gcore.rollout.environments.api import EnvironmentFault
from gcore.types import LARGEST_REWARD

MODEL = "policy"
"""Model name that the endpoint lists; agents may request any name."""


@dataclass(frozen=True, slots=True)
class AgentRollout:
    """Input of an agent for one response. `base_url` serves only this response, and stops when the agent returns."""

    base_url: str
    """For OpenAI clients: http://127.0.0.1:PORT/r/TOKEN/v1."""
    api_key: str
    """For clients that require one."""
    fields: Mapping[str, Any]
    """The prompt's entry (its row of the data)."""
    options: Mapping[str, Any]
    """The options in the spec, `agent.options`."""
    seed: int
    """Seed of this response; 63 bits. Derive the agent's randomness from it."""


Agent = Callable[[AgentRollout], Awaitable[float | None] | float | None]
"""An agent: the target of an entry point in `gcore.agents`. Returns the reward, or None."""


class AgentFault(EnvironmentFault):
    """An agent raised, timed out, died, or never called the policy. `trace`: the traceback of its own code, or empty."""


class AgentRequestRefused(Exception):
    """The endpoint refuses a request of an agent. `status`, `code`, `what` and `param` are the fields of OpenAI's error:
    HTTP status, error code, message, and the parameter concerned.
    """

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
    check_parameters(AGENTS, name, found, "rollout")
    return found


def call_agent(agent: Agent, rollout: AgentRollout) -> dict[str, Any]:
    """Run the agent; returns `{"reward": ...}`, or `{"what": ..., "trace": ...}` for an error.

    Blocks; an async agent gets its own event loop.
    """
    try:
        made: Any = agent(rollout)
        if inspect.isawaitable(made):
            made = asyncio.run(_awaited(made))
    except (*RAISED, asyncio.CancelledError) as error:  # foreign code
        return {"what": f"raised {error_sentence(error)}", "trace": plugin_trace(error)}
    return parse_result(made)


def parse_result(made: Any) -> dict[str, Any]:
    """Check an agent's return value: `{"reward": ...}` with a number or None, or `{"what": ..., "trace": ""}`."""
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
