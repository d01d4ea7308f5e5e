"""The tool `calculator`: sums with + - * / and parentheses, of whole and decimal numbers. A parser of its own: nothing is evaluated
that a model writes.

Exact: numbers are fractions all the way, and what comes out is written as a decimal number, rounded to twelve places where it has
no end. Bounded: so many characters, so many digits, so many parentheses within each other.
"""

from __future__ import annotations

import re
from decimal import Decimal, localcontext
from fractions import Fraction

from gcore.environments.api import BadArgument

MOST_CHARACTERS, MOST_DIGITS, MOST_DEPTH = 256, 64, 32
PLACES = 12
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|[-+*/()])", re.ASCII)
_LARGEST = 10**MOST_DIGITS


class NoSum(BadArgument):
    """It is none that can be worked out; the words say why."""


def calculator(argument: str) -> str:
    """What the sum comes to. Raises NoSum."""
    if len(argument) > MOST_CHARACTERS:
        raise NoSum(f"the sum has {len(argument)} characters; at most {MOST_CHARACTERS}")
    parser = _Parser(_tokens(argument))
    value = parser.sum(0)
    if parser.rest:
        raise NoSum(f"what is {parser.rest[0]!r} doing there?")
    return _written(value)


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NoSum(f"{text[at:].strip()[:1]!r} is no part of a sum")
        found.append(match.group(1))
        at = match.end()
    return found


class _Parser:
    """Descends from sums to products to numbers."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.rest and self.rest[0] in "+-":
            value = _bounded(value + self._product(depth) if self._take() == "+" else value - self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._number(depth)
        while self.rest and self.rest[0] in "*/":
            if self._take() == "*":
                value = _bounded(value * self._number(depth))
                continue
            divisor = self._number(depth)
            if divisor == 0:
                raise NoSum("nothing can be divided by zero")
            value = _bounded(value / divisor)
        return value

    def _number(self, depth: int) -> Fraction:
        if depth > MOST_DEPTH:
            raise NoSum(f"more than {MOST_DEPTH} signs or parentheses within each other")
        if not self.rest:
            raise NoSum("the sum ends in the middle")
        token = self._take()
        if token in "+-":
            value = self._number(depth + 1)
            return value if token == "+" else -value
        if token == "(":
            value = self.sum(depth + 1)
            if not self.rest or self._take() != ")":
                raise NoSum("a parenthesis is not closed")
            return value
        if token in ("*", "/", ")"):
            raise NoSum(f"what is {token!r} doing there?")
        return _bounded(Fraction(token))

    def _take(self) -> str:
        return self.rest.pop(0)


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) >= _LARGEST * value.denominator or value.denominator >= _LARGEST:
        raise NoSum(f"a number of more than {MOST_DIGITS} digits")
    return value


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = 2 * MOST_DIGITS + PLACES
        exact = Decimal(value.numerator) / Decimal(value.denominator)
        rounded = exact.quantize(Decimal(1).scaleb(-PLACES))
    text = f"{rounded:f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
