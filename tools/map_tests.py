"""Map every test function of an earlier commit to what became of it: `docs/develop/adr/moved-tests.tsv`.

    python -m tools.map_tests            # check the table; exit 1 if a test of the earlier commit has no place
    python -m tools.map_tests --write    # find the tests that were kept or moved, and write the table again

A row is `old`, `what`, `where`. `kept` and `moved` are found: by the name of the function, else by what its body says.
`merged-into`, `checker` and `deleted` are written by hand and stay as they are. A row `FILE::*` holds for each function of
the file that has no row of its own and has the same name in the file that it names.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from tools.problem import ROOT

BASE = "f9caf92"
TABLE = "docs/develop/adr/moved-tests.tsv"
FOUND, WRITTEN = ("kept", "moved"), ("merged-into", "checker", "deleted")
ALIKE = 0.6
"""The least part of two bodies that agrees where a test was renamed."""


@dataclass
class Suite:
    """The test functions of a tree: `FILE::Class::function` to its source."""

    sources: dict[str, str] = field(default_factory=dict)
    by_name: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Iterable[tuple[str, str]]) -> Suite:
        found = cls()
        for file, text in files:
            for name, source in functions(text):
                found.sources[f"{file}::{name}"] = source
                found.by_name.setdefault(name.rpartition("::")[2], []).append(f"{file}::{name}")
        return found


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Each test function of a module and of its classes, with what it does."""
    for node in ast.parse(text).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for one in inner:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test"):
                yield prefix + one.name, "\n".join(ast.unparse(part) for part in one.body)


def at_commit(commit: str) -> Suite:
    """The tests of a commit."""
    names = git("ls-tree", "-r", "--name-only", commit, "tests").splitlines()
    return Suite.of((name, git("show", f"{commit}:{name}")) for name in names if is_test_file(name))


def today() -> Suite:
    """The tests of the working tree."""
    files = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py"))
    return Suite.of((file, (ROOT / file).read_text(encoding="utf-8")) for file in files)


def is_test_file(name: str) -> bool:
    return name.rpartition("/")[2].startswith("test_") and name.endswith(".py")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def rows(text: str) -> dict[str, tuple[str, str]]:
    """The table: old to what and where."""
    lines = (line.split("\t") for line in text.splitlines()[1:])
    return {old: (what, where) for old, what, where in lines}


def mapped(old: Suite, new: Suite, by_hand: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """What became of each test; one that is not found has no place in it."""
    found = dict(by_hand)
    left = [test for test in old.sources if test not in found]
    went: dict[str, Counter[str]] = {}
    for test in left:
        went.setdefault(file_of(test), Counter()).update(file_of(one) for one in new.by_name.get(name_of(test), []))

    def nearness(test: str, place: str) -> tuple[bool, float, int]:
        return place == test, likeness(old.sources[test], new.sources[place]), went[file_of(test)][file_of(place)]

    for test in left:
        places = new.by_name.get(name_of(test), [])
        if places:
            place = places[0] if len(places) == 1 else max(places, key=partial(nearness, test))
            found[test] = ("kept" if place == test else "moved", place)
    taken = {place for _, place in found.values()}
    free = [place for place in new.sources if place not in taken and name_of(place) not in old.by_name]
    for test in left:
        place = max(free, key=partial(nearness, test), default="") if test not in found else ""
        if place and likeness(old.sources[test], new.sources[place]) >= ALIKE:
            found[test] = ("moved", place)
    return found


def likeness(one: str, other: str) -> float:
    matcher = difflib.SequenceMatcher(None, one.split(), other.split(), autojunk=False)
    return matcher.ratio() if matcher.real_quick_ratio() >= ALIKE and matcher.quick_ratio() >= ALIKE else 0.0


def name_of(test: str) -> str:
    return test.rpartition("::")[2]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def shortened(found: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """One row for what stays together."""
    homes: dict[str, Counter[tuple[str, str]]] = {}
    for test, (what, where) in found.items():
        if what in FOUND and test.partition("::")[2] == where.partition("::")[2]:
            homes.setdefault(file_of(test), Counter())[(what, file_of(where))] += 1
    short = {}
    for test, (what, where) in sorted(found.items()):
        home = homes.get(file_of(test))
        most = home.most_common(1)[0][0] if home else None
        if most == (what, file_of(where)) and test.partition("::")[2] == where.partition("::")[2]:
            short[f"{file_of(test)}::*"] = (what, f"{most[1]}::*")
        else:
            short[test] = (what, where)
    return short


def problems(old: Suite, new: Suite, table: dict[str, tuple[str, str]]) -> Iterator[str]:
    """What the table says wrong, or leaves out."""
    for test in old.sources:
        what, where = table.get(test) or table.get(f"{file_of(test)}::*") or ("", "")
        where = where.replace("::*", "::" + test.partition("::")[2])
        if not what:
            yield f"{test} has no place: find it and add a row"
        elif what in (*FOUND, "merged-into") and where not in new.sources:
            yield f"{test}: there is no {where}: run `python -m tools.map_tests --write` or correct the row"
        elif what not in (*FOUND, *WRITTEN):
            yield f"{test}: unknown word {what!r}"
    for test in table:
        if not test.endswith("::*") and test not in old.sources:
            yield f"{test} is no test of {BASE}: take the row out"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="find what was kept or moved, and write the table")
    arguments = parser.parse_args()
    old, new = at_commit(BASE), today()
    table = rows((ROOT / TABLE).read_text(encoding="utf-8"))
    if arguments.write:
        table = shortened(mapped(old, new, {test: row for test, row in table.items() if row[0] in WRITTEN}))
        lines = ["old\twhat\twhere", *("\t".join((test, *row)) for test, row in sorted(table.items()))]
        (ROOT / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    wrong = list(problems(old, new, table))
    for problem in wrong:
        print(problem)
    words = Counter(
        (table.get(test) or table.get(f"{file_of(test)}::*") or ("unmapped", ""))[0] for test in old.sources
    )
    print(
        f"{len(old.sources)} test functions of {BASE}: " + ", ".join(f"{n} {word}" for word, n in words.most_common())
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
