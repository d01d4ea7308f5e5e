"""What an entry of a dataset must be, and how each mistake is told: one sentence, with file and line.

An entry is a JSON object on one line (`name_line`: how messages name a line, where it is not one of a file that people
know). Its prompt field is a string, or a list of chat messages; fields that hold answers
are there and not null. Stricter than Python's JSON in two places: NaN and Infinity are refused, and so is half a
surrogate pair, which no tokenizer can take. Whether a prompt suits the model is the renderer's business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gcore.errors import DataError

SHOWN_FIELDS = 8
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Made once, because it is asked for every line of a file of millions.
_decode = json.JSONDecoder(parse_constant=_no_constant).raw_decode


class EntryReader:
    """Reads and checks entries of one data file. Stateless; may be used from several threads."""

    def __init__(
        self,
        path: Path,
        prompt_field: str,
        answer_fields: tuple[str, ...] = (),
        name_line: Callable[[int], str] | None = None,
    ) -> None:
        self._path = path
        self._name_line = name_line
        self._prompt_field = prompt_field
        self._answer_fields = answer_fields

    def where(self, line: int) -> str:
        """How messages name a line, counted from 1."""
        return f"{self._path}:{line}" if self._name_line is None else self._name_line(line)

    def blank_lines(self, text: str, first: int, *, cut_off: bool = False) -> list[int]:
        """Check the lines of `text`, of which the first has number `first`; which of them (from 0) are blank.

        `cut_off`: the last of them ends without a newline. Raises DataError for the first mistake.
        """
        blank: list[int] = []
        fits = self._fits
        careful = _SURROGATE.search(text) is not None
        lines = text.split("\n")
        for place, line in enumerate(lines):
            # The quick way for lines without surroundings; whatever is odd is looked at again, slowly.
            try:
                entry, end = _decode(line)
                if end == len(line) and not careful and fits(entry):
                    continue
            except (ValueError, RecursionError):
                pass
            if not line.strip():
                blank.append(place)
            else:
                self.parse(line, self.where(first + place), cut_off=cut_off and place == len(lines) - 1)
        return blank

    def parse(self, line: str, where: str, *, cut_off: bool = False) -> dict[str, Any]:
        """The entry on a line, which stands at `where`. `cut_off`: it ends without a newline. Raises DataError."""
        try:
            entry = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            if cut_off:
                raise DataError(
                    "the last line is cut off: it has no newline and is not valid JSON",
                    where=where,
                    fix="Copy or write the file again; it was not written to its end",
                ) from error
            problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(
                f"not valid JSON ({problem})",
                where=where,
                fix="Write one JSON object a line, without line breaks in it",
            ) from error
        if not isinstance(entry, dict):
            raise DataError(
                f"the line holds {_kind(entry)}, not a JSON object",
                where=where,
                fix=f'Write {{"{self._prompt_field}": ...}}, one object a line',
            )
        self._check_prompt(entry, where)
        self._check_answers(entry, where)
        if _SURROGATE.search(line):
            self._check_text(entry, where)
        return entry

    def _fits(self, entry: Any) -> bool:
        if type(entry) is not dict:
            return False
        prompt = entry.get(self._prompt_field)
        if not prompt or (type(prompt) is not str and _message_problem(prompt) is not None):
            return False
        return all(entry.get(field) is not None for field in self._answer_fields)

    def _check_prompt(self, entry: dict[str, Any], where: str) -> None:
        field = self._prompt_field
        if field not in entry:
            raise DataError(
                f"the entry has no field {field!r}, only {_names(entry)}",
                where=where,
                fix="Name the field with the prompt in data.prompt, or in `prompt` of the source",
            )
        prompt = entry[field]
        if prompt == "":
            raise DataError(f"field {field!r} is empty", where=where, fix="Remove the entry, or write a prompt")
        problem = None if isinstance(prompt, str) else _message_problem(prompt)
        if problem is not None:
            raise DataError(
                f"field {field!r} is {problem}",
                where=where,
                fix='A prompt is a string, or a list of {"role": ..., "content": ...}',
            )

    def _check_answers(self, entry: dict[str, Any], where: str) -> None:
        for field in self._answer_fields:
            if entry.get(field) is None:
                missing = f"the entry has no field {field!r}, only {_names(entry)}"
                raise DataError(
                    f"field {field!r} is null" if field in entry else missing,
                    where=where,
                    fix="Name the field with the expected answer in reward.answer, or in that of the source's reward",
                )

    def _check_text(self, entry: dict[str, Any], where: str) -> None:
        try:
            json.dumps(entry, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                "the entry has half a surrogate pair (\\ud800 to \\udfff alone), which is no character",
                where=where,
                fix="Remove it, or write the character itself",
            ) from error


def _message_problem(prompt: Any) -> str | None:
    """What is wrong with a list of chat messages; None if nothing is."""
    if not isinstance(prompt, list):
        return _kind(prompt)
    if not prompt:
        return "an empty list"
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, dict):
            return f"a list whose item {number} is {_kind(message)}, not a chat message"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str) and not (key == "content" and _calls_tools(message)):
                return f"a list whose message {number} has no text in {key!r}"
    return None


def _calls_tools(message: dict[str, Any]) -> bool:
    """Whether it is a turn of the assistant that calls tools, and may say nothing beside."""
    calls = message.get("tool_calls")
    return message.get("content") is None and isinstance(calls, list) and bool(calls)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _names(entry: dict[str, Any]) -> str:
    names = [repr(name) for name in list(entry)[:SHOWN_FIELDS]]
    more = len(entry) - len(names)
    return (", ".join(names) + (f" and {more} more" if more > 0 else "")) if names else "an empty object"
