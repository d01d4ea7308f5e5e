"""Check the form of the texts that people read: guides, docstrings, error messages and names of tests.

The checker is proselint with a selection of its checks and with rules of ours (STYLE of the project: subject, verb, object; one idea a sentence). A text
is a paragraph, list item or table cell of a page, a docstring, or the message of an error. A test's name is a sentence about behaviour: it has a
subject, and none of the project's private words. `ALLOWED` has the number of findings that each
area may still have; it may only go down, so `python -m tools.check_prose` prints the present numbers.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tools.documents import documents
from tools.problem import PRODUCT, ROOT, Problem, nodes, relative, sources

PROSELINT = (
    "archaism",
    "cliches",
    "industrial_language",
    "lexical_illusions",
    "malapropisms",
    "mixed_metaphors",
    "nonwords",
    "redundancy",
)
"""Groups of proselint's own checks."""

NOT_MEANT = re.compile(r"and etcd|x X|STEPS steps")
"""Matches of proselint that are no mistakes: "and etc", a repeated word in sizes such as 2 x `n`, and a constant before its noun."""

CHECKED = (*PRODUCT, "benchmarks", "deploy", "examples", "tests", "tools")
"""Folders of Python files."""

RECORDED = "tests/golden/"
"""Recorded outputs of earlier versions, which never change."""

LONGEST_SENTENCE = 45
"""Words."""

ALLOWED: dict[str, int] = {
    "tests/contract": 34,
    "tests/gpu": 2,
    "tests/integration": 91,
    "tests/sim": 4,
    "tests/unit": 462,
}
"""Findings that an area may have: the first two parts of the path. Absent: none."""

SENTENCE = re.compile(r"[^.!?]+[.!?]?(?=\s|$)", re.DOTALL)
PATTERNS: dict[str, tuple[str, str]] = {
    "subject_clause": (
        r"(?:(?<=^)|(?<=[.!?] ))(?:Whoever|Whatever|Whose|What(?= \w+(?: \w+){0,4} (?:is|are|was|were|has|have|can|may|does)\b)|Who)\b(?=[^.!?]*(?:[.!]|$))",
        "a relative clause is the subject: name the actor",
    ),
    "private_word": (
        r"\b(?:nobody|whoever|anew|forgone|heard of|is told|are told|was told|were told|made-up|put back|gone on with|go on with it|is had|"
        r"lies there|stands still|is not had|the books)\b",
        "a word that the project uses in a sense of its own: use the field's",
    ),
    "semicolons": (
        r"(?:(?<=^)|(?<=[.!?] ))[^.!?;:]+;[^.!?;:]+;[^.!?]*",
        "a sentence with two semicolons, and no list behind a colon: make two sentences",
    ),
}

RIDDLE = re.compile(
    r"test_(?:what|whatever|who|whoever|whom|whose|nobody|however|whichever|that|one_that|one_who|one_whose)(?:_|$)"
)
"""Names of tests that begin with a relative clause or a negation instead of a subject."""

PRIVATE_IN_NAME = re.compile(
    r"_(?:nobody|whoever|whatever|told|tells|heard|hears|anew|lies|stands|is_had|goes_on|gone_on)(?:_|$)"
)

Text = tuple[str, int, str]
"""Path, line, and the text without markup."""


def check(root: Path) -> Iterator[Problem]:
    """Each finding of an area that has more than it may have, and each area that has less: lower its number then."""
    found: dict[str, list[Problem]] = {}
    for path, line, message in all_findings(root):
        found.setdefault(area_of(path), []).append(Problem(path, line, message))
    for area in sorted({*found, *ALLOWED}):
        problems, allowed = found.get(area, []), ALLOWED.get(area, 0)
        if len(problems) > allowed:
            yield from problems
            yield Problem(area, 1, f"{len(problems)} findings, and {allowed} are allowed: rewrite these sentences")
        elif len(problems) < allowed:
            yield Problem(
                "tools/check_prose.py", 1, f"{area} has {len(problems)} findings: lower its number ({allowed})"
            )


def all_findings(root: Path) -> Iterator[tuple[str, int, str]]:
    """(path, line, message) of each finding in texts and in names of tests."""
    for path, line, text in texts(root):
        yield from ((path, line, f"{message}: {part!r}") for message, part in findings(text))
    for path, _, tree in sources(root, ("tests",)):
        if not path.startswith(RECORDED):
            yield from ((path, line, message) for line, message in findings_in_names(tree))


