"""The checker of documented commands finds each that no test runs, and each entry of the table that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_commands
from tools.check_commands import DEFAULT, TABLE, commands_of_test
from tools.problem import ROOT

PAGE = """# A page

Type `gcore describe JOB`; `gcore list` names a verb.

```console
$ gcore up    # a cluster
$ gcore submit a.yaml \\
    --set flow.steps=2
$ helm install gcore
```

```python
import gcore

gcore.run("a.yaml")
```
"""
OTHER = "unit/test_other.py::test_other"
TABLE_TEXT = """
[[run]]
page = "README.md"
lines = ["gcore up"]
test = "unit/test_other.py::test_other"

[[not_run]]
lines = ["helm ..."]
why = "It needs a Kubernetes cluster."
"""
TESTS = {
    DEFAULT: 'THIS = "integration/cli/test_documented_commands.py"\ndef test_pages(): commands_run_by(THIS)\n',
    "unit/test_other.py": 'def test_other(): commands_run_by("unit/test_other.py::test_other")\n',
}
MAKEFILE = "setup: x\ntest-%: ## tests\nbench-%: setup\nVALUE := a\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of one page, on which all is right."""
    files = {"README.md": PAGE, TABLE: TABLE_TEXT, "Makefile": MAKEFILE, "tests/unit/store/test_a.py": ""}
    for path, text in {**files, **{f"tests/{path}": text for path, text in TESTS.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def found(root: Path) -> list[str]:
    return [str(problem) for problem in check_commands.check(root)]


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_each_command_has_one_owner_and_the_default_test_runs_what_nothing_else_names(root: Path) -> None:
    assert found(root) == []
    assert [command.text for command in commands_of_test(root, OTHER)] == ["gcore up    # a cluster"]
    here = commands_of_test(root, DEFAULT)
    assert [(command.kind, command.line) for command in here] == [("inline", 3), ("console", 7), ("python", 13)]


def test_a_test_without_lines_owns_the_rest_of_its_page(root: Path) -> None:
    change(root / TABLE, 'lines = ["gcore up"]\n', "")
    assert len(commands_of_test(root, OTHER)) == 4
    assert commands_of_test(root, DEFAULT) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (TABLE, '"gcore up"', '"gcore up", "gcore down"', f"{TABLE}:4: there is no command 'gcore down' on README.md"),
        (
            "README.md",
            "$ helm install gcore",
            "$ kubectl apply",
            f"{TABLE}:8: there is no command 'helm ...' on any page",
        ),
        (TABLE, '"helm ..."', '"helm ...", "gcore up"', "README.md:6: gcore up: tools/commands.toml names it twice"),
        (TABLE, "It needs a Kubernetes cluster.", "", f"{TABLE}:8: the reason '' says too little"),
        (TABLE, "unit/test_other.py::test_other", "unit/test_gone.py", "there is no file tests/unit/test_gone.py"),
        (
            "tests/unit/test_other.py",
            "def test_other",
            "def test_new",
            "tests/unit/test_other.py has no test test_other",
        ),
        (
            "tests/unit/test_other.py",
            "commands_run_by",
            "print",
            "does not call commands_run_by('unit/test_other.py::test_oth",
        ),
        (f"tests/{DEFAULT}", "commands_run_by(THIS)", "commands_run_by(THAT)", f"tests/{DEFAULT} does not call"),
        ("README.md", "```console\n$ gcore up", "```\n$ gcore up", "README.md:5: a block of the language ''"),
        (
            "README.md",
            "```console\n$ gcore up",
            "```text\n$ gcore up",
            "README.md:6: a command in a block of text: $ gcore up",
        ),
        ("README.md", "$ gcore up", "gcore up", "README.md:6: a console block begins with 'gcore up    # a cluster'"),
        ("README.md", "$ gcore up", "$ make gone\n$ gcore up", "README.md:6: the Makefile has no target gone"),
        ("README.md", "Type", "Type `make test-gone`,", "README.md:3: the Makefile has no target test-gone"),
        ("README.md", "$ gcore up", "$ python -m tools.gone\n$ gcore up", "README.md:6: there is no module tools.gone"),
        (
            "README.md",
            "$ gcore up",
            "$ python examples/gone.py\n$ gcore up",
            "README.md:6: there is no file examples/gone.py",
        ),
    ],
)
def test_a_fault_is_found_with_its_line(root: Path, path: str, old: str, new: str, message: str) -> None:
    change(root / path, old, new)
    assert [line for line in found(root) if message in line] != []


@pytest.mark.parametrize("target", ["setup", "test-store", "bench-engine"])
def test_a_target_of_the_makefile_or_of_its_patterns_is_right(root: Path, target: str) -> None:
    change(root / "README.md", "Type", f"Type `make {target} A=1`,")
    assert found(root) == []


def test_pages_of_the_repository_have_commands_of_each_kind() -> None:
    kinds = {command.kind for command in commands_of_test(ROOT, DEFAULT)}
    assert kinds == {"console", "inline", "python"}
