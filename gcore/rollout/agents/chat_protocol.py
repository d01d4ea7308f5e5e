"""Chat completion requests of agents: parse and validate the body, and encode the response. Pure.

The job's spec defines the sampling. A request for other sampling parameters is refused with 400 and a message that says
what to change, unless the spec ignores them (`agent.ignore`). Parameters that do not change the tokens are always
ignored (`HARMLESS`). Unknown fields are refused, because they would silently have no effect. null counts as absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gcore.data.messages import join_parts, parts_problem
from gcore.rollout.agents.api import MODEL, AgentRequestRefused

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT = ("name", "tool_call_id")
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def parse_message(given: Any, number: int) -> Message:
    """Normalize a message, so that equal content compares equal. Raises AgentRequestRefused.

    Content becomes text, null values are dropped, and arguments of tool calls are parsed. Of an assistant message, only
    content and tool calls are kept. `number`: its index, for error messages.
    """
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise _bad(number, f"is not an object with a role of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": given["role"], "content": _content(given.get("content"), number)}
    for name in _KEPT:
        if given["role"] != "assistant" and given.get(name) is not None:
            if not isinstance(given[name], str):
                raise _bad(number, f"has a {name} that is not text")
            message[name] = given[name]
    if given["role"] == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], number)
    return message


def format_answer(text: str, prefix: str, *, tools: bool) -> dict[str, Any]:
    """Build the assistant's message from the generated `text`. With `tools`, tool calls in it are extracted; invalid ones
    remain text.

    `prefix`: start of the ids of the tool calls.
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
    if (problem := parts_problem(given)) is not None:
        raise _bad(number, f"has a content that {problem}")
    return str(join_parts(given))


def _calls(given: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise _bad(number, "has tool_calls that are not a list")
    calls = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(number, "has a tool call without a function name")
        arguments = function.get("arguments", "")
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            value = arguments
        calls.append(
            {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": value}}
        )
    return calls


def _bad(number: int, what: str) -> AgentRequestRefused:
    return AgentRequestRefused(400, "bad_messages", f"message {number} {what}", param=f"messages[{number}]")


HARMLESS = frozenset(
    (
        *("model", "user", "metadata", "store", "seed", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("stream_options", "parallel_tool_calls"),
    )
)
"""Ignored fields, which do not change the generated tokens (the rollout has its own seed)."""

_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
}
"""Unsupported fields, with the values that are accepted because they change nothing."""

MOST_STOPS, LONGEST_STOP = 16, 256

_BEYOND = 1e6
"""Maximum absolute value of a sampling parameter, because JSON allows integers that no float can represent."""

_HALF = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which generated text never contains."""


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """Sampling parameters that a request may have: the values that equal the job's. Messages name the first value of each.

    `most`: maximum tokens per answer. `ignored`: fields whose values are ignored (`agent.ignore`).
    """

    temperature: tuple[float, ...]
    top_p: tuple[float, ...]
    most: int
    ignored: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed and valid chat completion request."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    most: int | None = None
    """Maximum number of new tokens that the agent requests; None without a limit of its own."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    """Whether the stream ends with token usage."""
    model: str = ""


def parse_request(raw: bytes, rules: SamplingRules) -> ChatRequest:
    """Parse and validate a request body. Raises AgentRequestRefused."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AgentRequestRefused(400, "not_json", f"the body is not JSON ({str(error)[:100]})") from None
    if not isinstance(body, dict):
        raise AgentRequestRefused(400, "not_json", f"the body is a JSON {type(body).__name__}, not an object")
    body = {name: value for name, value in body.items() if value is not None}
    most = _most(body, rules)
    for name in ("temperature", "top_p"):
        _check_sampling(name, body.pop(name, None), getattr(rules, name), rules.ignored)
    for name, plain in _NOTHING.items():
        value = body.pop(name, plain[0])
        if name.removeprefix("top_") not in rules.ignored and value not in plain:
            raise _unsupported(name, f"{name} {value!r:.100} is not supported; remove it")
    stream_options = body.get("stream_options")
    question = ChatRequest(
        messages=_messages(body.pop("messages", None)),
        tools=_tools(body.pop("tools", [])),
        most=most,
        stop=_stops(body.pop("stop", [])),
        stream=body.pop("stream", False) is True,
        usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        model=str(body.get("model", ""))[:200],
    )
    if unknown := sorted(body.keys() - HARMLESS):
        raise _unsupported(unknown[0][:100], f"unknown field {unknown[0]!r:.100}; remove it")
    return question


def _most(body: dict[str, Any], rules: SamplingRules) -> int | None:
    wanted: list[Any] = [body.pop(name) for name in ("max_completion_tokens", "max_tokens") if name in body]
    for value in wanted:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _unsupported("max_tokens", f"max_tokens is {value!r:.100}, which is not a positive integer")
    least: int | None = min(wanted, default=None)
    if least is None or ("max_tokens" in rules.ignored and least > rules.most):
        return None
    if least > rules.most:
        raise _unsupported(
            "max_tokens",
            f"max_tokens is {least}, but the job's rollout.max_new_tokens is {rules.most}; lower or remove max_tokens, raise "
            "rollout.max_new_tokens, or add max_tokens to agent.ignore",
        )
    return least


def _check_sampling(name: str, asked: Any, ours: tuple[float, ...], ignored: frozenset[str]) -> None:
    if asked is None or name in ignored:
        return
    is_number = isinstance(asked, int | float) and not isinstance(asked, bool) and abs(asked) < _BEYOND
    if not is_number or not any(math.isclose(asked, one, abs_tol=1e-6) for one in ours):
        raise _unsupported(
            name,
            f"{name} is {asked!r:.100}, but the job samples with {ours[0]:g}; remove it, or add it to agent.ignore",
        )


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise AgentRequestRefused(400, "bad_messages", "messages is not a list of messages", param="messages")
    messages = tuple(parse_message(message, number) for number, message in enumerate(given))
    if messages[-1]["role"] == "assistant":
        raise AgentRequestRefused(
            400,
            "bad_messages",
            "the last message is the assistant's; continuing an assistant message is not supported",
            param="messages",
        )
    return messages


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list):
        raise _unsupported("tools", "tools is not a list")
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _unsupported("tools", "tools contains an item that is not a function with a name")
    return tuple(given)


def _stops(given: Any) -> tuple[str, ...]:
    stops: Sequence[Any] = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise _unsupported("stop", f"stop is neither a text nor a list of at most {MOST_STOPS} texts")
    if not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in stops):
        raise _unsupported("stop", f"stop contains an item that is not a text of 1 to {LONGEST_STOP} characters")
    if any(_HALF.search(one) for one in stops):
        raise _unsupported("stop", "stop contains a lone surrogate (\\ud800 to \\udfff), which is not a character")
    return tuple(stops)


