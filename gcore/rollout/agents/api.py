"""What an agent is written against, which is mostly OpenAI's API, and what goes wrong with one.

    async def agent(rollout: AgentRollout) -> float | None      (or without async)

It is called once for each response, in a process of its own that it has to itself for as long as it takes. It asks the policy at
`rollout.base_url` with whatever client it likes; OPENAI_BASE_URL and OPENAI_API_KEY say the same to code that reads those. What it
returns is what it says the response is worth, for the reward called `agent`; None where another reward scores.
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
"""What the policy is called at a rollout's address; an agent may call it anything."""


@dataclass(frozen=True, slots=True)
class AgentRollout:
    """One response that is to be made. The address answers nobody else, and nobody any more once the agent has returned."""

    base_url: str
    """As OpenAI's clients want it: http://127.0.0.1:PORT/r/TOKEN/v1."""
    api_key: str
    """For clients that insist on one."""
    fields: Mapping[str, Any]
    """The prompt's entry."""
    options: Mapping[str, Any]
    """`agent.options`."""
    seed: int
    """Of this response; 63 bits. What the agent draws should follow from it."""


Agent = Callable[[AgentRollout], Awaitable[float | None] | float | None]
"""What an entry point in `gcore.rollout.agents` gives."""


class AgentFault(EnvironmentFault):
    """An agent raised, took too long, died, or never asked. `trace`: the traceback of its own code, or empty."""


class AgentRequestRefused(Exception):
    """A request of an agent is not answered, or not so. `code`: what is written into the answer beside the sentence."""

    def __init__(self, status: int, code: str, what: str, *, param: str | None = None) -> None:
        super().__init__(what)
        self.status = status
        self.code = code
        self.what = what
        self.param = param


AGENTS = PluginKind("agent", "gcore.agents", "agent.name")


def find_agent(name: str) -> Agent:
    """The agent of that name among the entry points `gcore.agents`. Raises PluginFault, with the nearest name if there is none."""
    found: Agent = find_plugin(AGENTS, name)
    return found


def call_agent(agent: Agent, rollout: AgentRollout) -> dict[str, Any]:
    """What it returns, as `{"reward": ...}`, or what went wrong. Blocks; an agent that is async has a loop of its own."""
    try:
        made: Any = agent(rollout)
        if inspect.isawaitable(made):
            made = asyncio.run(_awaited(made))
    except (*RAISED, asyncio.CancelledError) as error:  # the edge to foreign code
        return {"what": f"raised {error_sentence(error)}", "trace": plugin_trace(error)}
    return parse_result(made)


def parse_result(made: Any) -> dict[str, Any]:
    """The reward in what an agent returned; None is fine."""
    if made is None:
        return {"reward": None}
    try:
        number = float(made)
    except (TypeError, ValueError, OverflowError):
        return {"what": f"returned {made!r:.100}, no number", "trace": ""}
    if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
        return {"what": f"returned {number}, which is not finite in float32", "trace": ""}
    return {"reward": number}


async def _awaited(made: Any) -> Any:
    return await made
