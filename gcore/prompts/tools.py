"""Tool definitions: what a prompt tells the model it may call.

A source names a JSON file with a list of them. An entry that has a field `tools` of its own, which is not null, has its
own tools in their place, none if the list is empty; there the list may also be written as a JSON string, as saved datasets
do, whose columns cannot hold objects of different forms. Definitions go to the chat template as they are: their form is
between the template and the model (usually that of JSON-schema functions). Calling a tool is no business of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore.errors import DataError

TOOLS_FIELD = "tools"
Tools = tuple[dict[str, Any], ...]
_FIX = 'Write a list of objects such as [{"type": "function", "function": {"name": ..., "parameters": ...}}]'


def read_tools(path: Path) -> Tools:
    """The definitions in a file; at least one. Raises DataError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(
            f"cannot read the tool definitions ({reason})", where=str(path), fix="Name a JSON file in `tools`"
        ) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"the tool definitions are not JSON ({reason})", where=where, fix=_FIX) from error
    problem = _problem(value) or (None if value else "an empty list")
    if problem is not None:
        raise DataError(f"the tool definitions are {problem}", where=str(path), fix=_FIX)
    return tuple(value)


def tools_of_entry(fields: Mapping[str, Any], default: Tools) -> Tools:
    """The tools of one prompt: its entry's own, else `default`. Raises DataError."""
    value = fields.get(TOOLS_FIELD)
    if value is None:
        return default
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"field {TOOLS_FIELD!r} is a string that is not JSON", fix=_FIX) from error
        if value is None:
            return default
    problem = _problem(value)
    if problem is not None:
        raise DataError(f"field {TOOLS_FIELD!r} is {problem}", fix=_FIX)
    return tuple(value)


def _problem(value: Any) -> str | None:
    if not isinstance(value, list):
        return "no list"
    for number, tool in enumerate(value, 1):
        if not isinstance(tool, dict):
            return f"a list whose item {number} is no object"
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"a list whose item {number} has no name"
    return None
