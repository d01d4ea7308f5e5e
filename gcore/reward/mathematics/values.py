r"""Parse a text into a typed value: a number, an expression, a tuple, a set, an equation, words.

This module parses the structure (lists, brackets, relations, units). The LaTeX parser of math-verify parses the
remaining expressions into SymPy trees without evaluating them.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import sympy

from gcore.plugins import RAISED
from gcore.reward.mathematics.notation import (
    NUMBER_WORDS,
    SCALES,
    Measured,
    Unit,
    closing,
    compound,
    normalize,
    take_unit,
)

LARGEST_DIGITS = 20_000
"""Maximum number of digits of a written number."""


class UnreadableAnswer(ValueError):
    """The text is not an answer that this package can parse."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number or an expression.

    `places`: decimal places of a number written as a decimal, else None. `degrees`, `percent`: whether it has
    the mark ° or %.
    """

    expression: sympy.Expr
    places: int | None = None
    unit: Unit | None = None
    percent: bool = False
    degrees: bool = False


@dataclass(frozen=True, slots=True)
class Collection:
    """Several values, such as `(1,2)` or `1:2`. `columns`: of a matrix, whose `items` are row by row.

    `kind`: `list` is without brackets, `array` in square brackets, `vector` in angle brackets or a column.
    """

    kind: Literal["list", "tuple", "array", "set", "vector", "matrix", "ratio"]
    items: tuple[Value, ...]
    columns: int = 1


@dataclass(frozen=True, slots=True)
class RealSet:
    """A set of real numbers: intervals, and sets composed of them."""

    numbers: sympy.Set


@dataclass(frozen=True, slots=True)
class Named:
    """A name, an equals sign and a value: `x=5`, `f(x)=x^2`, `Area = 5`."""

    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality such as `x<2`; `difference` is the left side minus the right side."""

    sign: Literal["=", "<", "<=", "!="]
    difference: sympy.Expr