def findings_in_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The names of test functions without a subject, or with a word that the project uses in a sense of its own."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if RIDDLE.match(node.name):
                yield node.lineno, f"a test's name without a subject: say what does what: {node.name!r}"
            elif node.name.startswith("test_") and PRIVATE_IN_NAME.search(node.name):
                yield node.lineno, f"a test's name has {PATTERNS['private_word'][1]}: {node.name!r}"


def area_of(path: str) -> str:
    """The part of the repository that has a number of its own."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 1 else path


def texts(root: Path) -> Iterator[Text]:
    """All texts that are checked."""
    for file in documents(root):
        path = relative(file, root)
        if (
            not path.startswith("docs/reference/") and "status.md" not in path
        ):  # mostly generated from texts that are checked
            yield from ((path, line, text) for line, text in texts_of_page(file.read_text(encoding="utf-8")))
    for path, _, tree in sources(root, CHECKED):
        if not path.startswith(RECORDED):
            yield from ((path, line, text) for line, text in texts_of_module(tree))


def texts_of_page(page: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, list items and table cells of a Markdown page, without code and texts that are made from results.

    A cell is often a list, whose items have semicolons between them: they come with commas.
    """
    page = re.sub(
        r"^```.*?^```$|<!-- ([\w-]+) -->.*?<!-- /\1 -->|<!--.*?-->",
        lambda block: "\n" * block[0].count("\n"),
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    paragraph: list[str] = []
    first = 1
    for number, line in enumerate([*page.splitlines(), ""], 1):
        is_cells, is_heading = line.startswith("|"), line.startswith("#")
        if not line.strip() or is_cells or is_heading or re.match(r"\s*(?:[-*]|\d+\.) ", line):
            if paragraph:
                yield first, plain(" ".join(paragraph))
            paragraph = []
            if is_cells:
                yield from ((number, plain(cell).replace(";", ",")) for cell in re.split(r"(?<!\\)\|", line)[1:-1])
                continue
            if is_heading:
                continue
        if line.strip():
            first = number if not paragraph else first
            paragraph.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", line.strip()))


def texts_of_module(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, texts behind an attribute, and messages of errors."""
    for node in nodes(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
                    if not re.search(r"^ {4,}\S", paragraph, re.MULTILINE):  # an indented example
                        yield node.lineno, plain(" ".join(paragraph.split()))
            case ast.Raise(exc=ast.Call(args=[first, *_], keywords=more)):
                for part in (first, *(keyword.value for keyword in more if keyword.arg == "fix")):
                    if (message := _message(part)) is not None:
                        yield node.lineno, plain(message)


def _message(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"X{number}"
                for number, part in enumerate(values)
            )
        case _:
            return None


def plain(text: str) -> str:
    """Without code, links and emphasis."""
    numbers = itertools.count(1)
    text = re.sub(r"`[^`]*`", lambda _: f"X{next(numbers)}", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("**", "").strip()


@cache
def checks() -> list[Any]:
    """proselint's checks and ours."""
    from proselint.checks import __register__ as registered
    from proselint.registry import CheckRegistry

    registry = CheckRegistry()
    registry.register_many((*registered, *_own_checks()))
    found: list[Any] = registry.get_all_enabled({**dict.fromkeys(PROSELINT, True), "gcore": True})
    return found


def _own_checks() -> list[Any]:
    from proselint.registry.checks import Check, CheckResult

    def by_pattern(pattern: re.Pattern[str]) -> Callable[[str, Any], Iterator[Any]]:
        return lambda text, check: (
            CheckResult(check.path, check.message, match.span(), None) for match in pattern.finditer(text)
        )

    def long_sentences(text: str, check: Any) -> Iterator[Any]:
        for match in SENTENCE.finditer(text):
            if len(match[0].split()) > LONGEST_SENTENCE:
                yield CheckResult(check.path, check.message, match.span(), None)

    made = [
        Check(check_type=by_pattern(re.compile(pattern)), path=f"gcore.{name}", message=message)
        for name, (pattern, message) in PATTERNS.items()
    ]
    long = f"a sentence of more than {LONGEST_SENTENCE} words: make two"
    return [*made, Check(check_type=long_sentences, path="gcore.long_sentence", message=long)]


def findings(text: str) -> Iterator[tuple[str, str]]:
    """What is wrong with a text, and where: the rule's message and the part of the text."""
    for one in checks():
        for result in one.check_with_flags(text):
            start, end = result.span
            part = text[max(start, 0) : end].strip()
            if not NOT_MEANT.fullmatch(part):
                yield result.message, part[:80]


def main() -> int:
    """Print the number of findings of each area; the exit code."""
    counts = Counter(area_of(path) for path, _, _ in all_findings(ROOT))
    for area, count in sorted(counts.items()):
        print(f'    "{area}": {count},')
    print(f"{counts.total()} findings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
