"""What the sections of a job spec and a daemon's configuration share: the base class, field types, and error sentences.

A section is frozen, unknown keys are errors, and a boolean is no number. `explain_errors` turns pydantic's errors into
sentences, each with its key and the nearest known key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from gcore.errors import did_you_mean, nearest_name

MOST_SPANNED = 64
SlotsPerEngine = Annotated[int, Field(ge=1, le=MOST_SPANNED)]

SPANS = (
    "Slots of one node that an engine spans (tensor parallel, SGLang only): the model's heads, and each node's slots, are divided "
    "by it"
)


def refuse_torch(engine: str, slots_per_engine: int) -> str | None:
    """Why an engine cannot span so many slots; None: it can."""
    if engine == "torch" and slots_per_engine > 1:
        return f"slots_per_engine is {slots_per_engine}, and the torch engine runs on one slot; set engine: sglang"
    return None


@dataclass(frozen=True, slots=True)
class PathMark:
    """Marks a field of a spec that is a path relative to the spec's folder; `hub`: or a model on a hub (`HUB_SCHEMES`)."""

    hub: bool = False


HUB_SCHEMES = ("hf://", "ms://")
"""Models that are named by hub, not by folder."""

FilePath = Annotated[str, PathMark()]
ModelPath = Annotated[str, PathMark(hub=True)]

Option = str | int | float | bool
"""A setting of a plug-in's own: what it may be is the plug-in's to say."""


def is_unset(value: object) -> bool:
    """Whether an option that has no default was left out.

    `exclude_if=is_unset` keeps a field that came later out of stored specs that do not set it: nodes of an older gcore, which refuse
    fields that they do not know, read these.
    """
    return value is None


def _template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """As JSON. Dates, which YAML makes of 2026-01-01, become text. Raises ValueError."""
    for name in given:
        if name in RENDERED:
            raise ValueError(f"{name} is what a prompt is rendered from, and no variable; leave it out")
    try:
        found: dict[str, Any] = json.loads(json.dumps(given, allow_nan=False, default=date.isoformat))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a variable should be text, a number, true or false, a list or an object ({error})"
        ) from error
    if "strftime_now" in found:
        try:
            datetime.fromisoformat(found["strftime_now"])
        except (TypeError, ValueError):
            raise ValueError(
                f"strftime_now should be a date such as 2026-01-01, not {found['strftime_now']!r:.50}"
            ) from None
    return found


RENDERED = ("messages", "tools", "add_generation_prompt")
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]
VARIABLES_HELP = "Variables of the chat template, by name, such as enable_thinking: false; strftime_now: 2026-01-01 is the date that templates show"


class Section(BaseModel):
    """Base of all sections."""

    # A daemon reads no spec before it has a job: validators are built with their first use.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Pydantic takes true for 1, and YAML 1.1 takes yes, no, on and off for truths.
        truths = isinstance(value, bool) or (
            isinstance(value, list | tuple) and any(isinstance(v, bool) for v in value)
        )
        if truths and cls.model_fields[info.field_name or ""].annotation not in (bool, bool | None):
            raise ValueError("true, false, yes, no, on and off are no value here; quote the word if it is meant")
        return value


NAMESPACE = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"

MOST_SLOTS = 1_000_000
"""No number of slots is higher, of whatever."""

Temperature = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Below, engines take the likeliest token and tell log-probabilities of another distribution; and it travels as float32."""

StopString = Annotated[str, Field(min_length=1)]
MAX_SHOWN = 100
MAX_SENTENCE = 500

SECRET = ("key_env", "key", "token")
"""Fields whose value is not shown: people put a key itself where its variable's name belongs."""

_LOGIN = re.compile(r"//[^/@]*@")
"""An address with a name and a password, which are not shown either."""

_WORDS = {
    "model_type": "it is a section with keys of its own, not a single value",
    "int_parsing": "it should be a whole number",
    "int_type": "it should be a whole number",
    "int_from_float": "it should be a whole number",
    "float_parsing": "it should be a number",
    "float_type": "it should be a number",
    "bool_type": "it should be true or false",
    "bool_parsing": "it should be true or false",
    "string_type": "it should be text; put it in quotes if it looks like something else",
    "tuple_type": "it should be a list",
    "dict_type": "it is a section with keys of its own, not a single value",
}
"""In place of what pydantic says in the words of Python."""


