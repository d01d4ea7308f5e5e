"""`python -m gcore.agents FD BEGUN`: a process that runs agents for a controller, over the socket FD.

    controller → process   {"agent": NAME, "memory_mb": 2048}                                        once
    process → controller   {"ready": true} or {"failed": {...}}                                      once
    controller → process   {"base_url": ..., "api_key": ..., "fields": {...}, "options": {...}, "seed": ...}    one response
    process → controller   {"reward": NUMBER or null} or {"what": ..., "trace": ...}

JSON, one value a line. One agent at a time, in the main thread; while it runs, OPENAI_BASE_URL and OPENAI_API_KEY are its own. What it
prints goes to the controller's log.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from gcore.agents.api import AgentRollout
from gcore.agents.registry import called, find_agent
from gcore.plugins import PluginFault
from gcore.reward.__main__ import keep_from_children, limit_memory
from gcore.reward.lines import failed_line, line_of

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def main() -> None:
    """The process."""
    line = socket.socket(fileno=int(sys.argv[1]))
    keep_from_children(line)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with line, line.makefile("rb") as heard:
        setup = json.loads(heard.readline())
        limit_memory(setup["memory_mb"])
        keep_from_proxies()
        try:
            agent = find_agent(setup["agent"])
        except PluginFault as fault:
            line.sendall(failed_line(fault))
            return
        line.sendall(line_of({"ready": True}))
        try:
            for call in heard:
                rollout = AgentRollout(**json.loads(call))
                os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = rollout.base_url, rollout.api_key
                line.sendall(line_of(called(agent, rollout)))
        except (BrokenPipeError, ConnectionResetError):  # nobody wants to know any more
            pass


def keep_from_proxies() -> None:
    """What a proxy is named for does not go for the policy's address, which no proxy reaches."""
    if any(os.environ.get(name) or os.environ.get(name.lower()) for name in PROXIES):
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))


if __name__ == "__main__":
    main()
