"""`python -m gcore.environments FD BEGUN`: a process that runs tools for a controller (`gcore.worker.sandbox.child`).

controller -> process   {"tools": [NAME...], "memory_mb": 1024}                     once
controller -> process   [CALL, [NAME, ARGUMENT]]                                    one call
process -> controller   [CALL, {"said": TEXT}], or instead {"refused": TEXT} or {"what": ..., "trace": ...}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gcore.plugins import RAISED, describe_result, error_sentence, plugin_trace, short_name
from gcore.rollout.environments.api import BadArgument, Tool, find_tool
from gcore.rollout.environments.tools import LONGEST_RESULT
from gcore.worker.sandbox.child import serve_calls


def main() -> None:
    """Load the tools, then run the controller's calls until it closes the connection."""
    serve_calls(load_tools)


def load_tools(setup: dict[str, Any]) -> Callable[[list[str]], dict[str, Any]]:
    """Load the tools of `setup`; returns the function that calls one: [NAME, ARGUMENT] to the answer.

    Raises PluginFault.
    """
    tools = {name: find_tool(name) for name in setup["tools"]}
    return lambda call: call_tool(tools[call[0]], *call)


def call_tool(tool: Tool, name: str, argument: str) -> dict[str, Any]:
    """Call a tool; returns the answer for the controller: its result or its error."""
    try:
        said: object = tool(argument)
    except BadArgument as error:
        return {"refused": str(error)[:LONGEST_RESULT]}
    except RAISED as error:  # foreign code
        return {"what": f"tool {short_name(name)!r} raised {error_sentence(error)}", "trace": plugin_trace(error)}
    if not isinstance(said, str):
        return {"what": f"tool {short_name(name)!r} gave {describe_result(said)}, no text", "trace": ""}
    return {"said": said[:LONGEST_RESULT]}


if __name__ == "__main__":
    main()