def explain_errors(error: ValidationError, model: type[BaseModel], root: str = "the document") -> Iterator[str]:
    """The problems of a document of `model`, a sentence each, with the key; `root` stands for the key of the whole document."""
    for problem in error.errors():
        loc = problem["loc"]
        option = len(loc) > 2 and str(loc[-3]).endswith("options")  # its last part is one of four types
        if option and loc[-1] == "[key]":
            yield f"{'.'.join(map(str, loc[:-1]))}: the name of an option should be text; put it in quotes"
            continue
        if option and loc[-1] != "str":
            continue  # the first type speaks for all
        dotted = ".".join(str(part) for part in (loc[:-1] if option else loc)) or root
        if option:
            yield f"{dotted}: it should be a single value: text, a number, true or false"
        elif problem["type"] == "extra_forbidden":
            near = _nearest(loc, model)
            yield f"unknown key {shorten_text(repr(dotted))}" + (f", did you mean {near!r}?" if near else "")
        elif problem["type"] == "missing":
            yield f"{dotted!r} is missing"
        elif problem["type"] == "too_long":
            most, given = problem["ctx"]["max_length"], problem["ctx"]["actual_length"]
            yield f"{dotted}: it should have at most {most} items (got {given})"
        elif problem["type"] == "literal_error" and isinstance(problem["input"], str | int | float):
            yield f"{dotted}: {_choice(problem['input'], problem['ctx']['expected'])}"
        else:
            message = _WORDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "string_pattern_mismatch":
                message = _pattern(problem["ctx"]["pattern"])
            given = problem["input"]
            secret = {*loc[-1:]} & {*SECRET} or (isinstance(given, str) and _LOGIN.search(given))
            is_shown = isinstance(given, str | int | float | bool) and not secret
            shown = f" (got {shorten_text(repr(given))})" if is_shown else ""
            yield f"{dotted}: {message[:MAX_SENTENCE]}{'…' * (len(message) > MAX_SENTENCE)}{shown}"


def _pattern(pattern: str) -> str:
    """What a pattern asks for; only names have one: of things, of labels, of environment variables."""
    if pattern.startswith("^(env:"):
        return "it should be env:NAME or file:/PATH, not the key itself"
    if pattern.startswith("^[A-Za-z_]"):
        return "it should be the name of an environment variable, not the key itself: letters, digits and '_', with no digit at its beginning"
    letters = "letters" if "A-Z" in pattern else "lower-case letters"
    what = f"it should be {letters}, digits, '.', '_' and '-'"
    inner = re.search(r"\{0,([0-9]+)\}", pattern)
    if inner is None:
        return what
    return f"{what}, with a letter or digit at both ends, at most {int(inner[1]) + 2}"


def _choice(given: str | float, expected: str) -> str:
    """That `given` is no choice, with the nearest that is one; `expected` lists them, words in quotes."""
    hint = did_you_mean(str(given), re.findall(r"'([^']*)'", expected))
    return f"it should be {expected} (got {shorten_text(repr(given))}){hint}"


def _nearest(loc: tuple[int | str, ...], model: type[BaseModel]) -> str | None:
    """The known key that is nearest to an unknown one, under the same items of the same lists."""
    named = ".".join(part for part in loc if isinstance(part, str))
    near = nearest_name(named, _known_keys(model))
    if near is None:
        return None
    parts: list[str] = near.split(".")
    for place, part in enumerate(loc):
        if isinstance(part, int) and place < len(parts):
            parts.insert(place, str(part))
    return ".".join(parts)


def shorten_text(text: str) -> str:
    """The text on one line, of bounded length, and printable anywhere (half a surrogate pair is not)."""
    line = " ".join(text[: 2 * MAX_SHOWN].split())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return shown if len(text) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _known_keys(kind, f"{prefix}{name}.")
