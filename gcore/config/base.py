"""Common base of the job spec's sections and the daemon configuration: base class, field types, error sentences.

Sections are frozen, reject unknown keys, and do not accept booleans as numbers. `explain_errors` turns pydantic's errors into
sentences that name the key and, for an unknown key, the nearest known key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from gcore.errors import did_you_mean, nearest_name

MOST_SPANNED = 64
SlotsPerEngine = Annotated[int, Field(ge=1, le=MOST_SPANNED)]

SPANS = (
    "Slots of one node that one engine uses (tensor parallel; SGLang and vLLM only). Must divide the model's attention heads and the slots "
    "of each node"
)


@dataclass(frozen=True, slots=True)
class PathMark:
    """Marks a field as a path relative to the spec's folder. With `hub`, the field may also name a model on a hub (`HUB_SCHEMES`)."""

    hub: bool = False


HUB_SCHEMES = ("hf://", "ms://")
"""Prefixes of models on a hub. Other models are folders."""

FilePath = Annotated[str, PathMark()]
ModelPath = Annotated[str, PathMark(hub=True)]

Option = str | int | float | bool
"""A plug-in's setting. The plug-in defines and checks its meaning."""


def is_unset(value: object) -> bool:
    """Return whether an option without a default was left out.

    `exclude_if=is_unset` keeps a newer field out of stored specs that do not set it, because nodes with an older gcore reject
    unknown fields.
    """
    return value is None


def _template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Check the chat-template variables of a spec and convert them to JSON values; dates (YAML parses 2026-01-01 as one) become text.

    Raises ValueError for a variable that gcore sets itself (`RENDERED`) and for a value that JSON cannot hold.
    """
    for name in given:
        if name in RENDERED:
            raise ValueError(
                f"{name} is set by gcore when it renders a prompt, so it cannot be a variable; leave it out"
            )
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
"""Template variables that gcore sets when it renders a prompt. A spec cannot set them."""

TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]
VARIABLES_HELP = "Variables of the chat template, such as enable_thinking: false. strftime_now: 2026-01-01 sets the date that templates print"


class Section(BaseModel):
    """Base class of all sections of the job spec and of the daemon configuration."""

    # Build validators at first use: a daemon without jobs needs none.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        # Pydantic accepts true as 1, and YAML 1.1 reads yes, no, on and off as booleans.
        truths = isinstance(value, bool) or (
            isinstance(value, list | tuple) and any(isinstance(v, bool) for v in value)
        )
        if truths and cls.model_fields[info.field_name or ""].annotation not in (bool, bool | None):
            raise ValueError(
                "a boolean (true, false, yes, no, on, off) is not allowed here; put quotes around it to mean the word, "
                "or write {} for a section with its defaults"
            )
        return value


NAMESPACE = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"

MOST_SLOTS = 1_000_000
"""Upper bound of every slot count."""

Temperature = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Below the minimum, engines sample greedily and return log-probabilities of another distribution; the value is sent as float32."""

StopString = Annotated[str, Field(min_length=1)]
MAX_SHOWN = 100
MAX_SENTENCE = 500
"""Characters after which an error cuts a value that it prints, and its explanation."""

SECRET = ("key_env", "key", "token")
"""Fields whose value errors do not print: users sometimes put the key itself where the variable's name belongs."""

_LOGIN = re.compile(r"//[^/@]*@")
"""Matches an address with a user name or password. Errors do not print these either."""

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
"""Replaces pydantic's messages that use Python's terms."""