@dataclass(frozen=True, slots=True)
class Equated:
    """Numbers between equals signs: `2+3=5` has the value 5, `3=5` has none."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Several inequalities that hold together, such as `1<x<2`."""

    relations: tuple[Relation, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, in lower case, without articles and punctuation."""

    text: str


@dataclass(frozen=True, slots=True)
class Option:
    """A multiple-choice option with its letter: `(B) 12`."""

    letter: str
    value: Value


@dataclass(frozen=True, slots=True)
class TimeOfDay:
    """A time such as `3:30 pm`; minutes and seconds are read alike. `half`: "a" (am), "p" (pm) or empty."""

    hours: int
    minutes: int
    half: str


@dataclass(frozen=True, slots=True)
class Choices:
    """Several readings of one text. `nearly`: the author calls them approximately equal, as in `\\sqrt{2} \\approx
    1.41`.
    """

    values: tuple[Value, ...]
    nearly: bool = True


Value = Scalar | Collection | RealSet | Named | Relation | Equated | Chain | Words | Option | TimeOfDay | Choices

_DECIMAL = re.compile(r"([-+]?)\s*(\d*)\.(\d+)|([-+]?)\s*(\d+)\.?")
_SCIENTIFIC = re.compile(
    r"([-+]?\s*(?:\d+(?:\.\d+)?|\.\d+))\s*(?:\\times|\\cdot|x|×)\s*10\s*\^\s*\{\s*([-+]?\d{1,4})\s*\}"
)
_SIMPLE_FRACTION = re.compile(r"([-+]?)\s*\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|([-+]?)\s*(\d+)\s*/\s*(\d+)")
_MIXED = re.compile(
    r"([-+]?)\s*(\d+)\s*(?:“and”|and)?\s*(?:\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(?<=[\sd”])(\d+)\s*/\s*(\d+))"
)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::00)?\s*“?\s*([aApP])?\.?\s?(?:[mM]\.?)?\s*”?")
_CLOCK_HOUR = re.compile(r"(\d{1,2})\s*“?\s*([aApP])\.?\s?[mM]\.?\s*”?")
_BASED = re.compile(r"“?\s*([\dA-Za-z]+)\s*”?\s*_\s*\{\s*(?:“?\s*(?:base)?\s*”?\s*)(\d{1,2}|“?[a-z]+”?)\s*\}")
_BASE_WORDS = re.compile(r"(\d+)[\s“(]*(?:in )?base[\s“”]*(\d{1,2}|[a-z]+)[\s”)]*")
_BASES = {**NUMBER_WORDS, "sixteen": 16}
_MATRIX = re.compile(
    r"\\begin\s*\{(?:[pbBvV]?matrix|smallmatrix|array)\}(?:\{[clr|]*\})?(.*)\\end\s*\{[a-zA-Z]*\}", re.DOTALL
)
_RELATIONS = {
    "=": "=",
    ":=": "=",
    "==": "=",
    "<": "<",
    ">": ">",
    "<=": "<=",
    ">=": ">=",
    r"\leq": "<=",
    r"\geq": ">=",
    r"\neq": "!=",
    "!=": "!=",
    r"\equiv": "≡",
    r"\in": "in",
    r"\approx": "~",
    r"\to": "->",
    r"\Rightarrow": "->",
    r"\rightarrow": "->",
}
_RELATION = re.compile(r"\\(?:leq|geq|neq|equiv|in|approx|to|Rightarrow|rightarrow)(?![a-zA-Z])|:=|<=|>=|!=|==|=|<|>")
_NAME = re.compile(
    r"(?:\\?[a-zA-Z]+'*(?:_\{?\w+\}?)?'*(?:\^\{-1\})?(?:\([\w,\s]*\))?|\\frac\s*\{\s*d[^{}]*\}\s*\{\s*d[^{}]*(?:\{\d\})?\}|“[^”]*”(?:\s*\([^()]*\))?|[a-zA-Z]+(?: [a-zA-Z]+)*|\\angle\s*[A-Z]+|[A-Z]{2,}"
    r"|\\overline\s*\{[A-Z]+\}|[PE]\s*[(\[].*[)\]])"
)
_WORD = re.compile(r"[^\W\d_]+", re.UNICODE)
_ARTICLES = frozenset(["the", "a", "an", "is", "are", "it", "its"])
_LETTERS = frozenset(["sin", "cos", "tan", "log", "exp", "max", "min", "mod", "gcd", "lcm"])


def read(text: str) -> Value:
    """Parse an answer in LaTeX or plain text into a typed value. Raises UnreadableAnswer."""
    normal = normalize(text)
    if not normal.strip(" .,;:$?"):
        raise UnreadableAnswer("the answer is empty")
    counted = re.match(rf"(?i)({'|'.join(NUMBER_WORDS)}) (?={'|'.join(SCALES)})", normal)
    if counted is not None:
        normal = f"{NUMBER_WORDS[counted[1].lower()]} {normal[counted.end() :]}"
    try:
        value = _read(_stripped(normal), 0)
    except RecursionError as error:
        raise UnreadableAnswer("it is nested too deeply") from error
    if re.fullmatch(r"[1-9]\d{2},\d{3}", text.strip()):  # 100,200 is one number or two
        return Choices((value, Collection("list", tuple(map(_scalar, text.split(","))))), nearly=False)
    return value


def _stripped(text: str) -> str:
    text = text.strip().rstrip("!") if text.endswith(" !") else text.strip()
    text = re.sub(r"[\s,;:]+$|(?<!\\)\\$", "", text)
    text = re.sub(r"^“[^”]*\b(?:is|are|equals):?”\s*(?=.)", "", text)
    whole = re.fullmatch(r"“([^“”]*)”", text)
    if whole is not None and re.search(r"\d|,|\band\b", whole[1]):
        text = whole[1].strip()
    text = re.sub(r"(?<![.\d])\.$|(?<=\d)\.$|(?<=”)\.$", "", text)
    text = re.sub(r"^(?:\\therefore|\\because|:|“(?:so|thus|hence|therefore)”)\s*", "", text)
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text.strip()


def _read(text: str, depth: int) -> Value:
    if depth > 30 or not text:
        raise UnreadableAnswer("brackets are nested too deeply" if text else "an item is empty")
    for reader in (_choice, _time, _listed, _related, _united, _matrix, _bracketed, _plus_minus, _ratio, _words):
        value = reader(text, depth + 1)
        if value is not None:
            return value
    return _scalar(text)


def _choice(text: str, depth: int) -> Value | None:
    """Read a multiple-choice letter such as `(B)`, with or without the option's text; None for other texts."""
    match = re.fullmatch(r"“?\s*[(\[]?\s*“?\s*([A-Ha-h])\s*”?\s*[)\]]\s*”?", text)
    if match:
        return Words(match[1].lower())
    match = re.fullmatch(r"“?\s*(?:\(([A-H])\)|([A-H])[.):])\s*”?\s*((?!and\b|or\b)[^\s”=<>+,;].*)", text)
    if match:
        return Option((match[1] or match[2]).lower(), _read(match[3].strip(), depth))
    match = re.fullmatch(r"“\s*([A-Za-z])\s*”", text)
    return Words(match[1].lower()) if match else None


def _time(text: str, depth: int) -> Value | None:
    text = re.sub(r"(?:12(?::00)?\s*)?“?\s*\bnoon\s*”?", "12:00 pm", text)
    text = re.sub(r"(?:12(?::00)?\s*)?“?\s*\bmidnight\s*”?", "12:00 am", text)
    match = _CLOCK.fullmatch(text)
    if match is not None and int(match[2]) < 60 and (match[3] or int(match[1]) <= 24):
        return TimeOfDay(int(match[1]), int(match[2]), (match[3] or "").lower())
    match = _CLOCK_HOUR.fullmatch(text)
    if match is not None:
        return TimeOfDay(int(match[1]), 0, match[2].lower())
    return None


def _listed(text: str, depth: int) -> Value | None:
    """Read values separated by commas, semicolons, `and`, `or`; None for a single value."""
    if (total := compound(text)) is not None:
        return Scalar(_rational(total[0]), None, total[1])
    if _MIXED.fullmatch(text):
        return None
    parts = _split(text, re.compile(r";|,?\s*“\s*(?:and|or)\s*”|,?\s+(?:and|or)\s+|,"))
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return None
    if _is_sentence(text):
        return Words(_plain_words(text))
    items = _items(parts, depth)
    if re.search(r"“\s*or\s*”|\sor\s", text) and any(isinstance(item, Relation | Chain | RealSet) for item in items):
        sets = [as_real_set(item) for item in items]
        if None not in sets:
            return RealSet(sympy.Union(*sets))
    # `x = 1, 2` names both; `-1, 1 cm` measures both.
    first = items[0]
    if isinstance(first, Named) and not any(isinstance(item, Named | Relation | Chain) for item in items[1:]):
        return Named(first.name, Collection("list", (first.value, *items[1:])))
    inequalities = [item for item in items if isinstance(item, Relation | Chain)]
    if len(inequalities) == len(items):
        return Chain(tuple(one for item in inequalities for one in _relations(item)))
    return Collection("list", tuple(items))


def _relations(value: Relation | Chain) -> tuple[Relation, ...]:
    return value.relations if isinstance(value, Chain) else (value,)


def _items(parts: list[str], depth: int) -> list[Value]:
    """Read each part; a part such as `\\pm 1` gives two values."""
    found: list[Value] = []
    for part in parts:
        value = _read(part, depth)
        found.extend(value.items if isinstance(value, Collection) and value.kind == "list" else (value,))
    return found


def _is_sentence(text: str) -> bool:
    """Whether the text is prose: the words around the commas are not names of values."""
    return not re.search(r"\d|\\[a-zA-Z]|[=<>]", text) and any(
        len(word) > 2 and word not in ("and", "or") for word in _WORD.findall(text)
    )


def _related(text: str, depth: int) -> Value | None:
    """Read an equation, inequalities, or a membership such as `x \\in S`; None for a text without a relation sign."""
    signs = _top(text, _RELATION)
    if not signs:
        return None
    places = [0, *(place for match in signs for place in (match.start(), match.end())), len(text)]
    sides = [text[places[i] : places[i + 1]].strip() for i in range(0, len(places), 2)]
    kinds = [_RELATIONS[match.group()] for match in signs]
    if "->" in kinds:
        return _read(sides[-1], depth)
    if not sides[0] or not sides[-1]:
        if len(sides) == 2 and kinds[0] in ("=", "~"):
            return _read(sides[0] or sides[1], depth)
        raise UnreadableAnswer("a side of the relation is empty")
    if kinds[-1] == "in":
        return _read(sides[-1], depth)
    if "~" in kinds:
        exact = kinds.index("~")
        left = text[: signs[exact].start()].strip()
        return Choices((_read(left, depth), _read(text[signs[exact].end() :].strip(), depth)))
    if "≡" in kinds:
        return Words(re.sub(r"\s|\\equiv|[{}()“”\\]|mod|pmod", "", text))
    if set(kinds) == {"="}:
        return _equation(sides, depth)
    return _inequalities(sides, kinds)


def _equation(sides: list[str], depth: int) -> Value:
    if _NAME.fullmatch(sides[0]) and sides[0] not in ("e", r"\pi", "i"):
        right = sides[1:]
        value = _read(right[-1], depth) if len(right) == 1 else _equation_value(right, depth)
        if not (len(sides) == 2 and isinstance(value, Scalar) and _symbol(sides[0]) in value.expression.free_symbols):
            return Named(re.sub(r"[\s{}“”]", "", sides[0]), value)
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and len(sides[1]) < 4 and sides[1] not in ("e", r"\pi", "i"):
        value = _read(sides[0], depth)
        if not (isinstance(value, Scalar) and value.expression.free_symbols):
            return Named(re.sub(r"[\s{}“”]", "", sides[1]), value)
    return _equation_value(sides, depth)


def _equation_value(sides: list[str], depth: int) -> Value:
    values = [_read(side, depth) for side in sides]
    if all(isinstance(value, Scalar) and not value.expression.free_symbols for value in values):
        return Equated(tuple(values))
    if len(values) == 2 and all(isinstance(value, Scalar) for value in values):
        return Relation("=", values[0].expression - values[1].expression)  # type: ignore[union-attr]
    return values[-1]


def _inequalities(sides: list[str], kinds: list[str]) -> Value:
    relations = []
    for left, right, kind in zip(sides, sides[1:], kinds, strict=False):
        one, other = _expression(left), _expression(right)
        if kind in (">", ">="):
            one, other, kind = other, one, kind.replace(">", "<")
        if not (one - other).is_number and {one, other} & {sympy.oo, -sympy.oo}:
            continue  # x < oo is always true
        relations.append(Relation(kind, one - other))  # type: ignore[arg-type]
    if not relations:
        return RealSet(sympy.S.Reals)
    return relations[0] if len(relations) == 1 else Chain(tuple(relations))


def _united(text: str, depth: int) -> Value | None:
    """Read a union, intersection or difference of sets; None for other texts. Raises UnreadableAnswer."""
    pattern = re.compile(r"\\(?:cup|cap|setminus)(?![a-zA-Z])|(?<=[)\]}])\s*-\s*(?=\\\{)|(?<=[)\]])\s*U\s*(?=[(\[])")
    signs = list(_top(text, pattern))
    if not signs:
        return None
    places = [0, *(place for match in signs for place in (match.start(), match.end())), len(text)]
    sets = [as_real_set(_read(text[places[i] : places[i + 1]].strip(), depth)) for i in range(0, len(places), 2)]
    found = sets[0]
    for match, other in zip(signs, sets[1:], strict=True):
        if found is None or other is None:
            raise UnreadableAnswer("an operand of the set operation is not a set of numbers")
        sign = match.group().strip()
        found = found | other if sign in (r"\cup", "U") else found & other if sign == r"\cap" else found - other
    return RealSet(found)


def as_real_set(value: Value) -> sympy.Set | None:
    """The set of real numbers that a value denotes or may denote: `(1,2)` is also an interval. None if it denotes none."""
    match value:
        case RealSet(numbers):
            return numbers
        case Collection("set", items) if all(isinstance(item, Scalar) for item in items):
            return sympy.FiniteSet(*(item.expression for item in items))  # type: ignore[union-attr]
        case Collection("tuple" | "array" as kind, (Scalar(low), Scalar(high))):
            bounds = low.is_extended_real and high.is_extended_real
            return sympy.Interval(low, high, kind == "tuple", kind == "tuple") if bounds else None
        case Relation() | Chain():
            return _solution(_relations(value))
    return None


def _solution(relations: tuple[Relation, ...]) -> sympy.Set | None:
    """Real solutions of inequalities in one unknown; None if there are other unknowns."""
    unknowns = set().union(*(one.difference.free_symbols for one in relations))
    if len(unknowns) != 1:
        return None
    real = sympy.Symbol("real", real=True)
    found: sympy.Set = sympy.S.Reals
    for one in relations:
        difference = one.difference.subs(unknowns.copy().pop(), real)
        kinds = {"=": sympy.Eq, "<": sympy.Lt, "<=": sympy.Le, "!=": sympy.Ne}
        condition = kinds[one.sign](difference, 0)
        if condition in (sympy.true, sympy.false):
            found = found & (sympy.S.Reals if condition == sympy.true else sympy.S.EmptySet)
        else:
            found = found & condition.as_set()
    return found


def _matrix(text: str, depth: int) -> Value | None:
    match = _MATRIX.fullmatch(text) or _MATRIX.fullmatch(text.strip("()[] "))
    if match is None:
        return None
    rows = [row for row in re.split(r"\\\\|\\cr", match[1]) if row.strip()]
    cells = [[_read(cell.strip(), depth) for cell in row.split("&")] for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise UnreadableAnswer("the rows of a matrix differ in length")
    columns = len(cells[0])
    items = tuple(cell for row in cells for cell in row)
    return Collection("vector" if columns == 1 else "matrix", items, columns)


def _bracketed(text: str, depth: int) -> Value | None:
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return Collection("set", ())
    for mark, numbers in (
        (r"\mathbb{R}", sympy.S.Reals),
        (r"\mathbb{Z}", sympy.S.Integers),
        (r"\mathbb{N}", sympy.S.Naturals),
    ):
        if text == mark:
            return RealSet(numbers)
    if text.startswith((r"\{", "{")) and text.endswith("}"):
        return _set(text.removeprefix("\\")[1:].removesuffix("}").removesuffix("\\").strip(), depth)
    if not text or text[0] not in "([⟨" or closing(text, 0) != len(text) - 1:
        return None
    inner, ends = text[1:-1].strip(), text[0] + text[-1]
    parts = _split(inner, re.compile(r"[,;]"))
    if len(parts) == 1:
        if ends == "()":
            return _read(inner, depth)
        return Collection("array" if ends == "[]" else "vector", (_read(inner, depth),)) if ends != "(]" else None
    items = tuple(_read(part, depth) for part in parts)
    if ends in ("(]", "[)"):
        if len(items) != 2 or not all(isinstance(item, Scalar) for item in items):
            raise UnreadableAnswer("an interval has two ends")
        low, high = (item.expression for item in items if isinstance(item, Scalar))
        return RealSet(sympy.Interval(low, high, ends == "(]", ends == "[)"))
    bounds = [item.expression for item in items if isinstance(item, Scalar)]
    if len(items) == len(bounds) == 2 and {sympy.oo, -sympy.oo} & set(bounds):
        low, high = bounds
        return RealSet(sympy.Interval(low, high, ends == "()", ends == "()"))
    return Collection({"()": "tuple", "[]": "array"}.get(ends, "vector"), items)  # type: ignore[arg-type]


def _set(inner: str, depth: int) -> Value:
    condition = re.match(r"\s*\(?[a-zA-Z](?:\s*\\in\s*\\mathbb\{R\})?\)?\s*(?:\||:)(.*)", inner)
    if condition is not None:
        value = _read(condition[1].strip(), depth)
        solution = as_real_set(value)
        return value if solution is None else RealSet(solution)
    if not inner:
        return Collection("set", ())
    parts = _split(inner, re.compile(r"[,;]"))
    return Collection("set", tuple(_items(parts, depth)))


def _plus_minus(text: str, depth: int) -> Value | None:
    if r"\pm" not in text and r"\mp" not in text:
        return None
    above = text.replace(r"\pm", "+").replace(r"\mp", "-")
    below = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return Collection("list", (_read(above, depth), _read(below, depth)))


def _ratio(text: str, depth: int) -> Value | None:
    parts = _split(re.sub(r"“\s*to\s*”|(?<=\d) to (?=\d)", ":", text), re.compile(":"))
    if len(parts) < 2:
        return None
    return Collection("ratio", tuple(_read(part, depth) for part in parts))


def _words(text: str, depth: int) -> Value | None:
    """Read words: text in quotation marks, or more letters in a row than a product of variables has. None for other
    texts.
    """
    if text.lower().strip("“” .") in NUMBER_WORDS:
        return Scalar(sympy.Integer(NUMBER_WORDS[text.lower().strip("“” .")]))
    if take_unit(text).number != text or _BASE_WORDS.fullmatch(text) or _BASED.fullmatch(text):
        return None
    plain = re.sub(r"\\[a-zA-Z]+", " ", text)
    longest = max((len(word) for word in _WORD.findall(plain) if word not in _LETTERS), default=0)
    common = plain.strip().lower() in ("yes", "no", "odd", "all", "dne", "none", "red")
    phrase = re.sub(r"s$", "", _plain_words(text))
    if phrase in ("all real number", "all real", "real number", "all real number x", "set of all real number"):
        return RealSet(sympy.S.Reals)
    if phrase in ("no solution", "no real solution", "empty set", "no such number"):
        return Collection("set", ())
    if "“" in text or longest > 3 or common:
        return Words(_plain_words(text))
    return None


def _plain_words(text: str) -> str:
    words = re.findall(r"[^\W_]+|[-+=<>/^]", re.sub(r"\\[a-zA-Z]+|[“”]", " ", text).lower())
    return " ".join(word for word in words if word not in _ARTICLES)


def _scalar(text: str) -> Scalar:
    measured = Measured(text, 1, None) if _BASE_WORDS.fullmatch(text) else take_unit(text)
    number, unit, percent, degrees = measured.number.strip(), measured.unit, False, False
    if measured.number != text:
        number = _stripped(number)
    if number.endswith("%") or re.search(r"“?\s*per ?cent", text):
        number, percent = re.sub(r"\s*%$", "", number), True
    scale = re.search(r"°\s*“?\s*([CF])\s*”?$", text)
    if scale is not None:
        number, unit = _stripped(text[: scale.start()]), Unit((("degrees " + scale[1], 1),), Fraction(1))
    elif (number.endswith("°") and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", number)) or re.search(
        r"\d\s*“?\s*degrees?", text
    ):
        number, degrees = re.sub(r"\s*°$", "", number), True
    places = None
    match = _DECIMAL.fullmatch(number)
    if match is not None and match[3] is not None:
        places = len(match[3])
    elif (match := _SCIENTIFIC.fullmatch(number)) is not None:
        places = max(0, len(match[1].partition(".")[2]) - int(match[2]))
    expression = _expression(number)
    if measured.scale != 1:
        expression, places = expression * measured.scale, None
    return Scalar(expression, places, unit, percent, degrees)


def _rational(number: Fraction) -> sympy.Rational:
    return sympy.Rational(number.numerator, number.denominator)


def _number(text: str) -> sympy.Expr | None:
    """The exact value of a written number, else None."""
    if len(text) > LARGEST_DIGITS:
        raise UnreadableAnswer("the number has too many digits")
    text = text.strip()
    if text in NUMBER_WORDS:
        return sympy.Integer(NUMBER_WORDS[text])
    match = _DECIMAL.fullmatch(text)
    if match is not None:
        sign = -1 if "-" in (match[1], match[4]) else 1
        digits = f"{match[2]}.{match[3]}" if match[3] is not None else match[5]
        return _rational(sign * _decimal(digits))
    if (match := _SIMPLE_FRACTION.fullmatch(text)) is not None:
        above, below = (match[2], match[3]) if match[2] is not None else (match[5], match[6])
        if int(below) == 0:
            return sympy.zoo
        return _rational((-1 if "-" in (match[1], match[4]) else 1) * Fraction(int(above), int(below)))
    if (match := _MIXED.fullmatch(text)) is not None:
        above, below = (match[3], match[4]) if match[3] is not None else (match[5], match[6])
        if int(below) != 0:
            return _rational((-1 if match[1] == "-" else 1) * (int(match[2]) + Fraction(int(above), int(below))))
    if (match := _SCIENTIFIC.fullmatch(text)) is not None:
        sign = -1 if match[1].startswith("-") else 1
        return _rational(sign * _decimal(match[1].lstrip("+- ")) * Fraction(10) ** int(match[2]))
    for pattern in (_BASED, _BASE_WORDS):
        if (match := pattern.fullmatch(text)) is not None:
            base = match[2].strip("“” ")
            return _based(match[1], _BASES.get(base) or (int(base) if base.isdigit() else 0))
    return None


def _decimal(digits: str) -> Fraction:
    whole, _, part = digits.partition(".")
    return Fraction(int((whole + part) or "0"), 10 ** len(part))


def _based(digits: str, base: int) -> sympy.Expr | None:
    if len(digits) == 1 and digits.isalpha():
        return None  # a variable with an index, such as x_2
    try:
        return sympy.Integer(int(digits, base)) if 2 <= base <= 36 else None
    except ValueError:
        return None


def _expression(text: str) -> sympy.Expr:
    """Parse an expression. Raises UnreadableAnswer."""
    text = _stripped(text)
    if (number := _number(text)) is not None:
        return number
    if not text or "“" in text or "$" in text or "?" in text:
        raise UnreadableAnswer("it is not an expression")
    text = re.sub(r"(\d)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", _mixed, text)
    # Convert decimals to fractions: the parser would read them as floating-point numbers with 53 bits.
    text = re.sub(r"(?<![\d.])(\d*)\.(\d+)", lambda m: rf"(\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}})", text)
    text = re.sub(r"(\d+(?:\.\d+)?)\s*°", r"(\1\\cdot \\frac{\\pi}{180})", text)
    parsed = _parse(text)
    if isinstance(parsed, sympy.MatrixBase) or not isinstance(parsed, sympy.Expr):
        raise UnreadableAnswer("it is not an expression")
    imaginary = {sympy.Symbol("i"): sympy.I, sympy.Symbol("j"): sympy.Symbol("j")}
    return parsed.xreplace(imaginary)


def _mixed(match: re.Match[str]) -> str:
    return rf"({match[1]}+\frac{{{match[2]}}}{{{match[3]}}})" if int(match[2]) < int(match[3]) else match.group()


def _parse(text: str) -> Any:
    parser = importlib.import_module("latex2sympy2_extended.latex2sympy2")
    config = parser.ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    try:
        return parser.latex2sympy(text, normalization_config=None, conversion_config=config)
    except RAISED as error:  # the parser may raise any exception
        raise UnreadableAnswer(
            f"parser error: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name.lstrip("\\"))


def _top(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Matches of `pattern` in `text` outside of brackets and quotation marks."""
    depth, inside, quoted = 0, [], False
    for letter in text:
        if letter in "([{⟨":
            depth += 1
        elif letter in ")]}⟩":
            depth = max(0, depth - 1)
        elif letter in "“”":
            quoted = letter == "“"
        inside.append(depth > 0 or letter in ")]}⟩" or (quoted and letter != "“"))
    return [match for match in pattern.finditer(text) if not any(inside[match.start() : match.start() + 1])]


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    places = [0, *(place for match in _top(text, pattern) for place in (match.start(), match.end())), len(text)]
    return [text[places[i] : places[i + 1]].strip() for i in range(0, len(places), 2)]
