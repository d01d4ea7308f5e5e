r"""Grade a response: find its final answer, parse it, and compare it with the expected one.

The last \boxed{} counts. Without a box: the text after the last marker (`####`, "answer is", "answer:"), else the last
formula, else a short response as a whole, else its last number.

Values are compared exactly if both are exact, with a tolerance if one is a decimal, and only with values of the same
type. Two exact numbers are equal if 200 significant digits agree. A decimal is exact too, but may stand for a number
without a finite decimal expansion, such as 0.333333 for 1/3. Expressions with variables are equal if they agree at
several points, as in polynomial identity testing (Schwartz 1980, Zippel 1979).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import mpmath
import sympy

from gcore.plugins import RAISED
from gcore.reward.mathematics.notation import FUNCTIONS, UNIT_WORDS, Unit, normalize, unit_of
from gcore.reward.mathematics.values import (
    Chain,
    Choices,
    Collection,
    Equated,
    Named,
    Option,
    RealSet,
    Relation,
    Scalar,
    TimeOfDay,
    UnreadableAnswer,
    Value,
    Words,
    as_real_set,
    read,
)

log = logging.getLogger(__name__)

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_MARKER = re.compile(
    r"####|\b(?:final\s+)?answer(?:\s+(?:is|equals|would\s+be)|\s*[:=])|\b(?:therefore|thus|hence),?\s+the\s+answer\s+is",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$([^$\n]+?)(?<!\\)\$", re.DOTALL
)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$|[*_`\"')\]])|;\s")
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?[$€£¥₹]?\s?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
    rf"(?:\s*/\s*\d+)?(?:\s?%|\s?(?:square |cubic )?(?:{UNIT_WORDS})(?:\^?[23²³])?(?!\w))?|(?<![\w.])[-+\u2212]?\.\d+"
)
_LONG_WORD = re.compile(r"[a-zA-Z]{2,}")

WHOLE = 80
"""Maximum length in characters of a response that may be an answer as a whole."""

LONGEST_NUMBER_TEXT = 2000
"""Number of characters at the end of a response that are searched for its last number."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """An expected answer, parsed once for all responses. `plain`: its text, normalized for a comparison as text."""

    value: Value
    plain: str

    @classmethod
    def of(cls, text: str) -> ExpectedAnswer:
        """Parse LaTeX or plain text: the content of its last box, or the text after its last `####`, if there is one.

        Raises UnreadableAnswer.
        """
        box = last_box(text)
        answer = text.rpartition("####")[2] if box is None else box
        return cls(read(answer), _plain(answer))


@dataclass(frozen=True, slots=True)
class Grade:
    """Result for one response. `found`: the response has a readable answer.

    `correct`: the answer equals the expected one. `too_large`: a number in it is too large to compute.
    """

    found: bool
    correct: bool
    too_large: bool = False


def grade(expected: ExpectedAnswer, response: str, digits: int | None = None) -> Grade:
    """Find the final answer of a response and compare it with the expected one; `digits` as in `equal`.

    Values that SymPy cannot compare are not equal.
    """
    for text in final_answers(response):
        if _plain(text) == expected.plain:
            return Grade(True, True)
        try:
            value = read(text)
        except UnreadableAnswer:
            continue
        except TooLarge:
            return Grade(True, False, too_large=True)
        try:
            return Grade(True, equal(expected.value, value, digits))
        except TooLarge:
            return Grade(True, False, too_large=True)
        except RAISED as error:  # SymPy may raise any exception
            log.debug("not comparable: %s", error)
            return Grade(True, False)
    return Grade(False, False)


def _plain(text: str) -> str:
    """Normalize a text for a comparison as text: without insignificant spaces and the marks “ ” around words."""
    return re.sub(r"(?<!\w) | (?!\w)|[.]$", "", re.sub(r"\s*[“”]\s*", "", normalize(text)))


def last_box(text: str) -> str | None:
    """Content of the last box in `text`; empty if it is empty or not closed, None if there is no box."""
    matches = list(_BOX.finditer(text))
    if not matches:
        return None
    # A box within a box belongs to the outer one: `\boxed{\boxed{5}}`.
    for match in matches:
        content = _argument(text, match.end())
        if content is not None and match.end() + len(content) >= matches[-1].start():
            return content
    return ""


def final_answers(text: str) -> tuple[str, ...]:
    """Candidate texts for the final answer, the most likely first. Only the first readable one counts."""
    box = last_box(text)
    if box is not None:
        return (box,) if box.strip() else ()
    markers = list(_MARKER.finditer(text))
    if markers:
        rest = text[markers[-1].end() :].lstrip(" :=*_\n")
        sentence = _first_sentence(rest)
        formulas = _formulas(sentence) or _formulas(rest)[:1]
        return (*formulas[-1:], sentence.strip(" *_`"), *_last_number(sentence))
    formulas = _formulas(text)
    if formulas:
        return formulas[-1:]
    whole = text.strip(" \n*_`")
    numbers = _last_number(text)
    if not whole or len(whole) > WHOLE or "\n" in whole:
        return numbers
    is_prose = any(word not in FUNCTIONS for word in _LONG_WORD.findall(whole))
    return (*numbers, whole) if is_prose else (whole, *numbers)


def _argument(text: str, place: int) -> str | None:
    """Argument of a LaTeX command at `place`: between braces, or the next word. None if the braces are not closed."""
    if not text.startswith("{", place):
        word = re.match(r"[^\s$.,;\\{}]+", text[place:])
        return word.group() if word else None
    depth = 0
    for index in range(place, len(text)):
        escaped = index > 0 and text[index - 1] == "\\" and (index < 2 or text[index - 2] != "\\")
        if text[index] == "{" and not escaped:
            depth += 1
        elif text[index] == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return text[place + 1 : index]
    return None


def _formulas(text: str) -> tuple[str, ...]:
    return tuple(next(part for part in match if part) for match in _FORMULA.findall(text))


def _first_sentence(text: str) -> str:
    end = _SENTENCE_END.search(text)
    return text[: end.start()] if end else text


def _last_number(text: str) -> tuple[str, ...]:
    return tuple(match.group().strip() for match in _NUMBER.finditer(text[-LONGEST_NUMBER_TEXT:]))[-1:]


DIGITS = 6
"""Minimum number of significant digits of a decimal that may stand for a number without a finite expansion."""

EXACT, PRECISE = 60, 200
"""Digits of precision: for the first comparison, and if the first one finds the numbers equal."""

LARGEST_POWER = 200_000
"""Maximum number of decimal digits of a computed number."""

MOST_UNORDERED = 64

_POINTS = tuple(
    tuple(sympy.Rational(a, b) for a, b in pairs)
    for pairs in (
        ((7, 5), (13, 11), (17, 7), (23, 19), (29, 13), (31, 37), (41, 43), (47, 53)),
        ((-3, 7), (-11, 5), (-19, 13), (-2, 17), (-31, 23), (-37, 29), (-43, 41), (-5, 53)),
        ((1, 3), (2, 7), (3, 11), (5, 13), (7, 17), (11, 19), (13, 23), (17, 29)),
        ((19, 3), (29, 7), (-37, 11), (43, 13), (-59, 17), (61, 19), (71, 23), (-83, 29)),
        ((-23, 3), (31, 7), (41, 11), (-47, 13), (53, 17), (-67, 19), (-73, 23), (89, 29)),
    )
)


class TooLarge(ArithmeticError):
    """A number is too large to compute."""


def equal(gold: Value, given: Value, digits: int | None = None) -> bool:
    """Whether `given` equals the expected value `gold`.

    `digits`: number of significant digits to which non-integers must agree; None: as described in the module. Raises
    TooLarge.
    """
    return _Comparison(digits).equal(gold, given)


class _Comparison:
    def __init__(self, digits: int | None) -> None:
        self._digits = digits

    def equal(self, gold: Value, given: Value) -> bool:
        if isinstance(gold, Choices):
            return any(self.equal(one, given) for one in gold.values)
        if isinstance(given, Choices):
            return any(self.equal(gold, one) for one in given.values) and (not given.nearly or self._nearly(given))
        if isinstance(gold, Equated) or isinstance(given, Equated):
            left, right = self._equated(gold), self._equated(given)
            return left is not None and right is not None and self.equal(left, right)
        if isinstance(gold, Option) or isinstance(given, Option):
            return self._options(gold, given)
        if isinstance(gold, Named) or isinstance(given, Named):
            return self._named(gold, given)
        match gold, given:
            case Scalar(), Scalar():
                return self._scalars(gold, given)
            case Words(one), Words(other):
                return one == other or one.replace(" ", "") == other.replace(" ", "")
            case (Words(word), Scalar(expression=symbol)) | (Scalar(expression=symbol), Words(word)):
                return isinstance(symbol, sympy.Symbol) and len(word) == 1 and symbol.name.lower() == word
            case TimeOfDay(), TimeOfDay():
                return _same_time(gold, given)
            case Collection(), Collection():
                return self._collections(gold, given)
            case Collection("ratio", (Scalar(a), Scalar(b))), Scalar(expression=c):
                return self._numbers(a / b, c) if b != 0 else False
            case Scalar(expression=c), Collection("ratio", (Scalar(a), Scalar(b))):
                return self._numbers(a / b, c) if b != 0 else False
            case Relation(), Relation() if self._relations(gold, given):
                return True
            case Chain(one), Chain(other) if len(one) == len(other):
                if self._matched(one, other):
                    return True
        return self._sets(gold, given)

    def _equated(self, value: Value) -> Value | None:
        """Return the common value of an equality such as `2+3=5`, None if its sides differ; other values unchanged."""
        if not isinstance(value, Equated):
            return value
        return value.values[-1] if all(self.equal(value.values[0], one) for one in value.values) else None

    def _options(self, gold: Value, given: Value) -> bool:
        if isinstance(gold, Option) and isinstance(given, Option):
            return gold.letter == given.letter
        option, other = (gold, given) if isinstance(gold, Option) else (given, gold)
        assert isinstance(option, Option)
        return self.equal(Words(option.letter), other) or self.equal(option.value, other)

    def _nearly(self, given: Choices) -> bool:
        """Whether the two values that the response calls approximately equal (`\\approx`) agree to two significant digits.

        They may differ by at most a twentieth of the larger one.
        """
        return _Comparison(2).equal(given.values[0], given.values[-1]) or self.equal(given.values[0], given.values[-1])

    def _named(self, gold: Value, given: Value) -> bool:
        if isinstance(gold, Named) and isinstance(given, Named):
            plain = [_plain_name(one.name) for one in (gold, given)]
            if all(plain) and gold.name != given.name:
                return False
            return self.equal(gold.value, given.value)
        if isinstance(gold, Relation) or isinstance(given, Relation):
            one, other = _as_relation(gold), _as_relation(given)
            return one is not None and other is not None and self._relations(one, other)
        if isinstance(gold, Named):
            return self.equal(gold.value, given)
        assert isinstance(given, Named)
        return self.equal(gold, given.value)

    def _scalars(self, gold: Scalar, given: Scalar) -> bool:
        gold, given = _measured_alike(gold, given), _measured_alike(given, gold)
        if gold.unit is not None and given.unit is not None:
            if gold.unit.powers != given.unit.powers:
                return False
            if gold.unit.factor != given.unit.factor:
                return self._numbers(*(one.expression * _factor(one.unit) for one in (gold, given)))
        places = gold.places, given.places
        if gold.degrees != given.degrees and (gold.unit or given.unit) is not None:
            return self._numbers(_in_radians(gold), _in_radians(given), *places)
        # `12.5%` equals 12.5 for a question about a percentage; `0.5%` is not 0.5.
        unmarked = not (given.percent and not gold.percent and _is_below_one(given.expression))
        if unmarked and self._numbers(gold.expression, given.expression, *places):
            return True
        if (gold.unit is None) != (given.unit is None) and _is_money(gold.unit or given.unit):
            return self._numbers(*(one.expression * _factor(one.unit) for one in (gold, given)))
        if gold.percent != given.percent:
            hundredth = [one.expression / (100 if one.percent else 1) for one in (gold, given)]
            return self._numbers(*hundredth, *(None if p is None else p + 2 for p in places))
        if gold.degrees != given.degrees:
            return self._numbers(_in_radians(gold), _in_radians(given), *places)
        return False

    def _numbers(
        self, gold: sympy.Expr, given: sympy.Expr, gold_places: int | None = None, given_places: int | None = None
    ) -> bool:
        """Whether two numbers or expressions are equal.

        `gold_places`, `given_places`: decimal places if the number was written as a decimal, else None.
        """
        if gold == given:
            return True
        if gold.free_symbols or given.free_symbols:
            return _same_function(gold, given)
        if isinstance(gold, sympy.Rational) and isinstance(given, sympy.Rational) and gold.q == 1 == given.q:
            return False
        if self._digits is not None:
            return _agree(gold, given, self._digits)
        if _exactly_equal(gold, given):
            return True
        return _stands_for(given, given_places, gold) or _stands_for(gold, gold_places, given)

    def _collections(self, gold: Collection, given: Collection) -> bool:
        kinds = {gold.kind, given.kind}
        if kinds == {"ratio"}:
            return len(gold.items) == len(given.items) and self._proportional(gold, given)
        if len(gold.items) != len(given.items) and kinds != {"set"}:
            return False
        if kinds == {"matrix"}:
            return gold.columns == given.columns and self._ordered(gold.items, given.items)
        if kinds == {"set"}:
            return all(any(self.equal(a, b) for b in given.items) for a in gold.items) and all(
                any(self.equal(a, b) for a in gold.items) for b in given.items
            )
        if kinds <= {"set", "list"}:
            return self._matched(gold.items, given.items)
        if kinds <= {"tuple", "vector", "list"} or kinds in ({"array"}, {"array", "vector"}):
            return self._ordered(gold.items, given.items)
        return False

    def _ordered(self, gold: Iterable[Value], given: Iterable[Value]) -> bool:
        return all(self.equal(one, other) for one, other in zip(gold, given, strict=True))

    def _matched(self, gold: tuple[Value, ...], given: tuple[Value, ...]) -> bool:
        """Whether the values can be paired with equal ones, in any order."""
        if len(gold) > MOST_UNORDERED:
            return self._ordered(gold, given)
        left = list(given)
        for one in gold:
            found = next((place for place, other in enumerate(left) if self.equal(one, other)), None)
            if found is None:
                return False
            del left[found]
        return not left

    def _proportional(self, gold: Collection, given: Collection) -> bool:
        if not all(isinstance(item, Scalar) for item in (*gold.items, *given.items)):
            return False
        one = [item.expression for item in gold.items]  # type: ignore[union-attr]
        other = [item.expression for item in given.items]  # type: ignore[union-attr]
        return all(self._numbers(one[0] * b, other[0] * a) for a, b in zip(one, other, strict=True))

    def _relations(self, gold: Relation, given: Relation) -> bool:
        if gold.sign != given.sign:
            return False
        signed = gold.sign in ("<", "<=")
        if gold.difference.free_symbols != given.difference.free_symbols or not gold.difference.free_symbols:
            return False
        return _proportional_functions(gold.difference, given.difference, positive=signed)

    def _sets(self, gold: Value, given: Value) -> bool:
        """Whether two intervals, inequalities or sets of numbers describe the same set of real numbers."""
        if not isinstance(gold, RealSet | Relation | Chain) and not isinstance(given, RealSet | Relation | Chain):
            return False
        if (isinstance(gold, Relation) and gold.sign == "=") or (isinstance(given, Relation) and given.sign == "="):
            return False
        one, other = as_real_set(gold), as_real_set(given)
        if one is None or other is None:
            return False
        return bool(one == other or sympy.simplify(one) == sympy.simplify(other))


def _plain_name(name: str) -> bool:
    return len(name.replace("\\", "")) == 1 or name.startswith("\\")


def _as_relation(value: Value) -> Relation | None:
    match value:
        case Relation():
            return value
        case Named(name, Scalar(expression)):
            return Relation("=", sympy.Symbol(name.lstrip("\\")) - expression)
    return None


def _same_time(gold: TimeOfDay, given: TimeOfDay) -> bool:
    if gold.half and given.half:
        return (gold.hours % 12, gold.minutes, gold.half) == (given.hours % 12, given.minutes, given.half)
    if gold.half or given.half:
        marked, plain = (gold, given) if gold.half else (given, gold)
        hours = marked.hours % 12 + (12 if marked.half == "p" else 0)
        return marked.minutes == plain.minutes and plain.hours in (hours, marked.hours)
    return (gold.hours, gold.minutes) == (given.hours, given.minutes)


def _factor(unit: Unit | None) -> sympy.Rational:
    return sympy.Integer(1) if unit is None else sympy.Rational(unit.factor.numerator, unit.factor.denominator)


def _is_money(unit: Unit | None) -> bool:
    return unit is not None and unit.powers == (("dollars", 1),)


def _measured_alike(one: Scalar, other: Scalar) -> Scalar:
    """Read `5m` as a measure instead of a product if the other value is `5 meters`."""
    symbols = one.expression.free_symbols
    if one.unit is not None or other.unit is None or other.expression.free_symbols or len(symbols) != 1:
        return one
    symbol = symbols.copy().pop()
    unit = unit_of(symbol.name)
    if unit is None or symbol in (number := one.expression / symbol).free_symbols:
        return one
    return replace(one, expression=number, unit=unit)


def _in_radians(angle: Scalar) -> sympy.Expr:
    return angle.expression * (sympy.pi / 180 if angle.degrees else 1)


def _is_below_one(number: sympy.Expr) -> bool:
    return isinstance(number, sympy.Rational) and abs(number) < 1


def _places(number: sympy.Expr) -> int | None:
    """Decimal places of a number with a finite decimal expansion, else None."""
    if not isinstance(number, sympy.Rational):
        return None
    rest, twos, fives = number.q, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


def _stands_for(decimal: sympy.Expr, places: int | None, number: sympy.Expr) -> bool:
    """Whether `decimal` is `number` rounded to `places` decimal places, or truncated if `number` has no finite expansion.

    A decimal with fewer than `DIGITS` significant digits is not.
    """
    number_places = _places(number)
    if (
        places is None
        or not isinstance(decimal, sympy.Rational)
        or (number_places is not None and number_places <= places)
    ):
        return False
    significant = len(str(abs(decimal.p) * 10**places // decimal.q)) if decimal else 0
    if significant < DIGITS:
        return False
    value = _value(number, EXACT)
    if value is None or mpmath.im(value) != 0:
        return False
    with mpmath.workdps(EXACT):
        distance = abs(mpmath.re(value) - mpmath.mpf(decimal.p) / decimal.q) * mpmath.mpf(10) ** places
        return bool(distance < (1 if number_places is None else mpmath.mpf(0.5) + mpmath.mpf(10) ** -20))


def _exactly_equal(one: sympy.Expr, other: sympy.Expr) -> bool:
    if isinstance(one, sympy.Rational) and isinstance(other, sympy.Rational):
        return bool(one == other)
    if sympy.zoo in (one, other) or sympy.nan in (one, other):
        return False
    if {one, other} & {sympy.oo, -sympy.oo}:
        return bool(_closed(one) == _closed(other))
    for more in (False, True):
        precision = PRECISE + int(min(_digits(one), LARGEST_POWER)) if more else EXACT
        a, b = _value(one, precision), _value(other, precision)
        if a is None or b is None:
            return bool(sympy.simplify(_closed(one) - _closed(other)) == 0)
        with mpmath.workdps(precision):
            size = max(abs(a), abs(b))
            if size and abs(a - b) > size * mpmath.mpf(10) ** -(precision - 10):
                # A number that is exactly 0 may be computed as a very small one.
                small = mpmath.mpf(10) ** -(EXACT - 5)
                if min(abs(a), abs(b)) < small and max(abs(a), abs(b)) < small:
                    return bool((_closed(one) - _closed(other)).equals(0))
                return False
    return True


def _agree(one: sympy.Expr, other: sympy.Expr, digits: int) -> bool:
    a, b = _value(one, EXACT), _value(other, EXACT)
    if a is None or b is None:
        return False
    return bool(abs(a - b) <= max(abs(a), abs(b)) * mpmath.mpf(10) ** (1 - digits) / 2)


def _value(expression: sympy.Expr, precision: int) -> mpmath.mpf | mpmath.mpc | None:
    """Compute the numerical value to `precision` decimal digits; None if the expression has no finite value.

    Raises TooLarge.
    """
    _check_size(expression)
    closed = _closed(expression)
    found = closed.evalf(precision)
    if found in (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo) or not found.is_number:
        return None
    real, imaginary = found.as_real_imag()
    if not isinstance(real, sympy.Float | sympy.Rational) or not isinstance(imaginary, sympy.Float | sympy.Rational):
        return None
    with mpmath.workdps(precision):
        parts = [
            mpmath.mpf(str(part.p)) / part.q if isinstance(part, sympy.Rational) else part._to_mpmath(mpmath.mp.prec)
            for part in (real, imaginary)
        ]
        return mpmath.mpc(*parts) if imaginary != 0 else mpmath.mpf(parts[0])


def _closed(expression: sympy.Expr) -> sympy.Expr:
    """The expression with sums, integrals and limits evaluated."""
    _check_size(expression)
    return (
        expression.doit()
        if expression.has(
            sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.UnevaluatedExpr
        )
        else expression
    )


def _check_size(expression: sympy.Expr) -> None:
    """Raise TooLarge if a number in the expression has more than `LARGEST_POWER` digits."""
    for node in sympy.postorder_traversal(expression):
        if isinstance(node, sympy.Pow) and node.is_number:
            if _digits(node) > LARGEST_POWER:
                raise TooLarge(f"a power has more than {LARGEST_POWER} digits")
        elif isinstance(node, sympy.factorial) and node.is_number and _digits(node.args[0]) > 5:
            raise TooLarge("a factorial is too large")


def _digits(expression: sympy.Expr) -> float:
    """Estimate the number of decimal digits before the point, without computing the number."""
    if isinstance(expression, sympy.Pow):
        exponent = expression.exp
        if _digits(exponent) > 12:
            return float("inf")
        try:
            return abs(float(exponent)) * max(_digits(expression.base), 0.31)
        except (TypeError, OverflowError):
            return _digits(expression.base) * 10 ** min(_digits(exponent), 300)
    if isinstance(expression, sympy.Rational):
        return (
            max(len(str(abs(expression.p))), len(str(expression.q)))
            if expression.p.bit_length() < 10**6
            else float("inf")
        )
    if isinstance(expression, sympy.factorial):
        inner = _digits(expression.args[0])
        return float("inf") if inner > 6 else 10**inner * inner
    return float(sum(_digits(part) for part in expression.args)) if expression.args else 1.0


def _same_function(one: sympy.Expr, other: sympy.Expr) -> bool:
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return False
    verdict = _at_points(one, other, lambda a, b, size: abs(a - b) <= size * mpmath.mpf(10) ** -(EXACT - 15))
    if verdict is not None:
        return verdict
    return bool(sympy.simplify(_closed(one) - _closed(other)) == 0)


def _proportional_functions(one: sympy.Expr, other: sympy.Expr, *, positive: bool) -> bool:
    ratios: list[mpmath.mpf] = []

    def note(a: mpmath.mpf, b: mpmath.mpf, size: mpmath.mpf) -> bool:
        if a == 0 or b == 0:
            return bool(a == b)
        ratios.append(a / b)
        return bool(abs(ratios[-1] - ratios[0]) <= abs(ratios[0]) * mpmath.mpf(10) ** -(EXACT - 15))

    if not _at_points(one, other, note) or not ratios:
        return False
    return not positive or (mpmath.im(ratios[0]) == 0 and mpmath.re(ratios[0]) > 0)


def _at_points(
    one: sympy.Expr, other: sympy.Expr, agrees: Callable[[mpmath.mpf, mpmath.mpf, mpmath.mpf], bool]
) -> bool | None:
    """Whether both expressions agree at every point of `_POINTS` at which both are defined; None if there is no such point.

    `agrees` gets the two values at a point and the larger absolute value.
    """
    names = sorted(one.free_symbols | other.free_symbols, key=lambda symbol: symbol.name)
    if len(names) > len(_POINTS[0]):
        return None
    one, other = _closed(one), _closed(other)
    seen, complex_ = 0, []
    for point in _POINTS:
        at = dict(zip(names, point, strict=False))
        a, b = (_value(expression.subs(at), EXACT) for expression in (one, other))
        if a is None or b is None:
            continue
        if mpmath.im(a) != 0 or mpmath.im(b) != 0:
            complex_.append((a, b))
            continue
        with mpmath.workdps(EXACT):
            if not agrees(a, b, max(abs(a), abs(b))):
                return False
        seen += 1
    if seen:
        return True
    with mpmath.workdps(EXACT):
        return all(agrees(a, b, max(abs(a), abs(b))) for a, b in complex_) if complex_ else None
