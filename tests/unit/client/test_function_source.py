"""A function is serialized with the imports, constants and definitions that it uses; unsupported ones are refused."""

from __future__ import annotations

import math
import os.path
import re
from collections import Counter
from collections import OrderedDict as Ordered
from collections.abc import Callable
from typing import Any

import pytest

from gcore.client.function_source import function_source
from gcore.errors import UsageError
from gcore.reward import batch_reward

LIMIT = 3
TABLE = {"a": (1, 2.5), "b": [None, True]}
DIGITS = re.compile(r"\d+", re.IGNORECASE)
LIVE = object()
LATER: Any = None


def helper(text: str) -> int:
    return len(text) + LIMIT


class Scale:
    factor = LIMIT

    def __call__(self, value: float) -> float:
        return value * self.factor


def plain(response: str) -> float:
    return float(len(response))


def with_constants(response: str) -> float:
    return LIMIT + TABLE["a"][1] + len(DIGITS.findall(response))  # type: ignore[operator, index]


def with_modules(response: str) -> float:
    return math.sqrt(len(os.path.basename(response))) + Counter(response)["a"] + len(Ordered())


def with_helpers(response: str) -> float:
    return Scale()(helper(response))


def recursive(response: str) -> float:
    return 0.0 if not response else 1.0 + recursive(response[1:])


def with_default(response: str, weight: float = 2.0) -> float:
    scores = [weight * ord(letter) for letter in response]
    return sum(scores)


def load(spec: Any) -> int:
    return LIMIT


@batch_reward
def decorated(response: str) -> float:
    return float(len(response))


def marked(response: str) -> float:
    return float(len(response))


marked.start = load  # type: ignore[attr-defined]
marked.batch = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [decorated, marked])
def test_decorators_and_attributes_of_a_function_are_written_too(function: Any) -> None:
    names: dict[str, Any] = {"__name__": "written"}
    exec(compile(function_source(function), "written.py", "exec", dont_inherit=True), names)
    assert names[function.__name__].batch is True
    if function is marked:
        assert names["marked"].start(None) == LIMIT


def with_live_attribute(response: str) -> float:
    return 0.0


with_live_attribute.start = LIVE  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [plain, with_constants, with_modules, with_helpers, recursive, with_default])
@pytest.mark.parametrize("response", ["", "a/ab12"])
def test_the_written_function_gives_what_the_function_gives(function: Callable[..., float], response: str) -> None:
    names: dict[str, Any] = {"__name__": "written"}
    exec(compile(function_source(function), "written.py", "exec", dont_inherit=True), names)
    assert names[function.__name__](response) == function(response)


def test_only_what_is_needed_is_written() -> None:
    text = function_source(plain)
    assert "LIMIT" not in text
    assert "import math" not in text


def enclosing() -> Callable[[str], float]:
    weight = 2.0

    def inner(response: str) -> float:
        return weight * len(response)

    return inner


def uses_live(response: str) -> float:
    return float(LIVE is None)


def uses_nothing_known(response: str) -> float:
    return no_such_name(response)  # type: ignore[name-defined, no-any-return]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "said"),
    [
        pytest.param(lambda response: 1.0, "a lambda has no source", id="a lambda"),
        pytest.param(enclosing(), r"variables of the function that it is defined in \(weight\)", id="a closure"),
        pytest.param(uses_live, "'LIVE', a object that cannot be written down", id="a live object"),
        pytest.param(uses_nothing_known, "'no_such_name', which is not defined", id="an unknown name"),
        pytest.param(with_live_attribute, "attribute 'start' .* is a object", id="a live attribute"),
        pytest.param(len, "is not a function", id="a built-in"),
        pytest.param(Scale(), "is not a function", id="an object"),
    ],
)
def test_unserializable_functions_are_refused_in_a_sentence(function: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        function_source(function)


def test_a_function_that_was_defined_without_a_file_has_no_source() -> None:
    names: dict[str, Any] = {}
    exec("def score(response):\n    return 1.0\n", names)
    with pytest.raises(UsageError, match="the source of 'score' is not known"):
        function_source(names["score"])