def _unsupported(param: str, what: str) -> AgentRequestRefused:
    return AgentRequestRefused(400, "unsupported_parameter", what, param=param)


ChatFinishReason = Literal["stop", "length", "tool_calls"]
JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The policy's answer to one request.

    `name`: id of the completion; `model`: as requested; `made_at`: seconds since the epoch.
    """

    name: str
    model: str
    made_at: int
    message: Mapping[str, Any]
    finish: ChatFinishReason
    tokens_in: int
    tokens_out: int

    @property
    def usage(self) -> dict[str, int]:
        """Token counts, as the field `usage` of a response."""
        total = self.tokens_in + self.tokens_out
        return {"prompt_tokens": self.tokens_in, "completion_tokens": self.tokens_out, "total_tokens": total}


def encode_answer(answer: ChatCompletion) -> bytes:
    """Encode an answer as one JSON object, for a request without streaming."""
    choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish}
    head = _head(answer, "chat.completion")
    return json.dumps({**head, "choices": [choice], "usage": answer.usage}).encode("ascii")


def encode_stream(answer: ChatCompletion, *, usage: bool) -> bytes:
    """Encode an answer as a stream of events. All content is in one chunk, because generation has already finished.

    `usage`: whether the stream ends with token counts.
    """
    head = _head(answer, "chat.completion.chunk")
    delta = {name: value for name, value in answer.message.items() if name != "tool_calls"}
    if calls := answer.message.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": answer.finish}]},
    ]
    if usage:
        chunks.append({**head, "choices": [], "usage": answer.usage})
    lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines).encode("ascii")


def encode_refusal(refused: AgentRequestRefused) -> bytes:
    """Encode a refusal as OpenAI's error object."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    error = {"message": refused.what, "type": kind, "param": refused.param, "code": refused.code}
    return json.dumps({"error": error}).encode("ascii")


def encode_models() -> bytes:
    """Encode the list of models, which has one item."""
    one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "gcore"}
    return json.dumps({"object": "list", "data": [one]}).encode("ascii")


def _head(answer: ChatCompletion, kind: str) -> dict[str, Any]:
    return {"id": answer.name, "object": kind, "created": answer.made_at, "model": answer.model or MODEL}
