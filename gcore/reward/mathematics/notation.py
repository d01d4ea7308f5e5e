r"""Normalize the notation of a mathematical text, and extract units and money from it.

Expected answers and responses are treated alike.

The result is a small dialect of LaTeX: `\frac{a}{b}`, `\sqrt{a}`, `^{...}`, ASCII digits without thousands separators,
no spacing commands, no `\left` and `\right`, `$` only for dollars, words only in `\text{...}` or plain, `°`, `%`, `⟨`,
`⟩`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣ", "0123456789+-=()nix", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₓ", "0123456789+-=()nx", strict=True))
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")

_SYMBOLS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\uff0d", "-"),
    **dict.fromkeys("\u2062\u2061\u200b\u2060\ufeff", ""),
    **dict.fromkeys("\u00b7\u22c5\u2219\u2022", r"\cdot "),
    **dict.fromkeys("\u2264\u2a7d", r"\leq "),
    **dict.fromkeys("\u2265\u2a7e", r"\geq "),
    **dict.fromkeys("\u00ba\u02da", "°"),
    **dict.fromkeys("\u27e8\u2329", "⟨"),
    **dict.fromkeys("\u27e9\u232a", "⟩"),
    "×": r"\times ",
    "÷": r"\div ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≠": r"\neq ",
    "≈": r"\approx ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∖": r"\setminus ",
    "≡": r"\equiv ",
    "∣": "|",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "∠": r"\angle ",
    "∑": r"\sum ",
    "⁄": "/",
    "∕": "/",
    "∶": ":",
    "…": r"\ldots ",
    "⋯": r"\ldots ",
    "′": "'",
    "’": "'",
    "、": ",",
    "。": ".",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "∛": r"\cbrt ",
    "∜": r"\qrt ",
    "√": r"\sqrt ",
    "i\u0302": r"\mathbf{i}",
}
_GREEK = {
    name: chr(code)
    for code in (*range(0x3B1, 0x3CA), *range(0x391, 0x3AA))
    if code not in (0x3C2, 0x3A2)
    for name in (unicodedata.name(chr(code)).split()[-1].lower(),)
}

_DROPPED = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|displaystyle|textstyle|scriptstyle|limits|nolimits"
    r"|mathstrut|strut|large|Large|normalsize|bf|rm|it)(?![a-zA-Z])\.?"
)
_SPACES = re.compile(
    r"\\(?:quad|qquad|enspace|thinspace|medspace|thickspace|space|par|newline)(?![a-zA-Z])|(?<!\\)\\[,;:> ]|~"
)
_SPACED = re.compile(r"\\(?:hspace|vspace|phantom|hphantom|vphantom|tag|label|color|textcolor)\*?\{[^{}]*\}")
_THIN = re.compile(r"\\!|\{,\}|[\u2009\u202f\u00a0\u2007]")
_TEXT = re.compile(
    r"\\(?:text|mbox|hbox|textrm|textnormal|textbf|textit|textsf|texttt|textup|emph|mathrm|mathbf|mathit|mathsf|mathtt|mathnormal"
    r"|boldsymbol|bm|operatorname\*?|rm)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_RENAMED = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\dbinom": r"\binom",
    r"\tbinom": r"\binom",
    r"\bmod": r"\mod",
    r"\le": r"\leq",
    r"\leqslant": r"\leq",
    r"\leqq": r"\leq",
    r"\ge": r"\geq",
    r"\geqslant": r"\geq",
    r"\geqq": r"\geq",
    r"\lt": "<",
    r"\gt": ">",
    r"\ne": r"\neq",
    r"\not=": r"\neq",
    r"\dots": r"\ldots",
    r"\cdots": r"\ldots",
    r"\dotsc": r"\ldots",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\mid": "|",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\langle": "⟨",
    r"\rangle": "⟩",
    r"\varnothing": r"\emptyset",
    r"\degree": "°",
    r"\degrees": "°",
    r"\ast": r"\cdot",
    r"\star": r"\cdot",
    r"\centerdot": r"\cdot",
    r"\simeq": r"\approx",
    r"\thickapprox": r"\approx",
    r"\infin": r"\infty",
    r"\colon": ":",
    r"\backslash": r"\setminus",
    r"\smallsetminus": r"\setminus",
    r"\euro": "€",
    r"\pounds": "£",
    r"\cent": "¢",
    r"\textdollar": r"\$",
    r"\percent": r"\%",
    r"\varepsilon": r"\epsilon",
    r"\varphi": r"\phi",
    r"\vartheta": r"\theta",
    r"\land": r"\text{ and }",
    r"\lor": r"\text{ or }",
    r"\wedge": r"\text{ and }",
    r"\vee": r"\text{ or }",
    r"\implies": r"\Rightarrow",
    r"\R": r"\mathbb{R}",
    r"\Z": r"\mathbb{Z}",
    r"\arcsinh": r"\operatorname{arcsinh}",
    r"\lg": r"\log_{10}",
}
_COMMAND = re.compile(r"\\not=|\\[a-zA-Z]+")
FUNCTIONS = [
    "arcsin",
    "arccos",
    "arctan",
    "arccot",
    "sinh",
    "cosh",
    "tanh",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "exp",
    "max",
    "min",
    "gcd",
    "lcm",
    "det",
    "arg",
    "deg",
    "lim",
    "floor",
    "ceil",
    "abs",
    "sqrt",
    "cbrt",
    "pi",
    "infinity",
    "infty",
    "inf",
    "theta",
    "alpha",
    "beta",
    "gamma",
    "lambda",
    "mu",
    "sigma",
    "omega",
    "phi",
    "frac",
]
_PLAIN_FUNCTION = re.compile(
    r"(?<![\\a-zA-Z])(?:(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp)(?![a-zA-Z])"
    r"|(sqrt|cbrt)(?=\s*[({\d])|(pi)(?![a-zA-Z])|(infinity|infty|inf|oo)(?![a-zA-Z])|(theta|alpha|beta|lambda)(?![a-zA-Z]))"
)


def normalize(text: str) -> str:
    """Rewrite `text` in the LaTeX dialect that the module's docstring describes."""
    text = _unicode(text)
    text = _latex(text)
    text = _numbers(text)
    return re.sub(r"\s+", " ", text).strip(" ")


