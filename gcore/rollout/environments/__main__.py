"""`python -m gcore.environments FD BEGUN`: a process that runs tools for a controller, over the socket FD.

    controller → process   {"tools": [NAME...], "memory_mb": 1024}                      once
    process → controller   {"ready": true} or {"failed": {...}}                         once
    controller → process   [CALL, [NAME, ARGUMENT]]                                    one call
    process → controller   [CALL, {"said": TEXT}], or {"refused": TEXT} or {"what": ..., "trace": ...} in its place

JSON, one value a line; CALL is a number. One call at a time, in the main thread. What a tool prints goes to the controller's log.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from gcore.plugins import RAISED, PluginFault, error_sentence, plugin_trace
from gcore.reward.worker import failed_line, guard_answers, limit_memory
from gcore.rollout.environments.api import BadArgument, Tool, find_tool
from gcore.rollout.environments.tools import LONGEST_RESULT
from gcore.worker.sandbox.process import encode_line


def main() -> None:
    """The process."""
    line = socket.socket(fileno=int(sys.argv[1]))
    guard_answers(line)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with line, line.makefile("rb") as heard:
        setup = json.loads(heard.readline())
        limit_memory(setup["memory_mb"])
        try:
            tools = {name: find_tool(name) for name in setup["tools"]}
        except PluginFault as fault:
            line.sendall(failed_line(fault))
            return
        line.sendall(encode_line({"ready": True}))
        try:
            for call in heard:
                number, (name, argument) = json.loads(call)
                line.sendall(encode_line((number, call_tool(tools[name], name, argument))))
        except (BrokenPipeError, ConnectionResetError):  # nobody wants to know any more
            pass


def call_tool(tool: Tool, name: str, argument: str) -> dict[str, Any]:
    """What the tool says, or why it says nothing."""
    try:
        said: object = tool(argument)
    except BadArgument as error:
        return {"refused": str(error)[:LONGEST_RESULT]}
    except RAISED as error:  # the edge to foreign code
        return {"what": f"tool {name!r} raised {error_sentence(error)}", "trace": plugin_trace(error)}
    if not isinstance(said, str):
        return {"what": f"tool {name!r} gave a {type(said).__name__}, no text", "trace": ""}
    return {"said": said[:LONGEST_RESULT]}