def explain_errors(error: ValidationError, model: type[BaseModel], root: str = "the document") -> Iterator[str]:
    """Yield one sentence with its key for each problem in a document of `model`; `root` is the name of the whole document."""
    problems = error.errors()
    for problem in problems:
        loc = problem["loc"]
        option = len(loc) > 2 and str(loc[-3]).endswith("options")  # loc[-1] names one of the four option types
        if option and loc[-1] == "[key]":
            yield f"{'.'.join(map(str, loc[:-1]))}: the name of an option should be text; put it in quotes"
            continue
        if option and loc[-1] != "str":
            continue  # report only the first of the four types
        dotted = ".".join(str(part) for part in (loc[:-1] if option else loc)) or root
        if option:
            yield f"{dotted}: it should be a single value: text, a number, true or false"
        elif problem["type"] == "extra_forbidden":
            near = _nearest(loc, model)
            yield f"unknown key {shorten_text(repr(dotted))}" + (f", did you mean {near!r}?" if near else "")
        elif problem["type"] == "missing":
            yield f"{dotted!r} is missing"
        elif problem["type"] == "too_short":
            if not any(
                other["loc"][: len(loc)] == loc != other["loc"] for other in problems
            ):  # else its items are wrong
                least = problem["ctx"]["min_length"]
                yield f"{dotted}: it should have at least {least} item{'s' * (least > 1)} (got {problem['ctx']['actual_length']})"
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
            if problem["type"] == "tuple_type" and isinstance(given, str) and given:
                message += f"; write [{shorten_text(given)}]"
            secret = {*loc[-1:]} & {*SECRET} or (isinstance(given, str) and _LOGIN.search(given))
            is_shown = isinstance(given, str | int | float | bool) and not secret
            shown = f" (got {shorten_text(repr(given))})" if is_shown else ""
            yield f"{dotted}: {message[:MAX_SENTENCE]}{'…' * (len(message) > MAX_SENTENCE)}{shown}"


def _pattern(pattern: str) -> str:
    """Return what a value should look like that does not match the regular expression `pattern`.

    Only names have patterns in the spec: of objects, labels and environment variables.
    """
    if pattern.startswith("^(env:"):
        return "it should be env:NAME or file:/PATH, not the key itself"
    if pattern.startswith("^[A-Za-z_]"):
        return "it should be the name of an environment variable (letters, digits and '_', not starting with a digit), not the key itself"
    letters = "letters" if "A-Z" in pattern else "lower-case letters"
    what = f"it should be {letters}, digits, '.', '_' and '-'"
    inner = re.search(r"\{0,([0-9]+)\}", pattern)
    if inner is None:
        return what
    return f"{what}, with a letter or digit at both ends, and at most {int(inner[1]) + 2} characters"


def _choice(given: str | float, expected: str) -> str:
    """Return the error for the value `given` that is not among the allowed ones, with the nearest allowed value.

    `expected`: pydantic's list of the allowed values, each in quotes.
    """
    hint = did_you_mean(str(given), re.findall(r"'([^']*)'", expected))
    return f"it should be {expected} (got {shorten_text(repr(given))}){hint}"


def _nearest(loc: tuple[int | str, ...], model: type[BaseModel]) -> str | None:
    """Return the key of `model` whose spelling is nearest to the unknown key `loc`, with the list indices of `loc`; None if none is similar."""
    named = ".".join(part for part in loc if isinstance(part, str))
    near = _near_key(named, list(_known_keys(model)))
    if near is None:
        return None
    parts: list[str] = near.split(".")
    for place, part in enumerate(loc):
        if isinstance(part, int) and place < len(parts):
            parts.insert(place, str(part))
    return ".".join(parts)


def _near_key(named: str, known: Sequence[str]) -> str | None:
    """Return the known key that an unknown key probably means: by its initials (`lr`), its spelling or its beginning among
    the keys of its section, else one of the same name in another section; in an unknown section, the one of the nearest spelling."""
    section, _, last = named.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    if not beside:
        return nearest_name(named, known)
    initials = {
        "".join(word[0] for word in name.split("_") if word): key for name, key in beside.items() if "_" in name
    }
    begun = [key for name, key in beside.items() if name.startswith(last)]
    near = initials.get(last) or beside.get(nearest_name(last, beside) or "") or (begun[0] if len(begun) == 1 else None)
    elsewhere = sorted((key for key in known if key.rpartition(".")[2] == last), key=len)
    return near or next(iter(elsewhere), None)


def shorten_text(text: str) -> str:
    """Return the text on one line, cut after `MAX_SHOWN` characters, with unprintable characters escaped (lone surrogates too)."""
    line = " ".join(text[: 2 * MAX_SHOWN].split())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return shown if len(text) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of `model` and of its sections, such as `train.learning_rate`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _known_keys(kind, f"{prefix}{name}.")