def _unicode(text: str) -> str:
    text = re.sub(
        r"(\d?)([\u00bc-\u00be\u2150-\u215e\u2189])",
        lambda match: f"{match[1]}{' ' if match[1] else ''}{_vulgar(match[2])}",
        text,
    )
    text = _RAISED.sub(lambda match: "^{" + "".join(_SUPERSCRIPTS[one] for one in match.group()) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + "".join(_SUBSCRIPTS[one] for one in match.group()) + "}", text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?|[a-zA-Zπ])", r"\\sqrt{\1}", text)
    text = re.sub(r"∛\s*(\d+|[a-zA-Z])", r"\\sqrt[3]{\1}", text)
    text = re.sub(r"∜\s*(\d+|[a-zA-Z])", r"\\sqrt[4]{\1}", text)
    text = "".join(_SYMBOLS.get(one, one) for one in text)
    text = _THIN.sub("\x02", text)  # a thin space as thousands separator
    return unicodedata.normalize("NFKC", text)


def _vulgar(one: str) -> str:
    above, _, below = unicodedata.normalize("NFKC", one).partition("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _latex(text: str) -> str:
    text = re.sub(r"\\boxed\s*(?=\{)", "", text)
    text = _DROPPED.sub(" ", text)
    text = _COMMAND.sub(lambda match: _RENAMED.get(match.group(), match.group()), text)
    text = re.sub(r"(\d)\s*\\[, ]\s*(?=\d{3}(?!\d))", "\\1\x02", text)
    text = _SPACED.sub(" ", _SPACES.sub(" ", text))
    text = re.sub(r"\\\\(?=\s*$)", "", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\^\s*\{?°\}?|\\circ(?![a-zA-Z])", "°", text)
    text = re.sub(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime)", "'", text)
    text = _dollars(text).replace(r"\%", "%").replace(r"\&", "&").replace(r"\#", "#").replace(r"\_", "_")
    text = re.sub(r"\\\(|\\\)|\\\[|\\\]", " ", text)
    text = re.sub("|".join(f"[{letter}]" for letter in _GREEK.values()), lambda match: _greek(match.group()), text)
    for _ in range(3):  # LaTeX text commands may be nested
        text = _TEXT.sub(_as_text, text)
    text = re.sub(r"\*\*(?=[\w({\\-])(?<=[\w)}]\*\*)", "^", text)
    text = _PLAIN_FUNCTION.sub(_function, text)
    text = re.sub(r"(?<![\\a-zA-Z])lg(?![a-zA-Z])", r"\\log_{10} ", text)
    text = re.sub(r"\\(?:underline|uline)\s*\{([^{}]*)\}|\\overline\s*\{([A-Z]{2})\}", r" \1\2 ", text)
    text = re.sub(r"\^\s*\{?\s*“o”\s*\}?", "°", text)
    text = re.sub(r"\\cbrt\s*\{", r"\\sqrt[3]{", text)
    text = _parenthesised(text, r"\\sqrt\s*\(", r"\sqrt{")
    text = _parenthesised(text, r"\\cbrt\s*\(", r"\sqrt[3]{")
    text = _parenthesised(text, r"\^\s*\(", "^{")
    text = re.sub(r"\\sqrt\s*(\[[^\[\]]*\])?\s*([\da-zA-Z]|\\[a-zA-Z]+)", r"\\sqrt\1{\2}", text)
    one = r"([\da-zA-Z]|\\[a-zA-Z]+(?!\s*[{\[a-zA-Z]))"
    text = re.sub(rf"\\(frac|binom)\s*{one}\s*{one}", r"\\\1{\2}{\3}", text)
    text = re.sub(rf"\\(frac|binom)\s*{one}\s*\{{", r"\\\1{\2}{", text)
    text = re.sub(r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(
        r"(?:\{\})?_\{?(\d+)\}?C_\{?(\d+)\}?|(?<![a-zA-Z\\])C\((\d+),\s*(\d+)\)", r"\\binom{\1\3}{\2\4}", text
    )
    text = re.sub(r"\\(?:vec|hat|overrightarrow)\s*\{?([a-zA-Z])\}?", r" \1 ", text)
    text = re.sub(r"(\\(?:frac|binom)\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*([\da-zA-Z])", r"\1{\2}", text)
    text = re.sub(r"\^\s*([-+]?\s*\d+(?:\.\d+)?)(?!\d)", r"^{\1}", text)
    text = re.sub(r"\^\s*(-?)\s*([a-zA-Z]|\\[a-zA-Z]+)(?![\d{])", r"^{\1\2}", text)
    return re.sub(r"_\s*(\d+|[a-zA-Z])", r"_{\1}", text).replace("*", r"\cdot ")


def _greek(letter: str) -> str:
    name = next(name for name, one in _GREEK.items() if one == letter or one == letter.lower())
    return f"\\{name if letter == letter.lower() else name.capitalize()} "


def _function(match: re.Match[str]) -> str:
    name = match.group()
    return "\\infty " if match[4] else f"\\{name} "


def _as_text(match: re.Match[str]) -> str:
    """Replace a LaTeX text command: words become “words”; a single letter, a number or a formula is unwrapped."""
    inner = match[1].replace("\x02", " ").replace("\\", " ")
    command = match.group().lstrip("\\")
    upright = command.startswith(("math", "bold", "bm", "rm", "operatorname"))
    if upright and inner.strip() in FUNCTIONS:
        return f"\\{inner.strip()} "
    if not re.search(r"[^\W\d_]", inner) or (upright and re.fullmatch(r"\s*[a-zA-Z]\s*", inner)):
        return f" {inner} "
    return f" “{inner.strip()}” "


def _dollars(text: str) -> str:
    """Remove math delimiters, but keep `$` as a currency sign."""
    text = text.replace(r"\$", "\x01")
    marks = text.count("$")
    if marks % 2 == 0 or text.startswith("$$"):
        text = text.replace("$", " ")
    return text.replace("\x01", "$")


def _parenthesised(text: str, begin: str, brace: str) -> str:
    """Replace the parentheses after the pattern `begin`, which ends with `(`, by braces; `brace` replaces the match."""
    place = 0
    pattern = re.compile(begin)
    while (match := pattern.search(text, place)) is not None:
        end = closing(text, match.end() - 1)
        if end is None:
            return text
        text = f"{text[: match.start()]}{brace}{text[match.end() : end]}}}{text[end + 1 :]}"
        place = match.start() + len(brace)
    return text


def closing(text: str, place: int) -> int | None:
    """Position of the bracket that closes the one at `place`, or None. Interval brackets may be mixed: `(1,2]`."""
    depth = 0
    for index in range(place, len(text)):
        if text[index] in "([{⟨":
            depth += 1
        elif text[index] in ")]}⟩":
            depth -= 1
            if depth == 0:
                return index
    return None


def _numbers(text: str) -> str:
    """Remove thousands separators; write out exponents and repeating decimals."""
    text = re.sub(r"(?<=\d),\x02(?=\d{3}(?!\d))", "\x02", text)
    text = re.sub(r"(?<=\d)\x02(?=\d{3}(?!\d))", "", text).replace("\x02", " ")
    text = re.sub(
        r"(?<![\d,.])(\d{1,3}(?:\.\d{3})+),(\d+)(?![\d,])", lambda m: m[1].replace(".", "") + "." + m[2], text
    )
    inner = re.search(r"\d,\s+[-\d\\]", text) or re.match(r"\s*(?:\(|\[|\\\{|⟨).*,.*(?:\)|\]|\\\}|⟩)\s*$", text)
    pattern = r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)"
    if inner is None or ", " in text:
        text = re.sub(pattern, lambda match: match.group().replace(",", ""), text)
    text = re.sub(r"(?<![\d.])\d{1,3}(?:['’]\d{3})+(?!\d)", lambda match: re.sub("['’]", "", match.group()), text)
    text = re.sub(r"(?<![\d.\w}])\d{1,3}(?: \d{3})+(?![\d/])", lambda match: match.group().replace(" ", ""), text)
    text = re.sub(r"(\d*)\.(\d*)\s*(?:\\overline|\\bar|\\dot)\s*\{?(\d+)\}?(?:(\d*)\\dot\{?(\d)\}?)?", _repeating, text)
    text = re.sub(r"(\d+)\.(\d*)\((\d+)\)(?!\S*=)", lambda match: _fraction(match[1], match[2], match[3]), text)
    for repeated in (r"(\d)\3{2,}", r"(\d{2,}?)\3+"):
        text = re.sub(rf"(?<!\d)(\d+)\.(\d*?){repeated}\d{{0,3}}(?:\.\.\.|\s*\\ldots)", _evident, text)
    text = re.sub(r"(\d)(?:\.\.\.|\s*\\ldots)\s*$", r"\1", text)
    return re.sub(
        r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,4})(?![\w.])",
        lambda m: rf"{m[1]}\times 10^{{{int(m[2])}}}",
        text,
    )


