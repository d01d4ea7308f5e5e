"""OpenAI's chat completions, as a judge is asked through them: the request, and what its answer says. Pure.

Of the many fields only those are sent that every server knows. A server that gives no answer but an error says so in its status:
which of them another try may help against is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from gcore.config.judges import ExternalJudge, JudgeSpec
from gcore.reward.generative.asking import Answer

SEED_BITS = 31
"""Of the seeds that are sent: servers take no larger ones for certain."""
MOST_TOKENS = 1 << 32
"""Of one request that are believed: a server that says more does not say how many there are."""
MOST_WORDS = 300
"""Characters of what a server says of a failure."""

Fate = Literal["answered", "refused", "key", "away"]
"""Of a request: there is an answer; it will not be taken however often it is sent; the key is not; it may be taken later."""


class Garbled(Exception):
    """What came is no chat completion."""


@dataclass(frozen=True, slots=True)
class Completion:
    """`counted`: whether the server said how many tokens there are."""

    answer: Answer
    counted: bool


def request_of(judge: JudgeSpec, external: ExternalJudge, question: str, seed: int) -> dict[str, Any]:
    """What is sent for one answer."""
    messages = [{"role": "system", "content": judge.system}] if judge.system is not None else []
    body: dict[str, Any] = {
        "model": external.model,
        "messages": [*messages, {"role": "user", "content": _sendable(question)}],
        "temperature": judge.temperature,
        "top_p": judge.top_p,
        "max_tokens": judge.max_new_tokens,
        "seed": seed & ((1 << SEED_BITS) - 1),
        "stream": False,
    }
    return body | ({"stop": list(judge.stop)} if judge.stop else {})


def _sendable(question: str) -> str:
    """`question` with half surrogate pairs, which a template may write and no server can be sent, spelt out."""
    return question.encode(errors="backslashreplace").decode()


def fate_of(status: int) -> Fate:
    """What a status says. 401: the key is wrong; 402: its account is empty. 403 may be about one question alone."""
    if 200 <= status < 300:
        return "answered"
    if status in (401, 402):
        return "key"
    return "away" if status >= 500 or status in (403, 408, 409, 425, 429) else "refused"


def completion_of(tree: Any) -> Completion:
    """Raises Garbled."""
    try:
        choice = tree["choices"][0]
        content = choice["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Garbled("it has no choices[0].message") from error
    if not isinstance(content, str | None):
        raise Garbled("its content is no text")
    usage = tree.get("usage")
    tokens_in, tokens_out = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    answer = Answer(
        text=content or "",
        tokens_in=tokens_in or 0,
        tokens_out=tokens_out or 0,
        truncated=choice.get("finish_reason") == "length",
    )
    return Completion(answer, tokens_in is not None and tokens_out is not None)


def words_of(tree: Any, text: str) -> str:
    """What a server says of a failure, in whichever shape: `tree` is its body as JSON, if it is that, `text` as it came."""
    said = tree.get("error", tree.get("message", tree.get("detail"))) if isinstance(tree, Mapping) else None
    said = said.get("message", said) if isinstance(said, Mapping) else said
    return " ".join((text if said is None else str(said)).split())[:MOST_WORDS]


def retry_after_s(value: str | None, wall: float) -> float | None:
    """Seconds that the header `Retry-After` asks for, which says seconds or a date; None if it says nothing that can be read."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - wall
        except (ValueError, OverflowError):
            return None
    return seconds if 0 <= seconds < float("inf") else 0.0 if seconds < 0 else None


def _count(usage: Any, name: str) -> int | None:
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MOST_TOKENS else None
