"""What an agent is sent: chat completions, whole or as a stream of events, and refusals, in OpenAI's forms. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gcore.agents.api import MODEL, Refused

Finish = Literal["stop", "length", "tool_calls"]
JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer of the policy. `name`: of the completion; `model`: as it was asked for; `made_at`: seconds since the epoch."""

    name: str
    model: str
    made_at: int
    message: Mapping[str, Any]
    finish: Finish
    tokens_in: int
    tokens_out: int

    @property
    def usage(self) -> dict[str, int]:
        """In tokens."""
        total = self.tokens_in + self.tokens_out
        return {"prompt_tokens": self.tokens_in, "completion_tokens": self.tokens_out, "total_tokens": total}


def whole(answer: Completion) -> bytes:
    """As one object."""
    choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish}
    head = _head(answer, "chat.completion")
    return json.dumps({**head, "choices": [choice], "usage": answer.usage}).encode("ascii")


def events(answer: Completion, *, usage: bool) -> bytes:
    """As a stream: the whole answer at once, for it is complete when it is recorded."""
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


def refusal(refused: Refused) -> bytes:
    """Why there is no answer."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    error = {"message": refused.what, "type": kind, "param": refused.param, "code": refused.code}
    return json.dumps({"error": error}).encode("ascii")


def models() -> bytes:
    """The one model there is."""
    one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "gcore"}
    return json.dumps({"object": "list", "data": [one]}).encode("ascii")


def _head(answer: Completion, kind: str) -> dict[str, Any]:
    return {"id": answer.name, "object": kind, "created": answer.made_at, "model": answer.model or MODEL}