def _repeating(match: re.Match[str]) -> str:
    period = match[3] + (match[4] or "") + (match[5] or "")
    return _fraction(match[1], match[2], period)


def _evident(match: re.Match[str]) -> str:
    return _fraction(match[1], match[2], match[3])


def _fraction(whole: str, decimals: str, period: str) -> str:
    """The fraction for `whole.decimals` followed by the repeating `period`. `whole`: the digits before the point."""
    below = (10 ** len(period) - 1) * 10 ** len(decimals)
    above = int(whole + decimals + period) - int(whole + decimals or "0")
    return rf"\frac{{{above}}}{{{below}}}"


_F = Fraction
_LENGTH, _MASS, _TIME, _MONEY, _ANGLE, _VOLUME = "length", "mass", "time", "dollars", "angle", "volume"

_TABLE: dict[str, tuple[str, Fraction]] = {
    name: (dimension, factor)
    for names, dimension, factor in (
        ("nm nanometer nanometre", _LENGTH, _F(1, 10**9)),
        ("micrometer micrometre micron", _LENGTH, _F(1, 10**6)),
        ("mm millimeter millimetre", _LENGTH, _F(1, 1000)),
        ("cm centimeter centimetre", _LENGTH, _F(1, 100)),
        ("dm decimeter decimetre", _LENGTH, _F(1, 10)),
        ("m meter metre", _LENGTH, _F(1)),
        ("km kilometer kilometre", _LENGTH, _F(1000)),
        ("in inch inches", _LENGTH, _F(254, 10000)),
        ("ft foot feet", _LENGTH, _F(3048, 10000)),
        ("yd yard", _LENGTH, _F(9144, 10000)),
        ("mi mile", _LENGTH, _F(1609344, 1000)),
        ("mg milligram", _MASS, _F(1, 10**6)),
        ("g gram gm", _MASS, _F(1, 1000)),
        ("kg kilogram", _MASS, _F(1)),
        ("oz ounce", _MASS, _F(45359237, 16 * 10**8)),
        ("lb lbs pound £ gbp", _MASS, _F(45359237, 10**8)),  # "pound" is both money and mass
        ("ton tonne", _MASS, _F(1000)),
        ("ms millisecond", _TIME, _F(1, 1000)),
        ("s sec second", _TIME, _F(1)),
        ("min minute", _TIME, _F(60)),
        ("h hr hour", _TIME, _F(3600)),
        ("day", _TIME, _F(86400)),
        ("week", _TIME, _F(7 * 86400)),
        ("month", "months", _F(1)),
        ("yr year", "months", _F(12)),
        ("$ dollar usd us$ buck", _MONEY, _F(1)),
        ("¢ cent", _MONEY, _F(1, 100)),
        ("€ euro eur", "euros", _F(1)),
        ("¥ yen yuan rmb cny jpy", "yen", _F(1)),
        ("₹ rs rs. rupee inr", "rupees", _F(1)),
        ("ml milliliter millilitre", _VOLUME, _F(1, 1000)),
        ("l liter litre", _VOLUME, _F(1)),
        ("cup", "cups", _F(1)),
        ("pint", "cups", _F(2)),
        ("quart", "cups", _F(4)),
        ("gallon gal", "cups", _F(16)),
        ("rad radian", _ANGLE, _F(1)),
        ("hz hertz", "hertz", _F(1)),
        ("khz kilohertz", "hertz", _F(1000)),
        ("n newton", "newtons", _F(1)),
        ("j joule", "joules", _F(1)),
        ("kj kilojoule", "joules", _F(1000)),
        ("w watt", "watts", _F(1)),
        ("kw kilowatt", "watts", _F(1000)),
        ("v volt", "volts", _F(1)),
        ("ohm", "ohms", _F(1)),
        ("pa pascal", "pascals", _F(1)),
        ("mol mole", "moles", _F(1)),
        ("mph", "miles per hour", _F(1)),
    )
    for name in names.split()
}
UNIT_WORDS = "|".join(
    sorted((f"{re.escape(name)}s?" for name in _TABLE if name.isalpha() and name != "in"), reverse=True)
)
"""Regular expression for the unit after a number in prose."""

