"""Check that a test runs each command of the documents, or that `commands.toml` says why none does.

Each command and each Python block of `documents.typed_in` has one owner. By default that is `DEFAULT`, a test that runs every page.
`commands.toml` names other tests (`[[run]]`) and reasons (`[[not_run]]`). A named test takes its commands from
`documented.commands_run_by`, with its own name as the argument, and must run all of them; this checker looks for that call.

Found as well: a block in which a command could hide, and a `make` target, a module or a file that a command names and that does
not exist. `check_docs` parses the `gcore` commands themselves.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run import MODULES
from tools.documents import Typed, documents, typed_in
from tools.problem import Problem, line_of, main, nodes, parsed, relative

TABLE = "tools/commands.toml"
DEFAULT = "integration/cli/test_documented_commands.py"
HELPER = "commands_run_by"
LANGUAGES = ("console", "json", "promql", "python", "text", "toml", "yaml")
"""Of fenced blocks. Commands are in blocks of `console` and `python` only."""
LEAST = 20
"""Characters of a reason."""
FENCE = re.compile(r"^ *```(\S*) *$")
PROGRAM = re.compile(r"(\$ |(gcore|gcorectl|make|pip|docker|kubectl|systemctl|etcdctl|python3?) (-|[a-z])[^:=]*$)")
MAKE = re.compile(r"`make ([a-z][\w-]*)[^`]*`")
TARGET = re.compile(r"^([a-z][\w %-]*):(?!=)", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One table of `commands.toml`. `page`: empty for all; `lines`: empty for all commands of the page that no reason names."""

    page: str
    lines: tuple[str, ...]
    test: str = ""
    why: str = ""

    def names(self, typed: Typed) -> bool:
        """Whether it names the command. A line that ends with ` ...` names every command that begins so."""
        if self.page not in ("", typed.page):
            return False
        return not self.lines or any(_is_named(line, typed) for line in self.lines)


def _is_named(line: str, typed: Typed) -> bool:
    if line.endswith(" ..."):
        return typed.first.startswith(line.removesuffix("..."))
    return line in typed.names


def read_table(root: Path) -> list[Entry]:
    """Of `commands.toml`. Raises KeyError for an entry without what it needs."""
    tree: dict[str, list[dict[str, Any]]] = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))
    rows = [Entry(row.get("page", ""), tuple(row["lines"]), why=row["why"]) for row in tree.get("not_run", [])]
    return rows + [Entry(row["page"], tuple(row.get("lines", ())), test=row["test"]) for row in tree.get("run", [])]


def owners(typed: Typed, table: list[Entry]) -> list[Entry]:
    """The entries that name a command; none if it is the default test's. A test without lines owns what no other entry names."""
    found = [entry for entry in table if entry.lines and entry.names(typed)]
    return found or [entry for entry in table if not entry.lines and entry.names(typed)]


def commands_of_test(root: Path, test: str) -> list[Typed]:
    """What a test must run, in the order of the pages."""
    table = read_table(root)
    found = []
    for typed in typed_in(root):
        entries = owners(typed, table)
        if [entry.test for entry in entries] == [test] or (not entries and test == DEFAULT):
            found.append(typed)
    return found


def check(root: Path) -> Iterator[Problem]:
    yield from table_is_right(root)
    for file in documents(root):
        yield from blocks_are_named(file, root)
        yield from targets_exist(file, root)
    yield from programs_exist(root)


def table_is_right(root: Path) -> Iterator[Problem]:
    text = (root / TABLE).read_text(encoding="utf-8")
    table, all_typed = read_table(root), typed_in(root)
    for typed in all_typed:
        entries = owners(typed, table)
        if len(entries) > 1:
            what = " and ".join(entry.test or f"{entry.why!r}" for entry in entries)
            yield Problem(typed.page, typed.line, f"{typed.first}: {TABLE} names it twice, {what}: remove one")
    for entry in table:
        for line in entry.lines:
            if not any(entry.page in ("", typed.page) and _is_named(line, typed) for typed in all_typed):
                where = entry.page or "any page"
                yield Problem(TABLE, line_of(text, line), f"there is no command {line!r} on {where}: remove the line")
        if not entry.lines and not any(typed.page == entry.page for typed in all_typed):
            yield Problem(TABLE, line_of(text, entry.page), f"{entry.page} has no command: remove the entry")
        if not entry.test and len(entry.why.strip()) < LEAST:
            place = line_of(text, entry.lines[0])
            yield Problem(TABLE, place, f"the reason {entry.why!r} says too little: write one sentence")
    for test in sorted({DEFAULT, *(entry.test for entry in table if entry.test)}):
        if problem := _fault_of_test(root, test):
            yield Problem(TABLE, line_of(text, test), problem)


