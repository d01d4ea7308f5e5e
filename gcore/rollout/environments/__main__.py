"""`python -m gcore.environments FD BEGUN`: a process that runs tools for a controller (`gcore.worker.sandbox.child`).

controller -> process   {"tools": [NAME...], "memory_mb": 1024, "folder": PATH}     once
controller -> process   [CALL, [NAME, ARGUMENT, [PATH...]]]                         one call
process -> controller   [CALL, {"said": TEXT, "pictures": [...]}], or instead {"refused": TEXT}, {"broken": TEXT} or
                        {"what": ..., "trace": ...}

Pictures do not pass through the controller: the process writes each into a file of the folder, and names the file with its
SHA-256, height, width and bytes. "broken" says why a picture cannot be used.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gcore.errors import DataError
from gcore.media.pictures import inspect_picture, open_picture
from gcore.plugins import RAISED, describe_result, error_sentence, plugin_trace, short_name
from gcore.rollout.environments.api import SEEN_PICTURES, BadArgument, Tool, ToolResult, find_tool, sees_pictures
from gcore.rollout.environments.tools import LONGEST_RESULT
from gcore.worker.sandbox.child import serve_calls


def main() -> None:
    """Load the tools, then run the controller's calls until it closes the connection."""
    serve_calls(load_tools)


def load_tools(setup: dict[str, Any]) -> Callable[[list[Any]], dict[str, Any]]:
    """Load the tools of `setup`; returns the function that calls one: [NAME, ARGUMENT, [PATH...]] to the answer.

    Raises PluginFault.
    """
    tools = {name: find_tool(name) for name in setup["tools"]}
    folder = Path(setup["folder"]) if setup["folder"] else None

    def answer(call: list[Any]) -> dict[str, Any]:
        name, argument, seen = call
        return call_tool(tools[name], name, argument, seen, folder)

    return answer


def call_tool(tool: Tool, name: str, argument: str, seen: Sequence[str], folder: Path | None) -> dict[str, Any]:
    """Call a tool; returns the answer for the controller: its result or its error.

    `seen`: paths of the response's pictures. `folder`: where its own pictures are written; None: it may return none.
    """
    try:
        said: object = tool(argument, **{SEEN_PICTURES: tuple(seen)} if sees_pictures(tool) else {})
        whole = said if isinstance(said, ToolResult) else ToolResult(said) if isinstance(said, str) else None
        if whole is None or not isinstance(whole.text, str):
            what = describe_result(said if whole is None else whole.text)
            return {"what": f"tool {short_name(name)!r} gave {what}, no text", "trace": ""}
        given = [one if isinstance(one, bytes) else Path(one) for one in whole.pictures]
    except BadArgument as error:
        return {"refused": str(error)[:LONGEST_RESULT]}
    except RAISED as error:  # foreign code
        return {"what": f"tool {short_name(name)!r} raised {error_sentence(error)}", "trace": plugin_trace(error)}
    pictures: list[dict[str, Any]] = []
    if given and folder is None:
        return {"broken": f"tool {short_name(name)!r} returned a picture, but environment.tools.max_pictures is 0"}
    if folder is not None:
        try:
            pictures = [write_picture(one, folder) for one in given]
        except (DataError, OSError) as error:
            said = error.what if isinstance(error, DataError) else error  # its fix is for pictures of the data
            why = f"tool {short_name(name)!r} returned a picture that cannot be used: {said}"
            return {"broken": why[:LONGEST_RESULT]}
    return {"said": whole.text[:LONGEST_RESULT], "pictures": pictures}


_numbers = itertools.count()


def write_picture(source: bytes | Path, folder: Path) -> dict[str, Any]:
    """Write a picture of a tool, a file's bytes or its path, into `folder`; return its name there and what it is.

    Raises DataError for what is not a picture, and OSError.
    """
    with open_picture(source) as (file, _):
        data = file.read()
    facts = inspect_picture(data)
    name = f"{os.getpid()}-{next(_numbers)}"
    (folder / name).write_bytes(data)
    size = {"height": facts.height, "width": facts.width, "size": len(data)}
    return {"name": name, "sha256": hashlib.sha256(data).hexdigest(), **size}


if __name__ == "__main__":
    main()