_SYMBOLS_OF_MONEY = "$€£¥₹"
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3}
_NO_UNIT = frozenset(["units", "unit", "of", "a", "an", "the", "about", "approximately", "exactly"])
NUMBER_WORDS = dict(
    zip(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
        range(13),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of measurement. `powers`: exponent of each dimension, such as length 2; `factor`: its size in base units."""

    powers: tuple[tuple[str, int], ...]
    factor: Fraction


@dataclass(frozen=True, slots=True)
class Measured:
    """A text split into number and unit.

    `scale`: factor of a word such as "million". `unit`: None without a unit, or for a counted noun such as apples.
    """

    number: str
    scale: int
    unit: Unit | None


_BEHIND = re.compile(
    r"^(?P<number>.*[\d)}!|°%a-zA-Z])\s*(?P<unit>(?:\s*“[^”]*”\s*(?:\^\{-?\d\})?\s*(?:/|\\cdot)?\s*)+)(?P<after>(?:[a-zA-Z]+(?:\^\{\d\})?)?)$"
)
_PLAIN = re.compile(
    r"^(?P<number>.*?(?:[\d)}!|]|\\pi ))\s?(?P<unit>(?<![a-zA-Z\\])[a-zA-Z$€£¥¢₹][a-zA-Z.$]*(?:\^\{\d\})?(?:(?:\s+|\s*/\s*|-)[a-zA-Z]+(?:\^\{\d\})?)*\.?)$"
)
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?)\s*“?\s*([a-zA-Z]+)\s*”?\s*(?:,|“?and”?)?\s*")


def take_unit(text: str) -> Measured:
    """Split a normalized text into number and unit. A text without a unit is returned unchanged."""
    money = re.match(
        rf"^([-+]?)\s*(?:US|USD|Rs\.?|“\s*(?:US|USD|Rs\.?)\s*”)?\s*([{_SYMBOLS_OF_MONEY}]|USD|EUR|Rs\.?)\s*([-+]?.*\d.*)$",
        text,
    )
    if money is not None:
        rest = take_unit(re.sub(r"\s*/\s*[a-zA-Z]+$", "", money[3]))
        unit = rest.unit if rest.unit is not None and not rest.unit.powers else _unit([(money[2].lower(), 1)])
        return Measured(f"{money[1]}{rest.number}", rest.scale, unit)
    match = _BEHIND.match(text) or _PLAIN.match(text)
    if match is None:
        return Measured(text, 1, None)
    after = match.groupdict().get("after") or ""
    words = re.sub(r"[“”]", " ", match["unit"]) + after
    plain = "“" not in match["unit"]
    if plain and not _is_plain_unit(words):
        return Measured(text, 1, None)
    scale, unit = _parse(words)
    if scale == 1 and unit is None and not re.search(r"\d", match["number"]):
        return Measured(text, 1, None)  # `x is even`
    return Measured(match["number"].strip(), scale, unit)


def unit_of(name: str) -> Unit | None:
    """The unit that a letter or word names, or None."""
    return _unit([(_singular(name.lower()), 1)])


def compound(text: str) -> tuple[Fraction, Unit] | None:
    """Sum of a text such as `2 hours 30 minutes` or `5 ft 6 in`, in base units; None for other texts."""
    parts = _COMPOUND.findall(text)
    if len(parts) < 2 or _COMPOUND.sub("", text).strip(" ”“."):
        return None
    total, dimension = _F(0), ""
    for number, word in parts:
        known = _TABLE.get(_singular(word.lower()))
        if known is None or (dimension and known[0] != dimension):
            return None
        total, dimension = total + _F(number) * known[1], known[0]
    return total, Unit(((dimension, 1),), _F(1))


def _is_plain_unit(words: str) -> bool:
    """Whether words not marked as text are a unit instead of variables: `5 cm`, but not `5m` or `2xy`."""
    names = re.findall(r"[a-zA-Z$€£¥¢₹]+", words)
    if not names or names[0].lower() in ("and", "or", "base", "mod", "if", "when", "where", "for", "with"):
        return False
    if any(one in "$€£¥¢₹" for one in names[0]):
        return True
    known = [_singular(name.lower()) in _TABLE or name.lower() in SCALES for name in names]
    if len(names) > 1 and re.search(r"/|\^\{-", words) and all(known):
        return True
    return len(names[0]) > 1 and (known[0] or all(len(name) > 3 for name in names[:1]))


def _parse(words: str) -> tuple[int, Unit | None]:
    found: list[tuple[str, int]] = []
    scale, sign, power = 1, 1, 1
    for name, exponent, slash in re.findall(r"([a-zA-Z$€£¥¢₹.]+)\s*(?:\^\{(-?\d)\})?|(/)", words):
        word = name.lower().rstrip(".")
        if slash or word == "per":
            sign = -1
        elif word in SCALES:
            scale *= SCALES[word]
        elif word in _POWERS:
            power = _POWERS[word]
        elif word == "squared" or word == "cubed":
            found[-1:] = [(one, n * (2 if word == "squared" else 3)) for one, n in found[-1:]]
        elif word and word not in _NO_UNIT:
            found.append((_singular(word), sign * power * int(exponent or 1)))
            power = 1
    return scale, _unit(found)


def _unit(parts: list[tuple[str, int]]) -> Unit | None:
    """Product of the known units; counted nouns such as apples are not units."""
    powers: dict[str, int] = {}
    factor = _F(1)
    for name, power in parts:
        if name in _TABLE:
            dimension, size = _TABLE[name]
            if dimension == _VOLUME:
                dimension, size, power = _LENGTH, size / 1000, 3 * power
            elif name == "mph":
                powers[_LENGTH], powers[_TIME], factor = 1, -1, factor * _F(1609344, 1000 * 3600)
                continue
            powers[dimension] = powers.get(dimension, 0) + power
            factor *= size ** (power // 3 if _TABLE[name][0] == _VOLUME else power)
    known = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Unit(known, factor) if known else None


def _singular(word: str) -> str:
    if word in _TABLE or not word.endswith("s"):
        return word
    return word[:-2] if word[:-2] in _TABLE and word.endswith("es") else word[:-1]
