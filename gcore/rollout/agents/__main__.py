"""`python -m gcore.agents FD BEGUN`: a process that runs agents for a controller, over the socket FD.

    controller → process   {"agent": NAME, "memory_mb": 2048}                                        once
    process → controller   {"ready": true} or {"failed": {...}}                                      once
    controller → process   [CALL, {"base_url": ..., "api_key": ..., "fields": {...}, "options": {...}, "seed": ...}]    one response
    process → controller   [CALL, {"reward": NUMBER or null, ...}] or [CALL, {"what": ..., "trace": ..., ...}]

JSON, one value a line; CALL is a number, and an answer has `threads` too: how many the agent left running. One agent at a time, in the main thread; while it runs, OPENAI_BASE_URL and OPENAI_API_KEY are its own. What it
prints goes to the controller's log.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

from gcore.plugins import PluginFault
from gcore.reward.worker import failed_line, guard_answers, limit_memory
from gcore.rollout.agents.api import AgentRollout, call_agent, find_agent
from gcore.worker.sandbox.process import encode_line

ENDING_S = 0.2


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def main() -> None:
    """The process."""
    line = socket.socket(fileno=int(sys.argv[1]))
    guard_answers(line)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with line, line.makefile("rb") as heard:
        setup = json.loads(heard.readline())
        limit_memory(setup["memory_mb"])
        bypass_proxies()
        try:
            agent = find_agent(setup["agent"])
        except PluginFault as fault:
            line.sendall(failed_line(fault))
            return
        line.sendall(encode_line({"ready": True}))
        try:
            ours = frozenset(threading.enumerate())
            for call in heard:
                number, asked = json.loads(call)
                rollout = AgentRollout(**asked)
                os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = rollout.base_url, rollout.api_key
                said = call_agent(agent, rollout)
                line.sendall(encode_line((number, {**said, "threads": threads_left(ours)})))
        except (BrokenPipeError, ConnectionResetError):  # nobody wants to know any more
            pass


def threads_left(ours: frozenset[threading.Thread]) -> int:
    """How many threads there are besides `ours`. Those that are about to end have a moment for it."""
    others = [one for one in threading.enumerate() if one not in ours and not isinstance(one, threading._DummyThread)]
    for one in others:
        one.join(ENDING_S / len(others))
    return sum(one.is_alive() for one in others)


def bypass_proxies() -> None:
    """What a proxy is named for does not go for the policy's address, which no proxy reaches."""
    if any(os.environ.get(name) or os.environ.get(name.lower()) for name in PROXIES):
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