def _fault_of_test(root: Path, test: str) -> str | None:
    """Why the test does not run its commands, or None."""
    path, _, function = test.partition("::")
    file = root / "tests" / path
    if not file.exists():
        return f"there is no file tests/{path}: name a test that exists"
    tree = parsed(file.read_text(encoding="utf-8"))
    scope: ast.AST = tree
    if function:
        named = [n for n in nodes(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == function]
        if not named:
            return f"tests/{path} has no test {function}: name one that exists"
        scope = named[0]
    strings = {node.value: name for name, node in _constants(tree)}
    for call in ast.walk(scope):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == HELPER and call.args:
            match call.args[0]:
                case ast.Constant(value=value) if value == test:
                    return None
                case ast.Name(id=name) if strings.get(test) == name:
                    return None
    return f"tests/{test} does not call {HELPER}({test!r}): let it take its commands from there"


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.Constant]]:
    """The constants of a module, by name."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            yield node.targets[0].id, node.value


def blocks_are_named(file: Path, root: Path) -> Iterator[Problem]:
    """Each fenced block has a language; only blocks of `console` hold commands, each behind `$ `."""
    language = None
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if fence and language is None:
            language, first = fence[1], True
            if language not in LANGUAGES:
                message = f"a block of the language {language!r}: write one of {', '.join(LANGUAGES)}"
                yield Problem(relative(file, root), number, message)
            continue
        if fence:
            language = None
        elif language == "console" and first and not line.startswith("$ "):
            yield Problem(
                relative(file, root), number, f"a console block begins with {line!r}: write `$ ` before commands"
            )
        elif language not in (None, "console", "python") and PROGRAM.match(line):
            yield Problem(
                relative(file, root), number, f"a command in a block of {language}: {line}: make it a console block"
            )
        first = False


def targets_exist(file: Path, root: Path) -> Iterator[Problem]:
    """Each target in a `make TARGET` of running text is in the Makefile."""
    text = file.read_text(encoding="utf-8")
    for match in MAKE.finditer(text):
        if not _is_target(match[1], root):
            line = text.count("\n", 0, match.start()) + 1
            yield Problem(relative(file, root), line, f"the Makefile has no target {match[1]}: write one that exists")


def _is_target(name: str, root: Path) -> bool:
    rules = TARGET.findall((root / "Makefile").read_text(encoding="utf-8"))
    if name in {word for rule in rules for word in rule.split()}:
        return True
    kind, _, subject = name.partition("-")
    if kind == "bench":
        return subject in MODULES or subject == "NAME"
    return kind == "test" and (
        subject == "SUBJECT" or any((root / "tests" / folder / subject).is_dir() for folder in ("unit", "contract"))
    )


def programs_exist(root: Path) -> Iterator[Problem]:
    """Each target, module and file of the repository that a console command starts is there."""
    for typed in typed_in(root):
        if typed.kind != "console":
            continue
        for part in re.split(r"&&|\|", typed.first):
            match shlex.split(part.rstrip("\\")):
                case ["make", target, *_] if not _is_target(target, root):
                    yield Problem(typed.page, typed.line, f"the Makefile has no target {target}: write one that exists")
                case ["python" | "python3", "-m", module, *_] if module.split(".")[0] in (
                    "tools",
                    "benchmarks",
                    "deploy",
                ):
                    folder = root.joinpath(*module.split("."))
                    if not folder.is_dir() and not folder.with_suffix(".py").exists():
                        yield Problem(typed.page, typed.line, f"there is no module {module}: write one that exists")
                case ["python" | "python3", file, *_] if (
                    file.endswith(".py") and "/" in file and not (root / file).exists()
                ):
                    yield Problem(typed.page, typed.line, f"there is no file {file}: write one that exists")


if __name__ == "__main__":
    sys.exit(main({"commands": check}, __doc__))
