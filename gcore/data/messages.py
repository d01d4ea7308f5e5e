"""The content of chat messages: a text or a list of parts, in the form that a chat template reads.

    "2 + 2"                                    a text
    [{"type": "text", "text": "2 + 2"}]        the same as parts, as in OpenAI's API and many datasets
    [{"type": "image"}, ...]                   a picture, in sources with pictures (`gcore.data.pictures`)

Some chat templates support only text, some only parts, some both. A template that supports both gets the content
unchanged, as in transformers. A template that supports only text gets the joined parts; one that supports only parts
gets a text as one part. transformers would pass the content unchanged, and the prompt would contain a Python list, or
nothing. A picture in a template that supports only text becomes the text with which the model's tokenizer writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Messages = Sequence[Mapping[str, Any]]
SYSTEM_ROLES = ("system", "developer")
MARK = "\ue000\ue001\ue000"
"""Placeholder that is rendered in place of a text, to find where a template writes the text. No real text contains it,
and Python's repr of a list escapes it.
"""

_REASONING = ("reasoning_content", "thinking", "reasoning")


def parts_problem(content: Any, *, pictures: bool = False) -> str | None:
    """Return what is wrong with a message's content that is not text; None if it is a valid list of text parts.

    `pictures`: whether it may also have parts of type image, with or without the path of the picture in `image`. The
    result continues a sentence whose subject is the content.
    """
    if not isinstance(content, list):
        return "is neither text nor a list of text parts"
    for number, part in enumerate(content, 1):
        if pictures and is_picture(part):
            if not isinstance(part.get("image"), str | None):
                return f"has a part {number} of type 'image' whose 'image' is not a path"
            continue
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            allowed = "'text' and 'image'" if pictures else "'text'"
            return f"has a part {number} of type {kind!r:.50}; only parts of type {allowed} are supported"
        if not isinstance(part.get("text"), str):
            return f"has a part {number} of type 'text' without a text"
    return None


def is_picture(part: Any) -> bool:
    """Return whether a part of a message's content is a picture."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def join_parts(content: Any, picture_text: str = "") -> Any:
    """Join the texts of a list of parts; return any other content unchanged. `picture_text`: text for each picture;
    empty: only text parts are joined."""
    if isinstance(content, list) and parts_problem(content, pictures=bool(picture_text)) is None:
        return "".join(picture_text if is_picture(part) else part["text"] for part in content)
    return content


def prepare_messages(value: str | Messages, system: str) -> list[dict[str, Any]]:
    """Convert a prompt field to chat messages; a string becomes one user message.

    `system`: text of a system message, inserted unless the messages begin with one; empty: none. Drops keys that are
    null, and stores reasoning under the names that templates read, as transformers does.
    """
    given: Messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    messages = [_with_reasoning(message) for message in given]
    if system and messages[0].get("role") not in SYSTEM_ROLES:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    there = {key: value for key, value in message.items() if value is not None}
    reasoning = next((there[name] for name in _REASONING if name in there), None)
    return there if reasoning is None else {"thinking": reasoning, **there, "reasoning_content": reasoning}


ContentForm = Literal["text", "parts", "as written"]


class ContentForms:
    """Finds which form of message content a template supports, by message role, and converts content to it.

    The form is found once per role by rendering short conversations. Thread-safe: concurrent calls find the same
    result.
    """

    def __init__(self, render: Callable[[list[dict[str, Any]]], str], picture_text: str = "") -> None:
        """`render`: renders messages with the template; returns an empty text if the template rejects them.
        `picture_text`: text for a picture in a template that supports only text; empty: there are no pictures."""
        self._render = render
        self._picture_text = picture_text
        self._known: dict[str, ContentForm] = {}

    def fit(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its content in a form that the template supports."""
        content = message.get("content")
        if not isinstance(content, str | list):
            return message
        form = self._form(str(message.get("role")))
        if form == "text":
            return message | {"content": join_parts(content, self._picture_text)}
        if form == "parts" and isinstance(content, str):
            return message | {"content": _as_parts(content)}
        return message

    def _form(self, role: str) -> ContentForm:
        if role not in self._known:
            self._known[role] = self._find(role)
        return self._known[role]

    def _find(self, role: str) -> ContentForm:
        text, parts = (self._render(self._conversation(role, content)) for content in (MARK, _as_parts(MARK)))
        if MARK in text:
            return "as written" if text == parts else "text"
        return "parts" if MARK in parts else "as written"

    def _conversation(self, role: str, content: Any) -> list[dict[str, Any]]:
        """Return the shortest conversation with a message of this role that templates accept."""
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "user":
            return [message]
        user = self.fit({"role": "user", "content": "?"})
        if role == "assistant":
            return [user, message, user]
        if role == "tool":
            call = {"id": "000000001", "type": "function", "function": {"name": "f", "arguments": {}}}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            return [user, self.fit(calling), message | {"name": "f", "tool_call_id": "000000001"}]
        return [message, user]


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
