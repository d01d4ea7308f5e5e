"""Messages, as agents send them and as they are compared, and answers, as agents are sent them. Pure.

A message is brought into one form, in which two are the same if they say the same: content a text, what is null left out, the
arguments of a call as the values that they are. Of a message of the assistant its content and its calls count, nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gcore.agents.api import Refused

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT = ("name", "tool_call_id")
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def message_of(given: Any, number: int) -> Message:
    """One message in its form. `number`: its place, for what is said of it. Raises Refused."""
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise _bad(number, f"is no object with a role of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": given["role"], "content": _content(given.get("content"), number)}
    for name in _KEPT:
        if given["role"] != "assistant" and given.get(name) is not None:
            if not isinstance(given[name], str):
                raise _bad(number, f"has a {name} that is no text")
            message[name] = given[name]
    if given["role"] == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], number)
    return message


def answer_of(text: str, prefix: str, *, tools: bool) -> dict[str, Any]:
    """The assistant's message that says `text`. With `tools`, the calls in it are told apart; those that are no JSON stay text.

    `prefix`: of what the calls are named.
    """
    calls: list[dict[str, Any]] = []
    for found in _CALL.finditer(text) if tools else ():
        call = _call_of(found.group(1))
        if call is not None:
            calls.append({"id": f"{prefix}-{len(calls)}", "type": "function", "function": call})
    if not calls:
        return {"role": "assistant", "content": text, "refusal": None}
    content = text[: text.index("<tool_call>")]
    return {"role": "assistant", "content": content if content.strip() else None, "refusal": None, "tool_calls": calls}


def _call_of(inner: str) -> dict[str, str] | None:
    try:
        tree = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return None
    arguments = tree.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": tree["name"], "arguments": written}


def _content(given: Any, number: int) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _bad(number, "has a content that is no text")
    for part in given:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _bad(number, "has a part that is no text, and the policy reads nothing else")
    return "".join(part["text"] for part in given)


def _calls(given: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise _bad(number, "has tool_calls that are no list")
    calls = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(number, "has a tool call without a function's name")
        arguments = function.get("arguments", "")
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            value = arguments
        calls.append(
            {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": value}}
        )
    return calls


def _bad(number: int, what: str) -> Refused:
    return Refused(400, "bad_messages", f"message {number} {what}", param=f"messages[{number}]")
