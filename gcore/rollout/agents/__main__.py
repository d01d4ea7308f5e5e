"""`python -m gcore.agents FD BEGUN`: a process that runs agents for a controller (`gcore.worker.sandbox.child`).

    controller -> process   {"agent": NAME, "memory_mb": 2048}                                                           once
    controller -> process   [CALL, {"base_url": ..., "api_key": ..., "fields": {...}, "options": {...}, "seed": ...}]    one response
    process -> controller   [CALL, {"reward": NUMBER or null, ...}] or [CALL, {"what": ..., "trace": ..., ...}]

A result also has `threads`: the number of threads that the agent left running. One agent runs at a time; meanwhile
OPENAI_BASE_URL and OPENAI_API_KEY have its values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from gcore.rollout.agents.api import AgentRollout, call_agent, find_agent
from gcore.system.network import bypass_proxies
from gcore.worker.sandbox.child import serve_calls

ENDING_S = 0.2
"""Seconds to wait for the threads of an agent that has returned."""


def main() -> None:
    """Load the agent, then run it for each response of the controller until the controller closes the connection."""
    serve_calls(load_agent)


def load_agent(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load the agent of `setup`; returns the function that runs it for one response. Raises PluginFault."""
    os.environ.update(bypass_proxies(os.environ, "127.0.0.1"))
    agent = find_agent(setup["agent"])
    ours = frozenset(threading.enumerate())

    def run_agent(asked: dict[str, Any]) -> dict[str, Any]:
        rollout = AgentRollout(**asked)
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = rollout.base_url, rollout.api_key
        said = call_agent(agent, rollout)
        return {**said, "threads": threads_left(ours)}

    return run_agent


def threads_left(ours: frozenset[threading.Thread]) -> int:
    """Number of threads other than `ours`, after a short wait for those that are ending."""
    others = [one for one in threading.enumerate() if one not in ours and not isinstance(one, threading._DummyThread)]
    for one in others:
        one.join(ENDING_S / len(others))
    return sum(one.is_alive() for one in others)


if __name__ == "__main__":
    main()
